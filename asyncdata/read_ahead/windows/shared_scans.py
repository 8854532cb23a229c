"""Scans that ranks divide: each reads and tokenizes its own, and all exchange the samples.

All ranks read the same windows of D. A scan asks for the samples of some blocks of a window; it belongs to one of the
ranks, which sends the reply to all. A rank calls the exchange as long as it waits for a scan of another, or has a reply
that it has not sent. So a call ends: what a rank waits for, all others need for the same step, and thus wait for it, or
have it.

What a reply has depends on the data alone. So where another rank has left, cannot be reached or is slow, a rank makes
its scans itself, and no sample differs. A rank that is slow, or does not read, is waited for once; it is asked again
when it calls again, and some time has passed: each time twice as long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import anyio
import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, get_logger
from asyncdata.core.messages import Data, Failed, Reply, decode_reply, encode
from asyncdata.read_ahead.rank_calls import RankCalls, has_left, rank_answers
from asyncdata.workers.base import Crashed
from asyncdata.workers.changes import Changes

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
