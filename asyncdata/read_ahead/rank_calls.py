"""Calls of an exchange between ranks, in a thread of their own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError
from asyncdata.core.threads import call_soon_in_this_loop, started_and_awaited
from asyncdata.workers.changes import Promise

MessageT = TypeVar("MessageT")


def rank_answers(answers: Sequence[bytes], kind: type[MessageT], world_size: int, name: str) -> list[MessageT]:
    """The messages of all ranks.

    :param kind: of the messages; they are in MessagePack.
    :param name: of the setting that has the exchange.
    :raises ConfigError: AD487, if they are none.
    """
    try:
        if not all(isinstance(answer, bytes | bytearray | memoryview) for answer in answers):
            raise TypeError(f"they are of the type {type(answers[0]).__name__}")

        messages = list(map(msgspec.msgpack.Decoder(kind).decode, answers))
    except (msgspec.DecodeError, TypeError) as error:
        raise ConfigError(f"AD487 {name} did not return the bytes of each rank: {error}") from error

    if len(messages) != world_size:
        raise ConfigError(f"AD487 {name} returned the bytes of {len(messages)} ranks; world_size is {world_size}")

    return messages


T = TypeVar("T")
_END_TIMEOUT_S = 5.0


def has_left(answers: object) -> bool:
    """Whether a rank has made its last call: it sent no byte."""
    return isinstance(answers, list | tuple) and any(isinstance(one, bytes | bytearray) and not one for one in answers)


class RankCalls:
    """Calls the exchange, one call after another. A rank that sends no byte has left, and no rank calls after that.

    :param ranks: the loader's setting, with an exchange: a call sends bytes to all ranks, and returns those of each.
    :param timeout_s: seconds to wait for the others in a call; None: as long as the exchange itself waits.
    :param what: they exchange, for errors.
    :param then: what follows from a call that fails, for its error.
    :ivar answers: what the ranks sent in the last call that has ended; the coroutine that called may be cancelled.
    """

    def __init__(self, ranks: Any, timeout_s: float | None, what: str, then: str) -> None:
        self._exchange: Callable[[bytes], list[bytes]] = ranks.exchange
        self._timeout_s, self._what, self._then = timeout_s, what, then
        self._queue: SimpleQueue[Callable[[], bytes | None] | None] = SimpleQueue()
        self._has_ended = threading.Event()
        self._has_failed = False
        self.answers: list[bytes] = []
        self._thread: threading.Thread | None = None
        self._asked: Promise[list[bytes]] | None = None

    def start(self) -> None:
        """From now on, calls may be made from the loop that is running here."""
        self._call_soon = call_soon_in_this_loop()
        stuck = f"AD486 the other ranks did not come to the last exchange of {self._what}: this process ends without it"
        self._thread = started_and_awaited(self._run, "asyncdata-exchange", stuck)

    async def call(self, make: Callable[[], bytes], take: Callable[[list[bytes]], T], after_s: float = 0.0) -> T:
        """What ``take`` makes of the answers of all ranks. One call at a time, and none after one has failed.

        :param make: makes what is sent.
        :param after_s: seconds to wait before the call.
        :raises WorkerError: AD486, if the others cannot be reached, or ``take`` cannot use what they sent.
        """
        self._asked = Promise()
        self.put(make, after_s)
        answers = await self._asked
        try:
            return take(answers)
        except AsyncDataError:
            raise
        except Exception as error:
            raise WorkerError(f"AD486 what the other ranks sent cannot be used: {error!r}") from error

    def put(self, make: Callable[[], bytes | None], after_s: float = 0.0) -> None:
        """Queue a call whose answers are not needed; none if ``make`` returns None. From any thread."""
        self._queue.put(partial(self._after, after_s, make) if after_s else make)

    def end(self) -> None:
        """End the thread after what is queued, and wait for it: the other ranks call, too, or are closed.

        One that waits for them longer is waited for at the end of the process.
        """
        self._has_ended.set()
        self._queue.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread() or self._has_failed or sys.is_finalizing():
            return

        thread.join(_END_TIMEOUT_S)

    def _after(self, seconds: float, make: Callable[[], bytes | None]) -> bytes | None:
        self._has_ended.wait(seconds)
        return make()

    def _run(self) -> None:
        try:
            while (make := self._queue.get()) is not None:
                data = make()
                if data is None:
                    return

                self.answers = self._exchanged(data)
                self._call_soon(partial(self._hand_over, self.answers))
                if has_left(self.answers):
                    return
        except BaseException as error:  # whatever the trainer's library raises: nothing else would see it
            self._fail(f"cannot be reached: {error!r}")

    def _exchanged(self, data: bytes) -> list[bytes]:
        late = threading.Timer(self._timeout_s or 0.0, self._fail, ["did not take part"])
        late.daemon = True
        if self._timeout_s is not None:
            late.start()
        try:
            return self._exchange(data)
        finally:
            late.cancel()

    def _hand_over(self, answers: list[bytes] | None, error: WorkerError | None = None) -> None:
        if self._asked is not None and not self._asked.is_kept:
            self._asked.keep(answers, error)

    def _fail(self, what: str) -> None:
        self._has_failed = True
        limit = "" if self._timeout_s is None else f" (exchange_timeout_s={self._timeout_s:g})"
        error = WorkerError(f"AD486 the other ranks {what} in an exchange of {self._what}{limit}: {self._then}")
        self._call_soon(partial(self._hand_over, None, error))
