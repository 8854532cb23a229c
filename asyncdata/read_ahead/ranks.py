"""Calls of an exchange between ranks, in a thread of their own."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError, get_logger
from asyncdata.core.messages import Data, Failed, Reply, decode_reply, encode
from asyncdata.core.threads import call_soon_in_this_loop, started_and_awaited
from asyncdata.workers.base import Crashed
from asyncdata.workers.changes import Changes, Promise

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


_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.02
"""Before a call of a rank that has nothing to send: after a call that brought something, and at most. Each is twice as
long as the one before, so that small windows do not wait, and ranks whose workers are busy do not call all the time."""

_PATIENCE_S = 20.0
"""After it, a rank makes a scan of another rank itself."""

_NUM_PATIENCES = 10
"""So many times as long it first asks that rank for nothing."""

_MAX_BYTES = 4 << 20
"""What a rank sends in one call, unless one reply is larger."""

_KEPT_WINDOWS, _MOST_KEPT, _KEPT_BYTES = 3, 256, 16 << 20
"""Of each part, the windows whose replies came last, more of them if they are small: a rank that restarts later than
others needs what they sent before that, and does not get it again. They may have read many small windows ahead."""

_log = get_logger(__name__)


class Key(NamedTuple):
    """Which scan: the part of the mixture, the epoch, the number of the window in it, and that of the scan."""

    part: int
    epoch: int
    window: int
    scan: int


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends in one call.

    :ivar identity: of all that replies depend on.
    :ivar replies: to its own scans.
    """

    identity: str
    replies: list[tuple[Key, Data]] = []


class _Late(NamedTuple):
    """A rank that did not answer in time.

    :ivar pause_s: in which it is asked for nothing, which ends at ``until_s``.
    :ivar num_answers: of all ranks so far.
    """

    pause_s: float
    until_s: float
    num_answers: int


class SharedScans:
    """The scans of one loader. Call methods in the service's thread, except :meth:`leave`.

    :param ranks: the loader's setting, with an exchange.
    :param identity: makes the digest of all that replies depend on; called in a thread of its own.
    :ivar world_size: the number of ranks.
    """

    def __init__(self, ranks: Any, identity: Callable[[], str]) -> None:
        self.world_size, self._rank, self._identity = ranks.world_size, ranks.rank, identity
        self._calls = RankCalls(ranks, None, "samples", "this rank makes all of them itself until the next start")
        self._late: dict[int, _Late] = {}
        self._num_answers = 0
        self._awaited: Counter[int] = Counter()  # scans of each rank
        self._found: dict[Key, Data] = {}
        self._unsent: list[tuple[Key, Data]] = []
        self._changes = Changes()
        self._is_started = self._is_alone = self._has_left = False
        self._num_failed, self._pause_s = 0, 0.0
        self._fault: ConfigError | None = None

    async def scanned(
        self, scan: tuple[int, int, int, int], num_scans: int, make: Callable[[], Awaitable[Reply | Crashed]]
    ) -> tuple[Reply | Crashed, bool]:
        """The reply to a scan; and whether another rank has made it.

        :param scan: the fields of its :class:`Key`; ``num_scans``: of its window. Scans are dealt one after the other.
        :param make: makes the scan here.
        :raises ConfigError: AD487, if the ranks do not belong together.
        """
        key = Key(*scan)
        rank = (key.window * num_scans + key.scan + key.part) % self.world_size
        if rank != self._rank:
            found = await self._from(rank, key)
            return (decode_reply(found), True) if found else (await make(), False)

        reply = await make()
        if not self._is_alone:
            # A request that failed because of a row is made by each rank again, and tells of that row.
            sent = Failed("WorkerError", reply.reason, row=0) if isinstance(reply, Crashed) else reply
            self._unsent.append((key, encode(sent)))
            self._changes()
        return reply, False

    async def _from(self, rank: int, key: Key) -> Data:
        """What another rank sends; nothing in it if the scan is to be made here."""
        found: Data = b""
        self._awaited[rank] += 1
        try:
            with anyio.move_on_after(_PATIENCE_S) as patience:
                self._changes()
                found = await self._changes.until(partial(self._look, rank, key))
            if patience.cancelled_caught:
                self._give_up(rank)
        finally:
            self._awaited[rank] -= 1
        if found:
            self._late.pop(rank, None)
        return found

    def _look(self, rank: int, key: Key) -> Data | None:
        """What is found; nothing in it if it is not waited for any more; None if it is."""
        if self._fault is not None:
            raise self._fault

        late = self._late.get(rank)
        is_late = late is not None and (late.num_answers == self._num_answers or time.monotonic() < late.until_s)
        found = self._found.get(key)
        if found is None and (self._is_alone or is_late):
            return b""

        return found

    def _give_up(self, rank: int) -> None:
        """A rank has not answered in time: make its scans here, and ask it again later."""
        late = self._late.get(rank)
        pause_s = _NUM_PATIENCES * _PATIENCE_S if late is None else 2 * late.pause_s
        self._late[rank] = _Late(pause_s, time.monotonic() + pause_s, self._num_answers)
        self._tell(self._awaited[rank], f"no answer in {_PATIENCE_S:g} s")
        self._changes()

    def _tell(self, num_scans: int, reason: str) -> None:
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:
            _log.warning("scans.not_shared", num_scans=num_scans, reason=reason)

    async def run(self) -> None:
        """Call the exchange as long as there is something to send or to wait for, until cancelled."""
        self._is_started = True
        self._calls.start()
        try:
            while not self._has_left:
                await self._changes.until(lambda: bool(self._unsent) or self._awaited.total() or None)
                replies = self._next_replies()
                self._pause_s = 0.0 if replies else min(_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
                make = partial(self._message, replies)
                self._has_left = await self._calls.call(make, self._take, self._pause_s)
        except ConfigError as error:
            self._fault = error
        except AsyncDataError as error:
            self._tell(self._awaited.total(), str(error))
            self._calls.put(bytes)  # if the fault is in here, others would wait for this rank
        self._is_alone = True
        self._unsent.clear()
        self._changes()

    def _next_replies(self) -> list[tuple[Key, Data]]:
        replies: list[tuple[Key, Data]] = []
        size = 0
        while self._unsent and (not replies or size + len(self._unsent[0][1]) <= _MAX_BYTES):
            replies.append(self._unsent.pop(0))
            size += len(replies[-1][1])
        return replies

    def _message(self, replies: list[tuple[Key, Data]]) -> bytes:
        return encode(_Message(self._identity(), replies))

    def _take(self, answers: list[bytes]) -> bool:
        """Keep what the ranks sent; return whether one of them has left.

        :raises ConfigError: if they do not belong together.
        """
        self._num_answers += 1
        if has_left(answers):
            _log.info("scans.rank_closed")  # no alarm: so does every run end
            return True

        messages = rank_answers(answers, _Message, self.world_size, "Ranks(exchange=...)")
        own = messages[self._rank].identity
        for rank, message in enumerate(messages):
            if message.identity != own:
                raise ConfigError(
                    f"AD487 rank {rank} reads other rows than rank {self._rank}: its data, its tokenize function or "
                    "its settings differ, or two loaders have one exchange"
                )

            if rank != self._rank:
                self._keep(message.replies)
        self._changes()
        return False

    def _keep(self, replies: list[tuple[Key, Data]]) -> None:
        if replies:
            self._pause_s = 0.0
        for key, reply in replies:
            self._found.pop(key, None)  # so that it comes last
            self._found[key] = reply
        for part in {key.part for key, _ in replies}:
            sizes = Counter[tuple[int, ...]]()
            for key, found in reversed(self._found.items()):
                if key.part == part:
                    sizes[key[:3]] += len(found)
            totals = enumerate(zip(sizes, accumulate(sizes.values()), strict=True))
            dropped = {
                window for n, (window, size) in totals if n >= (_MOST_KEPT if size <= _KEPT_BYTES else _KEPT_WINDOWS)
            }
            if dropped:
                self._found = {key: found for key, found in self._found.items() if key[:3] not in dropped}

    def leave(self) -> None:
        """The loader is closing: say that in the last call, also if there was no other: another rank may have called.
        The service has ended.
        """
        if self._is_started and not (self._is_alone or self._has_left):
            self._calls.put(bytes)
        self._has_left = True
        self._calls.end()
