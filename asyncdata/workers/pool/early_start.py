"""A template that is born in a loader's constructor, before the trainer imports what takes time.

It loads the tokenize function meanwhile. It dies with the thread that made it; so that thread is the one that the
loader's service runs in later.
"""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import AsyncDataError
from asyncdata.core.threads import started
from asyncdata.workers.pool.popen import AlivePipe, execute, new_ends

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.workers.pool.popen import Ends

__all__ = ("EarlyTemplate", "Newborn")

_PATIENCE_S = 10.0
"""Its start takes milliseconds, and it reads what it is told as soon as it runs. A constructor waits no longer."""


class Newborn:
    """A template that was started, and what it has been told.

    :ivar told: the frame of the description that it loads; empty while it has none.
    """

    def __init__(self, alive: AlivePipe) -> None:
        self.alive = alive
        self.told: bytes | bytearray = b""
        with new_ends() as ends:
            self.process: subprocess.Popen[bytes] = execute("forkserver", ends, alive)
            self.ends: Ends = ends

    @classmethod
    def with_pipe(cls) -> Newborn:
        """One with an alive pipe of its own."""
        with contextlib.ExitStack() as failing:
            alive = AlivePipe()
            failing.callback(alive.close)
            newborn = cls(alive)
            failing.pop_all()
        return newborn

    def tell(self, told: bytes | bytearray) -> None:
        """Send it the description that it is to load.

        :raises TimeoutError: if it does not read that; it has a part of it then, and is of no use.
        :raises OSError: if it has died.
        """
        sock = self.ends.sock
        sock.settimeout(_PATIENCE_S)
        sock.sendall(told)
        sock.settimeout(None)
        self.told = told

    def end(self) -> None:
        """Nobody needs it."""
        self.process.kill()
        self.process.wait()
        self.ends.close()
        self.alive.close()


class EarlyTemplate:
    """Started at once, unless that fails, for whatever reason: then it is tried again when a worker is needed, and the
    reason is told.

    :ivar thread: its mother; ends with :meth:`run`'s function, or with :meth:`close`.
    :ivar function: the tokenize function, resolved; None where that cannot be done.
    :raises WorkerError: if there is no room for a thread.
    """

    def __init__(self) -> None:
        self.function: TokenizeFn | Callable[..., Any] | None = None
        self._newborn: Newborn | None = None
        self._is_tried = threading.Event()
        self._errand: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.thread = started(self._live, "asyncdata-service")

    @classmethod
    def for_workers(cls, num_workers: object) -> EarlyTemplate | None:
        """For a loader of so many: None takes a number of its own; without workers there is nothing to be born."""
        return cls() if num_workers is None or (isinstance(num_workers, int) and num_workers > 0) else None

    def _live(self) -> None:
        with contextlib.suppress(BaseException):  # whatever it is, the constructor must not wait for ever
            self._newborn = Newborn.with_pipe()
        self._is_tried.set()
        self._errand.get()()

    def tell(self, tokenize_fn: TokenizeFn | Callable[..., Any] | str) -> None:
        """Have it load ``tokenize_fn``. What is wrong with that is for others to say, in their order."""
        from asyncdata.core.framing import frame
        from asyncdata.tokenization.base import describe  # while it boots
        from asyncdata.tokenization.resolve import resolved

        with contextlib.suppress(AsyncDataError):
            self.function = resolved(tokenize_fn)
            told = frame(0, describe(self.function))
            self._is_tried.wait(_PATIENCE_S)
            self._tell(told)

    def _tell(self, told: bytes | bytearray) -> None:
        if self._newborn is None:
            return

        try:
            self._newborn.tell(told)
        except TimeoutError:
            self._end()
        except OSError:  # it has died: that is noticed when it is needed
            return

    def run(self, function: Callable[[], object]) -> None:
        """Have the thread run ``function``, and then end."""
        self._errand.put(function)

    def take(self) -> Newborn | None:
        """It is the caller's from here on; None if there is none."""
        newborn, self._newborn = self._newborn, None
        return newborn

    def _end(self) -> None:
        newborn = self.take()
        if newborn is not None:
            newborn.end()

    def close(self) -> None:
        """Nothing was run, and nothing will be; calling this again does nothing."""
        self._is_tried.wait(_PATIENCE_S)
        self._end()
        self._errand.put(self._end)  # one that has started too late, in its own thread
