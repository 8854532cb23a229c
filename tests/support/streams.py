"""Streams of rows for tests: one that can be watched, broken and stopped, and what is known of windows without one."""

import gzip
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata import Shuffle, SourceLocation
from asyncdata.core.identity import FileRef
from asyncdata.order.order import order_keys, shuffled_rows
from asyncdata.sources.stream import Rows, RowStream, StreamOrder


class ListStream(RowStream):
    """Rows from a list, the same in every epoch, given ``at_once`` at a time.

    :param has_states: whether it can begin in the middle.
    :param fault: raised in place of row ``fault_at``.
    :ivar reads: the epoch and state of each :meth:`read`.
    :ivar num_given: rows given, in all passes; ``num_open``: passes that are not closed.
    """

    def __init__(
        self,
        rows: Sequence[bytes],
        *,
        at_once: int = 3,
        max_row_bytes: int = 1 << 20,
        has_states: bool = True,
        fault: BaseException | None = None,
        fault_at: int | None = None,
    ) -> None:
        self.files = [FileRef("list", 0)]
        self.max_row_bytes = max_row_bytes
        self.rows = list(rows)
        self.at_once = at_once
        self.has_states = has_states
        self.fault = fault
        self.fault_at = len(self.rows) if fault_at is None else fault_at
        self.reads: list[tuple[int, Any]] = []
        self.num_given = 0
        self.num_open = 0
        self.on_row: Callable[[int], object] = bool

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        self.reads.append((epoch, state))
        self.num_open += 1
        try:
            first = 0 if state is None else state["row"]
            stop = self.fault_at if self.fault is not None else len(self.rows)
            while first < stop:
                last = min(first + self.at_once, stop)
                for row in range(first, last):
                    self.on_row(row)
                self.num_given += last - first
                yield rows_of(self.rows[first:last], first, self.max_row_bytes, {"row": first}, self.has_states)
                first = last
            if self.fault is not None:
                raise self.fault
        finally:
            self.num_open -= 1

    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        return SourceLocation("list", -1, num_bytes, row_number=offset)

    def fingerprint(self) -> dict[str, Any]:
        return {"digest": "list"}

    def check_unchanged(self) -> None:
        return


def rows_of(
    texts: Sequence[bytes], number: int, max_row_bytes: int, state: dict[str, Any] | None, has_state: bool = True
) -> Rows:
    lengths = np.array([len(text) for text in texts], np.int64)
    data = b"".join(text + b"\n" for text in texts if len(text) <= max_row_bytes)
    return Rows(0, number + np.arange(len(texts)), lengths, data, 0, state if has_state else None)


def texts_of(found: Any, max_row_bytes: int = 1 << 30) -> list[bytes | None]:
    """The rows in ``data``; None for those that are too long to be there."""
    texts: list[bytes | None] = []
    start = 0
    for length in found.lengths.tolist():
        texts.append(found.data[start : start + length] if length <= max_row_bytes else None)
        start += length + 1 if length <= max_row_bytes else 0
    assert start == len(found.data)
    return texts


def windows_of(lengths: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Which rows come into which window: worked out row by row, and without a stream."""
    windows: list[list[int]] = [[]]
    used = 0
    for row, length in enumerate(lengths):
        if windows[-1] and used + length + 1 > window_bytes:
            windows.append([])
            used = 0
        windows[-1].append(row)
        used += length + 1
    return windows


def stream_order_of(lengths: Sequence[int], shuffle: Shuffle, seed: int, num_epochs: int) -> list[int]:
    """D over one file: the numbers of its rows."""
    found: list[int] = []
    for epoch in range(num_epochs):
        for number, rows in enumerate(windows_of(lengths, shuffle.block_bytes * shuffle.window_blocks)):
            order: Iterable[int] = range(len(rows))
            if shuffle.enabled:
                order = shuffled_rows(len(rows), order_keys(seed, epoch, f"rows {number}")[0]).tolist()
            found += [rows[row] for row in order]
    return found


def cut(text: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """The text in pieces of these sizes, the last one as large as it must be."""
    start = 0
    for size in sizes:
        if start + size < len(text):
            yield text[start : start + size]
            start += size
    if start < len(text):
        yield text[start:]


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def members(texts: Iterable[bytes], level: int = 9) -> bytes:
    return b"".join(gzip.compress(text, level, mtime=0) for text in texts)


def frames(texts: Iterable[bytes]) -> bytes:
    import zstandard

    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    return b"".join(compress(text) for text in texts)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
