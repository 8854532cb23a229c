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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Data, Failed, decode_reply, encode
from asyncdata.core.rank_answers import rank_answers
from asyncdata.prefetch.rank_calls import RankCalls, has_left
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Reply
    from asyncdata.workers.base import OnReply

__all__ = ("SharedScans",)

_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.02
"""Before a call of a rank that has nothing to send: after a call that brought something, and at most. Each is twice as
long as the one before, so that small windows do not wait, and ranks whose workers are busy do not call all the time."""

_PATIENCE_S = 20.0
"""After it, a rank makes a scan of another rank itself."""

_NUM_PATIENCES = 10
"""So many times as long it first asks that rank for nothing."""

_MAX_BYTES = 4 << 20
"""What a rank sends in one call, unless one reply is larger."""

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


class _Awaited(NamedTuple):
    """A scan of another rank.

    :ivar rank: whose it is.
    :ivar make: makes the scan here.
    :ivar late_s: when this is to be done.
    """

    rank: int
    make: Callable[[], object]
    on_found: OnReply
    late_s: float


class _Late(NamedTuple):
    """A rank that did not answer in time.

    :ivar pause_s: in which it is asked for nothing, which ends at ``until_s``.
    :ivar num_answers: of all ranks so far.
    """

    pause_s: float
    until_s: float
    num_answers: int


_decode = msgspec.msgpack.Decoder(_Message).decode


class SharedScans:
    """The scans of one loader. Call methods in the service's thread, except :meth:`leave`.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param identity: makes the digest of all that replies depend on; called in a thread of its own.
    :ivar world_size: the number of ranks.
    """

    def __init__(
        self, exchange: Callable[[bytes], list[bytes]], rank: int, world_size: int, identity: Callable[[], str]
    ) -> None:
        self.world_size = world_size
        self._rank, self._identity = rank, identity
        self._calls = RankCalls(exchange, None, "samples", "this rank makes all of them itself until the next start")
        self._late: dict[int, _Late] = {}
        self._num_answers = 0
        self._awaited: dict[Key, _Awaited] = {}
        self._found: dict[Key, Data] = {}
        self._unsent: list[tuple[Key, Data]] = []
        self._is_started = self._is_calling = self._is_alone = self._has_left = False
        self._on_ready: dict[int, Callable[[], object]] = {}
        self._num_failed, self._pause_s = 0, 0.0
        self._fault: Exception | None = None
        self._has_fault: anyio.Event | None = None

    def on_ready(self, part: int, on_ready: Callable[[], object]) -> None:
        """Call this when ``part`` of the mixture has an answer, or a scan to make."""
        self._on_ready[part] = on_ready

    def restart(self, part: int) -> None:
        """Wait for no scan of the part any more."""
        self._awaited = {key: awaited for key, awaited in self._awaited.items() if key.part != part}

    def divide(
        self,
        scan: tuple[int, int, int, int],
        num_scans: int,
        make: Callable[[OnReply], object],
        on_reply: OnReply,
        on_found: OnReply,
    ) -> None:
        """Have a scan made, here or by another rank.

        :param scan: the fields of its :class:`Key`; ``num_scans``: of its window. Scans are dealt one after the other.
        :param make: makes the scan here, soon.
        :param on_found: called in place of ``on_reply`` with what another rank has found.
        """
        key = Key(*scan)
        rank = (key.window * num_scans + key.scan + key.part) % self.world_size
        if self._is_alone or self._is_late(rank):
            make(on_reply)
            return

        if rank == self._rank:
            make(partial(self._on_own, key, on_reply))
            return

        self._found = {of: found for of, found in self._found.items() if of.part != key.part or of[1:3] >= key[1:3]}
        late_s = time.monotonic() + _PATIENCE_S
        self._awaited[key] = _Awaited(rank, partial(make, on_reply), on_found, late_s)
        if key not in self._found:
            self._call()

    def _is_late(self, rank: int) -> bool:
        late = self._late.get(rank)
        return late is not None and (late.num_answers == self._num_answers or time.monotonic() < late.until_s)

    def deliver(self, part: int) -> None:
        """Hand over the replies of other ranks that are there."""
        for key in [key for key in self._found if key.part == part and key in self._awaited]:
            awaited = self._awaited.pop(key)
            self._late.pop(awaited.rank, None)
            awaited.on_found(decode_reply(self._found.pop(key)))

    async def watch(self, part: int) -> None:
        """Make scans here that come too late, until cancelled.

        :raises Exception: what was raised where an answer was handed over.
        """
        self._has_fault = self._has_fault or anyio.Event()
        self._start()
        while True:
            with anyio.move_on_after(_PATIENCE_S / 4):
                await self._has_fault.wait()
            if self._fault is not None:
                raise self._fault

            now_s = time.monotonic()
            missing = {key: one for key, one in self._awaited.items() if key not in self._found}
            late = {one.rank for key, one in missing.items() if key.part == part and one.late_s <= now_s}
            for rank in late:
                pause_s = 2 * self._late[rank].pause_s if rank in self._late else _NUM_PATIENCES * _PATIENCE_S
                self._late[rank] = _Late(pause_s, now_s + pause_s, self._num_answers)
            if late:
                keys = [key for key, one in missing.items() if one.rank in late]
                self._make_here(keys, f"no answer in {_PATIENCE_S:g} s")

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._calls.start(self._on_answers, self._on_failed)

    def leave(self) -> None:
        """The loader is closing: say that in the last call, also if there was no other: another rank may have called.
        The service has ended.
        """
        if self._is_started and not (self._is_alone or self._has_left):
            self._calls.put(bytes)
        self._has_left = True
        self._calls.end()

    # Calls

    def _on_own(self, key: Key, on_reply: OnReply, reply: Reply | Crashed) -> None:
        # A request that failed because of a row is made by each rank again, and tells of that row.
        sent = Failed("WorkerError", reply.reason, row=0) if isinstance(reply, Crashed) else reply
        if not self._is_alone:
            self._unsent.append((key, encode(sent)))
            self._call()
        on_reply(reply)

    def _call(self) -> None:
        if self._is_calling or self._is_alone or not (self._unsent or self._awaited):
            return

        self._start()
        replies: list[tuple[Key, Data]] = []
        size = 0
        while self._unsent and (not replies or size + len(self._unsent[0][1]) <= _MAX_BYTES):
            replies.append(self._unsent.pop(0))
            size += len(replies[-1][1])
        self._is_calling = True
        self._pause_s = 0.0 if replies else min(_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._calls.put(lambda: encode(_Message(self._identity(), replies)), self._pause_s)

    def _on_answers(self, answers: list[bytes]) -> None:
        self._is_calling = False
        self._num_answers += 1
        if self._is_alone:
            return

        if has_left(answers):
            _log.info("scans.rank_closed")  # no alarm: so does every run end
            self._alone()
            return

        try:
            messages = rank_answers(answers, _decode, self.world_size, "Ranks(exchange=...)")
            self._check(messages)
        except ConfigError as error:
            self._end(error)
            return

        for rank, message in enumerate(messages):
            if rank != self._rank:
                self._found.update(message.replies)
        parts = {key.part for key in self._awaited if key in self._found}
        self._pause_s = 0.0 if parts else self._pause_s
        self._call()
        self._tell(parts)

    def _check(self, messages: list[_Message]) -> None:
        own = messages[self._rank].identity
        for rank, message in enumerate(messages):
            if message.identity != own:
                raise ConfigError(
                    f"AD487 rank {rank} reads other rows than rank {self._rank}: its data, its tokenize function or "
                    "its settings differ, or two loaders have one exchange"
                )

    def _end(self, error: ConfigError) -> None:
        """The ranks do not belong together: an error of all calls."""
        awaited, self._awaited, self._is_alone = self._awaited, {}, True
        for each in awaited.values():
            each.on_found(Failed(type(error).__name__, str(error)))
        self._tell({key.part for key in awaited})

    def _on_failed(self, error: AsyncDataError) -> None:
        self._alone(str(error))

    def _alone(self, reason: str = "") -> None:
        """From now on, make all scans here."""
        self._is_alone = True
        self._unsent.clear()
        self._make_here([key for key in self._awaited if key not in self._found], reason)

    def _make_here(self, keys: list[Key], reason: str) -> None:
        self._num_failed += bool(reason)
        if reason and self._num_failed & (self._num_failed - 1) == 0:
            _log.warning("scans.not_shared", num_scans=len(keys), reason=reason)
        for key in keys:
            self._awaited.pop(key).make()
        self._tell({key.part for key in keys})

    def _tell(self, parts: set[int]) -> None:
        try:
            for part in parts:
                self.deliver(part)
                self._on_ready[part]()
        except Exception as error:  # nothing else would see it, and calls would wait for ever
            self._fault = error
            if self._has_fault is not None:
                self._has_fault.set()
