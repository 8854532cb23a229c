"""A request that loses its worker is sent again by the pool, to a limit that its caller may lower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import WorkerError
from asyncdata.workers.base import MAX_LOSSES, Crashed, error_of
from asyncdata.workers.pool.process_pool import ProcessExecutor
from tests.support import worker_fns
from tests.support.executors import Client, ids_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.asyncio, pytest.mark.thorough]


@pytest.fixture
def client(jsonl_file: Callable[..., Path], tmp_path: Path) -> Callable[[int], Client]:
    """A function that gives a pool of one worker, whose first row kills so many workers."""

    def make(deaths: int) -> Client:
        rows: list[dict[str, Any]] = [{"id": i, "deaths": deaths, "tally": str(tmp_path / "tally")} for i in range(3)]
        return Client(ProcessExecutor(1), jsonl_file(rows), worker_fns.kills_several_workers)

    return make


def num_restarts(client: Client) -> int:
    return client.executor.statistics().num_restarts


async def test_a_request_is_sent_again_until_a_worker_answers_it(client):
    asker = client(MAX_LOSSES - 1)
    async with asker.running():
        window = await asker.window()
        assert ids_of(await asker.answer(asker.ask(window.request(0, 3)))) == [0, 1, 2]

    assert num_restarts(asker) == MAX_LOSSES - 1


@pytest.mark.parametrize("max_losses", [1, 2, MAX_LOSSES])
async def test_a_request_fails_after_as_many_losses_as_its_caller_allows(client, max_losses):
    asker = client(MAX_LOSSES)
    async with asker.running():
        window = await asker.window()
        reply = await asker.answer(asker.ask(window.request(0, 3), max_losses))

    assert reply == Crashed("AD423", "its worker died (SIGKILL)")
    assert num_restarts(asker) == max_losses
    error = error_of(reply)
    assert isinstance(error, WorkerError)
    assert str(error).endswith("each was lost: its worker died (SIGKILL)")
