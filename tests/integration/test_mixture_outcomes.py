"""A mixture that remembers scores: a memory for each part, and exact resumes."""

from __future__ import annotations

import json

import pytest

from asyncdata import DataLoader, Mix, Outcomes, Part, PassRate, Shuffle
from asyncdata.errors import InvalidGroupError, SnapshotMismatchError
from tests.support.loading import write_rows
from tests.support.tokenize_fns import row_id

SIZES = {"code": 31, "math": 20, "chat": 11}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)


@pytest.fixture
def data(tmp_path):
    for name, number in SIZES.items():
        write_rows(tmp_path / f"{name}.jsonl", number)
    return tmp_path


def mix_of(data):
    """A part in a mixture of its own, and two beside it."""
    math = Part(Mix({"easy": Part(data / "math.jsonl", weight=3)}, quota=4), weight=2)
    return Mix({"math": math, "code": data / "code.jsonl", "chat": data / "chat.jsonl"}, quota=8)


def make(mix, outcomes, **knobs):
    settings = {"tokenize_fn": row_id, "num_workers": 0, "shuffle": SHUFFLE, "timeout_s": 240}
    return DataLoader(mix, outcomes=outcomes, **settings | knobs)


OUTCOMES = Outcomes(policy=SOLVED)


def entries(samples):
    return [(sample.source_name, sample.source_epoch, int(sample.tokens[0])) for sample in samples]


def score_of(entry):
    """Every third row is hard, of the others every second is solved."""
    return 0.5 if entry[2] % 3 == 0 else float(entry[2] % 2)


def step(loader, number=8):
    samples = loader.get_next_batch(number)
    found = entries(samples)
    loader.report(samples, [score_of(entry) for entry in found])
    return found


def run(loader, num_steps):
    taken, states = [], []
    for _ in range(num_steps):
        taken.append(step(loader))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return taken, states


def own(taken, name):
    return [(epoch, row) for batch in taken for part, epoch, row in batch if part == name]


# Reports


def test_a_report_is_counted_whole_or_not_at_all(data):
    with make(mix_of(data), OUTCOMES) as loader:
        samples = loader.get_next_batch(8)
        foreign = samples[0].to_dict()
        for change in ({"source_name": "other"}, {"source_epoch": None}):
            with pytest.raises(InvalidGroupError, match="AD482.*no part of this mixture"):
                loader.report([samples[1], type(samples[0]).from_dict(foreign | change)], [1.0, 1.0])
        assert loader.statistics().outcome_rows == 0

        loader.add_samples([[samples[0]]])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(mix_of(data), OUTCOMES) as loader:
        loader.load_state_dict(state)
        assert loader.report(loader.get_samples(1), [1.0]) == 1, "a group from a snapshot is known"


# What a snapshot has


def test_a_part_that_comes_back_has_its_memory_again(data):
    def mix(*names):
        return Mix({name: data / f"{name}.jsonl" for name in names}, quota=4, on_mix_change="apply")

    with make(mix("math", "code"), OUTCOMES) as loader:
        _, states = run(loader, 3)
        before = loader.statistics().by_source["math"].outcome_rows
    with make(mix("code"), OUTCOMES) as loader:
        loader.load_state_dict(states[-1])
        _, states = run(loader, 1)
    with make(mix("math", "code"), OUTCOMES) as loader:
        loader.load_state_dict(states[-1])
        assert loader.statistics().by_source["math"].outcome_rows == before == 12


def test_a_memory_in_a_file_is_refused_and_its_part_can_be_forgotten(data):
    with make(mix_of(data), OUTCOMES) as loader:
        _, states = run(loader, 3)
    part = states[-1]["mixture"]["parts"]["code"]
    part["outcomes"] = {**part["outcomes"], "memory": None, "num_bytes": 1234}  # as development builds wrote it

    with make(mix_of(data), OUTCOMES) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"AD606 .*in a file"):
            loader.load_state_dict(states[-1])
        loader.load_state_dict(states[-1], allow_changed={"outcomes"})
        parts = loader.statistics().by_source
        assert (parts["code"].outcome_rows, parts["math.easy"].outcome_rows > 0) == (0, True)
    with make(mix_of(data), None) as loader, pytest.raises(SnapshotMismatchError, match=r"AD603"):
        loader.load_state_dict(states[-1])
