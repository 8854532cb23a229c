"""Starting the fork server of a pool by exec: its descriptors, its environment, and its end with the trainer.

It starts in a loader's constructor, before the trainer imports any slow module, and loads the tokenize function
meanwhile. So this imports little. It dies with the thread that started it, so the loader's service runs in that thread
later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.threads import started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.tokenization.base import TokenizeFn


_PATIENCE_S = 10.0
"""How long a constructor waits for it. It starts within milliseconds, and then reads its message at once."""
_SET_IT = "set it to the path of a Python interpreter that has asyncdata, or num_workers=0"
_BOOT = """\
import json, sys
arguments = json.loads(sys.argv[1])
sys.path[:] = arguments.pop("path")
from {} import main
main(**arguments)
"""
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # an `import torch` in a user's function must not create a CUDA context
}


_LAST_STANDARD_FD = 2
_NOT_RUNNABLE = {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR}


def no_room(error: OSError) -> WorkerError:
    """The error for a worker that cannot be started. Raise it from ``error``: its errno shows a shortage."""
    if error.errno in _NOT_RUNNABLE:
        return WorkerError(f"AD426 workers cannot be started: {error}; sys.executable is {sys.executable!r}: {_SET_IT}")

    return WorkerError(
        f"AD426 workers cannot be started: {error.strerror}; raise the limit (ulimit -a), or lower num_workers"
    )


def hold_standard_fds() -> None:
    """Open ``/dev/null`` for those of the descriptors 0 to 2 that are closed.

    Otherwise a pipe could get one of these numbers, which are stdin, stdout and stderr in a process of the pool.

    :raises OSError: if no descriptor is left.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_FD:
        continue  # it stays open until this process ends
    os.close(fd)


class AlivePipe:
    """A pipe whose only writer is this process. When it closes, all processes of the pool that inherited it end.

    It is created before all other descriptors of the pool.
    """

    def __init__(self) -> None:
        hold_standard_fds()
        self.read_fd, self._write_fd = os.pipe()
        _pipes.add(self)

    def close(self) -> None:
        """Close both ends; calling this again does nothing."""
        if self._write_fd >= 0:
            os.close(self.read_fd)
            os.close(self._write_fd)
            self._write_fd = -1

    def forget_in_child(self) -> None:
        """Close the write end in a forked child of the trainer, which would keep the workers alive otherwise."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1


_pipes: weakref.WeakSet[AlivePipe] = weakref.WeakSet()
# If another thread forks meanwhile, the child inherits the pipe through which Popen learns of the exec, and Popen waits
# until that child ends.
_no_fork = threading.RLock()


def _after_fork_in_child() -> None:
    _no_fork.release()
    for pipe in list(_pipes):
        with contextlib.suppress(OSError):
            pipe.forget_in_child()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)


class Ends(NamedTuple):
    """A socket and a pipe for output, between this process and one of the pool.

    :ivar their_fds: the other end of the socket, and of the pipe.
    """

    sock: socket.socket
    output_fd: int
    their_fds: tuple[int, int]

    def close(self) -> None:
        """Close our ends."""
        self.sock.close()
        os.close(self.output_fd)


@contextlib.contextmanager
def new_ends() -> Iterator[Ends]:
    """New ends. The other process's ends are closed here after the block, and ours too if the block fails.

    No thread can fork during the block: a child that held these ends would hide the end of the process.

    :raises WorkerError: if the block fails with an OSError, or no descriptor is left.
    """
    try:
        with _no_fork, contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            hold_standard_fds()
            sock, their_sock = socket.socketpair()
            ours.callback(sock.close)
            theirs.callback(their_sock.close)
            output_fd, their_output_fd = os.pipe()
            ours.callback(os.close, output_fd)
            theirs.callback(os.close, their_output_fd)
            os.set_blocking(output_fd, False)
            yield Ends(sock, output_fd, (their_sock.fileno(), their_output_fd))
            ours.pop_all()
    except OSError as error:
        raise no_room(error) from error


def command_of(module: str, arguments: dict[str, Any]) -> list[str]:
    """The command of a new interpreter that runs ``main`` of a module of this package, with the same ``sys.path``.

    :raises WorkerError: if ``sys.executable`` is empty, for example because Python is embedded.
    """
    if not sys.executable:
        raise WorkerError(f"AD426 workers cannot be started: sys.executable is {sys.executable!r}; {_SET_IT}")

    arguments = {"path": list(_places()), **arguments}
    return [sys.executable, "-I", "-c", _BOOT.format(module), json.dumps(arguments)]


def _places() -> Iterator[str]:
    """The folders where Python finds modules. Like Python, this skips entries that are not strings, and relative ones
    if the current folder has been deleted.
    """
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(FileNotFoundError):
                yield os.path.abspath(entry)


def execute(ends: Ends, alive: AlivePipe) -> subprocess.Popen[bytes]:
    """A new interpreter that becomes a fork server; it dies with the calling thread.

    :param ends: the new process inherits the other ends.
    :raises OSError: if the system has no room for one more process.
    """
    sock_fd, output_fd = ends.their_fds
    arguments = {"parent": os.getpid(), "sock_fd": sock_fd, "alive_fd": alive.read_fd}
    with _ctrl_c_blocked():
        return subprocess.Popen(
            command_of(f"{__package__}.worker_main", arguments),
            pass_fds=(sock_fd, alive.read_fd),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            env=os.environ | ENVIRONMENT,
        )


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block SIGINT. The mask survives exec, so Ctrl-C cannot end a worker before it ignores the signal itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StartedForkServer:
    """A fork server that was started, and the description that it was sent.

    :ivar told: the frame of the description that it loads; empty before it was sent.
    """

    def __init__(self, alive: AlivePipe) -> None:
        self.alive = alive
        self.told: bytes | bytearray = b""
        with new_ends() as ends:
            self.process: subprocess.Popen[bytes] = execute(ends, alive)
            self.ends: Ends = ends

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
        # After any error the constructor must not wait forever.
        with contextlib.suppress(BaseException), contextlib.ExitStack() as failing:
            alive = AlivePipe()
            failing.callback(alive.close)
            self._fork_server = StartedForkServer(alive)
            failing.pop_all()
        self._is_tried.set()
        self._function_to_run.get()()

    def tell(self, tokenize_fn: TokenizeFn | Callable[..., Any] | str) -> None:
        """Load ``tokenize_fn`` in the fork server. Errors are ignored here; the loader's own checks report them."""
        from asyncdata.core.messages import frame
        from asyncdata.tokenization.base import describe, resolved

        with contextlib.suppress(AsyncDataError):
            self.function = resolved(tokenize_fn)
            told = frame(0, describe(self.function))
            self._is_tried.wait(_PATIENCE_S)
            try:
                if self._fork_server is not None:
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
