"""What a worker writes into columns is what the trainer reads from a chunk, whatever rows are kept."""

from __future__ import annotations

import json
from array import array
from itertools import accumulate
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncdata import Position, SourceLocation
from asyncdata.core.messages import decode_reply, encode
from asyncdata.core.types import SampleRange
from asyncdata.delivery.chunk import Chunk
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowFault
from tests.support.examples import in_ci

COLUMNS = ("prompt", "label", "metadata", "extra")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


class Kept(NamedTuple):
    tokens: list[int]
    values: dict[str, Any]


class Dropped(NamedTuple):
    reason: str


class Bad(NamedTuple):
    code: str


fates = st.one_of(
    st.builds(
        Kept,
        st.lists(st.integers(0, 2**31 - 1), max_size=5),
        st.dictionaries(st.sampled_from(COLUMNS), json_values, max_size=4),
    ),
    st.builds(Dropped, st.sampled_from(["short", "dull", ""])),
    st.builds(Bad, st.sampled_from(["AD101", "AD421"])),
)
rows = st.lists(fates, max_size=20)


class Lines:
    def location(self, row: int) -> SourceLocation:
        return SourceLocation("/rows", row, 1)

    def key(self, row: int) -> tuple[int, int]:
        return 0, row


def write(fate: Kept | Dropped | Bad, row: int, out: ColumnWriter) -> None:
    if isinstance(fate, Kept):
        out.keep(row, fate.tokens, **{name: json.dumps(value).encode() for name, value in fate.values.items()})
    elif isinstance(fate, Dropped):
        out.drop(row, fate.reason)
    else:
        out.fail(row, RowFault(fate.code, "why"))


def written(fates: list[Kept | Dropped | Bad]) -> ColumnWriter:
    out = ColumnWriter()
    for row, fate in enumerate(fates):
        write(fate, row, out)
    return out


def written_in_pieces(fates: list[Kept | Dropped | Bad], cut: int) -> ColumnWriter:
    """As a worker does after a batch that raised."""
    out = ColumnWriter()
    for start, piece in ((0, fates[:cut]), (cut, fates[cut:])):
        part = ColumnWriter(numbers=range(start, len(fates)))
        for row, fate in enumerate(piece):
            write(fate, row, part)
        out.extend(part)
    return out


def chunk_of(out: ColumnWriter, num_rows: int) -> Chunk:
    """As it arrives."""
    return Chunk(
        decode_reply(encode(out.finish(num_rows, 0.0))), Position(1, 2, 10), num_rows, Lines(), ends_epoch=False
    )


@in_ci(max_examples=20)
@given(fates=rows)
def test_every_row_is_a_sample_or_a_drop_or_bad_and_is_read_as_it_was_written(fates):
    chunk = chunk_of(written(fates), len(fates))
    kept = [(row, fate) for row, fate in enumerate(fates) if isinstance(fate, Kept)]

    assert chunk.num_samples == len(kept)
    for number, (row, fate) in enumerate(kept):
        sample = SampleRange(chunk, number, number + 1, 0, 0, 1).samples()[0]
        assert sample.tokens.tolist() == fate.tokens
        assert [chunk.value(name, number) for name in COLUMNS] == [fate.values.get(name) for name in COLUMNS]
        assert (sample.position, sample.source) == (Position(1, 2, 10 + row), SourceLocation("/rows", row, 1))
    dropped = {(drop.reason, row) for drop in chunk.drops for row in drop.rows.tolist()}
    assert dropped == {(fate.reason, row) for row, fate in enumerate(fates) if isinstance(fate, Dropped)}
    bad = [(error.row, error.code) for error in chunk.errors]
    assert bad == [(row, fate.code) for row, fate in enumerate(fates) if isinstance(fate, Bad)]


@in_ci(max_examples=20)
@given(fates=rows)
def test_samples_before_a_row_and_tokens_in_a_range_are_those_of_a_count(fates):
    chunk = chunk_of(written(fates), len(fates))
    kept = [fate for fate in fates if isinstance(fate, Kept)]

    for row in range(len(fates) + 1):
        before = chunk.samples_before(row)
        assert before == sum(isinstance(fate, Kept) for fate in fates[:row])
        assert chunk.num_tokens(0, before) == sum(len(fate.tokens) for fate in kept[:before])
        assert chunk.num_tokens(before, len(kept)) == sum(len(fate.tokens) for fate in kept[before:])


@in_ci(max_examples=20)
@given(fates=rows, cut=st.integers(0, 20))
def test_rows_that_are_written_in_pieces_are_the_same_reply(fates, cut):
    assert written_in_pieces(fates, cut).finish(len(fates), 0.0) == written(fates).finish(len(fates), 0.0)


a_batch = st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=5), st.binary(max_size=4)), max_size=6)


@in_ci(max_examples=20)
@given(batches=st.lists(a_batch, max_size=3))
def test_keeping_all_is_keeping_each(batches):
    at_once, each, number = ColumnWriter(), ColumnWriter(), 0
    for batch in batches:
        rows = range(number, number + len(batch))
        number += len(batch)
        ends = list(accumulate(len(ids) for ids, _ in batch))
        tokens = b"".join(id.to_bytes(4, "little") for ids, _ in batch for id in ids)
        at_once.keep_all(rows, tokens, ends, {"label": [value for _, value in batch]} if batch else {})
        for row, (ids, value) in zip(rows, batch, strict=True):
            each.keep(row, ids, **({"label": value} if value else {}))

    assert at_once.finish(number, 0.0) == each.finish(number, 0.0)


def test_kept_rows_are_listed_only_where_some_are_missing():
    out = ColumnWriter()
    out.keep(0, [1])
    out.keep(1, array("i", [2, 3]))

    assert out.finish(2, 0.0).kept == b""
    assert out.finish(3, 0.0).kept == array("i", [0, 1]).tobytes()


def test_a_column_that_no_sample_has_is_refused_by_name():
    with pytest.raises(TypeError, match="no column 'loss_mask'; there are prompt, .*spans"):
        ColumnWriter().keep(0, [5, 6], loss_mask=b"[0,1]")
