"""Looks at the chunks that come into the channel: lengths, and sampled samples, of what is delivered of them; and rows
that are bad or dropped.

Samples, and dropped rows of each reason, are chosen by the smallest keys, which are hashes of their places. So they are
spread evenly over the run, all ranks and restarts choose the same ones, and of N rows only about K ln(N / K) are ever
recorded, where the first K and the last K of a run would show its start and its end alone.

Many chunks are looked at together, as a call of numpy costs more than a chunk's work. The service's thread does that
for as many as may be held; all else is done in the recorder's thread.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from functools import lru_cache
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import redacted
from asyncdata.order.order import GOLDEN, MASK, Words, mix, mix_one
from asyncdata.telemetry.call_times import Histogram
from asyncdata.telemetry.records import (
    MAX_OF_REASON,
    MAX_VALUE,
    BadRowRecord,
    Document,
    DroppedRow,
    Place,
    SampleRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncdata.batching.packs import Pack
    from asyncdata.core.types import Position, Sample, SourceLocation, Tokens
    from asyncdata.delivery.channel import Channel
    from asyncdata.delivery.chunk import Chunk, Drop

_MAX_PENDING = 20_000
_MAX_HELD_BYTES = 8 << 20
_MIN_HELD_BYTES = 128 << 10
"""Chunks are held until so many bytes of them have come; a chunk counts as so many more than it has."""
_MAX_BAD_ROWS = 10_000
_MAX_REASONS = 200
"""Pairs of a source and a reason; a tokenize function may make up a reason for each row."""
_ALL = 1 << 53
_MAX_TOKENS = 1024
_MAX_SPANS = 256
_MAX_DOCUMENTS = 64
_FILL_STEP = 5
_MAX_TEXT = 8000
_LONE = re.compile("[\ud800-\udfff]")

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Lengths = np.ndarray[Any, np.dtype[np.int32]]


def keys_of(first: Position, rows: np.ndarray[Any, Any]) -> Words:
    """The keys of rows of a window, by their places alone: uint64 below 2^53.

    :param rows: counted from ``first``.
    """
    return _keys(np.uint64(_word_of(first)), rows)


def _word_of(first: Position) -> int:
    """What is mixed for the row ``first``; the rows after it have the next words."""
    return _word_of_window(first.epoch, first.window) + first.row & MASK


@lru_cache(maxsize=64)
def _word_of_window(epoch: int, window: int) -> int:
    return mix_one(((epoch << 40 ^ window) + 1) * GOLDEN & MASK)


def _keys(words: Words | np.uint64, rows: np.ndarray[Any, Any]) -> Words:
    return mix(rows.astype(np.uint64) + words) >> np.uint64(11)


class Reservoir:
    """The ``size`` smallest keys of delivered samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[int] = []  # negative keys: the largest comes first
        self._keys: set[int] = set()

    @property
    def limit(self) -> int:
        """Keys from here on are not among the smallest."""
        return _ALL if len(self._heap) < self._size else -self._heap[0]

    def take(self, key: int) -> bool:
        """Add a key; return whether it is among the smallest now, and was not before."""
        if key >= self.limit or key in self._keys:
            return False

        self._keys.add(key)
        if len(self._heap) < self._size:
            heappush(self._heap, -key)
        else:
            self._keys.remove(-heappushpop(self._heap, -key))
        return True

    def __contains__(self, key: int) -> bool:
        return key in self._keys


class _Chosen(NamedTuple):
    """Samples of a chunk, of one source, that are recorded if their keys are among the smallest when delivered.

    :ivar note: among those with this note; empty: among all.
    :ivar samples: their numbers, int64; ``keys``: theirs, uint64.
    """

    source: str
    note: str
    samples: Numbers
    keys: Words


class _Due(NamedTuple):
    """A sample that is to be recorded."""

    chunk: Chunk
    sample: int
    key: int
    source: str
    note: str


class _Seen:
    """A chunk that is not completely delivered yet.

    :ivar chunk: kept only if it has chosen samples.
    :ivar rows: of its samples, int32; ``lengths``: their tokens, 0 of what this rank does not deliver.
    :ivar num_counted: samples that are counted.
    """

    __slots__ = ("channel", "chosen", "chunk", "first", "lengths", "noted", "num_counted", "num_rows", "rows")

    def __init__(self, channel: Channel, chunk: Chunk, rows: Lengths, lengths: Lengths, chosen: list[_Chosen]) -> None:
        self.channel, self.first, self.num_rows, self.chosen = channel, chunk.first, chunk.num_rows, chosen
        self.chunk = chunk if chosen else None
        self.noted = _noted(chunk)
        lengths[chunk.excluded] = 0
        self.rows, self.lengths, self.num_counted = rows, lengths, 0

    def num_delivered(self, place: Position) -> int:
        """How many of its samples come before ``place``."""
        first, num_rows = self.first, place.row - self.first.row
        if first.epoch != place.epoch or first.window != place.window:
            return len(self.rows) if (first.epoch, first.window) < (place.epoch, place.window) else 0

        return len(self.rows) if num_rows >= self.num_rows else int(np.searchsorted(self.rows, num_rows))


class ChunkWatch:
    """What is recorded of chunks. :meth:`see` is called in the service's thread; all else in one other at a time.

    :param size: samples that are kept of each source.
    :param shows_rows: whether the text of rows of a source, by its name, may be recorded.
    :ivar noted: rows that were noted, by part of a mixture and note.
    :ivar num_lost: chunks that found the queue full.
    """

    def __init__(self, size: int, shows_rows: Callable[[str], bool]) -> None:
        self._size, self._shows_rows = size, shows_rows
        self._new: deque[tuple[Channel, Chunk]] = deque()
        self._num_held_bytes = 0  # of the service's thread only
        self._looking = threading.Lock()
        self._seen: deque[_Seen] = deque()
        self._bad: deque[tuple[Chunk, int]] = deque()
        self._num_bad = 0
        self._dropped: deque[tuple[Chunk, Drop, int, int]] = deque()
        self._reservoirs: dict[tuple[str, str], Reservoir] = {}
        self._of_reasons: dict[tuple[str, str], Reservoir] = {}
        self._lengths = Histogram()
        self.noted: dict[str, dict[str, int]] = {}
        self.num_lost = 0

    @property
    def lengths(self) -> dict[int, int]:
        """Histogram of the tokens of delivered samples."""
        return self._lengths.counts()

    def see(self, channel: Channel, chunk: Chunk) -> None:
        """A chunk comes into the channel."""
        if len(self._new) + len(self._seen) >= _MAX_PENDING:
            self.num_lost += 1
            return

        self._new.append((channel, chunk))
        self._num_held_bytes += chunk.num_bytes + _MIN_HELD_BYTES
        if self._num_held_bytes > _MAX_HELD_BYTES and self._looking.acquire(blocking=False):
            self._num_held_bytes = 0
            try:
                self._look()
            finally:
                self._looking.release()

    def look(self) -> None:
        """Look at the chunks that have come; no caller must call it, all other methods do."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        new = [self._new.popleft() for _ in range(len(self._new))]
        if not new:
            return

        chunks = [chunk for _, chunk in new]
        ends = np.cumsum([chunk.num_samples for chunk in chunks]).tolist()
        spans = list(zip([0, *ends], ends, strict=False))
        rows = np.concatenate([chunk.rows_of(0, chunk.num_samples) for chunk in chunks]).astype(np.int32, copy=False)
        lengths = _lengths_of(chunks, spans)
        chosen = self._chosen(chunks, spans, rows) if self._size else [[]] * len(chunks)
        for (channel, chunk), (start, stop), some in zip(new, spans, chosen, strict=True):
            self._seen.append(_Seen(channel, chunk, rows[start:stop], lengths[start:stop], some))
            for number in range(len(chunk.errors)) if self._num_bad < _MAX_BAD_ROWS else ():
                self._bad.append((chunk, number))
                self._num_bad += 1
            for drop in chunk.drops if self._size else ():
                self._see_drop(chunk, drop)

    def _see_drop(self, chunk: Chunk, drop: Drop) -> None:
        """Choose among the rows that were dropped for one reason. All are of one source."""
        if not len(drop.rows):
            return

        own, rows = chunk.own_drop(drop)
        reservoir = _of(self._of_reasons, (own.source, drop.reason), MAX_OF_REASON)
        if reservoir is None:
            return

        keys = keys_of(own.first, rows)
        small = np.flatnonzero(keys < np.uint64(reservoir.limit))
        for at in small[np.argsort(keys[small])[:MAX_OF_REASON]].tolist():
            if reservoir.take(key := int(keys[at])):
                self._dropped.append((chunk, drop, at, key))

    def _chosen(
        self, chunks: list[Chunk], spans: list[tuple[int, int]], rows: np.ndarray[Any, Any]
    ) -> list[list[_Chosen]]:
        """What is chosen of each chunk. All are looked at together, but for those with notes or of several sources."""
        words = np.array([_word_of(chunk.first) for chunk in chunks], np.uint64)
        keys = _keys(np.repeat(words, [stop - start for start, stop in spans]), rows)
        small = np.flatnonzero(keys < self._limit("", "", self._size))
        bounds = np.searchsorted(small, [0, *(stop for _, stop in spans)]).tolist()
        chosen: list[list[_Chosen]] = []
        for chunk, (start, stop), first, last in zip(chunks, spans, bounds, bounds[1:], strict=False):
            if chunk.notes or chunk.record is not None:
                chosen.append(list(self._chosen_of_parts(chunk, rows[start:stop], keys[start:stop])))
            else:
                some = small[first:last]
                chosen.append([_Chosen("", "", some - start, keys[some])] if last > first else [])
        return chosen

    def _chosen_of_parts(self, chunk: Chunk, rows: np.ndarray[Any, Any], keys: Words) -> Iterator[_Chosen]:
        """What is chosen of a chunk, for each of its sources and notes."""
        noted = [(note.name, np.searchsorted(rows, note.rows)) for note in chunk.notes]
        sources = np.array([chunk.own(sample)[0].source for sample in range(chunk.num_samples)])
        for source in dict.fromkeys(sources.tolist()):
            samples = np.flatnonzero(sources == source)
            some = [(name, np.intersect1d(samples, those)) for name, those in noted]
            for note, of_note in [("", samples), *some]:
                limit = self._limit(source, note, MAX_OF_REASON if note else self._size)
                small = of_note[keys[of_note] < limit]
                if len(small):
                    yield _Chosen(source, note, small, keys[small])

    def _limit(self, source: str, note: str, size: int) -> np.uint64:
        """Keys below it may be chosen."""
        reservoir = _of(self._reservoirs, (source, note), size)
        return np.uint64(0 if reservoir is None else reservoir.limit)

    def settle(self, channel: Channel, place: Position) -> list[SampleRecord]:
        """Count what is delivered before ``place``; return the sampled samples among it."""
        self.look()
        due, delivered = list[_Due](), list[Lengths]()
        for _ in range(len(self._seen)):
            seen = self._seen.popleft()
            if seen.channel is not channel:
                continue

            start, stop = seen.num_counted, seen.num_delivered(place)
            if stop > start:
                seen.num_counted = stop
                delivered.append(seen.lengths[start:stop])
                if seen.chosen or seen.noted:
                    due += self._count(seen, start, stop)
            if stop < len(seen.rows):
                self._seen.append(seen)
        if delivered:
            lengths = np.concatenate(delivered)
            self._lengths.add_many(lengths[lengths > 0])
        still = [each for each in due if each.key in self._reservoirs[each.source, each.note]]
        once = {(each.source, each.key): each for each in still}.values()
        return [_sample_record(each, shows_row=self._shows_rows(each.source)) for each in once]

    def _count(self, seen: _Seen, start: int, stop: int) -> Iterator[_Due]:
        """Count the notes of samples ``[start, stop)``; yield the chosen ones that are to be recorded."""
        for _, source, note in (each for each in seen.noted if start <= each[0] < stop):
            notes = self.noted.setdefault(source, {})
            notes[note] = notes.get(note, 0) + 1
        for source, note, samples, keys in seen.chosen:
            reservoir = self._reservoirs[source, note]
            is_due = (start <= samples) & (samples < stop) & (keys < np.uint64(reservoir.limit))
            for at in np.flatnonzero(is_due & (seen.lengths[samples] > 0)).tolist():
                sample, key = int(samples[at]), int(keys[at])
                if reservoir.take(key):
                    assert seen.chunk is not None
                    yield _Due(seen.chunk, sample, key, source, note)

    def bad_rows(self) -> list[BadRowRecord]:
        """The bad rows that were found since the last call."""
        self.look()
        return [_bad_row_record(*self._bad.popleft(), self._shows_rows) for _ in range(len(self._bad))]

    def dropped_rows(self) -> list[DroppedRow]:
        """The dropped rows that were chosen since the last call."""
        self.look()
        return [_dropped_row(*self._dropped.popleft(), self._shows_rows) for _ in range(len(self._dropped))]

    def forget_rest(self) -> None:
        """Delivery continues elsewhere: what is not delivered comes again, or never."""
        self._new.clear()
        self._seen.clear()


class PackWatch:
    """Totals of packs, from the trainer's threads; and the documents of one pack of each interval, its first."""

    def __init__(self) -> None:
        self._fill, self._documents = dict[int, int](), Histogram()
        self._first: list[Document] | None = None

    def packed(self, packs: Sequence[Pack], length: int) -> None:
        """Packs of so many tokens were made of samples."""
        for pack in packs:
            percent = 100 * sum(stop - start for _, start, stop in pack) // max(length, 1)
            fill = percent - percent % _FILL_STEP
            self._fill[fill] = self._fill.get(fill, 0) + 1
        self._documents.add(map(len, packs))
        if self._first is None and packs:
            pieces = packs[0][:_MAX_DOCUMENTS]
            self._first = [_document(*piece, piece[0].position) for piece in pieces if piece[0].position is not None]

    def totals(self) -> dict[str, Any]:
        """The fields of an interval."""
        first, self._first = self._first, None
        fill = dict(sorted(self._fill.copy().items()))
        return {"pack_fill": fill, "pack_documents": self._documents.counts(), "pack": first or []}


def _document(sample: Sample, start: int, stop: int, at: Position) -> Document:
    located = {} if sample.source is None else _located(sample.source)
    place = Place(at.epoch, at.window, at.row)
    return Document(place=place, num_tokens=stop - start, source=sample.source_name or "", **located)


def _lengths_of(chunks: list[Chunk], spans: list[tuple[int, int]]) -> Lengths:
    """The tokens of each sample of all chunks."""
    ends = np.concatenate([chunk.token_ends for chunk in chunks])
    lengths = np.diff(ends, prepend=ends[:1] * 0)
    firsts = [start for start, stop in spans if start < stop]
    lengths[firsts] = ends[firsts]
    return lengths.astype(np.int32)


def _of(reservoirs: dict[tuple[str, str], Reservoir], name: tuple[str, str], size: int) -> Reservoir | None:
    """The reservoir of a source and a reason; None if there are too many reasons."""
    if name not in reservoirs:
        if name[1] and len(reservoirs) >= _MAX_REASONS:
            return None

        reservoirs[name] = Reservoir(size)
    return reservoirs[name]


def _noted(chunk: Chunk) -> list[tuple[int, str, str]]:
    """The noted samples of a mixture: number, part and note."""
    if chunk.record is None:
        return []

    samples = [(chunk.samples_before(int(row)), note.name) for note in chunk.notes for row in note.rows]
    return [(sample, chunk.own(sample)[0].source, name) for sample, name in samples]


# What a file has of a sample and of a row: bounded, and without text where rows are not shown


def cut(text: str, most: int) -> str:
    """The first ``most`` characters, with U+FFFD for what is no character, which JSON cannot hold."""
    return _LONE.sub("\N{REPLACEMENT CHARACTER}", text[:most])


def _sample_record(due: _Due, *, shows_row: bool) -> SampleRecord:
    chunk, sample, key, source, _ = due
    location, tokens, spans = chunk.location(sample), chunk.tokens_of(sample), chunk.value("spans", sample)
    position = chunk.position(sample)
    shown = _shown(chunk, sample, tokens) if shows_row else {}
    return SampleRecord(
        at=time.time(),
        key=key,
        place=Place(position.epoch, position.window, position.row),
        source=source,
        **_located(location),
        num_bytes=location.num_bytes,
        num_tokens=len(tokens),
        num_trained=-1 if spans is None else sum(stop - start for start, stop in spans),
        trained=[(start, stop) for start, stop in (spans or [])[:_MAX_SPANS]],
        notes=[note.name for note in chunk.notes if chunk.row_of(sample) in note.rows],
        **shown,
    )


def _shown(chunk: Chunk, sample: int, tokens: Tokens) -> dict[str, Any]:
    prompt = chunk.value("prompt", sample)
    texts = {
        "text": (prompt if isinstance(prompt, str) else _json(prompt), _MAX_TEXT),
        "label": (_json(chunk.value("label", sample)), MAX_VALUE),
        "metadata": (_json(chunk.value("metadata", sample) or None), MAX_VALUE),
    }
    is_cut = len(tokens) > _MAX_TOKENS or any(len(text) > most for text, most in texts.values())
    shown: dict[str, Any] = {name: cut(text, most) for name, (text, most) in texts.items()}
    are_known = "input_ids" not in (chunk.value("media", sample) or ())  # else the load gives them
    return {**shown, "ids": tokens[:_MAX_TOKENS].tolist() if are_known else [], "is_cut": is_cut}


def _json(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _located(location: SourceLocation) -> dict[str, Any]:
    number = -1 if location.row_number is None else location.row_number
    place = {"byte_offset": location.byte_offset, "line": location.line or 0, "row_number": number}
    return {"path": redacted(location.path), **place}


def _dropped_row(chunk: Chunk, drop: Drop, at: int, key: int, shows_rows: Callable[[str], bool]) -> DroppedRow:
    """The record of row number ``at`` of a drop."""
    first, (own, rows) = chunk.first, chunk.own_drop(drop)
    location = own.row_location(int(rows[at]))
    return DroppedRow(
        at=time.time(),
        key=key,
        reason=drop.reason,
        place=Place(first.epoch, first.window, first.row + int(drop.rows[at])),
        source=own.source,
        **_located(location),
        num_bytes=location.num_bytes if shows_rows(own.source) else -1,
    )


def _bad_row_record(chunk: Chunk, number: int, shows_rows: Callable[[str], bool]) -> BadRowRecord:
    """The record of bad row ``number`` of a chunk."""
    first, error = chunk.first, chunk.errors[number]
    own, row = chunk.own_error(number)
    shows_row = shows_rows(own.source)
    return BadRowRecord(
        at=time.time(),
        code=error.code,
        place=Place(first.epoch, first.window, first.row + error.row),
        source=own.source,
        **_located(own.row_location(row)),
        reason=cut(redacted(error.reason), MAX_VALUE) if shows_row else "",
        excerpt=cut(error.excerpt, MAX_VALUE) if shows_row else "",
    )
