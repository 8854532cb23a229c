"""The promises of every executor. A new executor has to pass this suite unchanged."""

from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import RayExecutor
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, ids_of, process_pool, tokenized, until, value_of
from tests.support.loading import characters, row_id
from tests.support.parts import NUM_SLOTS, InlineExecutor
from tests.support.ray_cluster import two_nodes
from tests.support.worker_fns import waits

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=["inline", "process", pytest.param("ray", marks=pytest.mark.thorough)])
def make(request):
    if request.param == "ray":
        request.getfixturevalue("ray_nodes")
        from tests.support.parts import ClusterExecutor

        return lambda _: ClusterExecutor(RayExecutor(num_workers=2, num_cpus=0.5))

    return InlineExecutor if request.param == "inline" else lambda _: process_pool(2)


@pytest.fixture(scope="module")
def ray_nodes():
    pytest.importorskip("ray")
    with two_nodes() as nodes:
        yield nodes


def free_slots(executor) -> int:
    """How many slots can be held now; they are released again, which calls on_change."""
    held = [slot for slot in (executor.slots.hold() for _ in range(NUM_SLOTS)) if slot is not None]
    for slot in held:
        executor.slots.release(slot)
    return len(held)


async def test_every_request_is_answered_once_with_its_own_rows(make, rows):
    client = Client(make(row_id), rows(500), row_id)
    async with client.reading() as window:
        asked = {client.ask(window.request(first, first + 7)): first for first in range(0, 497, 7)}
        await client.until(lambda: all(client.replies[number] for number in asked))
        await client.tokenized(window)  # one more, after all others: no request is answered twice
        nothing = await client.tokenized(window, 3, 3)
    for number, first in asked.items():
        (reply,) = client.replies[number]
        assert ids_of(reply) == list(range(first, first + 7))
    assert (ids_of(nothing), nothing.errors, nothing.drops) == ([], [], {})


async def test_requests_may_come_before_the_start(make, rows):
    client = Client(make(row_id), rows(20), row_id)
    window = client.unread_window()
    async with client.running():
        (scanned,) = await client.answers([client.ask(scan) for scan in window.scans()])
    assert window.add(0, scanned)
    assert window.num_rows == 20


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "options"), [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})])
async def test_every_executor_runs_on_every_event_loop(make, rows, backend, options):
    async def main() -> list[int]:
        return ids_of(await tokenized(make(row_id), rows(50), row_id))

    in_its_own_thread = partial(anyio.run, main, backend=backend, backend_options=options)
    assert await anyio.to_thread.run_sync(in_its_own_thread) == list(range(50))


async def test_forgotten_requests_are_not_answered_and_later_ones_are(make, rows, gate):
    client = Client(make(waits), rows(40, {0: gate.special}), waits)
    async with client.reading() as window:
        forgotten = [client.ask(window.request(first, first + 4)) for first in range(0, 40, 4)]
        await until(gate.began.exists)
        answered = {number for number in forgotten if client.replies[number]}
        client.executor.forget()
        client.executor.forget()
        wanted = client.ask(window.request(8, 12))
        gate.open()
        reply = await client.answer(wanted)
        executor = client.executor
        executor.slots.release(window.slot)
        await until(lambda: free_slots(executor) == NUM_SLOTS)

    assert ids_of(reply) == [8, 9, 10, 11]
    assert {number for number in forgotten if client.replies[number]} == answered
    assert forgotten[0] not in answered


@pytest.mark.thorough
async def test_an_executor_cancelled_inside_a_row_stops_at_once(make, rows, gate):
    client = Client(make(waits), rows(1, {0: gate.special}), waits)
    with anyio.fail_after(NEVER_S):
        async with client.reading() as window:
            client.ask(window.request(0, 1))
            await until(gate.began.exists)
    gate.open()  # the abandoned thread ends


async def test_a_forgotten_request_keeps_its_slot_until_it_is_finished(make, rows, gate):
    client = Client(make(waits), rows(9, {0: gate.special}), waits)
    executor = client.executor
    async with client.reading() as window:
        for first in range(0, 9, 3):
            client.ask(window.request(first, first + 3))
        await until(gate.began.exists)
        executor.forget()
        executor.slots.release(window.slot)
        assert free_slots(executor) == NUM_SLOTS - 1
        gate.open()
        await until(lambda: free_slots(executor) == NUM_SLOTS)


async def test_a_reused_slot_shows_no_stale_bytes(make, jsonl_file):
    """Rows that are read later are shorter: bytes of the others after them must not show."""
    long = jsonl_file([{"id": i, "text": "x" * 300} for i in range(60)], "long.jsonl")
    client = Client(make(row_id), long, row_id, block_bytes=1000, slack_bytes=100)
    async with client.reading() as first:
        assert ids_of(await client.tokenized(first)) == list(range(60))
        client.executor.slots.release(first.slot)
        await until(lambda: free_slots(client.executor) == NUM_SLOTS)
        window = await client.window()
        assert window.slot == first.slot
        assert ids_of(await client.tokenized(window, 30, 60)) == list(range(30, 60))


@pytest.mark.parametrize("function", [worker_fns.as_told, worker_fns.as_told_in_batches])
async def test_each_row_has_its_own_fate_also_in_a_batch(make, jsonl_file, function):
    """An exit is no Exception, as the error of a panic in Rust is none. A row that is too long is not asked for."""
    fates = {2: "nothing", 3: "a reason", 5: "a reason", 6: "raise", 7: "exit"}
    rows = [{"id": i, "do": fates.get(i, "id"), "pad": "x" * (5000 if i in (0, 9) else 9)} for i in range(10)]
    path = jsonl_file([*rows, b"\xff\xfe", b"[4]"])
    reply = await tokenized(make(function), path, function, block_bytes=512, slack_bytes=64, max_row_bytes=4000)

    dropped = {reason: np.frombuffer(rows, np.int32).tolist() for reason, rows in reply.drops.items()}
    assert dropped == {"tokenize_fn": [2], "too dull": [3, 5]}
    assert [(error.row, error.code, error.reason) for error in reply.errors[:4]] == [
        (0, "AD108", "the row is longer than max_row_bytes (4000)"),
        (6, "AD421", "the tokenize function raised ValueError('row 6 is not to my taste')"),
        (7, "AD421", "the tokenize function raised SystemExit(3)"),
        (9, "AD108", "the row is longer than max_row_bytes (4000)"),
    ]
    assert [(error.row, error.code) for error in reply.errors[4:]] == [(10, "AD106"), (11, "AD113")]
    assert ids_of(reply) == np.frombuffer(reply.kept, np.int32).tolist() == [1, 4, 8]


async def test_rows_that_are_not_wholly_in_the_slot_are_read_again(make, jsonl_file):
    """Rows that are longer than the over-read cross every block border."""
    texts = [chr(ord("a") + i % 26) * (i * 37 % 900) for i in range(80)]
    path = jsonl_file([{"id": i, "prompt": text} for i, text in enumerate(texts)])
    client = Client(make(characters), path, characters, block_bytes=256, slack_bytes=32)
    async with client.reading() as window:
        request = window.request(0, 80)
        reply = await client.answer(client.ask(request))
    assert len(request.overflow) > 20
    assert [value_of(reply, "prompt", i) for i in range(80)] == texts


async def test_statistics_say_who_is_busy_and_how_far(make, rows, gate):
    waiting = dict.fromkeys(range(5, 20), {"gate": gate.special["gate"]})
    client = Client(make(waits), rows(20, {4: gate.special, **waiting}), waits)
    executor = client.executor
    async with client.reading() as window:
        idle = executor.statistics()
        asked = [client.ask(window.request(first, first + 5)) for first in range(0, 20, 5)]
        await until(gate.began.exists)
        busy = executor.statistics()
        gate.open()
        await client.answers(asked)
        again = executor.statistics()

    assert "busy" not in {worker.state for worker in [*idle.workers, *again.workers]}
    assert len(idle.workers) == executor.num_workers
    # Of a worker that shares no memory, the row is known only when it was asked: when it takes long.
    row = 0 if executor.answers_with_samples else 4
    first = next(worker for worker in busy.workers if worker.state == "busy" and worker.num_rows_done == row)
    assert first.busy_s > 0
    assert (busy.num_restarts, again.num_restarts, again.num_queued) == (0, 0, 0)


async def test_an_opened_again_function_answers_later_requests_and_no_request_is_lost(make, rows, tmp_path):
    told = tmp_path / "told"
    told.write_text("1000")
    function = worker_fns.Shifted(str(told))
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


@pytest.mark.thorough
async def test_an_actor_that_is_starting_meanwhile_opens_the_function_again_too(ray_nodes, rows, tmp_path):
    from tests.support.parts import ClusterExecutor

    told = tmp_path / "told"
    told.write_text("1000")
    function = worker_fns.Opening("shifts once let in", str(tmp_path))
    executor = ClusterExecutor(RayExecutor(num_workers=2, num_cpus=0.5))
    client = Client(executor, rows(4), function)
    with capture_logs() as events:
        async with client.reading() as window:
            await until(lambda: len(list(tmp_path.glob("start *"))) == 2)
            told.write_text("2000")
            executor.reopen()
            (tmp_path / "open").touch()
            await until(lambda: [event["event"] for event in events].count("workers.reopened") == 2)
            asked = [client.ask(window.request(row, row + 1)) for row in range(4)]  # two for each actor
            found = [ids_of(reply)[0] for reply in await client.answers(asked)]

    assert found == [2000, 2001, 2002, 2003]


async def test_a_function_that_cannot_be_opened_again_stays_in_use(make, rows, tmp_path):
    told = tmp_path / "told"
    told.write_text("1000")
    function = worker_fns.Shifted(str(told))
    client = Client(make(function), rows(3), function)
    with capture_logs() as events:
        async with client.reading() as window:
            assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]
            told.write_text("no number")
            client.executor.reopen()
            while "workers.not_reopened" not in {event["event"] for event in events}:
                assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]
            assert ids_of(await client.tokenized(window)) == [1000, 1001, 1002]

    assert "workers.reopened" not in {event["event"] for event in events}
