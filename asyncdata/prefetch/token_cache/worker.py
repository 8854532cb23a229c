"""The token cache in a worker: answers scans from segments, and appends the blocks that it had to tokenize."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.cache_messages import Refused, SegmentListing, Stored, TokensListed
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.messages import Failed
from asyncdata.core.row_codes import EXCLUDED, is_elsewhere
from asyncdata.prefetch.merged_samples import Found, merge
from asyncdata.prefetch.token_cache.arrow_writer import SegmentWriter
from asyncdata.prefetch.token_cache.block_samples import blocks_of, joined
from asyncdata.prefetch.token_cache.folder import make_room, segments_in
from asyncdata.prefetch.token_cache.segment import NO_SUM, DamagedError, Entry, Segment, checksum
from asyncdata.sources.fingerprint import file_digest
from asyncdata.sources.reader import BlockRows
from asyncdata.workers.scan_blocks import ALL_BYTES, scanned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.core.cache_messages import CachedBlock, ListTokens
    from asyncdata.core.messages import Block, Data, Index, Job, Reply, Scan, Scanned, Tokenize, Tokenized
    from asyncdata.prefetch.token_cache.block_samples import BlockSamples
    from asyncdata.sources.reader import BlockReader
    from asyncdata.workers.request_handler import SamplesOf
    from asyncdata.workers.scan_blocks import FoundRows

__all__ = ("CacheWorker",)

_MAX_SEGMENT_BYTES = 256 << 20
"""A segment is evicted as a whole; so one that is larger is not continued."""

_MAX_OPEN_SEGMENTS = 128
_ROWS_PER_BLOCK = 64
"""Of a block that is stored for rows that are read one by one: all of it is read for each of them."""

_UNLIMITED = 1 << 62


class _RefusedError(Exception):
    """A cached block cannot be used: it must be tokenized."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class CachedSamples(NamedTuple):
    """Rows of a request that are in segments.

    :ivar rows: their numbers in the request.
    :ivar refused: segments that cannot be read.
    """

    rows: frozenset[int]
    found: Found
    refused: dict[str, Refused]

    def merged(self, fresh: Tokenized, num_rows: int) -> Tokenized:
        """The reply for all rows of the request, with that for the others."""
        if self.rows:
            whole = merge(self.found, fresh, num_rows, fresh.busy_s)
            fresh = msgspec.structs.replace(whole, expected=fresh.expected, num_mended=fresh.num_mended)
        return msgspec.structs.replace(fresh, num_cached=len(self.rows), refused=self.refused)


class CacheWorker:
    """Answers all requests that concern the token cache."""

    def __init__(self, job: Job, reader: BlockReader) -> None:
        if job.cache is None:
            raise ValueError("the job has no token cache")

        self._job = job
        self._cache = job.cache
        self._reader = reader
        self._segments: dict[str, Segment] = {}
        self._writer: SegmentWriter | None = None
        self._digests: dict[int, str] = {}
        self._touched: set[str] = set()

    def scan(self, request: Scan, samples_of: SamplesOf) -> Scanned:
        """Answer a scan: cached blocks are read from segments, the others are tokenized, and appended to one."""
        cached, refused = self._read_all(request)
        blocks = {number: block for number, block in enumerate(request.blocks) if number not in cached}
        texts = {number: self._reader.read_block(block, ALL_BYTES) for number, block in blocks.items()}
        fresh = samples_of(list(blocks.values()), list(texts.values())) if texts else None
        counts = [len(text.lengths) for text in texts.values()]
        parts = {} if fresh is None else dict(zip(blocks, blocks_of(fresh, counts), strict=True))
        rows = {number: rows for number, (rows, _) in cached.items()} | texts
        stored, samples = Stored(), fresh
        if fresh is not None and request.num_storing:
            self._reader.check()  # before anything that was read is stored
            stored = self._store(blocks, texts, parts, fresh, request.num_storing)
        if cached and request.with_samples:
            replies = {number: reply for number, (_, reply) in cached.items()}
            replies |= {number: part.reply for number, part in parts.items()}
            samples = joined([(len(rows[number].lengths), replies[number]) for number in range(len(rows))])
        return msgspec.structs.replace(
            scanned([rows[number] for number in range(len(rows))]),
            samples=samples if request.with_samples else None,
            refused=refused,
            stored=stored,
        )

    # Reading

    def _read_all(self, request: Scan) -> tuple[dict[int, tuple[BlockRows, Tokenized]], list[Refused]]:
        """The rows and samples of the cached blocks, and why others cannot be used."""
        found: dict[int, tuple[BlockRows, Tokenized]] = {}
        refused = []
        for item in request.cached:
            try:
                found[item.block] = self._read(item, request.blocks[item.block])
            except _RefusedError as error:
                refused.append(Refused(item.block, error.kind, str(error)))
            except (DamagedError, OSError) as error:
                refused.append(self._refusal(item.block, item.segment, error))
        return found, refused

    def _read(self, item: CachedBlock, block: Block) -> tuple[BlockRows, Tokenized]:
        segment = self._segment(item.segment)
        entry = segment.entry(item.entry)
        if (entry.start, entry.stop) != (block.start, block.stop):
            raise _RefusedError("other_block", "the file is cut into other blocks")

        if not item.is_sure and _sum_of(self._reader.read_block(block, ALL_BYTES)) != (entry.text_sum or -1):
            raise _RefusedError("other_text", "the file's text is another one there")

        self._touch(item.segment, segment)
        starts = array("i", [-1]) * entry.num_rows
        rows = BlockRows(b"", starts, _int32(entry.lengths), _int32(entry.offsets), entry.num_blank)
        return rows, segment.samples(entry)

    def _segment(self, name: str) -> Segment:
        segment = self._segments.pop(name, None) or Segment(os.path.join(self._cache.folder, name))
        while len(self._segments) >= _MAX_OPEN_SEGMENTS:
            self._forget(next(iter(self._segments)))
        self._segments[name] = segment  # the last one is the one last used
        return segment

    def _forget(self, name: str) -> None:
        segment = self._segments.pop(name, None)
        if segment is not None:
            segment.close()

    def _touch(self, name: str, segment: Segment) -> None:
        """Update the segment's time of last use, once per worker: eviction depends on it."""
        if name not in self._touched:
            self._touched.add(name)
            segment.touch()

    def rows(self, request: Tokenize) -> CachedSamples:
        """Those rows of the request that are in segments."""
        assert request.cached is not None, "rows are asked for"
        cached, found, refused = request.cached, Found([], {}, {}), dict[str, Refused]()
        owners, entries = np.frombuffer(cached.owners, np.int32), np.frombuffer(cached.entries, np.int64)
        offsets, chosen = np.frombuffer(cached.offsets, np.int32), list[int]()
        wanted = (owners >= 0) & (np.frombuffer(request.lengths, np.int32) != EXCLUDED)
        if request.expected:
            wanted &= ~is_elsewhere(np.frombuffer(request.expected, np.int32))
        for owner, at in sorted(set(zip(owners[wanted].tolist(), entries[wanted].tolist(), strict=True))):
            name, rows = cached.segments[owner], np.flatnonzero(wanted & (owners == owner) & (entries == at))
            if name in refused:
                continue

            try:
                segment = self._segment(name)
                segment.rows(segment.entry(at), rows, offsets[rows], found)
            except (DamagedError, OSError) as error:
                refused[name] = self._refusal(0, name, error)
            else:
                self._touch(name, segment)
                chosen += rows.tolist()
        return CachedSamples(frozenset(chosen), found, refused)

    def _refusal(self, block: int, name: str, error: DamagedError | OSError) -> Refused:
        self._forget(name)
        return Refused(block, "gone" if isinstance(error, FileNotFoundError) else "damaged", _why(error))

    # Storing

    def store(self, request: Index, rows: FoundRows, reply: Tokenized) -> Stored:
        """Append the rows of a request to a segment, in small blocks, as they are read one by one."""
        blocks: dict[int, Block] = {}
        texts: dict[int, BlockRows] = {}
        first = 0
        for block, count in zip(request.blocks, rows.counts, strict=True):
            ends = [*range(first + _ROWS_PER_BLOCK, first + count, _ROWS_PER_BLOCK), first + count]
            for stop in ends if count else ():
                start = rows.offsets[first]
                end = block.stop if stop == ends[-1] else block.start + rows.offsets[stop]
                offsets = array("i", [offset - start for offset in rows.offsets[first:stop]])
                texts[len(blocks)] = BlockRows(b"", array("i", [-1]), rows.lengths[first:stop], offsets, 0)
                blocks[len(blocks)] = msgspec.structs.replace(block, start=block.start + start, stop=end)
                first = stop
        parts = dict(enumerate(blocks_of(reply, [len(text.lengths) for text in texts.values()])))
        stored = self._store(blocks, texts, parts, reply, request.num_storing)
        return msgspec.structs.replace(stored, blocks=b"", entries=b"")

    def _store(
        self,
        blocks: dict[int, Block],
        texts: dict[int, BlockRows],
        parts: dict[int, BlockSamples],
        fresh: Tokenized,
        num_storing: int,
    ) -> Stored:
        """Append those blocks that have no bad row. An error of the disk stops only the cache, not the run."""
        good = [number for number, part in parts.items() if not part.reply.errors]
        if not good:
            return Stored()

        room, num_evicted = _UNLIMITED, 0
        try:
            if self._cache.max_bytes is not None:
                room, num_evicted = make_room(self._cache, _estimate(fresh, len(good)), num_storing)
            writer = self._writer_of(fresh.columns)
            batches, entries, limit = writer.batches(fresh), dict[int, int](), writer.num_bytes + room
            began_s = writer.write_s
            for number in good:
                entry = self._entry(blocks[number], texts[number], parts[number].reply)
                first, stop = parts[number].first, parts[number].stop
                at = writer.append(batches, first, stop, entry, limit - writer.num_bytes)
                if at is not None:
                    entries[number] = at
        except (OSError, DamagedError) as error:
            if self._writer is not None:  # it may end in the middle of a block
                self._writer.close()
                self._writer = None
            return Stored(fault=f"{getattr(error, 'filename', None) or self._cache.folder}: {_why(error)}")

        return Stored(
            segment=writer.name,
            blocks=array("i", entries).tobytes(),
            entries=array("q", entries.values()).tobytes(),
            stop=writer.stop,
            num_rows=sum(parts[number].num_rows for number in entries),
            num_bytes=writer.num_bytes,
            write_s=writer.write_s - began_s,
            num_evicted_bytes=num_evicted,
            is_full=len(entries) < len(good),
        )

    def _writer_of(self, columns: Iterable[str]) -> SegmentWriter:
        """The segment that is written to, or a new one: after a kill, where it is too large, or lacks a column."""
        writer, wanted = self._writer, frozenset(columns)
        if writer is None or writer.num_bytes > _MAX_SEGMENT_BYTES or not wanted <= writer.columns:
            if writer is not None:
                wanted |= writer.columns
                writer.close()
            self._writer = None
            self._writer = writer = SegmentWriter(self._cache.folder, sorted(wanted))
        return writer

    def _entry(self, block: Block, text: BlockRows, reply: Tokenized) -> Entry:
        file, digest = self._cache.files[block.file_id], self._digest(block.file_id)
        if not digest:
            raise DamagedError("a file of the data is not what it was")

        return Entry(
            file=(digest, file.num_bytes, file.mtime_ns),
            start=block.start,
            stop=block.stop,
            block_bytes=self._job.block_bytes,
            text_sum=_sum_of(text),
            offsets=text.offsets.tobytes(),
            lengths=text.lengths.tobytes(),
            num_blank=text.num_blank,
            kept=reply.kept,
            drops=reply.drops,
            notes=reply.notes,
        )

    # Listing

    def answer(self, request: ListTokens) -> Reply:
        """List segments."""
        try:
            names = {os.path.basename(path): size for path, size in segments_in(self._cache.folder)}
        except OSError as error:
            return Failed("OSError", f"{error.filename or self._cache.folder}: {_why(error)}")

        found, faults = [], {}
        wanted = dict.fromkeys(sorted(names)[: request.num], 0) if request.names is None else request.names
        for name, first in wanted.items():
            try:
                found.append(self._listing(name, self._segment(name), first))
            except (OSError, DamagedError) as error:
                faults[name] = _why(error)
                self._forget(name)
        return TokensListed(names, found, faults)

    def _listing(self, name: str, segment: Segment, first: int) -> SegmentListing:
        entries, file_ids, starts, stops = array("q"), array("i"), array("q"), array("q")
        are_sure, stop = bytearray(), first
        for at, stop_of_it, entry in segment.entries(first):
            stop = stop_of_it
            if not self._cache.has_rows and entry.block_bytes != self._job.block_bytes:
                continue

            # Several files may have the same content: each has all of its blocks here.
            for file_id in self._files_of(*entry.file[:2]):
                entries.append(at)
                file_ids.append(file_id)
                starts.append(entry.start)
                stops.append(entry.stop)
                are_sure.append(self._cache.files[file_id].mtime_ns == entry.file[2])
        if entries:
            self._touch(name, segment)
        columns = [bytes(column) for column in (entries, file_ids, starts, stops, are_sure)]
        return SegmentListing(name, segment.num_bytes, stop, *columns)

    def _files_of(self, digest: str, num_bytes: int) -> list[int]:
        """The files of that content."""
        of_size = [number for number, file in enumerate(self._cache.files) if file.num_bytes == num_bytes]
        return [number for number in of_size if self._digest(number) == digest]

    def _digest(self, file_id: int) -> str:
        """The digest of the file's content; empty if it cannot be read."""
        if file_id not in self._digests:
            file = self._cache.files[file_id]
            self._digests[file_id] = file.digest or _digest_of(self._job.files[file_id].path, file.num_bytes)
        return self._digests[file_id]

    def close(self) -> None:
        """Close the segments."""
        while self._segments:
            self._segments.popitem()[1].close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _int32(data: Data) -> array[int]:
    return array("i", bytes(data))


def _digest_of(path: str, num_bytes: int) -> str:
    try:
        return file_digest(path, num_bytes)
    except AsyncDataError:
        return ""


def _sum_of(text: BlockRows) -> int:
    """The checksum of a block's text; ``NO_SUM`` if the text is not complete."""
    if len(text.starts) and min(text.starts) < 0:
        return NO_SUM

    return checksum(text.data) or 1


def _estimate(fresh: Tokenized, num_blocks: int) -> int:
    """About the bytes that these samples take on the disk, rather too many."""
    num_bytes = len(fresh.tokens) + sum(len(column.data) for column in fresh.columns.values())
    return num_bytes + 24 * (len(fresh.token_ends) + 8) + 2048 * (1 + num_blocks)


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
