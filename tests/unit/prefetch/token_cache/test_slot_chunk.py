"""Chunks whose samples are in a slot: same content before, during and after the reuse of the slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncdata import Position
from asyncdata.core.types import SampleRange
from asyncdata.delivery.chunk import Chunk
from asyncdata.tokenization.column_writer import ColumnWriter

pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.segment.gather import names_at, row_facts
from asyncdata.prefetch.token_cache.segment.layout import Names, block_head, pad
from asyncdata.prefetch.token_cache.slot_chunk import CachedRows, PlacedChunk, PlacedRows

NUM_ROWS = 9


def reply_of_rows() -> Any:
    """Nine rows: some dropped, some without tokens, some without columns."""
    out = ColumnWriter()
    for row in range(NUM_ROWS):
        if row in (2, 5):
            out.drop(row, "short")
        elif row == 7:
            out.keep(row, [])
        else:
            out.keep(row, range(row + 1), prompt=b'"p%d"' % row, **({"label": b"[%d]" % row} if row % 3 else {}))
            if row > 5:
                out.note(row, "late")
    return out.finish(NUM_ROWS, 0.0)


def facts(chunk: Chunk) -> Any:
    samples = [
        (chunk.row_of(i), chunk.tokens_of(i).tolist(), chunk.value("prompt", i), chunk.value("label", i))
        for i in range(chunk.num_samples)
    ]
    counts = [[(each[0], each.rows.tolist()) for each in some] for some in (chunk.drops, chunk.notes)]
    return samples, counts, chunk.num_tokens(0, chunk.num_samples), chunk.num_bytes, chunk.value("other", 0)


@pytest.fixture
def expected() -> Any:
    return facts(Chunk(reply_of_rows(), Position(), NUM_ROWS, None, ends_epoch=False))


@pytest.fixture
def slot() -> bytearray:
    """The rows as a worker puts them there: a block that begins somewhere."""
    chunk = Chunk(reply_of_rows(), Position(), NUM_ROWS, None, ends_epoch=False)
    names = Names(["label", "prompt"], ["long", "short"], ["late"])
    head, words = block_head(names), np.zeros((NUM_ROWS, names.record_words), np.int32)
    base, size = 24 + len(head), words.nbytes
    body, body_at = b"", base + pad(size)
    words[:, 0] = np.arange(NUM_ROWS) * 4 * names.record_words
    words[[2, 5], 3] = -2
    for sample in range(chunk.num_samples):
        row = chunk.row_of(sample)
        words[row, 4] = any(row in note.rows for note in chunk.notes)
        raws = [chunk._raw(name, sample) or b"" for name in names.columns]  # noqa: SLF001
        for number, raw in enumerate([chunk.tokens_of(sample).tobytes(), *raws]):
            words[row, 5 + 2 * number : 7 + 2 * number] = body_at + len(body) - base - words[row, 0], len(raw)
            body += bytes(raw) + bytes(pad(len(raw)) - len(raw))
    return bytearray(bytes(24) + head + words.tobytes() + bytes(pad(size) - size) + body + bytes(3))


def records_in(slot: bytearray) -> Any:
    names = Names(["label", "prompt"], ["long", "short"], ["late"])
    return 24 + len(block_head(names)) + np.arange(NUM_ROWS, dtype=np.int64) * 4 * names.record_words


def placed_in(slot: bytearray, records: np.ndarray | None = None, kind: type[PlacedRows] = PlacedRows) -> PlacedChunk:
    records = records_in(slot) if records is None else records
    words = np.frombuffer(slot[: len(slot) // 4 * 4], np.int32)
    # as a worker says it, one block's rows at a time
    facts_of_rows = [row_facts(words, np.array([record >> 2]), record_words(words, record)) for record in records]
    num_tokens, num_bytes = (
        np.concatenate([getattr(found, name) for found in facts_of_rows]) for name in ("num_tokens", "num_bytes")
    )
    rows = kind.of(memoryview(slot), CachedRows(records, num_tokens, num_bytes), bool)
    return rows.chunk(Position(), len(records), None, ends_epoch=False)


def record_words(words: np.ndarray, record: int) -> int:
    first = int(record) // 4 - (int(words[int(record) // 4]) >> 2)
    return names_at(memoryview(words).cast("B"), words, first).record_words


def scribble(slot: bytearray) -> None:
    """As the next window does."""
    slot[:] = b"\xff" * len(slot)


def test_a_chunk_in_a_slot_says_what_a_worker_would_have_sent(slot, expected):
    assert facts(placed_in(slot)) == expected


def test_what_is_copied_in_time_stays_as_it_was_when_the_slot_is_used_again(slot, expected):
    chunk = placed_in(slot)
    chunk.own()
    scribble(slot)
    chunk.own()

    assert facts(chunk) == expected


def test_tokens_that_were_returned_are_copies_of_their_own(slot):
    chunk = placed_in(slot)
    tokens = chunk.tokens_of(1)
    before = tokens.tolist()
    chunk.own()
    scribble(slot)

    assert tokens.tolist() == before == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 7


@pytest.mark.parametrize("moves", [False, True])
def test_the_samples_of_a_group_share_their_tokens(slot, moves):
    chunk = placed_in(slot)
    lot = SampleRange(chunk, 0, 3, 0, 0, 4)
    samples = lot.samples()
    first = samples[4].tokens
    if moves:
        chunk.own()
        scribble(slot)

    assert all(np.shares_memory(sample.tokens, first) for sample in samples[5:8])
    assert [sample.tokens.tolist() for sample in samples[:5:4]] == [[0], [0, 1]]
    assert not np.shares_memory(samples[8].tokens, first)
    assert [sample.tokens.tolist() for sample in samples[8:]] == [[0, 1, 2, 3]] * 4


def test_a_read_that_races_with_the_reuse_of_the_slot_is_repeated(slot, expected):
    class Late(PlacedRows):
        """A reader of a value is interrupted here: the chunk has moved when the value arrives."""

        def value(self, column: str, sample: int) -> bytes:
            chunk.own()
            scribble(slot)
            return super().value(column, sample)

    for column in ("tokens", "prompt", "label"):
        before = bytes(slot)
        chunk = placed_in(slot, kind=Late)
        found = chunk.tokens_of(1).tolist() if column == "tokens" else chunk.value(column, 1)
        slot[:] = before
        assert found == {"tokens": [0, 1], "prompt": "p1", "label": [1]}[column]


def test_rows_without_a_sample_make_a_chunk_without_samples(slot):
    chunk = placed_in(slot, records_in(slot)[[2, 5]])

    assert (chunk.num_rows, chunk.num_samples, chunk.num_bytes) == (2, 0, 0)
    assert [(drop.reason, drop.rows.tolist()) for drop in chunk.drops] == [("short", [0, 1])]
    chunk.own()
    assert chunk.num_tokens(0, 0) == 0


def test_blocks_of_other_columns_may_be_in_one_chunk(slot, expected):
    other = Names([], [], [])
    head = block_head(other)
    base = pad(len(slot))
    record = np.array([0, 0, 9, 0, 0, 4 * other.record_words + 4, 8], np.int32).tobytes()
    slot += bytes(base - len(slot)) + head + record + bytes(4) + np.array([8, 9], np.int32).tobytes()
    records = np.concatenate([[base + len(head)], records_in(slot), [base + len(head)]])

    chunk = placed_in(slot, records)
    before = facts(chunk)
    chunk.own()
    scribble(slot)

    assert facts(chunk) == before
    assert [chunk.tokens_of(sample).tolist() for sample in (0, chunk.num_samples - 1)] == [[8, 9]] * 2
    assert [chunk.value("prompt", sample) for sample in (0, chunk.num_samples - 1)] == [None, None]
    moved = [(row - 1, *values) for row, *values in before[0][1:-1]]
    assert moved == expected[0]
