"""The handler of requests, in a worker process, an actor or a thread: from rows to columns. Runs without numpy."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, cycle
from typing import Any, cast
from zlib import crc32

import msgspec

from asyncdata.core.errors import (
    ConfigError,
    ShortageError,
    SourceError,
    excerpt,
    is_shortage,
    short_of,
    user_traceback,
)
from asyncdata.core.messages import (
    EXCLUDED,
    TOO_LONG,
    Block,
    Failed,
    Index,
    Job,
    OrderPacks,
    PackRows,
    Permute,
    ReadCounts,
    Reply,
    Request,
    Scan,
    Scanned,
    Short,
    Tokenize,
    Tokenized,
    Unread,
    is_elsewhere,
)
from asyncdata.core.settings import resolve_path
from asyncdata.core.threads import no_op
from asyncdata.sources.files import BlockReader, BlockRows, FileChangedError, WideReader
from asyncdata.tokenization.base import BatchTokenizer, MediaTokenizer
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.part_functions import PartTokenizers
from asyncdata.tokenization.rows import RowFault, WrongIdsError
from asyncdata.workers.scan_blocks import PIECE_BYTES, bytes_of, index_blocks, permute, pieces, scanned, scanned_into

_NONE: frozenset[int] = frozenset()
_BEAT_S = 1.0
_WORK_IN_WAITING = 0.25
"""The part of the wall time that counts as work at least. Otherwise work is CPU time, because wall time grows on an
overloaded machine. But a function that waits uses little CPU time, and its chunks would grow without limit."""
_BEATS = (-2, -1)
"""Progress without a row number."""
_LOOKED_EVERY = 1 << 19
"""Of blocks whose samples come with their window, the first row of a block is looked at, and so each file's."""
_PLANNER = "asyncdata.batching.planned:answer"
"""An import path, as for a reader: a worker that never gets such a request starts without numpy."""


class Handler:
    """Answers requests one at a time: for each part of a mixture by a handler of its own, made when it is needed.

    :param slots: memory that windows are read into, shared with the other workers.
    :param tokenizer: the tokenize function; of a mixture, the functions of all parts.
    :param progress: called with the number of the current row in the request.
    :param counts: of requests to stores.
    """

    def __init__(
        self,
        job: Job,
        slots: Sequence[memoryview],
        tokenizer: BatchTokenizer,
        progress: Callable[[int], None] = no_op,
        counts: ReadCounts | None = None,
    ) -> None:
        self._job, self._slots, self._tokenizer = job, slots, tokenizer
        self._progress, self._counts = progress, counts
        self._parts: dict[int, _PartHandler] = {}
        self._is_closed = False
        if not job.parts:
            self._parts[0] = self._new_part(0)

    def _new_part(self, part: int) -> _PartHandler:
        job = self._job.parts[part] if self._job.parts else self._job
        return _PartHandler(job, self._slots, self._tokenizer_of(part), self._progress, self._counts)

    def _tokenizer_of(self, part: int) -> BatchTokenizer:
        return self._tokenizer.of(part) if isinstance(self._tokenizer, PartTokenizers) else self._tokenizer

    def __call__(self, request: Request) -> Reply:
        """The reply. An error that no row has caused is returned as :class:`Failed` or :class:`Short`."""
        handler = self._parts.get(request.part)
        if handler is None:
            handler = self._parts[request.part] = self._new_part(request.part)
            if self._is_closed:
                handler.close()
        return handler(request)

    def use(self, tokenizer: BatchTokenizer) -> None:
        """Answer later requests with another ``tokenizer``, which gives the same results."""
        self._tokenizer = tokenizer
        for part, handler in self._parts.items():
            handler.tokenizer = self._tokenizer_of(part)

    def close(self) -> None:
        """Close the files; if another thread is answering a request, it closes them at the end of that request."""
        self._is_closed = True
        for handler in list(self._parts.values()):
            handler.close()


class _PartHandler:
    """Answers the requests of one part, or of a single source."""

    def __init__(
        self,
        job: Job,
        slots: Sequence[memoryview],
        tokenizer: BatchTokenizer,
        progress: Callable[[int], None],
        counts: ReadCounts | None,
    ) -> None:
        self._job = job
        self._slots = slots
        self.tokenizer = tokenizer
        self._progress = progress
        self._reader: BlockReader = resolve_path(job.reader.path)(job, **job.reader.settings)
        self._wide: WideReader | None = cast("WideReader", self._reader) if job.stores else None
        if self._wide is not None:
            beats = cycle(_BEATS)
            self._wide.watch(lambda: progress(next(beats)), counts or ReadCounts())
        self._at_work = threading.Lock()
        self._is_closed = False

    def __call__(self, request: Request) -> Reply:
        with self._at_work:
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            reply = self._reply(request)
            samples = reply.samples if isinstance(reply, Scanned) else reply if isinstance(reply, Tokenized) else None
            if self._job.with_token_sums and samples is not None:
                samples = msgspec.structs.replace(samples, token_sums=_token_sums(samples))
            passed_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        if self._is_closed:
            self.close()
        if samples is None:
            return reply

        busy_s, is_padded = max(cpu_s, _WORK_IN_WAITING * passed_s), getattr(self._reader, "is_padded", False)
        samples = msgspec.structs.replace(samples, busy_s=busy_s, is_padded=is_padded)
        return msgspec.structs.replace(reply, samples=samples) if isinstance(reply, Scanned) else samples

    def _reply(self, request: Request) -> Reply:
        try:
            try:
                return self._answer(request)
            finally:  # a file that has changed since it was opened is the reply
                self._reader.check()
        except FileChangedError as error:
            return Failed("SourceChangedError", str(error))
        except WrongIdsError as error:
            return Failed("ConfigError", str(error), row=error.row, excerpt=error.excerpt, place=error.place)
        except (ConfigError, SourceError) as error:
            return Failed(type(error).__name__, str(error))
        except Exception as error:  # any error must reach the trainer, as the answer to this request
            return _failure(error)

    def _answer(self, request: Request) -> Reply:
        if self._wide is not None and isinstance(request, Scan | Index):
            self._wide.expect(request.blocks)
        if isinstance(request, Scan):
            return self._scan(request)

        if isinstance(request, Index):
            return index_blocks(request, self._reader, partial(self._write, only_counts=True))

        return self._tokenize(request) if isinstance(request, Tokenize) else self._compute(request)

    def _compute(self, request: Permute | PackRows | OrderPacks) -> Reply:
        """Answer by library code only. It may be slow, so a heartbeat keeps the row timeout from firing."""
        with _heartbeat(self._progress):
            if isinstance(request, Permute):
                return permute(request)

            answer: Callable[[PackRows | OrderPacks], Reply] = resolve_path(_PLANNER)
            return answer(request)

    def close(self) -> None:
        """As :meth:`Handler.close`."""
        self._is_closed = True
        if self._wide is not None:
            self._wide.give_up()
        if self._at_work.acquire(blocking=False):
            self._reader.close()
            self._at_work.release()

    def _scan(self, request: Scan) -> Scanned:
        if request.with_samples:
            room, found = max(PIECE_BYTES, len(request.blocks) * self._job.stride), []
            for block in request.blocks:
                found.append(self._reader.read_block(block, room))
                room -= sum(length for length in found[-1].lengths if length != TOO_LONG)
            samples = self._samples_of(request.blocks, found) if room >= 0 else None  # too much for one reply
            return msgspec.structs.replace(scanned(found), samples=samples)

        slot = self._slots[request.slot]
        stop = len(slot) if request.has_slot else request.base + len(request.blocks) * self._job.stride
        return scanned_into(slot, request.base, stop, request.blocks, self._reader)

    def _samples_of(self, blocks: Sequence[Block], found: Sequence[BlockRows]) -> Tokenized:
        """The samples of all rows of these blocks."""
        rows, lengths = list[bytes | memoryview](), array("i")
        for block, text in zip(blocks, found, strict=True):
            rows += bytes_of(block, text, self._reader, range(len(text.lengths)))
            lengths.extend(text.lengths)
        firsts = accumulate((len(text.lengths) for text in found), initial=0)
        looks = [first for first, block in zip(firsts, blocks, strict=False) if not block.start % _LOOKED_EVERY]
        samples = self._write(rows, lengths).finish(len(rows), 0.0)
        return msgspec.structs.replace(samples, unread=self._unread(rows, looks))

    def _unread(self, rows: Sequence[bytes | memoryview], looks: Iterable[int]) -> dict[str, Unread]:
        """The unread keys of some rows; a function that gets rows whole has none."""
        unread: Callable[[Any, Any], dict[str, Unread]] | None = getattr(self.tokenizer, "unread", None)
        return {} if unread is None else unread(rows, looks)

    def _tokenize(self, request: Tokenize) -> Tokenized:
        began = time.perf_counter()
        starts, lengths = array("i", request.starts), array("i", request.lengths)
        slot = self._slots[request.slot]
        num_mended = self._num_mended
        in_slot = (slot[start : start + length] for start, length in zip(starts, lengths, strict=True))
        rows: list[bytes | memoryview] = list(request.rows or in_slot)
        left_out = frozenset(row for row, number in enumerate(array("i", request.expected)) if is_elsewhere(number))
        if EXCLUDED in lengths:
            left_out |= {row for row, length in enumerate(lengths) if length == EXCLUDED}
        tokenizer = cast("MediaTokenizer", self.tokenizer).load if request.is_load else None
        out: ColumnWriter | None = None
        for piece in pieces(lengths) if request.overflow else [range(len(rows))]:
            places = [place for place in request.overflow if place.row in piece]
            for place, row in zip(places, self._reader.read_rows(places, lengths) if places else [], strict=True):
                rows[place.row] = row
            others = frozenset(range(len(rows))).difference(piece) if len(piece) < len(rows) else _NONE
            written = self._write(rows, lengths, left_out | others, tokenizer)
            if self._job.keeps_rows and not request.is_load:
                written.keep_rows(rows)
            out = written if out is None else out.extend(written)
            for place in places:
                if others and place.row not in request.looks:
                    rows[place.row] = b""
        return msgspec.structs.replace(
            (out or ColumnWriter()).finish(len(rows), time.perf_counter() - began),
            num_mended=self._num_mended - num_mended,
            expected=request.expected,
            unread=self._unread(rows, request.looks) if request.looks else {},
        )

    @property
    def _num_mended(self) -> int:
        """Rows that were repaired because their copy was damaged; 0 for a reader that reads no copies."""
        return getattr(self._reader, "num_mended", 0)

    def _write(
        self,
        rows: list[bytes | memoryview],
        lengths: array[int],
        lost: frozenset[int] = _NONE,
        tokenizer: BatchTokenizer | None = None,
        *,
        only_counts: bool = False,
    ) -> ColumnWriter:
        new_writer = partial(ColumnWriter, only_counts=only_counts)
        tokenizer = tokenizer or (getattr(self.tokenizer, "count", None) if only_counts else None) or self.tokenizer
        too_long: list[int] = []
        if TOO_LONG in lengths:
            too_long = [row for row, length in enumerate(lengths) if length == TOO_LONG and row not in lost]
        bad = lost.union(too_long)
        good = [row for row in range(len(rows)) if row not in bad] if bad else range(len(rows))
        try:
            out = new_writer(self._progress, good if bad else None)
            tokenizer([rows[row] for row in good] if bad else rows, out)
        except WrongIdsError as error:  # the encoder is wrong, so no result of this request can be trusted
            error.row = self._row_with_wrong_ids(rows, good)
            raise
        except BaseException:  # a panic in Rust is not an Exception
            # One row has failed the whole batch. Row by row, only that row is bad.
            out = new_writer(self._progress)
            for row in good:
                self._write_one(row, rows[row], out, tokenizer, new_writer(numbers=[row]))
        limit = self._job.max_row_bytes
        for row in too_long:
            out.fail_at(row, RowFault("AD108", f"the row is longer than max_row_bytes ({limit})"))
        return out

    def _row_with_wrong_ids(self, rows: list[bytes | memoryview], good: Iterable[int]) -> int:
        """The row for which the encoder gave wrong ids, found by a second run; -1 if no row fails again."""
        for row in good:
            self._progress(row)
            try:
                self.tokenizer([rows[row]], ColumnWriter())
            except WrongIdsError as error:
                if error.is_here:
                    return row
            except BaseException:  # a bad row, but the request fails anyway
                continue
        return -1

    def _write_one(
        self, row: int, raw: bytes | memoryview, out: ColumnWriter, tokenizer: BatchTokenizer, one: ColumnWriter
    ) -> None:
        self._progress(row)
        try:
            tokenizer([raw], one)
        except BaseException as error:
            if isinstance(error, ConfigError):  # a package is missing, or a setting is wrong: no row is to blame
                raise

            if is_shortage(error):  # the row may be good
                raise ShortageError(error, row, excerpt(raw)) from error

            trace = user_traceback(error)
            out.fail_at(row, RowFault("AD421", f"the tokenizer raised {error!r}", raw, trace))
            return

        out.extend(one)


def not_opened(error: BaseException) -> Failed | Short:
    """What a worker says that cannot open the tokenize function."""
    message, trace = f"AD426 the tokenize function cannot be opened: {error!r}", user_traceback(error)
    return Short(message, trace) if is_shortage(error) else Failed("WorkerError", message, trace)


def _failure(error: Exception) -> Failed | Short:
    if isinstance(error, ShortageError):
        return Short(str(error), user_traceback(error.cause), error.row, error.excerpt, error.place)

    if is_shortage(error):
        return Short(_with_name(error), user_traceback(error))

    if isinstance(error, OSError):
        return Failed("SourceError", f"AD304 cannot read {error.filename or 'a file'}: {error.strerror or error}")

    return Failed("WorkerError", f"a request failed with {error!r}", traceback.format_exc())


def _with_name(error: Exception) -> str:
    """The resource that has run out, and the file that needed it."""
    name = error.filename if isinstance(error, OSError) else None
    return f"{short_of(error)}: {name}" if name else short_of(error)


def _token_sums(reply: Tokenized) -> bytes:
    """The CRC-32 of each sample's tokens, as bytes of uint32."""
    tokens = memoryview(reply.tokens).cast("B").cast("i")
    sums, start = [], 0
    for stop in memoryview(reply.token_ends).cast("B").cast("I"):
        sums.append(crc32(tokens[start:stop]))
        start = stop
    return array("I", sums).tobytes()


@contextlib.contextmanager
def _heartbeat(progress: Callable[[int], None]) -> Iterator[None]:
    """Report progress regularly during the block, without a row number."""
    is_done = threading.Event()

    def beat() -> None:
        for row in cycle(_BEATS):
            if is_done.wait(_BEAT_S):
                return

            progress(row)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
