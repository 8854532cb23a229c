"""The two faces of the service: ``AsyncDataLoader`` to be awaited, ``DataLoader`` for a plain ``for``.

Both take ready samples under a lock, on the caller's thread, without crossing into the service's loop; they differ
only in how they wait when nothing is ready.
"""

from __future__ import annotations

import operator
import time
import warnings
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdata import snapshot as snapshots
from asyncdata.config import Knobs, LoaderConfig
from asyncdata.engine import Engine
from asyncdata.errors import ConfigError, LoaderClosedError
from asyncdata.iteration import AsyncEpoch, Epoch
from asyncdata.ledger import lease_key
from asyncdata.loops import call_soon_in_this_loop
from asyncdata.request import Request
from asyncdata.types import Sample

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import TracebackType
    from typing import Self, TypeVar, Unpack

    from asyncdata.buffer import BufferFilter
    from asyncdata.diagnostics import Statistics
    from asyncdata.engine import Paths
    from asyncdata.sources.base import Source
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.types import Group, Position

    T = TypeVar("T")

__all__ = ("AsyncDataLoader", "DataLoader")


class _Loader:
    """What both faces share: everything that never waits for data."""

    def __init__(
        self,
        source: Source | Paths,
        *,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        buffer_filter: BufferFilter | str | None = None,
        **knobs: Unpack[Knobs],
    ) -> None:
        self._closed_because = "the loader's constructor failed"  # until it has not: see __del__
        self._engine = Engine(source, tokenize_fn, buffer_filter, LoaderConfig.of(dict(knobs)))
        self._collate_fn = collate_fn or _same
        self._closed_because = ""

    # Giving back, acknowledging.

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back: they are served first, each once, and are in every snapshot until then.

        A group given back belongs to the loader until it is served again; change it before, not after.

        :param groups: lists of ``n_samples_per_prompt`` samples.
        :raises InvalidGroupError: naming the first group that cannot be kept; none is added then.
        """
        self._check()
        self._engine.coordinator.add_groups(groups)

    def ack(self, delivered: Iterable[Sample] | Iterable[Group] | None = None) -> None:
        """Under ``commit="on_ack"``: these samples or groups (None: all delivered so far) are done with."""
        self._check()
        if delivered is None:
            self._engine.coordinator.acknowledge(None)
            return

        groups = [[item] if isinstance(item, Sample) else item for item in delivered]
        self._engine.coordinator.acknowledge([lease_key(group) for group in groups])

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of this moment, as plain builtins: fit for torch.save, DCP and JSON. May be called at any time.

        It says what was *delivered*, not what was read ahead, and holds the buffer.
        """
        return snapshots.to_state_dict(self._engine.snapshot())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_changed: Collection[str] = ()) -> None:
        """Go on with exactly the sample that would have come next when ``state`` was taken.

        :param allow_changed: what may differ from then: any of data, tokenizer, template, tokenize_fn, seed, order.
            With another data, seed or order, the next epoch begins.
        :raises SnapshotMismatchError: if something else differs; it says what, and both values.
        :raises SnapshotError: if ``state`` is no state of a loader.
        """
        self._check()
        self._engine.restore(snapshots.from_state_dict(state), allow_changed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, atomically; returns when it would survive a power loss. The last three are kept.

        :raises SnapshotError: if it could not be written; the previous file is whole, and nothing half-written stays.
        """
        snapshots.save(path, self._engine.snapshot())

    def restore(self, path: str | os.PathLike[str], *, allow_changed: Collection[str] = ()) -> None:
        """As :meth:`load_state_dict`, from a file that :meth:`save` wrote."""
        self._check()
        self._engine.restore(snapshots.load(path), allow_changed)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``. In the middle of that very epoch, as after a resume, it changes nothing."""
        self._check()
        if epoch < 0:
            raise ConfigError(f"an epoch is counted from 0, got {epoch}")

        self._engine.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._engine.coordinator.ledger.position.epoch

    def statistics(self) -> Statistics:
        """What the loader has done and is doing; ``.to_dict()`` is flat."""
        return self._engine.statistics()

    # Life.

    def start(self) -> None:
        """Begin to read ahead now; entering ``with``, and the first call for data, do so as well."""
        self._check()
        self._engine.service.start()

    def _close(self, reason: str) -> None:
        if self._closed_because:
            return

        self._closed_because = reason
        if self._engine.service.is_here:
            self._engine.coordinator.close(f"AD502 {reason}")
            self._engine.service.close()

    def _check(self) -> None:
        if self._closed_because:
            raise LoaderClosedError(f"AD502 {self._closed_because}")

        self._engine.service.check_process()

    def __del__(self) -> None:
        if self._closed_because or not self._engine.service.is_started or not self._engine.service.is_here:
            return

        message = f"unclosed {type(self).__name__}: use `with`, or call close()"
        try:
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:
            self._close("the loader was garbage")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns a thread and processes. Make one where it "
            "is used, and carry state_dict() over."
        )

    # What a call does, but for the waiting.

    def _begin(self, num_groups: int, last_epoch: int | None) -> Request:
        if not self._engine.service.is_started:
            self._engine.service.start()
        return Request(num_groups, last_epoch)

    def _num_groups(self, num_samples: int) -> int:
        size = self._engine.config.n_samples_per_prompt
        number = _whole(num_samples)
        if number < 1 or number % size:
            raise ConfigError(
                f"AD440 num_samples must be a positive multiple of n_samples_per_prompt={size}, got {num_samples!r}"
            )

        return number // size

    def _regroup(self, samples: list[Sample]) -> list[Group]:
        size = self._engine.config.n_samples_per_prompt
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def batch_groups(self) -> int:
        """Groups per batch of a loop."""
        batch_size = self._engine.config.batch_size
        if batch_size is None:
            raise ConfigError("iterating needs batch_size=...; or call get_next_batch(n)")

        return batch_size // self._engine.config.n_samples_per_prompt

    def position(self) -> Position:
        """The place in D of the next sample of the stream."""
        return self._engine.coordinator.ledger.position

    def collate(self, samples: list[Sample]) -> Any:
        """What ``collate_fn`` makes of a batch."""
        return self._collate_fn(samples)


def _same(samples: list[Sample]) -> list[Sample]:
    return samples


def _whole(number: Any) -> int:
    """The number, be it numpy's; -1 for what is no whole number."""
    try:
        return operator.index(number)
    except TypeError:
        return -1


def _check_num_groups(num_groups: int) -> int:
    number = _whole(num_groups)
    if number < 0:
        raise ConfigError(f"AD440 num_groups must be a whole number from 0 on, got {num_groups!r}")

    return number


class DataLoader(_Loader):
    """Samples for a plain loop. Safe to call from several threads, and inside a running event loop.

    ::

        with DataLoader("prompts.jsonl", tokenize_fn=..., batch_size=32) as loader:
            for batch in loader: ...        # one epoch; the next `for` is the next one

    :param source: a path, a glob, a folder, a list of these, or a :class:`~asyncdata.JsonlSource`.
    :param tokenize_fn: a description such as :class:`~asyncdata.PromptTokenizeFn`, a function of a row (a dict), or its
        import path ``pkg.mod:fn``.
    :param collate_fn: what a batch of the ``for`` loop is made of; by default it is the list of samples.
    :param buffer_filter: chooses among the groups given back; a function of (buffer, num_groups) or its import path.
    :param knobs: see :class:`~asyncdata.LoaderConfig`.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read; all of them are named.
    """

    def get_next_batch(self, num_samples: int, *, timeout_s: float | None = None) -> list[Sample]:
        """Exactly ``num_samples`` samples: groups given back first, then the stream, over as many epochs as it takes.

        :param num_samples: a multiple of ``n_samples_per_prompt``.
        :raises EndOfData: if ``epochs`` are used up; what was left is in the error.
        :raises PrefetchTimeoutError: if they are not ready in time; nothing was consumed.
        :raises BadRowError: if the next row is bad, under ``on_bad_row="raise"``.
        """
        return self._take(self._num_groups(num_samples), None, _same, timeout_s)

    def get_samples(self, num_groups: int, *, timeout_s: float | None = None) -> list[Group]:
        """Exactly ``num_groups`` groups of ``n_samples_per_prompt`` samples; as :meth:`get_next_batch` otherwise."""
        return self._take(_check_num_groups(num_groups), None, self._regroup, timeout_s)

    def _take(
        self,
        num_groups: int,
        last_epoch: int | None,
        finish: Callable[[list[Sample]], T],
        timeout_s: float | None = None,
    ) -> T:
        """What ``finish`` makes of the samples. Until the caller has it they count as not delivered."""
        self._check()
        coordinator = self._engine.coordinator
        request = samples = None
        try:
            samples = coordinator.take_ready(num_groups, last_epoch)
            if samples is None:
                request = self._begin(num_groups, last_epoch)
                samples = coordinator.poll(request)
                if samples is None:
                    samples = self._wait(request, timeout_s)
            return finish(samples)
        except BaseException:  # also an interrupt between the commit and the caller
            coordinator.failed.append((request, samples))  # first of all: what follows may be interrupted
            coordinator.settle()
            raise

    def _wait(self, request: Request, timeout_s: float | None) -> list[Sample]:
        timeout_s = self._engine.config.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        ready: SimpleQueue[None] = SimpleQueue()  # in C: two interrupts in a row break the locks of threading.Event
        request.wake = lambda: ready.put(None)
        try:
            while True:
                # Polled first: it may have become ready before there was anybody to wake.
                samples = self._engine.coordinator.poll(request)
                if samples is not None:
                    return samples

                left_s = None if timeout_s is None else began + timeout_s - time.monotonic()
                try:
                    ready.get(timeout=None if left_s is None else max(0.0, left_s))
                except Empty:
                    raise self._engine.timeout_error(time.monotonic() - began, request.num_groups) from None
        finally:
            self._engine.add_wait(time.monotonic() - began)

    def __iter__(self) -> Epoch:
        return Epoch(self, self._take)

    def close(self) -> None:
        """Stop the workers and the thread, within five seconds. May be called again, and from any thread."""
        self._close("the loader was closed by close()")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("the loader was closed at the end of its `with`")


class AsyncDataLoader(_Loader):
    """Samples for an ``await``-based loop; on asyncio or trio. Parameters are those of :class:`DataLoader`.

    ::

        async with AsyncDataLoader("prompts.jsonl", tokenize_fn=..., n_samples_per_prompt=8) as loader:
            groups = await loader.get_samples(32)
    """

    async def get_next_batch(self, num_samples: int, *, timeout_s: float | None = None) -> list[Sample]:
        """As :meth:`DataLoader.get_next_batch`. Cancelled, it has consumed nothing."""
        return await self._take(self._num_groups(num_samples), None, _same, timeout_s)

    async def get_samples(self, num_groups: int, *, timeout_s: float | None = None) -> list[Group]:
        """As :meth:`DataLoader.get_samples`. Cancelled, it has consumed nothing."""
        return await self._take(_check_num_groups(num_groups), None, self._regroup, timeout_s)

    async def _take(
        self,
        num_groups: int,
        last_epoch: int | None,
        finish: Callable[[list[Sample]], T],
        timeout_s: float | None = None,
    ) -> T:
        self._check()
        coordinator = self._engine.coordinator
        request = samples = None
        try:
            samples = coordinator.take_ready(num_groups, last_epoch)
            if samples is None:
                request = self._begin(num_groups, last_epoch)
                samples = coordinator.poll(request)
                if samples is None:
                    samples = await self._wait(request, timeout_s)
            return finish(samples)
        except BaseException:
            coordinator.failed.append((request, samples))  # first of all: what follows may be interrupted
            coordinator.settle()
            raise

    async def _wait(self, request: Request, timeout_s: float | None) -> list[Sample]:
        timeout_s = self._engine.config.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        ready = anyio.Event()
        call_soon = call_soon_in_this_loop()
        request.wake = lambda: call_soon(lambda: ready.set())
        try:
            with anyio.move_on_after(timeout_s):
                while True:
                    samples = self._engine.coordinator.poll(request)
                    if samples is not None:
                        return samples

                    await ready.wait()
                    ready = anyio.Event()
            raise self._engine.timeout_error(time.monotonic() - began, request.num_groups)
        finally:
            self._engine.add_wait(time.monotonic() - began)

    def __aiter__(self) -> AsyncEpoch:
        return AsyncEpoch(self, self._take)

    async def aclose(self) -> None:
        """Stop the workers and the thread, within five seconds. May be called again."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close, "the loader was closed by aclose()")

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
