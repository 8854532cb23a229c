"""The token cache in a worker: reads blocks from segments into slots, reads samples from slots, writes replies."""

from __future__ import annotations

import os
import time
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.cache_messages import (
    EvictTokens,
    ListTokens,
    Refused,
    RowsRefused,
    SegmentListing,
    StoreTokens,
    TokensListed,
)
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.import_path import resolve_path
from asyncdata.core.messages import Failed, encode
from asyncdata.core.row_codes import is_cached, record_of
from asyncdata.prefetch.merged_samples import merge
from asyncdata.prefetch.token_cache.cached_scan import CachedBlockRows, CachedScan
from asyncdata.prefetch.token_cache.eviction import evict_segments
from asyncdata.prefetch.token_cache.segment.gather import cached_rows
from asyncdata.prefetch.token_cache.segment.layout import NO_SUM, SUFFIXES, DamagedError, checksum, pad
from asyncdata.prefetch.token_cache.segment.reader import Segment, Segments
from asyncdata.prefetch.token_cache.segment.row_segment import RowSegment, RowsRefusedError, read_rows, store_rows
from asyncdata.sources.fingerprint import file_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.cache_messages import CachedBlock, CachedFile
    from asyncdata.core.messages import Block, Job, Reply, Scan, Scanned, Tokenize, Tokenized
    from asyncdata.prefetch.merged_samples import Found
    from asyncdata.sources.reader import BlockReader, BlockRows

__all__ = ("CacheWorker",)

_STORE = "asyncdata.prefetch.token_cache.segment.arrow_writer:store"  # Arrow is imported only there


class _RefusedError(Exception):
    """A cached block cannot be used: it must be read from its file."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class OtherTextError(Exception):
    """Cached rows have other texts now.

    :ivar rows: their numbers in the request.
    """

    def __init__(self, rows: list[int]) -> None:
        super().__init__("the text of a row is another one")
        self.rows = rows


class CacheWorker:
    """Answers all requests that concern the token cache.

    :param slots: memory that windows are read into, shared with the other workers.
    """

    def __init__(self, job: Job, slots: Sequence[memoryview], reader: BlockReader) -> None:
        if job.cache is None:
            raise ValueError("the job has no token cache")

        self._job = job
        self._cache = job.cache
        self._slots = slots
        self._reader = reader
        self._has_rows = job.cache.has_rows
        self._segments = Segments(job.cache.folder, Segment)
        self._row_segments = Segments(job.cache.folder, RowSegment)
        self._digests: dict[int, str] = {}
        self._touched: set[str] = set()

    def scan(self, request: Scan) -> Scanned:
        """Answer a scan: cached blocks are read from segments, the others from their files."""
        stop = request.base + len(request.blocks) * self._job.stride
        cached = {item.block: item for item in request.cached}
        out, sums, refused = CachedScan(self._slots[request.slot], request.base), array("Q"), list[Refused]()
        for number, block in enumerate(request.blocks):
            text, item = None, cached.get(number)
            room = stop - out.base - (len(request.blocks) - number - 1) * self._job.text_bytes
            if item is not None:
                try:
                    text = self._text_to_compare(item, block, room)
                    self._put(item, block, text, self._slots[request.slot], out, room)
                    sums.append(NO_SUM)
                    continue

                except (_RefusedError, DamagedError, OSError) as error:
                    refused.append(_refusal(number, error))
                    self._segments.forget(item.segment)
            text = text or self._reader.read_block(block, room)
            sums.append(_sum_of(text) if request.with_sums else NO_SUM)
            out.add(text)
        return msgspec.structs.replace(out.reply(), refused=refused, sums=sums.tobytes())

    def _text_to_compare(self, item: CachedBlock, block: Block, room: int) -> BlockRows | None:
        """The block's text, if it is needed to tell whether the file is unchanged; otherwise None."""
        return None if item.is_sure else self._reader.read_block(block, room)

    def _put(
        self, item: CachedBlock, block: Block, text: BlockRows | None, slot: memoryview, out: CachedScan, room: int
    ) -> None:
        """Put the samples of a cached block into the slot."""
        segment = self._segments.get(item.segment)
        entry = segment.entry(item.entry)
        if (entry.start, entry.stop) != (block.start, block.stop):
            raise _RefusedError("other_block", "the file is cut into other blocks")

        if text is not None and (entry.text_sum == NO_SUM or _sum_of(text) != entry.text_sum):
            raise _RefusedError("other_text", "the file's text is another one there")

        base, num_bytes = pad(out.base), segment.room_of(entry)
        if base + num_bytes > out.base + room:
            raise _RefusedError("no_room", "its samples are too large for the slot")

        self._touch(item.segment, segment)
        first = base + segment.read_into(slot[base : base + num_bytes], entry)
        block_rows = CachedBlockRows(first, entry.num_rows, segment.record_words, entry.num_blank)
        out.add_cached(block_rows, base - out.base + num_bytes)

    def _touch(self, name: str, segment: Segment) -> None:
        """Update the segment's time of last use, once per worker: eviction depends on it."""
        if name not in self._touched:
            self._touched.add(name)
            segment.touch()

    def complete(self, request: Tokenize, fresh: Tokenized | None, began: float) -> Tokenized | RowsRefused:
        """The reply to ``request``: its cached rows, merged with ``fresh``, the reply for the other rows."""
        spill, fault = "", ""
        if request.spill and fresh is not None:
            spill, fault = self._spill(request.spill, fresh)
            fresh = msgspec.structs.replace(fresh, text_sums=b"")
        reply = fresh
        if request.num_cached or reply is None:
            try:
                found = self._found(request)
            except RowsRefusedError as error:
                self._row_segments.forget(error.segment)
                return RowsRefused(error.segment, _kind_of(error.cause), _why(error.cause))

            except OtherTextError as error:
                return RowsRefused("", "other_text", str(error), np.array(error.rows, np.int32).tobytes())

            reply = merge(found, fresh, len(request.starts) // 4, time.perf_counter() - began)
            num_mended = fresh.num_mended if fresh is not None else 0
            reply = msgspec.structs.replace(reply, expected=request.expected, num_mended=num_mended)
        return msgspec.structs.replace(reply, spill=spill, spill_fault=fault)

    def _found(self, request: Tokenize) -> Found:
        """The cached rows of the request, in the slot or in segments of rows."""
        if request.cached is not None:
            for name in request.cached.segments:
                self._touch_named(name)
            found, sums = read_rows(self._row_segments, request.cached)
            self._compare_texts(request, sums)
            return found

        starts = np.frombuffer(request.starts, np.int32).astype(np.int64)
        rows = np.flatnonzero(is_cached(starts))
        return cached_rows(self._slots[request.slot], rows, record_of(starts[rows]))

    def text_sums(self, rows: Sequence[bytes | memoryview]) -> bytes:
        """Checksums of the texts of rows, if they are to be stored as single rows: uint64."""
        return array("Q", map(checksum, rows)).tobytes() if self._has_rows else b""

    def _compare_texts(self, request: Tokenize, sums: dict[int, int]) -> None:
        """Compare the texts of cached rows whose files were touched with what they were.

        :param sums: what the text of each row of the request was.
        """
        if not sums or request.cached is None:
            return

        lengths, texts = array("i", request.lengths), dict[int, bytes | memoryview]()
        if request.cached.texts:
            slot = self._slots[request.slot]
            for row, start in zip(array("i", request.cached.rows), array("i", request.cached.texts), strict=True):
                texts[row] = slot[start : start + lengths[row]]
        else:
            unsure = [place for place in request.overflow if place.row in sums]
            texts = dict(zip([place.row for place in unsure], self._reader.read_rows(unsure, lengths), strict=True))
        others = [row for row, expected in sums.items() if checksum(texts[row]) != expected]
        if others:
            raise OtherTextError(others)

    def _touch_named(self, name: str) -> None:
        with suppress(OSError, DamagedError):  # if it is gone, reading a row says so
            if name not in self._touched:
                self._touch(name, self._row_segments.get(name))

    def _spill(self, name: str, reply: Tokenized) -> tuple[str, str]:
        """Write the reply to a file of this run; return its name and "", or "" and the error."""
        try:
            with open(_new_file(os.path.join(self._cache.folder, name)), "wb", buffering=0) as file:
                left = memoryview(encode(reply))
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            return "", f"{error.filename or name}: {error.strerror}"

        return name, ""

    def answer(self, request: ListTokens | StoreTokens | EvictTokens) -> Reply:
        """Answer a request that concerns no row. An error of the disk stops only the cache, not the run."""
        try:
            if isinstance(request, ListTokens):
                return self._list(request)

            if isinstance(request, EvictTokens):
                return evict_segments(request, self._cache.folder)

            store = store_rows if self._has_rows else resolve_path(_STORE)
            reply: Reply = store(request, self._cache, self._digest)
        except OSError as error:
            return Failed("OSError", f"{error.filename or self._cache.folder}: {error.strerror or error}")
        except DamagedError as error:
            return Failed("OSError", str(error))

        return reply

    def _list(self, request: ListTokens) -> TokensListed:
        names = request.names
        if names is None:
            names = sorted(
                name for name in os.listdir(self._cache.folder) if name.endswith(SUFFIXES) and name[0] != "."
            )
        found, faults = [], {}
        segments: Segments[Any] = self._row_segments if self._has_rows else self._segments
        for name in names if request.names is not None else names[: request.num]:
            try:
                found.append(self._listing(name, segments.get(name)))
            except (OSError, DamagedError) as error:
                faults[name] = _why(error)
                segments.forget(name)
        return TokensListed(names, found, faults)

    def _listing(self, name: str, segment: Segment) -> SegmentListing:
        entries = segment.entries()
        chosen, ids, are_sure = [np.empty(0, np.int32)], [np.empty(0, np.int32)], [np.empty(0, np.bool_)]
        for number, (digest, num_bytes, mtime_ns) in enumerate(segment.meta.files):
            # Several files may have the same content: each has all of its blocks here.
            for file_id in (id for id in self._files_of(num_bytes) if self._digest(id) == digest):
                own = np.flatnonzero(entries["file"] == number).astype(np.int32)
                chosen.append(own)
                ids.append(np.full(len(own), file_id, np.int32))
                are_sure.append(np.full(len(own), self._file(file_id).mtime_ns == mtime_ns))
        of_all = np.concatenate(chosen)
        return SegmentListing(
            name=name,
            num_bytes=segment.num_bytes,
            entries=of_all.tobytes(),
            file_ids=np.concatenate(ids).tobytes(),
            starts=entries["start"][of_all].astype(np.int64).tobytes(),
            are_sure=np.concatenate(are_sure).tobytes(),
        )

    def _files_of(self, num_bytes: int) -> list[int]:
        """The files of that size: no other can have the same content."""
        return [number for number, file in enumerate(self._cache.files) if file.num_bytes == num_bytes]

    def _file(self, file_id: int) -> CachedFile:
        return self._cache.files[file_id]

    def _digest(self, file_id: int) -> str:
        """The digest of the file's content; empty if it cannot be read."""
        if file_id not in self._digests:
            self._digests[file_id] = self._file(file_id).digest or self._digest_of(
                self._job.files[file_id].path, file_id
            )
        return self._digests[file_id]

    def _digest_of(self, path: str, file_id: int) -> str:
        try:
            return file_digest(path, self._file(file_id).num_bytes)
        except AsyncDataError:
            return ""

    def close(self) -> None:
        """Close the segments."""
        self._segments.close()
        self._row_segments.close()


def _new_file(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:  # written by a worker that was killed before its reply was read
        os.unlink(path)
        return os.open(path, flags, 0o600)


def _sum_of(text: BlockRows) -> int:
    """The checksum of a block's text; ``NO_SUM`` if the text is not complete."""
    if len(text.starts) and min(text.starts) < 0:
        return NO_SUM

    return checksum(text.data) or 1


def _refusal(block: int, error: _RefusedError | DamagedError | OSError) -> Refused:
    if isinstance(error, _RefusedError):
        return Refused(block, error.kind, str(error))

    return Refused(block, _kind_of(error), _why(error))


def _kind_of(error: DamagedError | OSError) -> str:
    return "gone" if isinstance(error, FileNotFoundError) else "damaged"


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
