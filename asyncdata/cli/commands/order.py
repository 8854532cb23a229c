"""``asyncdata order``: prints D, the order in which rows are delivered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from asyncdata.cli.inspection.find_rows import line_numbers
from asyncdata.cli.options import mixture_view, opened_order
from asyncdata.cli.output import printable, shown_path, to_json
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.core.errors import ConfigError
from asyncdata.core.types import Position

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from asyncdata.cli.inspection.window_view import OpenedOrder
    from asyncdata.cli.output import Output
    from asyncdata.core.types import Sample, SourceLocation

__all__ = ("run",)

_BATCH = 256


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    if args.mix is not None:
        return _print_mixture(args, output)

    settle_kind(args, output)
    columns: list[str] = []
    with opened_order(args) as opened:
        for first, found in _stretches(opened, args):
            is_numbered = found[0].row_number is not None
            if is_numbered and args.lines:
                raise ConfigError("--lines is for files of lines; the numbers of these rows are printed without it")

            if not columns:
                place = "row_number" if is_numbered else "byte_offset"
                columns = ["position", "path", place, "num_bytes", *(["line"] if args.lines else [])]
                if not output.as_json:
                    output.data("\t".join(columns), "dim")
            lines = line_numbers(found) if args.lines else []
            rows = [
                [f"{first.epoch}:{first.window}:{first.row + i}", *_values(each, output.as_json), *lines[i : i + 1]]
                for i, each in enumerate(found)
            ]
            if output.as_json:
                output.data("\n".join(to_json(dict(zip(columns, row, strict=True))) for row in rows))
            else:
                output.data("\n".join("\t".join(map(str, row)) for row in rows))
    return 0


def _print_mixture(args: argparse.Namespace, output: Output) -> int:
    """The samples of a mixture, in the order of its schedule: found by delivering them, as rows may be dropped."""
    given = [name for name in ("epoch", "window", "lines") if getattr(args, name)]
    if given:
        raise ConfigError(f"--{given[0]} is not for --mix: which sample comes when is found by delivering them")

    columns = ["position", "source", "path", "byte_offset", "num_bytes"]
    if not output.as_json:
        output.data("\t".join(columns), "dim")
    with mixture_view(args) as view, view.loader() as loader:
        left = args.first + (args.num or sys.maxsize)
        number = 0
        while left:
            for sample in loader.get_next_batch(min(left, _BATCH)):
                if number >= args.first:
                    _print_sample(sample, columns, output)
                number += 1
            left -= min(left, _BATCH)
    return 0


def _print_sample(sample: Sample, columns: list[str], output: Output) -> None:
    assert sample.source is not None
    row = [str(sample.position), sample.source_name, *_values(sample.source, output.as_json)]
    output.data(to_json(dict(zip(columns, row, strict=True))) if output.as_json else "\t".join(map(str, row)))


def _values(found: SourceLocation, is_for_programs: bool) -> list[Any]:
    path = found.path if is_for_programs else printable(shown_path(found.path))
    return [path, found.byte_offset if found.row_number is None else found.row_number, found.num_bytes]


def _stretches(opened: OpenedOrder, args: argparse.Namespace) -> Iterator[tuple[Position, list[SourceLocation]]]:
    """The requested rows, window by window, each with the position of its first row, up to the end of the epoch."""
    first, left = args.first, args.num or sys.maxsize
    for view in opened.windows(args.epoch, args.window or 0):
        is_last = view.is_last or args.window is not None
        if first >= view.num_rows and is_last:
            raise ConfigError(
                f"--from {args.first} is beyond the end: window {view.first.window} of epoch {args.epoch} has "
                f"{view.num_rows} rows"
            )

        if found := view.locations()[first : first + left]:
            yield Position(args.epoch, view.first.window, first), found
        first, left = max(0, first - view.num_rows), left - len(found)
        if is_last or left == 0:
            return
