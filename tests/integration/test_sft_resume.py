"""Packed batches for several ranks: a resumed run is the uninterrupted one, and ranks may come and go at a restart."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import HardPacking, LengthGrouping, RowShuffle, SoftPacking, XTunerPacking
from tests.support.combinations import each_value
from tests.support.ranks import STRIDE, Batch, Ranks, Step, lengths, make, numbered, settled, stream, tokens_of, write

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Knobs = dict[str, Any]

MAX_LENGTH = 64
NUM_CUTS = 40
STEPS_PER_EPOCH = 16

SOFT = SoftPacking(max_length=MAX_LENGTH, window_samples=8, window_tokens=2 * MAX_LENGTH, across_epochs=True)
SOFT_BY_EPOCH = SoftPacking(max_length=MAX_LENGTH, window_samples=8, window_tokens=2 * MAX_LENGTH, across_epochs=False)
HARD = HardPacking(max_length=MAX_LENGTH, across_epochs=True)
HARD_BY_EPOCH = HardPacking(max_length=MAX_LENGTH, across_epochs=False, keep_tail=True)
GROUPED: Knobs = {"length_grouping": LengthGrouping(window=8)}
XTUNERS_GROUPING: Knobs = {"length_grouping": LengthGrouping(method="xtuner")}

PACKED: dict[str, Knobs] = {
    "soft": {"packing": SOFT},
    "soft, grouped": {"packing": SOFT, **GROUPED},
    "soft, each epoch by itself": {"packing": SOFT_BY_EPOCH},
    "soft, each epoch by itself, grouped": {"packing": SOFT_BY_EPOCH, **GROUPED},
    "hard": {"packing": HARD},
    "hard, grouped": {"packing": HARD, **GROUPED},
    "hard, each epoch by itself, grouped": {"packing": HARD_BY_EPOCH, **GROUPED},
    "soft, rows in full order": {"packing": SOFT, "shuffle": "full", "cache": {"folder": ""}, **GROUPED},
}
PLANNED: dict[str, Knobs] = {
    "planned, soft": {"packing": SOFT_BY_EPOCH, "plan_packs": True},
    "planned, soft, grouped": {"packing": SOFT_BY_EPOCH, "plan_packs": True, **GROUPED},
    "planned, hard, grouped": {"packing": HARD_BY_EPOCH, "plan_packs": True, **GROUPED},
    "planned, soft, grouped as XTuner does": {"packing": SOFT_BY_EPOCH, **XTUNERS_GROUPING},
    "XTuner's soft packs": {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=3)},
    "XTuner's soft packs and grouping": {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=3), **XTUNERS_GROUPING},
    "XTuner's hard packs": {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=3, kind="hard")},
}
PACKED |= {name: {"shuffle": "full", "cache": {"folder": ""}, **way} for name, way in PLANNED.items()}
UNPACKED: dict[str, Knobs] = {
    "not packed": {},
    "not packed, grouped": GROUPED,
    "not packed, planned, grouped": {"plan_packs": True, "shuffle": "full", "cache": {"folder": ""}, **GROUPED},
    "not packed, rows in full order": {"shuffle": "full", "cache": {"folder": ""}},
    "not packed, rows in full order of kept ones": {"shuffle": RowShuffle(only_kept=True), "cache": {"folder": ""}},
}

RACED = ("soft, grouped", "planned, soft, grouped", "XTuner's soft packs and grouping", "not packed, planned, grouped")

# Of each packing, of each grouping, and of each order of rows one.
WITH_WORKERS = ("soft", "soft, each epoch by itself, grouped", "hard, grouped", "soft, rows in full order", *RACED)
SLOW = pytest.mark.slow


def is_xtuners(way: Knobs) -> bool:
    """Whether an epoch is rounded to whole steps, and loses packs where it is rounded down."""
    grouping = way.get("length_grouping")
    return isinstance(way.get("packing"), XTunerPacking) or (grouping is not None and grouping.method == "xtuner")


def is_by_epoch(name: str, way: Knobs) -> bool:
    return not is_xtuners(way) and any(words in name for words in ("each epoch by itself", "planned", "not packed"))


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


every_cut = pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])


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


# Resume


@pytest.mark.thorough
@every_cut
@parametrized(PACKED | UNPACKED)
def test_resumed_at_any_of_40_cuts_in_epochs_of_16_steps_the_batches_are_those_of_the_uninterrupted_run(
    packed_rows, plain_rows, knobs, every
):
    is_packed = "packing" in knobs
    ends = check_cuts(packed_rows if is_packed else plain_rows, 12, every, batch_size=1 if is_packed else 2, **knobs)

    assert len(ends) == 2, "two epochs end between the cuts"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "knobs", [pytest.param(way, id=name, marks=() if name in WITH_WORKERS else SLOW) for name, way in PACKED.items()]
)
def test_batches_depend_neither_on_workers_nor_on_read_ahead(packed_rows, knobs):
    few, _ = run(packed_rows, 24, buffer_size=3, **knobs)
    many, _ = run(packed_rows, 24, tokenize_fn="tests.support.ranks:numbered", num_workers=1, **knobs)

    assert [step.batches for step in few] == [step.batches for step in many]


@pytest.mark.thorough
def test_a_state_from_behind_a_loop_and_one_from_behind_its_last_batch_go_on_alike(packed_rows):
    for knobs in PACKED.values():
        with make(packed_rows, **knobs) as loader:
            loop = iter(loader)
            for _ in range(10_000):
                behind_batch = loader.state_dict()
                if next(loop, None) is None:
                    break
            behind_loop = loader.state_dict()
            wanted = next(iter(loader))

        for state in (behind_batch, behind_loop):
            with make(packed_rows, **knobs) as loader:
                loader.load_state_dict(state)
                assert next(stream(loader)) == wanted


def test_a_file_of_the_state_serves_every_rank(packed_rows, tmp_path):
    steps, _ = run(packed_rows, 30, **PACKED["soft, grouped"])
    with Ranks(packed_rows, 2, steps[19].state, gradient_accumulation=2, **PACKED["soft, grouped"]) as ranks:
        ranks.loaders[1].save(tmp_path / "state")

    for rank in range(2):
        with make(
            packed_rows, ranks={"rank": rank, "world_size": 2, "gradient_accumulation": 2}, **PACKED["soft, grouped"]
        ) as loader:
            loader.restore(tmp_path / "state")
            found = list(itertools.islice(stream(loader), 10))
        assert_same(found, [step.batches[rank] for step in steps[20:30]], f"rank {rank}")


@pytest.mark.thorough
@parametrized({name: (PACKED | UNPACKED)[name] for name in RACED})
def test_a_state_that_is_loaded_while_the_loader_starts_is_gone_on_with_as_well(packed_rows, knobs):
    """Whether its threads have begun something or not, nothing of that is left."""
    settings: Knobs = {"ranks": {"world_size": 3, "round_up": False}, "epochs": 2, **knobs}
    steps, _ = run(packed_rows, 5, **knobs)
    loader = make(packed_rows, **settings)
    loader.load_state_dict(steps[5].state)
    with loader:
        wanted = list(stream(loader))
    for _ in range(4):
        with make(packed_rows, **settings) as loader:
            loader.load_state_dict(steps[5].state)
            assert list(stream(loader)) == wanted


# Elastic

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
        """The tokens of each pack."""
        batches = [batch for steps in self.stages for step in steps for batch in step.batches if batch]
        return [list(itertools.chain.from_iterable(pack)) for batch in batches for pack in batch.packs]


def through(path: Path, stages: Iterable[tuple[Stage, int | None]], **knobs: Any) -> Run:
    """The steps of a run that is resumed by other ranks at each stage, from the state of the last rank."""
    state, found, num_left_out = None, [], 0
    for (world_size, batch_size, accumulation), num_steps in stages:
        with Ranks(path, world_size, state, batch_size, gradient_accumulation=accumulation, **knobs) as ranks:
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


STAGES: list[list[tuple[Stage, int | None]]] = [
    [((2, 1, 2), 9), ((4, 1, 2), 5), ((8, 1, 2), None)],
    [((2, 1, 2), 7), ((2, 2, 2), 3), ((4, 2, 1), None)],
    [((8, 1, 1), 3), ((3, 1, 3), 0), ((2, 1, 1), 11), ((1, 5, 1), 2), ((3, 2, 1), None)],
]
ELASTIC = {" to ".join(f"{w}x{b}x{a}" for (w, b, a), _ in stages): stages for stages in STAGES}


@pytest.mark.thorough
@pytest.mark.parametrize(("knobs", "stages"), each_value(PACKED | UNPACKED, ELASTIC))
def test_ranks_and_batches_may_change_at_a_restart_and_no_sample_is_repeated_or_missing(packed_rows, knobs, stages):
    found = through(packed_rows, stages, epochs=2, round_up=False, **knobs)

    check_once(packed_rows, found, 2, leaves_out=is_xtuners(knobs))


@pytest.mark.parametrize("seed", range(20))
def test_any_data_packing_ranks_and_cuts_deliver_every_token_once_an_epoch(tmp_path, seed):
    rng = random.Random(seed)
    path = write(tmp_path / "rows.jsonl", [rng.randint(1, MAX_LENGTH) for _ in range(rng.randint(1, 60))])
    knobs: Knobs = {"seed": seed, "buffer_size": rng.choice([1, 5, 1000])}
    if rng.random() < 0.6:
        knobs["length_grouping"] = LengthGrouping(window=rng.choice([1, 3, 16]), method=rng.choice(METHODS))
    if is_xtuners(knobs) or rng.random() < 0.3:
        knobs |= {"plan_packs": True, "shuffle": "full", "cache": {"folder": ""}}
    knobs["packing"] = random_packing(rng, across_epochs="plan_packs" not in knobs and rng.random() < 0.6)
    stages: list[tuple[Stage, int | None]] = [
        ((rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3]), rng.choice([1, 2])), rng.randint(0, 12)) for _ in range(3)
    ]

    found = through(path, [*stages, ((rng.choice([1, 2, 4]), 1, 1), None)], epochs=3, round_up=False, **knobs)

    check_once(path, found, 3, leaves_out=is_xtuners(knobs))
    assert all(0 < len(pack_tokens) <= MAX_LENGTH for pack_tokens in found.packs)


METHODS = ("karmarkar_karp", "snake", "xtuner")


def random_packing(rng: random.Random, *, across_epochs: bool) -> SoftPacking | HardPacking:
    if rng.random() < 0.3:
        return HardPacking(max_length=MAX_LENGTH, keep_tail=True, across_epochs=across_epochs)

    samples, tokens = rng.choice([1, 4, 30]), rng.choice([1, 100, 600])
    return SoftPacking(max_length=MAX_LENGTH, window_samples=samples, window_tokens=tokens, across_epochs=across_epochs)


# Whole runs


@pytest.mark.thorough
@parametrized({name: way for name, way in (PACKED | UNPACKED).items() if is_by_epoch(name, way)})
def test_where_epochs_are_not_packed_together_each_has_every_sample_once(packed_rows, knobs):
    with Ranks(packed_rows, 2, epochs=3, round_up=False, **knobs) as ranks:
        steps = list(ranks.steps())

    for first, end in itertools.pairwise([0, *ranks.ends[:3]]):
        check_once(packed_rows, Run([steps[first:end]], 0), 1)


@pytest.mark.thorough
@parametrized({name: PACKED[name] for name in PACKED if "hard" not in name} | UNPACKED)
def test_where_samples_are_not_cut_each_document_is_a_whole_sample(packed_rows, knobs):
    rows = {row["id"]: numbered(row) for row in map(json.loads, packed_rows.read_text().splitlines())}

    found = through(packed_rows, [((2, 1, 1), None)], epochs=2, round_up=False, **knobs)

    batches = [batch for step in found.stages[0] for batch in step.batches if batch]
    documents = [document for batch in batches for pack in batch.packs for document in pack]
    assert all(document == rows[document[0] // STRIDE] for document in documents)
