"""Rows of a model, and segments of the token cache that a worker stores and reads again."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st

from asyncdata import Position
from asyncdata.core.cache_messages import (
    CachedBlock,
    CachedFile,
    CacheJob,
    RowsPlan,
    StoreTokens,
)
from asyncdata.core.messages import Block, FileRef, Job, Scan, Tokenize
from asyncdata.delivery.chunk import Chunk
from asyncdata.prefetch.token_cache.window_tokens import WindowTokens
from asyncdata.prefetch.token_cache.worker import CacheWorker
from asyncdata.prefetch.windows.base import Arranged
from asyncdata.tokenization.column_writer import ColumnWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.sources.reader import BlockRows


BLOCK_BYTES = 1000
SLOT_BYTES = 1 << 20
ALL_NAMES = ("prompt", "label", "metadata", "spans", "extra")


class Row(NamedTuple):
    """A row of the model: dropped for a reason, or a sample with notes."""

    offset: int
    length: int
    reason: str | None
    tokens: list[int]
    columns: dict[str, bytes]
    notes: set[str]


names = st.sampled_from(["prompt", "label", "metadata", "spans", "extra"])


values = st.dictionaries(names, st.binary(max_size=40).filter(bool) | st.just(b'"\xf0\x9f\x98\x80"'), max_size=5)


rows = st.builds(
    Row,
    st.integers(0, BLOCK_BYTES - 1),
    st.integers(0, 1 << 30),
    st.none() | st.sampled_from(["max_length", "empty", "für nichts"]),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    values,
    st.sets(st.sampled_from(["lost", "found", "n3"])),
)


blocks_of_rows = st.lists(st.lists(rows, max_size=12), min_size=1, max_size=12)


class Keeper:
    """Remembers what the window tells."""

    reads_in_place = True

    def __init__(self) -> None:
        self.completed: list[WindowTokens] = []
        self.num_read = 0

    def refused(self, *what: Any) -> None:
        raise AssertionError(what)

    def read(self, num_rows: int) -> None:
        self.num_read += num_rows

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def complete(self, window: WindowTokens) -> None:
        self.completed.append(window)


class NoReader:
    """Must not be asked."""

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        raise AssertionError(block)


def worker_of(folder: str, slot: bytearray, *, has_rows: bool = False) -> CacheWorker:
    """A worker with one slot, which reads and writes segments in ``folder``."""
    files = [CachedFile("digest 0", 5000, 1), CachedFile("digest 1", 7000, 2)]
    cache = CacheJob(folder, files, 0 if has_rows else 1 << 16, has_rows=has_rows)
    job = Job(
        files=[FileRef("/a", 5000), FileRef("/b", 7000)],
        tokenize=None,
        max_row_bytes=1 << 20,
        block_bytes=BLOCK_BYTES,
        slack_bytes=0,
        cache=cache,
    )
    return CacheWorker(job, [memoryview(slot)], NoReader())


def reply_of(chosen: Sequence[tuple[int, Row]], num_rows: int) -> Any:
    """What a tokenize function would make of these rows."""
    out = ColumnWriter(numbers=[number for number, _ in chosen])
    for place, (_, row) in enumerate(chosen):
        if row.reason is not None:
            out.drop(place, row.reason)
            continue

        out.keep(place, row.tokens, **row.columns)
        for note in sorted(row.notes):
            out.note(place, note)
    return out.finish(num_rows, 0.0)


def arranged_of(blocks: list[list[Row]], order: np.ndarray, starts: np.ndarray) -> Arranged:
    every = list(itertools.chain(*blocks))
    return Arranged(
        ends=np.cumsum([len(block) for block in blocks]),
        order=order,
        starts=starts,
        lengths=np.array([row.length for row in every], np.int32),
        offsets=np.array([row.offset for row in every], np.int32),
        blanks=np.arange(len(blocks), dtype=np.int32),
        sums=np.arange(1, len(blocks) + 1, dtype=np.uint64),
        num_tokens=np.zeros(len(every), np.int32),
        num_bytes=np.zeros(len(every), np.int32),
    )


def store_blocks(folder: str, blocks: list[list[Row]], order: np.ndarray, size: int, piece_blocks: int) -> list[Block]:
    """Have a segment written as a run would: replies of ``size`` rows each, in the window's order."""
    places = [Block(number % 2, number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES) for number in range(len(blocks))]
    every, keeper, worker = list(itertools.chain(*blocks)), Keeper(), worker_of(folder, bytearray(8))
    os.mkdir(os.path.join(folder, "room"))
    window = WindowTokens(keeper, places, [], "room", 0)
    window.arranged(arranged_of(blocks, order, np.zeros(len(every), np.int32)))
    for first in range(0, len(every), size):
        stop = min(first + size, len(every))
        request = window.request(Tokenize(0, bytes(4 * (stop - first)), bytes(4 * (stop - first))), first)
        chosen = [(row, every[order[first + row]]) for row in range(stop - first)]
        worker.complete(request, reply_of(chosen[:1], stop - first), 0.0)  # by one that dies before it has answered
        reply = worker.complete(request, reply_of(chosen, stop - first), 0.0)
        window.answered(first, stop - first, reply)
    if not every:
        return []

    assert keeper.completed == [window]
    end = 0
    window._blocks_per_piece = lambda _: piece_blocks  # noqa: SLF001
    pieces = list(window.plans(()))
    for number, (_, plan) in enumerate(pieces):
        Path(folder, "room", "plan").write_bytes(msgspec.msgpack.encode(plan))
        request = StoreTokens("room/segment", end, number, number + 1 == len(pieces), "room/plan")
        again = worker.answer(request)  # as after a worker's death
        reply = worker.answer(request)
        assert reply == again
        end = reply.end
    os.rename(os.path.join(folder, "room", "segment"), os.path.join(folder, "s.arrow"))
    worker.close()
    return places


def scanned(worker: CacheWorker, places: Sequence[Block], numbers: Sequence[int], base: int = 0) -> Any:
    """What a worker finds, and puts into its slot from ``base`` on, of these blocks of its segment."""
    blocks = [CachedBlock(place, "s.arrow", number, True) for place, number in enumerate(numbers)]
    return worker.scan(Scan(0, base, [places[number] for number in numbers], blocks))


def store_rows(folder: str, replies: list[list[Row]], are_kept: np.ndarray) -> Any:
    """Have a segment written; what a worker answers to that."""
    worker = worker_of(folder, bytearray(8), has_rows=True)
    os.mkdir(os.path.join(folder, "room"))
    found = []
    for number, some in enumerate(replies):
        request = Tokenize(-1, bytes(4 * len(some)), bytes(4 * len(some)), spill=f"room/{number}")
        found.append(worker.complete(request, reply_of(list(enumerate(some)), len(some)), 0.0))
    every = [row for some in replies for row in some]
    plan = RowsPlan(
        columns=sorted({name for reply in found for name in reply.columns}),
        reasons=sorted({name for reply in found for name in reply.drops}),
        notes=sorted({name for reply in found for name in reply.notes}),
        spills=[reply.spill for reply in found],
        ends=np.cumsum([len(some) for some in replies]).astype(np.int32).tobytes(),
        file_ids=(np.arange(len(every), dtype=np.int32) % 2).tobytes(),
        numbers=np.arange(len(every), dtype=np.int64).tobytes(),
        are_kept=are_kept.tobytes(),
    )
    Path(folder, "room", "plan").write_bytes(msgspec.msgpack.encode(plan))
    request = StoreTokens("room/segment", 0, 0, True, "room/plan")
    again, answer = worker.answer(request), worker.answer(request)  # as after a worker's death
    assert again == answer
    os.rename(os.path.join(folder, "room", "segment"), os.path.join(folder, "s.rows"))
    worker.close()
    return answer


def chunk_of(reply: Any, num_rows: int) -> Chunk:
    return Chunk(reply, Position(), num_rows, None, ends_epoch=False)


def facts(chunk: Chunk) -> Any:
    """All that is known of a chunk, but for how it is packed."""
    samples = [
        (chunk.row_of(i), chunk.tokens_of(i).tolist(), [raw_of(chunk, name, i) for name in sorted(ALL_NAMES)])
        for i in range(chunk.num_samples)
    ]
    drops = sorted((drop.reason, drop.rows.tolist()) for drop in chunk.drops)
    return samples, drops, sorted((note.name, note.rows.tolist()) for note in chunk.notes), chunk.errors


def raw_of(chunk: Chunk, name: str, sample: int) -> bytes:
    data, ends = chunk._columns.get(name, (b"", np.zeros(chunk.num_samples, np.uint32)))  # noqa: SLF001
    return bytes(data[(int(ends[sample - 1]) if sample else 0) : int(ends[sample])])


def facts_one_by_one(chunk: Chunk) -> Any:
    """As :func:`facts`, but for the columns, by the chunk's own way to a value."""
    samples, *rest = facts(chunk)
    raws = [[bytes(chunk._raw(name, i) or b"") for name in ALL_NAMES] for i in range(chunk.num_samples)]  # noqa: SLF001
    return [sample[:2] for sample in samples], raws, *rest
