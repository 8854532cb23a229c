"""A worker process: it is small, logs its output, ignores Ctrl-C, and ends with its socket."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest
import structlog

from asyncdata.core.framing import frame
from asyncdata.core.messages import Failed, decode_reply
from asyncdata.core.specs import TokenizeSpec
from asyncdata.tokenization.base import describe
from asyncdata.workers.pool.early_start import StartedForkServer
from asyncdata.workers.pool.process_pool import ProcessExecutor
from asyncdata.workers.pool.processes import SharedResources
from asyncdata.workers.pool.spawning import WorkerFactory
from asyncdata.workers.pool.worker_main import open_or_report, receive
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, ids_of, until, value_of
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio

HEAVY = {"datasets", "jinja2", "numpy", "pyarrow", "pytest", "structlog", "torch", "transformers", "anyio", "asyncio"}


@pytest.mark.thorough
async def test_idle_work_runs_when_a_worker_has_no_request(jsonl_file, tmp_path):
    mark = tmp_path / "mark"
    executor = ProcessExecutor(1)
    path = jsonl_file([{"id": row, "mark": str(mark)} for row in range(20)])
    client = Client(executor, path, worker_fns.leaves_work)
    async with client.reading() as window:
        assert ids_of(await client.tokenized(window)) == list(range(20))
        await until(mark.exists)
        assert ids_of(await client.tokenized(window)) == list(range(20))
        assert mark.read_text() == str(executor.statistics().workers[0].pid)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (None, "a worker needs a tokenize function that can be imported"),
        (TokenizeSpec("tests.support.nowhere:fn"), "cannot import 'tests.support.nowhere:fn'"),
        (describe(worker_fns.Opening("raises")), "no tokenizer.json to be seen"),
        (describe(worker_fns.Opening("exits")), "not today"),
    ],
    ids=["none", "cannot be imported", "raises", "exits"],
)
async def test_a_function_that_cannot_be_opened_is_reported_before_the_worker_exits(spec, reason):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(EOFError):
            open_or_report(theirs, spec)
        _, body = receive(ours)

    told = decode_reply(body)
    assert isinstance(told, Failed)
    assert (told.kind, told.message[:5]) == ("WorkerError", "AD426")
    assert reason in told.message


async def seen_from_inside(path: Path) -> dict[str, Any]:
    """The result of :func:`worker_fns.surroundings` in a worker."""
    client = Client(ProcessExecutor(1), path, worker_fns.surroundings)
    async with client.running():
        return value_of(await client.tokenized(await client.window()), "extra")


async def test_a_worker_imports_no_heavy_module(jsonl_file):
    found = await seen_from_inside(jsonl_file([{"id": 1}]))

    assert set(found["modules"]) & HEAVY == set()
    assert "msgspec" in found["modules"]


@pytest.mark.thorough
async def test_a_worker_with_a_tokenizer_imports_no_heavy_module(jsonl_file, small_tokenizer):
    from asyncdata import PromptTokenizeFn

    fn = PromptTokenizeFn(str(small_tokenizer), prompt_key="prompt")
    executor = ProcessExecutor(1)
    client = Client(executor, jsonl_file([{"prompt": "hello"}]), fn.resolve())
    async with client.running():
        await client.tokenized(await client.window())
        (worker,) = executor.statistics().workers
        libraries = {os.path.basename(path.path) for path in psutil.Process(worker.pid).memory_maps()}

    assert any(name.startswith("tokenizers") for name in libraries)
    assert not [name for name in libraries if name.startswith(("_multiarray", "libtorch", "libarrow"))]


async def test_a_worker_has_the_environment_and_the_parents_that_are_documented(jsonl_file, monkeypatch):
    monkeypatch.setenv("ASYNCDATA_TEST_NAME", "inherited")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    names = ["ASYNCDATA_TEST_NAME", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"]
    names.append("OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = await seen_from_inside(jsonl_file([{"id": 1, "names": names}]))

    assert found["environment"] == {
        "ASYNCDATA_TEST_NAME": "inherited",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert found["grandparent"] == os.getpid(), "the fork server is between them"
    assert found["group"] == os.getpgid(0), "Ray ends a trainer's process group"
    assert found["stdin"] == "/dev/null"
    assert found["main"] is None, "the trainer's script must not run again"
    assert found["path"] == absolute(sys.path)
    assert found["cwd"] == os.getcwd()
    assert found["sigint"]


def absolute(paths: list[str]) -> list[str]:
    return [os.path.abspath(path) for path in paths]


async def test_the_output_of_a_worker_goes_to_the_log(jsonl_file):
    executor = ProcessExecutor(1)
    client = Client(executor, jsonl_file([{"id": 0}]), worker_fns.talks)
    with structlog.testing.capture_logs() as events:
        async with client.running():
            await client.tokenized(await client.window())
            (worker,) = executor.statistics().workers
            await until(lambda: "hello from row 0" in said(events))

    assert "a warning" in said(events)
    first = next(event for event in events if event["event"] == "worker.output")
    assert (first["worker"], first["pid"], first["log_level"]) == (0, worker.pid, "info")


@pytest.mark.thorough
async def test_much_output_does_not_block_a_worker_and_does_not_fill_the_log(jsonl_file):
    client = Client(ProcessExecutor(1), jsonl_file([{"id": i} for i in range(20)]), worker_fns.noisy)
    with structlog.testing.capture_logs() as events:
        async with client.running():
            assert ids_of(await client.tokenized(await client.window())) == list(range(20))

    assert 4096 <= len(said(events)) <= 100 * 4096


def said(events: Any) -> str:
    return "".join(event["text"] for event in events if event["event"] == "worker.output")


async def test_a_fork_server_whose_socket_ends_before_its_job_exits():
    started = StartedForkServer.with_pipe()
    started.ends.sock.close()
    assert await anyio.to_thread.run_sync(started.process.wait) == 0
    started.end()


async def test_a_worker_that_receives_an_invalid_request_exits(jsonl_file):
    """Then its requests are sent to another worker; a worker that guessed would be worse."""
    client = Client(ProcessExecutor(1), jsonl_file([{"id": 0}]), row_id)
    with SharedResources(1, client.slot_bytes, 1) as shared, anyio.fail_after(NEVER_S):
        factory = WorkerFactory(shared)
        async with anyio.create_task_group() as group:
            factory.begin(group, client.job)
            process = await factory.start_worker(0)
            await process.connection.receive()
            process.connection.send(frame(7, client.job))
            with pytest.raises(EOFError):
                await process.connection.receive()
            await process.handle.ended()
            await process.handle.ask_status()
            assert process.handle.status == 1
            process.kill()
            process.wait()
            group.cancel_scope.cancel()
        factory.close()

    assert "ValidationError" in process.output


async def test_a_worker_starts_fast_and_uses_little_memory(jsonl_file):
    """A tenth of a second is promised; ten seconds are allowed on a busy machine."""
    executor = ProcessExecutor(1)
    client = Client(executor, jsonl_file([{"id": 0}]), row_id)
    with anyio.fail_after(10):
        async with client.running():
            await client.window()
            await until(lambda: executor.statistics().workers[0].state == "idle")
            (worker,) = executor.statistics().workers
            assert psutil.Process(worker.pid).memory_info().rss < 60 << 20
