"""What ``asyncdata bench`` measures in processes of their own: a first batch, and the tokenizer without a loader.

``python -m asyncdata.cli.commands.bench_child JSON``: the command's options, and which part. It prints a line when it
is ready, waits for one on stdin, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.options import loader_of, order_of, tokenize_fn_of
from asyncdata.core.errors import AsyncDataError, EndOfData
from asyncdata.loader.config import BadRows
from asyncdata.loader.loader import DataLoader
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.types import Sample

__all__ = ("first_batch", "tokenizer_alone")

BATCH = 32
_ROWS_AT_ONCE = 256
_MAX_ROWS = 8192
"""Of each process. They are held in memory, and none is tokenized twice: a tokenizer remembers words."""


def first_batch(args: Namespace, began_s: float) -> dict[str, Any]:
    """Seconds to the first batch, from when this process was started; ``began_s`` is the monotonic clock's."""
    with loader_of(args, buffer_size=args.buffer_size, bad_rows=BadRows(policy=args.bad_rows, max=None)) as loader:
        loader.get_next_batch(BATCH)
        found = {"first_batch_s": time.monotonic() - began_s}
        _wait_for_the_others()
    return found


def tokenizer_alone(args: Namespace, number: int, num_processes: int, seconds: float) -> dict[str, Any]:
    """Rows by second of the tokenize function, and of the tokenizer, in this process; ``seconds`` for each.

    :param number: of this process, which takes every ``num_processes``-th row from there.
    :return: ``tokenize_fn_rows_per_s``; ``tokenizer_rows_per_s``, None where samples have no prompt to encode.
    """
    rows = _rows(args, _MAX_ROWS * num_processes)
    rows = rows[number::num_processes] or rows[:1]
    fn = tokenize_fn_of(args)
    tokenize = open_tokenize_fn(fn)
    texts: list[str] = []

    def run(some: Sequence[bytes]) -> None:
        out = ColumnWriter()
        tokenize(some, out)
        column = out.finish(len(some), 0.0).columns.get("prompt_text")
        if column is not None:
            ends = memoryview(column.ends).cast("I").tolist()
            texts.extend(str(column.data[start:end], "utf-8") for start, end in zip([0, *ends], ends, strict=False))

    run(rows[:1])
    texts.clear()
    _wait_for_the_others()
    found: dict[str, Any] = {"tokenize_fn_rows_per_s": _rate(run, rows, seconds), "tokenizer_rows_per_s": None}
    if isinstance(fn, OfTokenizer) and texts:
        engine = TokenizerFiles(resolve(fn.tokenizer, getattr(fn, "revision", None)).folder).load()
        encode = engine.encode_batch_fast
        rate = _rate(lambda some: encode(list(some), add_special_tokens=False), texts, seconds)
        found["tokenizer_rows_per_s"] = rate
    return found


def _rows(args: Namespace, num_rows: int) -> list[bytes]:
    """The first rows of the order, as JSON, without bad ones: the loader has said what is wrong with them."""
    knobs = {**order_of(args), "epochs": 1, "bad_rows": BadRows(policy="skip", max=None)}
    with DataLoader(args.data, tokenize_fn=_row_itself, num_workers=0, **knobs) as loader:
        try:
            samples: list[Sample] = loader.get_next_batch(num_rows)
        except EndOfData as end:
            samples = end.samples
    return [msgspec.json.encode(sample.metadata) for sample in samples]


def _row_itself(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [0], "metadata": row}


def _wait_for_the_others() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def _rate(run: Callable[[Sequence[Any]], object], rows: Sequence[Any], seconds: float) -> float:
    """Rows by second, for this long or until there are no more."""
    num_done, began = 0, time.perf_counter()
    while num_done < len(rows) and time.perf_counter() - began < seconds:
        run(rows[num_done : num_done + _ROWS_AT_ONCE])
        num_done = min(num_done + _ROWS_AT_ONCE, len(rows))
    return num_done / max(time.perf_counter() - began, 1e-9)


def main() -> int:
    """Do what the first argument says."""
    told = json.loads(sys.argv[1])
    args = Namespace(**told.pop("args"))
    measure: Any = {"first_batch": first_batch, "tokenizer_alone": tokenizer_alone}[told.pop("part")]
    try:
        found = measure(args, **told)
    except AsyncDataError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1

    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
