"""The nouns: where a sample is (Position, SourceLocation), what it is (Sample, Group), and how it goes (Status)."""

from __future__ import annotations

import copy
from enum import StrEnum
from itertools import groupby, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from asyncdata.core.identity import line_number, line_number_within
from asyncdata.core.plain_values import TEXT, from_builtins, to_builtins
from asyncdata.core.settings import prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.columns import Columns

Tokens = np.ndarray[Any, np.dtype[np.int32]]

_NOT_TRAINED = -100  # what losses ignore by default


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in the order D: row ``row`` of window ``window`` of epoch ``epoch``, all counted from 0."""

    epoch: int = 0
    window: int = 0
    row: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}:{self.window}:{self.row}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The position written ``E:W:R``.

        :raises ValueError: if the text is nothing of the kind.
        """
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"a position is written EPOCH:WINDOW:ROW, as 0:3:128; got {text!r}")

        return cls(*map(int, parts))


class SourceLocation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The location of a row: ``num_bytes`` bytes of ``path`` from ``byte_offset`` on, or its row ``row_number``.

    :ivar byte_offset: in the text, where the file is compressed; -1 where there is no text, as in Parquet.
    :ivar num_bytes: of the row, as JSON where it is no line; -1 for a row longer than ``max_row_bytes``.
    :ivar row_number: counted from 0; None in files of lines that can be read from any place.
    :ivar line: counted from 1, where it is known without looking for it; see :meth:`line_number`.
    """

    path: str
    byte_offset: int
    num_bytes: int
    row_number: int | None = None
    line: int | None = None

    def line_number(self) -> int | None:
        """The row's line number, counted from 1; None if the file has no lines.

        Nothing is indexed, so this reads the file up to the row (about 5 GB/s), but no part of it twice.

        :raises OSError: if the file cannot be read.
        """
        return line_number(self.path, self.byte_offset) if self.row_number is None else self.line

    def described(self, timeout_s: float) -> str:
        """The place as text, with the line if it can be counted in time: a file that is gone, or a disk that hangs,
        must not hide what is said about the row.
        """
        if self.row_number is not None:
            return f"{self.path} (row {self.row_number})"

        line = line_number_within(self.path, self.byte_offset, timeout_s)
        return f"{self.path}{'' if line is None else f':{line}'} (byte {self.byte_offset})"


class Status(StrEnum):
    """How far a rollout has come; the values are slime's."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


FINISHED = Status.COMPLETED, Status.TRUNCATED
"""Of a response that has come to its end."""


class SampleRange(msgspec.Struct, frozen=True, gc=False):
    """Samples ``[start, stop)`` of a chunk, delivered together, each as a group of ``group_size``.

    :ivar chunk: a :class:`~asyncdata.delivery.chunk.Chunk`: packed columns, from which fields are decoded.
    :ivar index: number of the first sample in the whole stream.
    :ivar group_index: number of the first group in the whole stream.
    """

    chunk: Any
    start: int
    stop: int
    index: int
    group_index: int
    group_size: int

    def samples(self) -> list[Sample]:
        """The samples. The hot line of the library: one C call makes a batch, and fields are decoded on first use."""
        return list(map(Sample, repeat(self), range((self.stop - self.start) * self.group_size)))

    def row(self, number: int) -> int:
        """The number in the chunk of this range's sample ``number``."""
        return self.start + number // self.group_size


def measured(samples: Sequence[Sample]) -> list[tuple[tuple[int, int, int], int, Sample]]:
    """Delivered samples, one a group: the place in D of each, its number of tokens, and the sample.

    They are read from the columns, a chunk at once: fields that are not asked for stay packed.
    """
    places: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for delivered, some in groupby(samples, _range_of):
        group = list(some)
        if delivered is None:  # made by hand
            places += [msgspec.structs.astuple(sample.position) for sample in group]  # type: ignore[arg-type]
            lengths += [len(sample.tokens) for sample in group]
        else:
            first = delivered.row(group[0]._number)  # noqa: SLF001 - this is Sample's own code
            places += delivered.chunk.places(first, first + len(group))
            lengths += delivered.chunk.lengths_of(first, first + len(group)).tolist()
    return list(zip(places, lengths, samples, strict=True))


_range_of = attrgetter("_range")


def drop_media(sample: Sample) -> None:
    """Let the sample's media go, which can be loaded again."""
    if getattr(sample.columns, "media", None) is not None:
        sample.columns = _declaring(sample.columns).without_media()


class _Lazy:
    """A field that is still packed in the sample's chunk. msgspec cannot encode it, so it cannot leak by mistake."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<not decoded yet>"


_LAZY: Any = _Lazy()


class Sample(msgspec.Struct, eq=False, gc=False):
    """One sample, and the results of its rollout.

    Fields that come from the row are decoded on first use. ``tokens`` is a read-only view, shared by the samples
    of a group; assign a new array to change it. All else belongs to this sample alone. Equality is identity.

    :ivar index: number of this sample in the run, from 0, across epochs and restarts.
    :ivar group_index: number of its group in the stream.
    :ivar prompt: the rendered text, or the row's own prompt where no chat template is applied.
    :ivar tokens: int32 array of shape (num_tokens,).
    :ivar labels: int32 array of shape (num_tokens,): the token where it is trained, -100 elsewhere. None where the
        tokenize function does not say.
    :ivar label: the row's label, any JSON value.
    :ivar metadata: the row's metadata.
    :ivar extra: other values: those that the tokenize function added, and those that the trainer wants to keep.
    :ivar columns: the arrays that the tokenize function declares (see :class:`~asyncdata.Column`), by name, read-only.
    :ivar position: its place in D; None for a sample made by hand.
    :ivar source: file, byte offset and length of its row; None for a sample made by hand.
    :ivar source_name: the name of its part, dotted where mixtures are nested; None if it is of no mixture.
    :ivar source_epoch: that part's own epoch; None if it is of no mixture.
    :ivar response_length: tokens of the response, counted by the rollout.
    :ivar rollout_log_probs: one log-probability per response token.
    """

    # The first two are given by position, in the one line that makes a batch: `SampleRange.samples`.
    _range: SampleRange | None = None
    _number: int = -1
    index: int | None = _LAZY
    group_index: int | None = _LAZY
    prompt: Any = _LAZY
    tokens: Tokens = _LAZY
    labels: Tokens | None = _LAZY
    label: Any = _LAZY
    metadata: dict[str, Any] = _LAZY
    extra: dict[str, Any] = _LAZY
    columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = _LAZY
    position: Position | None = _LAZY
    source: SourceLocation | None = _LAZY
    source_name: str | None = _LAZY
    source_epoch: int | None = _LAZY
    response: str = ""
    response_length: int = 0
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING

    def to_dict(self, form: int = TEXT) -> dict[str, Any]:
        """Every field as plain builtins (see ``asyncdata.core.plain_values``, also for forms other than this).

        :raises TypeError: for a value that no snapshot can hold; the message names it.
        """
        values = {name: getattr(self, name) for name in _FIELDS}
        if values["columns"] or getattr(values["columns"], "media", None):
            values["columns"] = _declaring(values["columns"]).to_dict()
        for name in ("position", "source"):
            values[name] = msgspec.to_builtins(values[name])
        return {
            name: value if type(value) in _PLAIN else to_builtins(value, f"$.{name}", form=form)
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The sample that :meth:`to_dict` wrote; fields it lacks have their defaults."""
        known = {name: from_builtins(values[name]) for name in _FIELDS if name in values}
        if known.get("columns"):
            from asyncdata.core.columns import Columns  # only where a function declares some

            known["columns"] = Columns.from_dict(known["columns"])
        for name, kind in (("position", Position), ("source", SourceLocation)):
            if known.get(name) is not None:
                known[name] = msgspec.convert(known[name], prepared(kind))
        if "status" in known:
            known["status"] = Status(known["status"])
        return cls(**known)

    def detach(self) -> None:
        """Copy all fields and release the chunk, which keeps hundreds of other samples in memory."""
        if self._range is not None:
            for name in _LAZY_FIELDS:
                getattr(self, name)
            self.tokens = self.tokens.copy()
            if self.columns:
                self.columns = copy.copy(_declaring(self.columns))
            self._range = None

    @property
    def is_detached(self) -> bool:
        """Whether it has no chunk: it was given back before, or is not from a loader."""
        return self._range is None

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Sample], tuple[dict[str, Any]]]:
        """Pickle and deep-copy by value, without the chunk."""
        return _from_fields, ({name: getattr(self, name) for name in _FIELDS},)

    def __repr__(self) -> str:
        where = f", position={self.position}" if self.position is not None else ""
        return f"Sample(index={self.index}, num_tokens={len(self.tokens)}, status={self.status.value!r}{where})"


Group = list[Sample]
"""The samples of one prompt, ``n_samples_per_prompt`` of them."""

_FIELDS = Sample.__struct_fields__[2:]
_PLAIN = frozenset((str, int, float, bool, type(None)))
_LAZY_FIELDS: dict[str, tuple[Callable[[SampleRange, int], Any], Callable[[], Any]]] = {
    # field: (its value from the range and the sample's number in it, its default in a sample made by hand)
    "index": (lambda samples, number: samples.index + number, lambda: None),
    "group_index": (lambda samples, number: samples.group_index + number // samples.group_size, lambda: None),
    "prompt": (lambda samples, number: samples.chunk.value("prompt", samples.row(number)), str),
    "tokens": (lambda samples, number: samples.chunk.tokens_of(samples.row(number)), lambda: np.empty(0, np.int32)),
    "labels": (lambda samples, number: _labels(samples.chunk, samples.row(number)), lambda: None),
    "label": (lambda samples, number: samples.chunk.value("label", samples.row(number)), lambda: None),
    "metadata": (lambda samples, number: samples.chunk.value("metadata", samples.row(number)) or {}, dict),
    "extra": (lambda samples, number: samples.chunk.value("extra", samples.row(number)) or {}, dict),
    "columns": (lambda samples, number: samples.chunk.arrays(samples.row(number)), dict),
    "position": (lambda samples, number: samples.chunk.position(samples.row(number)), lambda: None),
    "source": (lambda samples, number: samples.chunk.location(samples.row(number)), lambda: None),
    "source_name": (lambda samples, number: samples.chunk.part(samples.row(number))[0], lambda: None),
    "source_epoch": (lambda samples, number: samples.chunk.part(samples.row(number))[1], lambda: None),
}


def _labels(chunk: Any, row: int) -> Tokens | None:
    spans = chunk.value("spans", row)
    if spans is None:
        return None

    tokens = chunk.tokens_of(row)
    labels = np.full(len(tokens), _NOT_TRAINED, np.int32)
    for start, stop in spans:
        labels[start:stop] = tokens[start:stop]
    return labels


def _declaring(columns: dict[str, Any]) -> Columns:
    """The columns, which must say what they are.

    :raises TypeError: for a dict that a trainer has made.
    """
    from asyncdata.core.columns import Columns

    if not isinstance(columns, Columns):
        raise TypeError("sample.columns is what a tokenize function declares; put other values into sample.extra")

    return columns


def _from_fields(fields: dict[str, Any]) -> Sample:
    return Sample(**fields)


def _lazy_property(name: str) -> property:
    """A property over the Struct's own slot, filled on first use. So the constructor stays one C call."""
    slot = Sample.__dict__[name]
    from_range, by_hand = _LAZY_FIELDS[name]

    def get(sample: Sample) -> Any:
        value = slot.__get__(sample)
        if value is _LAZY:
            samples = sample._range  # noqa: SLF001 - this is Sample's own code
            value = by_hand() if samples is None else from_range(samples, sample._number)  # noqa: SLF001
            slot.__set__(sample, value)
        return value

    return property(get, slot.__set__)


for _name in _LAZY_FIELDS:
    setattr(Sample, _name, _lazy_property(_name))
