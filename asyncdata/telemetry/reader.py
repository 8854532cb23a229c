"""Reads the telemetry files of a run, of all ranks and of all its starts.

Nothing here needs the loader, numpy or the run's data.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import open_regular
from asyncdata.telemetry.records import (
    FORMAT_VERSION,
    BadRowRecord,
    DroppedRow,
    End,
    Event,
    Interval,
    Place,
    RunStart,
    SampleRecord,
    decode,
)

_Keyed = TypeVar("_Keyed", SampleRecord, DroppedRow)

_STATE = (
    *("kind", "at", "place", "begins", "by_source", "waiting_s", "ready", "capacity", "in_flight", "has_no_room"),
    *("workers", "busy", "starting", "memory_bytes", "worker_memory_bytes", "buffered", "indexed_rows", "pack"),
)
_TOTALS = [name for name in Interval.__struct_fields__ if name not in _STATE]
_SOURCE_TOTALS = ("samples", "tokens", "dropped", "noted", "wait_s")


class Start(msgspec.Struct, kw_only=True):
    """What one file has: a start of the loader of one rank.

    :ivar header: its first record.
    :ivar intervals: in the order of time. The first one, if the start got that far, is of the moment of the start.
    :ivar samples: as they were written: more than are kept; so are ``dropped_rows``.
    :ivar end: its last record; None if the process was killed, or still runs.
    :ivar num_unread: lines that are no record.
    :ivar counts_until: samples of the stream up to which its deliveries count. A later start has delivered those after
        it again. None: all count.
    """

    path: str
    header: RunStart
    intervals: list[Interval] = []
    samples: list[SampleRecord] = []
    dropped_rows: list[DroppedRow] = []
    bad_rows: list[BadRowRecord] = []
    events: list[Event] = []
    end: End | None = None
    num_unread: int = 0
    counts_until: int | None = None

    @property
    def last_at(self) -> float:
        """When its last record was written, in seconds since 1970."""
        if self.end is not None:
            return self.end.at

        return self.intervals[-1].at if self.intervals else self.header.at

    @property
    def origin(self) -> tuple[int, Place]:
        """Samples and place from which it delivered: at its begin, or in a state that was loaded after it."""
        begins = [
            (before.samples, before.place)
            for before, after in itertools.pairwise(self.intervals)
            if before.begins and not after.begins and after.samples > before.samples
        ]
        last = [(interval.samples, interval.place) for interval in self.intervals if interval.begins][-1:]
        return min(begins or last or [(self.header.samples, self.header.place)])

    def differences(self, *, only_counted: bool = False) -> Iterator[Interval]:
        """What each interval adds to the one before; see :func:`difference`.

        :param only_counted: leave out intervals with deliveries after ``counts_until``.
        """
        until = [self._until(at) if only_counted else math.inf for at in range(len(self.intervals))]
        for (before, after), limit in zip(itertools.pairwise(self.intervals), until[1:], strict=False):
            if not after.begins and after.samples <= limit:
                yield difference(before, after)

    def _until(self, at: int) -> float:
        """Samples up to which interval number ``at`` counts: the stream may begin again later, here or elsewhere."""
        again = [later.samples for later in self.intervals[at + 1 :] if later.begins]
        return min([*again, math.inf if self.counts_until is None else self.counts_until])


class Run(msgspec.Struct, kw_only=True):
    """The files of a folder.

    :ivar generations: starts that ran at the same time, such as one of each rank; each sorted by rank. A restart
        makes the next generation.
    """

    generations: list[list[Start]]

    @property
    def starts(self) -> list[Start]:
        """All starts, in the order of their generations and ranks."""
        return [start for generation in self.generations for start in generation]

    @property
    def header(self) -> RunStart:
        """The first record of the latest generation's first rank."""
        return self.generations[-1][0].header

    @property
    def stream(self) -> list[Start]:
        """One start of each generation: the one that came furthest. Every rank counts the whole stream."""
        return [max(generation, key=_num_samples) for generation in self.generations]

    @property
    def totals(self) -> Interval | None:
        """The totals of the stream at the end: of this run and those that it resumed. None without an interval."""
        last = [start.intervals[-1] for start in self.stream if start.intervals]
        return last[-1] if last else None

    def samples(self) -> list[SampleRecord]:
        """The sampled samples, each once, in the order of their places.

        Of each source, these are the ``max_samples`` with the smallest keys, and the ``max_of_reason`` with each note.
        Those that were delivered after the place from which a later start continued count only if that start has
        delivered them as well.
        """
        found: dict[Any, SampleRecord] = {}
        for start in self.starts:
            again = [later.origin[1] for later in _later(start, self.starts)]
            for sample in start.samples:
                if all(sample.place < place for place in again):
                    found[sample.source, sample.place] = sample
        of_all = _smallest(self.header.max_samples, ((each.source, each) for each in found.values()))
        noted = (((each.source, note), each) for each in found.values() for note in each.notes)
        kept = {(each.source, each.place): each for each in [*of_all, *_smallest(self.header.max_of_reason, noted)]}
        return sorted(kept.values(), key=lambda sample: sample.place)

    def dropped_rows(self) -> list[DroppedRow]:
        """Dropped rows, each once, in the order of their places: of each source and reason the ``max_of_reason`` with
        the smallest keys. Some may have been found ahead of the deliveries.
        """
        found = {(row.source, row.key, row.reason): row for start in self.starts for row in start.dropped_rows}
        kept = _smallest(self.header.max_of_reason, (((row.source, row.reason), row) for row in found.values()))
        return sorted(kept, key=lambda row: row.place)

    def lengths(self) -> dict[int, int]:
        """Histogram of the tokens of delivered samples, each prompt counted once."""
        total: dict[int, int] = {}
        for start in self.stream:
            for step in start.differences(only_counted=True):
                for edge, count in step.lengths.items():
                    total[edge] = total.get(edge, 0) + count
        return dict(sorted(total.items()))


def _smallest(most: int, items: Iterable[tuple[Hashable, _Keyed]]) -> list[_Keyed]:
    """Of each group the ``most`` items with the smallest keys."""
    groups: dict[Hashable, list[_Keyed]] = {}
    for group, item in items:
        groups.setdefault(group, []).append(item)
    return [item for group in groups.values() for item in nsmallest(most, group, key=lambda each: each.key)]


def _num_samples(start: Start) -> int:
    return start.intervals[-1].samples if start.intervals else -1


def _later(start: Start, others: Iterable[Start]) -> list[Start]:
    return [other for other in others if other is not start and other.header.at >= start.last_at]


def difference(before: Interval, after: Interval) -> Interval:
    """``after``, with the totals of what came since ``before``. What is no total is as in ``after``."""
    sources = {
        name: msgspec.structs.replace(counts, **_grown(before.by_source.get(name), counts, _SOURCE_TOTALS))
        for name, counts in after.by_source.items()
    }
    return msgspec.structs.replace(after, by_source=sources, **_grown(before, after, _TOTALS))


def _grown(before: object, after: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: _minus(getattr(after, name), getattr(before, name, None)) for name in names}


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        left = {key: _minus(value, (before or {}).get(key)) for key, value in after.items()}
        return {key: value for key, value in left.items() if value}

    return after if before is None else after - before


def read(folder: str | os.PathLike[str]) -> Run:
    """The telemetry of a run.

    :param folder: the folder of ``telemetry=...``, also while the run writes to it.
    :raises ConfigError: if there is none (AD620), or it cannot be read (AD621).
    """
    try:
        paths = sorted(Path(folder).glob("rank-*.jsonl"))
        starts = [start for path in paths if (start := read_start(path)) is not None]
    except OSError as error:
        raise ConfigError(f"AD621 the telemetry in {os.fspath(folder)} cannot be read: {error}") from error

    if not starts:
        raise ConfigError(
            f"AD620 there is no telemetry in {os.fspath(folder)}: no file rank-*.jsonl with a record; give the folder "
            "that the loader's telemetry=... names"
        )

    generations: list[list[Start]] = []
    for start in sorted(starts, key=lambda start: start.header.at):
        if generations and start.header.at < max(other.last_at for other in generations[-1]):
            generations[-1].append(start)
        else:
            generations.append([start])
    for start in starts:
        later = [other.origin[0] for other in _later(start, starts)]
        start.counts_until = min(later) if later else None
    return Run(generations=[sorted(each, key=lambda start: (start.header.rank, start.path)) for each in generations])


def read_start(path: Path) -> Start | None:
    """What a file has; None if it has no record yet. A last line without a line feed is left out.

    :raises ConfigError: if it is no telemetry file, or of a later version (AD621).
    :raises OSError: if it cannot be read.
    """
    start = None
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break

            try:
                record = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                record = None
            if start is not None:
                _add(start, record)
            elif isinstance(record, RunStart) and record.version <= FORMAT_VERSION:
                start = Start(path=str(path), header=record)
            else:
                version = f" of version {record.version}" if isinstance(record, RunStart) else ""
                raise ConfigError(
                    f"AD621 {path} begins with no run record that this asyncdata can read{version}: it is no telemetry "
                    "file, or was written by a later asyncdata"
                )

    return start


def _add(start: Start, record: object) -> None:
    if type(record) in _LISTS:
        getattr(start, _LISTS[type(record)]).append(record)
    elif isinstance(record, End):
        start.end = record
    else:
        start.num_unread += 1


_LISTS: dict[type, str] = {
    Interval: "intervals",
    SampleRecord: "samples",
    DroppedRow: "dropped_rows",
    BadRowRecord: "bad_rows",
    Event: "events",
}
"""The records of which a start has a list."""
