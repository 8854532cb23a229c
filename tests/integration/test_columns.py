"""What samples carry: arrays beside the tokens, bit by bit, on every way; and samples of one length."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncdata as ad
from asyncdata.errors import BadRowError, ConfigError, EndOfData, SnapshotMismatchError
from asyncdata.xtuner import XTunerTokenizeFn
from tests.support.column_fns import COLUMNS, columned, plain, values_of
from tests.support.loaders import make as make_loader
from tests.support.loading import SHUFFLE, ids, order_of, write_rows
from tests.support.peers.records import cases_of
from tests.support.peers.rollouts import RESERVE, TOKENIZER
from tests.support.sources import jsonl, write

NUM_ROWS = 90
NUM_SAMPLES = 150  # into the second epoch


def make(path, tokenize_fn=columned, **knobs):
    return make_loader(path, tokenize_fn, **knobs)


def check(samples: list[ad.Sample]) -> list[int]:
    """The ids of samples, whose columns must be those of their rows."""
    for sample in samples:
        wanted, found = values_of(sample.extra["id"]), sample.columns
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (found[name].dtype.str, found[name].flags.writeable) == (value.dtype.str, False)
            assert np.array_equal(found[name], value), (name, sample.extra["id"])
        assert ((sample.labels != -100) == (wanted["loss_weights"] != 0)).all()
    return [sample.extra["id"] for sample in samples]


class OfXTuner:
    columns = COLUMNS

    def __call__(self, row: dict[str, Any]) -> Any:
        return columned(row) if row["id"] % 7 != 3 else {"num_tokens": 0}

    def hash(self) -> str:
        return "1"


WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "workers": {"num_workers": 2},
    "groups": {"n_samples_per_prompt": 2, "num_workers": 1},
    "full shuffle": {"shuffle": "full", "num_workers": 1},
    "little room": {"limits": ad.Limits(max_ready_bytes=1), "num_workers": 1},
    "on ack": {"commit": "on_ack"},
    "an object of XTuner": {"tokenize_fn": XTunerTokenizeFn(f"{__name__}:OfXTuner"), "num_workers": 1},
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
    async with ad.AsyncDataLoader(path, tokenize_fn=columned, shuffle=SHUFFLE, num_workers=2, buffer_size=8) as loader:
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


def test_halves_of_jax_keep_their_bits(path):
    import ml_dtypes

    def halved(row):
        return {"input_ids": [1], "half": np.array([1.5], ml_dtypes.bfloat16)}

    halved.columns = (ad.Column("half", "bfloat16"),)
    with make(path, halved, num_workers=0) as loader:
        assert loader.get_next_batch(1)[0].columns["half"].tolist() == [0x3FC0]


def test_columns_that_a_trainer_makes_up_are_refused_where_they_would_be_lost(path):
    with make(path) as loader:
        (group,) = loader.get_samples(1)
        group[0].columns = {"mine": np.ones(3)}
        with pytest.raises(Exception, match=r"put other values into sample\.extra"):
            loader.add_samples([group])
            loader.state_dict()


def test_parts_of_a_mixture_have_their_own_columns_and_batches_are_padded(path):
    mix = ad.Mix({"with": ad.Part(path, tokenize_fn=columned), "without": ad.Part(path, tokenize_fn=plain)})
    knobs = {"num_workers": 1, "packing": ad.SoftPacking(max_length=16)}
    with make(mix, None, batch_size=8, **knobs) as loader:
        samples = [document.sample for pack in next(iter(loader)) for document in pack]
    check([sample for sample in samples if sample.source_name == "with"])
    lacking = [sample for sample in samples if sample.source_name == "without"]
    assert lacking
    assert all(sample.columns == {} for sample in lacking)

    with make(mix, None, batch_size=4, collate_fn=ad.PackedCollator(max_length=16), **knobs) as loader:
        batch = next(iter(loader))
    assert batch["top"].shape == (4, 16, 2)
    assert (batch["top"][..., 1] - batch["top"][..., 0]).max() == 1
    assert len(batch["size"]) == len(batch["pixels_counts"]) == len(batch["rare"])


@pytest.mark.parametrize("plan_packs", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_packs_have_the_columns_of_their_documents(path, plan_packs, rank):
    knobs = {"packing": ad.SoftPacking(max_length=16), "batch_size": 2, "shuffle": "full", "plan_packs": plan_packs}
    knobs |= {"ranks": {"rank": rank, "world_size": 2}, "num_workers": 1}
    with make(path, collate_fn=ad.PackedCollator(max_length=16), **knobs) as loader:
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
    with make(path, packing=ad.HardPacking(max_length=7), batch_size=1, collate_fn=ad.PackedCollator()) as loader:
        with pytest.raises(ConfigError, match=r"AD452 .* items of pixels, .* use a packing that cuts no samples"):
            list(loader)


def returns(**fields: Any) -> Any:
    def function(row):
        return {"input_ids": [1, 2], **fields}

    return function


X = (ad.Column("x", "int8"),)
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


@pytest.mark.parametrize("columns", ["x", [1], (ad.Column("x", "int8"), ad.Column("x", "int16"))])
def test_what_declares_no_columns_is_refused(path, columns):
    function = returns(x=[1, 2])
    function.columns = columns
    with pytest.raises(ConfigError, match="AD420 "):
        make(path, function).get_next_batch(1)


def test_another_declaration_is_another_function(path):
    functions = [returns(x=[1, 2]), returns(x=[1, 2])]
    functions[0].columns, functions[1].columns = X, (ad.Column("x", "int16"),)
    with make(path, functions[0]) as loader:
        loader.get_next_batch(2)
        state = loader.state_dict()
    with make(path, functions[1]) as loader, pytest.raises(SnapshotMismatchError, match="tokenize_fn"):
        loader.load_state_dict(state)


MAX_LENGTH = 96
NUM_ASKED = 40


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Rows of contexts of any length: some leave room for the question, some do not."""
    rows = [
        {"input": "Mary went home. " * (7 * number % 20), "question": "Where is Mary?", "target": f"home {number}"}
        for number in range(NUM_ASKED)
    ]
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", jsonl(rows))


def make_fixed(path: Path, tokenizer: Path, *, fn: dict[str, Any] | None = None, **settings: Any) -> ad.DataLoader:
    tokenize_fn = ad.FixedLengthTokenizeFn.babilong(str(tokenizer), MAX_LENGTH, **(fn or {}))
    return ad.DataLoader(path, tokenize_fn=tokenize_fn, **{"num_workers": 0, "epochs": 1, **settings})


@pytest.mark.parametrize(
    "collator", [ad.FixedCollator(length=MAX_LENGTH), ad.FixedCollator(length=MAX_LENGTH + 4), ad.PaddedCollator()]
)
def test_the_padding_of_a_sample_is_not_attended(questions, small_tokenizer, collator):
    fn = {"overlong": "truncate_context_left"}
    with make_fixed(questions, small_tokenizer, fn=fn, batch_size=8) as loader:
        samples = [sample for batch in loader for sample in batch]
    with make_fixed(questions, small_tokenizer, fn=fn, batch_size=8, collate_fn=collator) as loader:
        batches = list(loader)

    numbers = [MAX_LENGTH - sample.extra["num_padding"] for sample in samples]
    assert len(set(numbers)) > 5, "rows of many lengths"
    for name, expected in (("attention_mask", [1] * MAX_LENGTH), ("position_ids", list(range(MAX_LENGTH)))):
        rows = [row.tolist() for batch in batches for row in batch[name]]
        assert rows == [expected[:number] + [0] * (len(rows[0]) - number) for number in numbers], name
    rows = [row[:MAX_LENGTH].tolist() for batch in batches for row in batch["input_ids"]]
    assert rows == [sample.tokens.tolist() for sample in samples]


@pytest.mark.parametrize("case", cases_of("babilong_recipe"), ids=str)
def test_rows_of_babilongs_generator_are_what_its_recipe_makes_of_them(tmp_path, case):
    expected = dict(case.delivered(tmp_path))
    (tmp_path / "rows.json").write_text(json.dumps([expected.pop("row")]))
    length = case.given["max_length"]
    fn = ad.FixedLengthTokenizeFn.babilong(TOKENIZER, length, legacy_recipe=True, reserve=RESERVE)
    settings = {"collate_fn": ad.FixedCollator(length=length), "batch_size": 1, "num_workers": 0, "epochs": 1}
    with ad.DataLoader(tmp_path / "rows.json", tokenize_fn=fn, **settings) as loader:
        (batch,) = loader
    assert {name: batch[name][0].tolist() for name in expected} == expected


def lost(samples: list[Any]) -> int:
    return sum(sample.extra["question_lost"] for sample in samples)


def noted(loader: ad.DataLoader) -> int:
    return loader.statistics().noted_total.get("question_lost", 0)


RECIPE = {"fn": {"legacy_recipe": True, "reserve": 16}, "epochs": 2}


@pytest.mark.parametrize("num_before", [0, 7, NUM_ASKED, NUM_ASKED + 13])
def test_lost_questions_are_counted_at_their_delivery_and_once_over_a_resume(questions, small_tokenizer, num_before):
    with make_fixed(questions, small_tokenizer, **RECIPE) as loader:
        before = loader.get_next_batch(num_before) if num_before else []
        assert noted(loader) == lost(before)
        state = json.loads(json.dumps(loader.state_dict()))

    with make_fixed(questions, small_tokenizer, **RECIPE) as loader:
        loader.load_state_dict(state)
        assert noted(loader) == lost(before)
        after = loader.get_next_batch(2 * NUM_ASKED - num_before)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        assert 0 < noted(loader) == lost(before + after) < 2 * NUM_ASKED
        flat, dropped = loader.statistics().to_dict(), loader.statistics().dropped_total

    counted, cut = (flat[f"asyncdata_noted_{name}_total"] for name in ("question_lost", "truncated"))
    assert counted == lost(before + after) <= cut
    assert dropped == {}, "they are samples"


def test_what_is_not_acknowledged_is_counted_again_a_state_without_notes_counts_from_none(questions, small_tokenizer):
    with make_fixed(questions, small_tokenizer, commit="on_ack", **RECIPE) as loader:
        done = loader.get_next_batch(11)
        loader.ack(done)
        loader.get_next_batch(9)
        state = loader.state_dict()

    for counted in (lost(done), 0):
        with make_fixed(questions, small_tokenizer, commit="on_ack", **RECIPE) as loader:
            loader.load_state_dict(state)
            assert noted(loader) == counted
            again = loader.get_next_batch(2 * NUM_ASKED - 11)
            assert noted(loader) == counted + lost(again)
        state["counters"].pop("notes", None)


def test_a_rank_counts_the_rows_that_it_tokenizes(questions, small_tokenizer):
    knobs = {**RECIPE, "epochs": 1, "shuffle": ad.RowShuffle(only_kept=True), "batch_size": 2}
    samples, total = [], 0
    for rank in range(2):
        with make_fixed(questions, small_tokenizer, ranks=ad.Ranks(rank=rank, world_size=2), **knobs) as loader:
            mine = [sample for batch in loader for sample in batch]
            assert noted(loader) == lost(mine)
            total += noted(loader)
            samples += mine
    assert len(samples) == NUM_ASKED
    assert total == lost(samples) > 0


COUNTS = sys.getrefcount


@pytest.mark.parametrize("fewer", [1, 2, 3])
def test_samples_that_are_kept_stay_as_they_are_where_references_are_borrowed(tmp_path, monkeypatch, fewer):
    """CPython 3.14 counts no reference of a local variable that it loads."""
    monkeypatch.setattr(sys, "getrefcount", lambda value: COUNTS(value) - fewer)
    path = write_rows(tmp_path / "rows.jsonl", 3000)
    with make_loader(path, num_workers=1, epochs=2, buffer_size=64) as loader:
        kept = [loader.get_next_batch(50) for _ in range(100)]
    assert [number for batch in kept for number in ids(batch)] == order_of(path, 2)[:5000]
    assert all(sample.tokens.dtype == np.int32 for batch in kept for sample in batch)
