"""The first window is read in the trainer's process: nobody else is there yet, and reading needs no tokenizer."""

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
    """Answers scans, in a thread, until the first worker can.

    Only lines are read here: other readers may import much, and this process is the trainer's.

    :param on_reply: takes the reply to a call, which is taken out of the backlog.
    :ivar here: the call that is being worked on.
    """

    def __init__(self, backlog: Backlog, on_reply: Callable[[Call, Reply], None]) -> None:
        self.here: Call | None = None
        self._backlog = backlog
        self._on_reply = on_reply
        self._wake = anyio.Event()
        self._is_over = False

    def wake(self) -> None:
        """There may be a scan."""
        self._wake.set()

    def end(self) -> None:
        """Workers do it from here on."""
        self._is_over = True
        self._wake.set()

    async def run(self, job: Job, memory: Callable[[int], memoryview]) -> None:
        """Serve until :meth:`end`; nothing, where the job's reader is not that of lines.

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
            slots.clear()  # or whatever keeps this frame would keep the memory


def _tokenize_nothing(rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
    raise RuntimeError("only scans are answered here")
