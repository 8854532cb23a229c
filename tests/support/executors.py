"""Executors that run inside a test, what they are asked and what they answer; and chunks made by hand."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import psutil

from asyncdata import JsonlSource, Position, SourceLocation
from asyncdata.core.messages import Failed, Job, Request, Scanned, Tokenized
from asyncdata.delivery.chunk import Chunk
from asyncdata.read_ahead.windows import BlockWindow
from asyncdata.tokenization.base import describe
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowFault
from asyncdata.workers.base import MAX_LOSSES
from asyncdata.workers.pool import Pool
from asyncdata.workers.process_pool import Processes
from tests.support.loading import NEVER_S


class Client:
    """Asks a running executor, as the read-ahead does, and keeps what it is told."""

    def __init__(self, executor, path, function, *, block_bytes=4096, slack_bytes=256, max_row_bytes=1 << 20):
        self.executor = executor
        self.files = JsonlSource(str(path), max_row_bytes=max_row_bytes).open(block_bytes)
        sizes = {"max_row_bytes": max_row_bytes, "block_bytes": block_bytes, "slack_bytes": slack_bytes}
        self.job = Job(files=self.files.files, tokenize=describe(function), **sizes)
        self.replies: list[list[Any]] = []
        self._arrived = anyio.Event()

    @property
    def slot_bytes(self) -> int:
        return self.files.num_blocks * self.job.stride

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The executor serves meanwhile. To be used in a test's body, never in a fixture: it holds a task group."""
        async with anyio.create_task_group() as group:
            self.executor.prepare(self.slot_bytes)
            group.start_soon(self.executor.run, self.job)
            with anyio.fail_after(NEVER_S):
                yield
            group.cancel_scope.cancel()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[BlockWindow]:
        """The same, with all rows read into a slot."""
        async with self.running():
            yield await self.window()

    def ask(self, request: Request, max_losses: int = MAX_LOSSES) -> int:
        """The number of the request, by which :meth:`answer` knows it."""
        number = len(self.replies)
        self.replies.append([])
        self.executor.submit(request, max_losses).then(partial(self._take, number))
        return number

    def _take(self, number: int, reply: object) -> None:
        self.replies[number].append(reply)
        self._arrived.set()
        self._arrived = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Until ``condition`` holds; it is looked at after each reply."""
        while not condition():
            await self._arrived.wait()

    async def answer(self, number: int) -> Any:
        await self.until(lambda: self.replies[number])
        (reply,) = self.replies[number]
        return reply

    async def answers(self, numbers: Iterable[int]) -> list[Any]:
        return [await self.answer(number) for number in numbers]

    def unread_window(self) -> BlockWindow:
        """A window of all blocks of the file, in the order of the file; it holds a slot."""
        slot = self.executor.slots.hold()
        assert slot is not None
        blocks = self.files.blocks(range(self.files.num_blocks))
        return BlockWindow(self.files, blocks, slot, self.job.stride, partial(np.arange, dtype=np.int64))

    async def window(self) -> BlockWindow:
        window = self.unread_window()
        scans = [self.ask(scan) for scan in window.scans()]
        for part, reply in enumerate(await self.answers(scans)):
            assert isinstance(reply, Scanned), reply
            window.add(part, reply)
        return window

    async def tokenized(self, window: BlockWindow, first: int = 0, stop: int | None = None) -> Tokenized:
        """Rows ``[first, stop)`` of a window, tokenized in one request."""
        reply = await self.answer(self.ask(window.request(first, window.num_rows if stop is None else stop)))
        assert isinstance(reply, Tokenized), reply
        return reply


async def tokenized(executor: Any, path: Path, function: Any, **settings: Any) -> Tokenized:
    """All rows of a file, tokenized in one request."""
    client = Client(executor, path, function, **settings)
    async with client.reading() as window:
        return await client.tokenized(window)


def ids_of(reply: object) -> list[int]:
    """The tokens of a reply, end to end: with one token a row, which rows they are."""
    assert isinstance(reply, Tokenized), reply
    return np.frombuffer(reply.tokens, np.int32).tolist()


def value_of(reply: Tokenized, column: str, sample: int = 0) -> Any:
    data, ends = reply.columns[column].data, np.frombuffer(reply.columns[column].ends, np.uint32).tolist()
    return msgspec.json.decode(data[([0, *ends])[sample] : ends[sample]])


def failure_of(reply: object) -> Failed:
    assert isinstance(reply, Failed), reply
    return reply


async def until(condition: Callable[[], object]) -> None:
    """Until something outside this process is so; polled, as there is nothing to wait for."""
    with anyio.fail_after(NEVER_S):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)


def process_pool(num_workers: int, **knobs: Any) -> Pool:
    return Pool([Processes(num_workers, **knobs)], 1)


def fork_server() -> psutil.Process:
    (child,) = psutil.Process().children()
    return child


def events_of(events: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def said(events: Any) -> str:
    """What workers have written, as it was logged."""
    return "".join(event["text"] for event in events_of(events, "worker.output"))


def pids(executor: Any) -> list[int]:
    return [worker.pid for worker in executor.statistics().workers if worker.pid is not None]


def states(executor: Any) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


async def all_ready(executor: Any) -> None:
    await until(lambda: states(executor) == ["idle"] * executor.num_workers)


@contextlib.asynccontextmanager
async def pool(path: Any, function: Any, num_workers: int = 1, **knobs: Any) -> Any:
    """An executor with so many workers, which are ready, its client, and all rows read into a slot."""
    executor = process_pool(num_workers, **knobs)
    client = Client(executor, path, function)
    async with client.reading() as window:
        await all_ready(executor)
        yield executor, client, window


START = Position()


class Lines:
    """Rows of ten bytes each."""

    def __init__(self, path: str = "rows.jsonl") -> None:
        self._path = path

    def location(self, row: int) -> SourceLocation:
        return SourceLocation(self._path, 10 * row, 9)

    def key(self, row: int) -> tuple[int, int]:
        return 0, 10 * row

    def keys(self, first: int, stop: int) -> Any:
        return [0] * (stop - first), [10 * row for row in range(first, stop)]


class BadRow(str):
    """A row that is bad with this code."""

    __slots__ = ()


def chunk_of(*rows, first=START, ends_epoch=False, path="rows.jsonl", columns=None):
    """A chunk of these rows: tokens are kept, with these ``columns``, a word is why one is dropped, a BadRow is bad."""
    out = ColumnWriter()
    encoded = {name: json.dumps(value).encode() for name, value in (columns or {}).items()}
    for number, row in enumerate(rows):
        if isinstance(row, BadRow):
            out.fail(number, RowFault(row, "as it was told to", b"{}"))
        elif isinstance(row, str):
            out.drop(number, row)
        else:
            out.keep(number, row if isinstance(row, list) else [row], **encoded)
    return Chunk(out.finish(len(rows), 0.0), first, len(rows), Lines(path), ends_epoch=ends_epoch)
