"""``asyncdata verify``: compares the streams of two runs by the digests in their snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncdata.checkpoint.compare_runs import Comparison, Verdict, compare
from asyncdata.checkpoint.snapshot import load
from asyncdata.cli.output import fields, printable, shown_path

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output

__all__ = ("STATUS", "run")

STATUS = {Verdict.SAME: 0, Verdict.DIFFERENT: 3, Verdict.UNDECIDED: 4}
"""Exit statuses. 1 is an error, such as a file that cannot be read."""


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    found = compare(load(args.first), load(args.second))
    paths = [shown_path(args.first), shown_path(args.second)]
    output.put(msgspec.to_builtins(found), lambda _: _text(found, paths))
    return STATUS[found.verdict]


def _text(found: Comparison, paths: list[str]) -> str:
    lines: list[tuple[str, str]] = [("verdict", found.verdict)]
    lines += [("", reason) for reason in found.reasons]
    for name, path, position, number in zip(
        ("first", "second"), paths, found.positions, found.num_samples, strict=True
    ):
        lines.append((name, f"{path}: {number:,} samples of the stream; {position} comes next"))
    lines += [("differs", change) for change in found.changes.values()]
    return fields((name, printable(value)) for name, value in lines)
