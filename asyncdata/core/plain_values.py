"""Values a trainer may put into a sample, as plain builtins that JSON, msgpack and torch.save can all hold, and
back.
"""

from __future__ import annotations

import base64
import re
from binascii import a2b_base64
from typing import Any

import msgspec
import numpy as np

MAX_DEPTH = 200
"""Lists and dicts in one another. More could be written down, but not surely be read again: decoders recurse."""

BLOCK_BYTES = 1 << 16
"""Arrays and bytes from this size on can be kept as they are, and need not become text before they are written."""

SHARED_BYTES = 1 << 20
"""From this size on not even a copy is made: it would take longer than all else that is done with a group."""

TEXT, BLOCKS, PACKED = 0, 1, 2
"""The form of arrays and bytes."""

_ARRAY, _BYTES, _TUPLE, _DICT = "__ndarray__", "__bytes__", "__tuple__", "__dict__"
_ATOMS = frozenset((str, int, float, bool, type(None)))
_NUMBERS = list[int | float | bool | None]
_DTYPE = re.compile(r"[<>=|][a-zA-Z][0-9]{1,9}(\[[0-9a-zA-Z]{1,9}\])?", re.ASCII)
"""Of one number. NumPy compiles other texts as Python, and this one may come from anybody."""


class Block:
    """The bytes of a large array: from 1 MiB on where they lie, and else a copy.

    :ivar data: one dimension of bytes, contiguous. What is written into an array of 1 MiB or more later is seen here.
    """

    __slots__ = ("data",)

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def to_text(self) -> str:
        """As base64, which is what JSON can hold."""
        return base64.b64encode(self.data).decode("ascii")


def to_builtins(value: Any, path: str = "$", *, form: int = TEXT, depth: int = 0) -> Any:
    """``value`` as dicts with text keys, lists, text, numbers, booleans and None, without loss.

    Arrays become base64 text of their bytes, so that a group of long responses costs little.

    :param form: ``BLOCKS``: have a :class:`Block` in place of the text for arrays and bytes from 64 KiB on. Arrays from
        1 MiB on are not copied; all else is. ``PACKED``: what only :func:`packed` can write.
    :param depth: how deep in a value this one is.
    :raises TypeError: for anything else, and for what is nested more than 200 deep; the message names the place, as in
        ``$.extra.images[0]``.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return _plain(value)

    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.item()

    if depth > MAX_DEPTH:
        raise TypeError(f"{path[:40]}... is nested more than {MAX_DEPTH} deep, which a snapshot cannot hold")

    if isinstance(value, list):
        return _list_to_builtins(value, path, form, depth)

    if isinstance(value, dict):
        return _dict_to_builtins(value, path, form, depth)

    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else memoryview(b"")
        return {_ARRAY: [value.dtype.str, list(value.shape), _data(numbers, form)]}

    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: _data(memoryview(bytes(value)), form)}  # bytes(...) copies what can be changed

    if isinstance(value, tuple):
        return {_TUPLE: to_builtins(list(value), path, form=form, depth=depth)}

    raise TypeError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a snapshot cannot hold")


def packed(values: list[dict[str, Any]]) -> bytes | None:
    """As one piece, what :func:`to_builtins` made of values in the form ``PACKED``; None where only JSON can hold it:
    lone surrogates and integers of over 64 bits.
    """
    try:
        return msgspec.msgpack.encode(values)
    except (UnicodeEncodeError, OverflowError):
        return None


def unpacked(record: str | bytes | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What :func:`packed` was given, from the bytes or their base64 text; builtins as they are."""
    data = a2b_base64(record, strict_mode=True) if isinstance(record, str) else record
    found: list[dict[str, Any]] = msgspec.msgpack.decode(data) if isinstance(data, bytes) else data
    return found


def _atoms(values: list[Any]) -> list[Any] | None:
    """A copy of a list that holds nothing but text, numbers, booleans and None; else None."""
    if values and type(values[0]) in (int, float):
        try:  # five times as fast as a look at each type; subclasses of int become int
            return msgspec.convert(values, _NUMBERS)
        except msgspec.ValidationError:
            pass
    return values.copy() if _ATOMS.issuperset(map(type, values)) else None


def _data(data: memoryview, form: int) -> str | Block | memoryview:
    if form == PACKED:
        return data

    if form == TEXT or data.nbytes < BLOCK_BYTES:
        return Block(data).to_text()

    return Block(data if data.nbytes >= SHARED_BYTES else memoryview(bytes(data)))


def _plain(value: Any) -> Any:
    """Enums and other subclasses as their base, which is all that a decoder can give back.

    ``str(value)`` would ask the subclass, and an enum of text answers with its member's name.
    """
    if isinstance(value, str):
        return str.__str__(value)

    if value is None or isinstance(value, bool):
        return value

    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def _list_to_builtins(value: list[Any], path: str, form: int, depth: int) -> list[Any]:
    if (atoms := _atoms(value)) is not None:
        return atoms

    return [to_builtins(item, f"{path}[{number}]", form=form, depth=depth + 1) for number, item in enumerate(value)]


def _dict_to_builtins(value: dict[Any, Any], path: str, form: int, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{path} has the key {key!r}; only text keys survive JSON")

    result = {
        _plain(key): to_builtins(item, f"{path}.{key}", form=form, depth=depth + 1) for key, item in value.items()
    }
    return {_DICT: result} if any(key.startswith("__") for key in result) else result


def from_builtins(value: Any, blocks: memoryview | None = None) -> Any:
    """The value that :func:`to_builtins` was given. Arrays come back writable.

    :param blocks: writable memory, in which a :class:`Block` that was written as ``[offset, length]`` is found. Arrays
        are views of it.
    :raises Exception: of any kind, where ``value`` is something else.
    """
    if isinstance(value, list):
        if (atoms := _atoms(value)) is not None:
            return atoms

        return [from_builtins(item, blocks) for item in value]

    if not isinstance(value, dict):
        return value

    if _ARRAY in value:
        dtype, shape, data = value[_ARRAY]
        if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
            raise ValueError(f"{dtype!r:.80} is not a dtype of numbers")

        return np.frombuffer(_bytes_of(data, blocks), dtype=dtype).reshape(shape)

    if _BYTES in value:
        return bytes(_bytes_of(value[_BYTES], blocks))

    if _TUPLE in value:
        return tuple(from_builtins(value[_TUPLE], blocks))

    return {key: from_builtins(item, blocks) for key, item in value.get(_DICT, value).items()}


def _bytes_of(data: Any, blocks: memoryview | None) -> bytearray | memoryview:
    """In memory that may be written to."""
    if isinstance(data, str | bytes):
        return bytearray(base64.b64decode(data) if isinstance(data, str) else data)

    start, length = data
    if blocks is None or not 0 <= start <= start + length <= len(blocks):
        raise ValueError("bytes lie outside of their file")

    return blocks[start : start + length]
