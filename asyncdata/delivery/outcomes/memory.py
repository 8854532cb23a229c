"""The memory of outcomes as a value that is replayed from its records: no file, no lock and no clock."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence  # noqa: TC003 - msgspec reads the annotations
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.settings import Count  # noqa: TC001 - msgspec reads the annotations
from asyncdata.delivery.chunk import is_excluded
from asyncdata.delivery.outcomes.policy import OutcomeTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncdata.delivery.chunk import Ids
    from asyncdata.delivery.outcomes.policy import Policy

__all__ = ("BASE", "ENTRY", "MAX_SCORE", "OutcomeMemory", "OutcomeState", "Record", "RowReport", "RowTable")

MAX_SCORE = 1e30
"""Larger scores, of either sign, are refused: their sums could not be stored."""

ENTRIES, EXCLUDED, BASE, KEYED = b"S", b"X", b"B", b"K"
_OLD_ENTRIES = b"E"
_IS_COMPLETE = 1 << 15
_OF_REPLAY = 1 << 14
"""A mark of earlier versions, whose mixtures could have a part that served rows of another part again."""
_MAX_PENDING_BYTES = 1 << 20

Table = np.ndarray[Any, Any]


def _row(total: str, num_earlier: int = 0) -> np.dtype[Any]:
    earlier = [("earlier", "<f8", (num_earlier,))] if num_earlier else []
    return np.dtype(
        [("count", "<u4"), ("total", total), ("last_total", total), ("epoch", "<u4"), ("last_count", "<u2"), *earlier]
    )


def _entry(total: str) -> np.dtype[Any]:
    return np.dtype([("id", "<u8"), ("attempts", "<u8"), ("total", total), ("epoch", "<u4"), ("word", "<u2")])


ROW = _row("<f8")
"""What a row has beside its id: all scores, and those of ``epoch``, the last one that has any.

For a policy of several epochs, also the means of those before, the latest first.
"""

ENTRY = _entry("<f8")
"""New scores of a row in an epoch: those of the attempts ``64 * word + i`` of which bit i is set, as their sum."""

OLD_ROW, OLD_ENTRY = _row("<f4"), _entry("<f4")
"""The same in files of before, whose sums had the precision of a float32."""

_MIN_FRESH = 1024


class RowReport(NamedTuple):
    """Scores of a row in an epoch.

    :ivar scores: pairs of an attempt, its number among the samples of the row, and its score; None: it has none.
    :ivar source: the part of the mixture that delivered it, if it is one.
    :ivar key: which of several rewards it is; empty: scores have no key.
    """

    row_id: int
    epoch: int
    scores: Sequence[tuple[int, float | None]]
    source: str = ""
    key: str = ""


class Record(NamedTuple):
    """A change of the memory.

    :ivar kind: ``S``: an array of :data:`ENTRY`; ``E``: of ``OLD_ENTRY``; ``X``: the rows that an epoch excludes;
        ``B``: a whole memory; ``K``: one of these, of the reward that it names.
    """

    kind: bytes
    payload: bytes

    def of(self, key: str) -> Record:
        """The record as one of the reward ``key``; the same without a key."""
        return Record(KEYED, msgspec.msgpack.encode((key, self.kind, self.payload))) if key else self

    def opened(self) -> tuple[str, Record]:
        """The reward of which it is, and the record that :meth:`of` was called on.

        :raises SnapshotError: if it is no record; the message is the reason alone.
        """
        if self.kind != KEYED:
            return "", self

        try:
            key, *fields = msgspec.msgpack.decode(self.payload, type=tuple[str, bytes, bytes])
        except ValueError as error:
            raise SnapshotError(f"a record in it cannot be read: {error}") from error

        return key, Record(*fields)


class _Base(msgspec.Struct, array_like=True):
    ids: bytes
    rows: bytes
    open: dict[int, bytes]
    excluded: dict[int, bytes]


class _Excluded(msgspec.Struct, array_like=True):
    epoch: int
    rows: bytes


class OutcomeState(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a moment: itself, or where it is in its file.

    :ivar memory: the memory as base64 text; None: it is in the file, unless that is not needed.
    :ivar by_key: the same of each of several rewards.
    :ivar num_bytes: bytes of the file.
    :ivar digest: of these bytes, BLAKE2b of 16 bytes in hex digits.
    :ivar decided: epochs whose exclusions the memory has and a restart needs.
    :ivar num_rows: rows in the memory.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before.
    :ivar num_late: scores of an earlier epoch than the last one of their row.
    :ivar num_skipped: scores that were None.
    """

    memory: str | None = None
    by_key: dict[str, str] = {}
    num_bytes: Count = 0
    digest: str = ""
    decided: list[Count] = []
    num_rows: Count = 0
    num_scores: Count = 0
    num_repeated: Count = 0
    num_late: Count = 0
    num_skipped: Count = 0


class RowTable:
    """Rows by their ids. Most are in one pair of arrays, in ascending order; new ones are added to a second pair.

    :param ids: uint64, ascending. An array of its own, as numpy searches only an array without gaps quickly.
    :param rows: of :data:`ROW`, or with earlier means, of the same shape; it is written to.
    """

    def __init__(self, ids: Ids | None = None, rows: Table | None = None) -> None:
        self._ids = np.empty(0, np.uint64) if ids is None else ids
        self._rows = np.empty(0, ROW) if rows is None else rows
        self._places: dict[int, int] = {}
        self._fresh = self._blank(_MIN_FRESH)

    def _blank(self, num_rows: int) -> Table:
        return _without_scores(num_rows, self._rows.dtype)

    def __len__(self) -> int:
        return len(self._ids) + len(self._places)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, without that of the index of the newest ones."""
        return self._ids.nbytes + self._rows.nbytes + self._fresh.nbytes

    def find(self, row_id: int) -> Any:
        """The row, which may be written to; None if it is not known."""
        place = self._places.get(row_id)
        if place is not None:
            return self._fresh[place]

        place = int(self._ids.searchsorted(np.uint64(row_id)))
        return self._rows[place] if place < len(self._ids) and int(self._ids[place]) == row_id else None

    def add(self, row_id: int) -> Any:
        """A new row, which may be written to until the next call."""
        if len(self._places) >= max(_MIN_FRESH, len(self._ids) // 16):
            self._merge()
        place = len(self._places)
        if place == len(self._fresh):
            self._fresh = np.concatenate((self._fresh, self._blank(place)))
        self._places[row_id] = place
        return self._fresh[place]

    def _merge(self) -> None:
        if not self._places:
            return

        ids = np.concatenate((self._ids, np.array(list(self._places), np.uint64)))
        order = np.argsort(ids, kind="stable")
        rows = np.concatenate((self._rows, self._fresh[: len(self._places)]))
        self._ids, self._rows = ids[order], rows[order]
        self._fresh, self._places = self._blank(_MIN_FRESH), {}

    def arrays(self) -> tuple[Ids, Table]:
        """All ids, ascending, and their rows, which change with the next score."""
        self._merge()
        return self._ids, self._rows

    def table(self) -> OutcomeTable:
        """The rows as policies see them."""
        ids, rows = self.arrays()
        count, last = rows["count"].astype(np.int64), rows["last_count"].astype(np.int64)
        mean, last_mean = rows["total"] / np.maximum(count, 1), rows["last_total"] / np.maximum(last, 1)
        earlier = tuple(rows["earlier"].T.copy()) if "earlier" in (rows.dtype.names or ()) else ()
        return OutcomeTable(ids.copy(), count, mean, last_mean, rows["epoch"].astype(np.int64), earlier)


def _without_scores(num_rows: int, kind: np.dtype[Any]) -> Table:
    rows = np.zeros(num_rows, kind)
    if "earlier" in (kind.names or ()):
        rows["earlier"] = math.nan
    return rows


class OutcomeMemory:
    """The outcomes of rows, and the rows that epochs exclude.

    The same records give the same memory, bit for bit.

    :param keeps_records: keep what changes, for a file.
    :param num_earlier: of a row, the means of so many epochs before its last one are remembered, too.
    :ivar excluded: by epoch, the ids of the rows that it excludes, ascending.
    :ivar pending: the records that no file has yet, oldest first.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before, and were not counted again.
    :ivar num_late: scores of an earlier epoch than the row's last one, which were not counted.
    :ivar num_skipped: scores that were None.
    """

    def __init__(self, *, keeps_records: bool = False, num_earlier: int = 0) -> None:
        self._num_earlier = num_earlier
        self.rows = RowTable(rows=np.empty(0, _row("<f8", num_earlier)))
        self.excluded: dict[int, Ids] = {}
        self.pending: list[Record] = []
        self.num_scores = self.num_repeated = self.num_late = self.num_skipped = 0
        self._keeps_records = keeps_records
        self._open: dict[int, int] = {}  # reported attempts of rows of whose last epoch some are missing
        self._num_pending_bytes = 0

    # What changes it.

    def report(self, reports: Iterable[RowReport], attempts: int) -> int:
        """Count scores, each attempt of a row in an epoch once; return how many were new.

        :param attempts: of a row in an epoch. After the last of them, what was reported is remembered as one bit.
        """
        entries: list[tuple[int, int, float, int, int]] = []
        before = self.num_scores
        for report in reports:
            for entry in self._entries(report, attempts):
                self._count(*entry)
                entries.append(entry)
        if entries:
            self._add(Record(ENTRIES, np.array(entries, ENTRY).tobytes()))
        return self.num_scores - before

    def decide(self, epoch: int, policy: Policy) -> Ids:
        """The rows that ``epoch`` excludes from now on, by what was reported until now."""
        table = self.rows.table()
        excluded = table.ids[policy(table, epoch)] if len(table.ids) else table.ids
        self.excluded[epoch] = excluded
        self._add(Record(EXCLUDED, msgspec.msgpack.encode(_Excluded(epoch, self._bits(excluded)))))
        return excluded

    def forget_decisions(self, first: int, stop: int | None = None) -> None:
        """Keep the decisions of the epochs ``[first, stop)`` only: they were delivered, or are decided anew."""
        kept = {e: ids for e, ids in self.excluded.items() if e >= first and (stop is None or e < stop)}
        self.excluded = kept  # one assignment, as others may read it now

    def _entries(self, report: RowReport, attempts: int) -> list[tuple[int, int, float, int, int]]:
        row = self.rows.find(report.row_id)
        last = -1 if row is None else int(row["epoch"])
        scores = [(attempt, score) for attempt, score in report.scores if score is not None]
        self.num_skipped += len(report.scores) - len(scores)
        if report.epoch < last:
            self.num_late += len(scores)
            return []

        seen = self._open.get(report.row_id, -1) if report.epoch == last else 0  # -1: all, as it is complete
        new: dict[int, float] = {}
        for attempt, score in scores:
            if seen == -1 or seen >> attempt & 1 or attempt in new:
                self.num_repeated += 1
            else:
                new[attempt] = score
        if not new:
            return []

        bits = sum(1 << attempt for attempt in new)
        is_complete = (seen | bits).bit_count() >= attempts
        words = list(words_of(bits))
        return [
            (
                report.row_id,
                word,
                math.fsum(score for attempt, score in new.items() if attempt // 64 == number),
                report.epoch,
                number | (_IS_COMPLETE if is_complete and number == words[-1][0] else 0),
            )
            for number, word in words
        ]

    def _count(self, row_id: int, word: int, total: float, epoch: int, number: int) -> None:
        row = self.rows.find(row_id)
        is_new = row is None
        if row is None:
            row = self.rows.add(row_id)
        is_later = is_new or epoch > row["epoch"]
        if is_later:
            if self._num_earlier and not is_new:
                row["earlier"][:] = (row["last_total"] / row["last_count"], *row["earlier"][:-1])
            row["epoch"], row["last_total"], row["last_count"] = epoch, 0.0, 0
        count = word.bit_count()
        row["count"] += count
        row["total"] += total
        row["last_total"] += total
        row["last_count"] += count
        self.num_scores += count
        if number & _IS_COMPLETE:
            self._open.pop(row_id, None)
        else:
            self._open[row_id] = (0 if is_later else self._open.get(row_id, 0)) | word << 64 * number

    # Records.

    def _add(self, record: Record) -> None:
        if not self._keeps_records:
            return

        self.pending.append(record)
        self._num_pending_bytes += len(record.payload)
        if self._num_pending_bytes > _MAX_PENDING_BYTES + self.rows.num_bytes:  # no state was taken for long
            self.pending[:] = [self.base()]
            self._num_pending_bytes = 0

    def written(self, records: Sequence[Record]) -> None:
        """A file has these records, which were pending. Those that have become a whole memory since stay pending."""
        if records and self.pending[0] is records[0]:
            del self.pending[: len(records)]
        self._num_pending_bytes = sum(len(record.payload) for record in self.pending)

    def base(self) -> Record:
        """The whole memory as one record."""
        ids, rows = self.rows.arrays()
        base = _Base(
            ids.tobytes(),
            rows.tobytes(),
            _packed(self._open),
            {epoch: self._bits(ids) for epoch, ids in self.excluded.items()},
        )
        return Record(BASE, msgspec.msgpack.encode(base))

    def apply(self, record: Record) -> None:
        """Repeat what a record says.

        :raises SnapshotError: if it is no record; the message is the reason alone.
        """
        try:
            if record.kind in {ENTRIES, _OLD_ENTRIES}:
                kind = ENTRY if record.kind == ENTRIES else OLD_ENTRY
                entries = np.frombuffer(record.payload, kind)
                if (entries["word"] & _OF_REPLAY).any():
                    raise SnapshotError("it has scores of a Replay, which mixtures no longer have")

                for row_id, word, total, epoch, number in entries.tolist():
                    self._count(row_id, word, total, epoch, number)
            elif record.kind == EXCLUDED:
                excluded = msgspec.msgpack.decode(record.payload, type=_Excluded)
                self.excluded[excluded.epoch] = self._ids(excluded.rows)
            elif record.kind == BASE:
                self._become(msgspec.msgpack.decode(record.payload, type=_Base))
            else:
                raise SnapshotError(f"it has a record of an unknown kind, {record.kind!r}")
        except (ValueError, OverflowError, zlib.error) as error:
            raise SnapshotError(f"a record in it cannot be read: {error}") from error

    def _become(self, base: _Base) -> None:
        ids = np.frombuffer(base.ids, np.uint64)
        num_earlier = (len(base.rows) // max(len(ids), 1) - ROW.itemsize) // 8  # by another policy; -1: of before
        found = np.frombuffer(base.rows, OLD_ROW if num_earlier < 0 else _row("<f8", num_earlier))
        rows = _without_scores(len(found), _row("<f8", self._num_earlier))
        for name in ROW.names or ():
            rows[name] = found[name]
        if (num_shared := min(num_earlier, self._num_earlier)) > 0:
            rows["earlier"][:, :num_shared] = found["earlier"][:, :num_shared]
        if len(ids) != len(rows) or (ids[1:] <= ids[:-1]).any():
            raise ValueError("its rows are not in ascending order")

        self.rows = RowTable(ids, rows)
        self.num_scores = int(rows["count"].sum(dtype=np.int64))
        self._open = _unpacked(base.open)
        self.excluded = {epoch: self._ids(bits) for epoch, bits in base.excluded.items()}

    def _bits(self, ids: Ids) -> bytes:
        """Rows as bits, in the order of the known rows, compressed."""
        return zlib.compress(np.packbits(is_excluded(self.rows.arrays()[0], ids)).tobytes(), 1)

    def _ids(self, bits: bytes) -> Ids:
        ids, _ = self.rows.arrays()
        marks = np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8), count=len(ids))
        return ids[marks.astype(np.bool_)]


def _packed(attempts: dict[int, int]) -> dict[int, bytes]:
    return {row_id: bits.to_bytes(-(-bits.bit_length() // 8), "little") for row_id, bits in attempts.items()}


def _unpacked(attempts: dict[int, bytes]) -> dict[int, int]:
    return {row_id: int.from_bytes(bits, "little") for row_id, bits in attempts.items()}


def words_of(attempts: int) -> Iterator[tuple[int, int]]:
    """The words of a bit set that are not 0, each with its number: 64 attempts a word."""
    number = 0
    while attempts:
        if word := attempts & (1 << 64) - 1:
            yield number, word
        attempts, number = attempts >> 64, number + 1
