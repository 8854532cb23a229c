"""A planned epoch is what XTuner's own packing and samplers give each rank, pack for pack and piece for piece.

Needs a checkout of XTuner, which ASYNCDATA_XTUNER names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers.xtuner import XTunerPacking
from asyncdata.batching.planned.plan import Packs, Plan, PlannedEpoch, PlannedOrder
from asyncdata.batching.planned.worker import answer
from asyncdata.core.messages import Packed, Permuted
from asyncdata.order.rank_share import Share
from asyncdata.order.shuffle import RowShuffle
from tests.support.xtuner import FakeDataset, FakeMesh, xtuner_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = pytest.mark.thorough

NUM_SETS = 40

Piece = tuple[int, int, int]


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    module = xtuner_module("datasets.packing")
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_get_mmap_dir", lambda: folder)
        patch.setattr(module, "tqdm", lambda items, **_: items)
        yield module


def planned(plan: Plan, lengths: list[Any], seed: int, epoch: int) -> PlannedEpoch:
    """What a loader has of an epoch."""
    order = PlannedOrder(plan, RowShuffle(method="none", only_kept=True), seed)
    num_tokens = np.concatenate(lengths).astype(np.int32)
    reply = answer(order.request_packs(num_tokens, np.array([len(some) for some in lengths]), epoch))
    assert isinstance(reply, Packed)
    packs = Packs.of(reply)
    numbers = answer(order.request_order(packs, plan.dealt, epoch))
    assert isinstance(numbers, Permuted)
    order_of_packs = np.frombuffer(numbers.rows, np.uint32).astype(np.int64)
    return PlannedEpoch(packs, order_of_packs, plan.num_delivered(packs.num_packs))


def ours_of(epoch: PlannedEpoch, share: Share) -> list[list[Piece]]:
    numbers = np.arange(epoch.num_packs)
    packs = [epoch.pack(number) for number in numbers[share.owns(numbers, 0, epoch.num_packs)].tolist()]
    return [list(zip(*(column.tolist() for column in pack), strict=True)) for pack in packs]


def packs_of(dataset: Any, lengths: list[Any], *, joined: bool) -> list[list[Piece]]:
    """XTuner's packs; what a row is numbered across the data sets."""
    bases = [0] if joined else np.cumsum([0, *map(len, lengths)]).tolist()
    sizes = np.concatenate(lengths)
    infos = dataset.pack_infos
    if "indices_cu_len" not in (infos if isinstance(infos, dict) else {}):
        rows = [[row + bases[info["dataset_id"]] for row in info["indices"]] for info in infos]
        return [[(row, 0, int(sizes[row])) for row in pack] for pack in rows]

    packs, first = [], 0
    for number, stop in enumerate(infos["indices_cu_len"].tolist()):
        found = (infos["indices"][first:stop] + bases[infos["dataset_id"][number]]).tolist()
        pieces = [[row, 0, int(sizes[row])] for row in found]
        pieces[0][1], pieces[-1][2] = int(infos["start_offset"][number]), int(infos["end_offset"][number])
        packs.append([(row, start, stop) for row, start, stop in pieces])
        first = stop
    return packs


@pytest.mark.parametrize("kind", ["expand_soft", "hard"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["parallel", "grouped"])
@pytest.mark.parametrize("seed", range(NUM_SETS))
def test_a_rank_gets_what_xtuners_sampler_gives_it(packing: ModuleType, seed: int, is_grouped: bool, kind: Any) -> None:
    samplers = xtuner_module("datasets.sampler")
    rng = np.random.default_rng(seed)
    longest, joined, round_up = int(rng.integers(20, 200)), bool(rng.integers(2)), bool(rng.integers(2))
    lengths = [rng.integers(1, longest // 2, rng.integers(40, 300)) for _ in range(rng.integers(1, 4))]
    world_size, batch_size, accumulation = (int(rng.integers(1, 5)) for _ in range(3))
    batch = world_size * batch_size * accumulation
    plan = Plan(
        packing=XTunerPacking(max_length=longest, seed=seed, kind=kind, join_datasets=joined, ties="numpy"),
        grouping=LengthGrouping(method="xtuner") if is_grouped else None,
        world_size=world_size,
        batch_size=batch_size,
        accumulation=accumulation,
        round_up=round_up,
    )
    sets = [FakeDataset(some) for some in lengths]
    if kind == "hard":
        dataset = packing.HardPackDataset(sets, longest, global_pack=joined, seed=seed)
    else:
        dataset = packing.ExpandSoftPackDataset(
            sets, pack_workers=1, pack_max_length=longest, global_pack=joined, seed=seed
        )
    packs = packs_of(dataset, lengths, joined=joined)
    sampler_of = samplers.LengthGroupedSampler if is_grouped else samplers.ParallelSampler

    for rank in range(world_size):
        theirs = sampler_of(dataset, batch, FakeMesh(rank, world_size), seed=seed + 1, round_up=round_up)
        for epoch in range(2):
            theirs.set_epoch(epoch)
            wanted = [packs[number] for number in theirs]
            found = planned(plan, lengths, seed + 1, epoch)
            assert ours_of(found, Share(rank=rank, world_size=world_size)) == wanted
