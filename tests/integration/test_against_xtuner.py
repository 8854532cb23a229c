"""Packs, order and batches are those of XTuner's own code. Needs a checkout of XTuner, which ASYNCDATA_XTUNER names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata.batching.collators.base import Document
from asyncdata.batching.collators.xtuner import XTunerCollator
from asyncdata.batching.length_grouping import LengthGrouping, xtuner_share
from asyncdata.batching.packers.xtuner import PackPlan, XTunerPacking
from tests.support.xtuner import FakeDataset, FakeMesh, xtuner_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.thorough

NUM_SETS = 200

Lengths = list[np.ndarray[Any, np.dtype[np.int64]]]


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    module = xtuner_module("datasets.packing")
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_get_mmap_dir", lambda: folder)
        patch.setattr(module, "tqdm", lambda items, **_: items)
        yield module


def lengths_of(rng: np.random.Generator, longest: int) -> Lengths:
    """One to three data sets; few different lengths, many, or some that are longer than a pack."""
    kind = rng.integers(3)
    high = {0: 12, 1: longest, 2: 2 * longest}[int(kind)]
    return [rng.integers(1, high + 1, rng.integers(1, 400)) for _ in range(rng.integers(1, 4))]


def packs_of(plan: PackPlan) -> list[list[tuple[int, int, int]]]:
    return [plan.pack(number) for number in range(plan.num_packs)]


def bases_of(lengths: Lengths, *, joined: bool) -> list[int]:
    return [0] if joined else np.cumsum([0, *map(len, lengths)]).tolist()


@pytest.mark.parametrize("seed", range(NUM_SETS))
def test_hard_packs_are_xtuners(packing: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    longest, joined = int(rng.integers(8, 200)), bool(rng.integers(2))
    lengths = [of_one for of_one in lengths_of(rng, longest) if of_one.sum() >= longest]  # it fails where none is full
    if not lengths:
        lengths = [np.array([longest])]

    theirs = packing.HardPackDataset([FakeDataset(some) for some in lengths], longest, global_pack=joined, seed=seed)
    ours = XTunerPacking(max_length=longest, seed=seed, kind="hard", join_datasets=joined).plan(lengths)

    infos, bases = theirs.pack_infos, bases_of(lengths, joined=joined)
    wanted, first = [], 0
    sizes = np.concatenate(lengths)
    for number, stop in enumerate(infos["indices_cu_len"].tolist()):
        rows = (infos["indices"][first:stop] + bases[infos["dataset_id"][number]]).tolist()
        pack = [[row, 0, int(sizes[row])] for row in rows]
        pack[0][1], pack[-1][2] = int(infos["start_offset"][number]), int(infos["end_offset"][number])
        wanted.append([tuple(piece) for piece in pack])
        first = stop
    assert packs_of(ours) == wanted
    assert ours.costs.tolist() == infos["longest"].tolist()


def soft_packs(packing: ModuleType, lengths: Lengths, **settings: Any) -> tuple[list[list[int]], list[int]]:
    theirs = packing.ExpandSoftPackDataset([FakeDataset(some) for some in lengths], pack_workers=1, **settings)
    bases = bases_of(lengths, joined=settings["global_pack"])
    packs = [[row + bases[info["dataset_id"]] for row in info["indices"]] for info in theirs.pack_infos]
    return packs, list(theirs.longest)


def compare_soft(packing: ModuleType, lengths: Lengths, rng: np.random.Generator, seed: int, ties: Any) -> None:
    longest, joined = int(rng.integers(8, 400)), bool(rng.integers(2))
    lookahead, slice_samples = int(rng.integers(1, 150)), int(rng.integers(20, 500))

    packs, costs = soft_packs(
        packing,
        lengths,
        pack_max_length=longest,
        global_pack=joined,
        seed=seed,
        pack_extra_buffer_size=lookahead,
        pack_chunk_size=slice_samples,
    )
    ours = XTunerPacking(
        max_length=longest,
        seed=seed,
        join_datasets=joined,
        lookahead=lookahead,
        slice_samples=slice_samples,
        ties=ties,
    ).plan(lengths)

    assert [[row for row, _, _ in pack] for pack in packs_of(ours)] == packs
    assert ours.costs.tolist() == costs
    sizes = np.concatenate(lengths)
    assert all(start == 0 and stop == sizes[row] for pack in packs_of(ours) for row, start, stop in pack)


@pytest.mark.parametrize("seed", range(NUM_SETS))
def test_soft_packs_are_xtuners_ties_and_all(packing: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)

    compare_soft(packing, lengths_of(rng, int(rng.integers(8, 400))), rng, seed, "numpy")


@pytest.mark.parametrize("seed", range(NUM_SETS))
def test_soft_packs_are_xtuners_on_every_machine_where_no_two_samples_are_alike(packing: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.arange(1, rng.integers(5, 500)))

    compare_soft(packing, np.array_split(lengths, rng.integers(1, 3)), rng, seed, "stable")


@pytest.mark.parametrize("seed", range(50))
def test_stable_ties_are_those_of_xtuner_with_a_stable_sort(
    packing: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda array, kind=None: argsort(array, kind="stable"))
    rng = np.random.default_rng(seed)

    compare_soft(packing, lengths_of(rng, int(rng.integers(8, 400))), rng, seed, "stable")


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_packs", [5, 63, 700, 2500])
@pytest.mark.parametrize("round_up", [True, False])
def test_the_order_of_packs_is_xtuners(world_size: int, accumulation: int, num_packs: int, round_up: bool) -> None:
    sampler = xtuner_module("datasets.sampler")
    costs = np.random.default_rng(num_packs).integers(1, 300, num_packs).tolist()
    batch, grouping = world_size * accumulation, LengthGrouping(method="xtuner")

    class Packs:
        longest = costs

        def __len__(self) -> int:
            return num_packs

    for rank in range(world_size):
        theirs = sampler.LengthGroupedSampler(Packs(), batch, FakeMesh(rank, world_size), seed=7, round_up=round_up)
        for epoch in range(3):
            order = grouping.order(costs, world_size=world_size, accumulation=accumulation, seed=7, epoch=epoch)
            theirs.set_epoch(epoch)
            assert xtuner_share(order, rank, world_size, batch, round_up=round_up).tolist() == list(theirs)

            consumed = len(theirs) * world_size // 2 // batch * batch
            theirs.step = consumed
            share = xtuner_share(order, rank, world_size, batch, round_up=round_up, consumed=consumed)
            assert share.tolist() == list(theirs)


def random_pack(rng: np.random.Generator, longest: int) -> list[Document]:
    """Documents of up to ``longest`` tokens together; at times they fill it, at times they are too many."""
    pack: list[Document] = []
    left = int(rng.integers(2, longest + longest // 4 + 1))
    if rng.integers(5) == 0:
        left = longest
    while left:
        size = min(left, int(rng.integers(1, rng.choice([2, 10, longest]) + 1)))
        tokens = rng.integers(0, 1000, size, dtype=np.int32)
        labels = np.where(rng.random(size) < 0.5, tokens, -100)
        pack.append(Document(tokens, labels))
        left -= size
    return pack


def theirs_of(pack: list[Document]) -> list[dict[str, Any]]:
    return [
        {"input_ids": document.tokens.tolist(), "labels": document.labels.tolist(), "num_tokens": len(document.tokens)}
        for document in pack
        if document.labels is not None
    ]


@pytest.mark.parametrize("seed", range(NUM_SETS))
def test_batches_are_xtuners(seed: int) -> None:
    collator = xtuner_module("datasets.collator")
    rng = np.random.default_rng(seed)
    longest, pad_id, chunk = int(rng.integers(4, 600)), int(rng.integers(5)), int(rng.choice([1, 4, 256]))
    is_padded = bool(rng.integers(4))
    packs = [random_pack(rng, longest) for _ in range(3)]

    theirs = collator.sft_llm_collator(
        [theirs_of(pack) for pack in packs], longest, pad_id, pack_to_max_length=is_padded, pad_chunk_size=chunk
    )
    ours = XTunerCollator(
        max_length=longest,
        pad_id=pad_id,
        pad_to_max_length=is_padded,
        pad_chunk=chunk,
        shift="pack",
        overlong="truncate",
        output="tensors",
    )(packs)

    for wanted, item in zip(theirs, ours, strict=True):
        assert same(wanted["shifted_labels"], item["shifted_labels"])
        for name, value in item["seq_ctx"].items():
            assert same(getattr(wanted["seq_ctx"], name), value), name


def same(wanted: Any, value: Any) -> bool:
    """A number may be a tensor of no dimension."""
    if isinstance(value, int):
        return int(wanted) == value

    return wanted.dtype == value.dtype and wanted.shape == value.shape and bool((wanted == value).all())


def test_a_sequence_context_is_an_object_of_xtuners(monkeypatch: pytest.MonkeyPatch) -> None:
    module = xtuner_module("data_proto.sequence_context")
    monkeypatch.setitem(sys.modules, "xtuner.v1.data_proto", module)
    pack = [Document(np.arange(3)), Document(np.arange(5))]

    (item,) = XTunerCollator(max_length=10, output="sequence_context")([pack])

    assert type(item["seq_ctx"]) is module.SequenceContext
    assert item["seq_ctx"].cu_seq_lens_q.tolist() == [0, 3, 8, 10]
    assert item["seq_ctx"].mask.tolist() == [[True] * 8 + [False] * 2]
    assert item["shifted_labels"].tolist() == [[1, 2, -100, 1, 2, 3, 4, -100, -100, -100]]


def test_nothing_of_xtuner_is_left_behind(tmp_path: Path) -> None:
    xtuner_module("datasets.packing")

    assert not [name for name in sys.modules if name.partition(".")[0] in {"xtuner", "mmengine"}]
