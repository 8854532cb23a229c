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
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError
from asyncdata.core.messages import Indexed
from asyncdata.read_ahead.calls import checked
from asyncdata.read_ahead.rank_calls import RankCalls, rank_answers
from asyncdata.read_ahead.row_index.builder import Indexer
from asyncdata.sources.spool import is_whole, part_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

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
    """Fills ``index`` as :class:`~asyncdata.read_ahead.row_index.builder.Indexer` does, whose parameters it has.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param timeout_s: seconds to wait for the others in a call.
    :param identity: of all that the index depends on; equal for all ranks.
    """

    def __init__(
        self,
        *args: Any,
        exchange: Callable[[bytes], list[bytes]],
        timeout_s: float,
        rank: int,
        world_size: int,
        identity: str,
        shows_rows: bool,
    ) -> None:
        super().__init__(*args, shows_rows=shows_rows)
        self._rank, self._world_size, self._identity = rank, world_size, identity
        died = "one of them has died, or does not read from its loader. Restart all of them from a snapshot"
        self._ranks = RankCalls(exchange, timeout_s, "rows' lengths", died)
        self._num_calls = self._num_stored = 0
        self._stored: Iterator[Indexed] = iter(())
        self._giver, self._num_to_give = -1, 0
        self._received: list[Indexed] = []  # and not appended yet
        self._is_begun = self._is_waiting = self._has_left = False

    def begin(self) -> None:
        """Take part from now on: a loader that is closed before it has built anything tells the other ranks."""
        self._is_begun = True
        self._ranks.start()

    async def build(self) -> None:
        """Find all rows, together with the other ranks. If that fails, the error is the index's."""
        self._count_stored()
        try:
            await self._build()
        except AsyncDataError as error:
            self._give_up(error)

    def leave(self) -> None:
        """The loader is closing: tell the other ranks, if they still need this one."""
        super().leave()
        if self._is_begun and not self._has_left and not self._index.is_complete:
            last = _Message(self._num_calls, self._identity, error="its loader was closed")
            self._ranks.put(lambda: None if self._is_over_for_all() else _encode(last))
        self._has_left = True
        self._ranks.end()

    def _is_over_for_all(self) -> bool:
        """Whether the other ranks call no more: their last call, of which the service has not heard any more, was that
        of a rank that has left, or had the rest of the index. In the thread of the calls.
        """
        messages = [_decode(answer) for answer in self._ranks.answers if self._is_waiting]
        if self._num_calls == 1:
            is_whole = bool(messages) and min(one.num_stored for one in messages) == self._source.num_blocks
        else:
            parts = chain(self._received, *(message.parts for message in messages))
            is_whole = self._index.num_blocks + sum(len(part.counts) // 4 for part in parts) >= self._source.num_blocks
        return is_whole or any(message.error for message in messages)

    def _count_stored(self) -> None:
        try:
            for part in () if self._file is None else self._file.parts():
                if not self._is_usable(part, self._num_stored):
                    break

                self._num_stored += len(part.counts) // 4
        except OSError as error:
            self._num_stored = 0
            self._forget_file(error)

    async def _build(self) -> None:
        messages = await self._exchanged(num_stored=self._num_stored)
        self._agree([message.num_stored for message in messages])
        self.growth()
        is_giver, index = self._giver == self._rank, self._index
        while index.num_blocks < self._num_to_give and not self._is_over:
            parts = list(islice(self._stored, _PARTS_AT_ONCE)) if is_giver else []
            await self._take_round(parts, is_stored=is_giver)
        size = 0
        while not self._is_over:
            size = min(max(self._world_size, 2 * size), max(self._world_size, _MAX_BLOCKS_PER_ROUND))
            start, num_blocks = index.num_blocks, min(size, self._source.num_blocks - index.num_blocks)
            first, stop = (start + num_blocks * rank // self._world_size for rank in (self._rank, self._rank + 1))
            await self._each(self._finds(first, stop))
            if index.fault is None:
                parts, self._found = [self._found[first] for first in sorted(self._found)], {}
                await self._take_round(parts, is_stored=False)

    def _append_found(self) -> None:
        """Nothing before the end of the round."""

    async def _take_round(self, parts: list[Indexed], *, is_stored: bool) -> None:
        """Send what this rank has found, and append what all have."""
        messages = await self._exchanged(parts=parts)
        self._share_rows()  # all ranks have appended what they received before
        self._received = list(chain.from_iterable(message.parts for message in messages))
        await self._each(self._copies(self._received))
        if self._index.fault is None:
            received, self._received = self._received, []
            self._append(received, is_stored=is_stored)
            self.growth()

    # What the ranks exchange.

    async def _exchanged(self, **fields: Any) -> list[_Message]:
        """What all ranks send in the next call."""
        self._is_waiting = True
        try:
            messages = await self._ranks.call(self._message(**fields), self._checked)
            self._is_waiting = False
            return messages
        except WorkerError:
            self._has_left = True  # the others know it, too, or cannot be reached
            raise

    def _message(self, **fields: Any) -> Callable[[], bytes]:
        self._num_calls += 1
        return partial(_encode, _Message(self._num_calls - 1, self._identity, **fields))

    def _say(self, error: str) -> None:
        """Tell the other ranks, in a last call, that this one takes no part any more."""
        self._has_left = True
        self._ranks.put(self._message(error=error))

    def _give_up(self, error: AsyncDataError | OSError) -> None:
        super()._give_up(error)
        if self._index.fault is not None and not self._has_left:
            self._say(str(error))

    def _checked(self, answers: list[bytes]) -> list[_Message]:
        """What all ranks sent in the last call.

        :raises WorkerError: if one of them has failed.
        :raises ConfigError: if they are not those of one run.
        """
        messages = rank_answers(answers, _decode, self._world_size, "Ranks(exchange=...)")
        for rank, message in enumerate(messages):
            if message.error:
                raise WorkerError(f"AD486 rank {rank} takes no part in the exchange any more: {message.error}")

            if message.identity != self._identity or message.call != self._num_calls - 1:
                raise ConfigError(
                    f"AD487 rank {rank} counts other rows than rank {self._rank}: its data, its tokenize "
                    "function or its settings differ, or two loaders have one exchange"
                )

        return messages

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

    def _copies(self, received: list[Indexed]) -> Iterator[Callable[[], Awaitable[None]]]:
        """What copies the rows of what was received, where they are not."""
        first, folder = self._index.num_blocks, self._index.spool
        for part in received if folder else ():
            stop = first + len(part.counts) // 4
            if not is_whole(part_path(folder, first), array("i", part.lengths)):
                yield partial(self._copy, part, first, stop)
            first = stop

    async def _copy(self, part: Indexed, first: int, stop: int) -> None:
        reply = await self._calls.ask_again(self._request(first, stop, "none"))
        if checked(self._located(reply), Indexed).lengths != part.lengths:
            raise ConfigError("AD487 a rank has found other rows in the same blocks: its data differ")
