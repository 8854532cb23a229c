"""Commands that show rows in the order of delivery.

``asyncdata order`` prints D, the order of rows. ``asyncdata sample`` shows a row of it, or the rows of a step.
``asyncdata inspect`` shows the tokens of some rows, and which of them are trained, also as a page.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

from asyncdata.cli.main import as_options, has_tokenize_fn
from asyncdata.cli.options import loader_of, mixture_view, order_view, settle_kind
from asyncdata.cli.output import Output, fields, is_terminal, shown_path, to_json
from asyncdata.cli.rows import InspectedRow, OrderView, delivered
from asyncdata.cli.shown_text import Line, LossMask, MaskedText, lines_of, plain_text, shown_row, styled_text
from asyncdata.core.errors import ConfigError, printable
from asyncdata.core.messages import MAX_KEYS, NOT_WRITTEN, is_mass
from asyncdata.core.types import Position, Sample
from asyncdata.loader.loader import DataLoader
from asyncdata.report.page import Samples, write_page
from asyncdata.report.run_page import inspected_page
from asyncdata.tokenization.chat_template.programs import SeenShape, seen_shapes
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.tokenization.functions.dialects import DIALECTS
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.functions.untokenized import RowFn
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

_BATCH = 256


def order(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    rows, columns = _listed(args, output) if args.mix is None else _samples(args), list[str]()
    while found := list(islice(rows, _BATCH)):  # a write for each row would take longer than all else
        is_numbered = args.mix is None and found[0].location.row_number is not None
        if args.lines and is_numbered:
            raise ConfigError("--lines is for files of lines; the numbers of these rows are printed without it")

        if not columns:
            source, line = ["source"] if args.mix is not None else [], ["line"] if args.lines else []
            columns = ["position", *source, "path", "row_number" if is_numbered else "byte_offset", "num_bytes", *line]
            if not output.as_json:
                output.data("\t".join(columns), "dim")
        values = [_values(row, args, output) for row in found]
        if output.as_json:
            output.data("\n".join(to_json(dict(zip(columns, row, strict=True))) for row in values))
        else:
            output.data("\n".join("\t".join(map(str, row)) for row in values))
    return 0


def _listed(args: SimpleNamespace, output: Output) -> Iterator[InspectedRow]:
    """The rows to print.

    :raises ConfigError: if ``--from`` is beyond the last one.
    """
    settle_kind(args, output)
    view, start = order_view(args), Position(args.epoch, args.window or 0)
    num_rows = 0
    for num_rows, row in enumerate(view.rows(start) if args.window is None else view.window(start), 1):
        if num_rows > args.first:
            yield row
        if args.num and num_rows == args.first + args.num:
            return

    if num_rows <= args.first:
        what = f"epoch {args.epoch}" if args.window is None else f"window {args.window} of epoch {args.epoch}"
        raise ConfigError(f"--from {args.first} is beyond the end: {what} has {num_rows} rows")


def _samples(args: SimpleNamespace) -> Iterator[InspectedRow]:
    """The samples of a mixture, in the order of its schedule: found by delivering them, as rows may be dropped."""
    given = [name for name in ("epoch", "window", "lines") if getattr(args, name)]
    if given:
        raise ConfigError(f"--{given[0]} is not for --mix: which sample comes when is found by delivering them")

    with mixture_view(args).loader() as loader:
        for sample in islice(delivered(loader, args.first + args.num if args.num else None), args.first, None):
            assert sample.source is not None
            yield InspectedRow(
                position=sample.position, location=sample.source, raw=b"", source_name=sample.source_name or ""
            )


def _values(row: InspectedRow, args: SimpleNamespace, output: Output) -> list[Any]:
    location = row.location
    path = location.path if output.as_json else shown_path(location.path)
    source, line = [row.source_name] if args.mix is not None else [], [location.line_number()] if args.lines else []
    place = location.byte_offset if location.row_number is None else location.row_number
    return [str(row.position), *source, path, place, location.num_bytes, *line]


def sample(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    settle_kind(args, output)
    if args.step is not None:
        _print_step(args, output)
        return 0

    output.put(_report(args, _of_files(args) if args.mix is None else _of_mixture(args)), _text_of)
    return 0


def _print_step(args: SimpleNamespace, output: Output) -> None:
    """The rows of a rank's batch, found by delivering the batches before it."""
    ranks = {"rank": args.rank, "world_size": args.world_size}
    tokenize_fn = None if has_tokenize_fn(args) else RowFn()
    with loader_of(args, tokenize_fn=tokenize_fn, batch_size=args.batch_size, ranks=ranks) as loader:
        if args.snapshot is not None:
            loader.restore(args.snapshot)
        batch = next(islice(chain.from_iterable(repeat(loader)), args.step, None))
        items = [item if isinstance(item, list) else [item] for item in batch]
        rows = [_row_of_step(number, item) for number, pack in enumerate(items) for item in pack]
    if output.as_json:
        output.data("\n".join(map(to_json, rows)))
    else:
        shown = [{**row, "path": shown_path(row["path"])} for row in rows]
        output.data("\n".join("\t".join(map(str, line)) for line in (shown[0], *(row.values() for row in shown))))


def _row_of_step(number: int, item: Any) -> dict[str, Any]:
    """A row of a batch, which ``exclude`` takes.

    :param number: of its sample in the batch, or of its pack.
    """
    sample = getattr(item, "sample", item)
    found = sample.source
    return {
        "item": number,
        "position": str(sample.position),
        **({"source": sample.source_name} if sample.source_name else {}),
        "path": found.path,
        **({"byte_offset": found.byte_offset} if found.row_number is None else {"row_number": found.row_number}),
        "num_bytes": found.num_bytes,
        **({"num_tokens": len(item.tokens)} if len(item.tokens) else {}),
    }


def _of_files(args: SimpleNamespace) -> InspectedRow:
    view = order_view(args)
    position = Position.parse(args.position) if args.position else None
    if position is None and has_tokenize_fn(args):
        with loader_of(args) as loader:
            position = _sample_of(loader, args).position
    return view.numbered(args.ordinal) if position is None else view.at(position)


def _of_mixture(args: SimpleNamespace) -> InspectedRow:
    view = mixture_view(args)
    if args.position:
        return view.at(Position.parse(args.position), args.num_workers)

    with view.loader(args.num_workers) as loader:
        sample = _sample_of(loader, args)
    return view.row_of(sample)


def _sample_of(loader: DataLoader[Any, Any], args: SimpleNamespace) -> Sample:
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


def _report(args: SimpleNamespace, row: InspectedRow) -> dict[str, Any]:
    found, sample = row.location, row.sample
    lies_at = {"line": found.line_number(), "byte_offset": found.byte_offset}
    return {
        "position": str(row.position),
        **({"source": row.source_name} if row.source_name else {}),
        "ordinal": args.ordinal,
        "path": found.path,
        **(lies_at if found.row_number is None else {"row_number": found.row_number}),
        "num_bytes": found.num_bytes if found.num_bytes >= 0 else None,
        "row": row.raw.decode("utf-8", "backslashreplace"),
        "prompt": sample.prompt if sample is not None else None,
        "tokens": sample.tokens.tolist() if sample is not None else None,
        "dropped": row.dropped or None,
        "error": None if row.fault is None else as_options(row.fault, vars(args)),
    }


def _text_of(report: dict[str, Any]) -> str:
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


# asyncdata inspect

_SHORT = 40
_MOST_SHOWN = 5
_NUM, _NUM_OF_A_PAGE = 3, 200


def inspect(args: SimpleNamespace, output: Output) -> int:
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
    with seen_shapes() as seen:
        for row in _rows(args):
            if is_cut := samples is not None and samples.is_full:
                break

            function = row.function
            if id(function) not in masks:
                functions.append(function)
                masks[id(function)] = LossMask(function, args.tokenizer)
            texts = masks[id(function)](row)
            _add(total, row, texts)
            tally.add(row)
            if samples is not None:
                samples.add(shown_row(row, _place(row), texts, _facts(row) | _arrays(row), args.context_tokens))
            elif output.as_json:
                output.json(_record(row, texts))
            else:
                _show(args, output, row, texts)
    template = _template_of(seen)
    dialects = list(dict.fromkeys(filter(None, map(_dialect_of, functions))))
    encodings = list(filter(None, map(_encoding_of, functions)))
    in_mass = tally.in_mass()
    lines = _lines(total, in_mass, is_masked=args.loss_mask or samples is not None) + tally.told_lines()
    lines += _template_lines(template)
    lines += zip(repeat("dialect"), map(printable, dialects), strict=False)
    lines += list(dict.fromkeys(("encoder", printable(f"{one['backend']}: {one['reason']}")) for one in encodings))
    if is_cut:
        lines.append(("not shown", "further rows: the page is full; choose rows by --position or --row"))
    if samples is not None:
        titles = [shown_path(path) for path in ([args.mix] if args.mix is not None else args.data)]
        write_page(args.html, inspected_page(titles, lines, samples))
        lines.append(("page", printable(args.html)))
    told = {"template": template, "dialects": dialects, "encoding": encodings[0] if encodings else None}
    record: dict[str, Any] = {"total": total, **told, **tally.told()}
    if in_mass:
        record["dropped_in_mass"] = in_mass
    output.put(record if args.html is None else {**record, "page": args.html}, lambda _: fields(lines))
    return 0


def _rows(args: SimpleNamespace) -> Iterator[InspectedRow]:
    view = order_view(args) if args.mix is None else mixture_view(args)
    if not (args.position or args.row):
        yield from islice(view.rows(), _num(args) or None) if isinstance(view, OrderView) else view.first(_num(args))

    for place in args.position or ():
        yield view.at(Position.parse(place))
    for place in args.row or ():
        yield view.in_file(place)


def _num(args: SimpleNamespace) -> int:
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
        self.not_written: Counter[str] = Counter()
        self.unread: dict[str, dict[str, Any]] = {}
        self._dropped: dict[tuple[str, tuple[str, ...]], tuple[int, str]] = {}  # how many, and the first one

    def add(self, row: InspectedRow) -> None:
        """Count a row: for its file, and then for its source."""
        lost = {name.removesuffix(NOT_WRITTEN) for name in row.notes if name.endswith(NOT_WRITTEN)}
        self.not_written.update(lost)
        for key, value in row.unread.items():
            if key in self.unread or len(self.unread) < MAX_KEYS:
                self.unread.setdefault(key, {"num_rows": 0, "row": _place(row), "value": value})["num_rows"] += 1
        reason = f"bad row {row.error.code}" if row.error is not None else row.dropped
        for owner in ((row.source_name, row.location.path), (row.source_name,)):
            self._num_rows[owner] += 1
            if reason:
                number, example = self._dropped.get((reason, owner)) or (0, _place(row))
                self._dropped[reason, owner] = number + 1, example

    def told(self) -> dict[str, Any]:
        """What is not written, and the keys that are not read; nothing, if there are none."""
        both = (("not_written", self.not_written), ("unread_keys", self.unread))
        return {name: counts for name, counts in both if counts}

    def told_lines(self) -> list[tuple[str, str]]:
        """The same for people."""
        lost = ", ".join(f"{number:,} {name}" for name, number in self.not_written.items())
        unread = [
            f"{one['num_rows']:,} {key}, such as {one['row']}: {one['value']}" for key, one in self.unread.items()
        ]
        return [("not written", lost)] * bool(lost) + [("not read", printable(line)) for line in unread]

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


def _show(args: SimpleNamespace, output: Output, row: InspectedRow, texts: list[MaskedText]) -> None:
    is_coloured = _is_coloured(args.color)
    for heading, lines in _parts(args, row, texts):
        if is_coloured:
            body = styled_text(lines, is_masked=args.loss_mask)
            output.styled([(heading, "bold"), ("\n", ""), *body, ("\n" if body else "", "")])
        else:
            output.data(f"{heading}\n{plain_text(lines)}" + ("\n" if lines else ""))


def _parts(args: SimpleNamespace, row: InspectedRow, texts: list[MaskedText]) -> Iterator[tuple[str, list[Line]]]:
    """The headings of a row, each with the lines under it."""
    place = "  ".join(filter(None, [str(row.position or ""), printable(row.source_name), _place(row)]))
    if row.fault is not None:
        yield f"{place}  bad row: {printable(as_options(row.fault, vars(args)))}", []
    elif not texts:
        yield f"{place}  dropped: {printable(row.dropped)}", []
    for text in texts:
        facts = ", ".join(printable(f"{name} {value}")[:_SHORT] for name, value in (_facts(row) | _arrays(row)).items())
        heading = "  ".join(filter(None, (place, text.name, _heading(text, args.loss_mask), facts)))
        yield heading, lines_of(text if args.loss_mask else _unmasked(text), args.context_tokens)


def _place(row: InspectedRow) -> str:
    found = row.location
    path = shown_path(found.path)
    return f"{path}:{found.line_number()}" if found.row_number is None else f"{path}:{found.row_number} (row number)"


def _heading(text: MaskedText, is_masked: bool) -> str:
    if not is_masked:
        return f"{text.num_tokens:,} tokens"

    return _counted(text.num_tokens, text.num_trained) if text.is_labelled else f"{text.num_tokens:,} tokens, no labels"


def _facts(row: InspectedRow) -> dict[str, Any]:
    """The short values of the sample's ``extra``."""
    extra = row.sample.extra if row.sample is not None else {}
    return {
        name: value
        for name, value in extra.items()
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    }


def _arrays(row: InspectedRow) -> dict[str, str]:
    """The dtypes and shapes of the sample's columns."""
    columns = row.sample.columns if row.sample is not None else {}
    kinds = {name: column.dtype for name, column in getattr(columns, "declared", {}).items()}
    return {name: f"{kinds[name]} {array.shape}" for name, array in columns.items()}


def _unmasked(text: MaskedText) -> MaskedText:
    return text._replace(pieces=[piece._replace(is_trained=False) for piece in text.pieces])


def _is_coloured(choice: str) -> bool:
    return choice == "always" or (choice == "auto" and is_terminal(sys.stdout) and not os.environ.get("NO_COLOR"))


def _record(row: InspectedRow, texts: list[MaskedText]) -> dict[str, Any]:
    found = row.location
    place = {"row_number": found.row_number} if found.row_number is not None else {"line": found.line_number()}
    return {
        "position": str(row.position) if row.position is not None else None,
        **({"source": row.source_name} if row.source_name else {}),
        "path": found.path,
        **place,
        "num_tokens": sum(text.num_tokens for text in texts),
        "num_trained": sum(text.num_trained for text in texts),
        "texts": [_text_record(text) for text in texts],
        "extra": _facts(row),
        **({"columns": arrays} if (arrays := _arrays(row)) else {}),
        "dropped": row.dropped or None,
        "error": row.fault,
    }


def _text_record(text: MaskedText) -> dict[str, Any]:
    lists = {"turns": [turn._asdict() for turn in text.turns], "pieces": [piece._asdict() for piece in text.pieces]}
    return {**text._asdict(), "num_tokens": text.num_tokens, "num_trained": text.num_trained, **lists}


# What is said about speed: which shapes of chats are proven, and which library encodes


def _template_of(seen: Sequence[SeenShape]) -> list[dict[str, Any]]:
    """The shapes of chats that were rendered, in order of appearance; a shape is proven if all of its chats were."""
    found: dict[tuple[tuple[str, ...], bool], bool] = {}
    for shape in seen:
        key = shape.messages, shape.has_tools
        found[key] = found.get(key, True) and shape.is_proven
    return [
        {"messages": list(messages), "has_tools": has_tools, "is_proven": is_proven}
        for (messages, has_tools), is_proven in found.items()
    ]


def _template_lines(shapes: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The shapes as lines of text; none if no chat was rendered."""
    if not shapes:
        return []

    rendered = [
        printable(" / ".join(shape["messages"]) + (", with tools" if shape["has_tools"] else ""))
        for shape in shapes
        if not shape["is_proven"]
    ]
    head = f"proven for {len(shapes) - len(rendered)} of {len(shapes)} shapes of chats"
    more = [f"... and {len(rendered) - _MOST_SHOWN} more"] if len(rendered) > _MOST_SHOWN else []
    return [("template", head), *[("", f"rendered: {line}") for line in [*rendered[:_MOST_SHOWN], *more]]]


def _dialect_of(function: Any) -> str | None:
    """The dialect of chats, and why it is that one; None for a function without one."""
    if not isinstance(function, ChatTokenizeFn):
        return None

    if function.dialect is None:
        return "messages: no row of another dialect comes first" if function.is_of_any_dialect else "messages"

    if not function.dialect_row:
        return f"{function.dialect}: as requested"

    keys = " and ".join(map(repr, DIALECTS[function.dialect].required))
    return f"{function.dialect}: {function.dialect_row.replace(os.path.join(os.getcwd(), ''), '')} has {keys}"


def _encoding_of(function: Any) -> dict[str, str] | None:
    """The library that encodes, and the reason; None for a function without one of asyncdata's tokenizers."""
    if not isinstance(function, OfTokenizer):
        return None

    if function.tokenizer_backend == "hf":
        return _trusted("as requested")

    from asyncdata.tokenization.encoders.text_encoder import choose

    files = TokenizerFiles(resolve(function.tokenizer, getattr(function, "revision", None)).folder)
    proof = choose(files, function.tokenizer_backend, needs_offsets=function.needs_offsets)
    if proof is None:
        return _trusted(_why_none(files, needs_offsets=function.needs_offsets))

    subject = proof.subject
    same = "ids and offsets" if function.needs_offsets else "ids"
    return {"backend": subject.backend, "version": subject.backend_version, "reason": f"proven to give the same {same}"}


def _trusted(reason: str) -> dict[str, str]:
    from importlib.metadata import version

    return {"backend": "tokenizers", "version": version("tokenizers"), "reason": reason}


def _why_none(files: TokenizerFiles, *, needs_offsets: bool) -> str:
    from asyncdata.tokenization.encoders.equivalence_records import find, subject_of

    installed = [name for name in FAST_BACKENDS if version_of(name)]
    if not installed:
        return f"none of {', '.join(FAST_BACKENDS)} is installed"

    said = []
    for name in installed:
        subject = subject_of(files, name)
        proof = None if subject is None else find(subject)
        if proof is None:
            said.append(f"{name} is not proven yet")
        elif needs_offsets and not proof.refusal:
            said.append(f"{name} does not tell where the tokens of a text lie: {proof.no_offsets}")
        else:
            said.append(f"{name} is refused: {proof.refusal}")
    return "; ".join(said)
