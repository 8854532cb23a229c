"""``asyncdata snapshot show``: prints the contents of a snapshot, without a loader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncdata.checkpoint.snapshot import describe_file
from asyncdata.cli.output import fields, printable, shown_path

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output

__all__ = ("show",)


def show(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    found = describe_file(args.file)
    output.put(found, _text)
    return 0


def _text(found: dict[str, Any]) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["created"]))
    counters, prints = dict(found["counters"]), dict(found["fingerprints"])
    drops = counters.pop("drops", None) or {}
    data = prints.pop("data", None)
    lines = [
        ("file", shown_path(found["path"])),
        ("written", f"{written}, {found['num_bytes']:,} bytes, by asyncdata {found['library']}"),
        ("position", f"{found['epoch']}:{found['window']}:{found['row']} comes next (epoch:window:row)"),
        ("delivered", f"{counters.get('num_samples', 0):,} samples, {counters.get('num_tokens', 0):,} tokens"),
        ("dropped", _pairs(drops) or "nothing"),
        ("order", _pairs(found["order"])),
        ("data", _pairs(data) if isinstance(data, dict) else data or "unknown"),
        *((name, prints[name]) for name in ("tokenizer", "template", "tokenize_fn") if prints.get(name)),
        ("buffer", f"{found['num_buffered_groups']:,} groups, {found['num_buffered_tokens']:,} tokens"),
        ("leased", f"{found['num_leased_groups']:,} groups; {found['num_acked']:,} positions acknowledged"),
        *([("outcomes", _outcomes(found["outcomes"]))] if found["outcomes"] else []),
        *((f"part {name}", _part(part)) for name, part in found["parts"].items()),
    ]
    return fields((name, printable(str(value))) for name, value in lines)


def _outcomes(found: dict[str, Any]) -> str:
    where = "of its file" if found["is_in_file"] else "in the snapshot"
    size = f"{found['num_rows']:,} rows, {found['num_scores']:,} scores, {found['num_bytes']:,} bytes {where}"
    return f"{size}, digest {found['digest'] or 'none'}"


def _part(found: dict[str, Any]) -> str:
    delivered = f"{found['num_samples']:,} samples, {found['num_tokens']:,} tokens, epoch {found['epoch']}"
    parked = "; parked" if found["is_parked"] else ""
    drops = f"; dropped {_pairs(found['drops'])}" if found["drops"] else ""
    outcomes = f"; outcomes {_outcomes(found['outcomes'])}" if found["outcomes"] else ""
    return f"{delivered}{parked}{drops}{outcomes}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" if type(value) is int else f"{name} {value}" for name, value in values.items())
