"""The executor as one part of a mixture sees it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.messages import Tokenize
from asyncdata.workers.base import MAX_LOSSES, takes_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Reply, Request
    from asyncdata.workers.base import Crashed, Executor, OnReply

__all__ = ("PartExecutor",)


class PartExecutor:
    """The executor as one part of a mixture sees it: all parts share its workers, and each has slots of its own.

    :param part: the number of the part, by which a worker knows its job.
    :ivar allowance: requests for samples that may be submitted until this is set again.
    """

    num_workers = 1  # the channel of a part need not keep all workers busy alone

    def __init__(self, executor: Executor, part: int, num_parts: int) -> None:
        self.allowance = 0
        self.slots = executor.slots.of_part(part, num_parts)
        self.answers_with_samples = executor.answers_with_samples
        self.memory = executor.memory
        self._executor = executor
        self._part = part
        self._note: Callable[[], object] = no_op

    def set_limit(self, num_slots: int | None) -> None:
        """Let the part hold so many slots; None: all of its own. Without one, it reads no window."""
        self.slots.limit = len(self.slots.numbers) if num_slots is None else num_slots

    def watch(self, on_change: Callable[[], object]) -> None:
        """Nothing: the mixture watches for all parts."""

    def tell(self, note: Callable[[], object]) -> None:
        """Call ``note`` when this part may send another request: it was answered, or has a slot. The change that the
        mixture watches for comes after that.
        """
        self._note = note
        self.slots.tell(note)

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> int:
        if isinstance(request, Tokenize) or takes_samples(request):
            self.allowance -= 1
        request = msgspec.structs.replace(request, part=self._part)
        return self._executor.submit(request, partial(self._answered, on_reply), max_losses)

    def _answered(self, on_reply: OnReply, reply: Reply | Crashed) -> None:
        on_reply(reply)
        self._note()

    def forget(self) -> None:
        """Nothing: the mixture does it once, before its parts start again."""

    @property
    def num_wanted(self) -> int:
        """How many requests could be submitted now, as far as it is this part's turn."""
        return min(self.allowance, self._executor.num_wanted)
