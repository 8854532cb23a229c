"""``asyncdata quarantine``: lists the bad rows that a run skipped, and reads them again."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.inspection.find_rows import row_at_byte, row_in_file
from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.cli.options import tokenize_fn_of
from asyncdata.cli.output import fields, printable, shown_path
from asyncdata.core.atomic_file import replace_file, sync_folder
from asyncdata.core.errors import AsyncDataError, ConfigError
from asyncdata.core.line_numbers import line_number
from asyncdata.delivery.quarantine import read_quarantine
from asyncdata.order.shuffle import Shuffle
from asyncdata.tokenization.resolve import resolved

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from asyncdata.cli.inspection.window_view import InspectedRow
    from asyncdata.cli.output import Output
    from asyncdata.delivery.quarantine import Entry, Quarantined

__all__ = ("retry", "show")

_IN_ORDER = Shuffle(enabled=False, window_blocks=32)  # a row is found by reading its window
_NOT_TRIED = {"AD422": "its worker hung", "AD423": "its worker died"}


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


def show(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata quarantine show``."""
    found = _read(args.file, output)
    if found is None:
        return 2

    codes = Counter(entry.code for entry in found.entries)
    if output.as_json:
        rows = [_record(entry) | {"times": times} for entry, times in zip(found.entries, found.times, strict=True)]
        output.json({"rows": rows, "codes": dict(codes), "num_unreadable": found.num_unreadable})
        return 0

    for entry, times in zip(found.entries, found.times, strict=True):
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


def _record(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def _place(entry: Entry) -> str:
    return printable(entry.place.replace(entry.path, shown_path(entry.path), 1))


class _Outcome(NamedTuple):
    """The result of reading a row again.

    :ivar status: ``good``, ``dropped``, ``bad``, or ``not tried``.
    :ivar raw: the row, where it is good.
    """

    entry: Entry
    status: str
    reason: str
    raw: bytes = b""


def retry(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata quarantine retry``."""
    path = os.path.abspath(args.output)
    if os.path.lexists(path):
        raise ConfigError(f"{args.output} exists already; name another file by --output")

    found = _read(args.file, output)
    if found is None:
        return 2

    with _Rows(resolved(tokenize_fn_of(args))) as rows:
        outcomes = [rows.again(entry) for entry in found.entries]
    good = [_line(outcome.raw) for outcome in outcomes if outcome.status == "good"]
    if good:
        replace_file(path, good, keep=1)
        sync_folder(path)
    counts = Counter(outcome.status for outcome in outcomes)
    if output.as_json:
        records = [_record(each.entry) | {"status": each.status, "now": each.reason} for each in outcomes]
        output.json({"rows": records, "counts": dict(counts), "output": args.output if good else None})
    else:
        _say(output, outcomes, counts, args.output)
    return 0


def _line(raw: bytes) -> bytes:
    """The row on one line: an element of an array may have several."""
    return (json.dumps(json.loads(raw)).encode("ascii") if b"\n" in raw else raw.rstrip(b"\r")) + b"\n"


def _say(output: Output, outcomes: Iterable[_Outcome], counts: Counter[str], path: str) -> None:
    for outcome in outcomes:
        reason = f": {printable(outcome.reason)}" if outcome.reason else ""
        output.data(f"{_place(outcome.entry)}  {outcome.status}{reason}")
    lines = [(status, f"{counts[status]:,}") for status in ("good", "dropped", "bad", "not tried")]
    if counts["good"]:
        lines.append(("written to", path))
    output.data(fields(lines))


class _Rows(ExitStack):
    """Reads rows again, each at the location in its entry. To be used in a ``with``."""

    def __init__(self, tokenize_fn: Any) -> None:
        super().__init__()
        self._tokenize_fn = tokenize_fn
        self._path: str | None = None
        self._opened: OpenedOrder

    def again(self, entry: Entry) -> _Outcome:
        """Read a row again, in this process."""
        if entry.code in _NOT_TRIED:
            reason = f"{entry.code} {_NOT_TRIED[entry.code]}, and this process might too; run it with bad_rows"
            return _Outcome(entry, "not tried", reason)

        try:
            row = _row(self._order_of(entry.path), entry)
        except AsyncDataError as error:
            return _Outcome(entry, "not tried", str(error))

        if row.fault is not None:
            return _Outcome(entry, "bad", row.fault)

        return _Outcome(entry, "dropped", row.dropped) if row.sample is None else _Outcome(entry, "good", "", row.raw)

    def _order_of(self, path: str) -> OpenedOrder:
        """The opened rows of a file or a saved dataset. One is open at a time."""
        if path != self._path:
            self.close()
            self._path = None
            names = [path, re.sub(r"\[[^]]*\]$", "", path)]  # a dataset's name may end with a split
            place = next((name for name in names if os.path.exists(name)), None)
            if place is None:
                raise ConfigError(f"{path} does not exist any more, or is not a file")

            self._opened = self.enter_context(OpenedOrder(place, self._tokenize_fn, shuffle=_IN_ORDER))
            self._path = path
        return self._opened


def _row(opened: OpenedOrder, entry: Entry) -> InspectedRow:
    """The row of an entry.

    It is at its old offset, unless a row before it was repaired and is now longer or shorter: then its line is used.

    :raises ConfigError: if it cannot be found.
    """
    if entry.row_number is not None:
        return row_in_file(opened, str(entry.row_number))

    found = row_at_byte(opened, entry.byte_offset) if _has_not_moved(entry) else None
    if found is not None:
        return found

    if entry.line is None:
        raise ConfigError("its line is not known, and no row begins at its byte any more")

    return row_in_file(opened, str(entry.line))


def _has_not_moved(entry: Entry) -> bool:
    """Whether the entry's offset is on the entry's line, if the line is known."""
    if not 0 <= entry.byte_offset < os.path.getsize(entry.path):
        return False

    return entry.line is None or line_number(entry.path, entry.byte_offset) == entry.line
