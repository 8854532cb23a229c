"""The two loaders: ``AsyncDataLoader`` for ``await``, ``DataLoader`` for a plain ``for`` loop.

Both take ready samples under a lock, on the caller's thread, without a switch to the service's thread. They differ only
in how they wait if no samples are ready.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import anyio
import anyio.to_thread

from asyncdata.core.errors import EndOfData, PrefetchTimeoutError, is_shortage
from asyncdata.core.settings import checked_timeout
from asyncdata.core.threads import alone, call_soon_in_this_loop, identity
from asyncdata.loader.base import BaseLoader
from asyncdata.loader.config import B_co, BatchT_co, Item_co

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from asyncdata.core.types import Group, Sample
    from asyncdata.delivery.ledger import Request
    from asyncdata.delivery.rollouts import WorkRequest
    from asyncdata.loader.pack_batches import PackBatches
    from asyncdata.loader.sample_batches import Batch, SampleBatches

    T = TypeVar("T")

_GRACE_S = 1.0
"""For calls whose samples are ready when their time is over, as other code held their event loop: one takes after the
other."""


class DataLoader(BaseLoader[Item_co, B_co]):
    """Samples for a plain loop. Safe to call from several threads, and inside a running event loop.

    ::

        with DataLoader("prompts.jsonl", tokenize_fn=..., batch_size=32) as loader:
            for batch in loader: ...        # one epoch; the next `for` is the next one

    :param source: a path, a glob, a folder, a list of these, or a :class:`~asyncdata.JsonlSource`.
    :param tokenize_fn: a description such as :class:`~asyncdata.PromptTokenizeFn`, a function of a row (a dict), or its
        import path ``pkg.mod:fn``.
    :param collate_fn: makes a batch of the ``for`` loop from the list of its samples; by default, that list. With
        ``packing`` it gets packs, lists of :class:`~asyncdata.Document`. Types: ``DataLoader[Any, <its result>]``.
    :param packing: joins samples into sequences of one length: :class:`~asyncdata.SoftPacking` or another; then
        ``batch_size`` counts packs.
    :param length_grouping: puts packs, or samples, of similar cost into the same step.
    :param buffer_filter: chooses among the groups given back; a function of (buffer, num_groups) or its import path.
    :param too_old: what ``max_policy_lag`` does with groups that were given back: ``reset`` makes them prompts again;
        ``drop``; or a function of the group, called under the loader's lock, that returns one of these, or ``keep``.

    All other parameters are settings, which :class:`~asyncdata.LoaderConfig` explains.

    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read; all of them are named.
    """

    def get_next_batch(self, num_samples: int, *, timeout_s: float | None = None) -> list[Sample]:
        """Exactly ``num_samples`` samples: first groups given back, then the stream, over as many epochs as needed.

        :param num_samples: a multiple of ``n_samples_per_prompt``.
        :raises EndOfData: if all ``epochs`` are delivered; the groups that were left are in the error.
        :raises PrefetchTimeoutError: if they are not ready in time; then no sample is consumed.
        :raises BadRowError: if the next row is bad, under ``bad_rows="raise"``.
        """
        return self._take(self._num_groups(num_samples), None, identity, timeout_s)

    def get_samples(
        self, num_groups: int, *, at_least: int | None = None, timeout_s: float | None = None
    ) -> list[Group]:
        """Exactly ``num_groups`` groups of ``n_samples_per_prompt`` samples; otherwise like :meth:`get_next_batch`.

        :param at_least: fewer are enough, but not fewer than this: those that are ready. At the end, those left.
        """
        request = self._request(num_groups, at_least)
        return self._take(self._groups(num_groups), None, self._regroup, timeout_s, request)

    def groups(self, *, max_out: int, max_finished: int | None = None) -> Iterator[Group]:
        """Groups that need work, one by one, for a ``for`` loop whose groups end in other threads.

        Groups are tracked from now on: say where each ends by :meth:`consume`, :meth:`drop` or :meth:`add_samples`.
        Those given back come first, but for the finished ones, whose samples are all completed or truncated: these are
        for :meth:`take_finished`. A loop that is left goes on at the next call. With ``epochs=``, it ends when no group
        is left that needs work, and none is out.

        :param max_out: at most so many groups are out, of this and of all other calls; the next one waits until one
            ends. That is no wait for data, and ``timeout_s`` does not count it.
        :param max_finished: no group is served while so many finished ones wait to be taken; None: any number may.
        :raises ConfigError: AD438, for a limit that cannot work.
        :raises BadRowError: if the next row is bad, under ``bad_rows="raise"``.
        """
        return Epoch(self._work(max_out, max_finished), self._next_group)

    def _next_group(self, work: WorkRequest) -> tuple[Group] | None:
        try:
            return self._take(1, None, alone, request=work.again())
        except EndOfData:
            return None

    def take_finished(self, num_groups: int, *, at_least: int = 0) -> list[Group]:
        """At most ``num_groups`` of the finished groups that were given back, first in, first out.

        Finished is a group whose samples are all completed or truncated. They are out until :meth:`consume`.

        :param at_least: wait for so many of them. There are fewer once no more can come: the data is at its end, and no
            group needs work or is out.
        :raises ConfigError: AD438, for numbers that cannot work.
        """
        return self._take(0, None, self._regroup, request=self._request(num_groups, at_least, finished=True))

    def peek(self, num_groups: int, *, timeout_s: float | None = None) -> list[Sample]:
        """The samples of the stream that come next, one for each group, without delivering them.

        To warm sandboxes or prefix caches. They have the ``index``, ``source`` and tokens with which they will be
        delivered; pictures and other media are not loaded, and tokens that come with them are -1 until then. Groups
        that were given back, which come first, are not among them. With several ranks, they are of all ranks; with
        packing, they are packed next. There are fewer if the data ends, or if a row stops the run: the call that comes
        to it raises; and with
        ``Outcomes(policy=...)`` at an epoch's end, as what the next one leaves out is not decided before a call takes.

        :param num_groups: more than the read-ahead has are read first.
        :raises PrefetchTimeoutError: if they are not ready in time.
        """
        request = self._peek(num_groups)
        try:
            return self._serve(request, checked_timeout(timeout_s))
        finally:
            self._engine.coordinator.withdraw(request)

    def num_rows(self, *, timeout_s: float | None = None) -> int:
        """Rows of an epoch; builds the row index and waits until it is complete. For ``shuffle="full"``.

        :raises ConfigError: if the order has no row index.
        :raises PrefetchTimeoutError: if it is not complete in time.
        """
        self.start()
        with self._waiting():
            return self._engine.num_rows(timeout_s)

    def num_batches(self, *, timeout_s: float | None = None) -> int:
        """Batches of a ``for`` loop over the current epoch from its start, on each rank: the steps of a scheduler.

        Of planned packs (``plan_packs=True``), which differ from epoch to epoch; or of rows that are all samples, with
        ``shuffle=RowShuffle(only_kept=True)``. Waits until the rows are counted.

        :raises ConfigError: AD443, where the number is not known before the epoch ends.
        :raises PrefetchTimeoutError: if it is not known in time.
        """
        from asyncdata.loader.measurements import checked_plan, num_batches

        is_planned = checked_plan(self._engine)
        found = self.peek(1, timeout_s=timeout_s) if is_planned else self.num_rows(timeout_s=timeout_s)
        return num_batches(self._engine, found)

    def report(
        self,
        samples_or_groups: Iterable[Sample] | Iterable[Group],
        scores: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    ) -> int:
        """Remember the scores of delivered samples, for ``Outcomes(policy=...)``. For a loader with ``outcomes``.

        Each sample counts once an epoch: a score that is reported again, as after a restart, changes nothing. Nor does
        one of an earlier epoch than the last that its row has scores of.

        With several ranks (``Outcomes(exchange=...)``), each rank reports its own samples, and all ranks count all.
        The call returns when every rank has made it, so all make it equally often, if need be with no samples.

        :param scores: for each sample a finite number; for each group one for all its samples, or one for each. None:
            the samples' ``reward``. Of several rewards, a dict of these by name; a score that is None is skipped, and
            counted as such. Each reward is remembered by itself; ``PassRate(key=...)`` reads one of them.
        :return: how many scores were new, of all ranks.
        :raises InvalidGroupError: if one of them cannot be counted (AD482), or they lack the reward that the policy
            reads (AD484); none is then.
        :raises ConfigError: if the loader has no ``outcomes`` (AD483), or another rank leaves out other rows (AD487).
        :raises WorkerError: if another rank cannot report, or be reached (AD486).
        """
        return self._report(samples_or_groups, scores)()

    def _take(
        self,
        num_groups: int,
        last_epoch: int | None,
        finish: Callable[[list[Sample]], T],
        timeout_s: float | None = None,
        request: Request | None = None,
    ) -> T:
        """Take samples, and return ``finish(samples)``. Until the caller has that, they count as not delivered."""
        self._check()
        self._recorder.called()
        timeout_s = checked_timeout(timeout_s)
        coordinator = self._engine.coordinator
        samples = None
        try:
            if request is None:
                samples = coordinator.take_ready(num_groups, last_epoch)
            if samples is None:
                self._begin()
                if request is None:
                    from asyncdata.delivery.ledger import Request

                    request = Request(num_groups, last_epoch)
                samples = self._serve(request, timeout_s)
            return finish(samples)
        except BaseException as error:  # also an interrupt between the commit and the caller
            coordinator.failed.append((request, samples))  # first of all: what follows may be interrupted
            self._roll_back(error)
            raise

    def _serve(self, request: Request, timeout_s: float | None = None) -> list[Sample]:
        released: SimpleQueue[None] = SimpleQueue()
        while (samples := self._serve_data(request, timeout_s)) is None:
            request.wake = lambda: released.put(None)
            while request.held:  # the coordinator lets go before it wakes
                with _holding(self, request):
                    released.get()
        return samples

    def _serve_data(self, request: Request, timeout_s: float | None) -> list[Sample] | None:
        """The samples; None if the request waits for the trainer, which is no wait for data."""
        samples = self._engine.coordinator.poll(request)
        if samples is not None or request.held:
            return samples

        timeout_s = self._engine.config.timeout_s if timeout_s is None else timeout_s
        began, wait = time.monotonic(), object()
        ready: SimpleQueue[None] = SimpleQueue()  # in C: two interrupts in a row break the locks of threading.Event
        request.wake = lambda: ready.put(None)
        try:
            self._engine.waits.begin(wait)
            while True:
                # Poll before waiting: the samples may have become ready before ``wake`` was set.
                samples = self._engine.coordinator.poll(request)
                if samples is not None or request.held:
                    return samples

                left_s = None if timeout_s is None else began + timeout_s - time.monotonic()
                try:
                    with self._waiting():
                        ready.get(timeout=None if left_s is None else max(0.0, left_s))
                except Empty:
                    raise self._engine.timeout_error(time.monotonic() - began, request.num_groups) from None
        finally:
            self._engine.waits.end(wait)

    def __iter__(self) -> Epoch[B_co]:
        return Epoch(self._batches(), self._next_packs if self._engine.batching.is_packed else self._next_samples)

    def _next_samples(self, batches: SampleBatches) -> Batch | None:
        """The next batch of a loop without packing, () if the samples taken form none; None at the end."""
        wanted = batches.next_request()
        if wanted is None:
            return None

        num_groups, last_epoch = wanted
        try:
            # Not `*wanted`: CPython may raise an interrupt after such a call, when the samples are already taken.
            return self._take(num_groups, last_epoch, batches.finish)
        except EndOfData as end:
            return batches.end(end)

    def _next_packs(self, batches: PackBatches) -> Batch | None:
        """The same with packing. Batches are made one after the other, as each depends on the one before."""
        self._check()
        self._recorder.called()
        request = None
        try:
            with self._loop_lock:
                request = batches.next_request()
                if request is None:
                    return None

                self._begin()
                return batches.finish(request, self._serve(request))
        except EndOfData:
            return batches.end()
        except BaseException as error:  # also an interrupt after the commit, while the lock is released
            self._engine.coordinator.failed.append((request, None))  # as in _take
            self._roll_back(error)
            raise

    def close(self) -> None:
        """Stop the workers and the thread, within 5 seconds. A second call, from any thread, waits as well.

        If the disk hangs to which ``telemetry`` is written, up to 3 seconds are added; if other ranks do not come to a
        call of ``Ranks(exchange=...)``, up to 5.
        """
        self._close("the loader was closed by close()")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.failed(error, True)
        self._close("the loader was closed at the end of its `with`")


class AsyncDataLoader(BaseLoader[Item_co, B_co]):
    """Samples for an ``await``-based loop, on asyncio or trio. The parameters are as for :class:`DataLoader`.

    ::

        async with AsyncDataLoader("prompts.jsonl", tokenize_fn=..., n_samples_per_prompt=8) as loader:
            groups = await loader.get_samples(32)
    """

    _async_loop_lock: anyio.Lock | None = None  # of the loop that iterates first
    _reporting: Future[int] | None = None

    async def get_next_batch(self, num_samples: int, *, timeout_s: float | None = None) -> list[Sample]:
        """Like :meth:`DataLoader.get_next_batch`. If it is cancelled, no sample is consumed."""
        return await self._take(self._num_groups(num_samples), None, identity, timeout_s)

    async def get_samples(
        self, num_groups: int, *, at_least: int | None = None, timeout_s: float | None = None
    ) -> list[Group]:
        """Like :meth:`DataLoader.get_samples`. If it is cancelled, no sample is consumed."""
        request = self._request(num_groups, at_least)
        return await self._take(self._groups(num_groups), None, self._regroup, timeout_s, request)

    def groups(self, *, max_out: int, max_finished: int | None = None) -> AsyncIterator[Group]:
        """Like :meth:`DataLoader.groups`, for ``async for``. If a step is cancelled, no group is consumed."""
        return AsyncEpoch(self._work(max_out, max_finished), self._next_group)

    async def _next_group(self, work: WorkRequest) -> tuple[Group] | None:
        try:
            return await self._take(1, None, alone, request=work.again())
        except EndOfData:
            return None

    async def take_finished(self, num_groups: int, *, at_least: int = 0) -> list[Group]:
        """Like :meth:`DataLoader.take_finished`. If it is cancelled, no group is consumed."""
        return await self._take(0, None, self._regroup, request=self._request(num_groups, at_least, finished=True))

    async def peek(self, num_groups: int, *, timeout_s: float | None = None) -> list[Sample]:
        """Like :meth:`DataLoader.peek`."""
        request = self._peek(num_groups)
        try:
            return await self._serve(request, checked_timeout(timeout_s))
        finally:
            self._engine.coordinator.withdraw(request)

    async def num_rows(self, *, timeout_s: float | None = None) -> int:
        """Like :meth:`DataLoader.num_rows`."""
        self.start()
        with self._waiting():
            return await anyio.to_thread.run_sync(self._engine.num_rows, timeout_s, abandon_on_cancel=True)

    async def num_batches(self, *, timeout_s: float | None = None) -> int:
        """Like :meth:`DataLoader.num_batches`."""
        from asyncdata.loader.measurements import checked_plan, num_batches

        is_planned = checked_plan(self._engine)
        wait = self.peek(1, timeout_s=timeout_s) if is_planned else self.num_rows(timeout_s=timeout_s)
        return num_batches(self._engine, await wait)

    async def report(
        self,
        samples_or_groups: Iterable[Sample] | Iterable[Group],
        scores: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    ) -> int:
        """Like :meth:`DataLoader.report`.

        With several ranks, the others count on a call that has been made. So if it is cancelled, it is completed all
        the same. Until then calls for samples wait, and a state is as before it; a later call is told its error.
        """
        report = self._report(samples_or_groups, scores)
        if self._engine.config.ranks.world_size == 1:
            return report()

        from asyncdata.loader.outcomes import reporting, settled

        before, self._reporting = self._reporting, (now := reporting(report, self._reporting))
        await settled(now)
        if self._reporting is now:
            self._reporting = None
        if before is not None:
            before.result()
        return now.result()

    async def _reported(self, reporting: Future[int]) -> None:
        """Wait for a report: what an epoch leaves out depends on it."""
        from asyncdata.loader.outcomes import settled

        with anyio.move_on_after(self._engine.config.timeout_s):
            await settled(reporting)
        if not reporting.done():
            raise PrefetchTimeoutError("AD510 no data in time: a report waits for other ranks", {"stage": "report"})

        if self._reporting is reporting:
            self._reporting = None
        reporting.result()

    async def _take(
        self,
        num_groups: int,
        last_epoch: int | None,
        finish: Callable[[list[Sample]], T],
        timeout_s: float | None = None,
        request: Request | None = None,
    ) -> T:
        self._check()
        self._recorder.called()
        timeout_s = checked_timeout(timeout_s)
        if self._reporting is not None:
            await self._reported(self._reporting)
        coordinator = self._engine.coordinator
        samples = None
        try:
            if request is None:
                samples = coordinator.take_ready(num_groups, last_epoch)
            if samples is None:
                self._begin()
                if request is None:
                    from asyncdata.delivery.ledger import Request

                    request = Request(num_groups, last_epoch)
                samples = await self._serve(request, timeout_s)
            return finish(samples)
        except BaseException as error:
            coordinator.failed.append((request, samples))  # first of all: what follows may be interrupted
            self._roll_back(error)
            raise

    async def _serve(self, request: Request, timeout_s: float | None = None) -> list[Sample]:
        while (samples := await self._serve_data(request, timeout_s)) is None:
            released, call_soon = anyio.Event(), call_soon_in_this_loop()
            request.wake = partial(call_soon, released.set)
            while request.held:
                with _holding(self, request):
                    await released.wait()
        return samples

    async def _serve_data(self, request: Request, timeout_s: float | None) -> list[Sample] | None:
        """Like :meth:`DataLoader._serve_data`."""
        samples = self._engine.coordinator.poll(request)
        if samples is not None or request.held:
            return samples

        timeout_s = self._engine.config.timeout_s if timeout_s is None else timeout_s
        began, waits, wait = time.monotonic(), self._engine.waits, object()
        ready = anyio.Event()
        call_soon = call_soon_in_this_loop()

        def wake() -> None:
            if request.ready_at:  # what comes from now on is no wait for data
                waits.end(wait)
            call_soon(lambda: ready.set())

        request.wake = wake
        try:
            waits.begin(wait)
            for limit_s in (timeout_s, _GRACE_S):
                with anyio.move_on_after(limit_s):
                    while True:
                        samples = self._engine.coordinator.poll(request)
                        if samples is not None or request.held:
                            return samples

                        with self._waiting(request):
                            await ready.wait()
                        ready = anyio.Event()
                if not request.ready_at:
                    break
            raise self._engine.timeout_error(time.monotonic() - began, request.num_groups)
        finally:
            waits.end(wait, request.ready_at)

    def __aiter__(self) -> AsyncEpoch[B_co]:
        return AsyncEpoch(self._batches(), self._next_packs if self._engine.batching.is_packed else self._next_samples)

    async def _next_samples(self, batches: SampleBatches) -> Batch | None:
        """Like :meth:`DataLoader._next_samples`."""
        wanted = batches.next_request()
        if wanted is None:
            return None

        try:
            return await self._take(*wanted, batches.finish)
        except EndOfData as end:
            return batches.end(end)

    async def _next_packs(self, batches: PackBatches) -> Batch | None:
        """Like :meth:`DataLoader._next_packs`."""
        self._check()
        self._recorder.called()
        if self._async_loop_lock is None:
            self._async_loop_lock = anyio.Lock(fast_acquire=True)
        request = None
        try:
            async with self._async_loop_lock:
                request = batches.next_request()
                if request is None:
                    return None

                self._begin()
                return batches.finish(request, await self._serve(request))
        except EndOfData:
            return batches.end()
        except BaseException as error:
            self._engine.coordinator.failed.append((request, None))
            self._roll_back(error)
            raise

    async def aclose(self) -> None:
        """Like :meth:`DataLoader.close`, even if cancelled."""
        reason = "the loader was closed by aclose()"
        try:
            with anyio.CancelScope(shield=True):
                await self._close_in_a_thread(reason)
        except BaseException:
            self._close(reason)  # asyncio's task.cancel() ignores the shield, and may come before the thread has ended
            raise

    async def _close_in_a_thread(self, reason: str) -> None:
        """So that the caller's loop keeps running; in this one if the system has no more threads."""
        try:
            await anyio.to_thread.run_sync(self._close, reason)
        except RuntimeError as error:
            if not is_shortage(error):
                raise

            self._close(reason)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.failed(error, True)
        await self.aclose()


class _Batches(Generic[BatchT_co]):
    """Batches until the end of the loader's current epoch.

    :param step: takes the samples that ``batches`` requests next, and returns the batch made of them; None at the end.
    """

    def __init__(self, batches: Any, step: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._step = step


class Epoch(_Batches[BatchT_co]):
    """Batches for ``for``."""

    _step: Callable[[Any], tuple[BatchT_co, ...] | None]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT_co:
        # An interrupt after the step would lose the batch. CPython can raise one after a call of a C function, so there
        # is none here.
        while (batch := self._step(self._batches)) is not None:
            if batch:
                return batch[0]

        raise StopIteration


class AsyncEpoch(_Batches[BatchT_co]):
    """Batches for ``async for``."""

    _step: Callable[[Any], Awaitable[tuple[BatchT_co, ...] | None]]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchT_co:
        while (batch := await self._step(self._batches)) is not None:
            if batch:
                return batch[0]

        raise StopAsyncIteration


def _holding(loader: BaseLoader[Any, Any], request: Request) -> AbstractContextManager[None]:
    """While a call waits for the trainer. That is shown only where it may be for ever."""
    from asyncdata.delivery.ledger import AT_END

    return loader._waiting(request) if request.held.startswith(AT_END) else nullcontext()  # noqa: SLF001 - a part of it
