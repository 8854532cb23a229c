"""Fetches batches before the trainer requests them; they count as delivered only when the trainer has them.

The loader has already delivered such a batch. So the loader's state from before is stored, and is the state until the
trainer has the batch, or has started on it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from asyncdata.integrations.torch.transfer import Transfer
    from asyncdata.loader.loader import DataLoader

__all__ = ("Lookahead",)


class Lookahead:
    """The queue between a loader and a trainer. One thread iterates; any thread may take the state.

    :param transfer: copies a batch to the device.
    :param num_held: batches that the trainer fetches before it starts on them.
    """

    def __init__(self, loader: DataLoader, transfer: Transfer, num_held: int) -> None:
        self._loader = loader
        self._transfer = transfer
        self._num_held = num_held
        self._batches: Iterator[Any] | None = None  # the rest of the epoch
        self._queue = _Queue()

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch that the trainer is in, or the next one."""
        queue = self._queue.given_back()
        if not queue.fetches:
            self._batches = None
        self._queue = queue
        return _Epoch(self)

    def take(self, *, looks_ahead: bool) -> list[Any]:
        """The next batch of the epoch; none at its end.

        :param looks_ahead: also fetch the batch after it.
        """
        if not self._queue.waiting:
            self._fetch()
        if looks_ahead and len(self._queue.waiting) == 1 and self._queue.waiting[0].has_batch:
            self._fetch()
        fetch = self._queue.waiting[0]
        if fetch.error is not None:
            error, fetch.error = fetch.error, None
            self._queue = self._queue.without_failed()
            raise error

        found = fetch.finish(self._transfer)
        self._queue = self._queue.after_yield(self._num_held)
        return found

    def _fetch(self) -> None:
        """Append the next batch, the end or an error to the queue. After an interrupt the queue is unchanged."""
        before, fetch = self._queue, _Fetch(self._loader)
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            # From here on, every caller gets the state before this batch.
            self._queue = before._replace(fetches=(*before.fetches, fetch))
            fetch.run(self._batches, self._transfer)
        except BaseException:
            if not fetch.has_batch:
                self._queue = before
            raise

    def state(self) -> dict[str, Any]:
        """The loader's state, without batches that the trainer has not started on."""
        while True:
            queue = self._queue
            if queue.fetches:
                return queue.fetches[0].before

            state = self._loader.state_dict()
            if self._queue is queue:  # otherwise another thread has started to fetch
                return state

    @property
    def has_fetched(self) -> bool:
        """Whether the loader is ahead of the trainer."""
        return bool(self._queue.fetches)

    @property
    def epoch(self) -> int:
        """The epoch of the trainer: that of the loader before it delivered the fetched batches."""
        fetches = self._queue.held + self._queue.waiting
        return fetches[0].epoch if fetches else self._loader.epoch

    def drop(self) -> None:
        """Drop the fetched batches: the loader continues at another position."""
        self._batches = None
        self._queue = _Queue()


class _Epoch:
    """An epoch, or the rest of one."""

    def __init__(self, ahead: Lookahead) -> None:
        self._ahead = ahead
        self._has_begun = False
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # The first step need not wait for the data of the second.
        found = [] if self._is_over else self._ahead.take(looks_ahead=self._has_begun)
        self._has_begun, self._is_over = True, not found
        if not found:
            raise StopIteration

        return found[0]


class _Fetch:
    """A batch that was fetched and not delivered yet; or the end of an epoch.

    :ivar before: the loader's state without it.
    :ivar epoch: the loader's epoch without it.
    :ivar error: the error that was raised; it is raised again when the trainer requests the batch.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.before = loader.state_dict()
        self.epoch = loader.epoch
        self.error: Exception | None = None
        self._found: list[Any] = []
        self._begun: list[Any] = []
        self._has_failed = False

    def run(self, batches: Iterator[Any], transfer: Transfer) -> None:
        """Take the next batch, and start its copy."""
        try:
            # In C: an interrupt finds the batch here, or still in the loader.
            self._found.extend(islice(batches, 1))
            self._begin(transfer)
        except Exception as error:
            self.error, self._has_failed = error, not self._found

    def _begin(self, transfer: Transfer) -> None:
        self._begun.extend(transfer.begin(batch) for batch in self._found)

    def finish(self, transfer: Transfer) -> list[Any]:
        """The batch on its device; none at the end of an epoch."""
        if not self._begun:  # the copy failed, or was interrupted
            self._begin(transfer)
        return [transfer.finish(begun) for begun in self._begun]

    @property
    def has_batch(self) -> bool:
        """Whether the loader gave one."""
        return bool(self._found)

    @property
    def has_failed(self) -> bool:
        """Whether the loader raised instead."""
        return self._has_failed


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
