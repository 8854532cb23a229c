"""What ``asyncdata bench`` measures in processes of their own: a first batch, and the tokenizer with no loader around.

``python -m asyncdata.cli.commands.bench_child JSON``: the options, and which part. It prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.options import loader_of, order_of, tokenize_fn_of
from asyncdata.errors import AsyncDataError, EndOfData
from asyncdata.loader import DataLoader
from asyncdata.tokenization.base import ColumnWriter, open_tokenize_fn
from asyncdata.tokenization.prompt_parts import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncdata.types import Sample
    from asyncdata.wire import Column

__all__ = ("first_batch", "tokenizer_alone")

BATCH = 32
_ROWS_AT_ONCE = 256
_MAX_ROWS = 8192
"""Of each process. They are held in memory, and none is tokenized twice: a tokenizer remembers words."""


def first_batch(args: Namespace) -> dict[str, Any]:
    """Deliver one batch, and say so at once: whoever started this process has the clock."""
    with loader_of(args, buffer_size=args.buffer_size, max_bad_rows=None) as loader:
        num_samples = len(loader.get_next_batch(BATCH))
        _say("delivered")
    return {"num_samples": num_samples}


def tokenizer_alone(args: Namespace, number: int, num_processes: int, seconds: float) -> dict[str, Any]:
    """Rows by second of the tokenize function, and of the tokenizer, in this process; ``seconds`` for each.

    :param number: of this process, which takes every ``num_processes``-th row from there.
    :return: ``tokenize_fn_rows_per_s``; ``tokenizer_rows_per_s``, None where samples have no prompt to encode.
    """
    rows = _rows(args, _MAX_ROWS * num_processes)[number::num_processes] or _rows(args, 1)
    fn = tokenize_fn_of(args)
    tokenize = open_tokenize_fn(fn)
    prompts: list[Column] = []

    def run(some: Sequence[bytes]) -> None:
        out = ColumnWriter()
        tokenize(some, out)
        column = out.finish(len(some), 0.0).columns.get("prompt_text")
        if column is not None:
            prompts.append(column)

    run(rows[:1])
    _say("ready")
    sys.stdin.readline()  # until the others are
    found: dict[str, Any] = {"tokenize_fn_rows_per_s": _rate(run, rows, seconds)}
    texts = [text for column in prompts[1:] for text in _texts(column)]
    rate = _tokenizer_rate(fn, texts, seconds) if isinstance(fn, OfTokenizer) and texts else None
    return found | {"tokenizer_rows_per_s": rate}


def _rows(args: Namespace, num_rows: int) -> list[bytes]:
    """The first rows of the order, as JSON. Bad ones are left out: the loader has said what it thinks of them."""
    knobs = {**order_of(args), "epochs": 1, "on_bad_row": "skip", "max_bad_rows": None}
    with DataLoader(args.data, tokenize_fn=_row_itself, num_workers=0, **knobs) as loader:
        try:
            samples: list[Sample] = loader.get_next_batch(num_rows)
        except EndOfData as end:
            samples = end.samples
    return [msgspec.json.encode(sample.metadata) for sample in samples]


def _row_itself(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [0], "metadata": row}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _rate(run: Callable[[Sequence[Any]], object], rows: Sequence[Any], seconds: float) -> float:
    """Rows by second, for so long or until there are no more."""
    num_done, began = 0, time.perf_counter()
    while num_done < len(rows) and time.perf_counter() - began < seconds:
        run(rows[num_done : num_done + _ROWS_AT_ONCE])
        num_done = min(num_done + _ROWS_AT_ONCE, len(rows))
    return num_done / max(time.perf_counter() - began, 1e-9)


def _texts(column: Column) -> Iterator[str]:
    start = 0
    for end in memoryview(column.ends).cast("I"):
        yield str(column.data[start:end], "utf-8")
        start = end


def _tokenizer_rate(fn: OfTokenizer, texts: list[str], seconds: float) -> float:
    """``encode_batch_fast`` of Hugging Face's tokenizers over the rendered prompts, and nothing else."""
    engine = TokenizerFiles(resolve(fn.tokenizer, getattr(fn, "revision", None)).folder).load()
    return _rate(lambda some: engine.encode_batch_fast(list(some), add_special_tokens=False), texts, seconds)


def main() -> int:
    """Do what the first argument says."""
    told = json.loads(sys.argv[1])
    args = Namespace(**told.pop("args"))
    try:
        found = tokenizer_alone(args, **told) if told else first_batch(args)
    except AsyncDataError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1

    _say(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
