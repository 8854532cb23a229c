"""Builds the row index with the workers: a few requests at a time, from the first block to the last.

Or together with the other ranks: each finds the rows of its share, and all exchange them. They work in rounds. A round
is the next blocks, divided among the ranks; later rounds are larger, so that the first rows are known soon. At its end
all ranks exchange what they found, and append the same parts, in the order of the blocks. So the index is the one that
each rank would build by itself, and all ranks make the same calls of the exchange. Before the first round, they compare
what earlier runs have stored; if that differs, a rank with the most of it gives it to the others.

Where rows are copied out, each rank then copies those that others have looked at: it may need any of them.

A rank that fails or is closed sends that in its next call, and the others end with an error that names it.
"""

from __future__ import annotations

from array import array
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec
import numpy as np

from asyncdata.core.errors import AsyncDataError, BadRowError, ConfigError, WorkerError, get_logger
from asyncdata.core.messages import Failed, Index, Indexed, Reply, RowError, reason_mark
from asyncdata.delivery.bad_rows import BadRowPolicy, MassDrops, error_at, located, without_text
from asyncdata.read_ahead.calls import Calls, checked
from asyncdata.read_ahead.ranks import RankCalls, rank_answers
from asyncdata.sources.spool import is_whole, part_path
from asyncdata.workers.base import Crashed
from asyncdata.workers.changes import Changes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from asyncdata.core.types import SourceLocation
    from asyncdata.read_ahead.index_file import IndexFile
    from asyncdata.read_ahead.row_index import RowIndex
    from asyncdata.sources.base import Blocks


_log = get_logger(__name__)
_MAX_BLOCKS_PER_REQUEST = 8
_PER_WORKER = 2
"""Requests per worker: one in progress, and one queued. A worker takes no more."""


class Indexer:
    """Fills ``index``.

    :param check: as in :class:`~asyncdata.core.messages.Index`.
    :param file: the file with the rows that earlier runs found; new rows are appended.
    :param bad_rows: what is done with bad rows.
    :ivar growth: called when more rows are known, or the index has failed.
    """

    def __init__(
        self, source: Blocks, calls: Calls, index: RowIndex, check: str, file: IndexFile | None, bad_rows: BadRowPolicy
    ) -> None:
        self._source = source
        self._calls = calls
        self._index = index
        self._check = check
        self._file = file
        self._bad_rows, self._num_bad_rows = bad_rows, 0
        self.growth, self._answers = Changes(), Changes()
        self._mass_drops = MassDrops("", len(source.files))
        self._num_asked = 0
        self._leaves_room = False
        self._found: dict[int, Indexed] = {}

    def begin(self) -> None:
        """Called once, before :meth:`build`, as soon as the service runs."""

    async def build(self) -> None:
        """Find all rows that earlier runs have not stored. If that fails, the error is the index's."""
        self._read_file()
        self.growth()
        await self._each(self._finds(self._index.num_blocks, self._source.num_blocks))

    async def _each(self, jobs: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Do these, a few at a time, so that every worker is busy."""
        async with anyio.create_task_group() as group:
            for job in jobs:  # each is made when there is room for it
                if self._is_over:
                    return

                self._num_asked += 1
                group.start_soon(self._do, job)
                while self._num_asked >= self._most_asked and not self._is_over:
                    await self._answers.next(lambda: True)

    @property
    def _is_over(self) -> bool:
        return self._index.is_complete or self._index.fault is not None

    @property
    def _most_asked(self) -> int:
        return (1 if self._leaves_room else _PER_WORKER) * self._calls.num_workers

    async def _do(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except AsyncDataError as error:
            self._give_up(error)
        self._num_asked -= 1
        self.growth()
        self._answers()  # last, as there may be rows now that need room

    def leave_room(self) -> None:
        """Rows can be delivered already: from now on, leave half of each worker's requests to them."""
        self._leaves_room = True
        if self._index.is_complete:
            self._share_rows()

    def leave(self) -> None:
        """The loader is closing, and the service has ended."""
        self._close_file()

    def _read_file(self) -> None:
        try:
            for part in () if self._file is None else self._file.parts():
                assert self._file is not None, "it has parts"
                if not self._is_usable(part, self._index.num_blocks):
                    self._file.refuse()
                    return

                self._take(part)
                self._index.adopt(self._file.rows)
                self._finish_if_complete()
                if self._index.is_complete:
                    return

        except (AsyncDataError, OSError) as error:
            self._give_up(error)

    def _is_usable(self, part: Indexed, first: int) -> bool:
        """Whether a part from block ``first`` on has all that is needed: the numbers of tokens, and the copies."""
        if len(part.num_tokens) != (len(part.lengths) if self._check == "samples" else 0):
            return False

        spool = self._index.spool
        return not spool or is_whole(part_path(spool, first), array("i", part.lengths))

    def _finds(self, first: int, end: int) -> Iterator[Callable[[], Awaitable[None]]]:
        """What finds the rows of the blocks ``[first, end)``, a request each."""
        while first < end:
            # Few blocks while rows are delivered, as their requests wait for this one; each copy is a file.
            few = 1 if self._leaves_room else max(1, min(_MAX_BLOCKS_PER_REQUEST, first))
            stop = min(first + (_MAX_BLOCKS_PER_REQUEST if self._index.spool else few), end)
            yield partial(self._find, first, self._request(first, stop, self._check))
            first = stop

    def _request(self, first: int, stop: int, check: str) -> Index:
        spool = part_path(self._index.spool, first) if self._index.spool else ""
        return Index(self._source.blocks(range(first, stop)), check, spool=spool, is_kept=self._file is not None)

    async def _find(self, first: int, request: Index) -> None:
        """Find the rows of one request; those that bring down workers are bad."""
        lost: list[RowError] = []
        while isinstance(reply := await self._calls.ask_again(request), Crashed) and reply.row is not None:
            lost.append(RowError(reply.row, reply.code, reply.reason))
            request = msgspec.structs.replace(request, lost=[error.row for error in lost])
        found = checked(self._located(reply), Indexed)
        errors = sorted([*found.errors, *lost], key=lambda error: error.row)
        self._found[first] = msgspec.structs.replace(found, errors=errors)
        self._append_found()

    def _located(self, reply: Reply | Crashed) -> Reply | Crashed:
        """The reply, with the location of the row that made the request fail, if there is one."""
        if not isinstance(reply, Failed) or reply.place is None:
            return reply

        place = self._source.location(reply.place.file_id, reply.place.offset, -1)
        return located(reply, place, shows_row=self._bad_rows.shows_row)

    def _append_found(self) -> None:
        self._share_rows()
        while not self._is_over and (part := self._found.pop(self._index.num_blocks, None)) is not None:
            self._take(part)
            self._write(part)
            self._finish_if_complete()

    def _take(self, part: Indexed) -> None:
        rows = _RowsOfPart(part, self._source, self._index, self._index.num_blocks, self._index.num_found)
        self._index.append(part)
        self._mass_drops.see(rows, _rows_by_reason(part))
        for error in part.errors:
            self._pass_over(error_at(rows.row_location(error.row), error))

    def _pass_over(self, error: BadRowError) -> None:
        policy = self._bad_rows
        error = error if policy.shows_row else without_text(error)
        if not policy.is_raised:
            policy.pass_over(error)
        if policy.stops_after(self._num_bad_rows):
            raise policy.stop_error(error)

        self._num_bad_rows += 1

    def _write(self, part: Indexed) -> None:
        if self._file is None:
            return

        try:
            self._file.append(part)
            self._index.adopt(self._file.rows)
        except OSError as error:
            self._forget_file(error)

    def _share_rows(self) -> None:
        """Where another process writes the file: keep in memory only those rows that it has not written yet."""
        if self._file is None or self._file.is_writer:
            return

        try:
            self._file.read_on()
            if self._index.adopt(self._file.rows) and self._index.is_complete:
                self._close_file()
        except OSError as error:
            self._forget_file(error)

    def _forget_file(self, error: OSError) -> None:
        """Stop writing the file. The index is a cache: without it, the next run builds it again."""
        _log.warning("index.not_written", path=str(self._file and self._file.path), reason=str(error))
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_if_complete(self) -> None:
        index = self._index
        if index.is_complete or not (index.is_settled or index.num_blocks == self._source.num_blocks):
            return

        try:
            if self._file is not None:
                self._file.finish()
        except OSError as error:
            self._forget_file(error)
        if self._file is not None and self._file.is_writer:
            self._close_file()
        index.complete()
        self._share_rows()
        _log.info("index.complete", num_rows=index.num_rows, num_found=index.num_found, excluded=dict(index.excluded))

    def _give_up(self, error: AsyncDataError | OSError) -> None:
        if isinstance(error, OSError):
            self._forget_file(error)
            return

        self._close_file()
        self._index.fail(error)
        self.growth()


class _RowsOfPart(NamedTuple):
    """The rows of a part, which begins with block ``first_block`` and row ``first_row``."""

    part: Indexed
    source: Blocks
    row_index: RowIndex
    first_block: int
    first_row: int

    @property
    def num_rows(self) -> int:
        return len(self.part.lengths) // 4

    def file_ids(self) -> Any:
        counts = np.frombuffer(self.part.counts, np.int32)
        blocks = self.source.blocks(range(self.first_block, self.first_block + len(counts)))
        return np.repeat(np.array([block.file_id for block in blocks], np.int64), counts)

    def row_location(self, row: int) -> SourceLocation:
        ends = np.cumsum(np.frombuffer(self.part.counts, np.int32))
        number = int(np.searchsorted(ends, row, side="right"))
        (block,) = self.source.blocks([self.first_block + number])
        first = int(ends[number - 1]) if number else 0
        inside = row - first if self.row_index.spool else int(np.frombuffer(self.part.offsets, np.int32)[row])
        length = int(np.frombuffer(self.part.lengths, np.int32)[row])
        place = self.source.location(block.file_id, block.start + inside, length)
        return self.row_index.numbered(place, block.file_id, self.first_row + row)


def _rows_by_reason(part: Indexed) -> dict[str, Any]:
    """The rows of a part that yield no sample, by reason."""
    found: dict[str, Any] = {}
    for error in part.errors:
        found.setdefault(f"bad row {error.code}", []).append(error.row)
    marks = np.frombuffer(part.marks, np.uint8).copy()
    marks[[error.row for error in part.errors]] = 0
    for number, reason in enumerate(part.drops):
        found[reason] = np.flatnonzero(marks == reason_mark(number))
    return found


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
    """Fills ``index`` as :class:`Indexer` does, whose parameters it has.

    :param ranks: the loader's setting, with an exchange.
    :param identity: of all that the index depends on; equal for all ranks.
    """

    def __init__(self, *args: Any, ranks: Any, identity: str) -> None:
        super().__init__(*args)
        self._rank, self._world_size, self._identity = ranks.rank, ranks.world_size, identity
        died = "one of them has died, or does not read from its loader. Restart all of them from a snapshot"
        self._ranks = RankCalls(ranks, ranks.exchange_timeout_s, "rows' lengths", died)
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
        messages = rank_answers(answers, _Message, self._world_size, "Ranks(exchange=...)")
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
