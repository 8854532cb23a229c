"""Executors that tell when a worker began and ended each request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import OfPart, Scan, Tokenize, Tokenized
from asyncdata.workers.base import MAX_LOSSES, Crashed
from asyncdata.workers.inline import InlineExecutor
from asyncdata.workers.pool.process_pool import ProcessExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Reply, Request
    from asyncdata.workers.base import OnReply
    from asyncdata.workers.pool.calls import Call
    from asyncdata.workers.pool.worker import Worker

    OnRequest: TypeAlias = Callable[[int, str, float, float, dict[str, Any]], object]

__all__ = ("TracedInlineExecutor", "TracedProcessExecutor")


class TracedProcessExecutor(ProcessExecutor):
    """See :class:`~asyncdata.workers.pool.process_pool.ProcessExecutor`.

    :ivar on_request: called with the number of the worker, the request's name, when it was sent and when it ended, on
        the monotonic clock, and facts about it. A request of a worker that was lost is told with its last worker.
    """

    on_request: OnRequest = staticmethod(no_op)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent: dict[int, tuple[int, float]] = {}  # request id -> worker, and when it was sent
        self._backlog.on_end = self._ended

    def _send(self, worker: Worker, call: Call) -> None:
        self._sent[call.request_id] = worker.process.number, time.monotonic()
        super()._send(worker, call)

    def _ended(self, call: Call, outcome: Reply | Crashed) -> None:
        sent = self._sent.pop(call.request_id, None)
        if sent is not None:
            self.on_request(sent[0], _name(call.request), sent[1], time.monotonic(), _facts(call.request, outcome))


class TracedInlineExecutor(InlineExecutor):
    """See :class:`~asyncdata.workers.inline.InlineExecutor`; its thread is worker 0.

    :ivar on_request: as of :class:`TracedProcessExecutor`.
    """

    on_request: OnRequest = staticmethod(no_op)

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        """As the protocol says."""
        sent = time.monotonic()

        def traced(outcome: Reply | Crashed) -> None:
            self.on_request(0, _name(request), sent, time.monotonic(), _facts(request, outcome))
            on_reply(outcome)

        super().submit(request, traced, max_losses)


def _name(request: Request) -> str:
    own = request.request if isinstance(request, OfPart) else request
    return {Tokenize: "chunk", Scan: "read blocks"}.get(type(own), type(own).__name__)


def _facts(request: Request, outcome: Reply | Crashed) -> dict[str, Any]:
    own = request.request if isinstance(request, OfPart) else request
    facts: dict[str, Any] = {"part": request.part} if isinstance(request, OfPart) else {}
    if isinstance(own, Tokenize):
        facts["rows"] = len(own.lengths) // 4
    elif isinstance(own, Scan):
        facts["blocks"] = len(own.blocks)
    if isinstance(outcome, Tokenized):
        facts["cpu_ms"] = round(outcome.busy_s * 1000, 3)
    elif isinstance(outcome, Crashed):
        facts["crashed"] = outcome.code
    return facts
