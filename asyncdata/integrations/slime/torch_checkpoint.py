"""slime's own checkpoint of its data source: a file of ``torch.save``, of which only plain data is ever read."""

from __future__ import annotations

import importlib.util
import io
import os
from typing import Any

from asyncdata.core.atomic_file import replace_file, sync_folder
from asyncdata.core.errors import SnapshotError
from asyncdata.core.regular_file import open_regular

__all__ = ("encode", "is_available", "read", "write")


def is_available() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def encode(state: dict[str, Any]) -> bytes:
    """What ``torch.save`` writes.

    :param state: values that a snapshot can store; torch can save all of them.
    """
    import torch

    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def write(path: str, content: bytes) -> None:
    """Write what :func:`encode` returned, atomically.

    :raises SnapshotError: if it cannot be written; the previous file is unchanged.
    """
    try:
        replace_file(os.path.abspath(path), [content], keep=1)
        sync_folder(os.path.abspath(path))
    except OSError as error:
        raise SnapshotError(f"AD601 {path} was not written: {error}") from error


def read(path: str) -> dict[str, Any]:
    """The state in the file.

    :raises SnapshotError: if it is not such a file, or contains more than plain data.
    """
    import torch

    try:
        with open_regular(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no error class for files that it cannot read
        raise SnapshotError(
            f"AD602 {path} cannot be loaded: {_reason(error)}; only plain data is read, as anything else could run code"
        ) from error

    if not isinstance(state, dict):
        raise SnapshotError(f"AD602 {path} cannot be loaded: it holds a {type(state).__name__}, not slime's state")

    return state


def _reason(error: Exception) -> str:
    """The line of torch's long message that says what is wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "Unpickler error" in line), lines[0])
