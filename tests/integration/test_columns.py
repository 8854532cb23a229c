"""Arrays beside the tokens come with their sample, bit by bit, on every way that a sample can take."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from asyncdata import (
    AsyncDataLoader,
    Column,
    DataLoader,
    HardPacking,
    Limits,
    Mix,
    PackedCollator,
    Part,
    Sample,
    SoftPacking,
)
from asyncdata.errors import BadRowError, ConfigError, SnapshotMismatchError
from asyncdata.xtuner import XTunerTokenizeFn
from tests.support.columned import COLUMNS, columned, plain, values_of
from tests.support.loading import SHUFFLE

NUM_ROWS = 90
NUM_SAMPLES = 150  # into the second epoch


def make(path, tokenize_fn=columned, **knobs):
    return DataLoader(path, tokenize_fn=tokenize_fn, **{"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs)


def check(samples: list[Sample]) -> list[int]:
    """The ids of samples, whose columns must be those of their rows."""
    for sample in samples:
        wanted, found = values_of(sample.extra["id"]), sample.columns
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (found[name].dtype.str, found[name].flags.writeable) == (value.dtype.str, False)
            assert np.array_equal(found[name], value), (name, sample.extra["id"])
        assert ((sample.labels != -100) == (wanted["loss_weights"] != 0)).all()
    return [sample.extra["id"] for sample in samples]


WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "workers": {"num_workers": 2},
    "groups": {"n_samples_per_prompt": 2, "num_workers": 1},
    "full shuffle": {"shuffle": "full", "num_workers": 1},
    "little room": {"limits": Limits(max_ready_bytes=1), "num_workers": 1},
    "on ack": {"commit": "on_ack"},
}


@pytest.mark.parametrize("way", WAYS)
def test_columns_are_those_of_the_row_and_after_a_restart_those_that_would_have_come(path, way):
    knobs = WAYS[way]
    with make(path, **knobs) as loader:
        whole = check(loader.get_next_batch(NUM_SAMPLES))
    with make(path, **knobs) as loader:
        check(loader.get_next_batch(36))
        loader.ack()
        state = json.loads(json.dumps(loader.state_dict()))
    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        assert check(loader.get_next_batch(NUM_SAMPLES - 36)) == whole[36:]


@pytest.mark.asyncio
async def test_a_batch_that_is_held_keeps_its_columns_while_others_come(path):
    async with AsyncDataLoader(path, tokenize_fn=columned, shuffle=SHUFFLE, num_workers=2, buffer_size=8) as loader:
        held = [await loader.get_next_batch(10) for _ in range(40)]
    for batch in held:
        check(batch)


def test_groups_in_the_rollout_buffer_keep_their_columns_through_a_snapshot(path):
    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        check([sample for group in groups for sample in group])
        loader.add_samples(groups)
        state = json.loads(json.dumps(loader.state_dict()))
    with make(path, n_samples_per_prompt=2) as loader:
        loader.load_state_dict(state)
        back = [sample for group in loader.get_samples(3) for sample in group]
    assert check(back) == [sample.extra["id"] for group in groups for sample in group]
    assert back[0].columns["half"].dtype.metadata == {"dtype": "bfloat16"}


def test_columns_that_a_trainer_makes_up_are_refused_where_they_would_be_lost(path):
    with make(path) as loader:
        (group,) = loader.get_samples(1)
        group[0].columns = {"mine": np.ones(3)}
        with pytest.raises(Exception, match=r"put other values into sample\.extra"):
            loader.add_samples([group])
            loader.state_dict()


def test_parts_of_a_mixture_have_their_own_columns_and_batches_are_padded(path):
    mix = Mix({"with": Part(path, tokenize_fn=columned), "without": Part(path, tokenize_fn=plain)})
    with DataLoader(mix, num_workers=1, batch_size=8, packing=SoftPacking(max_length=16), timeout_s=240) as loader:
        samples = [document.sample for pack in next(iter(loader)) for document in pack]
    check([sample for sample in samples if sample.source_name == "with"])
    lacking = [sample for sample in samples if sample.source_name == "without"]
    assert lacking
    assert all(sample.columns == {} for sample in lacking)

    collate = PackedCollator(max_length=16)
    with DataLoader(
        mix, num_workers=1, batch_size=4, packing=SoftPacking(max_length=16), collate_fn=collate, timeout_s=240
    ) as loader:
        batch = next(iter(loader))
    assert batch["top"].shape == (4, 16, 2)
    assert (batch["top"][..., 1] - batch["top"][..., 0]).max() == 1
    assert len(batch["size"]) == len(batch["pixels_counts"]) == len(batch["rare"])


@pytest.mark.parametrize("plan_packs", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_packs_have_the_columns_of_their_documents(path, plan_packs, rank):
    knobs = {"packing": SoftPacking(max_length=16), "batch_size": 2, "shuffle": "full", "plan_packs": plan_packs}
    knobs |= {"ranks": {"rank": rank, "world_size": 2}, "num_workers": 1, "collate_fn": PackedCollator(max_length=16)}
    with make(path, **knobs) as loader:
        batches = list(loader)
    assert len(batches) > 3
    for batch in batches:
        is_token = batch["seq_idx"] >= 0
        assert (batch["top"][..., 0] == np.where(is_token, batch["input_ids"], -1)).all()
        assert ((batch["loss_weights"] > 0) >= (batch["labels"] != -100)).all()
        numbers = batch["size"][:, 0]
        assert batch["pixels_counts"].tolist() == (numbers % 3).tolist()
        assert batch["rare"].tolist() == np.where(numbers % 4 == 0, numbers, -1).tolist()


def test_a_packing_that_cuts_samples_cannot_have_items(path):
    with make(path, packing=HardPacking(max_length=7), batch_size=1, collate_fn=PackedCollator(max_length=7)) as loader:
        with pytest.raises(ConfigError, match=r"AD452 .* items of pixels, .* use a packing that cuts no samples"):
            list(loader)


def returns(**fields: Any) -> Any:
    def function(row):
        return {"input_ids": [1, 2], **fields}

    return function


X = (Column("x", "int8"),)
BAD = [
    (returns(), X, r"AD425 .* a dict without 'x', which the function declares; or declare it optional=True"),
    (returns(x=[1]), X, r"AD425 .* x has the shape \(1,\), and must have \(2,\)"),
    (returns(x=[1, 999]), X, "AD425 .* which int8 cannot hold"),
    (returns(y=np.ones(2)), (), r"AD425 .* 'y' is an array; declare it, .* \(Column\('y', 'float32'\),\)"),
    (returns(y=b"12"), (), "AD425 .* 'y' is an array; declare it"),
    (
        returns(loss_weights=[0, 0.5]),
        (),
        r"AD425 .* declare tokenize_fn.columns = \(Column\('loss_weights', 'float32',",
    ),
]


@pytest.mark.parametrize(("function", "columns", "reason"), BAD, ids=range(len(BAD)))
def test_a_value_that_does_not_fit_is_a_bad_row_that_says_so(path, function, columns, reason):
    function.columns = columns
    with make(path, function) as loader, pytest.raises(BadRowError, match=reason):
        loader.get_next_batch(1)


@pytest.mark.parametrize("columns", ["x", [1], (Column("x", "int8"), Column("x", "int16"))])
def test_what_declares_no_columns_is_refused(path, columns):
    function = returns(x=[1, 2])
    function.columns = columns
    with pytest.raises(ConfigError, match="AD420 "):
        make(path, function).get_next_batch(1)


def test_another_declaration_is_another_function(path):
    functions = [returns(x=[1, 2]), returns(x=[1, 2])]
    functions[0].columns, functions[1].columns = X, (Column("x", "int16"),)
    with make(path, functions[0]) as loader:
        loader.get_next_batch(2)
        state = loader.state_dict()
    with make(path, functions[1]) as loader, pytest.raises(SnapshotMismatchError, match="tokenize_fn"):
        loader.load_state_dict(state)


class OfXTuner:
    columns = COLUMNS

    def __call__(self, row: dict[str, Any]) -> Any:
        return columned(row) if row["id"] % 7 != 3 else {"num_tokens": 0}

    def hash(self) -> str:
        return "1"


def test_an_object_of_xtuner_may_declare_columns_too(path):
    with make(path, XTunerTokenizeFn(f"{__name__}:OfXTuner"), num_workers=1) as loader:
        check(loader.get_next_batch(20))
