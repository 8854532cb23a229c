"""What the hot paths cost, counted and not timed: calls, bytes and copies, which are the same on every machine.

A limit has a wide margin over what was counted when it was written; a guard that fails is a hot path that has grown.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncdata import DataLoader, Position, Sample
from asyncdata.core.messages import frame
from asyncdata.delivery.channel import Entry
from tests.support.executors import Client, Lines
from tests.support.faults import until
from tests.support.loading import row_id
from tests.support.parts import HEADER, Chunk, ColumnWriter, Coordinator, DeliveryRules, InlineExecutor, decode_reply

NUM_ROWS = 4000


def num_calls(function: Callable[[], object]) -> int:
    """Functions called in this thread, Python's and C's, until ``function`` returns."""
    count = 0

    def saw(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(saw)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def body_of(num_rows: int) -> memoryview:
    """The body of a worker's frame with so many samples, each of its row's number and another token."""
    out = ColumnWriter()
    for row in range(num_rows):
        out.keep(row, [row, 70_000], label=b"1", metadata=b'{"a":1}')
    return memoryview(bytes(frame(1, out.finish(num_rows, 0.0)))[HEADER.size :])


@pytest.fixture
def rows(jsonl_file: Callable[..., Path]) -> Path:
    return jsonl_file({"id": number} for number in range(NUM_ROWS))


def test_a_ready_batch_and_group_cost_as_many_calls_whatever_their_size_and_a_sample_is_small(rows):
    with full_loader(rows) as loader:
        few, many = (calls_of_a_ready_batch(partial(loader.get_next_batch, number)) for number in (2, 64))
    with full_loader(rows, n_samples_per_prompt=8) as loader:
        assert calls_of_a_ready_batch(partial(loader.get_samples, 32)) <= 25  # 17
    assert few == many <= 20  # 14
    assert sys.getsizeof(Sample()) <= 8 * (len(Sample.__struct_fields__) + 4)
    with full_loader(rows) as loader:
        (sample,) = loader.get_next_batch(1)
        assert num_calls(lambda: sample.tokens) <= 8  # 5
        assert num_calls(lambda: sample.tokens) <= 3


@contextlib.contextmanager
def full_loader(path: Path, **knobs: Any) -> Iterator[DataLoader]:
    """A loader with every row ready, and nothing to do besides."""
    with DataLoader(str(path), tokenize_fn=row_id, num_workers=0, buffer_size=NUM_ROWS, epochs=1, **knobs) as loader:
        loader.start()
        until(lambda: loader.statistics().ready_samples == NUM_ROWS)
        yield loader


def calls_of_a_ready_batch(take: Callable[[], object]) -> int:
    """The fewest of some: a batch that goes over the end of a chunk takes the long way."""
    return min(num_calls(take) for _ in range(20))


def test_a_chunk_costs_as_many_calls_whatever_the_number_of_its_rows():
    """The service's thread never walks the rows of a reply in Python."""
    costs = []
    for num_rows in (8, 32, 512):  # the first in a process also makes what is made once
        coordinator = Coordinator(DeliveryRules(capacity=1000, max_ready_bytes=1 << 30))
        entry, reply = coordinator.reserve(coordinator.channel, num_rows, 1), decode_reply(body_of(num_rows))
        assert entry is not None

        def arrive(entry: Entry = entry, reply: Any = reply, coordinator: Coordinator = coordinator) -> None:
            chunk = Chunk(reply, Position(), entry.num_rows, Lines(), ends_epoch=False)
            coordinator.fill(coordinator.channel, entry, chunk)

        costs.append(num_calls(arrive))
    assert costs[1] == costs[2] <= 100  # 86, of which 40 are for the digest


@pytest.mark.asyncio
async def test_a_request_costs_as_many_calls_whatever_the_number_of_its_rows(rows):
    async with Client(InlineExecutor(row_id), rows, row_id).reading() as window:
        costs = [num_calls(lambda num_rows=num_rows: frame(1, window.request(0, num_rows))) for num_rows in (32, 512)]
    assert costs[0] == costs[1] <= 30  # 19


@pytest.mark.parametrize("num_rows", [*range(1, 5), 20_000])
def test_tokens_are_aligned_views_of_the_frame_that_brought_them(num_rows):
    body = body_of(num_rows)
    tokens = Chunk(decode_reply(body), Position(), num_rows, Lines(), ends_epoch=False).tokens_of(num_rows - 1)
    assert tokens.tolist() == [num_rows - 1, 70_000]
    assert num_rows < 5 or np.shares_memory(tokens, np.frombuffer(body, np.uint8))
    assert tokens.flags.aligned
    assert not tokens.flags.writeable
