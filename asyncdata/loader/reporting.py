"""Reports of scores that are awaited: the event loop runs while other ranks make theirs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

import anyio

from asyncdata.core.threads import call_soon_in_this_loop, started_and_awaited


def reporting(report: Callable[[], int], before: Future[int] | None) -> Future[int]:
    """The result of a report that a thread makes, after one that was made before."""
    result: Future[int] = Future()

    def run() -> None:
        if before is not None:
            wait([before])
        try:
            result.set_result(report())
        except BaseException as error:  # for who waits
            result.set_exception(error)

    stuck = "AD486 the other ranks did not come to a report of scores: this process ends without it"
    started_and_awaited(run, "asyncdata-report", stuck)
    return result


async def settled(result: Future[int]) -> None:
    """Wait until it is there, or its error."""
    ready, call_soon = anyio.Event(), call_soon_in_this_loop()
    result.add_done_callback(lambda _: call_soon(ready.set))
    await ready.wait()
