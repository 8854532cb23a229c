"""Shows what a call waits for, if it takes more than two seconds: as a bar in a terminal or notebook, or as events.

A thread of the loader looks at the waits. It is started by a wait, and ends when there was none for a while, so that a
loader that is dropped without ``close()`` leaves no thread. No call waits for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Protocol

from asyncdata.core.errors import WorkerError, get_logger
from asyncdata.core.threads import started

_log = get_logger(__name__)
_PATIENCE_S = 2.0
_REDRAW_S = 0.5
_IDLE_S = 5.0


class Display(Protocol):
    """Shows one wait."""

    def show(self, text: str, waited_s: float) -> None:
        """It still lasts."""
        ...

    def end(self) -> None:
        """It has ended."""
        ...


class _Told:
    """Tells of a wait after two seconds, and each time that it has become twice as long."""

    def __init__(self, tell: Callable[[str, float], object]) -> None:
        self._tell = tell
        self._next_s = 0.0

    def show(self, text: str, waited_s: float) -> None:
        if waited_s >= self._next_s:
            self._next_s = 2 * waited_s
            self._tell(text, waited_s)

    def end(self) -> None:
        pass


def _log_wait(text: str, waited_s: float) -> None:
    _log.info("loader.waiting", reason=text, waited_s=round(waited_s, 1))


def _print_wait(text: str, waited_s: float) -> None:
    sys.stderr.write(f"asyncdata: {text} ({waited_s:.0f} s)\n")
    sys.stderr.flush()


class _Bar:
    """A line of rich, which disappears when the wait ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
        console = Console(stderr=True)
        if console.is_jupyter:  # there, rich without these shows a warning in place of a bar
            import_module("IPython.display")
            import_module("ipywidgets")
        # stdout is left to the program: rich would write to stderr what others print meanwhile
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, text: str, waited_s: float) -> None:
        self._progress.update(self._task, description=f"asyncdata: {text}")
        self._progress.refresh()

    def end(self) -> None:
        self._progress.stop()


def _display(way: str) -> Display:
    """What shows a wait. A bar is lines where rich is not installed, or in a notebook ipywidgets."""
    if way == "bar":
        with suppress(ImportError):
            return _Bar()
    return _Told(_log_wait if way == "log" else _print_wait)


class WaitProgress:
    """The waits of one loader.

    :param way: ``bar``, ``lines`` or ``log``.
    :param patience_s: how long a wait lasts before it is shown.
    :param display: makes what shows a wait.
    """

    def __init__(self, way: str, patience_s: float = _PATIENCE_S, display: Callable[[str], Display] = _display) -> None:
        self._way, self._patience_s, self._display = way, patience_s, display
        self._changed = threading.Condition()
        self._waits: dict[int, tuple[float, Callable[[], str]]] = {}
        self._thread: threading.Thread | None = None
        self._is_idle = self._is_closed = False
        self._shown: Display | None = None
        self._last = 0
        self._log = _log.owned()

    @contextmanager
    def waiting(self, describe: Callable[[], str]) -> Iterator[None]:
        """During the block, a call waits.

        :param describe: returns for what, in a few words; called in another thread.
        """
        number = self._begin(describe)
        try:
            yield
        finally:
            with self._changed:
                del self._waits[number]
                if self._shown is not None:
                    self._changed.notify()

    def _begin(self, describe: Callable[[], str]) -> int:
        with self._changed:
            self._last += 1
            self._waits[self._last] = time.monotonic(), describe
            if self._thread is None and not self._is_closed:
                try:
                    self._thread = started(self._run, "asyncdata-progress")
                except WorkerError:
                    self._is_closed = True
            elif self._is_idle:
                self._changed.notify()
            return self._last

    def _run(self) -> None:
        self._log.own_thread()
        try:
            while not self._is_closed and self._look():
                pass
        except Exception as error:  # such as a terminal that is gone
            self._is_closed = True
            _log.warning("progress.failed", reason=repr(error))
        finally:
            if self._shown is not None:
                with suppress(Exception):
                    self._shown.end()

    def _look(self) -> bool:
        """Show the oldest wait if it is time to, and wait until it is time to look again; False: no one waits."""
        with self._changed:
            began, describe = next(iter(self._waits.values()), (None, None))
            left_s = 0.0 if began is None else began + self._patience_s - time.monotonic()
            if self._shown is None and (began is None or left_s > 0):
                self._is_idle = began is None
                pause_s = _IDLE_S if self._is_idle else left_s
                self._changed.wait_for(lambda: self._is_closed or (self._is_idle and self._waits), pause_s)
                self._is_idle = False
                if began is None and not self._waits:
                    self._thread = None  # the next wait starts another
                return self._thread is not None

        if began is None or describe is None or left_s > 0:
            assert self._shown is not None
            shown, self._shown = self._shown, None
            shown.end()
            return True

        self._shown = self._shown or self._display(self._way)
        self._shown.show(describe(), time.monotonic() - began)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._waits, _REDRAW_S)
        return True

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
