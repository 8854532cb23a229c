"""slime's driver is killed at random instants, between and amid its rollouts; what is trained in the end is as meant.

It is killed before, after and while it generates, trains and saves; with groups out, in the buffer, on their way back.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any, NamedTuple

import pytest

from tests.support.faults import Program, num_rounds, say
from tests.support.figures import record
from tests.support.parts import read_header
from tests.support.slime_source import write_prompts

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1800)]

ROUNDS = num_rounds(quick=4, full=50)
NUM_ROWS = 37
NUM_ROLLOUTS = 20
SAMPLES_PER_GROUP = 2


class Event(NamedTuple):
    """A line of the driver's log."""

    name: str
    rollout_id: int
    groups: list[list[dict[str, Any]]] | None


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_log(path):
    """A line that the kill has cut in two does not count."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [Event(*json.loads(line)) for line in lines]


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Run:
    """Processes that continue, one after another, after the last rollout that is saved."""

    def __init__(self, folder, chance, *, pattern, order, stragglers):
        folder.mkdir()
        self.folder = folder
        self.events: list[list[Event]] = []
        self._chance = chance
        path = write_prompts(folder / "prompts.jsonl", NUM_ROWS)
        self._fixed = {
            "path": str(path),
            "pattern": pattern,
            "stragglers": stragglers,
            "num_rollouts": NUM_ROLLOUTS,
            "save_every": chance.randint(1, 3),
            "batch": chance.randint(2, 5),
            "over": chance.randint(5, 9),
            "rollout_shuffle": True,
            "n_samples_per_prompt": SAMPLES_PER_GROUP,
            "asyncdata_order": order,
        }

    def settings(self, log, checkpoints, **given):
        chance = self._chance
        elastic = {
            "asyncdata_num_workers": chance.choice([0, 1, 2]),
            "asyncdata_buffer_size": chance.choice([1, 5, 100]),
            "with_torch": chance.random() < 0.1,
            "step_s": chance.choice([0, 0.002]),
            "has_group_files": chance.random() < 0.5,
        }
        return {**self._fixed, **elastic, "log": str(log), "folder": str(self.folder / checkpoints), **given}

    def uninterrupted(self):
        log = self.folder / "log.all"
        settings = self.settings(log, "none", asyncdata_num_workers=0, save_every=10**9)
        with Program.of("slime_driver", settings) as program:
            status, said = program.end()
        assert status == 0, said
        return read_log(log)

    def run(self, *, may_kill):
        """One more process; whether it was killed before the end."""
        log = self.folder / f"log.{len(self.events)}"
        kill_after = self._chance.choice([0, self._chance.randint(1, 15), self._chance.randint(1, 50)])
        with Program.of("slime_driver", self.settings(log, "checkpoints")) as program:
            was_killed = program.kill_when(
                (lambda: num_lines(log) > kill_after) if may_kill else None,
                lambda: spin(self._chance.random() * 0.01),
            )
        self.events.append(read_log(log))
        return was_killed

    def trained(self):
        """The groups of each rollout, as the last process that trained it had them."""
        last: dict[int, list[list[dict[str, Any]]]] = {}
        for events in self.events:
            for event in events:
                if event.name == "start":
                    assert event.rollout_id <= len(last), "it continues after a rollout that was never trained"
                    last = {number: groups for number, groups in last.items() if number < event.rollout_id}
                if event.name == "train":
                    assert event.groups is not None
                    last[event.rollout_id] = event.groups
        return last

    def left(self):
        (event,) = [event for event in self.events[-1] if event.name == "left"]
        return event


def chain(run, num_kills):
    """Processes until one comes to the end; how many of them were killed."""
    killed = 0
    while run.run(may_kill=killed < num_kills):
        killed += 1
    return killed


def assert_every_group_is_there(folder):
    """The files that checkpoints name, also those that no process went on from."""
    checkpoints = [path for path in folder.rglob("*.asyncdata*") if path.suffix != ".tmp"]
    headers = [read_header(str(path)) for path in checkpoints]
    named = {f"{name}.group" for header in headers for name in header.files or ()}
    assert named <= {path.name for path in folder.rglob("*.group")}


def test_every_rollout_is_trained_on_exactly_the_groups_of_a_run_without_kills(tmp_path):
    began, chance = time.monotonic(), random.Random(2025)
    num_kills = num_runs = num_compared = 0
    while num_kills < ROUNDS:
        pattern, order = ("sync", "async")[num_runs % 2], ("legacy", "stream")[num_runs // 2 % 2]
        run = Run(tmp_path / f"run {num_runs}", chance, pattern=pattern, order=order, stragglers=False)
        expected = {event.rollout_id: event.groups for event in run.uninterrupted() if event.name == "train"}
        num_kills += chain(run, max(2, ROUNDS // 10))
        num_runs += 1
        for events in run.events:
            for event in events:
                if event.name == "train":
                    assert event.groups == expected[event.rollout_id], f"{pattern}, {order}: {event.rollout_id}"
                    num_compared += 1
        assert run.trained() == expected
        assert_every_group_is_there(run.folder)

    record("R2", "slime's driver", kills=num_kills, lost=0, repeated=0, out_of_order=0)
    say(
        f"SIGKILL of slime's driver: {num_kills} kills in {num_runs} runs of {NUM_ROLLOUTS} rollouts, sync and async; "
        f"{num_compared} rollouts trained, all on the groups of a run without kills, byte for byte; 0 processes "
        f"left; {time.monotonic() - began:.0f} s"
    )


def test_what_comes_back_after_the_next_rollout_has_begun_is_trained_once(tmp_path):
    began, chance = time.monotonic(), random.Random(2026)
    num_kills = num_runs = num_groups = num_late = 0
    while num_kills < ROUNDS:
        order = ("legacy", "stream")[num_runs % 2]
        run = Run(tmp_path / f"run {num_runs}", chance, pattern="async", order=order, stragglers=True)
        num_kills += chain(run, max(2, ROUNDS // 10))
        num_runs += 1
        left = run.left()
        groups = [group for found in run.trained().values() for group in found]
        for group in groups + (left.groups or []):
            for number, sample in enumerate(group):
                attempts = sample["metadata"]["attempts"]
                assert sample["index"] == sample["group_index"] * SAMPLES_PER_GROUP + number
                assert sample["response"].count("[") == attempts == len(sample["tokens"]) / 2
                assert sample["response_length"] == len(sample["rollout_log_probs"]) == 2 * attempts
                num_late += attempts > 1
        found = sorted(group[0]["group_index"] for group in groups + (left.groups or []))
        assert found == list(range(left.rollout_id)), "lost, or trained twice"
        num_groups += len(groups)

    assert num_late > 0
    record("R2", "slime's driver, late groups", kills=num_kills, lost=0, repeated=0, out_of_order=0)
    say(
        f"SIGKILL of slime's driver with groups that come back late: {num_kills} kills in {num_runs} runs; "
        f"{num_groups} groups trained, 0 lost, 0 twice; {time.monotonic() - began:.0f} s"
    )
