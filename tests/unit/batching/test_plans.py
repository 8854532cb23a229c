"""Plans of packs, and shares of ranks, against what they must be by their descriptions alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata import ConfigError, HardPacking, LengthGrouping, RowShuffle, SoftPacking, XTunerPacking
from asyncdata.batching.length_grouping import xtuner_order, xtuner_share
from asyncdata.batching.packers.unpacked import SinglePacking
from asyncdata.batching.planned.plan import Dealt, Packs, Plan, PlannedEpoch, PlannedOrder
from asyncdata.batching.planned.worker import answer, pack_rows
from asyncdata.core.messages import decode_reply, decode_request, encode
from asyncdata.order.order import RowOrder
from asyncdata.order.rank_share import Share
from asyncdata.order.torch_randperm import TorchGenerator
from tests.support.examples import in_ci

Piece = tuple[int, int, int]

row_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=60)
max_lengths = st.integers(8, 40)
xtuners = st.builds(
    XTunerPacking,
    max_length=max_lengths,
    seed=st.integers(0, 9),
    kind=st.sampled_from(["expand_soft", "hard"]),
    join_datasets=st.booleans(),
    lookahead=st.integers(0, 9),
    slice_samples=st.integers(1, 40),
)
ours = st.one_of(
    st.builds(
        SoftPacking,
        max_length=max_lengths,
        window_samples=st.integers(1, 20),
        overlong=st.sampled_from(["drop", "truncate"]),
        across_epochs=st.just(False),
    ),
    st.builds(HardPacking, max_length=max_lengths, keep_tail=st.booleans(), across_epochs=st.just(False)),
    st.just(SinglePacking()),
)
groupings = st.none() | st.builds(
    LengthGrouping, window=st.integers(1, 9), method=st.sampled_from(["karmarkar_karp", "snake", "xtuner"])
)
shuffles = st.builds(RowShuffle, method=st.sampled_from(["keyed", "slime", "none"]), only_kept=st.just(True))


# What snapshots say of a plan, for ever.
DESCRIPTION = {
    "packing": {
        "type": "XTunerPacking",
        "max_length": 8,
        "seed": 0,
        "kind": "expand_soft",
        "join_datasets": True,
        "lookahead": 1000,
        "slice_samples": 10_000,
        "ties": "stable",
    },
    "grouping": {"window": 64, "linear": 24576.0, "quadratic": 1.0, "method": "karmarkar_karp"},
}


def counted(lengths: list[int]) -> Any:
    return np.array(lengths, np.int32)


def halves(lengths: list[int]) -> Any:
    """Two data sets."""
    return np.array([len(lengths) // 2, len(lengths) - len(lengths) // 2], np.int64)


def pieces_of(packs: Packs) -> list[list[Piece]]:
    rows = list(zip(packs.rows.tolist(), packs.starts.tolist(), packs.stops.tolist(), strict=True))
    return [rows[first:stop] for first, stop in pairwise(packs.offsets.tolist())]


def delivered(epoch: PlannedEpoch) -> list[list[Piece]]:
    return [
        list(zip(*(column.tolist() for column in epoch.pack(number)), strict=True)) for number in range(epoch.num_packs)
    ]


def by_way_of_a_worker(order: PlannedOrder, lengths: list[int], epoch: int, dealt: Dealt) -> PlannedEpoch:
    """What a loader does, with every message encoded and decoded."""

    def ask(request: Any) -> Any:
        return decode_reply(encode(answer(decode_request(encode(request)))))  # type: ignore[arg-type]

    packs = Packs.of(ask(order.request_packs(counted(lengths), halves(lengths), epoch)))
    numbers = np.frombuffer(ask(order.request_order(packs, dealt, epoch)).rows, np.uint32).astype(np.int64)
    return PlannedEpoch(packs, numbers, order.plan.num_delivered(len(numbers)))


@in_ci(max_examples=20)
@given(row_lengths, xtuners)
def test_xtuners_packs_are_those_of_the_rows_that_have_tokens(lengths, packing) -> None:
    packs = pack_rows(packing, counted(lengths), halves(lengths))

    kept = [row for row, length in enumerate(lengths) if length]
    first, second = [np.array([lengths[row] for row in kept if (row < len(lengths) // 2) == half]) for half in (1, 0)]
    theirs = packing.plan([some.astype(np.int64) for some in (first, second)])
    wanted = [
        [(kept[row], start, stop) for row, start, stop in theirs.pack(number)] for number in range(theirs.num_packs)
    ]
    assert pieces_of(packs) == wanted
    assert packs.costs.tolist() == theirs.costs.tolist()
    assert packs.counts.samples.get("empty", 0) == lengths.count(0)
    num_packed = sum(stop - start for pack in wanted for _, start, stop in pack)
    assert num_packed + packs.counts.tokens.get("tail", 0) == sum(lengths)


@in_ci(max_examples=20)
@given(row_lengths, ours, shuffles, st.integers(-3, 3), st.integers(0, 3))
def test_other_packs_are_those_of_a_packer_that_takes_the_rows_as_they_come(lengths, packing, shuffle, seed, epoch):
    order = PlannedOrder(Plan(packing=packing), shuffle, seed)
    planned = by_way_of_a_worker(order, lengths, epoch, order.plan.dealt)

    rows = list(range(len(lengths)))
    if shuffle.method == "keyed":
        rows = RowOrder(shuffle, seed).rows(epoch, 0, len(lengths)).tolist()
    elif shuffle.method == "slime":
        import random

        random.Random(seed + epoch).shuffle(rows)
    packer = packing.open()
    wanted = [pack for row in rows for pack in packer.extend([lengths[row]], [row])] + packer.flush()
    assert delivered(planned) == wanted
    assert msgspec.to_builtins(planned.packs.counts) == msgspec.to_builtins(packer.counts)
    same = PlannedOrder(order.plan, shuffle, seed).packs_of(epoch)
    assert same == (0 if shuffle.method == "none" else epoch)


@in_ci(max_examples=40)
@given(
    row_lengths,
    xtuners | ours,
    groupings,
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2),
)
def test_a_planned_epoch_delivers_every_pack_once_in_the_order_of_its_kind(
    lengths, packing, grouping, world_size, batch_size, accumulation, round_up, epoch
):
    dealt = {"world_size": world_size, "batch_size": batch_size, "accumulation": accumulation}
    plan = Plan(packing=packing, grouping=grouping, round_up=round_up, **dealt)
    order = PlannedOrder(plan, RowShuffle(only_kept=True), 7)
    planned = by_way_of_a_worker(order, lengths, epoch, plan.dealt)
    packs, found = pieces_of(planned.packs), delivered(planned)
    batch = world_size * batch_size * accumulation

    if grouping is None and isinstance(packing, XTunerPacking):
        numbers = TorchGenerator(7 + epoch).randperm(len(packs)).tolist()
    elif grouping is None:
        numbers = list(range(len(packs)))
    elif grouping.method == "xtuner":
        costs = planned.packs.costs.tolist()
        numbers = xtuner_order(costs, world_size, batch, 7 + epoch).tolist()
    else:
        numbers = windows_of(packs, grouping, plan.dealt, epoch)

    if plan.is_xtuners and packs:
        shares = [
            xtuner_share(np.array(numbers), rank, world_size, batch, round_up=round_up) for rank in range(world_size)
        ]
        numbers = np.stack(shares, axis=1).ravel().tolist()
    assert found == [packs[number] for number in numbers]
    assert planned.num_left_out == max(0, len(packs) - len(numbers))


def windows_of(packs: list[list[Piece]], grouping: LengthGrouping, dealt: Dealt, epoch: int) -> list[int]:
    costs = [grouping.cost([stop - start for _, start, stop in pack]) for pack in packs]
    numbers: list[int] = []
    window = 0
    while len(numbers) < len(packs):
        size = (grouping.steps_of_window(window, dealt.accumulation) or 1) * dealt.world_size * dealt.accumulation
        first = len(numbers)
        settings = {"world_size": dealt.world_size, "accumulation": dealt.accumulation, "seed": 7, "epoch": epoch}
        order = grouping.order(costs[first : first + size], window=window, **settings)
        numbers += [first + number for number in order.tolist()]
        window += 1
    return numbers


@in_ci(max_examples=20)
@given(row_lengths, xtuners | ours, groupings)
def test_rows_and_packs_of_an_epoch_find_each_other(lengths, packing, grouping) -> None:
    order = PlannedOrder(Plan(packing=packing, grouping=grouping, world_size=2), RowShuffle(only_kept=True), 0)
    planned = by_way_of_a_worker(order, lengths, 0, order.plan.dealt)

    rows = [(number, piece) for number, pack in enumerate(delivered(planned)) for piece in pack]
    assert planned.num_rows == len(rows)
    assert [planned.pack_at(row) for row in range(len(rows))] == [number for number, _ in rows]
    assert planned.packs_at(0, len(rows)).tolist() == [number for number, _ in rows]
    assert planned.pack_at(len(rows)) == planned.num_packs
    begins = [row for row, (number, _) in enumerate(rows) if row == 0 or rows[row - 1][0] != number]
    assert [planned.first_pack_from(row) for row in range(len(rows) + 1)] == [
        sum(begin < row for begin in begins) for row in range(len(rows) + 1)
    ]
    half = len(rows) // 2
    parts = [planned.pieces(0, half), planned.pieces(half, len(rows))]
    found = [piece for part in parts for piece in zip(*(column.tolist() for column in part), strict=True)]
    assert found == [piece for _, piece in rows]


# How far an epoch goes.


@in_ci(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.data())
def test_a_rounded_epoch_has_whole_steps_and_a_restart_at_a_batch_does_not_change_it(
    num_packs, world_size, batch_size, accumulation, round_up, data
):
    plan = plan_of(world_size, batch_size, accumulation, round_up=round_up)
    batch = world_size * batch_size

    whole = plan.num_delivered(num_packs)

    assert whole % (batch * accumulation) == 0
    assert abs(whole - num_packs) < batch * accumulation
    assert (whole >= num_packs) == (round_up or whole == num_packs)
    first = batch * data.draw(st.integers(0, whole // batch))
    assert plan.num_delivered(num_packs, first) == whole


@in_ci(max_examples=30)
@given(st.integers(1, 60), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.booleans(), st.data())
def test_an_epoch_that_goes_on_with_other_ranks_has_whole_batches_for_them(num_packs, sizes, round_up, data) -> None:
    before, after = (plan_of(*some, round_up=round_up) for some in (sizes[:3], sizes[3:]))
    batch = before.world_size * before.batch_size
    first = batch * data.draw(st.integers(0, num_packs // batch))
    batch = after.world_size * after.batch_size

    whole = after.num_delivered(num_packs, first)

    assert (whole - first) % batch == 0
    if round_up:
        assert whole >= num_packs
    again = first + batch * data.draw(st.integers(0, max(0, whole - first) // batch))
    assert after.num_delivered(num_packs, again) == whole


def plan_of(world_size: int, batch_size: int, accumulation: int, *, round_up: bool) -> Plan:
    dealt = {"world_size": world_size, "batch_size": batch_size, "accumulation": accumulation}
    return Plan(packing=XTunerPacking(max_length=8, seed=0), round_up=round_up, **dealt)


def test_packs_that_are_not_xtuners_are_not_rounded() -> None:
    plan = Plan(packing=SoftPacking(max_length=8, across_epochs=False), world_size=4)

    assert plan.num_delivered(7) == 7
    assert msgspec.structs.replace(plan, grouping=LengthGrouping(method="xtuner")).num_delivered(7) == 8


# Shares.


@in_ci(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 50), st.integers(0, 60), st.integers(0, 200))
@example(world_size=8, batch_size=1, first=3, num_left=9, behind=0)
def test_each_rank_owns_as_much_of_every_batch_and_all_own_what_fills_none(
    world_size: int, batch_size: int, first: int, num_left: int, behind: int
) -> None:
    batch = world_size * batch_size
    num_batches = num_left // batch
    shares = [Share(rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]

    owned = np.stack([share.owns(np.arange(first, first + num_left), first, first + num_left) for share in shares])

    batches = owned[:, : num_batches * batch].reshape(world_size, num_batches, batch)
    assert (batches.sum(axis=0) == 1).all()
    assert (batches.sum(axis=2) == batch_size).all()
    assert owned[:, num_batches * batch :].all()
    # Before the first batch, as a row of a pack that was begun may be, everything has one owner.
    before = np.stack([share.owns(np.arange(first - behind, first), first, first + num_left) for share in shares])
    assert (before.sum(axis=0) == 1).all()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"no rank {rank} among {world_size}"):
        Share(rank=rank, world_size=world_size)


# Settings.


def test_a_snapshot_must_agree_with_packing_and_grouping_and_not_with_ranks_and_batches() -> None:
    plan = Plan(packing=XTunerPacking(max_length=8, seed=0), grouping=LengthGrouping())
    other_ranks = msgspec.structs.replace(plan, world_size=4, batch_size=2, accumulation=8, round_up=False)
    other_packs = msgspec.structs.replace(plan, packing=XTunerPacking(max_length=8, seed=1))
    ungrouped = msgspec.structs.replace(plan, grouping=None)

    orders = [PlannedOrder(some, RowShuffle(), 3).description() for some in (plan, other_ranks, other_packs, ungrouped)]

    assert orders[0] == orders[1] == msgspec.json.decode(msgspec.json.encode(orders[0]))
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]
    assert orders[0] == {**RowOrder(RowShuffle(), 3).description(), **DESCRIPTION}
    assert orders[3] == {**orders[0], "grouping": None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": SoftPacking(max_length=8, across_epochs=True)}, "AD453 .*SoftPacking\\(across_epochs=False"),
        ({"packing": HardPacking(max_length=8, across_epochs=True)}, "AD453 .*HardPacking\\(across_epochs=False"),
        ({"packing": "soft"}, "AD453 packs of str cannot be planned, only those of XTunerPacking, SoftPacking, "),
        ({"packing": SinglePacking(), "world_size": 0}, "world_size=0"),
    ],
)
def test_a_plan_that_cannot_work_says_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**settings)


def test_a_row_that_is_too_long_is_an_error_of_the_packing() -> None:
    packing = SoftPacking(max_length=8, across_epochs=False)

    with pytest.raises(ConfigError, match="AD450 sample 1 has 9 tokens"):
        pack_rows(packing, counted([8, 9]), halves([8, 9]))
