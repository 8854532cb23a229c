"""Loops over packs: what an epoch is, what its end does, what is left out and counted, and what is refused."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncdata import BadRows, Column, HardPacking, LengthGrouping, PackedCollator, PaddedCollator, Sample, SoftPacking
from asyncdata.core.columns import Columns
from asyncdata.errors import BadRowError, ConfigError, NoSamplesError, SnapshotMismatchError, TooManyBadRowsError
from asyncdata.xtuner import XTunerCollator
from tests.support import ranks as support
from tests.support.ranks import GROUPING, HARD, MAX_LENGTH, SOFT, WAYS, Batch, Ranks, lengths, make, stream, write

Knobs = dict[str, Any]

NUM_TOKENS = 2000
"""No multiple of MAX_LENGTH: hard packing has a tail."""

SIZES = lengths(NUM_TOKENS, MAX_LENGTH - 4)
EACH_ONCE = Counter(dict(enumerate(SIZES)))
BY_EPOCH = SoftPacking(max_length=MAX_LENGTH, window_samples=8, window_tokens=2 * MAX_LENGTH)
HARD_BY_EPOCH = HardPacking(max_length=MAX_LENGTH)
WITH_TAIL = HardPacking(max_length=MAX_LENGTH, keep_tail=True)
PLANNED: Knobs = {"shuffle": "full", "plan_packs": True, "cache": {"folder": ""}}
RANK: Knobs = {"ranks": {"gradient_accumulation": 2}, "epochs": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", SIZES)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """Rows that fill no pack together."""
    return write(tmp_path_factory.mktemp("few") / "few.jsonl", [5, 6, 7])


def tokens_of(batches: Iterable[Batch]) -> Counter[int]:
    """How many tokens of each row there are."""
    return Counter(token // support.STRIDE for batch in batches for token in batch.tokens)


def rows_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [[document[0] // support.STRIDE for document in pack] for batch in batches for pack in batch.packs]


def loops(path: Path, number: int = 1, **knobs: Any) -> list[list[Batch]]:
    with make(path, **knobs) as loader:
        return [list(loader) for _ in range(number)]


def packs(path: Path, **knobs: Any) -> list[list[int]]:
    return rows_of(*loops(path, **knobs))


def state_after(path: Path, num_batches: int, **knobs: Any) -> dict[str, Any]:
    with make(path, **knobs) as loader:
        assert len(list(itertools.islice(loader, num_batches))) == num_batches
        return loader.state_dict()


@pytest.mark.parametrize("packing", [BY_EPOCH, WITH_TAIL], ids=["soft", "hard"])
@pytest.mark.parametrize("grouping", [None, GROUPING], ids=["as they come", "grouped"])
def test_each_loop_has_every_token_once_and_planned_packs_are_those_made_as_rows_come(path, few, packing, grouping):
    knobs = {"packing": packing, "length_grouping": grouping}
    found, (short,) = loops(path, 3, **knobs), loops(few, **knobs)
    assert [tokens_of(loop) for loop in found] == [EACH_ONCE] * 3
    assert found[0] != found[1]
    assert tokens_of(short) == Counter({0: 5, 1: 6, 2: 7})
    number = 1 if grouping else 2  # grouped packs of a later epoch are ordered by other draws
    unplanned = {**PLANNED, "plan_packs": False}
    assert loops(path, number, **knobs, **PLANNED) == loops(path, number, **knobs, **unplanned)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, PLANNED], ids=["as they come", "planned"])
def test_grouped_packs_come_in_one_order_for_each_global_batch(path, settings):
    def order(batch_size: int, steps: int) -> list[list[int]]:
        grouped = {**settings, "packing": BY_EPOCH, "length_grouping": GROUPING}
        return packs(path, batch_size=batch_size, ranks={"gradient_accumulation": steps}, **grouped)

    orders = {steps: order(1, steps) for steps in (1, 2, 4, 6)}
    for batch_size, steps in ((2, 1), (2, 2), (4, 1), (2, 3), (3, 2), (6, 1)):
        assert order(batch_size, steps) == orders[batch_size * steps]
    assert len({str(found) for found in orders.values()}) == len(orders)
    assert len({str(sorted(found)) for found in orders.values()}) == 1, "the packs themselves are the same"


def test_threads_that_iterate_get_every_pack_once_in_order(path):
    (whole,) = loops(path, packing=BY_EPOCH)
    with make(path, packing=BY_EPOCH) as loader, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(list, [iter(loader)] * 4))
    assert Counter(itertools.chain(*found)) == Counter(whole)
    for batches in found:
        places = iter(whole)
        assert all(batch in places for batch in batches)


def test_set_epoch_after_a_batch_that_failed_counts_none_of_its_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", [30, None, 10, None])
    with make(path, packing=HARD, shuffle=False, bad_rows=BadRows(policy="skip", max=1)) as loader:
        with pytest.raises(TooManyBadRowsError):
            next(iter(loader))
        before = loader.state_dict()["counters"]
        loader.set_epoch(1)
        assert loader.state_dict()["counters"] == before
        assert before["num_bad_rows"] == before["num_samples"] == 0


def test_a_loop_runs_on_until_a_hard_pack_is_full_unless_its_epoch_was_named(few):
    with make(few, packing=HARD) as loader:
        assert [[len(batch.tokens) for batch in loader] for _ in range(2)] == [[MAX_LENGTH]] * 2
        assert loader.epoch == 8
    with make(few, packing=HARD) as loader:
        found = []
        for epoch in range(8):
            loader.set_epoch(epoch)
            found.append(len(list(loader)))
    assert found == [0, 0, 0, 1, 0, 0, 0, 1]


def test_the_end_of_data_has_no_packs_left_and_more_epochs_go_on(path):
    with make(path, packing=BY_EPOCH, epochs=1) as loader:
        assert list(loader)
        state = loader.state_dict()
        assert [list(loader), list(loader)] == [[], []]
    for epochs, tokens in ((1, Counter[int]()), (2, EACH_ONCE)):
        with make(path, packing=BY_EPOCH, epochs=epochs) as loader:
            loader.load_state_dict(state)
            assert tokens_of(loader) == tokens


def test_a_collate_fn_is_given_packs_of_documents_with_their_samples(path):
    with make(path, packing=SOFT, batch_size=2, collate_fn=PackedCollator()) as loader:
        batch = next(iter(loader))
    with make(path, packing=SOFT, batch_size=2, collate_fn=None) as loader:
        document = next(iter(loader))[0][0]
    assert batch["input_ids"].shape == (2, MAX_LENGTH)
    assert batch["cu_seqlens"][-1] == 2 * MAX_LENGTH
    assert document.sample.position is not None
    assert list(document.tokens) == list(document.sample.tokens)


@pytest.mark.parametrize("knobs", [{}, PLANNED], ids=["online", "planned"])
def test_rows_have_the_packings_length_and_room_for_a_dummy(path, knobs):
    knobs = {"packing": BY_EPOCH, "batch_size": 2, **knobs}
    dummy = Sample(tokens=np.arange(3, dtype=np.int32))
    dummy.columns = Columns({Column("pixels", "float32", "item"): np.zeros(1, np.float32)})
    with make(path, collate_fn=PackedCollator(dummy=dummy, segment_multiple_of=2), **knobs) as loader:
        assert next(iter(loader))["input_ids"].shape == (2, MAX_LENGTH + 4)
    with make(path, collate_fn=XTunerCollator(), **knobs) as loader:
        assert [item["shifted_labels"].shape for item in next(iter(loader))] == [(1, MAX_LENGTH)] * 2
    for collate in (PackedCollator(max_length=MAX_LENGTH + 1), XTunerCollator(max_length=MAX_LENGTH - 1)):
        with pytest.raises(ConfigError, match="^AD450 SoftPacking has max_length=64, and .*leave it out of the coll"):
            make(path, collate_fn=collate, **knobs)


def test_samples_of_like_length_are_computed_together_without_packing(path):
    num_batches, grouping = -(-len(SIZES) // 4), {"length_grouping": GROUPING, "epochs": 1}
    with make(path, ranks={"world_size": 4}, collate_fn=PaddedCollator(), **grouping) as loader:
        assert len([batch["input_ids"].shape for batch in loader]) == num_batches
    with make(path, batch_size=8, **grouping) as loader:
        assert tokens_of(loader) == EACH_ONCE


@pytest.mark.parametrize("packing", [SOFT, BY_EPOCH], ids=["across epochs", "by epoch"])
def test_packs_that_fill_no_batch_are_dropped_and_counted(path, tmp_path, packing):
    with make(path, packing=packing, batch_size=5, epochs=2, drop_last=True) as loader:
        batches = list(stream(loader))
        now = loader.statistics()
    assert {len(batch.packs) for batch in batches} == {5}
    num_samples = sum(map(len, rows_of(batches)))
    assert now.unpacked_samples_total["drop_last"] == 2 * len(SIZES) - num_samples > 0
    assert now.unpacked_tokens_total["drop_last"] + now.packed_tokens_total == 2 * NUM_TOKENS
    (exactly_full,) = loops(write(tmp_path / "rows.jsonl", [60, 61]), packing=packing, batch_size=2, drop_last=True)
    assert [len(batch.packs) for batch in exactly_full] == [2]


def test_a_last_batch_is_filled_with_its_own_packs_so_that_all_ranks_have_one_or_is_not(tmp_path):
    path = write(tmp_path / "rows.jsonl", [60, 61, 62, 63, 64])
    found = []
    for round_up in (None, False):
        knobs: Knobs = {"packing": SOFT, "epochs": 1, "shuffle": False, "round_up": round_up, "batch_size": 2}
        with Ranks(path, 2, **knobs) as ranks:
            found.append([[rows_of([batch] if batch else []) for batch in step.batches] for step in ranks.steps()])
    first = [[[0], [2]], [[1], [3]]]
    assert found == [[first, [[[4], [4]], [[4], [4]]]], [first, [[[4]], []]]]


@pytest.mark.parametrize(
    ("knobs", "last", "dropped"),
    [({}, [[4], [4]], {}), ({"round_up": False}, [[1], []], {}), ({"drop_last": True}, [[], []], {"drop_last": 1})],
)
def test_the_last_batch_of_ranks_without_packing_is_filled_or_dropped(tmp_path, knobs, last, dropped):
    with Ranks(write(tmp_path / "rows.jsonl", [1] * 17), 2, batch_size=4, epochs=1, **knobs) as ranks:
        steps = list(ranks.steps())
        assert ranks.loaders[0].statistics().dropped_total == dropped
    sizes = [[len(step.batches[rank].packs) for step in steps if step.batches[rank]] for rank in range(2)]
    assert sizes == [[4, 4, *some] for some in last]


def resumed_often(path: Path, every: int, **knobs: Any) -> tuple[list[Batch], Any]:
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


@pytest.mark.parametrize("every", [10_000, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("overlong", ["drop", "truncate_right"])
def test_overlong_and_empty_samples_are_counted_once(tmp_path, overlong, every):
    sizes = [0 if number % 9 == 4 else 100 if number % 7 == 3 else 20 for number in range(80)]
    path, packing = write(tmp_path / "rows.jsonl", sizes), SoftPacking(max_length=MAX_LENGTH, overlong=overlong)
    found, loader = resumed_often(path, every, packing=packing, length_grouping=GROUPING, epochs=2)

    now, num_long = loader.statistics(), sizes.count(100)
    lost = 100 * num_long if overlong == "drop" else (100 - MAX_LENGTH) * num_long
    dropped = {"overlong": 2 * num_long} if overlong == "drop" else {}
    assert now.unpacked_samples_total == {"empty": 2 * sizes.count(0), **dropped}
    assert now.unpacked_tokens_total == {"overlong" if overlong == "drop" else "truncated": 2 * lost}
    assert sum(len(batch.tokens) for batch in found) == now.packed_tokens_total == 2 * (sum(sizes) - lost)
    metrics = loader.metrics()
    assert 0 < metrics.pop("data/wait_share") <= 1
    assert metrics == {
        "data/epoch": 2,
        "data/samples": now.samples_total,
        "data/tokens": now.tokens_total,
        "data/dropped": 2 * sizes.count(0) + sum(dropped.values()),
        "data/pack_fill": now.packed_tokens_total / (now.packs_total * MAX_LENGTH),
    }
    assert loader.metrics()["data/wait_share"] == 0, "since the last call"


def fails_on_each_tenth(row: dict[str, Any]) -> list[int] | None:
    if row["id"] % 10 == 3:
        raise ValueError("it is no good")

    return None if row["id"] % 10 == 7 else support.numbered(row)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [10_000, 3], ids=["in one go", "resumed often"])
@pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
def test_bad_and_dropped_rows_are_passed_over_and_counted_once(path, knobs, every):
    kept = {row: 2 * size for row, size in enumerate(SIZES) if row % 10 not in {3, 7}}
    settings = {"tokenize_fn": fails_on_each_tenth, "bad_rows": "skip", "epochs": 2}
    found, loader = resumed_often(path, every, **settings, **knobs)
    missing = (Counter(kept) - tokens_of(found)).total()
    assert missing == (sum(kept.values()) % MAX_LENGTH if knobs.get("packing") is HARD else 0)
    now = loader.statistics()
    if knobs.get("plan_packs"):
        assert sum(now.excluded_rows.values()) == len(SIZES) - len(kept)
    else:
        assert now.bad_rows_total == 2 * sum(row % 10 == 3 for row in range(len(SIZES)))


LONG = [20] * 50 + [MAX_LENGTH + 1] + [20] * 10
STOPS: dict[str, tuple[list[int], Knobs, type[Exception], str]] = {
    "a sample too long for a pack": (
        LONG,
        {"packing": SoftPacking(max_length=MAX_LENGTH, overlong="error")},
        ConfigError,
        r"AD450 .*rows\.jsonl:51 \(byte ",
    ),
    **{
        f"a bad row, {name}": (SIZES, {**knobs, "tokenize_fn": fails_on_each_tenth}, BadRowError, "AD421 .*no good")
        for name, knobs in support.PACKED.items()
    },
    "all of them are": (
        [100, 200, 300],
        {"packing": SoftPacking(max_length=64, overlong="drop")},
        NoSamplesError,
        "AD401 epoch 0: no sample could be packed: 3 by overlong; give the packing a larger max_length",
    ),
    **{
        f"none has a token, {name}": ([0] * 30, knobs, NoSamplesError, "AD401")
        for name, knobs in WAYS.items()
        if knobs and "plan_packs" not in knobs
    },
    "fewer packs than a batch, the rest of which is dropped": (
        [5, 6, 7],
        {"packing": SOFT, "epochs": 1, "drop_last": True, "batch_size": 2},
        NoSamplesError,
        "AD406 epoch 0 has 1 pack",
    ),
    **{
        f"no hard pack is full, {name}": ([5, 6, 7], knobs, ConfigError, f"AD453 .* {n} tokens.*max_length=64.*keep_t")
        for name, n, knobs in (
            ("in an epoch", 18, {"packing": HARD_BY_EPOCH}),
            ("in an epoch, grouped", 18, {"packing": HARD_BY_EPOCH, "length_grouping": GROUPING}),
            ("in two epochs", 18, {"packing": HARD_BY_EPOCH, "epochs": 2}),
            ("in one for all", 18, {"packing": HARD, "epochs": 1}),
            ("in three for all", 54, {"packing": HARD, "epochs": 3, "length_grouping": GROUPING}),
        )
    },
}


@pytest.mark.parametrize(("sizes", "knobs", "error", "message"), STOPS.values(), ids=STOPS)
def test_a_loop_is_stopped_and_again_and_after_a_resume_if(tmp_path, sizes, knobs, error, message):
    path = write(tmp_path / "rows.jsonl", sizes)
    with make(path, **{"shuffle": False, **knobs}) as loader:
        for _ in range(2):
            with pytest.raises(error, match=message):
                list(loader)
        state = loader.state_dict()
    with make(path, **{"shuffle": False, **knobs}) as loader:
        loader.load_state_dict(state)
        with pytest.raises(error):
            list(loader)


def test_a_hard_pack_that_fills_over_several_epochs_is_no_error(few):
    with make(few, packing=HARD, epochs=5) as loader:
        assert len(list(loader)) == 1
        assert list(loader) == []
        assert loader.statistics().unpacked_tokens_total == {"tail": 5 * 18 - MAX_LENGTH}


def test_a_state_holds_no_tokens_and_survives_json_and_a_file(path, tmp_path):
    knobs: Knobs = {"packing": SOFT, "length_grouping": LengthGrouping(window=4), "epochs": 2}
    with make(path, **knobs) as loader:
        list(loader)
        state = json.dumps(loader.state_dict())
        loader.save(saved := tmp_path / "run.snapshot")
        rest = list(loader)

    assert len(json.dumps(json.loads(state)["packing"])) < 4000
    for load in (lambda one: one.load_state_dict(json.loads(state)), lambda one: one.restore(saved)):
        with make(path, **knobs) as loader:
            load(loader)
            assert loader.epoch == 1
            assert list(loader) == rest


def test_a_state_of_another_packing_or_grouping_is_refused_by_name(path):
    others: list[Knobs] = [
        {"packing": SOFT, "length_grouping": GROUPING},
        {"packing": HARD},
        {"packing": BY_EPOCH},
        {"packing": SoftPacking(max_length=MAX_LENGTH, window_samples=9, window_tokens=2 * MAX_LENGTH)},
        {"packing": SoftPacking(max_length=MAX_LENGTH + 1, window_samples=8, window_tokens=2 * MAX_LENGTH)},
        {"packing": WITH_TAIL},
        {"length_grouping": GROUPING},
        {"length_grouping": LengthGrouping(window=9)},
        {},
    ]
    states = [state_after(path, 1, **RANK, **knobs) for knobs in others]

    for here, knobs in enumerate(others):
        with make(path, **RANK, **knobs) as loader:
            for there, state in enumerate(states):
                if here != there:
                    with pytest.raises(SnapshotMismatchError, match=r"packing|length_grouping"):
                        loader.load_state_dict(state)
            loader.load_state_dict(states[here])


@pytest.mark.parametrize(("allowed", "other"), [("seed", {"seed": 7}), ("order", {"packing": HARD_BY_EPOCH})])
def test_where_another_seed_or_packing_is_allowed_the_next_epoch_begins(path, allowed, other):
    state = state_after(path, 1, **RANK, **support.PACKED["soft"])
    with make(path, **RANK | support.PACKED["soft"] | other) as loader:
        loader.load_state_dict(state, allow_changed={allowed})
        assert loader.epoch == 1
        found = list(stream(loader))
    with make(path, **RANK | support.PACKED["soft"] | other) as loader:
        loader.set_epoch(1)
        assert list(stream(loader)) == found


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"n_samples_per_prompt": 2}, "n_samples_per_prompt"),
        ({"commit": "on_ack"}, "on_ack"),
        ({"buffer_filter": lambda buffer, number: buffer[:number]}, "buffer_filter"),
        ({"batch_size": None}, "batch_size"),
        ({"ranks": {"rank": 2, "world_size": 2}}, "counted from 0"),
        ({"ranks": {"rank": 1}}, "counted from 0"),
    ],
)
def test_settings_that_do_not_go_with_packing_are_refused(path, knobs, named):
    with pytest.raises(ConfigError, match=named):
        make(path, packing=SOFT, **knobs)


@pytest.mark.parametrize("knobs", [{"packing": SOFT}, {"ranks": {"world_size": 2}}, {"length_grouping": GROUPING}])
def test_calls_of_rollouts_say_that_batches_come_from_a_loop(path, knobs):
    with make(path, **knobs) as loader:
        for call in (loader.get_next_batch, loader.get_samples, loader.add_samples):
            with pytest.raises(ConfigError, match="come from a `for` loop"):
                call(2)
