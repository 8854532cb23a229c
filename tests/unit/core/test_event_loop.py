"""Waking a loop from another thread: the callback runs in the loop, and a loop that has ended is not an error."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
import uvloop

from asyncdata.core.threads import call_soon_in_this_loop

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs an async function to its end, in a loop of each kind."""
    backend, options = BACKENDS[request.param]
    return lambda function: anyio.run(function, backend=backend, backend_options=options)


def in_a_thread(function: Callable[[], object]) -> None:
    """Calls ``function`` in another thread, and waits until it has returned or raised."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_calls_from_another_thread_run_in_the_loop_in_the_order_they_came(run):
    async def main() -> list[tuple[int, int]]:
        call_soon, event, seen = call_soon_in_this_loop(), anyio.Event(), []

        def from_there() -> None:
            for number in range(100):
                call_soon(lambda number=number: seen.append((number, threading.get_ident())))
            call_soon(event.set)

        in_a_thread(from_there)
        assert seen == [], "they ran in the thread that called"
        await event.wait()
        return seen

    wanted = [(number, threading.get_ident()) for number in range(100)]
    assert [run(main), run(main)] == [wanted, wanted], "a loop is taken for one that ran here before"


def test_a_call_from_the_loop_itself_does_not_run_at_once_and_after_the_loop_has_ended_never(run):
    called: list[int] = []

    async def main() -> Callable[[Callable[[], object]], object]:
        call_soon, event = call_soon_in_this_loop(), anyio.Event()
        call_soon(event.set)

        assert not event.is_set()
        await event.wait()
        return call_soon

    call_soon = run(main)
    call_soon(lambda: called.append(1))
    in_a_thread(lambda: call_soon(lambda: called.append(2)))

    assert called == []


def test_what_is_called_knows_which_loop_it_is_in(run):
    """anyio asks the context, and a thread of the trainer has none."""

    async def main() -> list[float]:
        call_soon, event, times = call_soon_in_this_loop(), anyio.Event(), []

        def wake() -> None:
            times.append(anyio.current_time())  # raises where anyio knows of no loop
            event.set()

        in_a_thread(lambda: contextvars.Context().run(call_soon, wake))
        with anyio.fail_after(240):
            await event.wait()
        return [*times, anyio.current_time()]

    before, after = run(main)
    assert before <= after


def test_without_a_loop_there_is_nothing_to_call():
    with pytest.raises(RuntimeError, match="no running event loop"):
        call_soon_in_this_loop()


def test_trio_is_not_imported_for_the_sake_of_asking(monkeypatch):
    monkeypatch.delitem(sys.modules, "trio")

    async def main() -> None:
        event = asyncio.Event()
        call_soon_in_this_loop()(event.set)
        await event.wait()

    asyncio.run(main())
    assert "trio" not in sys.modules


def test_a_loop_inside_a_host_is_the_one_that_runs_here():
    """Both libraries in one process, each in a thread of its own."""
    libraries: list[str] = []

    async def main(library: str) -> None:
        call_soon, event = call_soon_in_this_loop(), anyio.Event()
        in_a_thread(lambda: call_soon(event.set))
        await event.wait()
        libraries.append(library)

    in_a_thread(lambda: trio.run(main, "trio"))
    in_a_thread(lambda: uvloop.run(main("uvloop")))
    asyncio.run(main("asyncio"))

    assert libraries == ["trio", "uvloop", "asyncio"]
