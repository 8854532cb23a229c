"""Epochs are planned when they are needed, once, even if the workers that plan them die."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, LengthGrouping, Position, RowShuffle, WorkerError, XTunerPacking
from asyncdata.batching.packers.unpacked import SinglePacking
from asyncdata.batching.planned.plan import Plan, PlannedOrder
from asyncdata.batching.planned.worker import answer
from asyncdata.core.messages import Block, Failed, Indexed
from asyncdata.prefetch.row_index.row_index import RowIndex
from asyncdata.prefetch.windows.planned_epochs import PlannedRows
from asyncdata.workers.base import MAX_LOSSES, Crashed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

XTUNER = Plan(packing=XTunerPacking(max_length=10, seed=0), world_size=2)
SINGLE = Plan(packing=SinglePacking(), grouping=LengthGrouping(), world_size=2)
KEYED = RowShuffle(only_kept=True)


class OneBlock:
    num_blocks = 1
    are_arrays = ()

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        return [Block(0, 0, 1000) for _ in ids]


def index_of(lengths: list[int]) -> RowIndex:
    index = RowIndex(OneBlock(), KEYED)  # type: ignore[arg-type]
    numbers = array("i", range(len(lengths))).tobytes()
    counted = array("i", lengths).tobytes()
    index.append(Indexed(array("i", [len(lengths)]).tobytes(), numbers, numbers, b"", 0, num_tokens=counted))
    index.complete()
    return index


class Slow:
    """An executor that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Callable[[Any], object]]] = []
        self.kinds: list[str] = []

    def submit(self, request: Any, on_reply: Callable[[Any], object], max_losses: int = MAX_LOSSES) -> None:
        self.asked.append((request, on_reply))
        self.kinds.append(type(request).__name__)

    def answer(self, reply: Any = None) -> None:
        request, on_reply = self.asked.pop(0)
        on_reply(answer(request) if reply is None else reply)


class Bench:
    def __init__(self, plan: Plan = XTUNER, lengths: list[int] | None = None, shuffle: RowShuffle = KEYED) -> None:
        self.executor = Slow()
        self.index = index_of([1 + row % 7 for row in range(41)] if lengths is None else lengths)
        self.num_found = 0
        order = PlannedOrder(plan, shuffle, 3)
        self.restart_point = Position()
        self.rows = PlannedRows(
            order,
            self.index,
            self.executor,  # type: ignore[arg-type]
            self._found,
            lambda: self.restart_point,
        )
        self.rows.restart(Position())

    def _found(self) -> None:
        self.num_found += 1

    def planned(self, epoch: int) -> Any:
        """As the windows do: asked for again whenever there is something new."""
        while (found := self.rows.epoch(epoch)) is None and self.executor.asked and self.index.fault is None:
            self.executor.answer()
        return found


def test_packs_are_made_before_their_order_and_each_is_asked_for_once() -> None:
    bench = Bench()

    assert [bench.rows.epoch(0) for _ in range(3)] == [None] * 3
    assert bench.executor.kinds == ["PackRows"]
    bench.executor.answer()
    assert bench.num_found == 1
    assert [bench.rows.epoch(0) for _ in range(3)] == [None] * 3
    assert bench.executor.kinds == ["PackRows", "OrderPacks"]
    bench.executor.answer()

    assert bench.num_found == 2
    assert bench.rows.epoch(0) is bench.rows.find(0)
    assert bench.rows.find(0) is not None
    assert bench.executor.asked == []


@pytest.mark.parametrize(
    ("plan", "shuffle", "kinds"),
    [
        (XTUNER, KEYED, ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
        (SINGLE, KEYED, ["PackRows", "OrderPacks"] * 3),
        (SINGLE, RowShuffle(method="none", only_kept=True), ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
    ],
    ids=["xtuner", "keyed", "unshuffled"],
)
def test_packs_that_are_the_same_in_every_epoch_are_made_once(plan: Plan, shuffle: RowShuffle, kinds: Any) -> None:
    bench = Bench(plan, shuffle=shuffle)

    orders = [bench.planned(epoch).pieces(0, 20).rows.tolist() for epoch in range(3)]

    assert bench.executor.kinds == kinds
    assert len({str(order) for order in orders}) == 3


def test_plans_are_kept_from_the_epoch_before_the_one_that_is_delivered_on() -> None:
    bench = Bench()
    for epoch in range(6):
        bench.restart_point = Position(max(0, epoch - 2))
        bench.planned(epoch)

    assert [bench.rows.find(epoch) is not None for epoch in range(7)] == [False, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(Crashed("AD423", "killed"), WorkerError), (Failed("ConfigError", "AD450 too long"), ConfigError)],
)
def test_a_plan_that_fails_or_kills_every_worker_is_an_error(reply: Any, kind: type[Exception]) -> None:
    bench = Bench()
    bench.rows.epoch(0)
    bench.executor.answer(reply)

    assert bench.executor.asked == []
    assert bench.num_found == 1
    assert isinstance(bench.index.fault, kind)


def test_requests_for_plans_are_repeated_after_a_restart() -> None:
    bench = Bench()
    bench.rows.epoch(0)
    bench.executor.asked.clear()  # the replies are no longer wanted
    bench.rows.restart(Position())

    assert bench.planned(0) is not None
    assert bench.executor.kinds == ["PackRows", "PackRows", "OrderPacks"]

    bench.rows.restart(Position(1))
    assert bench.planned(1) is not None
    assert bench.executor.kinds[3:] == ["OrderPacks"], "packs do not change"


# How packs are dealt.


def test_a_rounded_epoch_that_is_resumed_with_other_ranks_has_whole_batches() -> None:
    bench = Bench()
    whole = bench.planned(0)
    num_packs = whole.packs.num_packs
    assert whole.num_packs == num_packs + num_packs % 2

    for pack in range(num_packs):
        bench.rows.restart(Position(0, 0, int(whole.offsets[pack])))
        found = bench.planned(0)
        assert (found.num_packs - pack) % 2 == 0
        assert found.order.tolist()[:num_packs] == whole.order.tolist()[:num_packs]
        assert found.num_packs == whole.num_packs or pack % 2


@pytest.mark.parametrize("num_rows", range(41, 45))
def test_a_restart_among_packs_that_are_repeated_ends_where_the_epoch_does(num_rows: int) -> None:
    plan = Plan(packing=XTunerPacking(max_length=10, seed=0), world_size=2, accumulation=20)
    bench = Bench(plan, [1 + row % 7 for row in range(num_rows)])
    whole = bench.planned(0)
    assert whole.num_packs == 40 > whole.packs.num_packs

    for pack in range(0, 40, 2):
        bench.rows.restart(Position(0, 0, int(whole.offsets[pack])))
        assert bench.planned(0).offsets.tolist() == whole.offsets.tolist()
