"""Pictures of Pillow as plain values: their pixels, bit by bit."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from asyncdata.core.plain_values import to_builtins

__all__ = ("IMAGE", "image_from_plain", "image_to_plain", "is_image")

IMAGE = "__image__"


def is_image(value: Any) -> bool:
    """Whether it is an image of Pillow. False if Pillow is not loaded."""
    return isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ()))


def image_to_plain(image: Any) -> list[Any]:
    """Mode, size, palette, pixels and notes of a picture.

    The notes (``info``: transparency, resolution ...) are those that a snapshot can hold. The file that it came from,
    and its format, are not kept: it comes back as a picture in memory.
    """
    pixels = image.tobytes()
    palette = None if image.palette is None else [image.palette.mode, bytes(image.palette.tobytes())]
    notes = {}
    for name, value in image.info.items():
        with suppress(TypeError):
            to_builtins({name: value})
            notes[name] = value
    return [image.mode, list(image.size), palette, pixels, notes]


def image_from_plain(
    mode: str, size: list[int], palette: list[Any] | None, pixels: bytes, notes: dict[str, Any]
) -> Any:
    """The picture that :func:`image_to_plain` was given.

    :raises ValueError: if Pillow is not installed.
    """
    try:
        pictures = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ValueError("it holds a picture, and Pillow is not installed") from error

    image = pictures.frombytes(mode, tuple(size), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info.update(notes)
    return image
