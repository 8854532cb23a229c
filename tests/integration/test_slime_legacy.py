"""Slime's own data source beside ours: the same prompts, order, numbers and epochs, whatever is asked for."""

from __future__ import annotations

import copy
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.combinations import each_pair
from tests.support.slime_source import no_rollout, slimes_source, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

EPOCHS = 5
NUM_STEPS = 2000
SIZES = (1, 2, 3, 7, 100)
SEEDS = (0, 42, -3)


def content(groups: list[list[Any]]) -> list[list[dict[str, Any]]]:
    """Everything that is in them; ours and slime's may be of two classes."""
    return [[sample.to_dict() for sample in group] for group in groups]


def place(source: Any) -> tuple[int, int, int, int]:
    return source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index


def ragged(chance: random.Random, offset: int, num_rows: int) -> int:
    """How many to ask for: slime is right as long as a request does not end beyond the next epoch."""
    return chance.choice([1, 1, 2, chance.randint(1, num_rows), num_rows, num_rows - offset or 1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_rows", "num_workers", "shuffled", "seed"),
    [
        *each_pair(SIZES, [0, 1, 2], [True, False], SEEDS),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product([10_000], [0, 1, 2], [True, False], SEEDS)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(SIZES, [4], [True, False], SEEDS)),
    ],
)
def test_five_epochs_in_ragged_requests_are_alike(tmp_path, small_tokenizer, num_rows, num_workers, shuffled, seed):
    path = write_prompts(tmp_path / "p.jsonl", num_rows)
    given = {
        "rollout_shuffle": shuffled,
        "rollout_seed": seed,
        "n_samples_per_prompt": 2,
        "hf_checkpoint": str(small_tokenizer),
    }
    theirs = slimes_source(path, **given)
    chance = random.Random(num_rows * 31 + seed)
    with source_of(path, **given, asyncdata_num_workers=num_workers) as ours:
        assert len(ours) == len(theirs) == num_rows
        while theirs.epoch_id < EPOCHS:
            number = ragged(chance, theirs.sample_offset, num_rows)
            assert content(ours.get_samples(number)) == content(theirs.get_samples(number))
            assert place(ours) == place(theirs)


@pytest.mark.parametrize("rows", ["@[0:3]", "@[3:]", "@[:4]", "@[-3:]", "@[:-2]", "@[1:-1]", "@[:]"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_slices_are_alike_also_where_lines_are_broken(tmp_path, small_tokenizer, rows, shuffled):
    path = write_prompts(tmp_path / "p.jsonl", 12, {2: b"{", 5: b" ", 11: b'{"input": 1'})
    given = {"rollout_shuffle": shuffled, "hf_checkpoint": str(small_tokenizer)}
    theirs = slimes_source(Path(f"{path}{rows}"), **given)
    with source_of(f"{path}{rows}", **given) as ours:
        assert len(ours) == len(theirs)
        for number in (1, 2, 3, 3, 1, 2):
            assert content(ours.get_samples(number)) == content(theirs.get_samples(number))
            assert place(ours) == place(theirs)


@pytest.mark.parametrize("max_length", [4, 5, 100])
def test_prompts_that_are_too_long_leave_the_permutation_alike(tmp_path, small_tokenizer, max_length):
    path = write_prompts(tmp_path / "p.jsonl", 120)
    given = {"rollout_shuffle": True, "hf_checkpoint": str(small_tokenizer), "rollout_max_prompt_len": max_length}
    theirs = slimes_source(path, **given)
    assert 0 < len(theirs) <= 120
    with source_of(path, **given) as ours:
        assert len(ours) == len(theirs)
        for _ in range(3):
            assert content(ours.get_samples(len(theirs))) == content(theirs.get_samples(len(theirs)))


class Right:
    """slime's data source, without what is wrong with it: a request is filled over as many epochs as it takes."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def get_samples(self, number: int) -> list[Any]:
        groups: list[Any] = []
        while len(groups) < number:
            left = number - len(groups)
            room = len(self.source) - self.source.sample_offset % len(self.source) + self.source.get_buffer_length()
            groups += self.source.get_samples(min(left, room))
        return groups


def test_two_thousand_steps_of_taking_and_giving_back_are_alike(tmp_path, small_tokenizer):
    path = write_prompts(tmp_path / "p.jsonl", 23)
    given = {"rollout_shuffle": True, "n_samples_per_prompt": 3, "hf_checkpoint": str(small_tokenizer)}
    chance = random.Random(7)
    theirs = Right(slimes_source(path, **given))
    out: list[tuple[Any, Any]] = []
    num_different = num_served = num_beyond_an_epoch = 0
    with source_of(path, **given, asyncdata_num_workers=1) as ours:
        for _ in range(NUM_STEPS):
            if out and chance.random() < 0.4:
                back = chance.sample(out, chance.randint(1, min(6, len(out))))
                for pair in back:
                    out.remove(pair)
                    for sample in (*pair[0], *pair[1]):
                        sample.response += "x" * (sample.index % 3)
                ours.add_samples([pair[0] for pair in back])
                theirs.source.add_samples([pair[1] for pair in back])
            else:
                number = chance.choice([0, 1, 2, 5, 23, 24, 60])
                num_beyond_an_epoch += number > 46
                one, other = ours.get_samples(number), theirs.get_samples(number)
                num_different += content(one) != content(other) or place(ours) != place(theirs.source)
                num_served += len(one)
                out = (out + list(zip(one, other, strict=True)))[-40:]
            num_different += content(ours.buffer) != content(theirs.source.buffer)

    assert num_different == 0
    assert num_served > NUM_STEPS
    assert num_beyond_an_epoch > 0


def test_what_slime_does_wrong_is_right_here(tmp_path, small_tokenizer):
    """If slime mends it, this test says so, and the request may be compared like any other."""
    path = write_prompts(tmp_path / "p.jsonl", 3)
    theirs = slimes_source(path, hf_checkpoint=str(small_tokenizer))

    assert len(theirs.get_samples(8)) < 8
    with source_of(path) as ours:
        groups = ours.get_samples(8)
        assert [group[0].label for group in groups] == list("01201201")
        assert (ours.epoch_id, ours.sample_offset) == (2, 2)
        assert copy.deepcopy(groups) == groups


@pytest.mark.parametrize("rows", ["", "@[1:-2]"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_parquet_is_alike(tmp_path, small_tokenizer, shuffled, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = list(range(50))
    columns = {
        "input": [f"prompt {i}" for i in numbers],
        "label": [str(i) for i in numbers],
        "metadata": [{"row": i} for i in numbers],
    }
    path = tmp_path / "p.parquet"
    parquet.write_table(arrow.table(columns), path, row_group_size=7)
    given = {"rollout_shuffle": shuffled, "n_samples_per_prompt": 2, "hf_checkpoint": str(small_tokenizer)}
    theirs = slimes_source(Path(f"{path}{rows}"), **given)
    with source_of(f"{path}{rows}", **given, asyncdata_num_workers=1) as ours:
        assert len(ours) == len(theirs)
        for number in (20, len(theirs), 3, 60):
            assert content(ours.get_samples(number)) == content(Right(theirs).get_samples(number))
            assert place(ours) == place(theirs)
