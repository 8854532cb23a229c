"""How far a planned epoch goes, whose its rows are, and what a snapshot says of a plan.

That planned packs are XTuner's, or those of a packer, is held through loaders: in ``test_planned_packs.py`` and
``test_packed_loader.py`` of the integration tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata import HardPacking, LengthGrouping, RowShuffle, SoftPacking
from asyncdata.errors import ConfigError
from asyncdata.order.order import RowOrder, Share
from asyncdata.xtuner import XTunerPacking
from tests.support.examples import in_ci
from tests.support.parts import PackRules, PlannedOrder, SinglePacking, pack_rows

Plan = partial(PackRules, is_planned=True)
XTUNER = XTunerPacking(max_length=8, seed=0)

# What snapshots say of a plan, for ever.
KIND = {"type": "XTunerPacking", "max_length": 8, "seed": 0, "kind": "expand_soft", "join_datasets": True}
DESCRIPTION = {
    "packing": {**KIND, "lookahead": 1000, "slice_samples": 10_000, "ties": "stable"},
    "grouping": {"window": 64, "linear": 24576.0, "quadratic": 1.0, "method": "karmarkar_karp"},
}


def packs_of(packing, *lengths):
    """The packs of rows of two data sets."""
    half, rows = len(lengths) // 2, np.arange(len(lengths))
    return pack_rows(packing, np.array(lengths, np.int32), np.array([half, len(lengths) - half], np.int64), rows)


numbers_of_ranks = st.fixed_dictionaries(
    {"world_size": st.integers(1, 4), "batch_size": st.integers(1, 3), "accumulation": st.integers(1, 3)}
)


@in_ci(max_examples=30)
@given(st.integers(1, 60), numbers_of_ranks, numbers_of_ranks, st.booleans(), st.data())
def test_a_rounded_epoch_has_whole_steps_and_whole_batches_for_ranks_that_go_on_with_it(
    num_packs, before, after, round_up, data
):
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


def test_packs_that_are_not_xtuners_are_not_rounded():
    plan = Plan(packing=SoftPacking(max_length=8), world_size=4)

    assert plan.num_delivered(7) == 7
    assert msgspec.structs.replace(plan, grouping=LengthGrouping(method="xtuner")).num_delivered(7) == 8


@in_ci(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 50), st.integers(0, 60), st.integers(0, 200))
@example(world_size=8, batch_size=1, first=3, num_left=9, behind=0)
def test_each_rank_owns_as_much_of_every_batch_and_all_own_what_fills_none(
    world_size, batch_size, first, num_left, behind
):
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
    first, other_ranks, other_packs, ungrouped = [PlannedOrder(one, RowShuffle(), 3).description() for one in plans]

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
        (lambda: Plan(packing=SinglePacking(), world_size=0), "world_size=0"),
        (lambda: packs_of(SoftPacking(max_length=8, overlong="error"), 8, 9), "AD450 sample 1 has 9 tokens"),
    ],
)
def test_what_cannot_work_says_what_can(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
