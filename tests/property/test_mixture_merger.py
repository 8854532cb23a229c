"""Merging parts: the samples follow the schedule, whatever is dropped and however rows are cut into chunks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Position
from asyncdata.delivery.channel import Channel
from asyncdata.delivery.ledger import Ledger
from asyncdata.delivery.merger import Merger
from asyncdata.delivery.mixture import MixturePoint, MixtureState, PartCursor
from asyncdata.delivery.next_delivery import deliver
from asyncdata.delivery.part_queue import BadRowRules, PartQueue
from asyncdata.order.mixture import ScheduleCursor
from tests.property.test_mixture_schedule import nodes, numbered
from tests.support.chunks import BadRow, chunk_of
from tests.support.examples import in_ci

if TYPE_CHECKING:
    from asyncdata.order.mixture_tree import Node

pytestmark = pytest.mark.thorough

MAX_ROWS = 24
rows_of_an_epoch = st.lists(st.sampled_from(["keep", "keep", "keep", "drop", "bad"]), min_size=1, max_size=8).filter(
    lambda kinds: "keep" in kinds
)


class Part(NamedTuple):
    """What the rows of each epoch are; the same in all of them."""

    kinds: list[str]


@st.composite
def mixtures(draw: Any, by: str = "any") -> tuple[Node, list[Part]]:
    tree = numbered(draw(nodes("", 1, by)))
    return tree, [Part(draw(rows_of_an_epoch)) for _ in tree.leaves()]


def row(leaf: int, epoch: int, number: int, kind: str) -> Any:
    if kind == "keep":
        return [leaf, epoch, number, *[7] * ((leaf + number) % 3)]
    return BadRow("AD101") if kind == "bad" else "too long"


def modelled(tree: Node, parts: list[Part], number: int) -> list[list[int]]:
    """The first tokens of the first samples, by a schedule of single steps; an epoch's end of the mixture is [-1]."""
    cursor, found, at = ScheduleCursor(tree, 3), [], [(0, 0)] * len(parts)
    leaves = {leaf.number: leaf for leaf in tree.leaves()}
    while len(found) < number:
        leaf = cursor.pick()
        is_over = leaf < 0 and cursor.settle()
        if leaf >= 0:
            epoch, place = at[leaf]
            kinds = parts[leaf].kinds
            place = next((n for n in range(place, len(kinds)) if kinds[n] == "keep"), -1)
            if place >= 0:
                sample = row(leaf, epoch, place, "keep")
                cursor.took_one(leaf, len(sample))
                found.append(sample)
                at[leaf] = epoch, place + 1
            else:
                at[leaf] = epoch + 1, 0
                is_over = leaves[leaf].epochs_left is not None and cursor.epoch_ended(leaf)
        if is_over:
            cursor.begin_epoch()
            found.append([-1])
    return found


class Feed:
    """The chunks of the parts from a state on, cut at random."""

    def __init__(self, tree: Node, parts: list[Part], state: MixtureState | None, sizes: Any) -> None:
        self.queues, self._places, self._parts, self._sizes = [], [], parts, sizes
        for leaf in tree.leaves():
            cursor = state.parts[leaf.name] if state is not None else PartCursor()
            self.queues.append(PartQueue(leaf, BadRowRules(is_raised=False), cursor))
            self._places.append(cursor.position)

    def add(self, leaf: int) -> None:
        kinds, at = self._parts[leaf].kinds, self._places[leaf]
        stop = min(len(kinds), at.row + next(self._sizes))
        rows = [row(leaf, at.epoch, number, kinds[number]) for number in range(at.row, stop)]
        chunk = chunk_of(*rows, first=at, ends_epoch=stop == len(kinds), path=f"part{leaf}")
        self._places[leaf] = Position(at.epoch + 1) if stop == len(kinds) else Position(at.epoch, 0, stop)
        self.queues[leaf].add(chunk)


def merged(
    tree: Node, parts: list[Part], sizes: Any, number: int, start: Any = None, epoch_groups: int = 0
) -> tuple[Channel, Merger]:
    """A channel with ``number`` samples at least, from a (position, state) on."""
    position, state = start or (Position(), None)
    feed = Feed(tree, parts, state, sizes)
    schedule = state.schedule if state is not None else ScheduleCursor(tree, 3).state()
    merger = Merger(tree, 3, feed.queues, schedule, position)
    channel = Channel(capacity=1 << 20, max_bytes=1 << 30, epoch_groups=epoch_groups)
    while channel.num_produced < number:
        assert not channel.is_stopped
        chunk = merger.merge(next(sizes))
        if chunk is not None:
            channel.fill(channel.enter(0), chunk)
        else:
            feed.add(merger.blocked)
    return channel, merger


def cycle_of(sizes: list[int]) -> Any:
    while True:
        yield from sizes


def taken(channel: Channel, ledger: Ledger, number: int) -> tuple[list[list[int]], Ledger]:
    found = deliver(channel.items(ledger.head), ledger, number, bad_row_stops=False)
    assert found is not None
    tokens = [
        piece.chunk.tokens_of(sample).tolist() for piece in found.ranges for sample in range(piece.start, piece.stop)
    ]
    return tokens, found.ledger


some_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@in_ci(max_examples=40)
@given(mixtures(), some_sizes)
def test_the_samples_are_those_of_the_schedule_however_rows_are_cut(
    mixture: tuple[Node, list[Part]], sizes: list[int]
) -> None:
    tree, parts = mixture
    channel, _ = merged(tree, parts, cycle_of(sizes), MAX_ROWS)

    found, _ = taken(channel, Ledger(), MAX_ROWS)

    assert found == [sample for sample in modelled(tree, parts, 3 * MAX_ROWS) if sample != [-1]][:MAX_ROWS]


@in_ci(max_examples=40)
@given(mixtures(), some_sizes)
def test_each_part_gives_its_own_samples_in_its_own_order(mixture: tuple[Node, list[Part]], sizes: list[int]) -> None:
    tree, parts = mixture
    channel, _ = merged(tree, parts, cycle_of(sizes), MAX_ROWS)

    found, _ = taken(channel, Ledger(), MAX_ROWS)

    for leaf, part in enumerate(parts):
        own = [sample for sample in found if sample[0] == leaf]
        places = [number for number, kind in enumerate(part.kinds) if kind == "keep"]
        wanted = [row(leaf, n // len(places), places[n % len(places)], "keep") for n in range(len(own))]
        assert own == wanted


@in_ci(max_examples=40)
@given(mixtures(), some_sizes, some_sizes, st.integers(0, MAX_ROWS))
def test_a_restart_at_any_delivery_continues_with_the_next_sample(
    mixture: tuple[Node, list[Part]], sizes: list[int], other_sizes: list[int], cut: int
) -> None:
    tree, parts = mixture
    channel, _ = merged(tree, parts, cycle_of(sizes), MAX_ROWS)
    whole, end = taken(channel, Ledger(), MAX_ROWS)
    channel, _ = merged(tree, parts, cycle_of(sizes), MAX_ROWS)
    _, ledger = taken(channel, Ledger(), cut)
    state = ledger.counters.mixture.state() if cut else None
    if state is not None:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=MixtureState)

    other, _ = merged(
        tree, parts, cycle_of(other_sizes), MAX_ROWS - cut, (ledger.position, state), ledger.counters.epoch_groups
    )
    restarted = msgspec.structs.replace(ledger, head=0, offset=0, taken=0)
    rest, ledger = taken(other, restarted, MAX_ROWS - cut)

    assert rest == whole[cut:]
    assert ledger.counters.digest == end.counters.digest
    # Rows after the last sample, and an epoch's end, are passed with it or before the next one, as they become ready.
    assert ledger.counters.num_tokens == end.counters.num_tokens


@in_ci(max_examples=40)
@given(mixtures(), some_sizes)
def test_the_state_after_any_row_follows_from_the_record(mixture: tuple[Node, list[Part]], sizes: list[int]) -> None:
    """The state at a chunk's end, computed from its rows, is the one that the next chunk begins with."""
    tree, parts = mixture
    channel, merger = merged(tree, parts, cycle_of(sizes), MAX_ROWS)
    chunks = [item.chunk for item in channel.items(0) if type(item).__name__ == "ChunkEnd"]

    for chunk, following in zip(chunks, chunks[1:], strict=False):
        assert chunk.record.state(chunk.num_rows) == following.record.before
    for chunk in chunks:
        before = [chunk.record.state(number) for number in range(chunk.num_rows + 1)]
        samples = [sum(part.num_samples for part in state.parts.values()) for state in before]
        assert samples == sorted(samples)
        assert samples[-1] - samples[0] == chunk.num_samples


@in_ci(max_examples=40)
@given(mixtures(), some_sizes)
def test_what_a_part_has_dropped_is_counted_for_it(mixture: tuple[Node, list[Part]], sizes: list[int]) -> None:
    tree, parts = mixture
    channel, _ = merged(tree, parts, cycle_of(sizes), MAX_ROWS)

    _, ledger = taken(channel, Ledger(), MAX_ROWS)
    state = ledger.counters.mixture.state()

    total: Counter[str] = Counter()
    for cursor in state.parts.values():
        total.update(cursor.drops)
        assert cursor.num_bad_rows == cursor.drops.get("bad row AD101", 0)
    assert dict(total) == ledger.counters.drops
    assert sum(cursor.num_samples for cursor in state.parts.values()) == ledger.counters.num_groups
    assert sum(cursor.num_tokens for cursor in state.parts.values()) == ledger.counters.num_tokens


def test_a_point_in_a_mixture_may_be_a_state_itself() -> None:
    assert MixturePoint(MixtureState()).state() == MixtureState()
