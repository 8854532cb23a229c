"""Packs of D, however they are pushed, taken, interrupted and resumed, against a model that sees all of D at once."""

from __future__ import annotations

import json
from itertools import groupby
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from asyncdata import HardPacking, LengthGrouping, Position, SoftPacking
from asyncdata.errors import SnapshotError
from tests.support.examples import in_ci
from tests.support.parts import (
    Counters,
    OnlinePacks,
    PackRules,
    PackState,
    RestartPoint,
    SinglePacking,
    measured,
    no_op,
)

ROWS = 20  # of an epoch, some of which yield no sample

windows = {"window_samples": st.integers(1, 8), "window_tokens": st.integers(1, 40), "across_epochs": st.booleans()}
packings = st.one_of(
    st.builds(SoftPacking, max_length=st.just(16), overlong=st.just("drop"), **windows),
    st.builds(HardPacking, max_length=st.just(16), keep_tail=st.just(True), across_epochs=st.booleans()),
    st.just(SinglePacking()),
)
groupings = st.none() | st.builds(LengthGrouping, window=st.integers(1, 4), method=st.sampled_from(["snake", "xtuner"]))
rules = st.fixed_dictionaries(
    {"packing": packings, "grouping": groupings, "world_size": st.integers(1, 3), "batch_size": st.integers(1, 2)}
).map(lambda fields: PackRules(**fields))
lengths = st.lists(st.integers(-1, 18), min_size=20, max_size=80)  # -1: no sample
steps = st.lists(st.sampled_from(["push", "take", "take", "twice", "resume"]) | st.integers(1, 19), max_size=40)


class Fake(SimpleNamespace):
    """A sample of D; it has no chunk."""

    detach = no_op
    _range = None


def stream(sizes):
    places = [Position(number // ROWS, 0, number % ROWS) for number in range(len(sizes))]
    return [
        Fake(position=place, tokens=range(size), source=None)
        for place, size in zip(places, sizes, strict=True)
        if size >= 0
    ]


def pieces(packs):
    return [[(str(sample.position), start, stop) for sample, start, stop in pack] for pack in packs]


class Run:
    """A trainer and D: pushes what comes next, takes what is ready; keeps what was delivered."""

    def __init__(self, rules, samples):
        self.rules, self.samples = rules, samples
        self.packs = OnlinePacks(rules)
        self.progress = self.packs.begin(RestartPoint())
        self.next = 0
        self.delivered = []

    def tip(self):
        """After the last sample taken; counters have its number, so that a restart is seen to have the right ones."""
        place = Position(99) if self.next == len(self.samples) else self.samples[self.next].position
        return RestartPoint(place, Counters(num_samples=self.next))

    def push(self, number, *, is_undone=False):
        stop = min(self.next + number, len(self.samples))
        if stop > self.next:
            progress = self.packs.pushed(self.progress, measured(self.samples[self.next : stop]), self.tip())
            if not is_undone:  # else: an interrupt after the push, so D gives the same again
                self.progress, self.next = progress, stop

    def take(self):
        size = self.rules.global_batch
        if self.progress.num_ready >= size:
            self.packs.delivered(self.progress, size)  # an interrupt after the delivery: it is not committed
            self.deliver(size)

    def deliver(self, num_packs):
        self.delivered += pieces(self.packs.packs(self.progress, range(num_packs)))
        self.progress = self.packs.delivered(self.progress, num_packs)

    def resume(self):
        state, point = self.packs.saved(self.progress), self.progress.restart_point or self.tip()
        self.packs = OnlinePacks(self.rules)
        self.progress = self.packs.restored(msgspec.convert(json.loads(msgspec.json.encode(state)), PackState), point)
        self.next = sum(sample.position < point.position for sample in self.samples)
        assert point.counters.num_samples == self.next

    def finish(self):
        self.push(15)
        self.take()
        self.resume()
        while self.next < len(self.samples):
            self.push(7)
            self.take()
        self.progress = self.packs.flushed(self.progress)
        while self.progress.num_ready >= self.rules.global_batch:
            self.take()
        self.deliver(self.progress.num_ready)


def keeping(rules):
    """Of one rank: it can show the packs of all of them."""
    return msgspec.structs.replace(rules, world_size=1, batch_size=rules.global_batch)


def modelled(rules, samples):
    """All of D is packed; then all packs are ordered, window by window."""
    parts = [samples]
    if not rules.across_epochs:
        parts = [list(part) for _, part in groupby(samples, key=lambda sample: sample.position.epoch)]
    packer, window, found = rules.packing.open(), 0, []
    left = []
    for number, part in enumerate(parts):
        left += packer.extend([len(sample.tokens) for sample in part], part)
        is_end = not rules.across_epochs or number == len(parts) - 1
        left += packer.flush() if is_end else []
        while left:
            steps = 1 if rules.grouping is None else rules.grouping.steps_of_window(window, rules.batch_size)
            size = len(left) if steps is None else steps * (1 if rules.grouping is None else rules.global_batch)
            if (steps is None or len(left) < size) and not is_end:
                break

            found += ordered(rules, left[:size], window)
            left = left[size:]
            window += 1
    return pieces(found)


def ordered(rules, packs, window):
    grouping = rules.grouping
    if grouping is None:
        return packs

    costs = [grouping.cost([stop - start for _, start, stop in pack]) for pack in packs]
    epoch = packs[0][0][0].position.epoch if grouping.method == "xtuner" else 0
    dealt = {"world_size": rules.world_size, "accumulation": rules.batch_size, "seed": rules.seed}
    return [packs[number] for number in grouping.order(costs, **dealt, epoch=epoch, window=window)]


@in_ci(max_examples=30)
@given(rules, lengths, steps)
def test_packs_follow_from_d_alone_whatever_comes_between(rules, sizes, steps):
    rules = keeping(rules)
    samples = stream(sizes)
    run = Run(rules, samples)
    for step in steps:
        if step in ("resume", "take"):
            getattr(run, step)()
        else:
            run.push({"twice": 5, "push": 3}.get(step, step), is_undone=step == "twice")
    run.finish()

    assert run.delivered == modelled(rules, samples)


OF_TWO = PackRules(packing=SoftPacking(max_length=4, overlong="error", window_samples=2, window_tokens=1))


@pytest.mark.parametrize(("length", "message"), [(-1, "waited to be packed"), (4, "has 4 tokens now, not 3 as then")])
def test_a_sample_that_waited_and_does_not_come_again_as_it_was_is_an_error(length, message):
    run = Run(OF_TWO, stream([2, 2, 3, 3, 1]))
    run.push(3)
    point = run.progress.restart_point
    assert point is not None

    packs = OnlinePacks(OF_TWO)
    progress = packs.restored(run.packs.saved(run.progress), point)

    with pytest.raises(SnapshotError, match=f"AD604 the sample at 0:0:2 .*{message}.* another build of asyncdata$"):
        packs.pushed(progress, measured(stream([2, 2, length, 3, 1])), point)
