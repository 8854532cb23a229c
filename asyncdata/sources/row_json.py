"""Converts an example of Python objects to the JSON text of a row: one form for all sources that do not store JSON.

Runs without numpy, pyarrow and datasets: their scalars and arrays are recognized by their methods.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import uuid
from contextlib import suppress
from typing import Any

import msgspec

BYTES, PAIRS = "\0bytes", "\0pairs"
"""The only key of an object that stands for bytes, as base64, or for the pairs of a map: see :func:`python_value`."""

_MODES_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
_SCALARS = (str, int, float, bool, bytes, type(None))
_check_strictly = msgspec.json.Decoder(msgspec.Raw).decode


def encode_row(row: Any) -> bytes:
    """The JSON text of ``row``, as UTF-8 without a line end, in the order of its keys.

    ====================================  ==========================================================================
    Python                                JSON
    ====================================  ==========================================================================
    dict, list, tuple, str, int, bool     themselves; an integer keeps all its digits, a key that is a number is text
    float                                 shortest text that reads back the same; ``NaN``, ``Infinity``, ``-Infinity``
    date, time, datetime                  ISO 8601 text, with the offset of a zone
    timedelta                             seconds, a number
    Decimal, UUID                         text
    bytes                                 base64 text
    picture of Pillow                     ``{"bytes": ...}``: a PNG, or a TIFF where PNG has no such mode
    numpy scalar and array, and the like  what ``tolist()`` gives
    ====================================  ==========================================================================

    :raises TypeError: for a value that has no such form, and for a key that is neither text nor a plain number.
    """
    try:
        return _encode(row).encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate: as an escape it is JSON, and the worker says what is wrong with it
        return _encode_ascii(row).encode("ascii")


def python_value(value: Any) -> Any:
    """A decoded value with bytes, and with a list of tuples for each map, as pyarrow's ``to_pylist`` has them."""
    if type(value) is list:
        return [python_value(item) for item in value]

    if type(value) is not dict:
        return value

    if len(value) == 1:
        if BYTES in value:
            return base64.b64decode(value[BYTES])

        if PAIRS in value:
            return [(python_value(key), python_value(item)) for key, item in value[PAIRS]]

    return {key: python_value(item) for key, item in value.items()}


def without_padding(value: Any, *, is_inner: bool = False) -> Any:
    """A value of Arrow, without the fields of objects in lists and maps that are null.

    An Arrow struct has one set of fields for all rows, so that an object has the fields of others, too, as null.
    """
    if type(value) is dict:
        fields = ((key, item) for key, item in value.items() if item is not None or not is_inner)
        return {key: without_padding(item, is_inner=is_inner) for key, item in fields}

    if type(value) is tuple:  # a key and an item of a map, whose nulls are no padding
        return value[0], without_padding(value[1], is_inner=True)

    if type(value) is not list or type(next((item for item in value if item is not None), None)) in _SCALARS:
        return value

    return [without_padding(item, is_inner=True) for item in value]


def json_value(text: Any) -> Any:
    """What a JSON text stands for, to be encoded as it is; text that is no JSON, and what is no text, unchanged."""
    for check in (_check_strictly, json.loads) if isinstance(text, str) else ():
        with suppress(ValueError, RecursionError):
            check(text)
            return msgspec.Raw(text.replace("\n", " ").encode())

    return text


def _plain(value: Any) -> Any:
    """A JSON value for a value that ``json`` does not support."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()

    if isinstance(value, datetime.timedelta):
        return value.total_seconds()

    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))

    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")

    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)

    if hasattr(value, "getexif"):  # a picture of Pillow
        as_png = value.mode in _MODES_OF_PNG
        written = io.BytesIO()
        value.save(
            written, "PNG" if as_png else "TIFF", exif=value.getexif(), **({"compress_level": 1} if as_png else {})
        )
        return {"bytes": base64.b64encode(written.getvalue()).decode("ascii")}

    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no form in JSON")

    return to_list()


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
