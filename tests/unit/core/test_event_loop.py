"""Waking a loop from another thread: the callback runs in the loop, and a loop that has ended is not an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.support.parts import call_soon_in_this_loop

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


def test_without_a_loop_there_is_nothing_to_call():
    with pytest.raises(RuntimeError, match="no running event loop"):
        call_soon_in_this_loop()
