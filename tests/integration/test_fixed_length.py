"""Samples of one length through a loader: what attention sees of them, and what is counted of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, FixedCollator, FixedLengthTokenizeFn, PaddedCollator, Ranks, RowShuffle
from asyncdata.errors import EndOfData
from tests.support.peers.babilong import RESERVE
from tests.support.peers.records import cases_of
from tests.support.peers.rollouts import TOKENIZER

if TYPE_CHECKING:
    from pathlib import Path

MAX_LENGTH = 96
NUM_ROWS = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Rows of contexts of any length: some leave room for the question, some do not."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {"input": "Mary went home. " * (7 * number % 20), "question": "Where is Mary?", "target": f"home {number}"}
        for number in range(NUM_ROWS)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def make(path: Path, tokenizer: Path, *, fn: dict[str, Any] | None = None, **settings: Any) -> DataLoader:
    tokenize_fn = FixedLengthTokenizeFn.babilong(str(tokenizer), MAX_LENGTH, **(fn or {}))
    return DataLoader(path, tokenize_fn=tokenize_fn, **{"num_workers": 0, "epochs": 1, **settings})


@pytest.mark.parametrize(
    "collator", [FixedCollator(length=MAX_LENGTH), FixedCollator(length=MAX_LENGTH + 4), PaddedCollator()]
)
def test_the_padding_of_a_sample_is_not_attended(path, small_tokenizer, collator):
    fn = {"overlong": "truncate_context_left"}
    with make(path, small_tokenizer, fn=fn, batch_size=8) as loader:
        samples = [sample for batch in loader for sample in batch]
    with make(path, small_tokenizer, fn=fn, batch_size=8, collate_fn=collator) as loader:
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
    fn = FixedLengthTokenizeFn.babilong(TOKENIZER, length, legacy_recipe=True, reserve=RESERVE)
    settings = {"collate_fn": FixedCollator(length=length), "batch_size": 1, "num_workers": 0, "epochs": 1}
    with DataLoader(tmp_path / "rows.json", tokenize_fn=fn, **settings) as loader:
        (batch,) = loader

    assert {name: batch[name][0].tolist() for name in expected} == expected


def lost(samples: list[Any]) -> int:
    return sum(sample.extra["question_lost"] for sample in samples)


def noted(loader: DataLoader) -> int:
    return loader.statistics().noted_total.get("question_lost", 0)


RECIPE = {"fn": {"legacy_recipe": True, "reserve": 16}, "epochs": 2}


@pytest.mark.parametrize("num_before", [0, 7, NUM_ROWS, NUM_ROWS + 13])
def test_lost_questions_are_counted_as_they_are_delivered_and_once_over_a_resume(path, small_tokenizer, num_before):
    with make(path, small_tokenizer, **RECIPE) as loader:
        before = loader.get_next_batch(num_before) if num_before else []
        assert noted(loader) == lost(before)
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, small_tokenizer, **RECIPE) as loader:
        loader.load_state_dict(state)
        assert noted(loader) == lost(before)
        after = loader.get_next_batch(2 * NUM_ROWS - num_before)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        assert 0 < noted(loader) == lost(before + after) < 2 * NUM_ROWS
        flat, dropped = loader.statistics().to_dict(), loader.statistics().dropped_total

    counted, cut = (flat[f"asyncdata_noted_{name}_total"] for name in ("question_lost", "truncated"))
    assert counted == lost(before + after) <= cut
    assert dropped == {}, "they are samples"


def test_what_was_not_acknowledged_is_counted_again_and_a_state_from_before_notes_counts_from_none(
    path, small_tokenizer
):
    with make(path, small_tokenizer, commit="on_ack", **RECIPE) as loader:
        done = loader.get_next_batch(11)
        loader.ack(done)
        loader.get_next_batch(9)
        state = loader.state_dict()

    for counted in (lost(done), 0):
        with make(path, small_tokenizer, commit="on_ack", **RECIPE) as loader:
            loader.load_state_dict(state)
            assert noted(loader) == counted
            again = loader.get_next_batch(2 * NUM_ROWS - 11)
            assert noted(loader) == counted + lost(again)
        state["counters"].pop("notes", None)


def test_a_rank_counts_the_rows_that_it_tokenizes(path, small_tokenizer):
    knobs = {**RECIPE, "epochs": 1, "shuffle": RowShuffle(only_kept=True), "batch_size": 2}
    samples, total = [], 0
    for rank in range(2):
        with make(path, small_tokenizer, ranks=Ranks(rank=rank, world_size=2), **knobs) as loader:
            mine = [sample for batch in loader for sample in batch]
            assert noted(loader) == lost(mine)
            total += noted(loader)
            samples += mine

    assert len(samples) == NUM_ROWS
    assert total == lost(samples) > 0
