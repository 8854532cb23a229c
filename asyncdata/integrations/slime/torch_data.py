"""What needs torch: slime's own checkpoint of its data source, and tensors (and images) in the records of samples.

slime's checkpoint is a file of ``torch.save``, of which only plain data is ever read.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import SnapshotError
from asyncdata.core.files import open_regular, replace_file, sync_folder
from asyncdata.core.plain_values import MAX_DEPTH, to_builtins

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

_TENSOR, _IMAGE, _KEPT = "__tensor__", "__image__", "__kept__"
_OURS = frozenset((_TENSOR, _IMAGE, _KEPT))
ATOMS = frozenset((str, int, float, bool, type(None)))
"""Immutable types, which two samples may share."""


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


# Tensors and images of records


def tensors_to_plain(value: Any, path: str, depth: int = 0) -> Any:
    """``value`` with each tensor in it as ``{"__tensor__": [dtype, shape, bytes]}``, bytes being a uint8 array.

    A Pillow image becomes ``{"__image__": [...]}``.

    The bits of a tensor's numbers are stored; its device and ``requires_grad`` are not. The bytes of a contiguous
    tensor on the CPU are not copied.

    :param path: the path of the value, for errors.
    :raises TypeError: for a tensor without a plain block of numbers: a sparse, quantized, or meta tensor.
    """
    if isinstance(value, dict | list | tuple) and depth <= MAX_DEPTH:  # to_builtins refuses deeper values
        return _items_to_plain(value, path, depth + 1)

    # Without torch imported, there are no tensors, and without Pillow no images.
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return {_TENSOR: _numbers(value, path)}

    if isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ())):
        return {_IMAGE: _pixels(value)}

    return value


def _items_to_plain(value: dict[Any, Any] | list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
    if isinstance(value, dict):
        packed = {key: tensors_to_plain(item, f"{path}.{key}", depth) for key, item in value.items()}
        return {_KEPT: packed} if _OURS & packed.keys() else packed

    if ATOMS.issuperset(map(type, value)):
        return value

    items = [tensors_to_plain(item, f"{path}[{number}]", depth) for number, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _numbers(tensor: torch.Tensor, path: str) -> list[Any]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{path} is a tensor without a plain block of numbers ({kind}), which a snapshot cannot hold")

    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array = dense.reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), array]


def tensors_from_plain(value: Any) -> Any:
    """The inverse of :func:`tensors_to_plain`, with tensors on the CPU."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return _tensor(*value[_TENSOR])

        if _IMAGE in value:
            return _image(*value[_IMAGE])

        value = value.get(_KEPT, value)
    is_plain = isinstance(value, list | tuple) and ATOMS.issuperset(map(type, value))
    return value if is_plain or not isinstance(value, dict | list | tuple) else with_items(value, tensors_from_plain)


def _tensor(dtype: str, shape: list[int], numbers: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    if not numbers.size:
        return torch.empty(shape, dtype=kind)  # an empty array cannot be viewed as another type

    return torch.from_numpy(numbers).view(kind).reshape(shape)


def _pixels(image: Any) -> list[Any]:
    """Mode, size, palette, pixels and notes of an image.

    The notes (``info``: transparency, resolution ...) are those that a snapshot can store. Its file name and format are
    not stored: it is restored as an image in memory.
    """
    pixels = image.tobytes()
    palette = None if image.palette is None else [image.palette.mode, bytes(image.palette.tobytes())]
    notes = {}
    for name, value in image.info.items():
        with suppress(TypeError):
            to_builtins({name: value})
            notes[name] = value
    return [image.mode, list(image.size), palette, pixels, notes]


def _image(mode: str, size: list[int], palette: list[Any] | None, pixels: bytes, notes: dict[str, Any]) -> Any:
    """The image that :func:`_pixels` was called with.

    :raises ValueError: if Pillow is not installed.
    """
    try:
        pictures = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ValueError("it contains an image, and Pillow is not installed") from error

    image = pictures.frombytes(mode, tuple(size), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info.update(notes)
    return image


def with_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A dict, list or tuple with each item changed."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}

    items = map(change, value)
    return tuple(items) if isinstance(value, tuple) else list(items)
