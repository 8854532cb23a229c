"""``asyncdata sample``: shows the row at one position: its location in the data, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.cli.inspection.mixture_view import PlacedRow
from asyncdata.cli.option_checks import has_tokenize_fn
from asyncdata.cli.options import loader_of, mixture_view, opened_order
from asyncdata.cli.output import fields, printable, shown_path
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.core.errors import ConfigError
from asyncdata.core.types import Position

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output
    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader

__all__ = ("run",)

_BATCH = 4096


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    settle_kind(args, output)
    placed = _of_files(args) if args.mix is None else _of_mixture(args)
    output.put(_report(args, placed), _text)
    return 0


def _of_files(args: argparse.Namespace) -> PlacedRow:
    position = Position.parse(args.position) if args.position else None
    if position is None and has_tokenize_fn(args):
        with loader_of(args) as loader:
            position = _sample_of(loader, args).position
    with opened_order(args) as opened:
        row = opened.at(opened.position_of(args.ordinal) if position is None else position)
    return PlacedRow("", row.position, row, None)


def _of_mixture(args: argparse.Namespace) -> PlacedRow:
    with mixture_view(args) as view:
        if args.position:
            return view.at(Position.parse(args.position), args.num_workers)

        with view.loader(args.num_workers) as loader:
            sample = _sample_of(loader, args)
        return view.row_of(sample)


def _sample_of(loader: DataLoader, args: argparse.Namespace) -> Sample:
    """The sample with this index. As rows may have been dropped before it, all are tokenized."""
    if args.snapshot is not None:
        loader.restore(args.snapshot)
    left = args.ordinal - loader.statistics().samples_total
    if left < 0:
        raise ConfigError(
            f"--ordinal {args.ordinal} lies before {args.snapshot}, which was written after "
            f"{args.ordinal - left} samples; name an older snapshot, or none"
        )

    while left:
        left -= len(loader.get_next_batch(min(left, _BATCH)))
    (sample,) = loader.get_next_batch(1)
    if sample.position is None:
        raise ConfigError(f"sample {args.ordinal} was not made from a row and has no position")

    return sample


def _report(args: argparse.Namespace, placed: PlacedRow) -> dict[str, Any]:
    row = placed.row
    found, sample = row.location, row.sample
    lies_at = {"line": found.line_number(), "byte_offset": found.byte_offset}
    return {
        "position": str(placed.position),
        **({"source": placed.source_name} if placed.source_name else {}),
        "ordinal": args.ordinal,
        "path": found.path,
        **(lies_at if found.row_number is None else {"row_number": found.row_number}),
        "num_bytes": found.num_bytes if found.num_bytes >= 0 else None,
        "row": row.raw.decode("utf-8", "backslashreplace"),
        "prompt": sample.prompt if sample is not None else None,
        "tokens": sample.tokens.tolist() if sample is not None else None,
        "dropped": row.dropped or None,
        "error": row.fault,
    }


def _text(report: dict[str, Any]) -> str:
    size = report["num_bytes"] if report["num_bytes"] is not None else "?"
    if "row_number" in report:
        place = [("row number", report["row_number"]), ("bytes", f"{size} as JSON")]
    else:
        place = [("line", report["line"]), ("bytes", f"{size} from {report['byte_offset']}")]
    lines = [
        ("position", report["position"]),
        ("file", shown_path(report["path"])),
        *place,
        ("row", printable(report["row"])),
    ]
    if report["ordinal"] is not None:
        lines.insert(1, ("ordinal", report["ordinal"]))
    if "source" in report:
        lines.insert(1, ("source", report["source"]))
    if report["tokens"] is not None:
        lines.append(("prompt", printable(str(report["prompt"]))))
        lines.append(("tokens", f"{len(report['tokens'])}: {' '.join(map(str, report['tokens']))}"))
    if report["dropped"]:
        lines.append(("dropped", report["dropped"]))
    if report["error"]:
        lines.append(("bad row", printable(report["error"])))
    return fields(lines)
