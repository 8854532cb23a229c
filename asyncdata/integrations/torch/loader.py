"""A loader for a training loop in PyTorch: tensors, copied to the device while the trainer computes.

A batch is fetched before the trainer requests it, and counts as delivered only when the trainer has it. The loader has
already delivered such a batch. So the loader's state from before is stored, and is the state until the trainer has the
batch, or has started on it.

For a CUDA device the batch is fetched in a thread, in which it is collated and copied into pinned memory while the
trainer computes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from asyncdata.batching.torch_tensors import map_leaves, need_cuda, to_torch
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.snapshot import save_at
from asyncdata.core.errors import ConfigError, WorkerError
from asyncdata.core.settings import naming_settings, needing
from asyncdata.core.threads import at_exit, started
from asyncdata.integrations.torch.process import from_torch_state, refuse_async, to_torch_state
from asyncdata.loader.measurements import epochs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import TracebackType

    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.loader import DataLoader
    from asyncdata.loader.statistics import Statistics

_CLOSE_TIMEOUT_S = 5.0


def over_all_epochs(loader: StatefulDataLoader) -> Iterator[Any]:
    """The batches of one epoch after another, until an epoch has none: without an end, or until ``epochs`` are over."""
    while True:
        num_batches = 0
        for batch in loader:
            num_batches += 1
            yield batch
        if not num_batches:
            return


class StatefulDataLoader:
    """Batches as tensors, with a state for ``torch.save`` and distributed checkpoints.

    ::

        loader = StatefulDataLoader(DataLoader(..., ranks=ranks()), device="cuda")
        for batch in loader: ...            # one epoch; the next `for` is the next one
        dcp.save({"model": ..., "loader": loader}, checkpoint_id=...)

    What ``collate_fn`` returns is yielded with a tensor for each array. The first batch is yielded at once. After that,
    the next batch is fetched, and its copy to the device started, before a batch is yielded; it is not in the state
    until it is yielded itself. Its error is raised when the next batch is requested. For a CUDA device, or with pinned
    memory, the next batch is fetched in a thread while the trainer computes: ``collate_fn`` runs in that thread.

    :param loader: must be used only through this object from now on, and is closed with it.
    :param device: the device of the batches; None: the CPU. To a CUDA device they are copied on a separate stream; the
        stream that is current when a batch is yielded waits for the copy.
    :param pin_memory: None: page-locked memory for a CUDA device. True without ``device``: the trainer copies the batch
        itself, with ``non_blocking=True``.
    :param trainer_lookahead: batches that the trainer fetches before it trains on them, such as 1 of Lightning's
        ``Trainer``. They are not delivered yet: a state does not contain them, and a new ``for`` yields them again.
    :param follows_set_epoch: False: :meth:`set_epoch` does nothing. For a trainer that counts its own epochs, such
        as transformers' ``Trainer`` with ``max_steps``, which starts at 0 again after each resume.
    :raises ConfigError: if there is no such device, or it cannot have pinned memory.
    """

    @naming_settings
    def __init__(
        self,
        loader: DataLoader[Any, Any],
        *,
        device: Any = None,
        pin_memory: bool | None = None,
        trainer_lookahead: int = 0,
        follows_set_epoch: bool = True,
    ) -> None:
        refuse_async(loader, "StatefulDataLoader")
        if trainer_lookahead < 0:
            raise ConfigError(f"trainer_lookahead must be 0 or more, got {trainer_lookahead}")

        self._loader = loader
        self._follows_set_epoch = follows_set_epoch
        self._transfer = transfer_to(device, pin_memory)
        self._num_held = trainer_lookahead
        self._batches: Iterator[Any] | None = None  # the rest of the epoch
        self._queue = _Queue()
        _open.add(self)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch that the trainer is in, or the next one."""
        self._stop_fetching()
        queue = self._queue.given_back()
        if not queue.fetches:
            self._batches = None
        self._queue = queue
        return _Epoch(self._take)

    def _take(self, *, looks_ahead: bool) -> list[Any]:
        """The next batch of the epoch; none at its end.

        :param looks_ahead: also fetch the batch after it.
        """
        if not self._queue.waiting:
            self._fetch(in_a_thread=False)
        fetch = self._queue.waiting[0]
        fetch.run()
        if fetch.error is not None:
            error, fetch.error = fetch.error, None
            self._queue = self._queue.without_failed()
            raise error

        found = fetch.finish()
        if looks_ahead and len(self._queue.waiting) == 1 and fetch.has_batch:
            self._fetch(in_a_thread=self._transfer.in_a_thread)
        self._queue = self._queue.after_yield(self._num_held)
        return found

    def _fetch(self, *, in_a_thread: bool) -> None:
        """Append the next batch, the end or an error to the queue. After an interrupt the queue is unchanged.

        :param in_a_thread: return at once; what the thread has not done is done when the batch is needed.
        """
        if self._batches is None:
            self._batches = iter(self._loader)
        before, fetch = self._queue, _Fetch(self._loader, self._batches, self._transfer)
        try:
            # From here on, every caller gets the state before this batch.
            self._queue = before._replace(fetches=(*before.fetches, fetch))
            if in_a_thread:
                with contextlib.suppress(WorkerError):  # there is no room for a thread
                    started(fetch.run_ahead, "asyncdata-fetch")
            else:
                fetch.run()
        except BaseException:
            fetch.stop()
            if not fetch.has_batch:
                self._queue = before
            raise

    def _stop_fetching(self, timeout_s: float = -1) -> None:
        """Let no thread take a batch from now on. The batch that one is taking is waited for."""
        for fetch in self._queue.fetches:
            fetch.stop(timeout_s)

    def _state(self) -> dict[str, Any]:
        """The loader's state, without batches that the trainer has not started on."""
        while True:
            queue = self._queue
            if queue.fetches:
                return queue.fetches[0].before

            state = self._loader.state_dict()
            if self._queue is queue:  # otherwise another thread has started to fetch
                return state

    def _drop(self) -> None:
        """Drop the fetched batches: the loader continues at another position."""
        self._batches = None
        self._queue = _Queue()

    def __len__(self) -> int:
        raise TypeError(
            "a StatefulDataLoader has no len(): the number of batches of an epoch is known at its end; count steps"
        )

    @property
    def dataset(self) -> Any:
        """Not there, as transformers' ``Trainer`` would skip batches in it.

        :raises AttributeError: always.
        """
        raise AttributeError(
            "a StatefulDataLoader has no dataset in which batches could be skipped after a resume: its own state does "
            "that. Pass ignore_data_skip=True to transformers' TrainingArguments, and load the state"
        )

    def state_dict(self) -> dict[str, Any]:
        """The current state: one text. It covers exactly the batches that were yielded. From any thread, at any time.

        See :meth:`asyncdata.DataLoader.state_dict`.
        """
        return to_torch_state(self._state())

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed: Collection[str] = (), same_rows: bool = False
    ) -> None:
        """Continue with exactly the next batch. The state may be that of any rank, and of a DataLoader.

        :param allow_changed: see :meth:`asyncdata.DataLoader.load_state_dict`.
        :param same_rows: see there.
        :raises SnapshotMismatchError: if it belongs to other data or settings.
        :raises SnapshotError: if it is not a state of a loader.
        """
        self._stop_fetching()
        self._loader.load_state_dict(from_torch_state(state), allow_changed=allow_changed, same_rows=same_rows)
        self._drop()

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] = {}) -> None:
        """Write the state to a file or object; see :meth:`asyncdata.DataLoader.save`."""
        save_at(path, snapshots.from_state_dict(self._state()), storage_options)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        allow_changed: Collection[str] = (),
        same_rows: bool = False,
        storage_options: Mapping[str, Any] = {},
    ) -> None:
        """As :meth:`load_state_dict`, from a file or object that :meth:`save` or a DataLoader's wrote."""
        self._stop_fetching()
        options: dict[str, Any] = {"same_rows": same_rows, "storage_options": storage_options}
        self._loader.restore(path, allow_changed=allow_changed, **options)
        self._drop()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is the current one: a run resumed in its middle stays there.

        :raises ConfigError: directly after a restore, for an epoch that was over by then; see ``follows_set_epoch``.
        """
        if epoch == self.epoch or not self._follows_set_epoch:
            return

        self._stop_fetching()
        if self._queue.fetches:  # the loader may be in that epoch already
            self._loader.load_state_dict(self._state())
        self._drop()
        self._loader.set_epoch(epoch)

    @property
    def config(self) -> LoaderConfig:
        """The wrapped loader's settings."""
        return self._loader.config

    @property
    def is_packed(self) -> bool:
        """Whether a batch has packs, so that its number of rows varies."""
        return self._loader._engine.batching.is_packed  # noqa: SLF001 - a part of this library

    def num_rows(self, *, timeout_s: float | None = None) -> int:
        """Rows of an epoch; see :meth:`asyncdata.DataLoader.num_rows`."""
        return self._loader.num_rows(timeout_s=timeout_s)

    @property
    def epoch(self) -> int:
        """The epoch of the trainer's next batch: the loader's before it delivered the fetched batches."""
        fetches = self._queue.held + self._queue.waiting
        return fetches[0].epoch if fetches else self._loader.epoch

    @property
    def progress(self) -> float:
        """Epochs that the trainer has, as ``data/epoch`` of :meth:`asyncdata.DataLoader.metrics`."""
        fetches = self._queue.held + self._queue.waiting
        return fetches[0].progress if fetches else epochs_of(self._loader._engine)  # noqa: SLF001

    def statistics(self) -> Statistics:
        """The loader's statistics; a batch that was fetched counts as delivered."""
        return self._loader.statistics()

    def metrics(self) -> dict[str, float]:
        """The few numbers for a trainer's log; see :meth:`asyncdata.DataLoader.metrics`."""
        return self._loader.metrics() | {"data/epoch": self.progress}

    def close(self) -> None:
        """Stop the loader. May be called again, and from any thread."""
        self._loader.close()
        self._stop_fetching(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._loader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.__exit__(kind, error, trace)
        self.close()


_open: weakref.WeakSet[StatefulDataLoader] = weakref.WeakSet()


def _close_all() -> None:
    """At exit: a thread that is frozen inside torch would abort the process."""
    for loader in list(_open):
        if any(not fetch.is_over for fetch in loader._queue.fetches):  # noqa: SLF001
            loader.close()


at_exit(_close_all)


# Batches that are fetched before the trainer requests them


class _Epoch:
    """An epoch, or the rest of one."""

    def __init__(self, take: Callable[..., list[Any]]) -> None:
        self._take = take
        self._has_begun = False
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # The first step need not wait for the data of the second.
        found = [] if self._is_over else self._take(looks_ahead=self._has_begun)
        self._has_begun, self._is_over = True, not found
        if not found:
            raise StopIteration

        return found[0]


class _Fetch:
    """A batch that was fetched and not delivered yet; or the end of an epoch.

    :ivar before: the loader's state without it.
    :ivar epoch: the loader's epoch without it; ``progress``: with the part of it.
    :ivar error: the error that was raised; it is raised again when the trainer requests the batch.
    :ivar has_failed: whether the loader raised it, and gave no batch.
    :ivar is_over: whether it was fetched, or its error is known.
    """

    def __init__(self, loader: DataLoader[Any, Any], batches: Iterator[Any], transfer: Transfer) -> None:
        self.before = loader.state_dict()
        self.epoch = loader.epoch
        self.progress = epochs_of(loader._engine)  # noqa: SLF001
        self.error: Exception | None = None
        self._batches, self._transfer = batches, transfer
        self._found: list[Any] = []
        self._begun: list[Any] = []
        self.has_failed = self.is_over = self._is_stopped = False
        self._lock = threading.RLock()  # collate_fn may close the loader

    def run_ahead(self) -> None:
        """In a thread: :meth:`run`, unless it was stopped."""
        with self._lock:
            if not self._is_stopped:
                self._transfer.enter_thread()
                self.run()

    def run(self) -> None:
        """Take the next batch, and start its copy; once. Who comes second waits for the first."""
        with self._lock:
            if self.is_over:
                return

            try:
                if not self._found:  # an interrupted copy begins again
                    # In C: an interrupt finds the batch here, or still in the loader.
                    self._found.extend(islice(self._batches, 1))
                self._begin()
            except Exception as error:
                self.error, self.has_failed = error, not self._found
            self.is_over = True

    def stop(self, timeout_s: float = -1) -> None:
        """Let no thread begin; wait for one that has begun."""
        self._is_stopped = True
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()

    def _begin(self) -> None:
        if not self._begun:
            self._begun.extend(self._transfer.begin(batch) for batch in self._found)

    def finish(self) -> list[Any]:
        """The batch on its device; none at the end of an epoch."""
        self._begin()  # the copy may have failed
        return [self._transfer.finish(begun) for begun in self._begun]

    @property
    def has_batch(self) -> bool:
        """Whether the loader gave one."""
        return bool(self._found)


class _Queue(NamedTuple):
    """The batches that were fetched and are not delivered, the oldest first; replaced by one assignment.

    :ivar num_out: how many of them the trainer has, and has not started on.
    """

    fetches: tuple[_Fetch, ...] = ()
    num_out: int = 0

    @property
    def waiting(self) -> tuple[_Fetch, ...]:
        """Batches that the trainer does not have."""
        return self.fetches[self.num_out :]

    @property
    def held(self) -> tuple[_Fetch, ...]:
        """Batches that the trainer has, and has not started on."""
        return tuple(fetch for fetch in self.fetches[: self.num_out] if fetch.has_batch)

    def after_yield(self, num_held: int) -> _Queue:
        """The queue after a yield: the trainer has one more batch, and has started on all but the last ``num_held``."""
        num_done = max(0, self.num_out + 1 - num_held)
        return _Queue(self.fetches[num_done:], self.num_out + 1 - num_done)

    def without_failed(self) -> _Queue:
        """The queue after an error was raised: the trainer may try again."""
        return self._replace(fetches=tuple(fetch for fetch in self.fetches if not fetch.has_failed))

    def given_back(self) -> _Queue:
        """The queue for a new loop: the batches that the last loop had not started on; empty if there are none."""
        fetches = self.held + self.waiting
        return _Queue(fetches) if any(fetch.has_batch or fetch.error for fetch in fetches) else _Queue()


# Copies to a device


def transfer_to(device: Any, pin_memory: bool | None) -> Transfer:
    """The transfer to a device.

    :param device: a ``torch.device``, its name, or None: the batch stays on the CPU.
    :param pin_memory: None: True for a CUDA device.
    :raises ConfigError: if there is no such device, or no torch.
    """
    with needing("a batch as tensors", "torch"):
        import torch

    place = None if device is None else torch.device(device)
    is_cuda = place is not None and place.type == "cuda"
    pins = is_cuda if pin_memory is None else pin_memory
    if is_cuda or pins:
        need_cuda(f"device={str(device)!r}" if is_cuda else "pin_memory=True")
    return StreamTransfer(place, pin_memory=pins) if is_cuda else Transfer(place, pin_memory=pins)


class Transfer:
    """A copy in two halves, between which the device may compute: to tensors on the CPU, pinned or not; or to a
    device with blocking copies.

    :param device: None: the CPU.
    :ivar in_a_thread: whether it takes long, and lets others compute meanwhile.
    """

    _returns_at_once = False

    def __init__(self, device: Any, *, pin_memory: bool) -> None:
        import torch

        self._device = device
        self._pin_memory = pin_memory
        self.in_a_thread = pin_memory or self._returns_at_once
        if self.in_a_thread:  # the device of "cuda" may change later, and differs between threads
            self._cuda_index = torch.cuda.current_device() if device is None or device.index is None else device.index

    def enter_thread(self) -> None:
        """Called first in a thread: pinned memory belongs to the process's own device there, too."""
        import torch

        torch.cuda.set_device(self._cuda_index)

    def begin(self, batch: Any) -> Any:
        """Start the copy; without a stream for it, do all of it."""
        tensors = to_torch(batch, pin_memory=self._pin_memory)
        return tensors if self._device is None else self._moved(tensors)

    def _moved(self, tensors: Any) -> Any:
        return _map_tensors(lambda tensor: tensor.to(self._device, non_blocking=self._returns_at_once), tensors)

    def finish(self, begun: Any) -> Any:
        """The batch, ready to use."""
        return begun


class StreamTransfer(Transfer):
    """Copies to a CUDA device on a separate stream, while the device computes on another.

    :param device: a CUDA device.
    """

    _returns_at_once = True

    def __init__(self, device: Any, *, pin_memory: bool) -> None:
        import torch

        super().__init__(device, pin_memory=pin_memory)
        self._device = torch.device("cuda", self._cuda_index)
        self._stream = torch.cuda.Stream(self._device)

    def begin(self, batch: Any) -> Any:
        """The batch on the device, and the event after its copy."""
        import torch

        tensors = to_torch(batch, pin_memory=self._pin_memory)
        with torch.cuda.stream(self._stream):
            return self._moved(tensors), self._stream.record_event()

    def finish(self, begun: Any) -> Any:
        """Let the current stream wait for the copy, without blocking this process."""
        import torch

        moved, is_there = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)

        def keep(tensor: Any) -> Any:
            tensor.record_stream(stream)  # otherwise the next copy could reuse the memory while this one is read
            return tensor

        return _map_tensors(keep, moved)


def _map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    import torch

    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
