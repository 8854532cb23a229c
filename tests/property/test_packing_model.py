"""Online packing against models that look at the whole window each time, and that lay tokens end to end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import HardPacking, SoftPacking, XTunerPacking

if TYPE_CHECKING:
    from asyncdata.batching.packers.base import Pack, Packer

pytestmark = pytest.mark.thorough

sizes = st.integers(1, 4) | st.integers(0, 40)
cuts = st.lists(st.integers(0, 120), max_size=6)
soft_packings = st.builds(
    lambda length, multiple, samples, tokens, overlong: SoftPacking(
        max_length=length * multiple,
        segment_multiple_of=multiple,
        window_samples=samples,
        window_tokens=tokens,
        overlong=overlong,
    ),
    st.integers(1, 12),
    st.sampled_from([1, 1, 3]),
    st.integers(1, 12),
    st.none() | st.integers(1, 60),
    st.sampled_from(["drop", "truncate"]),
)
hard_packings = st.builds(HardPacking, max_length=st.integers(1, 30), keep_tail=st.booleans())
packings = soft_packings | hard_packings
streams = st.lists(sizes, max_size=120)


class Waiting(NamedTuple):
    number: int
    room: int
    stop: int


def kept_of(packing: SoftPacking, lengths: list[int]) -> list[Waiting]:
    multiple, kept = packing.segment_multiple_of, []
    for number, length in enumerate(lengths):
        stop = min(length, packing.max_length)
        if length and (packing.overlong == "truncate" or length <= packing.max_length):
            kept.append(Waiting(number, -(-stop // multiple) * multiple, stop))
    return kept


def modelled(packing: SoftPacking, lengths: list[int]) -> list[Pack]:
    """fifo-fill, word by word: at any time all arrivals so far are looked at."""
    kept = kept_of(packing, lengths)
    tokens = 8 * packing.max_length if packing.window_tokens is None else packing.window_tokens
    packs: list[Pack] = []
    pack: list[Waiting] = []
    packed: set[int] = set()

    def room() -> int:
        return packing.max_length - sum(item.room for item in pack)

    def take(item: Waiting) -> None:
        pack.append(item)
        packed.add(item.number)

    def step(arrived: list[Waiting]) -> None:
        nonlocal pack
        waiting = [item for item in arrived if item.number not in packed]
        if waiting[0].room <= room():
            return take(waiting[0])

        while fitting := [item for item in waiting if item.number not in packed and item.room <= room()]:
            take(max(fitting, key=lambda item: (item.room, -item.number)))
        packs.append([(item.number, 0, item.stop) for item in pack])
        pack = []
        return None

    def window(arrived: list[Waiting]) -> list[Waiting]:
        """From the oldest that waits, to the newest."""
        first = next((place for place, item in enumerate(arrived) if item.number not in packed), len(arrived))
        return arrived[first:]

    for count in range(1, len(kept) + 1):
        arrived = kept[:count]
        while (run := window(arrived)) and len(run) >= packing.window_samples and sum(i.room for i in run) >= tokens:
            step(arrived)
    while window(kept):
        step(kept)
    return packs + [[(item.number, 0, item.stop) for item in pack]] * bool(pack)


def packed(packer: Packer, lengths: list[int], places: list[int]) -> list[Pack]:
    """All packs, when the samples come in portions that end at ``places``, and one by one in the last."""
    bounds = sorted({0, *(place for place in places if place < len(lengths))})
    packs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        packs += packer.extend(lengths[start:stop], range(start, stop))
    for number in range(bounds[-1], len(lengths)):
        packs += packer.extend([lengths[number]], [number])
    return packs + packer.flush()


@given(soft_packings, streams, cuts)
def test_soft_packs_are_those_of_the_model(packing: SoftPacking, lengths: list[int], places: list[int]) -> None:
    assert packed(packing.open(), lengths, places) == modelled(packing, lengths)


@given(soft_packings, streams)
def test_every_sample_is_packed_once_whole_and_in_a_pack_with_room(packing: SoftPacking, lengths: list[int]) -> None:
    packer = packing.open()
    packs = packer.extend(lengths, range(len(lengths))) + packer.flush()

    kept = kept_of(packing, lengths)
    pieces = [piece for pack in packs for piece in pack]
    assert sorted(pieces) == [(item.number, 0, item.stop) for item in kept]
    rooms = {item.number: item.room for item in kept}
    assert all(0 < sum(rooms[number] for number, _, _ in pack) <= packing.max_length for pack in packs)
    tokens_lost = sum(packer.counts.tokens.values())
    assert tokens_lost + sum(stop for _, _, stop in pieces) == sum(lengths)
    assert [number for number, length in enumerate(lengths) if packing.keeps(length)] == sorted(rooms)
    assert len(pieces) + sum(packer.counts.samples.values()) == len(lengths)


@given(soft_packings, streams)
def test_a_sample_overtakes_another_only_within_the_window(packing: SoftPacking, lengths: list[int]) -> None:
    packer = packing.open()
    packs = packer.extend(lengths, range(len(lengths))) + packer.flush()

    arrivals = kept_of(packing, lengths)
    arrival = {item.number: place for place, item in enumerate(arrivals)}
    order = [arrival[number] for pack in packs for number, _, _ in pack]
    tokens = packing.window_tokens or 8 * packing.max_length
    for place, late in enumerate(order):
        for early in (other for other in order[place + 1 :] if other < late):
            run = arrivals[early:late]  # from the overtaken one to the one before the overtaker
            assert len(run) < packing.window_samples or sum(item.room for item in run) < tokens


@given(soft_packings, streams)
def test_the_oldest_sample_that_waits_begins_the_next_pack(packing: SoftPacking, lengths: list[int]) -> None:
    packer = packing.open()
    waiting = [item.number for item in kept_of(packing, lengths)]

    for pack in packer.extend(lengths, range(len(lengths))) + packer.flush():
        assert pack[0][0] == waiting[0]
        waiting = [number for number in waiting if number not in {number for number, _, _ in pack}]


@given(packings, streams, cuts, st.integers(0, 120))
def test_a_packer_goes_on_from_its_state_anywhere(
    packing: Any, lengths: list[int], places: list[int], cut: int
) -> None:
    whole, first = packing.open(), packing.open()
    wanted = packed(whole, lengths, places)

    packs = first.extend(lengths[:cut], range(min(cut, len(lengths))))
    second = packing.open(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    packs += second.extend(lengths[cut:], range(cut, len(lengths))) + second.flush()

    assert packs == wanted
    assert second.counts == whole.counts


@given(hard_packings, streams, cuts)
def test_hard_packs_are_the_tokens_laid_end_to_end(packing: HardPacking, lengths: list[int], places: list[int]) -> None:
    packer = packing.open()
    packs = packed(packer, lengths, places)

    tokens = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    full = len(tokens) // packing.max_length * packing.max_length
    kept = tokens if packing.keep_tail else tokens[:full]
    assert [(number, place) for pack in packs for number, *piece in pack for place in range(*piece)] == kept
    sizes_of_packs = [sum(stop - start for _, start, stop in pack) for pack in packs]
    assert sizes_of_packs[: full // packing.max_length] == [packing.max_length] * (full // packing.max_length)
    assert len(packs) == -(-len(kept) // packing.max_length)
    assert packer.counts.tokens.get("tail", 0) == len(tokens) - len(kept)
    assert packer.counts.samples.get("empty", 0) == lengths.count(0)


@given(st.lists(st.lists(st.integers(1, 30), max_size=30), min_size=1, max_size=3), st.integers(1, 40), st.booleans())
def test_xtuners_hard_plan_is_hard_packing_of_its_shuffled_samples(
    lengths: list[list[int]], max_length: int, joined: bool
) -> None:
    sets = [np.array(some, np.int64) for some in lengths]
    plan = XTunerPacking(max_length=max_length, seed=3, kind="hard", join_datasets=joined).plan(sets)

    shuffler, wanted, base = np.random.RandomState(3), [], 0
    for some in [np.concatenate(sets)] if joined else sets:
        order = np.arange(len(some))
        shuffler.shuffle(order)
        wanted += HardPacking(max_length=max_length).open().extend(some[order].tolist(), (order + base).tolist())
        base += len(some)
    assert [plan.pack(number) for number in range(plan.num_packs)] == wanted
    assert plan.costs.tolist() == [max(stop - start for _, start, stop in pack) for pack in wanted]
