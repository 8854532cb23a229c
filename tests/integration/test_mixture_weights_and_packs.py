"""Weights of a mixture that change at a restart while samples wait to be packed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, HardPacking, Mix, Part, Shuffle, SnapshotMismatchError, SoftPacking
from tests.support.loading import write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"code": 61, "math": 97, "chat": 23}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, number in SIZES.items():
        write_rows(tmp_path / f"{name}.jsonl", number, {n: {"prompt": name * (n % 5)} for n in range(number)})
    return tmp_path


def mix_of(data: Path, by: Any, **weights: int) -> Mix:
    """A mixture in a mixture, so that the change is one of both."""
    inner = Mix({name: Part(data / f"{name}.jsonl", weight=weights[name]) for name in ("math", "chat")}, quota=5)
    parts = {"text": Part(inner, weight=weights["text"]), "code": Part(data / "code.jsonl", weight=weights["code"])}
    return Mix(parts, by=by, quota=10, on_mix_change="apply")


FIRST = {"text": 3, "code": 2, "math": 1, "chat": 1}
SECOND = {"text": 1, "code": 4, "math": 0, "chat": 1}
THIRD = {"text": 1, "code": 1, "math": 3, "chat": 1}


def make(mix: Mix, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": id_and_text, "num_workers": 0, "shuffle": SHUFFLE, "timeout_s": 240}
    return DataLoader(mix, **settings | knobs)


def packs_of(batch: list[Any]) -> list[list[list[int]]]:
    return [[document.tokens.tolist() for document in pack] for pack in batch]


def packed_alone(packing: Any, samples: list[Any]) -> list[list[list[int]]]:
    """The packs of these samples, by a packer that has seen all of them at once."""
    packs = packing.open().extend([len(sample.tokens) for sample in samples], range(len(samples)))
    return [[samples[number].tokens[start:stop].tolist() for number, start, stop in pack] for pack in packs]


def saved(loader: DataLoader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def chosen(data: Path, by: str, changes: list[tuple[int, dict[str, int]]], number: int) -> list[Any]:
    """The first samples, where the weights change at these positions: without packs, so that nothing is read again."""
    samples: list[Any] = []
    state = None
    for (_, weights), stop in zip(changes, [*(start for start, _ in changes[1:]), number], strict=True):
        with make(mix_of(data, by, **weights)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            if stop > len(samples):
                samples += loader.get_next_batch(stop - len(samples))
            state = saved(loader)
    return samples


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize(
    "packing", [SoftPacking(max_length=160, window_samples=20), HardPacking(max_length=96)], ids=["soft", "hard"]
)
def test_open_packs_stay_what_they_were_and_the_new_weights_hold_from_there_on(data: Path, by: str, packing: Any):
    knobs: dict[str, Any] = {"packing": packing, "batch_size": 2, "collate_fn": packs_of}
    states, whole = [], []
    with make(mix_of(data, by, **FIRST), **knobs) as loader:
        batches = iter(loader)
        for _ in range(14):
            states.append(saved(loader))
            whole.append(next(batches))

    for step in range(0, 14, 3):
        first_change = states[step]["mixture"]["at"]
        with make(mix_of(data, by, **SECOND), **knobs) as loader:
            loader.load_state_dict(states[step])
            again = saved(loader)  # nothing was taken yet: the change is still to come
            found = next(iter(loader))
            later = saved(loader)
        wanted = packed_alone(packing, chosen(data, by, [(0, FIRST), (first_change, SECOND)], first_change + 150))
        num_gone = sum(map(len, whole[:step]))
        assert found == wanted[num_gone : num_gone + 2]
        with make(mix_of(data, by, **SECOND), **knobs) as loader:
            loader.load_state_dict(again)
            batches = iter(loader)
            assert [next(batches), next(batches)] == [wanted[num_gone : num_gone + 2], wanted[num_gone + 2 :][:2]]

        for state, before in ((again, num_gone), (later, num_gone + 2)):
            second_change = max(first_change, state["mixture"]["at"])
            changes = [(0, FIRST), (first_change, SECOND), (second_change, THIRD)]
            with make(mix_of(data, by, **THIRD), **knobs) as loader:
                loader.load_state_dict(state)
                batches = iter(loader)
                found = [*next(batches), *next(batches)]
            wanted_then = packed_alone(packing, chosen(data, by, changes, second_change + 150))
            assert found == wanted_then[before : before + 4]


def test_a_part_that_is_gone_while_its_samples_wait_is_refused(data: Path) -> None:
    knobs: dict[str, Any] = {"packing": SoftPacking(max_length=160), "batch_size": 2, "collate_fn": packs_of}
    with make(mix_of(data, "rows", **FIRST), **knobs) as loader:
        next(iter(loader))
        state = saved(loader)
    rest = Mix({"code": data / "code.jsonl"}, on_mix_change="apply")
    with (
        make(rest, **knobs) as loader,
        pytest.raises(SnapshotMismatchError, match=r"AD603.*'text\.chat'.*wait to be packed"),
    ):
        loader.load_state_dict(state)
    state["mixture"]["at"] = None
    with (
        make(mix_of(data, "rows", **SECOND), **knobs) as loader,
        pytest.raises(SnapshotMismatchError, match=r"AD603.*wait to be packed.*earlier version"),
    ):
        loader.load_state_dict(state)
