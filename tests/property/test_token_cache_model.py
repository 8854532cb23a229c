"""What is stored in a segment comes back: against a model that is a list of rows. And what is damaged does not."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata import JsonlSource, Position
from asyncdata.core.cache_messages import (
    CachedPlaces,
    ListTokens,
    SegmentListing,
)
from asyncdata.core.messages import Tokenize, Tokenized, decode_reply, encode
from asyncdata.prefetch.token_cache.catalog import Catalog
from asyncdata.prefetch.token_cache.inventory import opened_segment
from asyncdata.prefetch.token_cache.row_cache import StreamNumbers
from asyncdata.prefetch.token_cache.segment.layout import DamagedError
from asyncdata.prefetch.token_cache.segment.reader import Segment
from asyncdata.prefetch.token_cache.slot_chunk import CachedRows, PlacedRows
from tests.support.cached import Delivered, loader, segments
from tests.support.loading import write_rows
from tests.support.stored_rows import (
    SLOT_BYTES,
    Row,
    blocks_of_rows,
    chunk_of,
    facts,
    facts_one_by_one,
    reply_of,
    rows,
    scanned,
    store_blocks,
    store_rows,
    worker_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy


# Segments of blocks


@settings(max_examples=120)
@given(blocks_of_rows, st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 9), st.data())
def test_every_row_of_blocks_comes_back_as_it_was(blocks, random, size, piece_blocks, data):
    num_rows = sum(map(len, blocks))
    order = np.array(random.sample(range(num_rows), num_rows), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        places = store_blocks(folder, blocks, order, size, piece_blocks)
        if not places:
            return

        slot = bytearray(SLOT_BYTES)
        worker = worker_of(folder, slot)
        (listing,) = worker.answer(ListTokens(None, 9)).segments
        assert np.frombuffer(listing.are_sure, np.bool_).all()
        asked = random.sample(range(len(places)), random.randint(1, len(places)))
        found = scanned(worker, places, asked, 8 * random.randint(0, 9))

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
            places = store_blocks(folder, blocks, np.array(random.sample(range(num_rows), num_rows), np.int64), 5, 4)
            worker = worker_of(folder, slot)
            found = scanned(worker, places, range(len(places)), base)
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


@settings(max_examples=40)
@given(blocks_of_rows.filter(lambda blocks: any(blocks)), st.randoms(use_true_random=False))
def test_arrow_reads_the_same_samples(blocks, random):
    import pyarrow as pa

    num_rows = sum(map(len, blocks))
    with tempfile.TemporaryDirectory() as folder:
        store_blocks(folder, blocks, np.array(random.sample(range(num_rows), num_rows), np.int64), 5, 4)
        with pa.OSFile(os.path.join(folder, "s.arrow")) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()

    table.validate(full=True)
    kept = [row for row in itertools.chain(*blocks) if row.reason is None]
    assert table["tokens"].to_pylist() == [row.tokens for row in kept]
    for name in table.column_names[1:]:
        assert table[name].to_pylist() == [row.columns.get(name, b"") for row in kept]


# Segments of single rows


pytest.importorskip("pyarrow")


pytest.importorskip("xxhash")


replies_of_rows = st.lists(st.lists(rows, min_size=1, max_size=9), min_size=1, max_size=6)


def kept_of(random: Any, replies: list[list[Row]]) -> np.ndarray:
    are_kept = np.array([random.random() < 0.8 for some in replies for _ in some])
    are_kept[0] = True
    return are_kept


def request_for(entries: Sequence[int], are_fresh: Sequence[bool]) -> Tokenize:
    cached = [place for place, fresh in enumerate(are_fresh) if not fresh]
    places = CachedPlaces(
        ["s.rows"],
        np.array(cached, np.int32).tobytes(),
        bytes(4 * len(cached)),
        np.array([entries[place] for place in cached], np.int32).tobytes(),
        bytes([True] * len(cached)),
    )
    starts = np.array([-1 if fresh else -2 for fresh in are_fresh], np.int32)
    return Tokenize(-1, starts.tobytes(), bytes(4 * len(starts)), num_cached=len(cached), cached=places)


@settings(max_examples=120)
@given(replies_of_rows, st.randoms(use_true_random=False), st.data())
def test_every_row_of_rows_comes_back_as_it_was(replies, random, data):
    every = [row for some in replies for row in some]
    are_kept = kept_of(random, replies)
    with tempfile.TemporaryDirectory() as folder:
        stored = store_rows(folder, replies, are_kept)
        worker = worker_of(folder, bytearray(8), has_rows=True)
        (listing,) = worker.answer(ListTokens(None, 9)).segments
        kept = np.flatnonzero(are_kept)
        assert stored.num_rows == len(kept)
        columns = np.frombuffer(listing.starts, np.int64), np.frombuffer(listing.entries, np.int32)
        listed = sorted(zip(*columns, strict=True))
        assert [start for start, _ in listed] == kept.tolist()
        assert [kept[entry] for _, entry in listed] == kept.tolist()

        chosen = data.draw(st.lists(st.integers(0, len(kept) - 1), max_size=20))
        are_fresh = [random.random() < 0.3 for _ in chosen]
        rows_chosen = [every[kept[number]] for number in chosen]
        fresh = [(place, row) for place, row in enumerate(rows_chosen) if are_fresh[place]]
        reply = worker.complete(
            request_for(chosen, are_fresh), reply_of(fresh, len(chosen)) if fresh or not chosen else None, 0.0
        )

        assert isinstance(reply, Tokenized)
        expected = reply_of(list(enumerate(rows_chosen)), len(chosen))
        assert facts(chunk_of(reply, len(chosen))) == facts(chunk_of(expected, len(chosen)))
        worker.close()


@settings(max_examples=60)
@given(replies_of_rows, st.randoms(use_true_random=False), st.data())
def test_every_change_of_a_byte_is_found(replies, random, data):
    are_kept = kept_of(random, replies)
    with tempfile.TemporaryDirectory() as folder:
        store_rows(folder, replies, are_kept)
        path = Path(folder, "s.rows")
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)

        with pytest.raises(DamagedError):
            verify(path)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40)), min_size=1, max_size=9), max_size=9))
def test_the_numbers_of_a_streams_rows_lead_back_to_them(calls):
    numbers, seen = StreamNumbers(), dict[tuple[int, int], int]()
    for places in calls:
        file_ids, starts = (np.array(column, np.int64) for column in zip(*places, strict=True))
        found = numbers.numbers(file_ids, starts)

        assert list(zip(*(column.tolist() for column in numbers.places(found)), strict=True)) == places
        for place, number in zip(places, found.tolist(), strict=True):
            assert seen.setdefault(place, number) == number
    assert len(set(seen.values())) == len(seen)


# Which blocks are known


def listing(name: str, entries: list[int], numbers: list[int], block_bytes: int) -> SegmentListing:
    return SegmentListing(
        name,
        10,
        np.array(entries, np.int32).tobytes(),
        np.zeros(len(numbers), np.int32).tobytes(),
        (np.array(numbers, np.int64) * block_bytes).tobytes(),
        np.ones(len(numbers), np.bool_).tobytes(),
    )


steps = st.lists(
    st.tuples(st.just("take"), st.integers(0, 9), st.lists(st.integers(0, 29), unique=True, max_size=8))
    | st.tuples(st.just("add"), st.integers(0, 9), st.lists(st.integers(0, 29), unique=True, max_size=8))
    | st.tuples(st.just("forget"), st.integers(0, 9), st.just([]))
    | st.tuples(st.just("block"), st.integers(0, 29), st.just([])),
    max_size=20,
)


@pytest.fixture(scope="module")
def thirty_blocks(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("catalog") / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 334)
    files = JsonlSource(str(path)).open(101)
    assert files.num_blocks == 30
    return files


@pytest.mark.thorough
@given(steps)
def test_the_catalog_does_as_a_dict_would(thirty_blocks, steps):
    files, catalog, model, seen = thirty_blocks, Catalog(thirty_blocks, 30), {}, set()
    for step, number, numbers in steps:
        name = f"segment {number}"
        if step in ("take", "add") and name not in seen:
            entries = [2 * place for place in range(len(numbers))] if step == "take" else list(range(len(numbers)))
            if step == "take":
                catalog.take(listing(name, entries, numbers, 101))
            else:
                catalog.add(name, 10, np.array(numbers, np.int64))
            model |= {block: (name, entry) for block, entry in zip(numbers, entries, strict=True)}
            seen.add(name)
        elif step == "forget":
            catalog.forget([name])
            model = {block: place for block, place in model.items() if place[0] != name}
        elif step == "block":
            catalog.forget_block(files.blocks([number])[0])
            model.pop(number, None)

    found = catalog.find(files.blocks(range(30)))
    assert {item.block: (item.segment, item.entry) for item in found} == model
    assert catalog.num_blocks_cached == len(model)


def test_a_block_that_is_known_to_be_the_same_is_preferred_to_one_that_must_be_compared(thirty_blocks):
    for names in (("sure", "unsure"), ("unsure", "sure")):
        catalog = Catalog(thirty_blocks, 30)
        for name in names:
            found = listing(name, [0, 1], [3, 4], 101)
            catalog.take(found if name == "sure" else with_doubt(found))

        assert {item.segment for item in catalog.find(thirty_blocks.blocks(range(30)))} == {"sure"}


def with_doubt(found: SegmentListing) -> SegmentListing:
    return msgspec.structs.replace(found, are_sure=bytes(len(found.are_sure)))


# Damage


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
    segment = opened_segment(str(path))
    try:
        segment.verify()
    finally:
        segment.close()


def test_the_replies_that_are_stored_are_those_that_are_sent():
    """A spill is a reply as it crosses to the trainer's process, so that nothing is lost on the way."""
    reply = reply_of([(0, Row(0, 1, None, [1, 2], {"label": b"1"}, {"n3"}))], 1)

    assert decode_reply(encode(reply)) == reply
