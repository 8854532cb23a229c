"""Packing: what fills a pack, online and planned, against models that see all samples at once; and what is refused.

That planned packs are XTuner's, or those of a packer, is held through loaders: ``test_planned_packs.py``.
"""

import json
from functools import partial
from hashlib import blake2b
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import example, given

from asyncdata import HardPacking, LengthGrouping, Position, RowShuffle, SoftPacking
from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.order.order import RowOrder, Share
from asyncdata.xtuner import XTunerPacking
from tests.support import parts
from tests.support.examples import in_ci

# Promises to every snapshot there is: packs are not in them, they are made again. See tests/unit/order/test_order.py.
PACKS_DIGEST = "2b1a6752cc839623"
PLAN_DIGESTS = {"expand_soft": "78edf2386f7844ff", "hard": "492f53b1c894c440"}

soft_packings = st.builds(
    lambda length, multiple, **rest: SoftPacking(max_length=length * multiple, segment_multiple_of=multiple, **rest),
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


def test_soft_packs_are_the_same_for_ever_and_a_packer_holds_no_more_than_its_window():
    lengths = (np.arange(3000, dtype=np.int64) * 2_654_435_761 % 4096) + 1
    packer = SoftPacking(max_length=4096).open()
    packs = packer.extend(lengths, range(3000)) + packer.flush()  # type: ignore[arg-type]
    assert blake2b(repr(packs).encode(), digest_size=8).hexdigest() == PACKS_DIGEST
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


def test_kinds_and_costs_of_a_plan_are_those_given_or_xtuners():
    with pytest.raises(ConfigError, match="kind names 1 data sets, and there are 2: each file is one"):
        XTunerPacking(max_length=10, seed=1, kind=("hard",)).plan([np.array([3]), np.array([4])])
    with pytest.raises(ConfigError, match="'legacy' is of all"):
        XTunerPacking(max_length=10, seed=1, kind=("hard", "legacy"))
    lengths, packing = [np.array([640, 64, 65])], XTunerPacking(max_length=1000, seed=0)
    assert parts.proxy_cost(np.array([64, 65, 191, 192, 320])).tolist() == [0, 1, 1, 4, 4]
    assert packing.plan(lengths).costs.tolist() == [26]
    assert packing.plan(lengths, [np.array([0.5, 1.0, 2.25])]).costs.tolist() == [3]
    plan = Plan(packing=SoftPacking(max_length=8), world_size=4)
    assert plan.num_delivered(7) == 7
    assert msgspec.structs.replace(plan, grouping=LengthGrouping(method="xtuner")).num_delivered(7) == 8


ROWS = 20  # of an epoch, some of which yield no sample

windows = {"window_samples": st.integers(1, 8), "window_tokens": st.integers(1, 40), "across_epochs": st.booleans()}
all_packings = st.one_of(
    st.builds(SoftPacking, max_length=st.just(16), overlong=st.just("drop"), **windows),
    st.builds(HardPacking, max_length=st.just(16), keep_tail=st.just(True), across_epochs=st.booleans()),
    st.just(parts.SinglePacking()),
)
groupings = st.none() | st.builds(LengthGrouping, window=st.integers(1, 4), method=st.sampled_from(["snake", "xtuner"]))
rules = st.fixed_dictionaries(
    {"packing": all_packings, "grouping": groupings, "world_size": st.integers(1, 3), "batch_size": st.integers(1, 2)}
).map(lambda fields: parts.PackRules(**fields))
lengths = st.lists(st.integers(-1, 18), min_size=20, max_size=80)  # -1: no sample
steps = st.lists(st.sampled_from(["push", "take", "take", "twice", "resume"]) | st.integers(1, 19), max_size=40)


def stream(sizes):
    """The samples of D; they have no chunk."""
    places = [Position(number // ROWS, 0, number % ROWS) for number in range(len(sizes))]
    return [
        SimpleNamespace(position=place, tokens=range(size), source=None, detach=parts.no_op, _range=None)
        for place, size in zip(places, sizes, strict=True)
        if size >= 0
    ]


def pieces(packs):
    return [[(str(sample.position), start, stop) for sample, start, stop in pack] for pack in packs]


class Run:
    """A trainer and D: pushes what comes next, takes what is ready; keeps what was delivered."""

    def __init__(self, rules, samples):
        self.rules, self.samples = rules, samples
        self.packs = parts.OnlinePacks(rules)
        self.progress = self.packs.begin(parts.RestartPoint())
        self.next = 0
        self.delivered = []

    def tip(self):
        """After the last sample taken; counters have its number, so that a restart is seen to have the right ones."""
        place = Position(99) if self.next == len(self.samples) else self.samples[self.next].position
        return parts.RestartPoint(place, parts.Counters(num_samples=self.next))

    def push(self, number, *, is_undone=False):
        stop = min(self.next + number, len(self.samples))
        if stop > self.next:
            progress = self.packs.pushed(self.progress, parts.measured(self.samples[self.next : stop]), self.tip())
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
        self.packs = parts.OnlinePacks(self.rules)
        self.progress = self.packs.restored(
            msgspec.convert(json.loads(msgspec.json.encode(state)), parts.PackState), point
        )
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


def delivered_by_the_model(rules, samples):
    """All of D is packed; then all packs are ordered, window by window."""
    portions = [samples]
    if not rules.across_epochs:
        portions = [list(part) for _, part in groupby(samples, key=lambda sample: sample.position.epoch)]
    packer, window, found = rules.packing.open(), 0, []
    left = []
    for number, part in enumerate(portions):
        left += packer.extend([len(sample.tokens) for sample in part], part)
        is_end = not rules.across_epochs or number == len(portions) - 1
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
    # Of one rank: it can show the packs of all of them.
    rules = msgspec.structs.replace(rules, world_size=1, batch_size=rules.global_batch)
    samples = stream(sizes)
    run = Run(rules, samples)
    for step in steps:
        if step in ("resume", "take"):
            getattr(run, step)()
        else:
            run.push({"twice": 5, "push": 3}.get(step, step), is_undone=step == "twice")
    run.finish()
    assert run.delivered == delivered_by_the_model(rules, samples)


OF_TWO = parts.PackRules(packing=SoftPacking(max_length=4, overlong="error", window_samples=2, window_tokens=1))


@pytest.mark.parametrize(("length", "message"), [(-1, "waited to be packed"), (4, "has 4 tokens now, not 3 as then")])
def test_a_sample_that_waited_and_does_not_come_again_as_it_was_is_an_error(length, message):
    run = Run(OF_TWO, stream([2, 2, 3, 3, 1]))
    run.push(3)
    point = run.progress.restart_point
    assert point is not None
    packs = parts.OnlinePacks(OF_TWO)
    progress = packs.restored(run.packs.saved(run.progress), point)
    with pytest.raises(SnapshotError, match=f"AD604 the sample at 0:0:2 .*{message}.* another build of asyncdata$"):
        packs.pushed(progress, parts.measured(stream([2, 2, length, 3, 1])), point)


Plan = partial(parts.PackRules, is_planned=True)
XTUNER = XTunerPacking(max_length=8, seed=0)

# What snapshots say of a plan, for ever.
KIND = {"type": "XTunerPacking", "max_length": 8, "seed": 0, "kind": "expand_soft", "join_datasets": True}
DESCRIPTION = {
    "packing": {**KIND, "lookahead": 1000, "slice_samples": 10_000, "ties": "stable"},
    "grouping": {"window": 64, "linear": 24576.0, "quadratic": 1.0, "method": "karmarkar_karp"},
}


numbers_of_ranks = st.fixed_dictionaries(
    {"world_size": st.integers(1, 4), "batch_size": st.integers(1, 3), "accumulation": st.integers(1, 3)}
)


@in_ci(max_examples=30)
@given(st.integers(1, 60), numbers_of_ranks, numbers_of_ranks, st.booleans(), st.data())
def test_a_rounded_epoch_has_whole_steps_and_batches_for_ranks_that_go_on(num_packs, before, after, round_up, data):
    """And a restart at a batch does not change how far it goes."""
    first, batch = 0, 1
    for ranks in (before, after):
        plan = Plan(packing=XTUNER, round_up=round_up, **ranks)
        batch = plan.world_size * plan.batch_size

        whole = plan.num_delivered(num_packs, first)

        assert (whole - first) % batch == 0
        assert whole >= num_packs or not round_up
        if not first:
            assert whole % (batch * plan.accumulation) == 0
            assert abs(whole - num_packs) < batch * plan.accumulation
            assert (whole >= num_packs) == (round_up or whole == num_packs)
        again = first + batch * data.draw(st.integers(0, max(0, whole - first) // batch))
        assert plan.num_delivered(num_packs, again) == whole
        first = batch * data.draw(st.integers(0, num_packs // batch))


@in_ci(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 50), st.integers(0, 60), st.integers(0, 200))
@example(world_size=8, batch_size=1, first=3, num_left=9, behind=0)
def test_each_rank_owns_as_much_of_every_batch_and_all_the_rest(world_size, batch_size, first, num_left, behind):
    batch = world_size * batch_size
    num_batches = num_left // batch
    shares = [Share(rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]

    def owned_by(start: int, stop: int) -> Any:
        return np.stack([share.owns(np.arange(start, stop), first, first + num_left) for share in shares])

    owned = owned_by(first, first + num_left)
    batches = owned[:, : num_batches * batch].reshape(world_size, num_batches, batch)
    assert (batches.sum(axis=0) == 1).all()
    assert (batches.sum(axis=2) == batch_size).all()
    assert owned[:, num_batches * batch :].all()
    # Before the first batch, as a row of a pack that was begun may be, everything has one owner.
    assert (owned_by(first - behind, first).sum(axis=0) == 1).all()


def test_a_snapshot_must_agree_with_packing_and_grouping_and_not_with_ranks_and_batches():
    plan = Plan(packing=XTUNER, grouping=LengthGrouping())
    ranks = {"world_size": 4, "batch_size": 2, "accumulation": 8, "round_up": False}
    others = [{}, ranks, {"packing": XTunerPacking(max_length=8, seed=1)}, {"grouping": None}]
    plans = [msgspec.structs.replace(plan, **other) for other in others]
    first, other_ranks, other_packs, ungrouped = [
        parts.PlannedOrder(one, RowShuffle(), 3).description() for one in plans
    ]
    assert first == {**RowOrder(RowShuffle(), 3).description(), **DESCRIPTION}
    assert first == other_ranks == msgspec.json.decode(msgspec.json.encode(first))
    assert first != other_packs
    assert ungrouped == {**first, "grouping": None}


ACROSS = {"max_length": 8, "across_epochs": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan(packing=SoftPacking(**ACROSS)), "AD453 .*SoftPacking\\(across_epochs=False"),
        (lambda: Plan(packing=HardPacking(**ACROSS)), "AD453 .*HardPacking\\(across_epochs=False"),
        (lambda: Plan(packing="soft"), "AD453 packs of str cannot be planned, only those of XTunerPacking, Preset"),
        (lambda: Plan(packing=parts.SinglePacking(), world_size=0), "world_size=0"),
        (
            lambda: parts.pack_rows(SoftPacking(max_length=8, overlong="error"), *map(np.array, ([8, 9], [2], [0, 1]))),
            "AD450 sample 1 has 9 tokens",
        ),
    ],
)
def test_what_cannot_work_says_what_can(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
