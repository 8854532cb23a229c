"""``asyncdata inspect``: shows the tokens of some rows, and which of them are trained, also as a page."""

from __future__ import annotations

import math
import os
import sys
from contextlib import ExitStack
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
            if samples is not None:
                samples.add(shown_row(placed, _place(placed.row), texts, _facts(placed.row), args.context_tokens))
            elif output.as_json:
                output.json(_record(placed, texts))
            else:
                _show(args, output, placed, texts)
    template = template_of(seen)
    encodings = list(filter(None, map(encoding_of, functions)))
    lines = _lines(total, is_masked=args.loss_mask or samples is not None) + template_lines(template)
    lines += list(dict.fromkeys(("encoder", backend_line(encoding)) for encoding in encodings))
    if is_cut:
        lines.append(("not shown", "further rows: the page is full; choose rows by --position or --row"))
    if samples is not None:
        titles = [printable(shown_path(path)) for path in ([args.mix] if args.mix is not None else args.data)]
        write_page(args.html, inspected_page(titles, lines, samples))
        lines.append(("page", printable(args.html)))
    record = {"total": total, "template": template, "encoding": encodings[0] if encodings else None}
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


def _lines(total: dict[str, Any], *, is_masked: bool) -> list[tuple[str, str]]:
    """The counts, for people."""
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in total["dropped"].items())
    num_tokens, num_trained = total["num_tokens"], total["num_trained"]
    return [
        ("rows", f"{total['num_rows']:,}, of which {total['num_samples']:,} became samples"),
        ("dropped", printable(dropped) or "nothing"),
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
