"""Ranks of a node are killed and stopped while they share; the others get what they would get without them."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.faults import Program, num_rounds, until
from tests.support.ranks import lengths, write

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_TOKENS = 12_000
NAMES = ("alone", "shared")
ALONE: dict[str, list[list[str]]] = {}
MAX_CHUNK = 64
"""Rows of the largest chunk that these runs have."""


class Node:
    """Ranks over one file, each a process.

    :param settings: those of ``node_rank``, for all ranks.
    """

    def __init__(self, stack: ExitStack, folder: Path, root: str, world_size: int = 2, **settings: Any) -> None:
        self._stack = stack
        self.root = Path(root)
        self.path = write(folder / "rows.jsonl", lengths(NUM_TOKENS, 40))
        self.num_rows = self.path.read_bytes().count(b"\n")
        self._folder = folder
        self._world_size = world_size
        self._settings = {"world_size": world_size, "path": str(self.path), "root": root, **settings}
        self.ranks: dict[int, Program] = {}

    def start(self, *ranks: int, name: str = "shared", **settings: Any) -> None:
        """Start these ranks, or all, from where they have come to under that name."""
        for rank in ranks or range(self._world_size):
            files = {"report": str(self._report(name, rank)), "calls": str(self._folder / f"{name}.calls")}
            chosen = {**self._settings, **files, "rank": rank, **settings}
            self.ranks[rank] = self._stack.enter_context(Program.of("node_rank", chosen))

    def _report(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}.{rank}.json"

    def start_until(self, rank: int, point: str, number: int) -> None:
        """Start a rank, and wait until it has stopped at the call of that number."""
        self.start(rank, end=[point, number, signal.SIGSTOP])
        process = psutil.Process(self.ranks[rank].pid)
        until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
        assert process.status() == psutil.STATUS_STOPPED, self.ranks[rank].end()

    def until_joined(self, number: int) -> None:
        """So many ranks have joined."""
        until(lambda: len(list(self.root.glob("*/m-*/at"))) == number)

    def num_delivered(self, rank: int) -> int:
        """Batches that a rank has delivered so far."""
        return len(self.report(rank)["batches"]) if self._report("shared", rank).exists() else 0

    def until_delivered(self, rank: int, number: int) -> None:
        """A rank has delivered so many more batches, or all."""
        wanted = self.num_delivered(rank) + number
        until(lambda: self.num_delivered(rank) >= wanted or self.ranks[rank].has_ended)

    def finish(self, *ranks: int) -> None:
        """These ranks, or all, come to the end of the data."""
        for rank in ranks or range(self._world_size):
            status, said = self.ranks[rank].end()
            assert status == 0, said

    def run_beside_each_other(self) -> None:
        """All ranks, to the end. None leaves before all have joined, so that a late one finds what others have made."""
        may_leave = self._folder / "may leave"
        self.start(leave=str(may_leave))
        self.until_joined(self._world_size)
        may_leave.touch()
        self.finish()

    def report(self, rank: int, name: str = "shared") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._report(name, rank).read_text())
        return found

    def batches(self, name: str = "shared") -> list[list[str]]:
        return [self.report(rank, name)["batches"] for rank in range(self._world_size)]

    def calls(self, name: str = "shared") -> Counter[int]:
        return Counter(map(int, (self._folder / f"{name}.calls").read_text().split()))

    def expected(self) -> list[list[str]]:
        """What the ranks get if each tokenizes everything; once for all tests that set the same things."""
        names = self._settings.keys() - {"path", "root", "num_workers", "row_timeout_s"}  # which change no batch
        kind = json.dumps({name: self._settings[name] for name in sorted(names)})
        if kind not in ALONE:
            self.start(name="alone", share=False)
            self.finish()
            ALONE[kind] = self.batches("alone")
        return ALONE[kind]


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ad-") as root:
        yield root


def node_of(stack: ExitStack, folder: Path, root: str, world_size: int = 2, **settings: Any) -> Node:
    return Node(stack, folder, root, world_size, **{"way": "soft", **settings})


@pytest.mark.parametrize(
    ("world_size", "way", "num_workers"),
    [(2, "soft", 1), (2, "hard", 2), (2, "not packed", 1), (4, "soft", 1), (4, "not packed", 0)],
)
def test_processes_tokenize_each_row_once_and_get_the_same(
    tmp_path: Path, root: str, world_size: int, way: str, num_workers: int
) -> None:
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root, world_size, way=way, num_workers=num_workers)
        expected = node.expected()
        node.run_beside_each_other()

        assert node.batches() == expected
        tokenized = [node.report(rank)["statistics"]["tokenized_rows_total"] for rank in range(world_size)]
        assert sum(tokenized) == node.num_rows
        extra = node.calls() - Counter(range(node.num_rows))
        assert extra.total() <= 8 * world_size, "canaries, at every start"
        assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("claimed", 1),
        ("while it publishes", 5),
        ("published, before it tells the others", 1),
        ("while it joins", 1),
        ("while it reads", 3),
    ],
)
def test_a_rank_killed_at_any_point_costs_the_others_nothing_and_resumes(
    tmp_path: Path, root: str, point: str, number: int
) -> None:
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root)
        expected = node.expected()
        if point == "while it reads":  # what the other one has made
            node.start_until(0, "claimed", 6)
        node.start_until(1, point, number)
        if point != "while it reads":
            node.start(0)
            node.until_joined(2)
        node.ranks[1].kill()
        node.ranks[0].process.send_signal(signal.SIGCONT)
        node.finish(0)
        node.start(1)
        node.finish(1)

        assert node.batches() == expected
        assert os.listdir(root) == []


@pytest.mark.parametrize("point", ["claimed", "while it publishes"])
def test_a_killed_rank_that_comes_back_beside_the_others_repeats_only_its_chunks(
    tmp_path: Path, root: str, point: str
) -> None:
    """Three ranks of four wait for the killed one; one of them takes each of its chunks over."""
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root, 4)
        expected = node.expected()
        node.start_until(3, point, 5)
        may_leave = tmp_path / "may leave"
        node.start(0, 1, 2, leave=str(may_leave))
        node.until_joined(4)
        node.ranks[3].kill()
        node.start(3)
        node.finish(3)
        may_leave.touch()
        node.finish()

        assert node.batches() == expected
        repeated = node.calls() - Counter(range(node.num_rows))
        in_flight = 2 * MAX_CHUNK
        assert repeated.total() <= 5 * 8 + in_flight
        assert os.listdir(root) == []


def test_a_stopped_rank_is_not_waited_for_and_continues_later(tmp_path: Path, root: str) -> None:
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root, row_timeout_s=1.0)
        expected = node.expected()
        node.start_until(1, "claimed", 5)
        node.start(0)
        node.finish(0)
        node.ranks[1].process.send_signal(signal.SIGCONT)
        node.finish(1)

        assert node.batches() == expected
        assert os.listdir(root) == []


def test_a_row_that_kills_workers_kills_those_of_one_rank_only(tmp_path: Path, root: str) -> None:
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root, kills_on=13)
        expected = node.expected()
        node.run_beside_each_other()

        assert node.batches() == expected
        bad = [node.report(rank, name)["statistics"]["bad_rows_total"] for rank in range(2) for name in NAMES]
        assert bad == [1] * 4
        assert node.calls()[13] == node.calls("alone")[13] // 2 > 0
        assert os.listdir(root) == []


@pytest.mark.parametrize("seed", range(num_rounds(quick=2, full=40)))
def test_ranks_killed_and_stopped_at_random_get_the_same(tmp_path: Path, root: str, seed: int) -> None:
    chance = random.Random(seed)
    way, num_workers = chance.choice(["soft", "hard", "not packed"]), chance.choice([0, 1, 2])
    with ExitStack() as stack:
        node = node_of(stack, tmp_path, root, 3, way=way, num_workers=num_workers, epochs=3, row_timeout_s=0.5)
        expected = node.expected()
        node.start()
        for _ in range(6):
            victim, other = chance.sample(range(3), 2)
            node.until_delivered(victim, chance.randint(0, 60))
            if chance.random() < 0.3:
                node.ranks[victim].process.send_signal(signal.SIGSTOP)
                node.until_delivered(other, chance.randint(1, 60))
                node.ranks[victim].process.send_signal(signal.SIGCONT)
            else:
                node.ranks[victim].kill()
                node.start(victim)
        node.finish()

        assert node.batches() == expected
        assert os.listdir(root) == []
