"""What counts as a lost cluster: a process that has ended, and not one that is slow."""

from __future__ import annotations

import socket

import anyio
import anyio.to_thread
import pytest

from asyncdata import WorkerError
from asyncdata.workers.ray import health


@pytest.mark.asyncio
async def test_a_closed_connection_is_opened_again_and_only_refused_ones_are_a_loss(monkeypatch):
    monkeypatch.setattr(health, "_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.RaisesGroup(pytest.RaisesExc(WorkerError, match="AD498 .* its head has ended")):
            async with anyio.create_task_group() as group:
                group.start_soon(health._run_until_refused, "its head", address, 3)  # noqa: SLF001 - without Ray
                for _ in range(3):
                    connection, _ = await anyio.to_thread.run_sync(server.accept)
                    connection.close()
                server.close()
