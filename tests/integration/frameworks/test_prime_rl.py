"""Rows in prime-rl's own orchestrator and checkpoints. ASYNCDATA_PRIME_RL and ASYNCDATA_VERIFIERS name checkouts."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import asyncdata.integrations.prime_rl
from asyncdata import ConfigError, SnapshotError
from asyncdata.integrations.prime_rl import Rows, TaskIterator, check
from tests.support.frameworks.killed_runs import checkout, run_driver
from tests.support.frameworks.prime_rl import NUM_BATCHES, PACKAGES, ROWS, VARIABLE, VERIFIERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


class Counted(NamedTuple):
    """The tasks of a killed and resumed run: ``skipped`` are neither trained on nor still open at its end."""

    save_at: int
    trained: list[int]
    skipped: list[int]
    repeated: list[int]


def counted(runs: dict[str, Any]) -> list[Counted]:
    answers = []
    for save_at, batches in runs["resumed"]:
        tasks = [number // ROWS for batch in batches for number in batch]
        still_open = {number // ROWS for number in runs["open"][str(save_at)]}
        skipped = sorted(set(range(max(tasks))) - set(tasks) - still_open)
        answers.append(Counted(save_at, tasks, skipped, sorted({task for task in tasks if tasks.count(task) > 1})))
    return answers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VERIFIERS, "verifiers/v1/taskset.py")
    checkout(VARIABLE, "src/prime_rl/orchestrator/train_source.py", PACKAGES)
    return run_driver("tests.support.frameworks.prime_rl", tmp_path_factory.mktemp("prime_rl"))


def test_a_killed_run_of_prime_rl_loses_and_repeats_no_task(found: dict[str, Any]) -> None:
    for resumed in counted(found["runs"]["ours"]):
        assert len(resumed.trained) == 4 * NUM_BATCHES
        assert (resumed.skipped, resumed.repeated) == ([], []), f"killed after a save at step {resumed.save_at}"


def test_a_task_has_the_same_number_after_a_restart(found: dict[str, Any]) -> None:
    runs = found["runs"]["ours"]
    rows = {number // ROWS: number % ROWS for batch in runs["whole"] for number in batch}

    for _, batches in runs["resumed"]:
        after = {number // ROWS: number % ROWS for batch in batches for number in batch}
        assert {task: rows[task] for task in after if task in rows} == {t: r for t, r in after.items() if t in rows}


def test_each_epoch_of_the_tasks_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any]) -> None:
    runs = found["runs"]["ours"]
    numbers = {number for _, batches in runs["resumed"] for batch in batches for number in batch}
    first, second = ([n % ROWS for n in sorted(numbers) if n // ROWS // ROWS == epoch] for epoch in (0, 1))

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


def test_a_task_whose_group_prime_rl_dropped_is_done(found: dict[str, Any]) -> None:
    """Otherwise it would stay in the state, and a restart would begin at it, however old it is."""
    dropped = found["dropped"]
    epoch, window, row = dropped["position"]
    done = {e * ROWS + r for e, _, r in dropped["acked"]} | set(range(epoch * ROWS + row))

    assert window == 0
    assert len(dropped["tasks"]) == 2
    assert set(dropped["tasks"]) <= done


def test_verifiers_alone_gets_the_same_tasks(found: dict[str, Any]) -> None:
    rows = {number // ROWS: number % ROWS for batch in found["runs"]["ours"]["whole"] for number in batch}

    assert found["alone"] == [["MathTask", task, f"{rows[task]} + 1?", str(rows[task])] for task in range(3)]


def test_a_sampler_that_needs_all_tasks_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"]["pools"].startswith("AD464 curriculum.sampler.type='difficulty_pool' chooses among all")


def test_a_version_of_prime_rl_that_does_not_tell_what_was_sent_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"]["older"].startswith("AD464 this version of prime-rl has no Older.maybe_save_ckpt, so that")


def test_what_prime_rls_own_tasks_do_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever they do, they come to the end."""
    for name, runs in found["runs"].items():
        for save_at, trained, skipped, repeated in counted(runs):
            sys.stdout.write(f"\n{name}, saved at step {save_at}: {len(skipped)} skipped, {len(repeated)} repeated")
            assert len(trained) == 4 * NUM_BATCHES


class Numbered(Rows):
    """A taskset without verifiers: its tasks have what a ``TaskIterator`` looks at."""

    def __init__(self, path: str, **settings: Any) -> None:
        settings = {"shuffle": False, "num_workers": 0, **settings}
        self.config = SimpleNamespace(data_path=path, asyncdata=settings)
        self.system_prompt = None
        self.transform = None

    def task(self, row: dict[str, Any], idx: int) -> Any:
        return SimpleNamespace(key=f"task {idx}", idx=idx, row=row, with_system_prompt=lambda text: (idx, text))


@pytest.fixture
def rows(tmp_path: Path) -> Numbered:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(10)))
    return Numbered(str(path))


@pytest.fixture
def tasks(rows: Numbered) -> Iterator[TaskIterator]:
    opened = TaskIterator(rows)
    opened.keep_open()
    yield opened
    opened.loader.close()


def group_of(task: Any, *traces: str) -> list[Any]:
    return [SimpleNamespace(task=task, traces=[SimpleNamespace(id=name)]) for name in traces]


def resumed(tasks: TaskIterator, rows: Numbered, num: int) -> list[int]:
    after = TaskIterator(rows)
    after.keep_open()
    after.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
    numbers = [next(after).idx for _ in range(num)]
    after.loader.close()
    return numbers


def test_tasks_that_were_not_sent_come_again_in_their_order(tasks: TaskIterator, rows: Numbered) -> None:
    taken = [next(tasks) for _ in range(5)]
    for number in (3, 1, 2):
        tasks.decided(f"group {number}", group_of(taken[number], f"{number}a", f"{number}b"))
    tasks.sent({"2a", "2b"})

    assert resumed(tasks, rows, 5) == [0, 2, 4, 5, 6]


def test_a_task_of_which_a_part_waits_for_the_next_batch_comes_again(tasks: TaskIterator, rows: Numbered) -> None:
    tasks.decided("group", group_of(next(tasks), "a", "b"))
    tasks.sent({"b"})
    assert resumed(tasks, rows, 2) == [0, 1]

    tasks.sent(set())
    assert resumed(tasks, rows, 2) == [1, 2]


def test_a_batch_that_was_not_sent_is_in_the_state(tasks: TaskIterator, rows: Numbered) -> None:
    """prime-rl takes it out of its sink before it waits for the trainer, and may be killed there."""
    tasks.decided("group", group_of(next(tasks), "a"))

    assert resumed(tasks, rows, 1) == [0]


def test_a_dropped_group_is_done_also_without_a_rollout(tasks: TaskIterator, rows: Numbered) -> None:
    first, second, _ = (next(tasks) for _ in range(3))
    tasks.cancelled("group 0", first.key)
    tasks.cancelled("group 1", second.key)
    tasks.decided("group 0", [])
    tasks.decided("group 1", group_of(second, "a"))
    tasks.sent(set())

    assert resumed(tasks, rows, 2) == [2, 3]


def test_rows_alone_have_no_end_and_keep_nothing(rows: Numbered) -> None:
    opened = iter(rows)
    numbers = [next(opened).row["number"] for _ in range(12)]
    assert isinstance(opened, TaskIterator)
    state = opened.loader.state_dict()
    opened.loader.close()

    assert numbers == [*range(10), 0, 1]
    assert state["position"] == [1, 0, 2]


def test_a_view_of_verifiers_and_a_system_prompt_are_applied(rows: Numbered) -> None:
    rows.transform = lambda tasks: (next(tasks) for _ in range(3))
    rows.system_prompt = "Be brief."

    assert list(rows) == [(0, "Be brief."), (1, "Be brief."), (2, "Be brief.")]


@pytest.mark.parametrize("name", ["n_samples_per_prompt", "epochs", "commit", "tokenize_fn", "packing"])
def test_a_setting_that_prime_rl_decides_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"AD464 env.taskset.asyncdata.{name}=2 is not followed. Leave it out"):
        check("rows.jsonl", {"num_workers": 2, name: 2})


def test_a_taskset_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="AD464 env.taskset.data_path is not set: a file, a glob"):
        TaskIterator(Numbered(""))


def test_a_checkpoint_of_another_taskset_is_refused(tasks: TaskIterator) -> None:
    with pytest.raises(SnapshotError, match="AD602 this is not a state of a taskset of asyncdata: .*skip_progress"):
        tasks.load_state_dict({"cursor": 12})


def test_a_missing_verifiers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)

    with pytest.raises(ConfigError, match="RowsConfig needs verifiers"):
        _ = asyncdata.integrations.prime_rl.RowsConfig
