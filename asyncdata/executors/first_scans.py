"""The first window is read in the trainer's process: nobody else is there yet, and reading needs no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncdata.executors.base import NUM_SLOTS
from asyncdata.executors.handler import Handler
from asyncdata.wire import ReaderSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.tokenization.base import ColumnWriter
    from asyncdata.wire import Job, Reply, Scan

__all__ = ("FirstScans",)


class FirstScans:
    """Answers scans, in a thread, until the first worker can.

    Only lines are read here: other readers may import much, and this process is the trainer's.

    :param next_scan: gives one to do, or None.
    :param on_reply: takes the reply to it.
    """

    def __init__(self, next_scan: Callable[[], Scan | None], on_reply: Callable[[Reply], None]) -> None:
        self._next_scan = next_scan
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
        if job.reader != ReaderSpec():
            return

        slots = [memory(slot) for slot in range(NUM_SLOTS)]
        handler = Handler(job, slots, _tokenize_nothing)
        try:
            while not self._is_over:
                scan = self._next_scan()
                if scan is None:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                else:
                    self._on_reply(await anyio.to_thread.run_sync(handler, scan, abandon_on_cancel=True))
        finally:
            handler.close()
            slots.clear()  # or whatever keeps this frame would keep the memory


def _tokenize_nothing(rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
    raise RuntimeError("only scans are answered here")
