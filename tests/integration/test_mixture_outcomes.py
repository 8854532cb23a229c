"""A mixture that remembers scores: a memory for each part, replays of hard rows, and exact resumes."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    ConfigError,
    DataLoader,
    InvalidGroupError,
    JsonArraySource,
    Mix,
    NoSamplesError,
    Outcomes,
    Part,
    PassRate,
    Replay,
    Shuffle,
    SnapshotMismatchError,
)
from tests.support.loading import write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata import Sample

SIZES = {"code": 31, "math": 20, "chat": 11}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)
HARD = PassRate(0.1, 0.6)

Entry = tuple[str | None, int | None, int]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, number in SIZES.items():
        write_rows(tmp_path / f"{name}.jsonl", number)
    return tmp_path


def mix_of(data: Path, *, replay: bool = True, **parts: Any) -> Mix:
    """Two parts side by side, one of them with its hard rows once more, and one beside them."""
    math: dict[str, Any] = {"easy": Part(data / "math.jsonl", weight=3)}
    if replay:
        math["again"] = Replay("easy", HARD, weight=1)
    given = {"math": Part(Mix(math, quota=4), weight=2), "code": data / "code.jsonl", "chat": data / "chat.jsonl"}
    return Mix({**given, **parts}, quota=8)


def make(mix: Mix, outcomes: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": row_id, "num_workers": 0, "shuffle": SHUFFLE, "timeout_s": 240}
    return DataLoader(mix, outcomes=outcomes, **settings | knobs)


def outcomes(tmp_path: Path, shape: str = "file", policy: Any = SOLVED) -> Outcomes:
    return Outcomes(path=str(tmp_path / "outcomes") if shape == "file" else None, policy=policy)


def entries(samples: list[Sample]) -> list[Entry]:
    return [(sample.source_name, sample.source_epoch, int(sample.tokens[0])) for sample in samples]


def score_of(entry: Entry) -> float:
    """Every third row is hard, of the others every second is solved."""
    return 0.5 if entry[2] % 3 == 0 else float(entry[2] % 2)


def step(loader: DataLoader, number: int = 8) -> list[Entry]:
    samples = loader.get_next_batch(number)
    found = entries(samples)
    loader.report(samples, [score_of(entry) for entry in found])
    return found


def run(loader: DataLoader, num_steps: int) -> tuple[list[list[Entry]], list[Any]]:
    taken, states = [], []
    for _ in range(num_steps):
        taken.append(step(loader))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return taken, states


def own(taken: list[list[Entry]], name: str) -> list[tuple[int | None, int]]:
    return [(epoch, row) for batch in taken for part, epoch, row in batch if part == name]


def test_each_part_leaves_out_its_own_solved_rows_from_its_next_epoch_on(data, tmp_path):
    with make(mix_of(data, replay=False), outcomes(tmp_path)) as loader:
        taken = [step(loader, 1) for _ in range(320)]  # so that all scores of an epoch are there before the next
        parts = loader.statistics().by_source
        loader.state_dict()
    with make(mix_of(data, replay=False), None) as loader:
        plain = [entries(loader.get_next_batch(8)) for _ in range(40)]

    for name, size in {"math.easy": 20, "code": 31, "chat": 11}.items():
        found, whole = own(taken, name), own(plain, name)
        solved = {row for row in range(size) if score_of((None, None, row)) == 1.0}
        assert found[:size] == whole[:size]
        later = [entry for entry in whole if entry[0] == 1 and entry[1] not in solved]
        assert [entry for entry in found if entry[0] == 1] == later
        assert parts[name].outcome_rows == size
        assert parts[name].dropped["excluded"] >= len(solved)
    assert sorted(path.name for path in tmp_path.glob("outcomes*[!k]")) == [
        "outcomes.chat",
        "outcomes.code",
        "outcomes.math.easy",
    ]


def test_a_state_may_be_taken_where_a_part_is_at_the_end_of_its_epoch_and_has_no_turn_yet(data, tmp_path):
    """What its epoch leaves out is forgotten then, and its chunks are still there."""
    parts = {"chat": Part(data / "chat.jsonl", when_done="leave"), "code": data / "code.jsonl"}
    mix = Mix(parts, quota=4, stages={0: {"chat": 1}, 11: {"code": 1}})
    with make(mix, outcomes(tmp_path, "state"), shuffle=False, buffer_size=4) as loader:
        taken, _ = run(loader, 5)

    assert own(taken, "chat") == [(0, row) for row in range(11)]
    assert own(taken, "code") == [(0, row) for row in range(29)]


@pytest.mark.thorough
def test_workers_and_buffers_make_no_difference(data, tmp_path):
    found = []
    for knobs in ({}, {"num_workers": 2}, {"buffer_size": 3}, {"dp_size": 5, "num_workers": 1}):
        with make(mix_of(data), outcomes(tmp_path, "state"), **knobs) as loader:
            found.append(run(loader, 20)[0])

    assert found[1:] == found[:1] * 3


# Replay


def test_a_pass_has_the_rows_of_the_range_and_its_scores_count_for_the_other_part(data, tmp_path):
    parts = {"math": Part(data / "math.jsonl", weight=3), "again": Replay("math", HARD, weight=1)}
    with make(Mix(parts, quota=20), outcomes(tmp_path, "state", None)) as loader:
        first = loader.get_next_batch(20)
        assert {sample.source_name for sample in first} == {"math"}, "no row has scores yet"
        assert loader.statistics().by_source["again"].passed_over == 1
        hard = {row for _, _, row in entries(first) if row % 3 == 0}
        loader.report(first, [score_of(entry) for entry in entries(first)])

        samples = loader.get_next_batch(20)
        again = [sample for sample in samples if sample.source_name == "again"]
        assert len(again) == 5
        assert {int(sample.tokens[0]) for sample in again} <= hard
        loader.report(again, [1.0] * 5)
        assert loader.report(again, [0.0] * 5) == 0, "each counts once"
        assert loader.statistics().by_source["math"].outcome_scores_total == 25

        later = [entry for _ in range(8) for entry in entries(loader.get_next_batch(20)) if entry[0] == "again"]
        solved = {int(sample.tokens[0]) for sample in again}
        assert not {row for _, number, row in later if number > 0} & solved, "0.5 and 1.0 are above the range together"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["parquet", "array", "full"])
def test_rows_of_other_sources_are_replayed(data, tmp_path, kind):
    rows = (data / "math.jsonl").read_text().splitlines()
    source, shuffle = tmp_path / f"rows.{kind}", SHUFFLE  # type: Path, Any
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(20))})
        parquet.write_table(table, source, row_group_size=6)
    elif kind == "array":
        source, shuffle = tmp_path / "rows.json", "full"
        source.write_text("[" + ",\n".join(rows) + "]")
    else:
        source, shuffle = data / "math.jsonl", "full"
    given: Any = JsonArraySource(str(source)) if kind == "array" else source
    mix = Mix({"math": Part(given, weight=2), "again": Replay("math", HARD)}, quota=6)
    with make(mix, outcomes(tmp_path, "state"), shuffle=shuffle, num_workers=1) as loader:
        taken, states = run(loader, 16)
    assert {row for _, row in own(taken, "again")} <= set(range(0, 20, 3))
    assert len({epoch for epoch, _ in own(taken, "again")}) > 2
    for number in (2, 7, 12):
        with make(mix, outcomes(tmp_path, "state"), shuffle=shuffle, num_workers=1) as loader:
            loader.load_state_dict(states[number])
            assert run(loader, 3)[0] == taken[number + 1 : number + 4]


def test_a_replay_alone_at_a_stage_without_scores_is_named(data, tmp_path):
    parts = {"math": data / "math.jsonl", "again": Replay("math", HARD)}
    mix = Mix(parts, stages={0: {"math": 1}, 6: {"again": 1}})
    with make(mix, outcomes(tmp_path, "state")) as loader:
        loader.get_next_batch(6)
        with pytest.raises(NoSamplesError, match=r"AD473 the replay 'again' has no row yet"):
            loader.get_next_batch(1)


def test_rows_that_are_read_from_front_to_back_cannot_be_replayed(data, tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((data / "math.jsonl").read_bytes()))
    mix = Mix({"math": tmp_path / "rows.jsonl.gz", "again": Replay("math", HARD)})
    with pytest.raises(ConfigError, match=r"AD474 'again' is a Replay of 'math'.*shuffle=\"full\""):
        make(mix, outcomes(tmp_path, "state"))


def test_a_replay_needs_scores_and_a_part_of_its_mixture(data):
    with pytest.raises(ConfigError, match=r"AD472.*outcomes=Outcomes"):
        make(mix_of(data), None)
    for of in ("nothing", "again"):
        with pytest.raises(ConfigError, match=f"AD470 'again' is a Replay of '{of}'"):
            Mix({"math": data / "math.jsonl", "again": Replay(of, HARD)})
    with pytest.raises(ConfigError, match="AD470.*no PassRate"):
        Replay("math", {"from": 0.1})
    with pytest.raises(ConfigError, match="AD470.*revisit_every"):
        Replay("math", PassRate(0.1, 0.6, revisit_every=2))


# Reports


def test_a_report_is_counted_whole_or_not_at_all(data, tmp_path):
    with make(mix_of(data, replay=False), outcomes(tmp_path)) as loader:
        samples = loader.get_next_batch(8)
        foreign = samples[0].to_dict()
        for change in ({"source_name": "other"}, {"source_epoch": None}):
            with pytest.raises(InvalidGroupError, match="AD482.*no part of this mixture"):
                loader.report([samples[1], type(samples[0]).from_dict(foreign | change)], [1.0, 1.0])
        assert loader.statistics().outcome_rows == 0

        loader.add_samples([[samples[0]]])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(mix_of(data, replay=False), outcomes(tmp_path)) as loader:
        loader.load_state_dict(state)
        assert loader.report(loader.get_samples(1), [1.0]) == 1, "a group from a snapshot is known"


def test_unacknowledged_samples_are_counted_once(data, tmp_path):
    with make(mix_of(data), outcomes(tmp_path), commit="on_ack") as loader:
        for _ in range(6):
            step(loader)
            loader.ack()
        samples = loader.get_next_batch(8)
        scores = [score_of(entry) for entry in entries(samples)]
        assert loader.report(samples[:5], scores[:5]) == 5
        loader.ack(samples[:1])
        state = loader.state_dict()
    with make(mix_of(data), outcomes(tmp_path), commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_next_batch(7)
        assert entries(again) == entries(samples[1:])
        assert loader.report(again, scores[1:]) == 3


# What a snapshot has


def test_a_part_that_comes_back_has_its_memory_again(data, tmp_path):
    def mix(*names: str) -> Mix:
        return Mix({name: data / f"{name}.jsonl" for name in names}, quota=4, on_mix_change="apply")

    with make(mix("math", "code"), outcomes(tmp_path)) as loader:
        _, states = run(loader, 3)
        before = loader.statistics().by_source["math"].outcome_rows
    with make(mix("code"), outcomes(tmp_path)) as loader:
        loader.load_state_dict(states[-1])
        _, states = run(loader, 1)
    with make(mix("math", "code"), outcomes(tmp_path)) as loader:
        loader.load_state_dict(states[-1])
        assert loader.statistics().by_source["math"].outcome_rows == before == 12


def test_a_memory_that_is_not_there_is_refused_and_its_part_can_be_forgotten(data, tmp_path):
    with make(mix_of(data), outcomes(tmp_path)) as loader:
        _, states = run(loader, 3)
    (tmp_path / "outcomes.code").unlink()

    with make(mix_of(data), None if False else outcomes(tmp_path)) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"AD606.*outcomes\.code"):
            loader.load_state_dict(states[-1])
        loader.load_state_dict(states[-1], allow_changed={"outcomes"})
        parts = loader.statistics().by_source
        assert (parts["code"].outcome_rows, parts["math.easy"].outcome_rows > 0) == (0, True)
    with (
        make(mix_of(data, replay=False), None) as loader,
        pytest.raises(SnapshotMismatchError, match=r"AD603"),
    ):
        loader.load_state_dict(states[-1])


def test_packs_and_ranks_of_their_own_are_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="AD480"):
        make(mix_of(data), outcomes(tmp_path), ranks={"rank": 0, "world_size": 2}, batch_size=1)
