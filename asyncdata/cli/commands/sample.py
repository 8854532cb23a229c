"""``asyncdata sample``: shows the row at one position: its location in the data, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.cli.option_checks import has_tokenize_fn
from asyncdata.cli.options import loader_of, opened_order
from asyncdata.cli.output import fields, printable, shown_path
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.core.errors import ConfigError
from asyncdata.core.types import Position

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.inspection.window_view import InspectedRow
    from asyncdata.cli.output import Output

__all__ = ("run",)

_BATCH = 4096


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    settle_kind(args, output)
    is_by_sample = args.position is None and has_tokenize_fn(args)
    position = _position_of_sample(args) if is_by_sample else None
    with opened_order(args) as opened:
        if position is None:
            position = Position.parse(args.position) if args.position else opened.position_of(args.ordinal)
        report = _report(args, opened.at(position))
    output.put(report, _text)
    return 0


def _position_of_sample(args: argparse.Namespace) -> Position:
    """The position of the sample with this index. As rows may have been dropped before it, all are tokenized."""
    with loader_of(args) as loader:
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
        position = loader.get_next_batch(1)[0].position
        if position is None:
            raise ConfigError(f"sample {args.ordinal} was not made from a row and has no position")

        return position


def _report(args: argparse.Namespace, row: InspectedRow) -> dict[str, Any]:
    found, sample = row.location, row.sample
    lies_at = {"line": found.line_number(), "byte_offset": found.byte_offset}
    return {
        "position": str(row.position),
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
    if report["tokens"] is not None:
        lines.append(("prompt", printable(str(report["prompt"]))))
        lines.append(("tokens", f"{len(report['tokens'])}: {' '.join(map(str, report['tokens']))}"))
    if report["dropped"]:
        lines.append(("dropped", report["dropped"]))
    if report["error"]:
        lines.append(("bad row", printable(report["error"])))
    return fields(lines)
