"""The memory of outcomes as a value that is replayed from its records: no file, no lock and no clock."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.delivery.outcomes.replay import chosen_ids
from asyncdata.delivery.outcomes.rows import ENTRY, OLD_ENTRY, OLD_ROW, ROW, RowTable, words_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.delivery.outcomes.policy import Ids, PassRate, Policy

__all__ = ("BASE", "MAX_SCORE", "OutcomeMemory", "Record", "RowReport", "is_excluded")

MAX_SCORE = 1e30
"""Larger scores, of either sign, are refused: their sums could not be stored."""

ENTRIES, EXCLUDED, PASS, BASE = b"S", b"X", b"P", b"B"
_OLD_ENTRIES = b"E"
_IS_COMPLETE, _IS_REPLAY = 1 << 15, 1 << 14
_MAX_REPLAYED = 1 << 15
"""Attempts of replays that a row can have in an epoch; further ones count as late."""
_MAX_PENDING_BYTES = 1 << 20


class RowReport(NamedTuple):
    """Scores of a row in an epoch.

    :ivar scores: pairs of an attempt, its number among the samples of the row, and its score.
    :ivar source: the part of the mixture that delivered it, if it is one.
    :ivar is_replay: whether a replay delivered it, whose attempts are counted apart from the row's own.
    """

    row_id: int
    epoch: int
    scores: list[tuple[int, float]]
    source: str = ""
    is_replay: bool = False


class Record(NamedTuple):
    """A change of the memory.

    :ivar kind: ``S``: an array of ``rows.ENTRY``; ``E``: of ``rows.OLD_ENTRY``; ``X``: the rows that an epoch excludes;
        ``P``: the rows of a replay's pass; ``B``: a whole memory.
    """

    kind: bytes
    payload: bytes


class _Base(msgspec.Struct, array_like=True):
    ids: bytes
    rows: bytes
    open: dict[int, bytes]
    excluded: dict[int, bytes]
    replayed: dict[int, bytes] = {}
    passes: dict[str, tuple[dict[int, bytes], list[tuple[int, int]]]] = {}


class _Excluded(msgspec.Struct, array_like=True):
    epoch: int
    rows: bytes


class _Pass(msgspec.Struct, array_like=True):
    name: str
    number: int
    epoch: int
    rows: bytes


class Passes:
    """The passes of one replay.

    :ivar chosen: by the number of a pass, the ids of its rows, ascending.
    :ivar starts: pairs of an epoch and its first pass, ascending: an epoch of the part whose rows are replayed.
    """

    def __init__(self, chosen: dict[int, Ids] | None = None, starts: list[tuple[int, int]] | None = None) -> None:
        self.chosen = chosen or {}
        self.starts = starts or []

    def begin(self, number: int, epoch: int, ids: Ids) -> None:
        """Pass ``number`` has these rows."""
        self.chosen = {**self.chosen, number: ids}
        if not self.starts or self.starts[-1][0] < epoch:
            self.starts.append((epoch, number))

    def place_of(self, number: int) -> tuple[int, int]:
        """The epoch of a pass, and its number there."""
        epoch, first = next((start for start in reversed(self.starts) if start[1] <= number), (0, 0))
        return epoch, number - first


def is_excluded(ids: Ids, excluded: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of ``ids`` are in ``excluded``, which is ascending; bool of the same shape."""
    if not len(excluded):
        return np.zeros(len(ids), np.bool_)

    places = np.minimum(excluded.searchsorted(ids), len(excluded) - 1)
    found: np.ndarray[Any, np.dtype[np.bool_]] = excluded[places] == ids
    return found


class OutcomeMemory:
    """The outcomes of rows, and the rows that epochs exclude.

    The same records give the same memory, bit for bit.

    :param keeps_records: keep what changes, for a file.
    :ivar excluded: by epoch, the ids of the rows that it excludes, ascending.
    :ivar passes: by the name of a replay.
    :ivar pending: the records that no file has yet, oldest first.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before, and were not counted again.
    :ivar num_late: scores of an earlier epoch than the row's last one, which were not counted.
    """

    def __init__(self, *, keeps_records: bool = False) -> None:
        self.rows = RowTable()
        self.excluded: dict[int, Ids] = {}
        self.pending: list[Record] = []
        self.num_scores = self.num_repeated = self.num_late = 0
        self._keeps_records = keeps_records
        self.passes: dict[str, Passes] = {}
        self._open: dict[int, int] = {}  # reported attempts of rows of whose last epoch some are missing
        self._replayed: dict[int, int] = {}  # reported attempts of replays in the row's last epoch
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
        """The rows that ``epoch`` excludes: decided at the first call, by what was reported until then."""
        if epoch not in self.excluded:
            table = self.rows.table()
            excluded = table.ids[policy(table, epoch)] if len(table.ids) else table.ids
            self.excluded[epoch] = excluded
            self._add(Record(EXCLUDED, msgspec.msgpack.encode(_Excluded(epoch, self._bits(excluded)))))
        return self.excluded[epoch]

    def decide_pass(self, name: str, number: int, epoch: int, where: PassRate) -> bool:
        """Decide the rows of a replay's pass, at the first call; return whether there are any. If not, it is not begun.

        :param epoch: that of the part whose rows are replayed.
        """
        passes = self.passes.setdefault(name, Passes())
        if number not in passes.chosen:
            ids = chosen_ids(self.rows.table(), where)
            if not len(ids):
                return False

            passes.begin(number, epoch, ids)
            self._add(Record(PASS, msgspec.msgpack.encode(_Pass(name, number, epoch, self._bits(ids)))))
        return True

    def forget_passes(self, name: str, first: int) -> None:
        """Keep a replay's passes from number ``first`` on: the others were delivered."""
        if name in self.passes:
            passes = self.passes[name]
            passes.chosen = {number: ids for number, ids in passes.chosen.items() if number >= first}

    def forget_decisions(self, first: int, stop: int | None = None) -> None:
        """Keep the decisions of the epochs ``[first, stop)`` only: they were delivered, or are decided anew."""
        kept = {e: ids for e, ids in self.excluded.items() if e >= first and (stop is None or e < stop)}
        self.excluded = kept  # one assignment, as others may read it now

    def _entries(self, report: RowReport, attempts: int) -> list[tuple[int, int, float, int, int]]:
        row = self.rows.find(report.row_id)
        last = -1 if row is None else int(row["epoch"])
        if report.epoch < last:
            self.num_late += len(report.scores)
            return []

        seen = self._seen(report) if report.epoch == last else 0
        new: dict[int, float] = {}
        for attempt, score in report.scores:
            if report.is_replay and attempt >= _MAX_REPLAYED:
                self.num_late += 1
            elif seen == -1 or seen >> attempt & 1 or attempt in new:
                self.num_repeated += 1
            else:
                new[attempt] = score
        if not new:
            return []

        bits = sum(1 << attempt for attempt in new)
        is_complete = not report.is_replay and (seen | bits).bit_count() >= attempts
        words, kind = list(words_of(bits)), _IS_REPLAY if report.is_replay else 0
        return [
            (
                report.row_id,
                word,
                math.fsum(score for attempt, score in new.items() if attempt // 64 == number),
                report.epoch,
                number | kind | (_IS_COMPLETE if is_complete and number == words[-1][0] else 0),
            )
            for number, word in words
        ]

    def _seen(self, report: RowReport) -> int:
        """The attempts of the row's last epoch that were counted, as bits. -1: all, as it is complete."""
        if report.is_replay:
            return self._replayed.get(report.row_id, 0)

        return self._open.get(report.row_id, -1)

    def _count(self, row_id: int, word: int, total: float, epoch: int, number: int) -> None:
        row = self.rows.find(row_id)
        is_new = row is None
        if row is None:
            row = self.rows.add(row_id)
        is_later = is_new or epoch > row["epoch"]
        if is_later:
            row["epoch"], row["last_total"], row["last_count"] = epoch, 0.0, 0
        count = word.bit_count()
        row["count"] += count
        row["total"] += total
        row["last_total"] += total
        row["last_count"] += count
        self.num_scores += count
        if is_later:
            self._replayed.pop(row_id, None)
        if number & _IS_REPLAY:
            if is_later:
                self._open[row_id] = 0  # of the row's own attempts, none was reported
            self._replayed[row_id] = self._replayed.get(row_id, 0) | word << 64 * (number - _IS_REPLAY)
        elif number & _IS_COMPLETE:
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
            _packed(self._replayed),
            {
                name: ({number: self._bits(ids) for number, ids in passes.chosen.items()}, passes.starts)
                for name, passes in self.passes.items()
            },
        )
        return Record(BASE, msgspec.msgpack.encode(base))

    def apply(self, record: Record) -> None:
        """Repeat what a record says.

        :raises SnapshotError: if it is no record; the message is the reason alone.
        """
        try:
            if record.kind in {ENTRIES, _OLD_ENTRIES}:
                kind = ENTRY if record.kind == ENTRIES else OLD_ENTRY
                for row_id, word, total, epoch, number in np.frombuffer(record.payload, kind).tolist():
                    self._count(row_id, word, total, epoch, number)
            elif record.kind == EXCLUDED:
                excluded = msgspec.msgpack.decode(record.payload, type=_Excluded)
                self.excluded[excluded.epoch] = self._ids(excluded.rows)
            elif record.kind == PASS:
                begun = msgspec.msgpack.decode(record.payload, type=_Pass)
                self.passes.setdefault(begun.name, Passes()).begin(begun.number, begun.epoch, self._ids(begun.rows))
            elif record.kind == BASE:
                self._become(msgspec.msgpack.decode(record.payload, type=_Base))
            else:
                raise SnapshotError(f"it has a record of an unknown kind, {record.kind!r}")
        except (ValueError, OverflowError, zlib.error) as error:
            raise SnapshotError(f"a record in it cannot be read: {error}") from error

    def _become(self, base: _Base) -> None:
        ids = np.frombuffer(base.ids, np.uint64)
        is_old = len(base.rows) == len(ids) * OLD_ROW.itemsize
        rows = np.frombuffer(base.rows, OLD_ROW if is_old else ROW).astype(ROW)
        if len(ids) != len(rows) or (ids[1:] <= ids[:-1]).any():
            raise ValueError("its rows are not in ascending order")

        self.rows = RowTable(ids, rows)
        self.num_scores = int(rows["count"].sum(dtype=np.int64))
        self._open, self._replayed = _unpacked(base.open), _unpacked(base.replayed)
        self.excluded = {epoch: self._ids(bits) for epoch, bits in base.excluded.items()}
        self.passes = {
            name: Passes({number: self._ids(bits) for number, bits in chosen.items()}, starts)
            for name, (chosen, starts) in base.passes.items()
        }

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
