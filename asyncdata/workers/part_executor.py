"""The executor as one part of a mixture sees it: all parts share its workers, and each has slots of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import OfPart, Tokenize
from asyncdata.workers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Request
    from asyncdata.workers.base import Executor, ExecutorStatistics, OnReply

__all__ = ("PartExecutor",)


class _PartSlots(Slots):
    """The slots of one part.

    :ivar limit: how many may be held.
    """

    def __init__(self, slots: Slots, numbers: range) -> None:
        self.number = len(numbers)
        self.on_free = no_op
        self.borrowers = slots.borrowers
        self.limit = 0
        self._slots = slots
        self._numbers = numbers

    def hold(self, among: range | None = None) -> int | None:
        """Take a free slot; None if all are in use, or so many as the part may hold."""
        if self._slots.num_held(self._numbers) >= self.limit:
            return None

        return self._slots.hold(self._numbers)

    def release(self, slot: int) -> None:
        """Give ``slot`` back."""
        self._slots.release(slot)

    def use(self, slot: int) -> None:
        """A request that refers to ``slot`` is under way."""
        self._slots.use(slot)

    def done(self, slot: int) -> None:
        """Such a request is answered."""
        self._slots.done(slot)


class PartExecutor:
    """See :class:`~asyncdata.workers.base.Executor`.

    :param part: the number of the part, by which a worker knows its job.
    :ivar allowance: chunks of rows that may be submitted until this is set again.
    """

    num_workers = 1  # the channel of a part need not keep all workers busy alone

    def __init__(self, executor: Executor, part: int, num_parts: int) -> None:
        self.allowance = 0
        num_slots = executor.slots.number
        self._own_slots = _PartSlots(executor.slots, range(part, num_slots, num_parts))
        self.slots: Slots = self._own_slots
        self._executor = executor
        self._part = part

    @property
    def answers_with_samples(self) -> bool:
        """As the protocol says."""
        return self._executor.answers_with_samples

    def set_limit(self, num_slots: int | None) -> None:
        """Let the part hold so many slots; None: all of its own. Without one, it reads no window."""
        self._own_slots.limit = self._own_slots.number if num_slots is None else num_slots

    def prepare(self, slot_bytes: int) -> None:
        """As the protocol says: nothing, as the mixture does it once."""

    async def run(self, job: Job) -> None:
        """As the protocol says: nothing, as the mixture does it once."""

    def memory(self, slot: int) -> memoryview:
        """As the protocol says."""
        return self._executor.memory(slot)

    def watch(self, on_change: Callable[[], object]) -> None:
        """As the protocol says: nothing, as the mixture watches for all parts."""

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = 10) -> None:
        """As the protocol says."""
        if isinstance(request, Tokenize):
            self.allowance -= 1
        self._executor.submit(OfPart(self._part, request), on_reply, max_losses)  # type: ignore[arg-type]

    def forget(self) -> None:
        """As the protocol says: nothing, as the mixture does it once, before its parts start again."""

    def set_num_workers(self, num_workers: int) -> None:
        """As the protocol says: nothing, as the mixture does it once."""

    def reopen(self) -> None:
        """As the protocol says: nothing, as the mixture does it once."""

    @property
    def num_wanted(self) -> int:
        """As the protocol says, as far as it is this part's turn."""
        return min(self.allowance, self._executor.num_wanted)

    @property
    def is_busy(self) -> bool:
        """As the protocol says."""
        return self._executor.is_busy

    def statistics(self) -> ExecutorStatistics:
        """As the protocol says."""
        return self._executor.statistics()
