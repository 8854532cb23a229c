"""The memory of outcomes as a value, which states have whole: no lock and no clock."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.settings import Count, prepared
from asyncdata.delivery.chunk import Ids, is_excluded
from asyncdata.delivery.outcome_policy import OutcomeTable, Policy

MAX_SCORE = 1e30
"""Larger scores, of either sign, are refused: their sums could not be stored."""

Table = np.ndarray[Any, Any]


def _row(num_earlier: int = 0) -> np.dtype[Any]:
    earlier = [("earlier", "<f8", (num_earlier,))] if num_earlier else []
    return np.dtype(
        [("count", "<u4"), ("total", "<f8"), ("last_total", "<f8"), ("epoch", "<u4"), ("last_count", "<u2"), *earlier]
    )


ROW = _row()
"""What a row has beside its id: all scores, and those of ``epoch``, the last one that has any.

For a policy of several epochs, also the means of those before, the latest first.
"""

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


class _Base(msgspec.Struct, array_like=True):
    ids: bytes
    rows: bytes
    open: dict[int, bytes]
    excluded: dict[int, bytes]


class OutcomeState(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a moment.

    :ivar memory: the memory as base64 text; None: a development build stored it in a file, and it is refused.
    :ivar by_key: the same of each of several rewards.
    :ivar num_rows: rows in the memory.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before.
    :ivar num_late: scores of an earlier epoch than the last one of their row.
    :ivar num_skipped: scores that were None.
    """

    memory: str | None = None
    by_key: dict[str, str] = {}
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

    The same reports give the same memory, bit for bit.

    :param num_earlier: of a row, the means of so many epochs before its last one are remembered, too.
    :ivar excluded: by epoch, the ids of the rows that it excludes, ascending.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before, and were not counted again.
    :ivar num_late: scores of an earlier epoch than the row's last one, which were not counted.
    :ivar num_skipped: scores that were None.
    """

    def __init__(self, *, num_earlier: int = 0) -> None:
        self._num_earlier = num_earlier
        self.rows = RowTable(rows=np.empty(0, _row(num_earlier)))
        self.excluded: dict[int, Ids] = {}
        self.num_scores = self.num_repeated = self.num_late = self.num_skipped = 0
        self._open: dict[int, int] = {}  # reported attempts of rows of whose last epoch some are missing

    # What changes it.

    def report(self, reports: Iterable[RowReport], attempts: int) -> int:
        """Count scores, each attempt of a row in an epoch once; return how many were new.

        :param attempts: of a row in an epoch. After the last of them, what was reported is remembered as one bit.
        """
        before = self.num_scores
        for report in reports:
            self._count(report, attempts)
        return self.num_scores - before

    def decide(self, epoch: int, policy: Policy) -> Ids:
        """The rows that ``epoch`` excludes from now on, by what was reported until now."""
        table = self.rows.table()
        self.excluded[epoch] = table.ids[policy(table, epoch)] if len(table.ids) else table.ids
        return self.excluded[epoch]

    def forget_decisions(self, first: int, stop: int | None = None) -> None:
        """Keep the decisions of the epochs ``[first, stop)`` only: they were delivered, or are decided anew."""
        kept = {e: ids for e, ids in self.excluded.items() if e >= first and (stop is None or e < stop)}
        self.excluded = kept  # one assignment, as others may read it now

    def _count(self, report: RowReport, attempts: int) -> None:
        row = self.rows.find(report.row_id)
        last = -1 if row is None else int(row["epoch"])
        scores = [(attempt, score) for attempt, score in report.scores if score is not None]
        self.num_skipped += len(report.scores) - len(scores)
        if report.epoch < last:
            self.num_late += len(scores)
            return

        seen = self._open.get(report.row_id, -1) if report.epoch == last else 0  # -1: all, as it is complete
        new: dict[int, float] = {}
        for attempt, score in scores:
            if seen == -1 or seen >> attempt & 1 or attempt in new:
                self.num_repeated += 1
            else:
                new[attempt] = score
        if not new:
            return

        if row is None:
            row = self.rows.add(report.row_id)
        elif report.epoch > last and self._num_earlier:
            row["earlier"][:] = (row["last_total"] / row["last_count"], *row["earlier"][:-1])
        if report.epoch > last:
            row["epoch"], row["last_total"], row["last_count"] = report.epoch, 0.0, 0
        total = math.fsum(new.values())
        row["count"] += len(new)
        row["total"] += total
        row["last_total"] += total
        row["last_count"] += len(new)
        self.num_scores += len(new)
        seen |= sum(1 << attempt for attempt in new)
        if seen.bit_count() < attempts:
            self._open[report.row_id] = seen
        else:
            self._open.pop(report.row_id, None)

    # States.

    def saved(self, early: Container[int] = ()) -> bytes:
        """The whole memory.

        :param early: epochs of which may still change what they exclude.
        """
        ids, rows = self.rows.arrays()
        base = _Base(
            ids.tobytes(),
            rows.tobytes(),
            _packed(self._open),
            {epoch: self._bits(ids) for epoch, ids in self.excluded.items() if epoch not in early},
        )
        return msgspec.msgpack.encode(base)

    def restore(self, saved: bytes) -> None:
        """Continue with a memory that :meth:`saved` returned.

        :raises SnapshotError: if it is none (AD602).
        """
        try:
            self._become(msgspec.msgpack.decode(saved, type=prepared(_Base)))
        except (ValueError, OverflowError, zlib.error) as error:
            raise SnapshotError(f"AD602 the outcome memory in the snapshot cannot be read: {error}") from error

    def _become(self, base: _Base) -> None:
        ids = np.frombuffer(base.ids, np.uint64)
        num_earlier = max(0, (len(base.rows) // max(len(ids), 1) - ROW.itemsize) // 8)  # by another policy
        found = np.frombuffer(base.rows, _row(num_earlier))
        rows = _without_scores(len(found), _row(self._num_earlier))
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
