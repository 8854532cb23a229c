"""Work in forked processes: each has a part of it, and its result comes back as bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asyncdata.core.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("ForkedParts",)


class ForkedParts:
    """Forks a process for each part but the first, which is the caller's own.

    The process must have one thread. The others end with it, as they end with the thread that forked them.

    :param num_parts: the first among them.
    :param work: makes the result of a part, by its number.
    :raises OSError: if the system has no room for one more process.
    """

    def __init__(self, num_parts: int, work: Callable[[int], bytes]) -> None:
        self._ends: list[tuple[int, int]] = []
        parent = os.getpid()
        for number in range(1, num_parts):
            read_fd, write_fd = os.pipe()
            pid = os.fork()
            if pid == 0:
                _work(parent, write_fd, number, work)
            os.close(write_fd)
            self._ends.append((pid, read_fd))

    def results(self) -> list[bytes]:
        """What the other processes made, once they have ended.

        :raises ChildProcessError: if one of them has failed.
        """
        found, statuses = [], []
        while self._ends:
            pid, read_fd = self._ends.pop()
            with os.fdopen(read_fd, "rb") as pipe:
                found.append(pipe.read())
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if any(statuses):
            raise ChildProcessError(f"processes of a proof have failed: exit statuses {statuses}")

        return found


def _work(parent: int, write_fd: int, number: int, work: Callable[[int], bytes]) -> None:
    """Run in the forked process, which must not return into its copy of the caller."""
    status = 1
    try:
        end_with_parent(parent)
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(work(number))
        status = 0
    finally:
        os._exit(status)
