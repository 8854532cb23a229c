"""``asyncdata report``: writes one page about a run, from its telemetry."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.inspection.shown_samples import place_of, shown_bad_row, shown_dropped_row, shown_record
from asyncdata.cli.output import fields, printable, shown_path
from asyncdata.report.page import write_page
from asyncdata.report.run_page import bad_rows_of, run_page
from asyncdata.report.samples import Samples
from asyncdata.telemetry.reader import read
from asyncdata.telemetry.records import BadRowRecord, SampleRecord

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output
    from asyncdata.report.samples import ShownSample
    from asyncdata.telemetry.reader import Run
    from asyncdata.telemetry.records import DroppedRow

__all__ = ("run",)


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    if args.demo:
        output.say("a short run is recorded, to write a page about it")
    found = _demo() if args.demo else read(args.folder)
    samples = _samples(found, args.samples)
    name = "A demo" if args.demo else os.path.normpath(args.folder)
    write_page(args.output, run_page(name, found, samples, place_of))
    record: dict[str, Any] = {
        "page": args.output,
        "num_bytes": os.path.getsize(args.output),
        "num_samples": len(samples.shown),
        "num_samples_left_out": samples.num_left_out,
        "num_starts": len(found.starts),
    }
    output.put(record, lambda _: fields(_lines(args.output, record)))
    return 0


def _demo() -> Run:
    """The demo's run. Only this needs the loader."""
    from asyncdata.cli.commands.report_demo import record_demo_run

    with tempfile.TemporaryDirectory(prefix="asyncdata-report-") as folder:
        return read(record_demo_run(Path(folder)))


def _samples(found: Run, max_samples: int) -> Samples:
    """The samples, and rows that were dropped or bad, in the order of their places."""
    samples = Samples(max_samples)
    records: list[BadRowRecord | DroppedRow | SampleRecord]
    records = [*found.samples(), *found.dropped_rows(), *bad_rows_of(found)]
    for record in sorted(records, key=_place):
        if samples.is_full:
            samples.num_left_out += 1
        else:
            samples.add(_shown(record))
    return samples


def _shown(record: BadRowRecord | DroppedRow | SampleRecord) -> ShownSample:
    if isinstance(record, SampleRecord):
        return shown_record(record)

    return shown_bad_row(record) if isinstance(record, BadRowRecord) else shown_dropped_row(record)


def _place(record: BadRowRecord | DroppedRow | SampleRecord) -> tuple[float, ...]:
    return (math.inf,) if record.place is msgspec.UNSET else record.place


def _lines(path: str, record: dict[str, Any]) -> list[tuple[str, str]]:
    left = f", of {record['num_samples'] + record['num_samples_left_out']:,}" if record["num_samples_left_out"] else ""
    return [
        ("page", f"{printable(shown_path(path))}, {record['num_bytes']:,} bytes"),
        ("samples", f"{record['num_samples']:,}{left}"),
        ("starts", f"{record['num_starts']:,}"),
    ]
