"""``asyncdata order``: D, printed. Determinism one can see."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.inspection.window_view import line_numbers, open_order, rows_of_window
from asyncdata.cli.options import shuffle_of
from asyncdata.cli.output import printable, shown_path, to_json
from asyncdata.errors import ConfigError
from asyncdata.types import Position, SourceLocation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from asyncdata.cli.output import Output
    from asyncdata.order import Order
    from asyncdata.sources.base import Blocks

__all__ = ("run",)


class _Entry(NamedTuple):
    position: Position
    location: SourceLocation


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    files, order = open_order(args.data, seed=args.seed, shuffle=shuffle_of(args))
    is_numbered = files.location(0, 0, 0).row_number is not None
    if is_numbered and args.lines:
        raise ConfigError("--lines is for files of lines; these have rows, and their numbers are printed as it is")

    place = "row_number" if is_numbered else "byte_offset"
    columns = ("position", "path", place, "num_bytes", *(("line",) if args.lines else ()))
    if not output.as_json:
        output.data("\t".join(columns), "dim")
    for entries in _windows(files, order, args):
        lines = line_numbers([entry.location for entry in entries]) if args.lines else []
        rows = [_values(entry, output.as_json) + lines[i : i + 1] for i, entry in enumerate(entries)]
        if output.as_json:
            output.data("\n".join(to_json(dict(zip(columns, row, strict=True))) for row in rows))
        else:
            output.data("\n".join("\t".join(map(str, row)) for row in rows))
    return 0


def _values(entry: _Entry, is_for_programs: bool) -> list[Any]:
    found = entry.location
    path = found.path if is_for_programs else printable(shown_path(found.path))
    offset = found.byte_offset if found.row_number is None else found.row_number
    return [str(entry.position), path, offset, found.num_bytes]


def _windows(files: Blocks, order: Order, args: argparse.Namespace) -> Iterator[list[_Entry]]:
    """The entries that are asked for, window by window, to the end of the window or of the epoch."""
    windows = range(order.num_windows) if args.window is None else [args.window]
    first, left = args.first, args.num or sys.maxsize
    for window in windows:
        if left == 0:
            return

        rows = rows_of_window(files, order, args.epoch, window)
        if first >= len(rows) and window == windows[-1]:
            raise ConfigError(
                f"--from {args.first} is beyond the end: window {window} of epoch {args.epoch} has {len(rows)} rows"
            )

        found = [_Entry(Position(args.epoch, window, row), rows[row]) for row in range(first, len(rows))]
        entries = found[:left]
        first = max(0, first - len(rows))
        left -= len(entries)
        if entries:
            yield entries
