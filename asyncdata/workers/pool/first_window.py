"""The first window is read in the trainer's process: no worker is ready yet, and reading needs no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asyncdata.core.messages import Scan
from asyncdata.core.specs import LINES
from asyncdata.workers.base import NUM_SLOTS, in_a_thread
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.messages import Job, Reply
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.workers.pool.backlog import Backlog
    from asyncdata.workers.pool.worker_state import Call

__all__ = ("FirstScans",)


class FirstScans:
    """Answers scans in a thread until the first worker is ready.

    It reads only line-based files: other readers may import large libraries, and this process is the trainer's.

    :param on_reply: called with a call from the backlog, and its reply.
    :ivar here: the call that it is working on.
    """

    def __init__(self, backlog: Backlog, on_reply: Callable[[Call, Reply], None]) -> None:
        self.here: Call | None = None
        self._backlog = backlog
        self._on_reply = on_reply
        self._wake = anyio.Event()
        self._is_over = False

    def wake(self) -> None:
        """Check the backlog: it may have a scan."""
        self._wake.set()

    def end(self) -> None:
        """Stop: workers answer scans now."""
        self._is_over = True
        self._wake.set()

    async def run(self, job: Job, memory: Callable[[int], memoryview]) -> None:
        """Serve until :meth:`end`; return at once if the job's reader does not read lines.

        :param memory: the bytes of a slot.
        """
        if job.reader != LINES:
            return

        slots = [memory(slot) for slot in range(NUM_SLOTS)]
        handler = Handler(job, slots, _tokenize_nothing)
        try:
            while not self._is_over:
                scan = self._backlog.next_request
                if isinstance(scan, Scan):
                    self.here = self._backlog.take()
                    self._on_reply(self.here, await in_a_thread(handler, scan))
                    self.here = None
                else:
                    self._wake = anyio.Event()
                    await self._wake.wait()
        finally:
            handler.close()
            slots.clear()  # a reference to this frame, as in a traceback, must not keep the memory


def _tokenize_nothing(rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
    raise RuntimeError("only scans are answered here")
