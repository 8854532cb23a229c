"""What all processes of a pool share: the slots, the page of their progress, and the pipe that ends them."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from asyncdata.core.errors import WorkerError
from asyncdata.workers.pool.connection import Connection
from asyncdata.workers.pool.popen import AlivePipe, no_room
from asyncdata.workers.pool.processes import WorkerProcess
from asyncdata.workers.pool.worker_main import PROGRESS_BYTES

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from asyncdata.workers.pool.popen import Ends
    from asyncdata.workers.pool.processes import ProcessHandle

__all__ = ("SharedResources",)


class SharedResources:
    """Holds the descriptors that all processes of a pool share.

    :param alive: the pipe of a fork server that was started before; None for a new one.
    :raises WorkerError: if no memory or no descriptor is left.
    """

    def __init__(self, num_workers: int, slot_bytes: int, num_slots: int, alive: AlivePipe | None = None) -> None:
        try:
            with contextlib.ExitStack() as opened:
                self.alive = alive or AlivePipe()
                opened.callback(self.alive.close)
                self.memory_fds: list[int] = []
                opened.callback(lambda: _close(self.memory_fds))
                self.memory_fds.append(_memory("progress", num_workers * PROGRESS_BYTES))
                for number in range(num_slots):
                    self.memory_fds.append(_memory(f"slot {number}", slot_bytes))
                progress_fd, *slot_fds = self.memory_fds
                self._page = mmap.mmap(progress_fd, 0)  # our own memory, not a file of the user
                self._slots = [memoryview(mmap.mmap(fd, 0) if slot_bytes else b"") for fd in slot_fds]
                opened.pop_all()
        except OSError as error:
            raise no_room(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.alive.close()
        _close(self.memory_fds)
        self._page.close()
        self._slots.clear()  # not closed: an abandoned thread may still write there

    def memory(self, slot: int) -> memoryview:
        """The bytes of ``slot``.

        :raises WorkerError: if the pool has ended.
        """
        if not self._slots:
            raise WorkerError("the workers have ended, and the slots are gone")

        return self._slots[slot]

    def worker(self, number: int, handle: ProcessHandle, ends: Ends) -> WorkerProcess:
        """The worker that has the other ends of ``ends``."""
        return WorkerProcess(number, handle, Connection(ends.sock), ends.output_fd, self._page)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _memory(name: str, num_bytes: int) -> int:
    """Anonymous shared memory; the kernel frees it when its last user closes it."""
    fd = os.memfd_create(f"asyncdata {name}")
    os.ftruncate(fd, num_bytes)
    return fd
