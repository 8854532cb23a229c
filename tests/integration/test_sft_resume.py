"""Packed batches for several ranks: a resumed run is the uninterrupted one, whatever fails; ranks may come and go."""

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from asyncdata import HardPacking, LengthGrouping, RowShuffle, SoftPacking
from asyncdata.errors import PrefetchTimeoutError
from asyncdata.xtuner import XTunerPacking
from tests.support.examples import each_value
from tests.support.faults import interrupted_at
from tests.support.ranks import (
    GROUPING,
    HARD,
    MAX_LENGTH,
    SOFT,
    STRIDE,
    WAYS,
    Batch,
    Ranks,
    Step,
    batch_of,
    lengths,
    make,
    numbered,
    settled,
    stream,
    tokens_of,
    write,
)

Knobs = dict[str, Any]

NUM_CUTS = 40
STEPS_PER_EPOCH = 16

SOFT_BY_EPOCH: Knobs = {"packing": msgspec.structs.replace(SOFT, across_epochs=False)}
HARD_BY_EPOCH: Knobs = {"packing": HardPacking(max_length=MAX_LENGTH, keep_tail=True)}
GROUPED: Knobs = {"length_grouping": GROUPING}
XTUNERS_GROUPING: Knobs = {"length_grouping": LengthGrouping(method="xtuner")}
XTUNERS: Knobs = {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=3)}
PLANNED: Knobs = {"plan_packs": True}
IN_FULL_ORDER: Knobs = {"shuffle": "full", "cache": {"folder": ""}}

PACKED: dict[str, Knobs] = {
    "soft": {"packing": SOFT},
    "soft, grouped": {"packing": SOFT, **GROUPED},
    "soft, each epoch by itself": SOFT_BY_EPOCH,
    "soft, each epoch by itself, grouped": {**SOFT_BY_EPOCH, **GROUPED},
    "hard": {"packing": HARD},
    "hard, grouped": {"packing": HARD, **GROUPED},
    "hard, each epoch by itself, grouped": {**HARD_BY_EPOCH, **GROUPED},
    "soft, rows in full order": {"packing": SOFT, **IN_FULL_ORDER, **GROUPED},
    "planned, soft": {**SOFT_BY_EPOCH, **PLANNED, **IN_FULL_ORDER},
    "planned, soft, grouped": {**SOFT_BY_EPOCH, **PLANNED, **IN_FULL_ORDER, **GROUPED},
    "planned, hard, grouped": {**HARD_BY_EPOCH, **PLANNED, **IN_FULL_ORDER, **GROUPED},
    "planned, soft, grouped as XTuner does": {**SOFT_BY_EPOCH, **IN_FULL_ORDER, **XTUNERS_GROUPING},
    "XTuner's soft packs": {**XTUNERS, **IN_FULL_ORDER},
    "XTuner's soft packs and grouping": {**XTUNERS, **IN_FULL_ORDER, **XTUNERS_GROUPING},
    "XTuner's hard packs": {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=3, kind="hard"), **IN_FULL_ORDER},
}
UNPACKED: dict[str, Knobs] = {
    "not packed": {},
    "not packed, grouped": GROUPED,
    "not packed, planned, grouped": {**PLANNED, **IN_FULL_ORDER, **GROUPED},
    "not packed, rows in full order": IN_FULL_ORDER,
    "not packed, rows in full order of kept ones": {**IN_FULL_ORDER, "shuffle": RowShuffle(only_kept=True)},
}

RACED = ("soft, grouped", "planned, soft, grouped", "XTuner's soft packs and grouping", "not packed, planned, grouped")


def is_xtuners(way: Knobs) -> bool:
    """Whether an epoch is rounded to whole steps, and loses packs where it is rounded down."""
    grouping = way.get("length_grouping")
    return isinstance(way.get("packing"), XTunerPacking) or (grouping is not None and grouping.method == "xtuner")


def parametrized(ways: dict[str, Knobs]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("knobs", ways.values(), ids=ways)


@pytest.fixture(scope="module")
def packed_rows(tmp_path_factory) -> Path:
    """Tokens for 16 steps of two ranks, if packs are full."""
    sizes = lengths(STEPS_PER_EPOCH * 2 * MAX_LENGTH, MAX_LENGTH - 4)
    return write(tmp_path_factory.mktemp("rows") / "packed.jsonl", sizes)


@pytest.fixture(scope="module")
def plain_rows(tmp_path_factory) -> Path:
    """Rows for 16 steps of two ranks, two rows each."""
    rng = random.Random(1)
    sizes = [rng.randint(1, MAX_LENGTH) for _ in range(STEPS_PER_EPOCH * 2 * 2)]
    return write(tmp_path_factory.mktemp("rows") / "plain.jsonl", sizes)


def run(path: Path, num_steps: int, **knobs: Any) -> tuple[list[Step], list[int]]:
    """The uninterrupted run of two ranks: step 0 is what there is before the first batch; and where epochs ended."""
    with Ranks(path, 2, gradient_accumulation=2, **knobs) as ranks:
        steps = [Step([], ranks.state()), *ranks.steps(num_steps)]
        return steps, ranks.ends


def check_cuts(path: Path, num_ahead: int, every: int, **knobs: Any) -> list[int]:
    """Resume at each cut, or some and those at epochs' ends; ranks take turns, each from the state of all. The ends."""
    steps, ends = run(path, NUM_CUTS + num_ahead, **knobs)
    at_ends = {end + beside for end in ends for beside in (-1, 0, 1)}
    for cut in sorted({*range(0, NUM_CUTS + 1, every), *at_ends.intersection(range(NUM_CUTS + 1))}):
        saved, rank = json.loads(json.dumps(steps[cut].state)), cut % 2
        wanted = [step.batches[rank] for step in steps[cut + 1 : cut + 1 + num_ahead]]
        with make(path, ranks={"rank": rank, "world_size": 2, "gradient_accumulation": 2}, **knobs) as loader:
            loader.load_state_dict(saved)
            assert settled(loader.state_dict()) == settled(saved), f"the state is another after cut {cut}"
            found = list(itertools.islice(stream(loader), num_ahead))
        assert_same(found, wanted, f"rank {rank} after cut {cut} of epochs that end at {ends}")
    return [end for end in ends if end <= NUM_CUTS]


def assert_same(found: list[Batch], wanted: list[Batch | None], where: str) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert other is not None
        assert one.packs == other.packs, f"batch {number}, {where}"
        assert one.content == other.content, f"batch {number}, {where}"


@pytest.mark.thorough
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@parametrized(PACKED | UNPACKED)
def test_resumed_at_any_of_40_cuts_in_epochs_of_16_steps_the_batches_are_those_of_the_uninterrupted_run(
    packed_rows, plain_rows, knobs, every
):
    is_packed = "packing" in knobs
    ends = check_cuts(packed_rows if is_packed else plain_rows, 12, every, batch_size=1 if is_packed else 2, **knobs)
    assert len(ends) == 2, "two epochs end between the cuts"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "knobs",
    [pytest.param(way, id=name, marks=() if name in RACED else pytest.mark.slow) for name, way in PACKED.items()],
)
def test_batches_depend_neither_on_workers_nor_on_read_ahead(packed_rows, knobs):
    few, _ = run(packed_rows, 24, buffer_size=3, **knobs)
    many, _ = run(packed_rows, 24, tokenize_fn="tests.support.ranks:numbered", num_workers=1, **knobs)
    assert [step.batches for step in few] == [step.batches for step in many]


Stage = tuple[int, int, int]
"""Ranks, packs of each in a batch, batches of a step."""


class Run(NamedTuple):
    """A whole run.

    :ivar stages: the steps of each stage.
    :ivar num_left_out: tokens that are counted as being in no pack.
    """

    stages: list[list[Step]]
    num_left_out: int

    @property
    def packs(self) -> list[list[int]]:
        batches = [batch for steps in self.stages for step in steps for batch in step.batches if batch]
        return [list(itertools.chain.from_iterable(pack)) for batch in batches for pack in batch.packs]


def through(path: Path, stages: Iterable[tuple[Stage, int | None]], **knobs: Any) -> Run:
    """The steps of a run that is resumed by other ranks at each stage, from the state of the last rank."""
    state, found, num_left_out = None, [], 0
    for (world_size, batch_size, accumulation), num_steps in stages:
        with Ranks(path, world_size, state, accumulation, batch_size=batch_size, **knobs) as ranks:
            found.append(list(ranks.steps(num_steps)))
            state = json.loads(json.dumps(ranks.loaders[-1].state_dict()))
            num_left_out = sum(ranks.loaders[-1].statistics().unpacked_tokens_total.values())
    return Run(found, num_left_out)


def check_once(path: Path, run: Run, num_epochs: int, *, leaves_out: bool = False) -> None:
    """Each token once an epoch, or, where ``leaves_out``, counted as left out."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = Counter({token: num_epochs for row in rows for token in numbered(row)})
    found = tokens_of(itertools.chain.from_iterable(run.stages))
    repeated, missing = found - wanted, wanted - found
    assert not repeated, f"{len(repeated)} repeated, of rows {sorted({token // STRIDE for token in repeated})[:9]}"
    assert missing.total() == run.num_left_out, f"of rows {sorted({token // STRIDE for token in missing})[:9]}"
    assert leaves_out or not missing


@pytest.mark.parametrize("seed", range(12))
def test_any_data_packing_ranks_and_cuts_deliver_every_token_once_an_epoch(tmp_path, seed):
    rng = random.Random(seed)
    path = write(tmp_path / "rows.jsonl", [rng.randint(1, MAX_LENGTH) for _ in range(rng.randint(1, 60))])
    knobs: Knobs = {"seed": seed, "buffer_size": rng.choice([1, 5, 1000])}
    if rng.random() < 0.6:
        knobs["length_grouping"] = LengthGrouping(
            window=rng.choice([1, 3, 16]), method=rng.choice(("karmarkar_karp", "snake", "xtuner"))
        )
    if is_xtuners(knobs) or rng.random() < 0.3:
        knobs |= {"plan_packs": True, "shuffle": "full", "cache": {"folder": ""}}
    knobs["packing"] = random_packing(rng, across_epochs="plan_packs" not in knobs and rng.random() < 0.6)
    stages: list[tuple[Stage, int | None]] = [
        ((rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3]), rng.choice([1, 2])), rng.randint(0, 12)) for _ in range(3)
    ]

    found = through(path, [*stages, ((rng.choice([1, 2, 4]), 1, 1), None)], epochs=3, round_up=False, **knobs)

    check_once(path, found, 3, leaves_out=is_xtuners(knobs))
    assert all(0 < len(pack_tokens) <= MAX_LENGTH for pack_tokens in found.packs)


def random_packing(rng: random.Random, *, across_epochs: bool) -> SoftPacking | HardPacking:
    if rng.random() < 0.3:
        return HardPacking(max_length=MAX_LENGTH, keep_tail=True, across_epochs=across_epochs)

    samples, tokens = rng.choice([1, 4, 30]), rng.choice([1, 100, 600])
    return SoftPacking(max_length=MAX_LENGTH, window_samples=samples, window_tokens=tokens, across_epochs=across_epochs)


RANK: Knobs = {"ranks": {"rank": 1, "world_size": 2, "gradient_accumulation": 2}, "epochs": 2}


def whole_run(path: Path, **knobs: Any) -> list[Batch]:
    with make(path, **knobs) as loader:
        return list(stream(loader))


def next_of(path: Path, state: dict[str, Any], **knobs: Any) -> Batch | None:
    """What comes next in a run that resumes from ``state``."""
    with make(path, **knobs) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        return next(stream(loader), None)


class Interrupts:
    """Each batch is interrupted at some instant, then at a later one, until it is through."""

    error: type[BaseException] = KeyboardInterrupt
    function: Knobs = {}
    settings: Knobs = {}

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.point = self.chance.randrange(13)

    def step(self, loop: Any) -> Batch:
        point, self.point = self.point, self.point + 13 + self.point // 10
        batch: Batch = interrupted_at(point, loop.__next__)
        self.point = self.chance.randrange(13)
        return batch


class Timeouts:
    """The 40th row comes after some calls have timed out."""

    error: type[BaseException] = PrefetchTimeoutError

    def __init__(self) -> None:
        self.gate, self.num_calls = threading.Event(), itertools.count()
        self.function: Knobs = {"tokenize_fn": self.tokenize}
        self.settings: Knobs = {"timeout_s": 0.01, **self.function}

    def tokenize(self, row: dict[str, Any]) -> list[int]:
        if row["id"] == 40:
            self.gate.wait()
        return numbered(row)

    def step(self, loop: Any) -> Batch:
        if next(self.num_calls) >= 60:
            self.gate.set()
        batch: Batch = next(loop)
        return batch


@pytest.mark.thorough
@pytest.mark.parametrize(("knobs", "kind"), each_value(WAYS, {"interrupts": Interrupts, "timeouts": Timeouts}))
def test_the_batch_of_a_call_that_failed_comes_again_and_once_also_after_a_resume(packed_rows, knobs, kind):
    fault, run = kind(), whole_run(packed_rows, **RANK, **knobs)
    found, states, chance = list[Batch](), [], random.Random(1)
    with make(packed_rows, **{**RANK, **knobs, **fault.settings}) as loader:
        loop = iter(loader)
        while len(found) < len(run):
            try:
                found.append(fault.step(loop))
                assert found[-1] == run[len(found) - 1], f"batch {len(found) - 1}, after {len(states)} failures"
            except fault.error:
                states.append((len(found), loader.state_dict()))
                loop = chance.choice([loop, iter(loader)])
            except StopIteration:
                loop = iter(loader)

    assert len(states) >= 5
    for number, state in states[:: max(1, len(states) // 12)]:
        assert next_of(packed_rows, state, **RANK, **knobs, **fault.function) == run[number]


@pytest.mark.thorough
@parametrized({name: knobs for name, knobs in WAYS.items() if name != "not packed"})
def test_a_collate_function_that_asks_for_the_state_is_told_of_the_batch_before(packed_rows, knobs):
    run, states = whole_run(packed_rows, **RANK, **knobs), []

    def collate(items: list[Any]) -> Batch:
        states.append(loader.state_dict())
        return batch_of(items)

    with make(packed_rows, **RANK, **knobs, collate_fn=collate) as loader:
        assert list(stream(loader)) == run
    for number in range(0, len(run), 6):
        assert next_of(packed_rows, states[number], **RANK, **knobs) == run[number]


@pytest.mark.thorough
@parametrized(WAYS)
def test_states_taken_all_the_time_by_another_thread_each_go_on_with_a_batch_and_not_back(packed_rows, knobs):
    run = whole_run(packed_rows, **RANK, **knobs)
    states: list[tuple[int, dict[str, Any], int]] = []
    num_got, is_over = [0], threading.Event()

    with make(packed_rows, **RANK, **knobs) as loader:

        def take() -> None:
            while not is_over.is_set():
                before = num_got[0]
                state = loader.state_dict()
                states.append((before, state, num_got[0] + 1))

        thread = threading.Thread(target=take)
        thread.start()
        for _ in stream(loader):
            num_got[0] += 1
        is_over.set()
        thread.join()

    for first, state, last in states[:: max(1, len(states) // 25)]:
        assert next_of(packed_rows, state, **RANK, **knobs) in [*run, None][first : last + 1]
