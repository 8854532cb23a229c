"""Builds the row index with the workers: a few requests at a time, from the first block to the last."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy as np

from asyncdata.core.errors import AsyncDataError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Index, Indexed, RowError, reason_mark
from asyncdata.delivery.bad_rows import error_at, located
from asyncdata.delivery.mass_drops import MassDrops
from asyncdata.read_ahead.calls import Changes, checked
from asyncdata.sources.spool import is_whole, part_path
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from asyncdata.core.errors import BadRowError
    from asyncdata.core.messages import Reply
    from asyncdata.core.types import SourceLocation
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.read_ahead.row_index.index_file import IndexFile
    from asyncdata.read_ahead.row_index.row_index import RowIndex
    from asyncdata.sources.base import Blocks

_log = get_logger(__name__)
_MAX_BLOCKS_PER_REQUEST = 8
_PER_WORKER = 2
"""Requests per worker: one in progress, and one queued. A worker takes no more."""


class Indexer:
    """Fills ``index``.

    :param check: as in :class:`~asyncdata.core.messages.Index`.
    :param file: the file with the rows that earlier runs found; new rows are appended.
    :param on_bad: called with each bad row; it raises if the row may not be passed over.
    :param shows_rows: whether errors may quote a row.
    :ivar growth: called when more rows are known, or the index has failed.
    """

    def __init__(
        self,
        source: Blocks,
        calls: Calls,
        index: RowIndex,
        check: str,
        file: IndexFile | None,
        on_bad: Callable[[BadRowError], object],
        *,
        shows_rows: bool = True,
    ) -> None:
        self._source = source
        self._calls = calls
        self._index = index
        self._check = check
        self._file = file
        self._on_bad = on_bad
        self.growth, self._answers = Changes(), Changes()
        self._shows_rows = shows_rows
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
        return located(reply, place, shows_row=self._shows_rows)

    def _append_found(self) -> None:
        self._share_rows()
        while not self._is_over and (part := self._found.pop(self._index.num_blocks, None)) is not None:
            self._take(part)
            self._write(part)
            self._finish_if_complete()

    def _take(self, part: Indexed) -> None:
        first_block, first_row = self._index.num_blocks, self._index.num_found
        self._index.append(part)
        location = partial(self._location, part, first_block, first_row)
        self._mass_drops.see(
            len(part.lengths) // 4, _rows_by_reason(part), partial(self._files, part, first_block), location
        )
        for error in part.errors:
            self._on_bad(error_at(location(error.row), error))

    def _files(self, part: Indexed, first_block: int) -> Any:
        """The number of each row's file, of a part that begins with block ``first_block``."""
        counts = np.frombuffer(part.counts, np.int32)
        blocks = self._source.blocks(range(first_block, first_block + len(counts)))
        return np.repeat(np.array([block.file_id for block in blocks], np.int64), counts)

    def _location(self, part: Indexed, first_block: int, first_row: int, row: int) -> SourceLocation:
        """The location of a row of a part that begins with block ``first_block`` and row ``first_row``."""
        ends = np.cumsum(np.frombuffer(part.counts, np.int32))
        number = int(np.searchsorted(ends, row, side="right"))
        (block,) = self._source.blocks([first_block + number])
        first = int(ends[number - 1]) if number else 0
        inside = row - first if self._index.spool else int(np.frombuffer(part.offsets, np.int32)[row])
        length = int(np.frombuffer(part.lengths, np.int32)[row])
        place = self._source.location(block.file_id, block.start + inside, length)
        return self._index.numbered(place, block.file_id, first_row + row)

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
