"""Tells when a worker began and ended each request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncdata.core.messages import Scan, Tokenize, Tokenized
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Reply
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.pool.pool import Pool

__all__ = ("trace",)


def trace(pool: Pool, on_request: Callable[[int, str, float, float, dict[str, Any]], object]) -> None:
    """Tell of each request of the pool that a worker had, when it ends.

    :param on_request: called with the number of the worker, the request's name, when it was sent and when it ended, on
        the monotonic clock, and facts about it. A request of a worker that was lost is told with its last worker.
    """

    def ended(call: Call, outcome: Reply | Crashed) -> None:
        if call.worker < 0:
            return

        request = call.request
        name = {Tokenize: "chunk", Scan: "read blocks"}.get(type(request), type(request).__name__)
        facts: dict[str, Any] = {"part": request.part} if pool.num_parts > 1 else {}
        if isinstance(request, Tokenize):
            facts["rows"] = len(request.lengths) // 4
        elif isinstance(request, Scan):
            facts["blocks"] = len(request.blocks)
        if isinstance(outcome, Tokenized):
            facts["cpu_ms"] = round(outcome.busy_s * 1000, 3)
        elif isinstance(outcome, Crashed):
            facts["crashed"] = outcome.code
        on_request(call.worker, name, call.sent_s, time.monotonic(), facts)

    pool.on_end(ended)
