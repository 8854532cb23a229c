"""Slots: who has views into them, and chunks whose samples are there: the same before, during and after their reuse."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import Position
from asyncdata.core.types import SampleRange
from asyncdata.prefetch.token_cache.slot_chunk import CachedRows, PlacedChunk, PlacedRows
from asyncdata.workers.slots import Slots
from tests.support.stored_rows import SLOT_BYTES, Row, chunk_of, reply_of, scanned, store_blocks, worker_of

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata.core.types import Tokens
    from asyncdata.delivery.chunk import Chunk


pytest.importorskip("pyarrow")


pytest.importorskip("xxhash")


def row(number: int) -> Row:
    """Some are dropped, some without tokens, some without columns, and some noted."""
    columns = {"prompt": b'"p%d"' % number, **({"label": b"[%d]" % number} if number % 3 else {})}
    reason = "short" if number in (2, 5) else None
    is_empty = number == 7
    return Row(
        offset=number,
        length=9,
        reason=reason,
        tokens=[] if is_empty else list(range(number + 1)),
        columns={} if is_empty else columns,
        notes={"late"} if number > 5 and not is_empty else set(),
    )


BLOCKS = [[row(number) for number in range(9)], [Row(0, 9, None, [8, 9], {}, set())]]
"""The second has no columns."""


EVERY_ROW = [*BLOCKS[0], *BLOCKS[1]]


class Slot:
    """A slot that a worker has filled with the rows of both blocks."""

    def __init__(self, folder: Path) -> None:
        self.memory = bytearray(SLOT_BYTES)
        self._rows = []
        for number, block in enumerate(BLOCKS):
            (folder / str(number)).mkdir()
            places = store_blocks(str(folder / str(number)), [block], np.arange(len(block)), 4, 1)
            worker = worker_of(str(folder / str(number)), self.memory)
            found = scanned(worker, places, [0], 1 << 17 if number else 0)
            worker.close()
            self._rows.append([np.frombuffer(ints, np.int32) for ints in (found.starts, *sizes_of(found))])

    def chunk(self, rows: list[int], kind: type[PlacedRows] = PlacedRows) -> PlacedChunk:
        """A chunk of the rows of these numbers."""
        starts, *sizes = (np.concatenate(column)[rows] for column in zip(*self._rows, strict=True))
        placed = kind.of(memoryview(self.memory), CachedRows(-2 - starts.astype(np.int64), *sizes), bool)
        return placed.chunk(Position(), len(rows), None, ends_epoch=False)

    def is_reused(self) -> None:
        """By the next window."""
        self.memory[:] = b"\xff" * len(self.memory)


def sizes_of(found: Any) -> tuple[bytes, bytes]:
    return found.num_tokens, found.num_bytes


def facts(chunk: Chunk) -> Any:
    names = ("prompt", "label", "other")
    samples = [
        (chunk.row_of(i), chunk.tokens_of(i).tolist(), [chunk.value(name, i) for name in names])
        for i in range(chunk.num_samples)
    ]
    counts = [[(each[0], each.rows.tolist()) for each in some] for some in (chunk.drops, chunk.notes)]
    return samples, counts, chunk.num_tokens(0, chunk.num_samples), chunk.num_bytes


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path)


@pytest.mark.parametrize("rows", [list(range(9)), [2, 5], [9, *range(9), 9], [8, 0, 8]], ids=str)
def test_a_chunk_in_a_slot_says_what_a_worker_would_have_sent_until_and_after_the_slot_is_reused(slot, rows):
    reply = reply_of([(place, EVERY_ROW[number]) for place, number in enumerate(rows)], len(rows))
    expected = facts(chunk_of(reply, len(rows)))
    chunk = slot.chunk(rows)
    assert facts(chunk) == expected

    chunk.own()
    slot.is_reused()
    chunk.own()
    assert facts(chunk) == expected


def test_tokens_that_were_returned_are_copies_of_their_own(slot):
    chunk = slot.chunk([0, 1])
    tokens: Tokens = chunk.tokens_of(1)
    chunk.own()
    slot.is_reused()

    assert tokens.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 7


@pytest.mark.parametrize("moves", [False, True])
def test_the_samples_of_a_group_share_their_tokens(slot, moves):
    chunk = slot.chunk([0, 1, 3])
    samples = SampleRange(chunk, 0, 3, 0, 0, 4).samples()
    first = samples[4].tokens
    if moves:
        chunk.own()
        slot.is_reused()

    assert all(np.shares_memory(sample.tokens, first) for sample in samples[5:8])
    assert [sample.tokens.tolist() for sample in samples[:5:4]] == [[0], [0, 1]]
    assert not np.shares_memory(samples[8].tokens, first)
    assert [sample.tokens.tolist() for sample in samples[8:]] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize(("column", "value"), [("tokens", [0, 1]), ("prompt", "p1"), ("label", [1])])
def test_a_read_that_races_with_the_reuse_of_the_slot_is_repeated(slot, column, value):
    class Late(PlacedRows):
        """A reader of a value is interrupted here: the chunk has moved when the value arrives."""

        def value(self, column: str, sample: int) -> bytes:
            chunk.own()
            slot.is_reused()
            return super().value(column, sample)

    chunk = slot.chunk([0, 1], Late)

    assert (chunk.tokens_of(1).tolist() if column == "tokens" else chunk.value(column, 1)) == value


# Borrowers: objects with views into free slots


class Reader:
    """Counts how often it was told to copy."""

    def __init__(self) -> None:
        self.num_told = 0

    def own(self) -> None:
        self.num_told += 1


def borrowed(number: int, *slots_of_readers: int) -> tuple[Slots, list[Reader]]:
    """So many free slots, and readers of these."""
    slots, readers = Slots(number), [Reader() for _ in slots_of_readers]
    assert [slots.hold() for _ in range(number)] == list(range(number))
    for slot in range(number):
        slots.release(slot)
    for slot, reader in zip(slots_of_readers, readers, strict=True):
        slots.borrowers.add(slot, reader)
    return slots, readers


def told(readers: list[Reader]) -> list[int]:
    return [reader.num_told for reader in readers]


def test_a_slot_without_borrowers_is_taken_first_and_before_another_one_is_its_borrowers_copy_once():
    slots, readers = borrowed(3, 0, 1)

    assert slots.hold() == 2
    assert told(readers) == [0, 0]
    assert slots.hold() == 0
    assert told(readers) == [1, 0]
    slots.release(0)
    assert slots.hold() == 0, "it has no borrowers any more"
    assert told(readers) == [1, 0]


def test_borrowers_that_were_deleted_do_not_count():
    slots, readers = borrowed(2, 0, 0, 1)
    del readers[:2]

    assert slots.borrowers.number(0) == 0
    assert slots.hold() == 0
    assert told(readers) == [0]


def test_before_a_fork_all_borrowers_copy():
    slots, readers = zip(borrowed(2, 0), borrowed(1, 0), strict=True)
    assert len(slots) == 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a process with threads
        child = os.fork()
    if child == 0:
        os._exit(sum(told([reader for some in readers for reader in some])))

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
