"""Sections on waiting: the share of the time, what to do, what the time went to, and the ranks beside each other."""

from __future__ import annotations

import math
from contextlib import suppress
from operator import methodcaller
from typing import NamedTuple

import msgspec

from asyncdata.core.messages import ON_PURPOSE, is_mass
from asyncdata.core.settings import prepared
from asyncdata.report.figures import OverTime, Series, Step, duration, lines, origins, quantile, short, steps_of, summed
from asyncdata.report.page import Block, Note, Section, Table, Tile, Tiles, Verdict
from asyncdata.telemetry.reader import Run, Start, difference
from asyncdata.telemetry.records import Interval

_GOOD, _FAIR = 0.02, 0.10
"""Shares of waiting up to which a run is good, and fair."""

_NAMED, _TOLD_S = 0.2, 1.0
"""Share of the waiting from which a further reason is named, and seconds of start-up that are told."""

_MAX_DROPS = 5
"""Reasons for which rows were dropped in mass that are told on top, and files of each."""

_MAX_LINES, _MAX_BINS, _MAX_MOMENTS = 8, 200, 60
"""Ranks that are shown over time; points of what the time of each went to, and of its readiness."""

KINDS = {
    "start": "workers start",
    "index": "row index",
    "read": "source (read)",
    "tokenize": "workers (tokenize)",
    "media": "workers (media)",
    "cpu": "a CPU for the workers",
    "step": "trainer",
}
"""What the time went to: what calls waited for, and the trainer's own work."""

_ADVICE = {
    "start": "The workers were starting. Open the loader earlier, before the model is loaded.",
    "index": "The row index was built. It is stored: the next run reads it. Or use shuffle windows, which need none.",
    "read": "Reading the source was too slow. Copy the files to a local disk, or read ahead more (buffer_size).",
    "tokenize": "Tokenizing was too slow. Give more workers (num_workers), or a fast tokenizer.",
    "media": "Loading pictures and other media was too slow. Give more workers, smaller pictures, or a larger "
    "Limits(max_media_bytes=...).",
    "cpu": "The workers had work, but no CPU to run on. Ask for more CPUs (the container's limit counts), give fewer "
    "workers, or find what else uses the CPUs.",
}
_HELD = "This is the trainer's time: await, or move what blocks to a thread (asyncio.to_thread)."


class RankFigures(NamedTuple):
    """What the calls of a rank did, over all its ``starts``.

    :ivar wait_s: seconds of waiting, by what was missing, without ``first_s``.
    :ivar first_s: seconds of the first call of each start, which are start-up; but not while that call still waits.
    :ivar wait_ms: histogram of the waits that have ended, in milliseconds, without start-up.
    :ivar waiting_s: for how long a call had been waiting when the last record was written; 0 if none was.
    :ivar step_s: seconds between the calls: the trainer's own time.
    :ivar full: the share of the recorded moments, 0 to 1, at which the read-ahead was full: the workers waited for the
        trainer. None without a moment.
    """

    rank: int
    starts: list[Start]
    calls: int
    waits: int
    wait_s: dict[str, float]
    step_s: float
    restarts: int
    work_s: float
    full: float | None
    first_s: dict[str, float]
    wait_ms: dict[int, int]
    waiting_s: float

    @property
    def waited_s(self) -> float:
        """All seconds of waiting, without start-up."""
        return sum(self.wait_s.values())

    @property
    def share(self) -> float:
        """The share of its time after the first batch in which the trainer waited for data, 0 to 1."""
        total = self.waited_s + self.step_s
        return self.waited_s / total if total else 0.0

    def wait_at(self, share: float) -> float:
        """Seconds that this share of the calls waited at most, 0 to 1; a little below, as waits are in buckets."""
        ready = max(0, self.calls - sum(self.wait_ms.values()))
        return (quantile({**self.wait_ms, 0: ready + self.wait_ms.get(0, 0)}, share) or 0) / 1000

    @property
    def readiness(self) -> float | None:
        """The share of calls that did not wait, 0 to 1; None without a call."""
        return 1 - self.waits / self.calls if self.calls else None


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an event ``rows.dropped``: of the first ``num_rows`` rows of a file, or of all files if it has no
    path, ``num_dropped`` were dropped.
    """

    reason: str
    num_dropped: int
    num_rows: int
    source: str = ""
    path: str = ""
    example: str = ""


class MassDrop(NamedTuple):
    """Rows of a source that were dropped for one reason, and are too many.

    :ivar source: the part of a mixture; empty for a single source.
    :ivar warnings: what the log said of it, once a file.
    """

    source: str
    reason: str
    num_dropped: int
    num_rows: int
    warnings: list[Warned]

    @property
    def share(self) -> float:
        """Of the rows of the source, 0 to 1."""
        return self.num_dropped / max(self.num_rows, 1)


def by_rank(run: Run) -> list[RankFigures]:
    """Each rank's figures, rising by rank. Time that passed before a crash counts: it was spent."""
    ranks: dict[int, list[Start]] = {}
    for start in run.starts:
        ranks.setdefault(start.header.rank, []).append(start)
    return [_of_rank(rank, starts) for rank, starts in sorted(ranks.items())]


def _of_rank(rank: int, starts: list[Start]) -> RankFigures:
    added = [difference(start.intervals[0], start.intervals[-1]) for start in starts if start.intervals]
    waits = [(step.wait_s, step.first_s if step.calls > 1 or not step.waiting_s else {}) for step in added]
    lasting = [start.intervals[-1].waiting_s for start in starts if start.intervals and start.end is None]
    is_full = [moment.has_no_room for start in starts for moment in start.intervals[1:]]
    return RankFigures(
        rank=rank,
        starts=starts,
        calls=sum(step.calls for step in added),
        waits=sum(step.waits for step in added),
        wait_s=summed({name: all_s - first.get(name, 0.0) for name, all_s in wait.items()} for wait, first in waits),
        step_s=sum(step.step_s for step in added),
        restarts=sum(step.restarts for step in added),
        work_s=sum(step.work_s for step in added),
        full=sum(is_full) / len(is_full) if is_full else None,
        first_s=summed(first for _, first in waits),
        wait_ms=summed(step.wait_ms for step in added),
        waiting_s=max(lasting, default=0.0),
    )


def mass_drops(run: Run) -> list[MassDrop]:
    """What was dropped in mass, the largest share first: by the totals, or where these do not show it, by the log."""
    told: dict[tuple[str, str], dict[str, Warned]] = {}
    for event in (event for start in run.starts for event in start.events if event.name == "rows.dropped"):
        with suppress(msgspec.ValidationError):  # without the texts where rows are not shown
            warned = msgspec.convert(event.fields, prepared(Warned))
            told.setdefault((warned.source, warned.reason), {})[warned.path] = warned
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for source, samples, dropped in _dropped_by_source(run):
        num_rows = samples // max(run.header.group_size, 1) + sum(dropped.values())
        counted |= {(source, reason): (n, num_rows) for reason, n in dropped.items() if is_mass(n, num_rows)}
    found: list[MassDrop] = []
    for key in {**counted, **told}:
        warnings = list(told.get(key, {}).values())
        counts = counted.get(key) or max((one.num_dropped, one.num_rows) for one in warnings)
        found.append(MassDrop(*key, *counts, warnings))
    return sorted(found, key=lambda drop: -drop.share)


def _dropped_by_source(run: Run) -> list[tuple[str, int, dict[str, int]]]:
    """Each source's name, samples, and dropped rows by reason, without those that are left out on purpose."""
    totals = run.totals
    if totals is None:
        return []

    counts = [(name, one.samples, one.dropped) for name, one in totals.by_source.items()]
    found = counts or [("", totals.samples, totals.dropped)]
    return [
        (name, samples, {reason: n for reason, n in dropped.items() if reason not in ON_PURPOSE})
        for name, samples, dropped in found
    ]


def slowest(ranks: list[RankFigures]) -> RankFigures:
    """The rank with the largest share of waiting: in a synchronous step, the others wait for it."""
    return max(ranks, key=lambda one: (one.share, -one.rank))


def overview(run: Run) -> Section:
    """The figure to look at first, what to do, and the totals."""
    ranks, failures = by_rank(run), _failures(run)
    blocks: list[Block] = [*failures, _verdict(run, ranks, has_failed=bool(failures)), *_mass_drops(run)]
    if (totals := run.totals) is not None:
        blocks.append(Tiles([*_step_tiles(slowest(ranks)), *_total_tiles(run, totals, ranks)]))
    return Section("overview", "Overview", blocks)


def _failures(run: Run) -> list[Block]:
    """The error that ended the latest starts, if one did, on the rank which ended first."""
    ends = [(start.end, start.header.rank) for start in run.generations[-1] if start.end and start.end.error]
    if not ends:
        return []

    first, rank = min(ends, key=lambda pair: pair[0].at)
    where = f", first on rank {rank}" if run.header.world_size > 1 else ""
    error, *more = first.error.split("\n")
    return [Verdict("Error", f"An error ended the run{where}. {error}", more, "poor", id="failure")]


def _verdict(run: Run, ranks: list[RankFigures], *, has_failed: bool) -> Block:
    worst = slowest(ranks)
    if not worst.calls:
        return Note("No call for data was recorded: the run ended, or was killed, before its first interval.")

    level = "good" if worst.share <= _GOOD else "fair" if worst.share <= _FAIR else "poor"
    text = "of the trainer's time was spent waiting for data"
    if len(ranks) > 1:
        mean = sum(one.share for one in ranks) / len(ranks)
        text += f", on rank {worst.rank}, the slowest of {len(ranks)}; the mean is {percent(mean)}"
    return Verdict(percent(worst.share), f"{text}.", [*_advice(worst, level, has_failed), *_notices(run)], level)


def _mass_drops(run: Run) -> list[Block]:
    found = mass_drops(run)
    if not found:
        return []

    lines = [_told(drop) for drop in found[:_MAX_DROPS]]
    if len(found) > _MAX_DROPS:
        lines.append(f"{len(found) - _MAX_DROPS:,} more are in the table of what was dropped.")
    of = f" of {found[0].source}" if found[0].source else ""
    text = f"of the rows{of} were dropped: {found[0].reason}."
    return [Verdict(percent(found[0].share), text, lines, "poor", id="mass-drop")]


def _told(drop: MassDrop) -> str:
    of = f" of {drop.source}" if drop.source else ""
    files = [
        f"{one.num_dropped:,} of the first {one.num_rows:,} of {one.path or 'all files'}, such as {one.example}"
        for one in drop.warnings[:_MAX_DROPS]
    ]
    more = f"; {len(drop.warnings) - _MAX_DROPS:,} more files" if len(drop.warnings) > _MAX_DROPS else ""
    where = f" The log named: {'; '.join(files)}{more}." if files else ""
    return f"{drop.reason}: {drop.num_dropped:,} of {drop.num_rows:,} rows{of} ({percent(drop.share)}).{where}"


def _advice(rank: RankFigures, level: str, has_failed: bool) -> list[str]:
    lines = (
        [] if not rank.waiting_s else [f"A call had been waiting for {duration(rank.waiting_s)} at the last record."]
    )
    if not rank.waited_s:
        after = " after the first batch" if rank.first_s else ""
        until = ", until the error." if has_failed else ": data is not what limits this run."
        return [f"No call waited{after}{until}", *_start_up(rank)]

    causes = sorted(rank.wait_s, key=lambda name: -rank.wait_s[name])
    named = [name for name in causes if name == causes[0] or rank.wait_s[name] > _NAMED * rank.waited_s]
    for cause in named:
        of_wait = f"{percent(rank.wait_s[cause] / rank.waited_s)} of {duration(rank.waited_s)} of waiting"
        lines.append(f"{_ADVICE.get(cause, KINDS.get(cause, cause))} ({of_wait})")
    lines += _start_up(rank)
    return ["Data hardly limits this run. What is left:", *lines] if level == "good" else lines


def _start_up(rank: RankFigures) -> list[str]:
    """What the first batches took, if that is worth a word."""
    seconds = sum(rank.first_s.values())
    if seconds < _TOLD_S:
        return []

    causes = sorted(rank.first_s.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{KINDS.get(name, name)} {duration(part)}" for name, part in causes)
    return [f"Start-up does not count in this share: the first batch of each start took {duration(seconds)} ({parts})."]


def _notices(run: Run) -> list[str]:
    """What a reader must know about the figures."""
    lost = summed(start.intervals[-1].lost for start in run.starts if start.intervals)
    unread = sum(start.num_unread for start in run.starts)
    killed = sum(start.end is None for start in run.starts)
    lines = []
    if (held_s := sum(start.intervals[-1].held_s for start in run.starts if start.intervals)) >= _TOLD_S:
        lines.append(f"Your code held the event loop for {duration(held_s)} while samples were ready. {_HELD}")
    if killed:
        lines.append(f"{killed:,} of {len(run.starts):,} files have no end: the process was killed, or still runs.")
    if lost:
        lines.append(
            f"{sum(lost.values()):,} records were not written ({counts_of(lost)}). Totals are right without them."
        )
    if unread:
        lines.append(f"{unread:,} lines of the files are damaged, and were left out.")
    if restarts := sum(one.restarts for one in by_rank(run)):
        lines.append(f"Lost and replaced workers: {restarts:,}. See the events.")
    return lines


def _step_tiles(rank: RankFigures) -> list[Tile]:
    if not rank.calls:
        return []

    own, whole = rank.step_s / rank.calls, (rank.step_s + rank.waited_s) / rank.calls
    on = f"on rank {rank.rank}"
    return [
        Tile("Step time", milliseconds(whole), f"per batch, {on}"),
        Tile("Step time if data were free", milliseconds(own), f"{percent(rank.share)} less, {on}"),
        Tile("Waited for data", duration(rank.waited_s), f"{rank.waits:,} of {rank.calls:,} calls, {on}"),
        Tile(
            "Wait of a call",
            milliseconds(rank.wait_at(0.99)),
            f"99th percentile; 90th: {milliseconds(rank.wait_at(0.9))}, {on}",
        ),
        Tile("Start-up", duration(sum(rank.first_s.values())), f"of the first batch, not in the share, {on}"),
    ]


def _total_tiles(run: Run, totals: Interval, ranks: list[RankFigures]) -> list[Tile]:
    seconds = sum(start.intervals[-1].elapsed_s for start in run.stream if start.intervals)
    starts = len(run.generations)
    dropped = sum(totals.dropped.values())
    groups = f"in {totals.groups:,} groups, " if run.header.group_size > 1 else ""
    workers = f"{totals.workers:,} worker{'s' * (totals.workers != 1)}"
    tokens_about = "of prompts, each counted once" if run.header.group_size > 1 else "of the samples"
    return [
        Tile("Samples delivered", f"{totals.samples:,}", f"{groups}epoch {totals.place.epoch}"),
        Tile("Tokens", short(totals.tokens), tokens_about),
        *_trained_tiles(run),
        Tile("Rows dropped", f"{dropped:,}", f"bad rows among them: {totals.bad_rows:,}"),
        Tile("Time", duration(seconds), f"in {starts:,} starts" if starts > 1 else "in one start"),
        Tile("Ranks", f"{len(ranks):,}", f"{workers}{' each' * (len(ranks) > 1)}"),
        *_memory_tiles(run),
        *_media_tiles(run),
    ]


def _trained_tiles(run: Run) -> list[Tile]:
    """The share of trained tokens, in the samples that were recorded with labels."""
    labelled = [sample for sample in run.samples() if sample.num_trained >= 0]
    if not (num_tokens := sum(sample.num_tokens for sample in labelled)):
        return []

    share = sum(sample.num_trained for sample in labelled) / num_tokens
    return [Tile("Trained tokens", percent(share), f"of the tokens of {len(labelled):,} recorded samples")]


def _memory_tiles(run: Run) -> list[Tile]:
    """The most memory that the processes of a rank had at a recorded moment, where it is known."""
    moments = [moment for start in run.starts for moment in start.intervals if moment.memory_bytes]
    if not moments:
        return []

    most = max(moments, key=lambda moment: moment.memory_bytes + moment.worker_memory_bytes)
    about = f"of the trainer's process, and {short(most.worker_memory_bytes)}B of its workers: the most of a rank"
    return [Tile("Memory", f"{short(most.memory_bytes)}B", about)]


def _media_tiles(run: Run) -> list[Tile]:
    """What all ranks have loaded of media, if the samples have any."""
    last = [start.intervals[-1] for start in run.starts if start.intervals]
    loaded, failed = (sum(getattr(each, name) for each in last) for name in ("media_loaded", "media_failed"))
    if not loaded and not failed:
        return []

    num_bytes, seconds = sum(each.media_bytes for each in last), sum(each.media_s for each in last)
    about = f"{short(num_bytes)}B, {1000 * seconds / max(1, loaded):,.3g} ms of a worker each; {failed:,} failed"
    return [Tile("Samples with media loaded", f"{loaded:,}", about)]


# What the time went to


def waits_section(run: Run) -> Section:
    """What the time of the ranks went to: as a whole, and over time for those that waited most."""
    ranks = by_rank(run)
    if not any(one.calls for one in ranks):
        return Section("waits", "Waits", [Note("No call for data was recorded.")])

    spent = {one.rank: {**summed([one.wait_s, one.first_s]), "step": one.step_s} for one in ranks}
    used = [name for name in KINDS if any(seconds.get(name) for seconds in spent.values())]
    rows = [[str(rank), *(f"{seconds.get(name, 0.0):,.1f}" for name in used)] for rank, seconds in spent.items()]
    head = ["rank", *(f"{KINDS[name]}, s" for name in used)]
    slowest_first = sorted(ranks, key=lambda one: -one.share)[:_MAX_LINES]
    note = (
        "What is missing to 100 % is time that no call accounts for. The clock stands still between a start and the "
        "next one."
    )
    table = Table("waits-table", "What the time of each rank went to", head, rows)
    return Section("waits", "Waits", [*(_over_time(run, one, used) for one in slowest_first), Note(note), table])


def _over_time(run: Run, rank: RankFigures, used: list[str]) -> Block:
    """A line for each kind: its share of the rank's time."""
    over_time = OverTime(steps_of(rank.starts, origins(run)[0], _MAX_BINS, of_calls=True))
    lines = [over_time.line(KINDS[name], methodcaller("percent_of", name)) for name in used]
    title = f"What the time of rank {rank.rank} went to"
    about = f"{title}, over time. It waited {percent(rank.share)} of its time."
    return over_time.chart(f"waits-chart-{rank.rank}", title, about, lines, unit="%", top=100.0)


# The ranks


def ranks_section(run: Run) -> Section:
    """The readiness of the ranks, over time and as a whole, the one that waited most first."""
    ranks = sorted(by_rank(run), key=lambda one: -one.share)
    head = [
        "rank",
        "waited",
        "ready",
        "calls",
        "waits",
        "wait, 90th, ms",
        "99th, ms",
        "step, ms",
        "most waited for",
        "workers waited",
        "workers' work",
        "replaced",
    ]
    largest = max(one.share for one in ranks) or 1.0
    table = Table(
        "ranks-table",
        "Share of the time in which a rank waited, and share of its calls that did not",
        head,
        [_rank_row(one) for one in ranks],
        bars=[round(100 * one.share / largest, 1) for one in ranks],
    )
    note = (
        "In a synchronous step all ranks wait for the slowest one. If one rank waits and the others do not, look at "
        "its node; if all wait, at the source or at the number of workers. Workers waited at the recorded moments at "
        "which the read-ahead was full: where that is most of the time, there are more than enough of them."
    )
    return Section("ranks", "Ranks", [*_readiness(run, ranks), table, Note(note)])


def _readiness(run: Run, ranks: list[RankFigures]) -> list[Block]:
    """A line for each of the ranks that waited most."""
    began, last = origins(run)
    steps = {
        one.rank: [step for step in steps_of(one.starts, began, of_calls=True) if step is not None]
        for one in ranks[:_MAX_LINES]
    }
    num = min(_MAX_MOMENTS, max(map(len, steps.values())))
    if not num:
        return []

    width = max(last, 0.001) / num  # a clock that was set back may leave no time
    about = "Over time, the share of the calls for data that did not wait, of each rank."
    chart = lines(
        "readiness-chart",
        "Readiness: share of the calls that did not wait",
        about,
        [(at + 1) * width for at in range(num)],
        [Series(f"rank {rank}", _share_ready(of_rank, width, num)) for rank, of_rank in steps.items()],
        unit="%",
        top=100.0,
    )
    left = len(ranks) - _MAX_LINES
    note = f"The chart has the {_MAX_LINES} ranks that waited most; {left:,} more are in the table."
    return [chart, *([Note(note)] if left > 0 else [])]


def _share_ready(steps: list[Step], width: float, num: int) -> list[float | None]:
    """For each of ``num`` stretches of ``width`` seconds, the percentage of the calls of the steps that overlap it."""
    calls, waits = [0] * num, [0] * num
    for step in steps:
        for at in range(max(0, int(step.since / width)), min(num, math.ceil(step.until / width))):
            calls[at] += step.added.calls
            waits[at] += step.added.waits
    return [round(100 * (1 - waits[at] / calls[at]), 2) if calls[at] else None for at in range(num)]


def _rank_row(one: RankFigures) -> list[str]:
    cause = max(one.wait_s, key=lambda name: one.wait_s[name], default="")
    return [
        str(one.rank),
        percent(one.share),
        "–" if one.readiness is None else percent(one.readiness),
        f"{one.calls:,}",
        f"{one.waits:,}",
        *(f"{1000 * one.wait_at(share):,.0f}" for share in (0.9, 0.99)),
        f"{1000 * one.step_s / one.calls:,.1f}" if one.calls else "–",
        KINDS.get(cause, cause) if one.wait_s.get(cause) else "nothing",
        "–" if one.full is None else percent(one.full),
        duration(one.work_s),
        f"{one.restarts:,}",
    ]


# Figures as text


def percent(share: float) -> str:
    """Such as ``12.3 %``."""
    return f"{100 * share:.1f} %"


def milliseconds(seconds: float) -> str:
    """Such as ``412 ms``, or ``1.25 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration(seconds)


def counts_of(counts: dict[str, int]) -> str:
    """Such as ``3 too long, 1 bad row AD421``."""
    return ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items(), key=lambda item: -item[1]))
