"""Packing: what fills a pack, against models that look at all samples; what cannot be packed, and what is refused."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import HardPacking, SoftPacking
from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.xtuner import XTunerPacking
from tests.support.examples import in_ci
from tests.support.parts import proxy_cost

# Promises to every snapshot there is: packs are not in them, they are made again. See tests/unit/order/test_order.py.
PACKS_DIGEST = "2b1a6752cc839623"
PLAN_DIGESTS = {"expand_soft": "78edf2386f7844ff", "hard": "492f53b1c894c440"}

soft_packings = st.builds(
    lambda length, multiple, **settings: SoftPacking(
        max_length=length * multiple, segment_multiple_of=multiple, **settings
    ),
    st.integers(1, 12),
    st.sampled_from([1, 1, 3]),
    window_samples=st.integers(1, 12),
    window_tokens=st.none() | st.integers(1, 60),
    overlong=st.sampled_from(["drop", "truncate_right"]),
)
hard_packings = st.builds(HardPacking, max_length=st.integers(1, 30), keep_tail=st.booleans())
streams = st.lists(st.integers(1, 4) | st.integers(0, 40), max_size=120)
cuts = st.lists(st.integers(0, 120), max_size=6)


class Waiting(NamedTuple):
    number: int
    room: int
    stop: int


def kept_of(packing, lengths):
    multiple, kept = packing.segment_multiple_of, []
    for number, length in enumerate(lengths):
        stop = min(length, packing.max_length)
        if length and (packing.overlong == "truncate_right" or length <= packing.max_length):
            kept.append(Waiting(number, -(-stop // multiple) * multiple, stop))
    return kept


def modelled(packing, lengths):
    """fifo-fill, word by word: at any time all arrivals so far are looked at."""
    kept = kept_of(packing, lengths)
    tokens = 8 * packing.max_length if packing.window_tokens is None else packing.window_tokens
    packs, pack, packed = [], [], set()

    def take(item):
        pack.append(item)
        packed.add(item.number)

    def fits(item):
        return item.number not in packed and item.room <= packing.max_length - sum(other.room for other in pack)

    def step(arrived):
        waiting = [item for item in arrived if item.number not in packed]
        if fits(waiting[0]):
            return take(waiting[0])

        while fitting := list(filter(fits, waiting)):
            take(max(fitting, key=lambda item: (item.room, -item.number)))
        packs.append([(item.number, 0, item.stop) for item in pack])
        return pack.clear()

    def window(arrived):
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


def packed(packing, lengths, places):
    """All packs, when the samples come in portions that end at ``places``, each to a packer from the last one's state.

    One by one in the last portion.
    """
    bounds = sorted({0, *(place for place in places if place < len(lengths))})
    packer, packs, states = packing.open(), [], []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        packs += packer.extend(lengths[start:stop], range(start, stop))
        state = json.loads(json.dumps(packer.state()))
        packer = packing.open(state)
        assert json.loads(json.dumps(packer.state())) == state
        states.append((state, json.dumps(state)))
    for number in range(bounds[-1], len(lengths)):
        packs += packer.extend([lengths[number]], [number])
    packs += packer.flush()
    assert all(json.dumps(state) == before for state, before in states), "a state is not changed by its packer"
    return packs, packer


@in_ci(max_examples=60)
@given(soft_packings, streams, cuts)
def test_soft_packs_are_those_of_the_model_and_what_is_left_out_is_counted(packing, lengths, places):
    packs, packer = packed(packing, lengths, places)

    assert packs == modelled(packing, lengths)
    assert (packing.cuts, HardPacking(max_length=1).cuts) == (False, True)
    kept = kept_of(packing, lengths)
    assert [number for number, length in enumerate(lengths) if packing.keeps(length)] == [item.number for item in kept]
    too_long = [length for length in lengths if length > packing.max_length]
    lost = sum(too_long) if packing.overlong == "drop" else sum(too_long) - packing.max_length * len(too_long)
    num_dropped = len(too_long) if packing.overlong == "drop" else 0
    samples = {"overlong": num_dropped, "empty": lengths.count(0)}
    assert packer.counts.samples == {name: number for name, number in samples.items() if number}
    assert packer.counts.tokens == ({"overlong" if packing.overlong == "drop" else "truncated": lost} if lost else {})


@in_ci(max_examples=60)
@given(hard_packings, streams, cuts)
def test_hard_packs_are_the_tokens_laid_end_to_end(packing, lengths, places):
    packs, packer = packed(packing, lengths, places)

    tokens = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    num_full = len(tokens) // packing.max_length
    kept = tokens if packing.keep_tail else tokens[: num_full * packing.max_length]
    assert [(number, place) for pack in packs for number, *piece in pack for place in range(*piece)] == kept
    sizes = [sum(stop - start for _, start, stop in pack) for pack in packs]
    assert sizes[:num_full] == [packing.max_length] * num_full
    assert len(packs) == -(-len(kept) // packing.max_length)
    assert packer.counts.tokens.get("tail", 0) == len(tokens) - len(kept)
    assert packer.counts.samples.get("empty", 0) == lengths.count(0)
    assert [length for length in lengths if packing.keeps(length)] == [length for length in lengths if length]
    assert packer.flush() == []
    assert packer.extend([packing.max_length], "a") == [[("a", 0, packing.max_length)]], "it begins anew"


def test_soft_packs_are_the_same_for_ever():
    lengths = (np.arange(3000, dtype=np.int64) * 2_654_435_761 % 4096) + 1
    packer = SoftPacking(max_length=4096).open()

    packs = packer.extend(lengths, range(3000)) + packer.flush()  # type: ignore[arg-type]

    assert blake2b(repr(packs).encode(), digest_size=8).hexdigest() == PACKS_DIGEST


def test_a_packer_holds_no_more_than_its_window():
    packer = soft(window_samples=100).open()

    for number in range(5000):
        packer.extend([number % 7 + 1], [number])

    assert len(packer.state()["lengths"]) <= 100
    assert len(packer._pieces) < 100 + 1024 + 1  # noqa: SLF001 - what it holds cannot be seen otherwise


def soft(max_length=10, window_samples=4, **settings):
    return SoftPacking(max_length=max_length, window_samples=window_samples, window_tokens=1, **settings)


@pytest.mark.parametrize("packing", [soft(), HardPacking(max_length=10)], ids=["soft", "hard"])
@pytest.mark.parametrize(
    ("lengths", "references", "message"),
    [*[([value], "a", "whole numbers") for value in (-1, 1.5, "a", [1], True)], ([1, 2], "a", "2 lengths and 1 ref")],
)
def test_lengths_are_whole_numbers_with_a_reference_each(packing, lengths, references, message):
    with pytest.raises(ConfigError, match=message):
        packing.open().extend(lengths, references)


@pytest.mark.parametrize(
    ("packing", "state"),
    [
        (soft(), {"lengths": [1, 2], "taken": [], "references": ["a"]}), (soft(), {"lengths": "abc"}),
        (soft(), {"window": []}), (soft(), {"open_pack": [["a", 0, 11]]}),
        (HardPacking(max_length=5), {"open_pack": [["a", 0, 5]]}),
        (HardPacking(max_length=5), {"open_pack": [["a", 0]]}), (HardPacking(max_length=5), soft().open().state()),
    ],
)  # fmt: skip
def test_a_state_that_is_none_of_this_packing_is_refused(packing, state):
    with pytest.raises(SnapshotError, match="^AD602 "):
        packing.open(state)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SoftPacking, {"max_length": 0}, "max_length=0"),
        (SoftPacking, {"max_length": 10, "window_samples": "4"}, "window_samples='4'"),
        (SoftPacking, {"max_length": 10, "window_tokens": -1}, "window_tokens=-1"),
        (SoftPacking, {"max_length": 10, "overlong": "cut"}, "overlong='cut'"),
        (SoftPacking, {"max_length": 10, "segment_multiple_of": 4}, "no multiple of segment_multiple_of=4"),
        (SoftPacking, {"max_length": 10, "window": 3}, "did you mean 'window_"),
        (HardPacking, {"max_length": 1.5}, "max_length=1.5"),
        (XTunerPacking, {"max_length": 10, "seed": -1}, "seed=-1"),
        (XTunerPacking, {"max_length": 10, "seed": 0, "kind": "soft"}, "kind='soft'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


# The plans of XTuner; that they are XTuner's is tests/integration/test_against_xtuner.py.


@pytest.mark.parametrize("kind", PLAN_DIGESTS)
def test_a_plan_is_the_same_for_ever(kind):
    lengths = (np.arange(2000, dtype=np.int64) * 2_654_435_761 % 300) + 1
    packing = XTunerPacking(max_length=1000, seed=42, kind=kind, join_datasets=False, slice_samples=600)

    columns = b"".join(column.astype("<i8").tobytes() for column in packing.plan([lengths[:500], lengths[500:]])[:5])

    assert blake2b(columns, digest_size=8).hexdigest() == PLAN_DIGESTS[kind]


@pytest.mark.parametrize("kind", ["expand_soft", "hard"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("lengths", [[], [np.empty(0, np.int64)]], ids=["no set", "an empty set"])
def test_a_plan_of_nothing_has_no_pack(kind, joined, lengths):
    plan = XTunerPacking(max_length=10, seed=0, kind=kind, join_datasets=joined).plan(lengths)

    assert (plan.num_packs, plan.offsets.tolist()) == (0, [0])


@pytest.mark.parametrize("lengths", [[3, 0], [1.5], [[1]]])
def test_a_plan_is_of_samples_with_tokens(lengths):
    with pytest.raises(ConfigError, match="whole numbers, from 1 on"):
        XTunerPacking(max_length=10, seed=1).plan([np.array(lengths)])


def test_kinds_of_data_sets_are_one_for_each_and_of_those_that_xtuner_joins():
    with pytest.raises(ConfigError, match="kind names 1 data sets, and there are 2: each file is one"):
        XTunerPacking(max_length=10, seed=1, kind=("hard",)).plan([np.array([3]), np.array([4])])
    with pytest.raises(ConfigError, match="'legacy' is of all"):
        XTunerPacking(max_length=10, seed=1, kind=("hard", "legacy"))


def test_costs_of_a_plan_are_those_given_or_xtuners_for_text():
    lengths, packing = [np.array([640, 64, 65])], XTunerPacking(max_length=1000, seed=0)

    assert proxy_cost(np.array([64, 65, 191, 192, 320])).tolist() == [0, 1, 1, 4, 4]
    assert packing.plan(lengths).costs.tolist() == [26]
    assert packing.plan(lengths, [np.array([0.5, 1.0, 2.25])]).costs.tolist() == [3]
