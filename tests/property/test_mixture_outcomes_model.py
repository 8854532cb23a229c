"""A mixture that remembers scores: what is delivered is a model's, wherever the run is resumed."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata import DataLoader, Mix, Outcomes, Part, PassRate, Replay, Shuffle
from asyncdata.delivery.outcomes.replay import in_order
from asyncdata.loader.mix import part_seed
from asyncdata.order.mixture import ScheduleCursor
from tests.support.loading import order_of

pytestmark = pytest.mark.thorough

SIZES = {"chat": 5, "math": 9}
SHUFFLE = Shuffle(block_bytes=64, window_blocks=3)
POLICY = PassRate(drop_above=0.9, revisit_every=3)
WHERE = PassRate(0.2, 0.8)
NUM_EPOCHS = 40

Entry = tuple[str, int, int]


def tokens_of(row: dict[str, Any]) -> list[int]:
    """Rows have one to three tokens."""
    return [row["id"]] * (1 + row["id"] % 3)


def write(folder: Path) -> None:
    for name, number in SIZES.items():
        lines = [json.dumps({"id": n, "pad": "x" * (7 * n % 20)}) + "\n" for n in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


@cache
def own_order(name: str) -> list[list[int]]:
    """D of a part, an epoch after the other."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        rows = order_of(Path(folder, f"{name}.jsonl"), NUM_EPOCHS, seed=part_seed(42, name), shuffle=SHUFFLE)
    return [rows[first : first + SIZES[name]] for first in range(0, len(rows), SIZES[name])]


@cache
def ids_of(name: str) -> list[int]:
    """The id of each row: where its line begins."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        lengths = [len(line) for line in Path(folder, f"{name}.jsonl").read_bytes().splitlines(keepends=True)]
    return [0, *np.cumsum(lengths).tolist()]


class Known(NamedTuple):
    """What is remembered of a row."""

    epoch: int
    scores: dict[Any, float]  # by who delivered it: the part, or a pass of the replay

    @property
    def mean(self) -> float:
        return sum(self.scores.values()) / len(self.scores)


class Model:
    """One sample at a time, one score at a time, and nothing is read ahead."""

    def __init__(self, mix: Mix) -> None:
        self.cursor = ScheduleCursor(mix.node(dict.fromkeys([*SIZES, "again"], 1)), 42)
        self.names = [leaf.name for leaf in self.cursor.node.leaves()]
        self.at = dict.fromkeys(SIZES, (0, 0))
        self.last = dict.fromkeys(SIZES, 0)  # the epoch of the last sample
        self.known: dict[str, dict[int, Known]] = {name: {} for name in SIZES}
        self.excluded: dict[tuple[str, int], set[int]] = {}
        self.passes: list[tuple[int, list[int]]] = []  # the epoch of each pass, and its rows
        self.in_pass = 0

    def next(self) -> Entry:
        for _ in count():
            leaf = self.cursor.pick()
            name = self.names[leaf]
            found = self._replayed(leaf) if name == "again" else self._own(name)
            if found is not None:
                self.cursor.took_one(leaf, 1 + found[1] % 3)
                return name, *found
        raise AssertionError

    def _own(self, name: str) -> tuple[int, int]:
        while True:
            epoch, place = self.at[name]
            rows = own_order(name)[epoch]
            if (name, epoch) not in self.excluded:
                known = self.known[name].items()
                out = {row for row, told in known if told.mean >= 0.9 and epoch - told.epoch < 3}
                self.excluded[name, epoch] = out
            left = [n for n in range(place, len(rows)) if rows[n] not in self.excluded[name, epoch]]
            if left:
                self.at[name] = epoch, left[0] + 1
                self.last[name] = epoch
                return epoch, rows[left[0]]
            self.at[name] = epoch + 1, 0

    def _replayed(self, leaf: int) -> tuple[int, int] | None:
        if not self.passes or self.in_pass == len(self.passes[-1][1]):
            rows = {ids_of("math")[row]: row for row, told in self.known["math"].items() if 0.2 <= told.mean < 0.8}
            if not rows:
                assert self.cursor.sit_out(leaf)
                return None
            ids = np.array(sorted(rows), np.uint64)
            order = in_order(ids, seed=42, name="again", number=len(self.passes)).tolist()
            self.passes.append((self.last["math"], [rows[row_id] for row_id in order]))
            self.in_pass = 0
        self.in_pass += 1
        return len(self.passes) - 1, self.passes[-1][1][self.in_pass - 1]

    def report(self, entry: Entry, score: float) -> None:
        name, epoch, row = entry
        key: Any = name
        if name == "again":
            name, key, epoch = "math", epoch, self.passes[epoch][0]
        told = self.known[name].get(row)
        if told is None or epoch > told.epoch:
            self.known[name][row] = Known(epoch, {key: score})
        elif epoch == told.epoch:
            told.scores.setdefault(key, score)


def mix_of(folder: Path, by: str, quota: int, weights: tuple[int, int, int]) -> Mix:
    chat, math, again = weights
    parts = {
        "chat": Part(folder / "chat.jsonl", weight=chat),
        "math": Part(folder / "math.jsonl", weight=math),
        "again": Replay("math", WHERE, weight=again),
    }
    return Mix({name: part for name, part in parts.items() if name != "again" or again}, by=by, quota=quota)


def opened(mix: Mix, buffer_size: int) -> DataLoader:
    knobs: dict[str, Any] = {"num_workers": 0, "timeout_s": 240, "buffer_size": buffer_size}
    return DataLoader(mix, tokenize_fn=tokens_of, shuffle=SHUFFLE, outcomes=Outcomes(policy=POLICY), **knobs)


@settings(max_examples=40)
@given(
    data=st.data(),
    by=st.sampled_from(["rows", "tokens"]),
    quota=st.integers(1, 7),
    weights=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)),
)
def test_samples_are_those_of_the_model_wherever_the_run_is_resumed(
    data: Any, by: Any, quota: int, weights: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        mix = mix_of(Path(folder), by, quota, weights)
        model = Model(mix)
        states: list[tuple[Any, Model]] = []
        loader = opened(mix, 8)
        try:
            for _ in range(data.draw(st.integers(5, 25))):
                if states and data.draw(st.integers(0, 2)) == 0:
                    state, before = data.draw(st.sampled_from(states[-6:]))
                    loader.close()
                    loader, model = opened(mix, data.draw(st.integers(1, 20))), copy.deepcopy(before)
                    loader.load_state_dict(json.loads(state))
                number = data.draw(st.integers(1, 6))
                wanted = [model.next() for _ in range(number)]
                samples = loader.get_next_batch(number)
                assert [(s.source_name, s.source_epoch, int(s.tokens[0])) for s in samples] == wanted
                # Row 0 is never solved, so that no epoch is empty.
                scores = [data.draw(st.sampled_from([0.0, 0.5, 1.0])) if row else 0.0 for _, _, row in wanted]
                loader.report(samples, scores)
                for entry, score in zip(wanted, scores, strict=True):
                    model.report(entry, score)
                states.append((json.dumps(loader.state_dict()), copy.deepcopy(model)))
        finally:
            loader.close()
