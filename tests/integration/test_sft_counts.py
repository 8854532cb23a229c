"""What packing leaves out is counted, once; what cannot be packed, or does not fit a state, is said."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRowError,
    ConfigError,
    HardPacking,
    LengthGrouping,
    NoSamplesError,
    SnapshotMismatchError,
    SoftPacking,
)
from tests.support.combinations import each_pair
from tests.support.ranks import (
    GROUPING,
    HARD,
    MAX_LENGTH,
    PACKED,
    SOFT,
    WAYS,
    Batch,
    Ranks,
    lengths,
    make,
    numbered,
    stream,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import DataLoader

pytestmark = pytest.mark.thorough

Knobs = dict[str, Any]

NUM_TOKENS = 2000
"""No multiple of MAX_LENGTH: hard packing has a tail."""

RANK: Knobs = {"ranks": {"gradient_accumulation": 2}, "epochs": 2}

ways = pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
packed_ways = pytest.mark.parametrize("knobs", PACKED.values(), ids=PACKED)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", lengths(NUM_TOKENS, MAX_LENGTH - 4))


# What is left out is counted


def check_conserved(loader: DataLoader, num_tokens: int, **reasons: int) -> None:
    now = loader.statistics()
    left_out = sum(now.unpacked_tokens_total.values())
    assert now.packed_tokens_total + left_out == num_tokens, now.unpacked_tokens_total
    assert {name: now.unpacked_tokens_total.get(name, 0) for name in reasons} == reasons


def resumed_often(path: Path, every: int, **knobs: Any) -> tuple[list[Batch], DataLoader]:
    """A run that is resumed in a new loader again and again; its batches, and the last loader, closed."""
    found: list[Batch] = []
    state = None
    while True:
        with make(path, **knobs) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = list(itertools.islice(stream(loader), every))
            state = json.loads(json.dumps(loader.state_dict()))
        found += batches
        if len(batches) < every:
            return found, loader


@pytest.mark.parametrize(
    ("knobs", "drop_last", "every"), each_pair(PACKED, [False, True], {"in one go": 10_000, "resumed often": 5})
)
def test_tokens_are_delivered_or_counted(path, knobs, drop_last, every):
    settings = {**RANK, "batch_size": 3, "drop_last": drop_last}
    found, loader = resumed_often(path, every, **settings, **knobs)

    check_conserved(loader, 2 * NUM_TOKENS)
    assert loader.statistics().packed_tokens_total == sum(len(batch.tokens) for batch in found)
    if knobs["packing"] is HARD:
        assert loader.statistics().unpacked_tokens_total["tail"] == 2 * NUM_TOKENS % MAX_LENGTH


@pytest.mark.parametrize("every", [10_000, 4], ids=["in one go", "resumed often"])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_overlong_and_empty_samples_are_counted_once(tmp_path, overlong, every):
    sizes = [0 if number % 9 == 4 else 100 if number % 7 == 3 else 20 for number in range(80)]
    path, packing = write(tmp_path / "rows.jsonl", sizes), SoftPacking(max_length=MAX_LENGTH, overlong=overlong)
    found, loader = resumed_often(path, every, packing=packing, length_grouping=GROUPING, epochs=2)

    num_long, num_empty = sizes.count(100), sizes.count(0)
    lost = 100 * num_long if overlong == "drop" else (100 - MAX_LENGTH) * num_long
    now = loader.statistics()
    assert now.unpacked_samples_total.get("overlong", 0) == (2 * num_long if overlong == "drop" else 0)
    assert now.unpacked_samples_total["empty"] == 2 * num_empty
    check_conserved(loader, 2 * sum(sizes), **{"overlong" if overlong == "drop" else "truncated": 2 * lost})
    assert sum(len(batch.tokens) for batch in found) == 2 * (sum(sizes) - lost)


def fails_on_each_tenth(row: dict[str, Any]) -> list[int] | None:
    if row["id"] % 10 == 3:
        raise ValueError("a bad row")

    return None if row["id"] % 10 == 7 else numbered(row)


@pytest.mark.parametrize("every", [10_000, 3], ids=["in one go", "resumed often"])
@ways
def test_bad_and_dropped_rows_are_passed_over_and_counted_once(path, knobs, every):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if row["id"] % 10 not in {3, 7}]
    settings = {"tokenize_fn": fails_on_each_tenth, "bad_rows": "skip", "epochs": 2}

    found, loader = resumed_often(path, every, **settings, **knobs)

    wanted = Counter({token: 2 for row in kept for token in numbered(row)})
    missing = (wanted - Counter(token for batch in found for token in batch.tokens)).total()
    assert missing == (wanted.total() % MAX_LENGTH if knobs.get("packing") is HARD else 0)
    num_bad = sum(row["id"] % 10 == 3 for row in rows)
    if knobs.get("plan_packs"):
        assert sum(loader.statistics().excluded_rows.values()) == len(rows) - len(kept)
    else:
        assert loader.statistics().bad_rows_total == 2 * num_bad


@packed_ways
def test_a_bad_row_stops_at_its_turn_each_time_it_is_asked_for_and_after_a_resume(path, knobs):
    settings = {"tokenize_fn": fails_on_each_tenth, **knobs}
    with make(path, **settings) as loader:
        loop, found = iter(loader), []
        with pytest.raises(BadRowError):
            found += loop
        with pytest.raises(BadRowError):
            next(loop)
        with pytest.raises(BadRowError):
            next(iter(loader))
        state = loader.state_dict()

    with make(path, **settings) as loader:
        loader.load_state_dict(state)
        with pytest.raises(BadRowError):
            next(iter(loader))


def test_an_overlong_sample_is_an_error_each_time_and_takes_nothing(tmp_path):
    path = write(tmp_path / "rows.jsonl", [20] * 50 + [MAX_LENGTH + 1] + [20] * 10)
    with make(path, packing=SOFT, shuffle=False) as loader:
        loop, found = iter(loader), []
        for _ in range(3):
            with pytest.raises(ConfigError, match="AD450"):
                found += loop
        state = loader.state_dict()

    with make(path, packing=SOFT, shuffle=False) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="AD450"):
            next(iter(loader))


def test_data_of_which_nothing_can_be_packed_is_an_error_and_no_endless_loop(tmp_path):
    path = write(tmp_path / "rows.jsonl", [0] * 30)
    for knobs in ({"packing": SOFT}, {"packing": HARD}, {"length_grouping": GROUPING}):
        with make(path, **knobs) as loader, pytest.raises(NoSamplesError):
            next(iter(loader))


# Ranks


@pytest.mark.parametrize(("knobs", "num_rows", "world_size"), each_pair(WAYS, [1, 2, 3, 7], [2, 8]))
def test_few_rows_give_each_rank_as_many_batches_and_every_row_is_in_one(tmp_path, knobs, num_rows, world_size):
    path = write(tmp_path / "rows.jsonl", [MAX_LENGTH - number for number in range(num_rows)])
    with Ranks(path, world_size, epochs=2, **knobs) as ranks:
        steps = list(ranks.steps())

    assert steps
    assert all(batch is not None for step in steps for batch in step.batches)
    seen = {token for step in steps for batch in step.batches if batch for token in batch.tokens}
    if knobs.get("packing") is not HARD:
        assert seen == {token for number in range(num_rows) for token in numbered({"id": number, "n": 64 - number})}


@ways
def test_set_epoch_goes_to_the_start_of_an_epoch(path, knobs):
    with make(path, **knobs) as loader:
        loader.set_epoch(3)
        far = list(itertools.islice(stream(loader), 5))
        assert loader.epoch >= 3
    with make(path, **knobs) as loader:
        list(itertools.islice(stream(loader), 3))
        loader.set_epoch(3)
        assert [batch.packs for batch in itertools.islice(stream(loader), 5)] == [batch.packs for batch in far]


def test_calls_for_single_samples_are_refused_where_batches_are_shared(path):
    def refused(**knobs: Any) -> Callable[[Callable[[DataLoader], object]], None]:
        def check(call: Callable[[DataLoader], object]) -> None:
            with make(path, **knobs) as loader, pytest.raises(ConfigError):
                call(loader)

        return check

    for check in (refused(packing=SOFT), refused(ranks={"world_size": 2}), refused(length_grouping=GROUPING)):
        check(lambda loader: loader.get_next_batch(4))
        check(lambda loader: loader.get_samples(4))
        check(lambda loader: loader.add_samples([]))


# Other settings


def test_a_state_of_another_packing_or_grouping_is_refused(path):
    others = [
        *WAYS.values(),
        {"packing": SoftPacking(max_length=MAX_LENGTH, window_samples=9, window_tokens=2 * MAX_LENGTH)},
        {"packing": SoftPacking(max_length=MAX_LENGTH + 1, window_samples=8, window_tokens=2 * MAX_LENGTH)},
        {"packing": HardPacking(max_length=MAX_LENGTH, keep_tail=True)},
        {"length_grouping": LengthGrouping(window=9)},
    ]
    states = []
    for knobs in others:
        with make(path, **RANK, **knobs) as loader:
            next(iter(loader))
            states.append(loader.state_dict())

    for (here, knobs), (there, state) in itertools.product(enumerate(others), enumerate(states)):
        with make(path, **RANK, **knobs) as loader:
            if here == there:
                loader.load_state_dict(state)
                continue

            with pytest.raises(SnapshotMismatchError, match=r"packing|length_grouping"):
                loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("allowed", "other"),
    [("seed", {"seed": 7}), ("order", {"packing": HardPacking(max_length=50, across_epochs=False)})],
)
@packed_ways
def test_where_another_seed_or_packing_is_allowed_the_next_epoch_begins(path, knobs, allowed, other):
    with make(path, **RANK, **knobs) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(path, **RANK | knobs | other) as loader:
        loader.load_state_dict(state, allow_changed={allowed})
        assert loader.epoch == 1
        found = list(stream(loader))
    with make(path, **RANK | knobs | other) as loader:
        loader.set_epoch(1)
        assert list(stream(loader)) == found
