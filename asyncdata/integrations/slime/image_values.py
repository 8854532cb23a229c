"""Pillow images as plain values, with exact pixels."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from asyncdata.core.plain_values import to_builtins

__all__ = ("IMAGE", "image_from_plain", "image_to_plain", "is_image")

IMAGE = "__image__"


def is_image(value: Any) -> bool:
    """Whether it is a Pillow image. False if Pillow is not imported."""
    return isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ()))


def image_to_plain(image: Any) -> list[Any]:
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


def image_from_plain(
    mode: str, size: list[int], palette: list[Any] | None, pixels: bytes, notes: dict[str, Any]
) -> Any:
    """The image that :func:`image_to_plain` was called with.

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
