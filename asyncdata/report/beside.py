"""Two runs side by side: their figures, and the settings in which they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.report.charts import short
from asyncdata.report.figures import by_rank, ratio, slowest
from asyncdata.report.page import Note, Section, Table
from asyncdata.report.waiting import milliseconds, percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.telemetry.reader import Run
    from asyncdata.telemetry.records import Interval

__all__ = ("beside_section",)


def beside_section(name: str, run: Run, other_name: str, other: Run) -> Section:
    """The figures of two runs; of ranks, those of the one that waited most."""
    of_run, of_other = _figures(run), _figures(other)
    rows = [[what, of_run.get(what, "–"), of_other.get(what, "–")] for what in {**of_run, **of_other}]
    settings = [[what, *values] for what, values in _differences(run, other).items()]
    head = ["", name, other_name]
    tables = [Table("beside-table", "Figures of both runs; of ranks, those of the one that waited most", head, rows)]
    if settings:
        tables.append(Table("settings-table", "Settings in which they differ", head, settings))
    return Section("beside", "Beside", [*tables, *([] if settings else [Note("Both runs have the same settings.")])])


def _figures(run: Run) -> dict[str, str]:
    found = {"ranks": f"{run.header.world_size:,}"}
    ranks = [one for one in by_rank(run) if one.calls]
    if ranks:
        worst = slowest(ranks)
        found["waited for data"] = percent(worst.share)
        found["wait of a call, 90th percentile"] = milliseconds(worst.wait_at(0.9))
        found["wait of a call, 99th percentile"] = milliseconds(worst.wait_at(0.99))
        found["step time"] = milliseconds((worst.step_s + worst.waited_s) / worst.calls)
        found["start-up"] = milliseconds(sum(worst.first_s.values()))
        found["workers' work, of all ranks"] = milliseconds(sum(one.work_s for one in ranks))
    totals = run.totals
    if totals is not None:
        seconds = sum(start.intervals[-1].elapsed_s for start in run.stream if start.intervals)
        counts: dict[str, Callable[[Interval], int]] = {"samples": lambda one: one.samples}
        counts["tokens"] = lambda one: one.tokens
        for what, of in counts.items():
            added = sum(of(one.intervals[-1]) - of(one.intervals[0]) for one in run.stream if one.intervals)
            found[what] = short(of(totals))
            found[f"{what} a second"] = short(ratio(added, seconds)) if seconds else "–"
        found["rows dropped"] = f"{sum(totals.dropped.values()):,}"
        if run.header.pack_length and totals.packs:
            found["fill of the packs"] = percent(totals.packed_tokens / (totals.packs * run.header.pack_length))
        found["workers of a rank"] = f"{totals.workers:,}"
    return found


def _differences(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    one, two = _settings(run), _settings(other)
    return {
        name: (str(one.get(name, "default")), str(two.get(name, "default")))
        for name in {**one, **two}
        if one.get(name) != two.get(name)
    }


def _settings(run: Run) -> dict[str, Any]:
    header = run.header
    found = {"tokenize function": header.tokenizer, "packing": header.packing, "files": header.num_files}
    return {**found, "version": header.library, "host": header.host, **header.config}
