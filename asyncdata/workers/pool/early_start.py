"""A fork server that starts in a loader's constructor, before the trainer imports any slow module.

It loads the tokenize function meanwhile. It dies with the thread that started it, so the loader's service runs in that
thread later.
"""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import AsyncDataError
from asyncdata.core.threads import started
from asyncdata.workers.pool.popen import AlivePipe, execute, hold_standard_fds, new_ends

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.workers.pool.popen import Ends

__all__ = ("EarlyForkServer", "StartedForkServer")

_PATIENCE_S = 10.0
"""How long a constructor waits for it. It starts within milliseconds, and then reads its message at once."""


class StartedForkServer:
    """A fork server that was started, and the description that it was sent.

    :ivar told: the frame of the description that it loads; empty before it was sent.
    """

    def __init__(self, alive: AlivePipe) -> None:
        self.alive = alive
        self.told: bytes | bytearray = b""
        with new_ends() as ends:
            self.process: subprocess.Popen[bytes] = execute("forkserver", ends, alive)
            self.ends: Ends = ends

    @classmethod
    def with_pipe(cls) -> StartedForkServer:
        """Start one with a new alive pipe."""
        with contextlib.ExitStack() as failing:
            alive = AlivePipe()
            failing.callback(alive.close)
            started = cls(alive)
            failing.pop_all()
        return started

    def tell(self, told: bytes | bytearray) -> None:
        """Send it the description of the tokenize function to load.

        :raises TimeoutError: if it does not read it. It may have a part of it then, and must be ended.
        :raises OSError: if it has died.
        """
        sock = self.ends.sock
        sock.settimeout(_PATIENCE_S)
        sock.sendall(told)
        sock.settimeout(None)
        self.told = told

    def end(self) -> None:
        """Kill it, and close all descriptors."""
        self.process.kill()
        self.process.wait()
        self.ends.close()
        self.alive.close()


class EarlyForkServer:
    """Starts a fork server in a thread. If the start fails, it is tried again when a worker is needed, and an error
    then is reported.

    :ivar thread: the thread that started the fork server, which dies with it (PR_SET_PDEATHSIG). It ends after
        :meth:`run`'s function, or with :meth:`close`.
    :ivar function: the tokenize function, resolved; None if it cannot be resolved.
    :raises WorkerError: if the system has no room for a thread.
    """

    def __init__(self) -> None:
        self.function: TokenizeFn | Callable[..., Any] | None = None
        self._fork_server: StartedForkServer | None = None
        self._is_tried = threading.Event()
        self._function_to_run: SimpleQueue[Callable[[], object]] = SimpleQueue()
        with contextlib.suppress(OSError):  # the thread tries again
            hold_standard_fds()  # in this thread, which could otherwise open a file under such a number meanwhile
        self.thread = started(self._live, "asyncdata-service")

    @classmethod
    def for_workers(cls, num_workers: object) -> EarlyForkServer | None:
        """Start one for a loader with worker processes; None if it has none. ``num_workers=None`` lets the loader
        choose the number.
        """
        return cls() if num_workers is None or (isinstance(num_workers, int) and num_workers > 0) else None

    def _live(self) -> None:
        with contextlib.suppress(BaseException):  # after any error the constructor must not wait forever
            self._fork_server = StartedForkServer.with_pipe()
        self._is_tried.set()
        self._function_to_run.get()()

    def tell(self, tokenize_fn: TokenizeFn | Callable[..., Any] | str) -> None:
        """Load ``tokenize_fn`` in the fork server. Errors are ignored here; the loader's own checks report them."""
        from asyncdata.core.framing import frame
        from asyncdata.tokenization.base import describe  # imported while the fork server boots
        from asyncdata.tokenization.resolve import resolved

        with contextlib.suppress(AsyncDataError):
            self.function = resolved(tokenize_fn)
            told = frame(0, describe(self.function))
            self._is_tried.wait(_PATIENCE_S)
            self._tell(told)

    def _tell(self, told: bytes | bytearray) -> None:
        if self._fork_server is None:
            return

        try:
            self._fork_server.tell(told)
        except TimeoutError:
            self._end()
        except OSError:  # it has died: that is detected when a worker is needed
            return

    def run(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the thread, which then ends."""
        self._function_to_run.put(function)

    def take(self) -> StartedForkServer | None:
        """Pass the fork server to the caller, who then owns it; None if there is none."""
        started, self._fork_server = self._fork_server, None
        return started

    def _end(self) -> None:
        started = self.take()
        if started is not None:
            started.end()

    def close(self) -> None:
        """End the fork server and the thread without running a function; calling this again does nothing."""
        self._is_tried.wait(_PATIENCE_S)
        self._end()
        self._function_to_run.put(self._end)  # in its own thread: ends a fork server that started after the wait
