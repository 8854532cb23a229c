"""``asyncdata order``: prints D, the order of rows. ``asyncdata sample``: shows a row of it, or the rows of a step."""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

from asyncdata.cli.arguments import as_options, has_tokenize_fn
from asyncdata.cli.options import loader_of, mixture_view, order_view, settle_kind
from asyncdata.cli.output import fields, shown_path, to_json
from asyncdata.cli.rows import InspectedRow, delivered
from asyncdata.core.errors import ConfigError, printable
from asyncdata.core.types import Position
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import SimpleNamespace

    from asyncdata.cli.output import Output
    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader

_BATCH = 256


def order(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    rows, columns = _rows(args, output) if args.mix is None else _samples(args), list[str]()
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


def _rows(args: SimpleNamespace, output: Output) -> Iterator[InspectedRow]:
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
