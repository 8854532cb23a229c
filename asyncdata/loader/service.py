"""The service: one daemon thread with its own event loop, which runs the executor and the read-ahead.

The loaders communicate with it through the coordinator, under its lock. Only four things are scheduled in its loop
from other threads: room that the read-ahead waits for, a restart, tokenize functions to be opened again, the close.
"""

from __future__ import annotations

import os
import sys
import threading
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import AsyncDataError, ConfigError, LoaderForkedError, WorkerError, get_logger, short_of
from asyncdata.core.threads import call_soon_in_this_loop, started
from asyncdata.delivery.items import Bell, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncdata.core.messages import Job
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.read_ahead.mixture import MixtureReadAhead
    from asyncdata.read_ahead.row_index import RowIndex
    from asyncdata.read_ahead.source import ReadAhead
    from asyncdata.workers.pool import Pool
    from asyncdata.workers.popen import EarlyForkServer


_log = get_logger(__name__)
_CLOSE_TIMEOUT_S = 5.0
_serving: ContextVar[Service | None] = ContextVar("asyncdata_serving", default=None)
"""The service that the current thread runs, or works for."""
_forks: list[None] = []
"""One for each fork that led to this process."""
os.register_at_fork(after_in_child=partial(_forks.append, None))


class Service:
    """Runs until :meth:`close`. It starts at the first :meth:`start`, not before.

    :param coroutines: run as long as the service, besides the executor and the read-ahead.
    :param bell: rung when the read-ahead may go on.
    :param slot_bytes: memory of a slot.
    :param event_loop: ``asyncio``, ``uvloop`` or ``trio``: the event loop of its thread.
    :param early: the fork server that was started early, with the thread in which the service will run.
    :param index: the row index, if there is one: calls may wait for it.
    :ivar lock: held during a restart; who also needs the coordinator's lock takes that one later.
    """

    def __init__(
        self,
        job: Job,
        read_ahead: ReadAhead | MixtureReadAhead,
        coroutines: Sequence[Callable[[], Awaitable[None]]],
        executor: Pool,
        coordinator: Coordinator,
        bell: Bell,
        *,
        slot_bytes: int,
        event_loop: str = "asyncio",
        early: EarlyForkServer | None = None,
        index: RowIndex | None = None,
    ) -> None:
        self._job, self._executor, self._coordinator, self._index = job, executor, coordinator, index
        self._event_loop, self._early = event_loop, early
        self._read_ahead, self._coroutines, self._bell = read_ahead, coroutines, bell
        self._slot_bytes = slot_bytes
        self.lock = threading.RLock()  # reentrant: a garbage collection while it is held may close the loader
        self._thread: threading.Thread | None = None
        self._call_soon: Callable[[Callable[[], object]], object] | None = None
        self._expected_canaries: list[str] = []
        self._stop: anyio.Event | None = None
        self._is_closed = False
        self._fatal_error: AsyncDataError | None = None
        self._pid, self._num_forks = os.getpid(), len(_forks)
        self._log = _log.owned()

    def start(self) -> None:
        """Begin to read ahead; do nothing if that has begun."""
        if self._thread is not None:
            return

        with self.lock:
            if self._thread is None and not self._is_closed:
                if self._early is None:
                    self._thread = started(self._run, "asyncdata-service")
                else:
                    self._early.run(self._run)
                    self._thread = self._early.thread

    @property
    def is_started(self) -> bool:
        """Whether the thread was ever started."""
        return self._thread is not None

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the loader. In a forked child, locks may never be released."""
        return self._num_forks == len(_forks)

    def check_process(self) -> None:
        """Refuse a forked child.

        :raises LoaderForkedError: if this is not the process that made the loader.
        """
        if self._num_forks != len(_forks):  # no call of the system: every call of a loader comes here
            raise LoaderForkedError(
                f"AD503 the loader was made in process {self._pid} and is used in its forked child {os.getpid()}; its "
                "thread and workers are not there. Make it after the fork."
            )

    def check_caller(self) -> None:
        """Refuse a call that would wait for itself: from the source's code, or from a tokenize function run inline.

        :raises ConfigError: if this is such a call.
        """
        if _serving.get() is self:
            raise ConfigError(
                "AD504 the loader is called from within its own tokenize function or source, which it would have to "
                "wait for; make another loader for that"
            )

    def restart(self, change: Callable[[Ledger], Ledger], expected_canaries: list[str] | None = None) -> None:
        """Continue from ``change(ledger)``.

        :param expected_canaries: of the snapshot that the ledger comes from; None: no change.
        """
        with self.lock:  # so that :meth:`_begin` sees both changes, or neither
            self._coordinator.restart(change)
            if expected_canaries is not None:
                self._expected_canaries = expected_canaries
            if self._fatal_error is not None:  # its thread may have ended
                self._coordinator.fail(self._coordinator.channel, Failure(self._fatal_error))
            elif self._call_soon is not None:
                self._call_soon(partial(self._guarded, self._begin))

    def _begin(self) -> None:
        """Read ahead into the coordinator's channel, once per channel: twice would deliver its rows twice."""
        with self.lock:
            channel = self._coordinator.channel
            if channel.is_begun:
                return

            if self._fatal_error is None:  # else the channel has it
                self._read_ahead.start(self._coordinator.ledger, self._expected_canaries)
            channel.is_begun = True
        self._read_ahead.changed()  # its media may be asked for now: the start has dropped all earlier requests

    def reopen_soon(self) -> None:
        """Have the workers open the tokenize function again. From any thread."""
        with self.lock:
            if self._call_soon is None:  # the executor does not run yet
                self._executor.reopen()
            else:
                self._call_soon(partial(self._guarded, self._executor.reopen))

    def _guarded(self, function: Callable[[], object]) -> None:
        """Call ``function``; report an unexpected error to waiting calls, not only to the loop's own handler."""
        try:
            function()
        except Exception as error:
            self._fail_unexpectedly(error)

    def _run(self) -> None:
        _serving.set(self)
        self._log.own_thread()
        name, options = ("asyncio", {"use_uvloop": True}) if self._event_loop == "uvloop" else (self._event_loop, {})
        try:
            self._executor.prepare(self._slot_bytes)
            anyio.run(self._main, backend=name, backend_options=options)
        except AsyncDataError as error:
            self._fail(error)
        except BaseException as error:  # a fault of this library: waiting calls must end with it
            self._fail_unexpectedly(error)

    async def _main(self) -> None:
        self._stop = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(self._run_part, partial(self._executor.run, self._job))
            for run in (self._read_ahead.run, *self._coroutines):
                group.start_soon(self._run_part, run)
            with self.lock:
                self._call_soon = call_soon_in_this_loop()
                self._bell.ring = partial(self._call_soon, partial(self._guarded, self._read_ahead.changed))
                if self._is_closed:
                    self._stop.set()
            self._begin()
            await self._stop.wait()
            group.cancel_scope.cancel()

    async def _run_part(self, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except AsyncDataError as error:
            self._fail(error)
        except Exception as error:
            self._fail_unexpectedly(error)

    def _fail_unexpectedly(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):  # the others are its consequences
            error = error.exceptions[0]
        if reason := short_of(error):
            why = f"{reason}; raise the limit (ulimit -a), or free what is used up"
            self._fail(WorkerError(f"AD426 the loader cannot continue: {why}"), error)
            return

        self._log.exception("service.failed")
        self._fail(WorkerError(f"the loader's service failed with {error!r}; please report this"), error)

    def _fail(self, error: AsyncDataError, cause: BaseException | None = None) -> None:
        """Deliver the samples that are ready, then ``error``: rows in flight may never be answered."""
        error.__cause__ = cause
        self._fatal_error = error
        self._coordinator.fail(self._coordinator.channel, Failure(error), overtakes=True)
        if self._index is not None and not self._index.is_complete:
            self._index.fail(error)

    @property
    def canaries(self) -> list[str]:
        """Token digests of the canaries; empty until they are known."""
        return self._read_ahead.digests or self._expected_canaries

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop the thread and the workers. Returns after ``timeout_s`` at the latest; remaining workers end with
        this process.
        """
        if not self.is_here:
            return

        with self.lock:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed and self._call_soon is not None and self._stop is not None:
                self._call_soon(self._stop.set)
        thread = self._thread
        if thread is None and self._early is not None:
            self._early.close()
        if thread is None or thread is threading.current_thread():
            return

        if not sys.is_finalizing():  # daemon threads are frozen then, and would never end
            thread.join(timeout_s)
            if thread.is_alive():
                self._log.warning("service.close_timed_out", timeout_s=timeout_s)
