"""Pictures of a row: what names them, their size by their header, and their pixels."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.pictures.remote import allowed, fetched, without_query
from asyncdata.tokenization.rows import RowFault, json_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.tokenization.pictures.settings import Processor

_ORIENTATION, _SWAPS_SIDES = 274, 5
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_KEYS = ("image", "image_url", "url", "path", "bytes", "base64")


class Picture(NamedTuple):
    """A picture: its name for errors, its path, address or bytes, and what the row says of it."""

    name: str
    path: str = ""
    url: str = ""
    data: bytes | None = None
    value: Any = None


def picture_of(value: Any, name: str, settings: Processor) -> Picture:
    """What a row says of a picture: a path, an address (``data:``, ``file:``, ``http:`` or ``https:``), or an object
    with one of them.

    An object ``{"bytes": ..., "path": ...}`` is how Hugging Face stores pictures; sources give bytes as base64 text.

    :raises RowFault: AD457, for anything else.
    """
    if isinstance(value, dict):
        given = [(key, value[key]) for key in _KEYS if value.get(key)]
        if not given:
            raise RowFault(
                "AD457", f"{name} is an object of {', '.join(map(ascii, value)) or 'nothing'}; need one of {_KEYS}"
            )

        key, inner = min(given, key=lambda item: item[0] not in ("bytes", "base64"))
        return (
            Picture(name, data=_decoded(inner, name), value=value)
            if key in ("bytes", "base64")
            else picture_of(inner, name, settings)
        )

    if not isinstance(value, str):
        raise RowFault("AD457", f"{name} must be a path, an address or an object, got {json_type(value)}")

    if value.startswith("data:"):
        return Picture(name, data=_decoded(value.partition(",")[2], name), value=value)

    scheme = _SCHEME.match(value)
    if scheme is None:
        return Picture(name, path=_path(value, name, settings.media_root), value=value)

    if scheme[1].lower() in ("http", "https"):
        return Picture(name, url=allowed(value, name, settings), value=value)

    path = value[scheme.end() :]
    if scheme[1].lower() != "file" or not path.startswith("/"):
        raise RowFault(
            "AD457",
            f"{name} is at {without_query(value)[:200]!r}; pictures are read from paths, from file:///path without a "
            "host, and by http(s) from Processor(allowed_hosts=...): download it, mount its store, or give an address "
            "of https",
        )

    return Picture(name, path=_path(path, name, settings.media_root), value=value)


def held(picture: Picture, settings: Processor) -> Picture:
    """The picture with its bytes, if it is remote: what is read of it twice is then the same.

    :raises RowFault: AD457, if it cannot be fetched.
    """
    return picture._replace(data=fetched(picture.url, picture.name, settings)) if picture.url else picture


def _decoded(text: Any, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise RowFault("AD457", f"{name} is not base64 text: {error}") from None


def _path(path: str, name: str, root: str | None) -> str:
    if root is None:
        return path

    found = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([found, os.path.realpath(root)]) != os.path.realpath(root):
        raise RowFault("AD457", f"{name} is at {path!r}, which is outside of media_root={root!r}")

    return found


def size_of(picture: Picture, settings: Processor) -> tuple[int, int]:
    """Height and width of the picture as it is turned, by its header.

    :raises RowFault: AD457, if it cannot be read, or is beyond a limit.
    """
    with _opened(picture, settings) as image:
        width, height = image.size
        turn = image.getexif().get(_ORIENTATION, 1)
    return (width, height) if turn >= _SWAPS_SIDES else (height, width)


def turned(picture: Picture, settings: Processor) -> Any:
    """The picture in RGB, turned as it says.

    :raises RowFault: AD457, as above, or if its pixels cannot be decoded.
    """
    from PIL import ImageOps

    with _opened(picture, settings) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _opened(picture: Picture, settings: Processor) -> Iterator[Any]:
    """The picture as Pillow opens it; any error within the block is the row's."""
    from PIL import Image, UnidentifiedImageError

    where = without_query(picture.url) if picture.url else picture.path
    what = f"{picture.name} ({where or 'bytes of the row'})"
    if picture.data is None:
        picture = held(picture, settings)
    try:
        num_bytes = os.path.getsize(picture.path) if picture.data is None else len(picture.data)
        if num_bytes > settings.max_bytes:
            raise RowFault("AD457", f"{what} has {num_bytes:,} bytes, more than max_bytes={settings.max_bytes:,}")

        with Image.open(picture.path if picture.data is None else io.BytesIO(picture.data)) as image:
            width, height = image.size
            if not 0 < width * height <= settings.max_pixels:
                raise RowFault("AD457", f"{what} has {width} x {height} pixels; max_pixels={settings.max_pixels:,}")

            if max(width, height) > settings.max_aspect * min(width, height):
                raise RowFault("AD457", f"{what} is {width} x {height}, more than {settings.max_aspect} to 1")

            yield image
    except (RowFault, MemoryError):
        raise
    except UnidentifiedImageError:
        raise RowFault("AD457", f"{what} cannot be read: it is no picture that Pillow knows") from None
    except Exception as error:  # Pillow's readers raise what their formats suggest
        raise RowFault("AD457", f"{what} cannot be read: {error!r:.200}") from error
