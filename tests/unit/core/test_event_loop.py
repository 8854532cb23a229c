"""A call into a loop from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from tests.support.parts import call_soon_in_this_loop


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_from_the_loop_itself_does_not_run_at_once_and_after_the_loop_has_ended_never(backend):
    called: list[int] = []

    async def main():
        call_soon, event = call_soon_in_this_loop(), anyio.Event()
        call_soon(event.set)

        assert not event.is_set()
        await event.wait()
        return call_soon

    call_soon = anyio.run(main, backend=backend)
    call_soon(lambda: called.append(1))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call_soon, lambda: called.append(2)).result()
    assert called == []
