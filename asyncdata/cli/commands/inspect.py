"""``asyncdata inspect``: shows the tokens of some rows, and which of them are trained, also as a page."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

from asyncdata.cli.commands.mask_text import lines_of, plain_text, styled_text
from asyncdata.cli.commands.tokenizer_facts import backend_line, encoding_of, template_lines, template_of
from asyncdata.cli.inspection.find_rows import row_in_file
from asyncdata.cli.inspection.loss_mask import LossMask
from asyncdata.cli.inspection.mixture_view import PlacedRow
from asyncdata.cli.inspection.shown_samples import shown_row
from asyncdata.cli.options import mixture_view, opened_order, tokenize_fn_of
from asyncdata.cli.output import fields, is_terminal, printable, shown_path
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.core.errors import ConfigError
from asyncdata.core.row_codes import is_mass
from asyncdata.core.types import Position
from asyncdata.report.page import write_page
from asyncdata.report.run_page import inspected_page
from asyncdata.report.samples import Samples
from asyncdata.tokenization.chat_template.compiled.cache import seen_shapes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from asyncdata.cli.commands.mask_text import Line
    from asyncdata.cli.inspection.loss_mask import MaskedText
    from asyncdata.cli.inspection.mixture_view import MixtureView
    from asyncdata.cli.inspection.window_view import InspectedRow, OpenedOrder
    from asyncdata.cli.output import Output

__all__ = ("run",)

_SHORT = 40
_NUM, _NUM_OF_A_PAGE = 3, 200


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    if args.mix is not None and args.num == 0:
        raise ConfigError("--num 0 is not for --mix: parts may repeat, so there is no last row; say how many")

    settle_kind(args, output, says_prompt=True)
    counts = ("num_rows", "num_samples", "dropped", "bad_rows", "num_tokens", "num_trained")
    total: dict[str, Any] = {**dict.fromkeys(counts, 0), "dropped": {}}
    masks: dict[int, LossMask] = {}
    tally = _Tally()
    functions: list[Any] = []
    samples, is_cut = None if args.html is None else Samples(), False
    with seen_shapes() as seen, ExitStack() as stack:
        for placed in _rows(args, stack):
            if is_cut := samples is not None and samples.is_full:
                break

            function = placed.function
            if id(function) not in masks:
                functions.append(function)
                masks[id(function)] = LossMask(function, args.tokenizer)
            texts = masks[id(function)](placed.row)
            _add(total, placed.row, texts)
            tally.add(placed)
            if samples is not None:
                samples.add(shown_row(placed, _place(placed.row), texts, _facts(placed.row), args.context_tokens))
            elif output.as_json:
                output.json(_record(placed, texts))
            else:
                _show(args, output, placed, texts)
    template = template_of(seen)
    encodings = list(filter(None, map(encoding_of, functions)))
    in_mass = tally.in_mass()
    lines = _lines(total, in_mass, is_masked=args.loss_mask or samples is not None) + template_lines(template)
    lines += list(dict.fromkeys(("encoder", backend_line(encoding)) for encoding in encodings))
    if is_cut:
        lines.append(("not shown", "further rows: the page is full; choose rows by --position or --row"))
    if samples is not None:
        titles = [printable(shown_path(path)) for path in ([args.mix] if args.mix is not None else args.data)]
        write_page(args.html, inspected_page(titles, lines, samples))
        lines.append(("page", printable(args.html)))
    record: dict[str, Any] = {"total": total, "template": template, "encoding": encodings[0] if encodings else None}
    if in_mass:
        record["dropped_in_mass"] = in_mass
    output.put(record if args.html is None else {**record, "page": args.html}, lambda _: fields(lines))
    return 0


def _rows(args: argparse.Namespace, stack: ExitStack) -> Iterator[PlacedRow]:
    if args.mix is not None:
        yield from _rows_of_mixture(args, stack.enter_context(mixture_view(args)))
        return

    function = tokenize_fn_of(args)
    for row in _rows_of_files(args, stack.enter_context(opened_order(args))):
        yield PlacedRow("", row.position, row, function)


def _rows_of_files(args: argparse.Namespace, opened: OpenedOrder) -> Iterator[InspectedRow]:
    if not (args.position or args.row):
        yield from opened.first(_num(args) or sys.maxsize)

    for place in args.position or ():
        yield opened.at(Position.parse(place))
    for place in args.row or ():
        yield row_in_file(opened, place)


def _rows_of_mixture(args: argparse.Namespace, view: MixtureView) -> Iterator[PlacedRow]:
    if not (args.position or args.row):
        yield from view.first(_num(args))

    for place in args.position or ():
        yield view.at(Position.parse(place))
    for place in args.row or ():
        yield view.row_in_file(place)


def _num(args: argparse.Namespace) -> int:
    default = _NUM if args.html is None else _NUM_OF_A_PAGE
    return default if args.num is None else int(args.num)


def _add(total: dict[str, Any], row: InspectedRow, texts: list[MaskedText]) -> None:
    """Count a row."""
    total["num_rows"] += 1
    total["num_samples"] += row.sample is not None
    total["bad_rows"] += row.error is not None
    if row.dropped:
        total["dropped"][row.dropped] = total["dropped"].get(row.dropped, 0) + 1
    total["num_tokens"] += sum(text.num_tokens for text in texts)
    total["num_trained"] += sum(text.num_trained for text in texts)


class _Tally:
    """What the rows that are shown yield, by source, file and reason."""

    def __init__(self) -> None:
        self._num_rows: Counter[tuple[str, ...]] = Counter()
        self._dropped: dict[tuple[str, tuple[str, ...]], tuple[int, str]] = {}  # how many, and the first one

    def add(self, placed: PlacedRow) -> None:
        """Count a row: for its file, and then for its source."""
        row = placed.row
        reason = f"bad row {row.error.code}" if row.error is not None else row.dropped
        for owner in ((placed.source_name, row.location.path), (placed.source_name,)):
            self._num_rows[owner] += 1
            if reason:
                number, example = self._dropped.get((reason, owner)) or (0, _place(row))
                self._dropped[reason, owner] = number + 1, example

    def in_mass(self) -> list[str]:
        """What is dropped in mass: by each file, or by a source if none of its files does."""
        found: dict[tuple[str, str], list[str]] = {}
        for (reason, owner), (number, example) in sorted(self._dropped.items(), key=lambda item: -len(item[0][1])):
            texts, num_rows = found.setdefault((reason, owner[0]), []), self._num_rows[owner]
            if is_mass(number, num_rows) and not (texts and len(owner) == 1):
                of = shown_path(owner[1]) if len(owner) == 2 else owner[0] or "all files"
                texts.append(f"{number:,} of {num_rows:,} rows of {of}: {reason}, such as {example}")
        return list(chain.from_iterable(found.values()))


def _lines(total: dict[str, Any], in_mass: list[str], *, is_masked: bool) -> list[tuple[str, str]]:
    """The counts, for people."""
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in total["dropped"].items())
    num_tokens, num_trained = total["num_tokens"], total["num_trained"]
    return [
        ("rows", f"{total['num_rows']:,}, of which {total['num_samples']:,} became samples"),
        ("dropped", printable(dropped) or "nothing"),
        *(("dropped in mass", printable(text)) for text in in_mass),
        ("bad rows", f"{total['bad_rows']:,}"),
        ("tokens", _counted(num_tokens, num_trained) if is_masked else f"{num_tokens:,} tokens"),
    ]


def _counted(num_tokens: int, num_trained: int) -> str:
    share = num_trained / num_tokens if num_tokens else 0.0
    return f"{num_tokens:,} tokens, {num_trained:,} trained ({share:.1%})"


def _show(args: argparse.Namespace, output: Output, placed: PlacedRow, texts: list[MaskedText]) -> None:
    is_coloured = _is_coloured(args.color)
    for heading, lines in _parts(args, placed, texts):
        if is_coloured:
            body = styled_text(lines, is_masked=args.loss_mask)
            output.styled([(heading, "bold"), ("\n", ""), *body, ("\n" if body else "", "")])
        else:
            output.data(f"{heading}\n{plain_text(lines)}" + ("\n" if lines else ""))


def _parts(args: argparse.Namespace, placed: PlacedRow, texts: list[MaskedText]) -> Iterator[tuple[str, list[Line]]]:
    """The headings of a row, each with the lines under it."""
    row = placed.row
    place = "  ".join(filter(None, [str(placed.position or ""), printable(placed.source_name), _place(row)]))
    if row.fault is not None:
        yield f"{place}  bad row: {printable(row.fault)}", []
    elif not texts:
        yield f"{place}  dropped: {printable(row.dropped)}", []
    for text in texts:
        facts = ", ".join(printable(f"{name} {value}")[:_SHORT] for name, value in _facts(row).items())
        heading = "  ".join(filter(None, (place, text.name, _heading(text, args.loss_mask), facts)))
        yield heading, lines_of(text if args.loss_mask else _unmasked(text), args.context_tokens)


def _place(row: InspectedRow) -> str:
    found = row.location
    path = printable(shown_path(found.path))
    return f"{path}:{found.line_number()}" if found.row_number is None else f"{path}:{found.row_number} (row number)"


def _heading(text: MaskedText, is_masked: bool) -> str:
    if not is_masked:
        return f"{text.num_tokens:,} tokens"

    return _counted(text.num_tokens, text.num_trained) if text.is_labelled else f"{text.num_tokens:,} tokens, no labels"


def _facts(row: InspectedRow) -> dict[str, bool | int | float | str]:
    """The short values of the sample's ``extra``."""
    extra = row.sample.extra if row.sample is not None else {}
    return {
        name: value
        for name, value in extra.items()
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    }


def _unmasked(text: MaskedText) -> MaskedText:
    return text._replace(pieces=[piece._replace(is_trained=False) for piece in text.pieces])


def _is_coloured(choice: str) -> bool:
    return choice == "always" or (choice == "auto" and is_terminal(sys.stdout) and not os.environ.get("NO_COLOR"))


def _record(placed: PlacedRow, texts: list[MaskedText]) -> dict[str, Any]:
    row = placed.row
    found = row.location
    place = {"row_number": found.row_number} if found.row_number is not None else {"line": found.line_number()}
    return {
        "position": str(placed.position) if placed.position is not None else None,
        **({"source": placed.source_name} if placed.source_name else {}),
        "path": found.path,
        **place,
        "num_tokens": sum(text.num_tokens for text in texts),
        "num_trained": sum(text.num_trained for text in texts),
        "texts": [_text_record(text) for text in texts],
        "extra": _facts(row),
        "dropped": row.dropped or None,
        "error": row.fault,
    }


def _text_record(text: MaskedText) -> dict[str, Any]:
    lists = {"turns": [turn._asdict() for turn in text.turns], "pieces": [piece._asdict() for piece in text.pieces]}
    return {**text._asdict(), "num_tokens": text.num_tokens, "num_trained": text.num_trained, **lists}
