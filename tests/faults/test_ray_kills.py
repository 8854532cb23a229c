"""Actors of a Ray cluster are killed, alone or with their node; what is delivered is D all the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from asyncdata import DataLoader, RayExecutor
from tests.support.faults import Program, num_rounds
from tests.support.figures import record
from tests.support.loading import SHUFFLE, ids, order_of, write_rows
from tests.support.ray_cluster import two_nodes
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.ray_cluster import RayNodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

KILLS = num_rounds(quick=6, full=60)
LOST_NODES = num_rounds(quick=2, full=10)
NUM_ROWS = 2000
BATCH = 40
NEVER_S = 300.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with two_nodes() as found:
        yield found


def check_under_losses(
    path: Path, nodes: RayNodes, executor: RayExecutor, number: int, lose: Callable[[], bool]
) -> int:
    """Take batches, with a loss after each until there were so many, and compare with D; how many there were."""
    found, num_lost = [], 0
    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, timeout_s=NEVER_S, executor=executor) as loader:
        while num_lost < number:
            found += ids(loader.get_next_batch(BATCH))
            num_lost += lose()
        found += ids(loader.get_next_batch(NUM_ROWS))
        assert loader.statistics().worker_restarts_total > 0

    assert found == order_of(path, len(found) // NUM_ROWS + 1)[: len(found)]
    assert nodes.actors_left() == []
    return num_lost


def test_killed_actors_lose_repeat_and_reorder_nothing(tmp_path, nodes):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    chance = random.Random(5)

    def kill_one() -> bool:
        actors = nodes.actors()
        if actors:
            with contextlib.suppress(ProcessLookupError):  # it was killed before, and has ended this very moment
                os.kill(chance.choice(actors), signal.SIGKILL)
        return bool(actors)

    num_kills = check_under_losses(path, nodes, RayExecutor(num_workers=2, num_cpus=0.5), KILLS, kill_one)
    record("RAY", "actors", kills=num_kills, left=0, lost=0, repeated=0, out_of_order=0)


def test_lost_nodes_lose_repeat_and_reorder_nothing(tmp_path, nodes):
    """The actors run only on nodes that are added here, so each loss is a loss of all of them."""
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    present = [nodes.add()]

    def lose_node() -> bool:
        nodes.remove(present.pop())
        present.append(nodes.add())
        return True

    executor = RayExecutor(num_workers=2, num_cpus=0.5, resources={"spare": 1})
    num_lost = check_under_losses(path, nodes, executor, LOST_NODES, lose_node)
    record("RAY", "nodes", nodes=num_lost, left=0, lost=0, repeated=0, out_of_order=0)


@pytest.mark.parametrize("process", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_a_lost_cluster_ends_a_call_without_a_timeout_by_an_error(tmp_path, process):
    path = write_rows(tmp_path / "rows.jsonl", 60)
    with Program.of("lost_cluster", {"path": str(path), "process": process}, own_group=True) as trainer:
        status, said = trainer.end()

    assert "AD498 the Ray cluster is lost" in said, said
    assert (status, said.splitlines()[-1]) == (0, "closed")
