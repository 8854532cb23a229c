"""Columns of a sample beside its tokens: arrays of numbers, which a tokenize function declares.

A column travels under a key that says how its bytes are to be read, so whatever carries columns need not know it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

Array = np.ndarray[Any, np.dtype[Any]]

_MARK = "@"
"""Begins the key of a column of numbers. All others are JSON or text, and have the names of a sample's fields."""

_MEDIA = "@load"

BFLOAT16 = np.dtype(np.uint16, metadata={"dtype": "bfloat16"})
"""NumPy has no bfloat16: the upper half of a float32. ``to_torch`` makes ``torch.bfloat16`` of it."""

_DTYPES = frozenset(
    f"{kind}{bits}" for kind, sizes in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in sizes
) | {"bool", "bfloat16"}  # fmt: skip
_TAKEN = frozenset(
    {"input_ids", "tokens", "labels", "shifted_labels", "prompt", "label", "metadata", "extra", "position_ids"}
    | {"attention_mask", "seq_idx", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "num_padding", "rejected"}
)


FRAMES = "frames"
"""Stands among the columns that a load gives for the bytes that it takes beside them; it has no values."""


class Column(Description, frozen=True):
    """An array of numbers that a sample has beside its tokens, as a tokenize function declares it.

    A function declares its columns by an attribute, ``tokenize.columns = (Column("weights", "float32"),)``, and returns
    their values in its dict, by name: NumPy arrays, torch tensors, lists of numbers, or bytes. ``sample.columns[name]``
    is a read-only view. Collators give each column under its name.

    :ivar name: a Python identifier, none of the keys that a batch has anyway.
    :ivar dtype: as NumPy names it: ``int32``, ``float16``, ``bool``; or ``bfloat16``, which is given as float32, and
        is uint16 without torch.
    :ivar per: ``token``: one value for each token; rows of batches join and pad them as tokens. ``sample``: one value
        for each sample; a batch has an array with one for each of its documents. ``item``: any number of values; a
        batch has all of them end to end, and in ``<name>_counts`` (int64) how many of each document.
    :ivar shape: of one value; () is a number.
    :ivar pad: the number in padding, and in samples that lack the column.
    :ivar follows: ``tokens``, or ``labels``: where a collator shifts labels, the column is shifted with them.
    :ivar optional: a sample may lack the column. Otherwise a row without it is a bad row (AD425).
    :ivar phase: ``load``: the function's ``load`` makes it, shortly before the sample is delivered.
    :raises ConfigError: for a setting that cannot work.
    """

    name: str
    dtype: str
    per: Literal["token", "sample", "item"] = "token"
    shape: tuple[int, ...] = ()
    pad: float = 0
    follows: Literal["tokens", "labels"] = "tokens"
    optional: bool = False
    phase: Literal["plan", "load"] = "plan"

    def check(self) -> None:
        """Check that the name is free, that the numbers exist, and that padding is one of them."""
        if not self.name.isidentifier() or self.name in _TAKEN or self.name.endswith("_counts"):
            raise ConfigError(f"Column: the name {self.name!r} is none for a column; choose an identifier that is free")

        if self.dtype not in _DTYPES:
            raise ConfigError(f"Column {self.name}: there is no dtype {self.dtype!r}; there are {sorted(_DTYPES)}")

        if any(size < 1 for size in self.shape):
            raise ConfigError(f"Column {self.name}: shape={self.shape} has a size below 1")

        if self.per != "token" and self.follows == "labels":
            raise ConfigError(f'Column {self.name}: only a column per="token" can follow labels')

        if self.per == "item" and self.pad:
            raise ConfigError(f'Column {self.name}: per="item" is not padded, so it has no pad={self.pad}')

        kind = self.numpy.kind if self.dtype != "bfloat16" else "f"
        most = {"b": (0, 1), "f": (-np.inf, np.inf)}.get(kind) or (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
        if not most[0] <= self.pad <= most[1] or (kind != "f" and self.pad % 1):
            raise ConfigError(f"Column {self.name}: pad={self.pad} is no {self.dtype}")

    @property
    def key(self) -> str:
        """What it is carried under, from which :func:`declared` makes it again."""
        settings = msgspec.structs.astuple(self)
        settings = settings if self.phase == "load" else settings[:-1]  # as it was written before there were phases
        return _MARK + json.dumps(msgspec.to_builtins(settings), separators=(",", ":"))

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of its arrays."""
        return BFLOAT16 if self.dtype == "bfloat16" else np.dtype(self.dtype)

    def padding(self, number: int) -> Array:
        """So many values of padding: of shape (number, *shape)."""
        pad = bfloat16_bits(self.pad) if self.dtype == "bfloat16" else self.pad
        return np.full((number, *self.shape), pad, self.numpy)

    def zeros(self, count: int) -> Array:
        """So many values that are zero, read-only; of a column of samples, the one value."""
        array = np.zeros(self.shape if self.per == "sample" else (count, *self.shape), self.numpy)
        array.flags.writeable = False
        return array

    def num_bytes(self, count: int) -> int:
        """Bytes of so many values."""
        return count * self.numpy.itemsize * math.prod(self.shape)

    def encode(self, value: Any, num_tokens: int) -> bytes:
        """The bytes of a value.

        :raises TypeError, ValueError, OverflowError: if it is of another shape, or its numbers do not fit the dtype.
        """
        array = _array_of(value, self.numpy)
        if self.dtype == "bfloat16" and array.dtype != np.uint16:
            array = bfloat16_bits(_fitting(array, np.dtype(np.float32), self.name))
        array = _fitting(array, np.dtype(self.numpy.str), self.name)
        if self.per == "item" and not array.size:
            return b""

        number = {"token": [num_tokens], "sample": [], "item": list(array.shape[:1]) or [1]}[self.per]
        wanted = (*number, *self.shape)
        if array.shape != wanted:
            raise ValueError(f"{self.name} has the shape {array.shape}, and must have {wanted}")

        return array.tobytes()

    def decode(self, data: memoryview) -> Array:
        """A read-only view of the bytes of a value; a copy of them, if they do not lie as its dtype needs."""
        array = np.frombuffer(data, self.numpy.str)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        array = array.view(self.numpy)
        return array.reshape(self.shape if self.per == "sample" else (-1, *self.shape))


class MediaRef(NamedTuple):
    """Where the media of a sample come from.

    :ivar part: of a mixture; empty for a single source.
    :ivar file_id: the number of the row's file; ``offset`` and ``num_bytes``: the row's there.
    :ivar num_media: bytes that loading the media takes, at most.
    :ivar row: the row itself, if it cannot be read again.
    :ivar counts: how many values there are of each column; it is not kept where the media are let go.
    """

    part: str
    file_id: int
    offset: int
    num_bytes: int
    num_media: int
    row: bytes = b""
    counts: tuple[tuple[str, int], ...] = ()


class Columns(dict[str, Array]):
    """The arrays of a sample by name, each read-only.

    :ivar declared: the columns, by name.
    :ivar media: where columns of the phase ``load`` come from, so that they can be loaded again; None: there are none.
    """

    __slots__ = ("declared", "media")

    def __init__(self, arrays: dict[Column, Array], media: MediaRef | None = None) -> None:
        super().__init__({column.name: array for column, array in arrays.items()})
        self.declared = {column.name: column for column in arrays}
        self.media = media

    @property
    def lacks_media(self) -> bool:
        """Whether media are to be loaded again."""
        return self.media is not None and all(column.phase == "plan" for column in self.declared.values())

    def with_media(self, loaded: Columns, media: MediaRef | None) -> Columns:
        """These arrays, and the loaded ones."""
        both = self.declared | loaded.declared
        return Columns({column: (loaded if name in loaded else self)[name] for name, column in both.items()}, media)

    def without_media(self) -> Columns:
        """Only the arrays of the plan, and where the others come from."""
        kept = {column: self[name] for name, column in self.declared.items() if column.phase == "plan"}
        return Columns(kept, self.media)

    def to_dict(self) -> dict[str, Any]:
        """The arrays by the keys of their columns, and in place of media where they come from."""
        kept = self.without_media()
        media = {} if self.media is None else {_MEDIA: list(self.media[:-1])}
        return {column.key: kept[name] for name, column in kept.declared.items()} | media

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Columns:
        """What :meth:`to_dict` has made."""
        found, values = {}, dict(values)
        media = values.pop(_MEDIA, None)
        for key, array in values.items():
            array.flags.writeable = False
            found[declared(key)] = array.view(declared(key).numpy)
        return cls(found, None if media is None else MediaRef(*media))

    def __copy__(self) -> Columns:
        """Copy by value, with all that is known of the media."""
        made, args = self.__reduce__()
        found = made(*args)
        found.media = self.media
        return found

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Columns], tuple[dict[str, Any]]]:
        """Pickle and copy by value."""
        arrays = {column.key: self[name].copy() for name, column in self.declared.items()}
        return Columns.from_dict, (self.to_dict() | arrays,)


def decoded(values: dict[str, memoryview | None]) -> Columns:
    """The arrays of a sample.

    :param values: by the keys of their columns; empty where the sample lacks a column, or has no items.
    """
    columns = {declared(key): data for key, data in values.items() if data is not None}
    return Columns({column: column.decode(data) for column, data in columns.items() if data or column.per == "item"})


@lru_cache(maxsize=1024)
def declared(key: str) -> Column:
    """The column whose key this is."""
    return Column(**dict(zip(Column.__struct_fields__, _settings(key), strict=False)))


def _settings(key: str) -> list[Any]:
    name, dtype, per, shape, *rest = json.loads(key.removeprefix(_MARK))
    return [name, dtype, per, tuple(shape), *rest]


def declared_columns(function: Any) -> tuple[Column, ...]:
    """What a tokenize function declares.

    :raises ConfigError: if it is no list of columns, or names one twice.
    """
    found = getattr(function, "columns", ())
    if not isinstance(found, tuple | list) or not all(isinstance(column, Column) for column in found):
        raise ConfigError(
            f"AD420 the columns of a tokenize function are a tuple of asyncdata.Column, got {found!r:.200}"
        )

    if len({column.name for column in found}) < len(found):
        raise ConfigError(f"AD420 two columns have one name: {[column.name for column in found]}")

    return tuple(found)


def bfloat16_bits(values: Any) -> Array:
    """float32 as bfloat16, rounded to the nearest, half to even: uint16 of the same shape."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # a NaN must not be rounded to infinity
    found: Array = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return found


def _array_of(value: Any, dtype: np.dtype[Any]) -> Array:
    """The value as an array."""
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, dtype.str) if dtype.itemsize > 1 else np.frombuffer(value, np.uint8)

    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind == "f" and dtype == np.uint64:  # NumPy makes [0, 2**63] real numbers
        numbers = np.asarray(value, object)
        array = numbers.astype(dtype) if all(isinstance(number, int) for number in numbers.flat) else array
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which JAX has
        return array.view(np.uint16)

    if array.dtype.kind not in "biuf":
        raise TypeError(f"a value is an array of {array.dtype.name}; need numbers, as many in each row")

    return array


def _fitting(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """The numbers as ``dtype``. Real numbers may lose digits; whole ones must stay what they are."""
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)

    if array.dtype.kind == "f" and dtype.kind != "f":
        raise TypeError(f"{name} has real numbers, and its dtype is {dtype.name}")

    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    is_same = np.isfinite(found) | ~np.isfinite(array) if dtype.kind == "f" else found == array
    if not is_same.all():
        raise ValueError(f"{name} has {array[~is_same].flat[0]!r:.40}, which {dtype.name} cannot hold")

    return np.asarray(found)
