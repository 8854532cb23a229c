"""A loop over packs is an epoch: it has every sample, whatever is packed and grouped, and leaves none for the next."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, HardPacking, LengthGrouping, Ranks, SnapshotMismatchError, SoftPacking

if TYPE_CHECKING:
    from pathlib import Path

MAX_LENGTH = 64
NUM_ROWS = 1280
LENGTHS = [1 + row * 7 % 23 for row in range(NUM_ROWS)]

WAYS: dict[str, dict[str, Any]] = {
    "soft": {"packing": SoftPacking(max_length=MAX_LENGTH)},
    "soft, grouped": {"packing": SoftPacking(max_length=MAX_LENGTH), "length_grouping": LengthGrouping()},
    "hard": {"packing": HardPacking(max_length=MAX_LENGTH, keep_tail=True)},
    "hard, grouped": {
        "packing": HardPacking(max_length=MAX_LENGTH, keep_tail=True),
        "length_grouping": LengthGrouping(),
    },
}


def repeated(row: dict[str, Any]) -> dict[str, Any]:
    """As many tokens as the row asks for, all of them its number."""
    return {"input_ids": [row["id"]] * row["n"]}


repeated.version = "1"  # type: ignore[attr-defined]


def written(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join(json.dumps({"id": row, "n": n}) + "\n" for row, n in enumerate(lengths)))
    return path


def make(path: Path, **given: Any) -> DataLoader:
    return DataLoader(path, **{"tokenize_fn": repeated, "batch_size": 1, "num_workers": 0, "timeout_s": 240, **given})


def tokens_of(loop: Any) -> Counter[int]:
    """How many tokens of each row a loop has."""
    found: Counter[int] = Counter()
    for batch in loop:
        for document in (document for pack in batch for document in pack):
            found[int(document.tokens[0])] += len(document.tokens)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_each_loop_has_every_token_once(tmp_path: Path, way: str) -> None:
    with make(written(tmp_path / "rows.jsonl", LENGTHS), **WAYS[way]) as loader:
        loops = [tokens_of(loader) for _ in range(3)]
        epoch = loader.epoch

    assert loops == [Counter(dict(enumerate(LENGTHS)))] * 3
    assert epoch == 3


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_first_loop_of_all_ranks_has_every_token_where_packs_are_grouped(tmp_path: Path, way: str) -> None:
    path, world_size = written(tmp_path / "rows.jsonl", LENGTHS), 4

    loops, num_batches = [], []
    for rank in range(world_size):
        with make(path, **WAYS[way], ranks=Ranks(rank=rank, world_size=world_size)) as loader:
            batches = list(loader)
        loops.append(tokens_of(batches))
        num_batches.append(len(batches))

    together = sum(loops, Counter[int]())
    assert all(together[row] >= length for row, length in enumerate(LENGTHS))
    assert len(set(num_batches)) == 1
    # What comes twice fills the last batch of all ranks.
    assert together.total() - sum(LENGTHS) <= (world_size - 1) * MAX_LENGTH


def test_a_run_of_packs_that_went_on_into_the_next_epoch_is_told_the_setting_of_then(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", LENGTHS)
    with make(path, packing=SoftPacking(max_length=MAX_LENGTH, across_epochs=True)) as loader:
        next(iter(loader))
        state = loader.state_dict()

    with (
        make(path, packing=SoftPacking(max_length=MAX_LENGTH)) as loader,
        pytest.raises(SnapshotMismatchError, match=r"packing\.across_epochs"),
    ):
        loader.load_state_dict(state)


# Packs of exactly one length, of fewer tokens than one.

FEW = [5, 6, 7]


@pytest.mark.parametrize(
    ("packing", "epochs"),
    [
        (HardPacking(max_length=MAX_LENGTH), None),
        (HardPacking(max_length=MAX_LENGTH), 2),
        (HardPacking(max_length=MAX_LENGTH, across_epochs=True), 1),
        (HardPacking(max_length=MAX_LENGTH, across_epochs=True), 3),
    ],
)
@pytest.mark.parametrize("grouping", [None, LengthGrouping(window=2)])
def test_hard_packs_of_fewer_tokens_than_one_are_an_error_that_says_so(
    tmp_path: Path, packing: HardPacking, epochs: int | None, grouping: LengthGrouping | None
) -> None:
    path = written(tmp_path / "few.jsonl", FEW)
    given: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    num_tokens = sum(FEW) * (epochs or 1) if packing.across_epochs else sum(FEW)

    with (
        make(path, packing=packing, length_grouping=grouping, **given) as loader,
        pytest.raises(ConfigError, match=rf"AD453 .* {num_tokens} tokens.*max_length={MAX_LENGTH}.*keep_tail=True"),
    ):
        list(loader)


def test_hard_packs_of_fewer_tokens_than_one_are_an_error_at_each_loop(tmp_path: Path) -> None:
    with make(written(tmp_path / "few.jsonl", FEW), packing=HardPacking(max_length=MAX_LENGTH)) as loader:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"AD453 epoch 0: all its samples together have 18 tokens"):
                list(loader)


def test_a_hard_pack_that_fills_over_several_epochs_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", FEW)
    with make(path, packing=HardPacking(max_length=MAX_LENGTH, across_epochs=True), epochs=5) as loader:
        assert len(list(loader)) == 1
        assert list(loader) == []
        assert loader.statistics().unpacked_tokens_total == {"tail": 5 * sum(FEW) - MAX_LENGTH}


def test_the_short_pack_of_few_tokens_is_kept_where_the_tail_is(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", FEW)
    with make(path, packing=HardPacking(max_length=MAX_LENGTH, keep_tail=True)) as loader:
        assert [tokens_of(loader) for _ in range(2)] == [Counter(dict(enumerate(FEW)))] * 2
