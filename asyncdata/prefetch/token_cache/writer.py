"""Writes tokenized windows to the token cache, one at a time, during training.

Workers write their replies to files. When all rows of a window are answered, a worker turns the files into a segment,
piece by piece, and a thread makes the segment durable. The trainer never waits for this: if the disk is too slow,
windows are left out; if it is full or fails, nothing more is written in this run.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.to_thread
import numpy as np

from asyncdata.core.cache_messages import Evicted, EvictTokens, Stored, StoreTokens
from asyncdata.core.callbacks import no_op
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.core.messages import Reply
    from asyncdata.prefetch.token_cache.catalog import Catalog, Indices
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.workers.base import Executor

__all__ = ("Recorder", "Storable")

_log = get_logger(__name__)
_MAX_WAITING_BYTES = 512 << 20
_MAX_OPEN = 256
"""Workers may finish windows out of order. A window is given up once so many later ones are open: it lost a row."""


class Storable(Protocol):
    """Samples that become a segment: those of a window, or rows of an order of rows.

    :ivar room: the folder with their unfinished files; empty if they are not stored.
    :ivar num_bytes: bytes of the samples.
    """

    room: str

    @property
    def num_bytes(self) -> int: ...

    def pieces(self, catalog: Catalog) -> Iterator[tuple[Indices, Any]]:
        """The pieces to store: for each, the catalog's numbers of what is in it, and its plan."""
        ...

    def give_up(self) -> Callable[[CacheFolder], object]:
        """Do not store them. What is returned removes their files, in any thread."""
        ...


class _Store:
    """What is being stored."""

    def __init__(self, window: Storable, catalog: Catalog) -> None:
        self.window = window
        self.pieces = list(window.pieces(catalog))
        self.file = f"{window.room}/segment"
        self.next_piece = 0
        self.end = 0
        self.numbers: list[Indices] = []
        self.num_rows = 0
        self.num_left_out = 0
        self.is_whole = False

    @property
    def plan(self) -> str:
        """The name of the file with the plan of the next piece."""
        return f"{self.file}.plan"

    def request(self) -> StoreTokens:
        """The request that writes the next piece."""
        is_last = self.next_piece + 1 == len(self.pieces)
        return StoreTokens(self.file, self.end, self.next_piece, is_last, self.plan)

    def took(self, reply: Stored) -> bool:
        """Take the reply for a written piece; return whether there is another one."""
        chosen, _ = self.pieces[self.next_piece]
        stored = chosen[np.frombuffer(reply.entries, np.int32)]
        self.numbers.append(stored)
        self.end, self.num_rows = reply.end, self.num_rows + reply.num_rows
        self.num_left_out += len(chosen) - len(stored)
        self.next_piece += 1
        return self.next_piece < len(self.pieces)


class Recorder:
    """Writes segments.

    :param max_bytes: limit for all caches in the parent folder; None: no limit.
    :ivar is_on: whether this process writes.
    """

    def __init__(self, folder: CacheFolder, executor: Executor, catalog: Catalog, max_bytes: int | None) -> None:
        self.is_on = False
        self._folder = folder
        self._executor = executor
        self._catalog = catalog
        self._max_bytes = max_bytes
        self._num_rooms = 0
        self._open: list[Storable] = []
        self._waiting: deque[Storable] = deque()
        self._store: _Store | None = None
        self._jobs: deque[tuple[Callable[[], Any], Callable[[Any], object]]] = deque()
        self._wake: anyio.Event | None = None
        self._idle: anyio.Event | None = None
        self._is_behind = self._has_left_out = False
        self._has_failed = False

    def begin(self) -> None:
        """Become the writer, if there is none and this process can."""
        if self.is_on or self._has_failed:
            return

        try:
            self.is_on = self._folder.lock()
        except OSError as error:
            self.fail(f"{error.filename or self._folder.path}: {error.strerror}")

    def room(self) -> str:
        """A folder for the files of a window; empty if it is not to be stored."""
        if not self.is_on:
            return ""

        self._num_rooms += 1
        try:
            return self._folder.make_room(self._num_rooms)
        except OSError as error:
            self.fail(f"{error.filename}: {error.strerror}")
            return ""

    def opened(self, window: Storable) -> None:
        """A window with such a folder was opened."""
        self._open.append(window)

    def restart(self) -> None:
        """Give up all windows that are not complete; store the current one again from its start."""
        for window in self._open:
            self._give_up(window)
        self._open.clear()
        if self._store is not None and not self._store.is_whole:
            self._waiting.appendleft(self._store.window)
            self._store = None
        self._next()

    def complete(self, window: Storable) -> None:
        """All rows of a window are answered."""
        if window in self._open:
            self._open.remove(window)
        while len(self._open) > _MAX_OPEN:
            self._give_up(self._open.pop(0))
        num_bytes = sum(waiting.num_bytes for waiting in self._waiting)
        if num_bytes < _MAX_WAITING_BYTES:
            self._waiting.append(window)
            self._next()
            return

        if not self._is_behind:
            self._is_behind = True
            _log.warning("token_cache.behind", path=self._folder.path, num_bytes=num_bytes)
        self._give_up(window)

    def _give_up(self, window: Storable) -> None:
        if window.room:
            self._run_later(partial(window.give_up(), self._folder), no_op)

    def _next(self) -> None:
        while self._store is None and self._waiting and self.is_on:
            window = self._waiting.popleft()
            store = _Store(window, self._catalog)
            if store.pieces:
                self._store = store
                self._store_piece(store)
            else:
                self._give_up(window)
        self._look_idle()

    def _store_piece(self, store: _Store) -> None:
        _, plan = store.pieces[store.next_piece]
        write = partial(self._folder.write, store.plan, plan)
        self._run_later(write, lambda _: self._submit(store))

    def _submit(self, store: _Store) -> None:
        if store is self._store:
            self._executor.submit(store.request(), partial(self._on_stored, store))

    def _on_stored(self, store: _Store, reply: Reply | Crashed) -> None:
        if store is not self._store:
            return

        if not isinstance(reply, Stored):
            self.fail(_reason(reply))
        elif store.took(reply):
            self._store_piece(store)
        else:
            self._on_whole(store)

    def _on_whole(self, store: _Store) -> None:
        if store.num_left_out and not self._has_left_out:
            self._has_left_out = True
            _log.warning("token_cache.left_out", path=self._folder.path, num_blocks=store.num_left_out)
        if not any(map(len, store.numbers)):
            self._finish(store)
        elif self._max_bytes is None:
            self._commit(store)
        else:
            write = partial(self._folder.write, store.plan, self._catalog.used)
            self._run_later(write, lambda _: self._evict(store))

    def _evict(self, store: _Store) -> None:
        if store is self._store and self._max_bytes is not None:
            request = EvictTokens(store.end, self._max_bytes, store.plan)
            self._executor.submit(request, partial(self._on_evicted, store))

    def _on_evicted(self, store: _Store, reply: Reply | Crashed) -> None:
        if store is not self._store:
            return

        if not isinstance(reply, Evicted):
            self.fail(_reason(reply))
            return

        if reply.num_bytes:
            self._catalog.forget(reply.names)
            _log.info("token_cache.evicted", path=self._folder.path, num_bytes=reply.num_bytes)
        if reply.is_full:
            _log.info("token_cache.full", path=self._folder.path, max_bytes=self._max_bytes)
            self._stop()
        else:
            self._commit(store)

    def _commit(self, store: _Store) -> None:
        store.is_whole = True
        self._run_later(partial(self._folder.commit, store.file), partial(self._on_committed, store))

    def _on_committed(self, store: _Store, name: str) -> None:
        self._catalog.add(name, store.end, np.concatenate(store.numbers))
        _log.info("token_cache.stored", path=f"{self._folder.path}/{name}", num_rows=store.num_rows)
        self._finish(store)

    def _finish(self, store: _Store) -> None:
        self._give_up(store.window)
        if store is self._store:
            self._store = None
        self._next()

    def fail(self, reason: str) -> None:
        """The disk or a worker failed: stop writing; the run itself continues."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("token_cache.not_written", path=self._folder.path, reason=reason)
        self._stop()

    def _stop(self) -> None:
        """Nothing more is written in this run."""
        self._has_failed = True
        self.is_on = False
        windows = [*self._open, *self._waiting, *([self._store.window] if self._store is not None else [])]
        self._open.clear()
        self._waiting.clear()
        self._store = None
        for window in windows:
            self._give_up(window)
        self._look_idle()

    # Writes, in a thread.

    def _run_later(self, job: Callable[[], Any], then: Callable[[Any], object]) -> None:
        self._jobs.append((job, then))
        if self._wake is not None:
            self._wake.set()

    def remove(self, name: str) -> None:
        """Remove a segment that is damaged."""
        if self.is_on:
            self._run_later(partial(self._folder.remove, name), no_op)

    async def run(self) -> None:
        """Run the writes in a thread, until cancelled."""
        while True:
            self._wake = anyio.Event()
            while self._jobs:
                job, then = self._jobs.popleft()
                try:
                    result = await anyio.to_thread.run_sync(job)
                except OSError as error:
                    self.fail(f"{error.filename or self._folder.path}: {error.strerror or error}")
                else:
                    then(result)
            self._look_idle()
            await self._wake.wait()

    def _look_idle(self) -> None:
        if self._idle is not None and self.is_idle:
            self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no write is pending."""
        return self._store is None and not self._waiting and not self._jobs

    async def finish(self) -> None:
        """Wait until all complete windows are stored."""
        self._idle = anyio.Event()
        self._look_idle()
        await self._idle.wait()


def _reason(reply: Reply | Crashed) -> str:
    if isinstance(reply, Crashed):
        return f"{reply.code} {reply.reason}"

    return reply.message if isinstance(reply, Failed) else f"a worker answered with {type(reply).__name__}"
