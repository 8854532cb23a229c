"""The report of a run, from its telemetry; and the page of inspected rows."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.report.delivered import (
    left_out_section,
    lengths_section,
    mix_section,
    rates_section,
    rollouts_section,
    steps_section,
)
from asyncdata.report.figures import OverTime, origins, steps_of
from asyncdata.report.page import Note, Rows, SampleList, Section, Table, render
from asyncdata.report.waiting import overview, ranks_section, waits_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncdata.report.page import Block, Samples
    from asyncdata.telemetry.reader import Run
    from asyncdata.telemetry.records import BadRowRecord, End, Event, RunStart

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
    rows = [[_time(event.at), str(rank), event.level, event.name, _values(event)] for event, rank in events]
    counts = Counter(event.name for event, _ in events)
    names = Table(
        "event-names", "Events by name", ["event", "times"], [[name, f"{n:,}"] for name, n in counts.most_common()]
    )
    title = _first(len(rows), "events", "last")
    table = Table("events-table", title, ["UTC", "rank", "level", "event", "fields"], rows[-MAX_ROWS:])
    return Section("events", "Events", [names, table] if len(rows) > len(counts) else [table])


def _values(event: Event) -> str:
    return ", ".join(f"{name}={value}" for name, value in event.fields.items())


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
            _ended(start.end),
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


def _ended(end: End | None) -> str:
    told = None if end is None else filter(None, (end.reason or "closed", end.error))
    return "no end: killed, or still running" if told is None else ": ".join(told)


def _listed(names: Iterable[str], number: int) -> str:
    listed = list(names)
    return "\n".join([*listed, *([f"and {number - len(listed):,} more"] if number > len(listed) else [])])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
