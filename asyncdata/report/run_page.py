"""The report of a run, from its telemetry; its sections on what was delivered: lengths, packs, what was left out, the
mixture, rates, and rollouts; and the page of inspected rows.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from asyncdata.report.figures import Chart, OverTime, Series, Step, columns, origins, quantile, short, steps_of, summed
from asyncdata.report.page import Block, Note, Rows, SampleList, Samples, Section, Table, Tile, Tiles, render
from asyncdata.report.waiting import overview, percent, ranks_section, waits_section
from asyncdata.telemetry.reader import Run, Start
from asyncdata.telemetry.records import EDGES, BadRowRecord, Document, Interval, RewardCounts, RunStart, SourceCounts

_MAX_SOURCES = 8
"""Lines of a chart: more cannot be told apart by colour."""

_MAX_PACKS = 4
"""Packs whose documents are shown."""

_MAX_MOMENTS = 40
"""Lines of the table of steps and rows."""

_NEXT = dict(zip(EDGES, EDGES[1:], strict=False))


def _ratio(part: float, whole: float) -> float:
    """The share; NaN of nothing."""
    return part / whole if whole else math.nan


# Lengths and packs


def lengths_section(run: Run, over_time: OverTime) -> Section:
    """How long the samples are, how full the packs, and what is in some of them."""
    histogram = summed([run.lengths()])
    blocks: list[Block] = []
    if histogram:
        tiles = [Tile(name, _bucket(quantile(histogram, share) or 0), "tokens") for name, share in _QUANTILES]
        about = "How many samples have how many tokens. " + ", ".join(f"{tile.name}: {tile.figure}" for tile in tiles)
        blocks += [
            Tiles(tiles),
            _histogram("lengths-chart", "Samples by length", about, histogram, "tokens", "samples"),
        ]
        blocks.append(
            Note("Bounds of the columns grow by a fifth, so lengths are exact to a fifth. Each prompt counts once.")
        )
    else:
        blocks.append(Note("No sample was delivered, so there are no lengths."))
    return Section("lengths", "Lengths and packs", [*blocks, *_packs(run, over_time), *_contents(run)])


_QUANTILES = (("Median", 0.5), ("95th percentile", 0.95), ("99th percentile", 0.99), ("Longest", 1.0))


def _histogram(id: str, title: str, about: str, histogram: dict[int, int], of: str, unit: str) -> Chart:
    """Columns from the lowest bucket to the highest; those between without a number are 0."""
    edges = [edge for edge in EDGES if min(histogram) <= edge <= max(histogram)]
    bins = [(_bucket(edge), histogram.get(edge, 0)) for edge in edges]
    return columns(id, title, about, bins, of=of, unit=unit, head=(of, unit))


def _bucket(edge: int) -> str:
    last = _NEXT.get(edge, edge + 1) - 1
    return f"{edge:,}" if last == edge else f"{edge:,}–{last:,}"


def _packs(run: Run, over_time: OverTime) -> list[Block]:
    length, totals = run.header.pack_length, run.totals
    if not length:
        return [Note("This run packs no samples, so there is no fill of packs.")]

    if totals is None or not totals.packs:
        return [Note("No pack was delivered yet.")]

    fill = totals.packed_tokens / (totals.packs * length)
    about = f"How full the packs of {length:,} tokens are over time. All in all {percent(fill)}."
    tiles = [
        Tile("Fill of the packs", percent(fill), f"of {length:,} tokens"),
        Tile("Packs", f"{totals.packs:,}", f"{short(totals.packed_tokens)} tokens"),
        Tile("Samples in no pack", f"{sum(totals.unpacked.values()):,}"),
    ]
    chart = over_time.percents(
        "packs-chart",
        "Fill of the packs",
        about,
        "fill",
        lambda step: _ratio(step.added.packed_tokens, step.added.packs * length),
    )
    return [Tiles(tiles), chart]


def _contents(run: Run) -> list[Block]:
    """How many packs are how full and have how many documents; and the documents of some packs."""
    last = [start.intervals[-1] for start in run.starts if start.intervals]
    fill, documents = summed(one.pack_fill for one in last), summed(one.pack_documents for one in last)
    if not fill:
        return []

    bins = [(f"{low}–{low + 4} %" if low < 100 else "100 %", fill.get(low, 0)) for low in range(min(fill), 101, 5)]
    median = quantile(documents, 0.5) or 0
    about = f"How many packs have how many documents. Median: {_bucket(median)}."
    blocks: list[Block] = [
        columns(
            "fill-chart",
            "Packs by fill",
            "How many packs are how full.",
            bins,
            of="full",
            unit="packs",
            head=("fill", "packs"),
        ),
        _histogram("documents-chart", "Packs by documents", about, documents, "documents", "packs"),
    ]
    shown = [moment.pack for start in run.starts for moment in start.intervals if moment.pack]
    shown = shown[:: -(-len(shown) // _MAX_PACKS) or 1]
    head = ["pack", "position", *(["source"] if run.header.sources else []), "row", "tokens"]
    rows = [
        [f"{number}", ":".join(map(str, one.place)), *([one.source] if run.header.sources else []), *_row_of(one)]
        for number, pack in enumerate(shown, 1)
        for one in pack
    ]
    title = "Documents of some packs, spread over the run; of each, the first 64"
    return [*blocks, Table("pack-table", title, head, rows)]


def _row_of(document: Document) -> list[str]:
    """Its file, with its line, number or byte; and its tokens. No file is read to count lines."""
    at, tokens = document.line or document.row_number, f"{document.num_tokens:,}"
    if at >= 0:
        return [f"{document.path}:{at}", tokens]

    return [f"{document.path}, byte {document.byte_offset:,}" if document.byte_offset >= 0 else document.path, tokens]


# Steps and rows


def steps_section(run: Run) -> Section:
    """Which step had come to which row: some moments of the run."""
    title = "Steps and rows"
    moments = [
        (number, after)
        for number, start in enumerate(run.stream)
        for before, after in itertools.pairwise(start.intervals)
        if after.samples > before.samples
    ]
    if not moments:
        return Section("steps", title, [Note("No interval with a delivery was recorded.")])

    rows = [
        [f"{number}", f"{moment.calls:,}", f"{moment.samples:,}", ":".join(map(str, moment.place))]
        for number, moment in moments[:: -(-len(moments) // _MAX_MOMENTS)]
    ]
    note = Note(
        "A call is a step of a loop. Positions grow along the order, so a step's rows are between two lines. "
        "asyncdata sample --step N prints the rows of one step, --position one row."
    )
    head = ["start", "calls in this start", "samples delivered", "position of the next"]
    return Section("steps", title, [note, Table("steps-table", "Moments of the run", head, rows)])


# What was left out


def left_out_section(run: Run) -> Section:
    """Rows that were dropped, cut or noted, by reason and source."""
    totals = run.totals
    title = "Dropped and truncated"
    if totals is None or not (totals.dropped or totals.noted or totals.unpacked or totals.unread):
        return Section("left-out", title, [Note("No row was dropped, noted, or left out of a pack.")])

    tables = [
        _reasons("dropped", "Rows that yielded no sample", totals),
        _reasons("noted", "Rows that were kept and noted, such as truncated ones", totals),
        _reasons("unpacked", "Samples that are in no pack, or were cut by packing", totals),
        _reasons("unread", "Keys of rows that are not read, in the rows looked at", totals),
    ]
    found = [table for table in tables if table.rows]
    notes = [Note("Notes by source are counted since the last start only.")] if totals.by_source else []
    if any(start.dropped_rows for start in run.starts):
        notes.append(Note("Some rows of each reason are among the samples: choose it under State."))
    return Section("left-out", title, [*found, *notes])


def _reasons(name: str, title: str, totals: Interval) -> Table:
    """A row for each reason: how many there were, and how many of each source, where sources have such counts."""
    counts: dict[str, int] = getattr(totals, name)
    sources = totals.by_source if name in SourceCounts.__struct_fields__ else {}
    reasons = sorted(counts, key=lambda reason: -counts[reason])
    largest = max(counts.values(), default=0) or 1
    rows = []
    for reason in reasons:
        by_source = (getattr(one, name).get(reason, 0) for one in sources.values())
        rows.append([reason, f"{counts[reason]:,}", *(f"{number:,}" for number in by_source)])
    bars = [round(100 * counts[reason] / largest, 1) for reason in reasons]
    return Table(f"{name}-table", title, ["reason", "all", *sources], rows, bars=bars)


# The mixture


def mix_section(run: Run, over_time: OverTime) -> Section:
    """The shares of the parts over time, with their targets."""
    totals = run.totals
    if totals is None or not totals.by_source:
        return Section("mix", "Mix", [Note("This run has a single source, so there is no mixture.")])

    unit = run.header.mix_by or "rows"
    ranked = sorted(totals.by_source, key=lambda name: -_amount(totals.by_source[name], unit))
    series: list[Series] = []
    for name in ranked[:_MAX_SOURCES]:
        series += [_share_line(over_time, name, unit), _target_line(over_time, name)]
    sums = sum(_amount(counts, unit) for counts in totals.by_source.values())
    head = ["source", "share", "target now", "samples", "tokens", "epoch", "dropped", "noted", "calls waited, s"]
    rows = [_source_row(name, totals.by_source[name], unit, sums) for name in ranked]
    bars = [round(100 * _ratio(_amount(totals.by_source[name], unit), sums), 1) if sums else 0.0 for name in ranked]
    about = f"The share of each part over time, in {unit}, with its target as a dashed line."
    left = len(ranked) - _MAX_SOURCES
    notes = (
        [Note(f"The chart has the {_MAX_SOURCES} largest parts; {left:,} more are in the table.")] if left > 0 else []
    )
    chart = over_time.chart("mix-chart", f"Share of each part, in {unit}", about, series, unit="%")
    return Section("mix", "Mix", [chart, *notes, Table("mix-table", "Parts of the mixture", head, rows, bars=bars)])


def _amount(counts: SourceCounts, unit: str) -> int:
    return counts.tokens if unit == "tokens" else counts.samples


def _share_line(over_time: OverTime, name: str, unit: str) -> Series:
    def share(step: Step) -> float:
        amounts = {part: _amount(counts, unit) for part, counts in step.added.by_source.items()}
        return 100 * _ratio(amounts.get(name, 0), sum(amounts.values()))

    return over_time.line(name, share)


def _target_line(over_time: OverTime, name: str) -> Series:
    def target(step: Step) -> float:
        counts = step.added.by_source.get(name)
        return math.nan if counts is None else 100 * counts.target

    return over_time.line(f"{name}, target", target, is_target=True)


def _source_row(name: str, counts: SourceCounts, unit: str, sums: int) -> list[str]:
    share = percent(_amount(counts, unit) / sums) if sums else "–"
    numbers = (counts.samples, counts.tokens, counts.epoch, sum(counts.dropped.values()), sum(counts.noted.values()))
    return [name, share, percent(counts.target), *(f"{number:,}" for number in numbers), f"{counts.wait_s:,.1f}"]


# Rates


def rates_section(over_time: OverTime) -> Section:
    """Samples and tokens per second, and how full the read-ahead is."""
    if not any(over_time.steps):
        return Section("rates", "Throughput", [Note("No interval was recorded, so there are no rates.")])

    samples = over_time.line("samples/s", lambda step: _ratio(step.added.samples, step.seconds))
    tokens = over_time.line("tokens/s", lambda step: _ratio(step.added.tokens, step.seconds))
    about_samples, about_tokens = (
        f"{what} delivered per second, over time." for what in ("Samples", "Tokens of prompts")
    )
    charts = [
        over_time.chart("samples-chart", "Samples per second", about_samples, [samples], unit="samples/s"),
        over_time.chart("tokens-chart", "Tokens per second", about_tokens, [tokens], unit="tokens/s"),
        over_time.percents(
            "ready-chart",
            "Ready samples, of the read-ahead's capacity",
            "How full the read-ahead is.",
            "ready",
            lambda step: _ratio(step.added.ready, step.added.capacity),
        ),
    ]
    return Section("rates", "Throughput", charts)


# Rollouts


def rollouts_section(run: Run, over_time: OverTime) -> Section:
    """Staleness, and groups whose scores are all equal."""
    last = [start.intervals[-1] for start in run.starts if start.intervals]
    staleness, sizes = summed(one.staleness for one in last), summed(one.group_sizes for one in last)
    blocks: list[Block] = []
    if staleness:
        median = quantile(staleness, 0.5)
        about = f"How many groups were delivered between the delivery of a group and its return. Median: {median:,}."
        chart = _histogram(
            "staleness-chart", "Staleness of the groups given back", about, staleness, "groups later", "groups"
        )
        blocks += [chart, Note("Staleness is counted in groups of the stream, delivered while a group was away.")]
    else:
        blocks.append(Note("No group was given back (add_samples), so there is no staleness."))
    if lags := summed(one.version_lags for one in last):
        behind = sum(count for lag, count in lags.items() if lag) / sum(lags.values())
        about = f"How many policy versions a group was behind when it was given back. {percent(behind)} were behind."
        chart = _histogram(
            "versions-chart", "Policy versions behind, of the groups given back", about, lags, "versions", "groups"
        )
        blocks += [
            chart,
            Note("Of a group, its oldest version counts; it is compared with the newest one given back by then."),
        ]
    rewards = summed(one.rewards for one in last)
    if sizes:
        blocks += _degeneracy(over_time, sizes, sum(one.degenerate for one in last))
    if rewards:
        blocks.append(Tiles([_reward_tile(key, counts) for key, counts in sorted(rewards.items())]))
    if not sizes and not rewards:
        blocks.append(Note("This run reported no scores, so it is not known which groups teach nothing."))
    return Section("rollouts", "RL: staleness and groups", blocks)


def _reward_tile(key: str, counts: RewardCounts) -> Tile:
    mean = f"{counts.total / counts.scores:.3g}" if counts.scores else "–"
    about = f"mean of {counts.scores:,} scores, {counts.skipped:,} skipped"
    return Tile(f"Reward {key}", mean, f"{about}; {counts.degenerate:,} of {counts.groups:,} groups have equal scores")


def _degeneracy(over_time: OverTime, sizes: dict[int, int], degenerate: int) -> list[Block]:
    compared = _compared(sizes)
    tiles = [
        Tile(
            "Groups with equal scores",
            percent(_ratio(degenerate, compared)) if compared else "–",
            f"{degenerate:,} of {compared:,}: they give no gradient with GRPO",
        ),
        Tile(
            "Groups with scores",
            f"{sum(sizes.values()):,}",
            ", ".join(f"{count:,} of size {size}" for size, count in sorted(sizes.items())[:6]),
        ),
    ]
    about = "Over time, the share of groups of two or more scores that were all equal."
    return [
        Tiles(tiles),
        over_time.percents(
            "degenerate-chart",
            "Groups with equal scores",
            about,
            "equal scores",
            lambda step: _ratio(step.added.degenerate, _compared(step.added.group_sizes)),
        ),
    ]


def _compared(sizes: dict[int, int]) -> int:
    """Groups of at least two scores, by how many scores each has."""
    return sum(count for size, count in sizes.items() if size > 1)


# The page

MAX_ROWS = 500
"""Of the tables of bad rows and of events; the first bad rows, and the last events."""


def inspected_page(paths: Sequence[str], facts: Sequence[tuple[str, str]], samples: Samples) -> bytes:
    """The page of ``asyncdata inspect --html``.

    :param paths: of the data.
    :param facts: the figures that the command prints.
    """
    about = [", ".join(paths)[:200], "as a run would tokenize them now"]
    sections = [
        Section("samples", "Samples", sample_blocks(samples, "No row was inspected.")),
        Section("facts", "Totals", [Rows(facts)]),
    ]
    return render("Inspected rows", about, sections)


def run_page(
    name: str, run: Run, samples: Samples, place_of: Callable[[BadRowRecord], str], *, renewed_s: int = 0
) -> bytes:
    """The report: the page of ``asyncdata report``.

    :param name: of the run.
    :param samples: of the run, for the page.
    :param place_of: the file and line of a bad row, as text.
    :param renewed_s: seconds after which a page that is served loads itself again; 0: never.
    """
    header = run.header
    began = datetime.fromtimestamp(run.starts[0].header.at, UTC)
    about = [f"began {began:%Y-%m-%d %H:%M} UTC", header.host, f"asyncdata {header.library}"]
    shows = header.shows_rows
    empty = "No sample was recorded." if shows else "Rows are not shown: the run had BadRows(excerpts=False)."
    over_time = OverTime(steps_of(run.stream, origins(run)[0]))
    sections = [
        overview(run),
        waits_section(run),
        left_out_section(run),
        Section("samples", "Samples", sample_blocks(samples, empty, is_redacted=not shows, is_folded=True)),
        steps_section(run),
        ranks_section(run),
        lengths_section(run, over_time),
        mix_section(run, over_time),
        rates_section(over_time),
        rollouts_section(run, over_time),
        _bad_rows(run, place_of),
        _events(run),
        _configuration(run),
    ]
    about += [f"renewed every {renewed_s} s, but not while the samples are unfolded"] if renewed_s else []
    return render(name, [fact for fact in about if fact], sections, renewed_s)


def sample_blocks(samples: Samples, empty: str, *, is_redacted: bool = False, is_folded: bool = False) -> list[Block]:
    """The list of samples, or why there is none."""
    if not samples.shown:
        left = samples.num_left_out
        return [Note(f"None of {left:,} samples was asked for." if left else empty)]

    return [*([Note(empty)] if is_redacted else []), SampleList(samples, is_folded)]


def bad_rows_of(run: Run) -> list[BadRowRecord]:
    """The bad rows, each once: every rank and every epoch may find it again."""
    found: dict[tuple[Any, ...], BadRowRecord] = {}
    for record in (record for start in run.starts for record in start.bad_rows):
        found.setdefault((record.path, record.byte_offset, record.row_number, record.line, record.code), record)
    return list(found.values())


def _bad_rows(run: Run, place_of: Callable[[BadRowRecord], str]) -> Section:
    found = bad_rows_of(run)
    if not found:
        return Section("bad-rows", "Bad rows", [Note("No bad row was found.")])

    rows = [
        [
            record.code,
            place_of(record),
            "" if record.place is msgspec.UNSET else ":".join(map(str, record.place)),
            record.source,
            record.reason,
            record.excerpt,
        ]
        for record in found[:MAX_ROWS]
    ]
    head = ["code", "file and line", "position", "source", "reason", "how it begins"]
    title = f"{_first(len(found), 'bad rows')} Some may have been found ahead of the deliveries."
    return Section("bad-rows", "Bad rows", [Table("bad-rows-table", title, head, rows)])


def _first(number: int, of: str, which: str = "first") -> str:
    if number == 1:
        return f"1 {of[:-1]}."

    return f"{number:,} {of}." if number <= MAX_ROWS else f"The {which} {MAX_ROWS:,} of {number:,} {of}."


def _events(run: Run) -> Section:
    events = [(event, start.header.rank) for start in run.starts for event in start.events]
    if not events:
        return Section("events", "Events", [Note("No event was logged.")])

    events.sort(key=lambda pair: pair[0].at)
    rows = [[_time(event.at), str(rank), event.level, event.name, _values(event.fields)] for event, rank in events]
    counts = Counter(event.name for event, _ in events)
    names = Table(
        "event-names", "Events by name", ["event", "times"], [[name, f"{n:,}"] for name, n in counts.most_common()]
    )
    title = _first(len(rows), "events", "last")
    table = Table("events-table", title, ["UTC", "rank", "level", "event", "fields"], rows[-MAX_ROWS:])
    return Section("events", "Events", [names, table] if len(rows) > len(counts) else [table])


def _values(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _configuration(run: Run) -> Section:
    header = run.header
    rows = [
        *(_functions(header)),
        ("files", _listed(header.files, header.num_files)),
        ("size of the files", f"{header.num_bytes:,} bytes"),
        ("parts of the mixture", ", ".join(header.sources)),
        ("samples of a group", f"{header.group_size:,}"),
        ("packing", _json(header.packing) if header.packing else ""),
        ("loaders", f"{header.world_size:,}"),
        ("data-parallel ranks of a loader", f"{header.dp_size:,}"),
        ("seconds between intervals", f"{header.interval_s:g}"),
        *((name, _json(value)) for name, value in header.config.items()),
    ]
    starts = [
        [
            str(start.header.rank),
            str(start.header.number),
            _time(start.header.at),
            ":".join(map(str, start.origin[1])),
            f"{start.origin[0]:,}",
            _ended(start),
        ]
        for start in run.starts[:MAX_ROWS]
    ]
    head = ["rank", "start", "began, UTC", "at position", "samples before", "ended"]
    table = Table("starts-table", _first(len(run.starts), "loader starts"), head, starts)
    note = Note("Settings that are not listed have their default.")
    return Section("configuration", "Configuration", [Rows([row for row in rows if row[1]]), note, table])


def _functions(header: RunStart) -> list[tuple[str, str]]:
    """The tokenize function; of a mixture with several, that of each part."""
    if len(set(header.tokenize_fns.values())) < 2:
        return [("tokenize function", header.tokenizer)]

    return [(f"tokenize function of {part}", function) for part, function in header.tokenize_fns.items()]


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def _ended(start: Start) -> str:
    if start.end is None:
        return "no end: killed, or still running"

    return ": ".join(filter(None, (start.end.reason or "closed", start.end.error)))


def _listed(names: Iterable[str], number: int) -> str:
    listed = list(names)
    return "\n".join([*listed, *([f"and {number - len(listed):,} more"] if number > len(listed) else [])])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
