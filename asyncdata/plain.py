"""Values a trainer may put into a sample, as plain builtins that JSON, msgpack and torch.save can all hold, and
back.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np

__all__ = ("from_builtins", "to_builtins")

_ARRAY, _BYTES, _TUPLE, _DICT = "__ndarray__", "__bytes__", "__tuple__", "__dict__"
_DTYPE = re.compile(r"[<>=|][a-zA-Z][0-9]{1,9}(\[[0-9a-zA-Z]{1,9}\])?", re.ASCII)
"""Of one number. NumPy compiles other texts as Python, and this one may come from anybody."""


def to_builtins(value: Any, path: str = "$") -> Any:
    """``value`` as dicts with text keys, lists, text, numbers, booleans and None, without loss.

    Arrays become base64 text of their bytes, so that a group of long responses costs little.

    :raises TypeError: for anything else; the message names the place, as in ``$.extra.images[0]``.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return _plain(value)

    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.item()

    if isinstance(value, list):
        return [to_builtins(item, f"{path}[{number}]") for number, item in enumerate(value)]

    if isinstance(value, dict):
        return _dict_to_builtins(value, path)

    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {_ARRAY: [value.dtype.str, list(value.shape), data]}

    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: base64.b64encode(bytes(value)).decode("ascii")}

    if isinstance(value, tuple):
        return {_TUPLE: to_builtins(list(value), path)}

    raise TypeError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a snapshot cannot hold")


def _plain(value: Any) -> Any:
    """Enums and other subclasses as their base, which is all that a decoder can give back.

    ``str(value)`` would ask the subclass, and an enum of text answers with its member's name.
    """
    if isinstance(value, str):
        return str.__str__(value)

    if value is None or isinstance(value, bool):
        return value

    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _dict_to_builtins(value: dict[Any, Any], path: str) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{path} has the key {key!r}; only text keys survive JSON")

    result = {_plain(key): to_builtins(item, f"{path}.{key}") for key, item in value.items()}
    return {_DICT: result} if any(key.startswith("__") for key in result) else result


def from_builtins(value: Any) -> Any:
    """The value that :func:`to_builtins` was given. Arrays come back writable.

    :raises Exception: of any kind, where ``value`` is something else.
    """
    if isinstance(value, list):
        return [from_builtins(item) for item in value]

    if not isinstance(value, dict):
        return value

    if _ARRAY in value:
        dtype, shape, data = value[_ARRAY]
        if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
            raise ValueError(f"{dtype!r:.80} is no type of an array's numbers")

        return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()

    if _BYTES in value:
        return base64.b64decode(value[_BYTES])

    if _TUPLE in value:
        return tuple(from_builtins(value[_TUPLE]))

    return {key: from_builtins(item) for key, item in value.get(_DICT, value).items()}
