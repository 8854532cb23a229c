"""What is stored in a segment comes back: against a model that is a list of rows. And what is damaged does not."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata import Position
from asyncdata.core.cache_messages import CachedBlock, CachedFile, CacheJob, ListTokens, StoreTokens
from asyncdata.core.messages import Block, FileRef, Job, Scan, Tokenize, decode_reply, encode
from asyncdata.delivery.chunk import Chunk
from asyncdata.prefetch.windows.base import Arranged
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.support.cached import Delivered, loader, segments
from tests.support.loading import write_rows

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.segment.layout import DamagedError
from asyncdata.prefetch.token_cache.segment.reader import Segment
from asyncdata.prefetch.token_cache.slot_chunk import CachedRows, PlacedRows
from asyncdata.prefetch.token_cache.window_tokens import WindowTokens
from asyncdata.prefetch.token_cache.worker import CacheWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.sources.reader import BlockRows

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy

BLOCK_BYTES = 1000
SLOT_BYTES = 1 << 20


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


def worker_of(folder: str, slot: bytearray) -> CacheWorker:
    cache = CacheJob(folder, [CachedFile("digest 0", 5000, 1), CachedFile("digest 1", 7000, 2)], 1 << 16)
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


def store(folder: str, blocks: list[list[Row]], order: np.ndarray, size: int, piece_blocks: int) -> list[Block]:
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


ALL_NAMES = ("prompt", "label", "metadata", "spans", "extra")


def raw_of(chunk: Chunk, name: str, sample: int) -> bytes:
    data, ends = chunk._columns.get(name, (b"", np.zeros(chunk.num_samples, np.uint32)))  # noqa: SLF001
    return bytes(data[(int(ends[sample - 1]) if sample else 0) : int(ends[sample])])


@settings(max_examples=120)
@given(blocks_of_rows, st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 9), st.data())
def test_every_row_comes_back_as_it_was(blocks, random, size, piece_blocks, data):
    num_rows = sum(map(len, blocks))
    order = np.array(random.sample(range(num_rows), num_rows), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        places = store(folder, blocks, order, size, piece_blocks)
        if not places:
            return

        slot = bytearray(SLOT_BYTES)
        worker = worker_of(folder, slot)
        (listing,) = worker.answer(ListTokens(None, 9)).segments
        assert np.frombuffer(listing.are_sure, np.bool_).all()
        asked = random.sample(range(len(places)), random.randint(1, len(places)))
        cached = [CachedBlock(place, "s.arrow", number, True) for place, number in enumerate(asked)]
        found = worker.scan(Scan(0, 8 * random.randint(0, 9), [places[number] for number in asked], cached))

        every = [row for number in asked for row in blocks[number]]
        assert found.refused == []
        assert array("i", found.counts).tolist() == [len(blocks[number]) for number in asked]
        assert array("i", found.lengths).tolist() == [row.length for row in every]
        assert array("i", found.offsets).tolist() == [row.offset for row in every]
        assert array("i", found.blanks).tolist() == asked

        chosen = data.draw(st.lists(st.integers(0, max(0, len(every) - 1)), max_size=20 if every else 0))
        is_fresh = [random.random() < 0.3 for _ in chosen]
        starts = np.frombuffer(found.starts, np.int32)
        mixed = [-1 if fresh else int(starts[row]) for row, fresh in zip(chosen, is_fresh, strict=True)]
        request = Tokenize(0, array("i", mixed).tobytes(), bytes(4 * len(mixed)), num_cached=is_fresh.count(False))
        expected = reply_of([(place, every[row]) for place, row in enumerate(chosen)], len(chosen))
        fresh_rows = [(place, every[row]) for place, row in enumerate(chosen) if is_fresh[place]]
        fresh = reply_of(fresh_rows, len(chosen)) if any(is_fresh) else None
        reply = worker.complete(request, fresh, 0.0)

        assert facts(chunk_of(reply, len(chosen))) == facts(chunk_of(expected, len(chosen)))
        worker.close()


@settings(max_examples=80)
@given(
    st.lists(blocks_of_rows.filter(any), min_size=1, max_size=2),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_rows_that_are_read_where_they_lie_are_what_a_worker_would_send(segments, random, data):
    """Of several segments, which have columns of their own; before the slot is used again, and after."""
    slot, every, found_rows, base = bytearray(4 * SLOT_BYTES), [], [], 0
    for blocks in segments:
        num_rows = sum(map(len, blocks))
        with tempfile.TemporaryDirectory() as folder:
            places = store(folder, blocks, np.array(random.sample(range(num_rows), num_rows), np.int64), 5, 4)
            worker = worker_of(folder, slot)
            cached = [CachedBlock(number, "s.arrow", number, True) for number in range(len(places))]
            found = worker.scan(Scan(0, base, places, cached))
            worker.close()
        assert found.refused == []
        columns = (np.frombuffer(column, np.int32) for column in (found.starts, found.num_tokens, found.num_bytes))
        found_rows.append(tuple(columns))
        every += itertools.chain(*blocks)
        base += (1 << 17) * len(places)

    chosen = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=20))
    expected = chunk_of(reply_of([(place, every[row]) for place, row in enumerate(chosen)], len(chosen)), len(chosen))
    starts, *sizes = (np.concatenate(column)[chosen] for column in zip(*found_rows, strict=True))
    placed = PlacedRows.of(memoryview(slot), CachedRows(-2 - starts.astype(np.int64), *sizes), bool)
    chunk = placed.chunk(Position(), len(chosen), None, ends_epoch=False)
    assert facts_one_by_one(chunk) == facts_one_by_one(expected)
    assert chunk.num_tokens(0, chunk.num_samples) == expected.num_tokens(0, expected.num_samples)
    assert chunk.num_bytes == expected.num_bytes
    chunk.own()
    slot[:] = b"\xff" * len(slot)
    assert facts_one_by_one(chunk) == facts_one_by_one(expected)


def facts_one_by_one(chunk: Chunk) -> Any:
    """As :func:`facts`, but for the columns, by the chunk's own way to a value."""
    samples, *rest = facts(chunk)
    raws = [[bytes(chunk._raw(name, i) or b"") for name in ALL_NAMES] for i in range(chunk.num_samples)]  # noqa: SLF001
    return [sample[:2] for sample in samples], raws, *rest


@settings(max_examples=40)
@given(blocks_of_rows.filter(lambda blocks: any(blocks)), st.randoms(use_true_random=False))
def test_arrow_reads_the_same_samples(blocks, random):
    import pyarrow as pa

    num_rows = sum(map(len, blocks))
    with tempfile.TemporaryDirectory() as folder:
        store(folder, blocks, np.array(random.sample(range(num_rows), num_rows), np.int64), 5, 4)
        with pa.OSFile(os.path.join(folder, "s.arrow")) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()

    table.validate(full=True)
    kept = [row for row in itertools.chain(*blocks) if row.reason is None]
    assert table["tokens"].to_pylist() == [row.tokens for row in kept]
    for name in table.column_names[1:]:
        assert table[name].to_pylist() == [row.columns.get(name, b"") for row in kept]


@pytest.fixture(scope="module")
def cache_and_data(tmp_path_factory) -> tuple[Path, Path, Delivered]:
    folder = tmp_path_factory.mktemp("damage")
    path = write_rows(folder / "rows.jsonl", 60)
    expected = Delivered(loader(path, folder / "cache"), settle=True)
    return path, folder / "cache", expected


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_byte_of_a_segment_is_changed_or_cut_off_the_same_is_delivered(cache_and_data, data):
    path, cache, expected = cache_and_data
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "cache"
        shutil.copytree(cache, copy)
        segment = data.draw(st.sampled_from(segments(copy)))
        content = bytearray(segment.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place:]
        segment.write_bytes(content)

        found = Delivered(loader(path, copy))

    assert found.samples == expected.samples
    assert found.counts == expected.counts


@given(data=st.data())
def test_verifying_finds_every_change_of_what_is_read(cache_and_data, data):
    """Bytes that only Arrow reads are not looked at: the schema, and what leads to a batch."""
    _, cache, _ = cache_and_data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.arrow"
        content = bytearray(data.draw(st.sampled_from(segments(cache))).read_bytes())
        path.write_bytes(content)
        whole = Segment(str(path))
        read = [(int(e["body"]), int(e["body"] + e["body_bytes"])) for e in whole.entries() if e["body_bytes"]]
        behind = min(int(entry["records"]) for entry in whole.entries())
        whole.verify()
        whole.close()
        in_a_body = st.sampled_from(read).flatmap(lambda body: st.integers(body[0], body[1] - 1))
        place = data.draw(in_a_body | st.integers(behind, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)

        with pytest.raises(DamagedError):
            verify(path)


def verify(path: Path) -> None:
    segment = Segment(str(path))
    try:
        segment.verify()
    finally:
        segment.close()


def test_the_replies_that_are_stored_are_those_that_are_sent():
    """A spill is a reply as it crosses to the trainer's process, so that nothing is lost on the way."""
    reply = reply_of([(0, Row(0, 1, None, [1, 2], {"label": b"1"}, {"n3"}))], 1)

    assert decode_reply(encode(reply)) == reply
