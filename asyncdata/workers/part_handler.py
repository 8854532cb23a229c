"""The handler of a worker that serves all parts of a mixture: one handler for each part, made when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.messages import OfPart
from asyncdata.tokenization.part_functions import PartTokenizers
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.messages import Job, Reply, Request
    from asyncdata.core.read_counts import ReadCounts
    from asyncdata.tokenization.base import BatchTokenizer

__all__ = ("PartHandler", "handler_of")


def handler_of(
    job: Job,
    slots: Sequence[memoryview],
    tokenizer: BatchTokenizer,
    progress: Callable[[int], None],
    counts: ReadCounts | None = None,
) -> Handler | PartHandler:
    """The handler for a job: of one source, or of a mixture."""
    return (PartHandler if job.parts else Handler)(job, slots, tokenizer, progress, counts)


class PartHandler:
    """Answers requests that name their part; see :class:`~asyncdata.workers.request_handler.Handler`."""

    def __init__(
        self,
        job: Job,
        slots: Sequence[memoryview],
        tokenizer: BatchTokenizer,
        progress: Callable[[int], None],
        counts: ReadCounts | None = None,
    ) -> None:
        assert isinstance(tokenizer, PartTokenizers), "the job has parts"
        self._jobs = job.parts
        self._slots = slots
        self._tokenizers = tokenizer
        self._progress, self._counts = progress, counts
        self._handlers: dict[int, Handler] = {}
        self._is_closed = False

    def __call__(self, request: Request) -> Reply:
        """The reply of the part's handler."""
        assert isinstance(request, OfPart), "every request of a mixture names its part"
        handler = self._handlers.get(request.part)
        if handler is None:
            job = self._jobs[request.part]
            handler = Handler(job, self._slots, self._tokenizers.of(request.part), self._progress, self._counts)
            self._handlers[request.part] = handler
            if self._is_closed:
                handler.close()
        return handler(request.request)

    def use(self, tokenizer: BatchTokenizer) -> None:
        """Answer later requests with another ``tokenizer``, which gives the same results."""
        assert isinstance(tokenizer, PartTokenizers), "the job has parts"
        self._tokenizers = tokenizer
        for part, handler in self._handlers.items():
            handler.use(tokenizer.of(part))

    def close(self) -> None:
        """Close the files of all parts."""
        self._is_closed = True
        for handler in list(self._handlers.values()):
            handler.close()
