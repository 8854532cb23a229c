"""Commands that read what a run has written: ``asyncdata snapshot show``, ``asyncdata verify``, which compares the
streams of two runs by the digests in their snapshots, and ``asyncdata quarantine show``.
"""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec

from asyncdata.checkpoint.snapshot import load
from asyncdata.checkpoint.summary import Comparison, Verdict, compare, describe_file
from asyncdata.cli.output import Output, fields, shown_path
from asyncdata.core.errors import printable
from asyncdata.delivery.quarantine import Entry, Quarantined, read_quarantine

STATUS = {Verdict.SAME: 0, Verdict.DIFFERENT: 3, Verdict.UNDECIDED: 4}
"""Exit statuses. 1 is an error, such as a file that cannot be read."""


def snapshot_show(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    found = describe_file(args.file)
    output.put(found, _contents)
    return 0


def _contents(found: dict[str, Any]) -> str:
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
        *([("excluded", f"{found['num_excluded_rows']:,} rows")] if found["num_excluded_rows"] else []),
        *([("outcomes", _outcomes(found["outcomes"]))] if found["outcomes"] else []),
        *((f"part {name}", _part(part)) for name, part in found["parts"].items()),
    ]
    return fields((name, printable(str(value))) for name, value in lines)


def _outcomes(found: dict[str, Any]) -> str:
    size = f"{found['num_rows']:,} rows, {found['num_scores']:,} scores, {found['num_bytes']:,} bytes"
    return f"{size}, digest {found['digest']}"


def _part(found: dict[str, Any]) -> str:
    delivered = f"{found['num_samples']:,} samples, {found['num_tokens']:,} tokens, epoch {found['epoch']}"
    parked = "; parked" if found["is_parked"] else ""
    drops = f"; dropped {_pairs(found['drops'])}" if found["drops"] else ""
    outcomes = f"; outcomes {_outcomes(found['outcomes'])}" if found["outcomes"] else ""
    return f"{delivered}{parked}{drops}{outcomes}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" if type(value) is int else f"{name} {value}" for name, value in values.items())


def verify(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    found = compare(load(args.first), load(args.second))
    paths = [shown_path(args.first), shown_path(args.second)]
    output.put(msgspec.to_builtins(found), lambda _: _verdict(found, paths))
    return STATUS[found.verdict]


def _verdict(found: Comparison, paths: list[str]) -> str:
    lines: list[tuple[str, str]] = [("verdict", found.verdict)]
    lines += [("", reason) for reason in found.reasons]
    for name, path, position, number in zip(
        ("first", "second"), paths, found.positions, found.num_samples, strict=True
    ):
        lines.append((name, f"{path}: {number:,} samples of the stream; {position} comes next"))
    lines += [("differs", change) for change in found.changes.values()]
    return fields((name, printable(value)) for name, value in lines)


def quarantine_show(args: SimpleNamespace, output: Output) -> int:
    """``asyncdata quarantine show``."""
    found = _read(args.file, output)
    if found is None:
        return 2

    codes = Counter(entry.code for entry in found.entries)
    counted = list(zip(found.entries, found.times, strict=True))
    if output.as_json:
        rows = [msgspec.structs.asdict(entry) | {"times": times} for entry, times in counted]
        output.json({"rows": rows, "codes": dict(codes), "num_unreadable": found.num_unreadable})
        return 0

    for entry, times in counted:
        again = f"  ({times} times)" if times > 1 else ""
        output.data(f"{_place(entry)}  {printable(f'{entry.code} {entry.reason}')}{again}")
        if entry.excerpt:
            output.data(f"  row: {printable(entry.excerpt)}")
    output.data(_counts(found, codes))
    return 0


def _counts(found: Quarantined, codes: Counter[str]) -> str:
    lines = [("rows", f"{len(found.entries):,}")]
    lines += [(code, f"{number:,}") for code, number in sorted(codes.items())]
    if found.num_unreadable:
        lines.append(("unreadable", f"{found.num_unreadable:,} lines of the file"))
    return fields(lines)


def _place(entry: Entry) -> str:
    return printable(entry.place.replace(entry.path, shown_path(entry.path), 1))


def _read(path: str, output: Output) -> Quarantined | None:
    """The contents of the file; None, after a message, if it is not a quarantine file: the command line is wrong."""
    found = read_quarantine(path)
    if found.entries or not found.num_unreadable:
        return found

    message = f"{path} is not a quarantine file: none of its {found.num_unreadable:,} lines describes a bad row"
    if output.as_json:
        output.json({"error": {"type": "ConfigError", "message": message}})
    output.say(f"asyncdata: {message}", "red")
    return None
