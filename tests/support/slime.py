"""slime's own code, from the folder that ASYNCDATA_SLIME names: what ours is compared with."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "ASYNCDATA_SLIME"


def slime_folder() -> Path:
    """A checkout of slime. Skips the test where there is none."""
    folder = Path(os.environ.get(VARIABLE) or "/no folder")
    if not (folder / "slime" / "utils" / "data.py").is_file():
        pytest.skip(f"nothing to compare with: {VARIABLE} names no checkout of slime")

    return folder


def slime_module(name: str) -> ModuleType:
    """slime's module ``name``, as ``utils.data``. It is not left in ``sys.modules``, where ours would find it."""
    for needed in ("torch", "ray"):
        pytest.importorskip(needed, reason=f"slime needs {needed}")
    return _load(str(slime_folder()), f"slime.{name}")


@cache
def _load(folder: str, name: str) -> ModuleType:
    with slime_importable(folder):
        return importlib.import_module(name)


_loaded: dict[str, ModuleType] = {}


@contextlib.contextmanager
def slime_importable(folder: str) -> Iterator[None]:
    """``import slime`` works, and gives the same modules each time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(folder)
        if importlib.util.find_spec("httpx") is None:
            stack.enter_context(_stand_in("httpx", AsyncClient=object))  # slime's client, never called
        sys.modules.update(_loaded)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
                _loaded[name] = sys.modules.pop(name)


@contextlib.contextmanager
def _stand_in(name: str, **attributes: object) -> Iterator[None]:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(attributes)
    try:
        yield
    finally:
        del sys.modules[name]
