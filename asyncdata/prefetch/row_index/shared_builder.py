"""Builds the row index together with the other ranks: each finds the rows of its share, and all exchange them.

The ranks work in rounds. A round is the next blocks, divided among the ranks; later rounds are larger, so that the
first rows are known soon. At its end all ranks exchange what they found, and append the same parts, in the order of the
blocks. So the index is the one that each rank would build by itself, and all ranks make the same calls of the exchange.
Before the first round, they compare what earlier runs have stored; if that differs, a rank with the most of it gives it
to the others.

Where rows are copied out, each rank then copies those that others have looked at: it may need any of them.

A rank that fails or is closed sends that in its next call, and the others end with an error that names it.
"""

from __future__ import annotations

from array import array
from collections import deque
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError
from asyncdata.core.messages import Index, Indexed
from asyncdata.core.rank_answers import rank_answers
from asyncdata.prefetch.rank_calls import RankCalls
from asyncdata.prefetch.row_index.builder import PER_WORKER, Indexer
from asyncdata.sources.spool import is_whole, part_path
from asyncdata.workers.base import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asyncdata.core.messages import Reply
    from asyncdata.workers.base import Crashed

__all__ = ("SharedIndexer",)

_MAX_BLOCKS_PER_ROUND = 4096
"""Of all ranks together: some 5,000,000 rows of 860 bytes, and 65 MB in each rank while they are exchanged."""

_PARTS_AT_ONCE = 256
"""Stored parts that a rank gives to the others in one call."""


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends in one call.

    :ivar call: the number of the call, from 0.
    :ivar identity: of all that the index depends on.
    :ivar num_stored: blocks that the rank has from earlier runs.
    """

    call: int
    identity: str
    num_stored: int = 0
    parts: list[Indexed] = []
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class SharedIndexer(Indexer):
    """Fills ``index`` as :class:`~asyncdata.prefetch.row_index.builder.Indexer` does, whose parameters it has.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param timeout_s: seconds to wait for the others in a call.
    :param identity: of all that the index depends on; equal for all ranks.
    :param on_ready: called when rows are known that no worker has answered with.
    """

    def __init__(
        self,
        *args: Any,
        exchange: Callable[[bytes], list[bytes]],
        timeout_s: float,
        rank: int,
        world_size: int,
        identity: str,
        on_ready: Callable[[], object],
        shows_rows: bool,
    ) -> None:
        super().__init__(*args, shows_rows=shows_rows)
        self._rank, self._world_size, self._identity, self._on_ready = rank, world_size, identity, on_ready
        died = "one of them has died, or does not read from its loader. Restart all of them from a snapshot"
        self._calls = RankCalls(exchange, timeout_s, "rows' lengths", died)
        self._num_calls = self._round_size = self._first_block = self._end_block = 0
        self._num_stored = 0
        self._stored: Iterator[Indexed] = iter(())
        self._giver, self._num_to_give = -1, 0
        self._received: list[Indexed] = []
        self._to_copy: deque[tuple[Indexed, Index]] = deque()
        self._is_waiting = self._has_left = False

    def restart(self) -> None:
        """As the base class says. What was sent to the other ranks is not sent again."""
        if self._is_read:
            if self._received:
                self._copy_missing()
            elif not self._is_waiting:
                self._find_own()
            return

        self._is_read = True
        self._calls.start(self._on_answers, self._on_failed)
        try:
            for part in () if self._file is None else self._file.parts():
                if not self._is_usable(part, self._num_stored):
                    break

                self._num_stored += len(part.counts) // 4
        except OSError as error:
            self._num_stored = 0
            self._forget_file(error)
        self._send(num_stored=self._num_stored)

    def leave(self) -> None:
        """As the base class says: tell the other ranks, if they still need this one."""
        super().leave()
        if self._is_read and not self._has_left and not self._index.is_complete:
            last = _Message(self._num_calls, self._identity, error="its loader was closed")
            self._calls.put(lambda: None if self._is_over() else _encode(last))
        self._has_left = True
        self._calls.end()

    def _is_over(self) -> bool:
        """Whether the other ranks call no more: their last call, of which the service has not heard any more, was that
        of a rank that has left, or had the rest of the index. In the thread of the calls.
        """
        messages = [_decode(answer) for answer in self._calls.answers if self._is_waiting]
        counts = [message.num_stored for message in messages]
        if self._num_calls == 1:
            is_whole = bool(counts) and min(counts) == self._source.num_blocks
        else:
            parts = chain(self._received, *(message.parts for message in messages))
            is_whole = self._index.num_blocks + sum(len(part.counts) // 4 for part in parts) >= self._source.num_blocks
        return is_whole or any(message.error for message in messages)

    # This rank's share of a round.

    def _begin_round(self) -> None:
        start, world_size = self._index.num_blocks, self._world_size
        self._round_size = min(max(world_size, 2 * self._round_size), max(world_size, _MAX_BLOCKS_PER_ROUND))
        size, rank = min(self._round_size, self._source.num_blocks - start), self._rank
        self._first_block, self._end_block = (start + size * number // world_size for number in (rank, rank + 1))
        self._find_own()

    def _find_own(self) -> None:
        self._next_block, self._num_asked = self._first_block, 0
        self._found.clear()
        self._append_found()

    def _append_found(self) -> None:
        self._ask()
        if not self._num_asked and self._index.fault is None:
            parts = [self._found[first] for first in sorted(self._found)]
            self._found.clear()
            self._send(parts=parts)

    # What the ranks exchange.

    def _send(self, **fields: Any) -> None:
        self._is_waiting = True
        self._calls.put(partial(_encode, _Message(self._num_calls, self._identity, **fields)))
        self._num_calls += 1

    def _on_failed(self, error: AsyncDataError) -> None:
        """The other ranks cannot be reached any more."""
        self._has_left = True
        self._give_up(error)
        self._on_ready()

    def _give_up(self, error: AsyncDataError | OSError) -> None:
        super()._give_up(error)
        if self._index.fault is not None and not self._has_left:
            self._has_left = True
            self._send(error=str(error))

    def _on_answers(self, answers: list[bytes]) -> None:
        if self._index.fault is not None or self._index.is_complete:
            return

        self._is_waiting = False
        try:
            self._take_all(self._checked(answers))
        except AsyncDataError as error:
            self._give_up(error)
        self._on_growth()
        self._on_ready()

    def _checked(self, answers: list[bytes]) -> list[_Message]:
        """What all ranks sent in the last call.

        :raises WorkerError: if one of them has failed.
        :raises ConfigError: if they are not those of one run.
        """
        messages = rank_answers(answers, _decode, self._world_size, "Ranks(exchange=...)")
        for rank, message in enumerate(messages):
            if message.error:
                self._has_left = True  # the others know it, too
                raise WorkerError(f"AD486 rank {rank} takes no part in the exchange any more: {message.error}")

            if message.identity != self._identity or message.call != self._num_calls - 1:
                raise ConfigError(
                    f"AD487 rank {rank} counts other rows than rank {self._rank}: its data, its tokenize "
                    "function or its settings differ, or two loaders have one exchange"
                )

        return messages

    def _take_all(self, messages: list[_Message]) -> None:
        """Append what the ranks sent, and do what is next."""
        if self._num_calls == 1:
            self._agree([message.num_stored for message in messages])
            self._go_on()
        else:
            self._share_rows()  # all ranks have appended what they received before
            self._received = list(chain.from_iterable(message.parts for message in messages))
            self._copy_missing()

    def _go_on(self) -> None:
        if self._index.is_complete:
            return

        if self._index.num_blocks < self._num_to_give:
            self._send(parts=list(islice(self._stored, _PARTS_AT_ONCE)) if self._giver == self._rank else [])
        else:
            self._begin_round()

    def _agree(self, counts: list[int]) -> None:
        """Take what is stored, if all ranks have equally much; otherwise one with the most will give it to all."""
        most = max(counts)
        if self._num_stored == most:
            self._stored = self._stored_parts()
        if min(counts) == most:
            self._append(self._stored, is_stored=True)
            return

        self._giver, self._num_to_give = counts.index(most), most
        if self._giver != self._rank and self._file is not None:
            self._file.refuse_all()

    def _stored_parts(self) -> Iterator[Indexed]:
        """The parts that were counted, read again, as all of them may not fit in memory."""
        num_blocks, parts = 0, iter(()) if self._file is None else self._file.parts()
        while num_blocks < self._num_stored:
            part = next(parts, None)
            if part is None:
                raise ConfigError("AD487 the stored row index of this rank has changed while it was read")

            num_blocks += len(part.counts) // 4
            yield part

    def _share_rows(self) -> None:
        if self._giver != self._rank or self._index.num_blocks >= self._num_to_give:  # else it is being read
            super()._share_rows()

    def _append(self, parts: Iterable[Indexed], *, is_stored: bool) -> None:
        for part in parts:
            if self._index.is_complete:
                return

            self._take(part)
            if not is_stored:
                self._write(part)
            elif self._file is not None:
                self._index.adopt(self._file.rows)
            self._finish_if_complete()

    # Copies of the rows that others looked at.

    def _copy_missing(self) -> None:
        """Copy the rows of what was received, where that is needed; then append it."""
        self._num_asked, first, folder = 0, self._index.num_blocks, self._index.spool
        self._to_copy.clear()
        for part in self._received if folder else ():
            stop, path = first + len(part.counts) // 4, part_path(folder, first)
            if not is_whole(path, array("i", part.lengths)):
                blocks = self._source.blocks(range(first, stop))
                self._to_copy.append((part, Index(blocks, "none", spool=path, is_kept=self._file is not None)))
            first = stop
        self._ask_for_copies()

    def _ask_for_copies(self) -> None:
        while self._to_copy and self._num_asked < PER_WORKER * self._executor.num_workers:
            part, request = self._to_copy.popleft()
            self._num_asked += 1
            self._executor.submit(request, partial(self._on_copied, part))
        if self._num_asked:
            return

        received, self._received = self._received, []
        self._append(received, is_stored=self._giver == self._rank and self._index.num_blocks < self._num_to_give)
        self._go_on()

    def _on_copied(self, part: Indexed, reply: Reply | Crashed) -> None:
        if self._index.fault is not None:
            return

        self._num_asked -= 1
        try:
            if not isinstance(reply, Indexed):
                raise error_of(self._located(reply))

            if reply.lengths != part.lengths:
                raise ConfigError("AD487 a rank has found other rows in the same blocks: its data differ")

            self._ask_for_copies()
        except AsyncDataError as error:
            self._give_up(error)
        self._on_growth()
