"""Calls of an exchange between ranks, in a thread of their own."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from asyncdata.core.errors import WorkerError
from asyncdata.core.threads import call_soon_in_this_loop, started

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("RankCalls", "has_left")


def has_left(answers: object) -> bool:
    """Whether a rank has made its last call: it sent no byte."""
    return isinstance(answers, list | tuple) and b"" in answers


class RankCalls:
    """Calls the exchange, one call after another. A rank that sends no byte has left, and no rank calls after that.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param timeout_s: seconds to wait for the others in a call; None: as long as the exchange itself waits.
    :param what: they exchange, for errors.
    """

    def __init__(self, exchange: Callable[[bytes], list[bytes]], timeout_s: float | None, what: str) -> None:
        self._exchange, self._timeout_s, self._what = exchange, timeout_s, what
        self._queue: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._has_ended = threading.Event()

    def start(self, on_answers: Callable[[list[bytes]], object], on_failed: Callable[[WorkerError], object]) -> None:
        """From now on, call these in the loop that is running here."""
        self._call_soon, self._on_answers, self._on_failed = call_soon_in_this_loop(), on_answers, on_failed
        started(self._run, "asyncdata-exchange")

    def put(self, make: Callable[[], bytes], after_s: float = 0.0) -> None:
        """Queue what to send in the next call, as a function that makes it. From any thread.

        :param after_s: seconds to wait before the call.
        """
        self._queue.put(partial(self._after, after_s, make) if after_s else make)

    def end(self) -> None:
        """End the thread after what is queued. A call that does not return is not waited for."""
        self._has_ended.set()
        self._queue.put(None)

    def _after(self, seconds: float, make: Callable[[], bytes]) -> bytes:
        self._has_ended.wait(seconds)
        return make()

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            late = threading.Timer(self._timeout_s or 0.0, self._fail, ["did not take part"])
            late.daemon = True
            if self._timeout_s is not None:
                late.start()
            try:
                answers = self._exchange(make())
            except Exception as error:  # whatever the trainer's library raises
                self._fail(f"cannot be reached: {error!r}")
                return
            finally:
                late.cancel()
            self._call_soon(partial(self._hand_over, answers))
            if has_left(answers):
                return

    def _hand_over(self, answers: list[bytes]) -> None:
        try:
            self._on_answers(answers)
        except Exception as error:  # nothing else would see it, and calls would wait for ever
            self._on_failed(WorkerError(f"AD486 what the other ranks sent cannot be used: {error!r}"))

    def _fail(self, what: str) -> None:
        limit = "" if self._timeout_s is None else f" (exchange_timeout_s={self._timeout_s:g})"
        error = WorkerError(
            f"AD486 the other ranks {what} in an exchange of {self._what}{limit}: one of them has died, or does not "
            "read from its loader. Restart all of them from a snapshot"
        )
        self._call_soon(partial(self._on_failed, error))
