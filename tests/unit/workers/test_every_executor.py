"""The promises of every executor. A new executor has to pass this suite unchanged."""

from __future__ import annotations

import os
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import RayExecutor, WorkerError
from asyncdata.core.messages import NO_SLOT, Overflow, Permute, Tokenize, Tokenized
from asyncdata.workers.base import NUM_SLOTS
from asyncdata.workers.inline import InlineExecutor
from asyncdata.workers.pool.process_pool import ProcessExecutor
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, failure_of, ids_of, tokenized, until, value_of
from tests.support.ray_cluster import two_nodes
from tests.support.tokenize_fns import fails_on_13, in_batches, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.workers.base import Executor
    from tests.support.ray_cluster import RayNodes

EXECUTORS: dict[str, Callable[[Any], Executor]] = {
    "inline": InlineExecutor,
    "process": lambda function: ProcessExecutor(2),
    "ray": lambda function: ray_executor(),
}
BACKENDS = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=["inline", "process", pytest.param("ray", marks=pytest.mark.thorough)])
def make(request: pytest.FixtureRequest) -> Callable[[Any], Executor]:
    if request.param == "ray":
        request.getfixturevalue("ray_nodes")
    return EXECUTORS[request.param]


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    pytest.importorskip("ray")
    with two_nodes() as nodes:
        yield nodes


def ray_executor() -> Executor:
    from asyncdata.workers.ray.executor import ClusterExecutor

    return ClusterExecutor(RayExecutor(num_workers=2, num_cpus=0.5))


def errors_of(reply: Tokenized) -> list[tuple[int, str]]:
    return [(error.row, error.code) for error in reply.errors]


def free_slots(executor: Executor) -> int:
    """How many slots can be held now; they are released again."""
    held = [slot for slot in (executor.slots.hold() for _ in range(NUM_SLOTS)) if slot is not None]
    for slot in held:
        executor.slots.release(slot)
    return len(held)


# Requests and replies


async def test_every_request_is_answered_once_with_its_own_rows(make, rows):
    client = Client(make(row_id), rows(500), row_id)
    async with client.reading() as window:
        asked = {client.ask(window.request(first, first + 7)): first for first in range(0, 497, 7)}
        await client.until(lambda: all(client.replies[number] for number in asked))
        await client.tokenized(window)  # one more, after all others: no request is answered twice

    for number, first in asked.items():
        (reply,) = client.replies[number]
        assert ids_of(reply) == list(range(first, first + 7))


async def test_requests_may_come_before_the_start(make, rows):
    client = Client(make(row_id), rows(20), row_id)
    window = client.unread_window()
    early = [client.ask(scan) for scan in window.scans()]

    async with client.running():
        (scanned,) = await client.answers(early)

    assert window.add(0, scanned)
    assert window.num_rows == 20


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
async def test_every_executor_runs_on_every_event_loop(make, rows, backend):
    async def main() -> list[int]:
        client = Client(make(row_id), rows(50), row_id)
        async with client.running():
            return ids_of(await client.tokenized(await client.window()))

    name, options = BACKENDS[backend]
    in_its_own_thread = partial(anyio.run, main, backend=name, backend_options=options)
    assert await anyio.to_thread.run_sync(in_its_own_thread) == list(range(50))


async def test_a_request_without_rows_is_answered(make, rows):
    client = Client(make(row_id), rows(3), row_id)
    async with client.running():
        reply = await client.tokenized(await client.window(), 0, 0)

    assert (ids_of(reply), reply.errors, reply.drops) == ([], [], {})


async def test_forgotten_requests_are_not_answered_and_later_ones_are(make, rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    client = Client(make(worker_fns.waits), rows(40, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    async with client.reading() as window:
        forgotten = [client.ask(window.request(first, first + 4)) for first in range(0, 40, 4)]
        await until(began.exists)
        answered = {number for number in forgotten if client.replies[number]}
        client.executor.forget()
        client.executor.forget()
        wanted = client.ask(window.request(8, 12))
        gate.touch()
        reply = await client.answer(wanted)
        executor = client.executor
        executor.slots.release(window.slot)
        await until(lambda: free_slots(executor) == NUM_SLOTS)

    assert ids_of(reply) == [8, 9, 10, 11]
    assert {number for number in forgotten if client.replies[number]} == answered
    assert forgotten[0] not in answered


@pytest.mark.thorough
async def test_an_executor_cancelled_inside_a_row_stops_at_once(make, rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    client = Client(make(worker_fns.waits), rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    with anyio.fail_after(NEVER_S):
        async with client.running():
            client.ask((await client.window()).request(0, 1))
            await until(began.exists)

    gate.touch()  # the abandoned thread ends


# Slots


async def test_a_forgotten_request_keeps_its_slot_until_it_is_finished(make, rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    client = Client(make(worker_fns.waits), rows(9, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    executor = client.executor
    async with client.reading() as window:
        for first in range(0, 9, 3):
            client.ask(window.request(first, first + 3))
        await until(began.exists)
        executor.forget()
        executor.slots.release(window.slot)
        assert free_slots(executor) == NUM_SLOTS - 1

        gate.touch()
        await until(lambda: free_slots(executor) == NUM_SLOTS)


async def test_an_answered_request_keeps_its_slot_until_its_rows_can_be_requested_again(make, rows):
    client = Client(make(row_id), rows(9), row_id)
    executor = client.executor
    free: list[int] = []
    async with client.reading() as window:
        executor.submit(window.request(0, 9), lambda reply: free.append(free_slots(executor)))
        executor.slots.release(window.slot)
        await until(lambda: free)
        await until(lambda: free_slots(executor) == NUM_SLOTS)

    assert free == [NUM_SLOTS - 1]


async def test_a_reused_slot_shows_no_stale_bytes(make, jsonl_file):
    """Rows of the second file are shorter: bytes of the first file after them must not show."""
    long = jsonl_file([{"id": i, "text": "x" * 300} for i in range(60)], "long.jsonl")
    client = Client(make(row_id), long, row_id, block_bytes=1000, slack_bytes=100)
    async with client.running():
        first = await client.window()
        assert ids_of(await client.tokenized(first)) == list(range(60))
        client.executor.slots.release(first.slot)
        await until(lambda: free_slots(client.executor) == NUM_SLOTS)

        window = await client.window()
        assert window.slot == first.slot
        assert ids_of(await client.tokenized(window, 30, 60)) == list(range(30, 60))


# What a tokenize function may do


async def test_a_row_whose_function_raises_is_bad_and_its_neighbours_are_not(make, rows):
    reply = await tokenized(make(fails_on_13), rows(30), fails_on_13)

    (error,) = reply.errors
    assert (error.row, error.code) == (13, "AD421")
    assert error.reason == "the tokenize function raised KeyError('thirteen')"
    assert '"id": 13' in error.excerpt
    assert "tokenize_fns.py" in error.traceback
    assert "asyncdata/tokenization" not in error.traceback, "the library's own frames only hide the user's"
    assert ids_of(reply) == [i for i in range(30) if i != 13]


@pytest.mark.parametrize("function", [worker_fns.as_told, worker_fns.as_told_in_batches])
async def test_each_row_has_its_own_fate_also_in_a_batch(make, rows, function):
    """An exit is no Exception, as the error of a panic in Rust is none."""
    fates = {2: "nothing", 3: "a reason", 5: "a reason", 6: "raise", 7: "exit"}
    reply = await tokenized(make(function), rows(9, {row: {"do": fate} for row, fate in fates.items()}), function)

    assert {reason: np.frombuffer(rows, np.int32).tolist() for reason, rows in reply.drops.items()} == {
        "tokenize_fn": [2],
        "too dull": [3, 5],
    }
    assert [(error.row, error.code, error.reason) for error in reply.errors] == [
        (6, "AD421", "the tokenize function raised ValueError('row 6 is not to my taste')"),
        (7, "AD421", "the tokenize function raised SystemExit(3)"),
    ]
    assert ids_of(reply) == [0, 1, 4, 8]


async def test_broken_rows_are_bad_and_the_function_never_sees_them(make, jsonl_file):
    lines = [b'{"id": 0}', b'{"id": 1', b'{"id": 2}', b"\xff\xfe", b"[4]", b'{"id": 5}']
    reply = await tokenized(make(in_batches), jsonl_file(lines), in_batches)

    assert errors_of(reply) == [(1, "AD101"), (3, "AD106"), (4, "AD113")]
    assert ids_of(reply) == [0, 2, 5]


@pytest.mark.parametrize("what", ["raises", "exits"])
async def test_a_function_that_cannot_be_opened_is_a_worker_error(make, rows, what):
    description = worker_fns.Opening(what)
    executor = make(description)
    client = Client(executor, rows(1), description)
    executor.prepare(client.slot_bytes)

    with anyio.fail_after(NEVER_S), pytest.raises(WorkerError, match=r"^AD426 .*(no tokenizer\.json|not today)"):
        await executor.run(client.job)


# Long rows


@pytest.mark.parametrize("function", [worker_fns.as_told, worker_fns.as_told_in_batches])
async def test_rows_longer_than_the_limit_are_bad_and_errors_keep_their_rows_between_them(make, jsonl_file, function):
    rows = [{"id": 0, "x": "x" * 5000}, {"id": 1}, {"id": 2, "do": "raise"}, {"id": 3}, {"id": 4, "x": "y" * 99_000}]
    path = jsonl_file(rows)
    reply = await tokenized(make(function), path, function, block_bytes=512, slack_bytes=64, max_row_bytes=4000)

    assert errors_of(reply) == [(0, "AD108"), (2, "AD421"), (4, "AD108")]
    assert reply.errors[0].reason == "the row is longer than max_row_bytes (4000)"
    assert ids_of(reply) == [1, 3]
    assert np.frombuffer(reply.kept, np.int32).tolist() == [1, 3]


async def test_rows_that_are_not_wholly_in_the_slot_are_read_again(make, jsonl_file):
    """Rows that are longer than the over-read cross every block border."""
    texts = [chr(ord("a") + i % 26) * (i * 37 % 900) for i in range(80)]
    path = jsonl_file([{"id": i, "prompt": text} for i, text in enumerate(texts)])
    client = Client(make(worker_fns.echoes), path, worker_fns.echoes, block_bytes=256, slack_bytes=32)
    async with client.reading() as window:
        request = window.request(0, 80)
        reply = await client.answer(client.ask(request))

    assert len(request.overflow) > 20
    assert isinstance(reply, Tokenized)
    assert [value_of(reply, "prompt", i) for i in range(80)] == texts


# Files


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (lambda path: os.truncate(path, 7), "SourceChangedError", "AD302 {} shrank: it had 50 bytes at the start, and"),
        (os.unlink, "SourceError", "AD304 cannot read {}: No such file or directory"),
    ],
    ids=["it shrank", "it is gone"],
)
async def test_a_file_that_is_not_what_it_was_fails_the_request(make, rows, harm, kind, message):
    path = rows(5)
    client = Client(make(row_id), path, row_id)
    async with client.running():
        harm(path)
        failed = failure_of(await client.answer(client.ask(next(iter(client.unread_window().scans())))))

    assert failed.kind == kind
    assert failed.message.startswith(message.format(path))


async def test_more_files_than_may_be_open_at_once(make, tmp_path):
    for i in range(150):
        (tmp_path / f"{i:03}.jsonl").write_text(f'{{"id": {i}}}\n')
    client = Client(make(row_id), tmp_path, row_id)
    async with client.reading() as window:
        asked = [client.ask(window.request(first, first + 10)) for first in range(0, 150, 10)]
        replies = await client.answers(asked)

    assert [number for reply in replies for number in ids_of(reply)] == list(range(150))


# Statistics


async def test_num_wanted_falls_to_zero_when_enough_is_submitted_and_more_is_queued(make, rows, tmp_path):
    gate = tmp_path / "gate"
    client = Client(make(worker_fns.waits), rows(50, {i: {"gate": str(gate)} for i in range(50)}), worker_fns.waits)
    executor = client.executor
    wanted = [executor.num_wanted]
    async with client.reading() as window:
        asked = []
        while executor.num_wanted > 0:
            asked.append(client.ask(window.request(len(asked), len(asked) + 1)))
            wanted.append(executor.num_wanted)
            await anyio.lowlevel.checkpoint()
        more = [client.ask(window.request(49, 50)) for _ in range(12)]
        assert executor.statistics().num_queued >= 12, "those that no worker has"
        assert executor.num_wanted <= 0
        gate.touch()
        await client.answers(asked + more)

        assert executor.statistics().num_queued == 0
        assert executor.num_workers < len(asked) + 1 < 50
        assert wanted == list(range(wanted[0], -1, -1))
        assert executor.num_wanted == wanted[0]


async def test_statistics_say_who_is_busy_and_how_far(make, rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    special = {i: {"gate": str(gate)} for i in range(20)}
    special[4] |= {"began": str(began)}
    for i in range(4):
        special[i] = {}
    client = Client(make(worker_fns.waits), rows(20, special), worker_fns.waits)
    executor = client.executor
    async with client.reading() as window:
        idle = executor.statistics()
        asked = [client.ask(window.request(first, first + 5)) for first in range(0, 20, 5)]
        await until(began.exists)
        busy = executor.statistics()
        gate.touch()
        await client.answers(asked)
        again = executor.statistics()

    assert "busy" not in {worker.state for worker in idle.workers}
    assert len(idle.workers) == executor.num_workers
    # Of a worker that shares no memory, the row is known only when it was asked: when it takes long.
    row = 0 if executor.answers_with_samples else 4
    first = next(worker for worker in busy.workers if worker.state == "busy" and worker.num_rows_done == row)
    assert first.busy_s > 0
    assert "busy" not in {worker.state for worker in again.workers}
    assert (busy.num_restarts, again.num_restarts, again.num_queued) == (0, 0, 0)


# The callback on_change


class Watch:
    """Records the calls of on_change.

    :ivar seen: what ``look`` gave at each of them.
    """

    def __init__(self, executor: Executor, look: Callable[[], Any]) -> None:
        self.seen: list[Any] = []
        executor.watch(lambda: self.seen.append(look()))


async def test_on_change_is_called_after_on_reply_has_returned(make, rows):
    client = Client(make(row_id), rows(10), row_id)
    async with client.running():
        number = len(client.replies)
        watch = Watch(client.executor, lambda: [len(replies) for replies in client.replies[number:]])
        await client.answer(client.ask(Permute(5, 1)))
        await until(lambda: watch.seen)

    assert watch.seen[-1] == [1]


async def test_on_change_is_called_for_a_forgotten_reply(make, rows, tmp_path):
    """The request has no slot whose release would show it; and by then there is room for more."""
    began, gate = tmp_path / "began", tmp_path / "gate"
    path = rows(1, {0: {"began": str(began), "gate": str(gate)}})
    client = Client(make(worker_fns.waits), path, worker_fns.waits)
    async with client.running():
        executor = client.executor
        length = len(path.read_bytes()) - 1
        place = Overflow(0, 0, 0)
        read = Tokenize(NO_SLOT, array("i", [-1]).tobytes(), array("i", [length]).tobytes(), [place])
        client.ask(read)
        await until(began.exists)
        executor.forget()
        before = executor.num_wanted
        watch = Watch(executor, lambda: executor.num_wanted)
        gate.touch()
        await until(lambda: before + 1 in watch.seen)  # another worker may become ready before

    assert client.replies == [[]]


async def test_on_change_is_called_when_a_slot_becomes_free(make, rows):
    client = Client(make(row_id), rows(10), row_id)
    async with client.reading() as window:
        watch = Watch(client.executor, lambda: free_slots_seen(client.executor))
        client.executor.slots.release(window.slot)

    assert watch.seen[-1] == NUM_SLOTS


def free_slots_seen(executor: Executor) -> int:
    """As :func:`free_slots`, but a release calls on_change itself."""
    executor.slots.on_free, on_free = bool, executor.slots.on_free
    try:
        return free_slots(executor)
    finally:
        executor.slots.on_free = on_free


# Opening the tokenize function again


async def test_an_opened_again_function_answers_later_requests_and_no_request_is_lost(make, rows, tmp_path):
    told = tmp_path / "told"
    told.write_text("1000")
    function = worker_fns.AddsWhatAFileSaid(str(told))
    client = Client(make(function), rows(200), function)
    async with client.reading() as window:
        await client.tokenized(window, 0, 1)
        (tmp_path / "next").write_text("2000")
        (tmp_path / "next").replace(told)  # in one step: a worker of Ray that starts now reads it
        asked = [client.ask(window.request(row, row + 1)) for row in range(100)]
        client.executor.reopen()
        found = [ids_of(reply)[0] for reply in await client.answers(asked)]
        while ids_of(await client.tokenized(window, 199, 200)) != [2199]:
            assert len(client.replies) < 100_000

    assert [number % 1000 for number in found] == list(range(100))
    assert {number // 1000 for number in found} <= {1, 2}
    assert all(len(replies) == 1 for replies in client.replies)


async def test_a_function_that_cannot_be_opened_again_stays_in_use(make, rows, tmp_path):
    told = tmp_path / "told"
    told.write_text("1000")
    function = worker_fns.AddsWhatAFileSaid(str(told))
    client = Client(make(function), rows(3), function)
    with capture_logs() as events:
        async with client.reading() as window:
            assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]
            told.unlink()
            client.executor.reopen()
            while "workers.not_reopened" not in {event["event"] for event in events}:
                assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]
            assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]

    assert "workers.reopened" not in {event["event"] for event in events}
