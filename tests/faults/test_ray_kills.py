"""Actors of a Ray cluster are killed, alone or with their node; what is delivered is D all the same."""

import contextlib
import os
import random
import signal
from typing import Any

import pytest

from asyncdata import DataLoader, RayExecutor
from tests.support.faults import Program, num_rounds, record
from tests.support.loading import SHUFFLE, id_and_text, ids, order_of
from tests.support.ray_cluster import two_nodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

KILLS = num_rounds(quick=6, full=60)
LOST_NODES = num_rounds(quick=2, full=10)
NUM_ROWS = 2000
BATCH = 40
NEVER_S = 300.0


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as found:
        yield found


def check_under_losses(path, nodes, of: str, number: int, lose: Any, **more: Any) -> None:
    """Take batches, with a loss after each until there were so many, and compare with D."""
    found, num_lost = [], 0
    executor = RayExecutor(num_workers=2, num_cpus=0.5, **more)
    knobs = {"shuffle": SHUFFLE, "timeout_s": NEVER_S, "buffer_size": 2 * BATCH}  # work is left when one is lost
    with DataLoader(path, tokenize_fn=id_and_text, executor=executor, **knobs) as loader:
        while num_lost < number:
            found += ids(loader.get_next_batch(BATCH))
            num_lost += lose()
        found += ids(loader.get_next_batch(NUM_ROWS))
        assert loader.statistics().worker_restarts_total > 0

    assert found == order_of(path, len(found) // NUM_ROWS + 1)[: len(found)]
    assert nodes.actors_left() == []
    record("RAY", of, **{"kills" if of == "actors" else "nodes": num_lost}, left=0, lost=0, repeated=0, out_of_order=0)


def test_killed_actors_lose_repeat_and_reorder_nothing(path, nodes):
    chance = random.Random(5)

    def kill_one() -> bool:
        actors = nodes.actors()
        if actors:
            with contextlib.suppress(ProcessLookupError):  # it was killed before, and has ended this very moment
                os.kill(chance.choice(actors), signal.SIGKILL)
        return bool(actors)

    check_under_losses(path, nodes, "actors", KILLS, kill_one)


def test_lost_nodes_lose_repeat_and_reorder_nothing(path, nodes):
    """The actors run only on nodes that are added here, so each loss is a loss of all of them."""
    present = [nodes.add()]

    def lose_node() -> bool:
        nodes.remove(present.pop())
        present.append(nodes.add())
        return True

    check_under_losses(path, nodes, "nodes", LOST_NODES, lose_node, resources={"spare": 1})


@pytest.mark.parametrize("process", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_a_lost_cluster_ends_a_call_without_a_timeout_by_an_error(path, process):
    settings = {"do": "without_a_cluster", "path": str(path), "process": process}
    with Program.of("trainers", settings, own_group=True) as trainer:
        said = trainer.said()

    assert "AD498 the Ray cluster is lost" in said, said
    assert said.splitlines()[-1] == "closed"
