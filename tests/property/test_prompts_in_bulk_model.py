"""Prompts read and written in bulk are those that are read and written one by one, whatever the rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import PromptTokenizeFn
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowDecoder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

VALUES = st.none() | st.booleans() | st.integers() | st.just("") | st.text(max_size=8) | st.just({}) | st.just([1])
METADATA = VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
GOOD = st.fixed_dictionaries(
    {"input": st.text(max_size=20), "label": VALUES},
    optional={
        "metadata": METADATA,
        "tools": st.none() | st.just([{"type": "function"}]) | st.just("[]"),
        "more": VALUES,
    },
)
ODD = st.fixed_dictionaries({}, optional={"input": VALUES, "label": VALUES, "metadata": METADATA, "tools": VALUES})
DEEP = st.sampled_from([b'{"input": "a", "label": %s1%s}' % (b"[" * n, b"]" * n) for n in (511, 512, 513, 600)])
RAW = st.sampled_from(
    [
        b'{"input": "a", "label": 1} {"input": "b", "label": 2}',
        b'{"input": "a",',
        b'"label": 2}',
        b'{"input": "a", "label": [{}',
        b' {"input": "a", "label": 1} ',
        b'{"input": "a",\n "label":\n 1}',
        b'{"input": "\\ud83d\\ude00", "label": 1}',
        b'{"input": "half \\ud800", "label": 1}',
        b'{"input": "\xff", "label": 1}',
        b'{"input": "a", "label": 1, "other": "\xff"}',
        b'{"input": "a", "input": "b", "label": NaN}',
        b'{"input": "a", "label": ' + b"7" * 5000 + b"}",
        b'{"input": "' + b"long " * 1200 + b'", "label": 1}',
        b"{}",
        b"{}{}",
        b"",
        b"[]",
        b"}{",
        b"\xef\xbb\xbf{}",
    ]
)


def encoded(rows: list[Any]) -> list[memoryview]:
    raws = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    return [memoryview(raw) for raw in raws]


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Any:
    return PromptTokenizeFn(str(small_tokenizer), label_key="label", max_length=6, tokenizer_backend="hf").open()


@given(st.lists(GOOD | ODD | RAW | DEEP, max_size=6) | st.lists(GOOD, max_size=12))
def test_prompts_in_bulk_are_the_prompts_one_by_one(tokenizer, rows):
    raws = encoded(rows)
    at_once, each = ColumnWriter(), ColumnWriter()

    tokenizer(raws, at_once)
    for number, raw in enumerate(raws):
        one = ColumnWriter(numbers=[number])
        tokenizer._one_by_one([raw], one)  # noqa: SLF001 - the model
        each.extend(one)

    assert parts(at_once, len(raws)) == parts(each, len(raws))


def parts(out: ColumnWriter, num_rows: int) -> Any:
    reply = out.finish(num_rows, 0.0)
    columns = {name: (bytes(column.data), column.ends) for name, column in reply.columns.items()}
    return reply.tokens, reply.token_ends, reply.kept, columns, reply.drops, reply.errors


@given(st.lists(GOOD, min_size=1, max_size=5), RAW | DEEP, st.integers(0, 5))
def test_rows_are_decoded_at_once_only_where_each_can_be(rows, odd, place):
    decoder = RowDecoder(("input", "label"))
    raws = encoded([*rows[:place], odd, *rows[place:]])

    found = decoder.all(raws)

    if found is not None:
        texts = [tuple(None if text is None else bytes(text) for text in decoder(raw)) for raw in raws]
        assert [
            tuple(None if text is None else bytes(text) for text in row) for row in zip(*found, strict=True)
        ] == texts


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), max_size=5), st.binary(max_size=4), st.binary(max_size=3)), max_size=6
    ),
    st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=5), st.binary(max_size=4)), max_size=4),
)
def test_keeping_all_is_keeping_each(first, second):
    at_once, each = ColumnWriter(), ColumnWriter()
    number = 0
    for batch in (first, second):
        rows = range(number, number + len(batch))
        number += len(batch)
        names = ("label", "extra")[: len(batch[0]) - 1] if batch else ()
        ends, end, tokens = [], 0, b""
        for ids, *_ in batch:
            end += len(ids)
            ends.append(end)
            tokens += b"".join(id.to_bytes(4, "little") for id in ids)
        columns = {name: [row[place] for row in batch] for place, name in enumerate(names, 1)}
        at_once.keep_all(rows, tokens, ends, columns)
        for row, (ids, *values) in zip(rows, batch, strict=True):
            each.keep(row, ids, **{name: value for name, value in zip(names, values, strict=True) if value})

    assert parts(at_once, number) == parts(each, number)
