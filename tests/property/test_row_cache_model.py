"""Segments of single rows: whatever the rows are, each comes back as it was, and no change of a byte goes unseen."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata.core.cache_messages import CachedFile, CachedPlaces, CacheJob, ListTokens, RowsPlan, StoreTokens
from asyncdata.core.messages import FileRef, Job, Tokenize, Tokenized

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.inventory import opened_segment
from asyncdata.prefetch.token_cache.row_cache import StreamNumbers
from asyncdata.prefetch.token_cache.segment.layout import DamagedError
from asyncdata.prefetch.token_cache.worker import CacheWorker
from tests.property.test_token_cache_model import NoReader, Row, chunk_of, facts, reply_of, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

replies_of_rows = st.lists(st.lists(rows, min_size=1, max_size=9), min_size=1, max_size=6)


def worker_of(folder: str) -> CacheWorker:
    cache = CacheJob(folder, [CachedFile("digest 0", 5000, 1), CachedFile("digest 1", 7000, 2)], 0, has_rows=True)
    files = [FileRef("/a", 5000), FileRef("/b", 7000)]
    job = Job(files=files, tokenize=None, max_row_bytes=1 << 20, block_bytes=1000, slack_bytes=0, cache=cache)
    return CacheWorker(job, [memoryview(b"")], NoReader())


def store(folder: str, replies: list[list[Row]], are_kept: np.ndarray) -> Any:
    """Have a segment written; what a worker answers to that."""
    worker = worker_of(folder)
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
def test_every_row_comes_back_as_it_was(replies, random, data):
    every = [row for some in replies for row in some]
    are_kept = kept_of(random, replies)
    with tempfile.TemporaryDirectory() as folder:
        stored = store(folder, replies, are_kept)
        worker = worker_of(folder)
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
        store(folder, replies, are_kept)
        path = Path(folder, "s.rows")
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)

        with pytest.raises(DamagedError):
            verify(path)


def verify(path: Path) -> None:
    segment = opened_segment(str(path))
    try:
        segment.verify()
    finally:
        segment.close()


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
