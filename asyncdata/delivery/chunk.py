"""A chunk: the samples of consecutive positions, in the packed columns that a worker sent."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import msgspec
import numpy as np

from asyncdata.core.errors import BadRowError, ConfigError
from asyncdata.core.messages import (
    EXCLUDED_REASON,
    JOURNAL_REASON,
    Column,
    Data,
    RowError,
    Tokenized,
    is_elsewhere,
    num_expected_elsewhere,
)
from asyncdata.core.types import Position, SourceLocation, Tokens
from asyncdata.delivery.bad_rows import BadRowPolicy, bad_row_error
from asyncdata.order.order import GOLDEN, MASK, Words, mix, mix_one

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.columns import MediaRef
    from asyncdata.delivery.mixture import MergeRecord


Numbers = np.ndarray[Any, Any]

_GOLDEN, _ONE = np.uint64(GOLDEN), np.uint64(1)
_NUM_KEPT = 4096
_FIRST_STEPS = np.arange(_NUM_KEPT, dtype=np.uint64) * _GOLDEN


class Sums(NamedTuple):
    """Running sums over a chunk's samples; item ``n`` of each is over the first ``n`` samples, modulo 2^64.

    :ivar positions: of ``p``.
    :ivar order: of :attr:`positions`.
    :ivar tokens: of ``p * c``.
    """

    positions: memoryview
    order: memoryview
    tokens: memoryview


def sums_of(
    first: tuple[int, int, int], token_ends: Numbers, kept: Numbers | None = None, token_sums: Numbers | None = None
) -> Sums:
    """The running sums over samples of one window.

    :param first: epoch, window and row from which rows are counted.
    :param token_ends: end offset of each sample's tokens, all tokens end to end: unsigned, shape (num_samples,).
    :param kept: row of each sample, counted from ``first``: int32, shape (num_samples,); None: every row is a sample.
    :param token_sums: CRC-32 of each sample's tokens as little-endian int32: uint32, shape (num_samples,); None: not
        computed.
    """
    num_samples = len(token_ends)
    base = np.uint64(_base(*first[:2]) + first[2] * GOLDEN & MASK)
    places = mix(_steps(num_samples) + base if kept is None else kept.astype(np.uint64) * _GOLDEN + base)
    contents = token_ends * _GOLDEN
    contents[1:] -= contents[:-1]  # the number of tokens of each
    if token_sums is not None:
        contents += token_sums
    sums = np.zeros((3, num_samples + 1), np.uint64)
    positions, order, tokens = sums
    np.add.accumulate(places, out=positions[1:])
    np.add.accumulate(positions, out=order)
    places |= _ONE
    contents *= places
    np.add.accumulate(contents, out=tokens[1:])
    return Sums(positions.data, order.data, tokens.data)


@lru_cache(maxsize=16)
def _base(epoch: int, window: int) -> int:
    return mix_one(mix_one(epoch + 1) + window & MASK)


def _steps(number: int) -> Words:
    """0, GOLDEN, 2 GOLDEN ..."""
    return _FIRST_STEPS[:number] if number <= _NUM_KEPT else np.arange(number, dtype=np.uint64) * _GOLDEN


class StreamDigest(msgspec.Struct, frozen=True):
    """The samples of the stream that were delivered: which, in which order, and with which tokens.

    Each sample has two 64-bit words: ``p``, a mix of its position, and ``c``, a mix of its number of tokens and, if
    asked for, the CRC-32 of its tokens. The digest has three sums, modulo 2^64:

    - the sum of all ``p``: which positions were delivered;
    - the sum of the running sums of ``p``: in which order, as in Fletcher's checksum (J. G. Fletcher, "An arithmetic
      checksum for serial transmissions", 1982);
    - the sum of all ``p * c``, with ``p`` made odd: which tokens, a multilinear hash (D. Lemire and O. Kaser, "Strongly
      universal string hashing is fast", 2014).

    The sums over a part of a chunk follow from running sums, so it makes no difference where batches, chunks and runs
    are cut. The digest finds faults, not attacks: it is not a cryptographic hash.

    :ivar of: ``positions``: the sums cover positions and numbers of tokens; ``tokens``: the tokens, too.
    :ivar num_samples: samples that the digest covers. The ``n`` samples of a group count once.
    :ivar positions: the sum that tells which positions were delivered.
    :ivar order: the sum that tells in which order.
    :ivar tokens: the sum that tells with which tokens; None after a run was resumed with another ``of``.
    """

    of: str = "positions"
    num_samples: int = 0
    positions: int = 0
    order: int = 0
    tokens: int | None = 0

    def plus(self, sums: Sums, start: int, stop: int) -> Self:
        """The digest after samples ``[start, stop)`` of a chunk."""
        number, before = stop - start, self.positions - sums.positions[start]
        order = number * before + sums.order[stop] - sums.order[start]
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens + sums.tokens[stop] - sums.tokens[start] & MASK
        return type(self)(
            self.of, self.num_samples + number, before + sums.positions[stop] & MASK, self.order + order & MASK, tokens
        )

    def resumed(self, of: str) -> Self:
        """The digest of a run that resumes with ``of``. With another one than before, the sum of tokens is lost."""
        return self if of == self.of else msgspec.structs.replace(self, of=of, tokens=None)


Ids = np.ndarray[Any, np.dtype[np.uint64]]
"""Ids of rows, by which the outcome memory knows them, and an epoch excludes them."""

NO_IDS: Ids = np.empty(0, np.uint64)

Marks = np.ndarray[Any, np.dtype[np.int8]]
"""What is to be done with each row of a window: 0: it is delivered; or one of these."""

WAS_SERVED, IS_EXCLUDED, IS_IN_JOURNAL = 1, 2, 3
"""It was a group before it was excluded, and keeps its number; it is left out; the same, as it killed workers."""

_REASONS = {IS_EXCLUDED: EXCLUDED_REASON, IS_IN_JOURNAL: JOURNAL_REASON}
_OFFSET_BITS = 44
_NOTHING = np.empty(0, np.int64)
_TEXTS = {"prompt": "prompt_text"}
"""Column -> the column that may hold its texts as plain text instead of JSON."""


class Origin(Protocol):
    """Where the rows of a chunk come from: its window. Rows are counted from the window's first."""

    def location(self, row: int) -> SourceLocation:
        """The row's location."""
        ...

    def key(self, row: int) -> tuple[int, int]:
        """The number of the row's file, and its offset there."""
        ...

    def keys(self, first: int, stop: int) -> tuple[Any, Any]:
        """The numbers of the files of the rows ``[first, stop)``, and their offsets there."""
        ...


class Drop(NamedTuple):
    """Rows of a chunk that yield no sample, and why. ``rows`` is int32, in ascending order.

    :ivar part: in a chunk of a mixture, the number of the part's chunk that has the rows; ``own_rows``: theirs there.
    """

    reason: str
    rows: np.ndarray[Any, np.dtype[np.int32]]
    part: int = 0
    own_rows: np.ndarray[Any, Any] | None = None


class Note(NamedTuple):
    """Rows of a chunk that are kept and counted under a name. ``rows`` is int32, in ascending order."""

    name: str
    rows: np.ndarray[Any, np.dtype[np.int32]]


class BadRow(msgspec.Struct, frozen=True, eq=False):
    """A bad row, at its place in the order.

    :ivar chunk: of its source, from whose first row the error counts.
    :ivar stops: whether it may not be passed over.
    """

    chunk: Chunk
    error: RowError
    policy: BadRowPolicy
    stops: bool

    @property
    def location(self) -> SourceLocation:
        """The row's location."""
        return self.chunk.row_location(self.error.row)

    def to_error(self) -> BadRowError:
        """Its error. Reads the file up to the row, to count lines."""
        return bad_row_error(self.location, self.error, shows_row=self.policy.shows_row)

    @property
    def key(self) -> tuple[int, int]:
        """The number of its file, and its offset there."""
        return self.chunk.row_key(self.error.row)


class Chunk:
    """Rows ``[first.row, first.row + num_rows)`` of one window, tokenized.

    If the row index counted the tokens before, every row is a sample: bad rows and rows of other ranks have no tokens.

    :ivar num_samples: rows that were kept; the chunk's samples are numbered from 0.
    :ivar drops: rows that yield no sample, by reason.
    :ivar notes: rows that are kept and counted in the statistics, by name.
    :ivar errors: bad rows, in their order.
    :ivar ends_epoch: whether this is the last chunk of its epoch.
    :ivar num_bytes: memory of the columns.
    :ivar source: the name of its part of a mixture; empty for a single source, and where several parts are merged.
    :ivar sums: running sums for the digest of the stream.
    :ivar record: of a chunk of a mixture, from which parts its rows come; else None.
    :ivar excluded: the samples that are left out, int64, ascending; ``served``: those that are only counted, as well.
    """

    record: MergeRecord | None = None

    __slots__ = (
        "_columns",
        "_expected",
        "_kept",
        "_origin",
        "_token_ends",
        "_tokens",
        "drops",
        "ends_epoch",
        "errors",
        "excluded",
        "first",
        "notes",
        "num_bytes",
        "num_rows",
        "num_samples",
        "served",
        "source",
        "sums",
    )

    def __init__(
        self, reply: Tokenized, first: Position, num_rows: int, origin: Origin, *, ends_epoch: bool, source: str = ""
    ) -> None:
        self._expected = _expected_of(reply) if reply.expected else None
        if self._expected is not None:
            reply = _with_every_row(reply, *self._expected)
        self.first = first
        self.num_rows = num_rows
        self.ends_epoch, self.source = ends_epoch, source
        self.errors: list[RowError] = reply.errors
        self.drops = [Drop(reason, np.frombuffer(rows, np.int32)) for reason, rows in reply.drops.items()]
        self.notes = [Note(name, np.frombuffer(rows, np.int32)) for name, rows in reply.notes.items()]
        self.excluded: np.ndarray[Any, np.dtype[np.int64]] = _NOTHING
        self.served: np.ndarray[Any, np.dtype[np.int64]] = _NOTHING
        self._origin = origin
        self._tokens = _tokens_of(reply)
        self._token_ends = _ends_of(reply.token_ends)
        self._kept = np.frombuffer(reply.kept, np.int32) if reply.kept else None
        self._columns = {
            name: (memoryview(column.data), _ends_of(column.ends)) for name, column in reply.columns.items()
        }
        self.num_samples = len(self._token_ends)
        self.num_bytes = len(reply.tokens) + sum(len(column.data) for column in reply.columns.values())
        token_sums = np.frombuffer(reply.token_sums, np.uint32) if reply.token_sums else None
        ends: np.ndarray[Any, Any] = self.token_ends
        if self._expected is not None:  # as if the tokens of all ranks were here
            ends = np.cumsum(self._expected[0], dtype=np.uint64)
        self.sums = sums_of(msgspec.structs.astuple(first), ends, self._kept, token_sums)

    @property
    def ours(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Whether this rank tokenizes each row; None if it tokenizes all."""
        return None if self._expected is None else self._expected[1]

    def rows_of(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """The rows of the samples ``[start, stop)``, counted from the chunk's first row."""
        return np.arange(start, stop) if self._kept is None else self._kept[start:stop]

    @property
    def token_ends(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """For each sample, the tokens of the chunk up to its end."""
        return np.frombuffer(self._token_ends, np.uint32)

    def lengths_of(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Number of tokens of each of the samples ``[start, stop)``: int64."""
        lengths = self.token_ends[start:stop].astype(np.int64)
        lengths[1:] -= lengths[:-1].copy()
        lengths[:1] -= self._token_ends[start - 1] if start else 0
        return lengths

    def row_of(self, sample: int) -> int:
        """The row of sample ``sample``, counted from the chunk's first row."""
        return sample if self._kept is None else int(self._kept[sample])

    def samples_before(self, row: int) -> int:
        """How many samples come from rows before ``row``."""
        return min(row, self.num_samples) if self._kept is None else int(np.searchsorted(self._kept, row))

    def leave_out(self, marks: Marks) -> None:
        """Leave out rows, and count them as dropped, whatever else is known of them.

        :param marks: of each row of the chunk.
        """
        of_samples, is_in = marks[self.rows_of(0, self.num_samples)], marks <= WAS_SERVED
        self.excluded, self.served = np.flatnonzero(of_samples > WAS_SERVED), np.flatnonzero(of_samples == WAS_SERVED)
        if not is_in.all():
            self.errors = [error for error in self.errors if is_in[error.row]]
            self.drops = [drop._replace(rows=drop.rows[is_in[drop.rows]]) for drop in self.drops]
            self.notes = [note._replace(rows=note.rows[is_in[note.rows]]) for note in self.notes]
            for mark in np.unique(marks[~is_in]).tolist():
                self.drops.append(Drop(_REASONS[mark], np.flatnonzero(marks == mark).astype(np.int32)))

    def num_tokens(self, start: int, stop: int) -> int:
        """Number of tokens of the samples ``[start, stop)``, including those that another rank tokenizes."""
        if self._expected is not None:
            return int(self._expected[0][start:stop].sum(dtype=np.int64))

        if start == stop:
            return 0

        return self._token_ends[stop - 1] - (self._token_ends[start - 1] if start else 0)

    def tokens_of(self, sample: int) -> Tokens:
        """The sample's tokens: a read-only int32 view of shape (num_tokens,)."""
        ends = self._token_ends
        return self._tokens[(ends[sample - 1] if sample else 0) : ends[sample]]

    def value(self, column: str, sample: int) -> Any:
        """A column's JSON value, decoded at each call, so that the caller may change it; None if there is none."""
        if raw := self._raw(column, sample):
            return _decode(raw)

        text = self._raw(_TEXTS[column], sample) if column in _TEXTS else None
        return str(text, "utf-8") if text else None

    def arrays(self, sample: int) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of sample ``sample``, by name: read-only views."""
        raw = {key: self._raw(key, sample) for key in self._columns if key.startswith("@")}
        if not raw:
            return {}

        from asyncdata.core.columns import decoded  # only where a tokenize function declares columns

        return decoded(raw)

    @property
    def has_every_row(self) -> bool:
        """Whether every row is a sample, as the row index counted the tokens before."""
        return self._expected is not None

    def media_ref(self, sample: int, num_media: int) -> MediaRef:
        """Where the media of sample ``sample`` of this source come from, which have so many bytes."""
        from asyncdata.core.columns import MediaRef

        row = self.row_of(sample)
        text = bytes(self._raw("row", sample) or b"")
        return MediaRef(self.source, *self.row_key(row), self.row_location(row).num_bytes, num_media, text)

    def bad_sample(self, sample: int, error: RowError, policy: BadRowPolicy, stops: bool) -> BadRow:
        """Sample ``sample`` of this source as a bad row."""
        return BadRow(self, msgspec.structs.replace(error, row=self.row_of(sample)), policy, stops)

    def _raw(self, column: str, sample: int) -> memoryview | None:
        if column not in self._columns:
            return None

        data, ends = self._columns[column]
        return data[(ends[sample - 1] if sample else 0) : ends[sample]]

    def position(self, sample: int) -> Position:
        """The place in D of sample ``sample``."""
        return Position(self.first.epoch, self.first.window, self.first.row + self.row_of(sample))

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The places in D of the samples ``[start, stop)``."""
        epoch, window, first = msgspec.structs.astuple(self.first)
        rows = range(start, stop) if self._kept is None else self._kept[start:stop].tolist()
        return [(epoch, window, first + row) for row in rows]

    def location(self, sample: int) -> SourceLocation:
        """The location of the row of sample ``sample``."""
        return self.row_location(self.row_of(sample))

    def row_location(self, row: int) -> SourceLocation:
        """The location of row ``row``, counted from the chunk's first row."""
        return self._origin.location(self.first.row + row)

    def file_ids(self) -> Any:
        """The number of each row's file, int64 of shape (num_rows,)."""
        return self._origin.keys(self.first.row, self.first.row + self.num_rows)[0]

    def rows_by_reason(self) -> dict[str, Any]:
        """The rows that yield no sample, by reason."""
        found: dict[str, Any] = {drop.reason: drop.rows for drop in self.drops}
        for error in self.errors:
            found.setdefault(f"bad row {error.code}", []).append(error.row)
        return found

    def row_key(self, row: int) -> tuple[int, int]:
        """The number of row ``row``'s file, and its offset there."""
        return self._origin.key(self.first.row + row)

    def part(self, sample: int) -> tuple[str, int] | tuple[None, None]:
        """The part of sample ``sample``, and that part's own epoch; None if this is no mixture."""
        chunk, _ = self.own(sample)
        return (chunk.source, chunk.first.epoch) if chunk.source else (None, None)

    # What differs where samples of several parts are merged.

    def own(self, sample: int) -> tuple[Chunk, int]:
        """The chunk of the sample's source, and the sample's number there."""
        return self, sample

    def own_error(self, number: int) -> tuple[Chunk, int]:
        """The chunk of the source of bad row ``number``, and the row there."""
        return self, self.errors[number].row

    def own_drop(self, drop: Drop) -> tuple[Chunk, np.ndarray[Any, Any]]:
        """The chunk of the source of a drop, and the drop's rows there."""
        return self, drop.rows

    def bad_rows(self, policy: BadRowPolicy, num_passed: int) -> list[BadRow]:
        """What is done with each bad row.

        :param num_passed: bad rows before this chunk.
        """
        return [
            BadRow(self, error, policy, policy.stops_after(num_passed + number))
            for number, error in enumerate(self.errors)
        ]


def _tokens_of(reply: Tokenized) -> Tokens:
    """The tokens, read-only and aligned, as users' code may rely on it. Only unaligned (small) replies are copied."""
    tokens = np.frombuffer(reply.tokens, np.int32)
    if not tokens.flags.aligned:
        tokens = tokens.copy()
        tokens.flags.writeable = False
    return tokens


def _ends_of(data: Data) -> memoryview:
    """The uint32 values of ``data``. Reading single values is faster from a memoryview than from an array."""
    return memoryview(data).cast("I")


def _decode(raw: memoryview) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # NaN and lone surrogates, which our reader accepts because slime's does
        return json.loads(bytes(raw))


Int32 = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def _expected_of(reply: Tokenized) -> tuple[Int32, Bools]:
    """The number of tokens of each row, and whether this rank tokenizes it."""
    expected = np.frombuffer(reply.expected, np.int32)
    is_ours = ~is_elsewhere(expected)
    return np.where(is_ours, expected, num_expected_elsewhere(expected)), is_ours


def _with_every_row(reply: Tokenized, expected: Int32, is_ours: Bools) -> Tokenized:
    """The reply with a sample for every row. Rows of this rank with an unexpected number of tokens are bad rows."""
    ends = np.frombuffer(reply.token_ends, np.uint32)
    kept = np.frombuffer(reply.kept, np.int32) if reply.kept else np.arange(len(ends))
    lengths = np.zeros(len(expected), np.int64)
    lengths[kept] = np.diff(ends, prepend=np.uint32(0))
    is_wrong = is_ours & (lengths != expected)
    is_wrong[[error.row for error in reply.errors]] = False
    if is_wrong.any():
        reply = _without(reply, kept, lengths, expected, is_wrong)
        lengths[is_wrong] = 0
    elif len(kept) == len(expected):
        return reply

    columns = {
        name: Column(column.data, _filled(column.ends, kept, len(expected))) for name, column in reply.columns.items()
    }
    token_ends = np.cumsum(lengths).astype(np.uint32).tobytes()
    return msgspec.structs.replace(reply, token_ends=token_ends, kept=b"", columns=columns)


def _without(reply: Tokenized, kept: Any, lengths: Any, expected: Int32, is_wrong: Bools) -> Tokenized:
    """The reply without the tokens of the wrong rows: they become errors, and are neither drops nor notes."""
    tokens = np.frombuffer(reply.tokens, np.int32)[np.repeat(~is_wrong[kept], lengths[kept])]
    errors = [
        RowError(row, "AD424", _other_tokens(int(lengths[row]), int(expected[row])))
        for row in np.flatnonzero(is_wrong).tolist()
    ]
    return msgspec.structs.replace(
        reply,
        tokens=tokens.tobytes(),
        drops=_outside(reply.drops, is_wrong),
        errors=sorted([*reply.errors, *errors], key=_row_of),
        notes=_outside(reply.notes, is_wrong),
    )


def _outside(rows_by_name: dict[str, Data], is_wrong: Bools) -> dict[str, Data]:
    """The rows of each name that are not wrong; names without such a row are left out."""
    left: dict[str, Data] = {}
    for name, data in rows_by_name.items():
        rows = np.frombuffer(data, np.int32)
        left[name] = rows[~is_wrong[rows]].tobytes()
    return {name: rows for name, rows in left.items() if rows}


def _row_of(error: RowError) -> int:
    return error.row


def _other_tokens(num_tokens: int, num_expected: int) -> str:
    return (
        f"the row has {num_tokens or 'no'} tokens, and had {num_expected} when they were counted: the tokenize "
        "function does not do the same each time, or it has changed and its version has not; or the file has changed"
    )


def _filled(ends: Data, kept: Any, num_rows: int) -> bytes:
    """End offset of each row's value; rows that are not kept have an empty value."""
    sizes = np.zeros(num_rows, np.int64)
    sizes[kept] = np.diff(np.frombuffer(ends, np.uint32), prepend=np.uint32(0))
    return np.cumsum(sizes).astype(np.uint32).tobytes()


def row_ids(file_ids: Any, offsets: Any) -> Ids:
    """The ids of rows: 20 bits of the file's number, and 44 of the offset there. uint64, of the same shape.

    :raises ConfigError: if one of them needs more bits.
    """
    files, places = np.asarray(file_ids, np.uint64), np.asarray(offsets, np.uint64)
    if files.size and (int(files.max()) >> (64 - _OFFSET_BITS) or int(places.max()) >> _OFFSET_BITS):
        raise ConfigError("AD480 the outcome memory knows files up to number 2**20, and 2**44 bytes of each")

    return (files << np.uint64(_OFFSET_BITS)) | places


def in_repeats(ids: Ids, repeats: Iterable[Sequence[int]]) -> Ids:
    """These ids, ascending, and those of the same rows in files of ``repeats``: the numbers of one file, ascending. Ids
    of such a file have its last number.
    """
    found = [ids]
    for numbers in repeats:
        of_file = ids[ids >> np.uint64(_OFFSET_BITS) == numbers[-1]]
        found += [of_file - np.uint64(numbers[-1] - number << _OFFSET_BITS) for number in numbers[:-1]]
    return np.sort(np.concatenate(found)) if len(found) > 1 else ids


def is_excluded(ids: Ids, excluded: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of ``ids`` are in ``excluded``, which is ascending; bool of the same shape."""
    if not len(excluded):
        return np.zeros(len(ids), np.bool_)

    places = np.minimum(excluded.searchsorted(ids), len(excluded) - 1)
    found: np.ndarray[Any, np.dtype[np.bool_]] = excluded[places] == ids
    return found
