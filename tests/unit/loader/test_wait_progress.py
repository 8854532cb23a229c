"""What a call waits for is shown, if it lasts, and by nothing else than a thread of its own."""

import builtins
import io
import logging
import queue
import sys
import threading
import types

import pytest

from asyncdata.loader import wait_progress
from tests.support.inner import change
from tests.support.loading import NEVER_S
from tests.support.parts import WaitProgress, progress_of, way_of


class Shown:
    def __init__(self) -> None:
        self.said = queue.SimpleQueue[str]()

    def show(self, text: str, waited_s: float) -> None:
        self.said.put(text)

    def end(self) -> None:
        self.said.put("end")

    def next(self, unlike: str = "") -> str:
        while (text := self.said.get(timeout=NEVER_S)) == unlike:
            pass
        return text


def test_a_wait_that_lasts_is_shown_and_its_end_as_well():
    shown = Shown()
    progress = WaitProgress("bar", 0.0, lambda _: shown)

    with progress.waiting(lambda: "the row index"):
        assert shown.next() == "the row index"
    assert shown.next(unlike="the row index") == "end"
    with progress.waiting(lambda: "the next window"):
        assert shown.next() == "the next window"
    progress.close()

    assert shown.next(unlike="the next window") == "end"


def test_a_short_wait_is_not_shown_and_nothing_is_started_where_nothing_is_to_be():
    before, shown = set(threading.enumerate()), Shown()
    with progress_of("none", 0).waiting(lambda: "nothing"):
        assert set(threading.enumerate()) <= before
    progress = WaitProgress("bar", NEVER_S, lambda _: shown)
    for _ in range(100):
        with progress.waiting(lambda: "nothing"):
            pass
    progress.close()

    assert shown.said.empty()


def test_a_display_that_fails_is_a_warning_and_the_wait_lasts(caplog, monkeypatch):
    change(monkeypatch, patience_with_a_display_s=NEVER_S)  # of close(), for the thread that warns

    class Broken(Shown):
        def show(self, text: str, waited_s: float) -> None:
            self.said.put(text)
            raise OSError("no terminal")

    shown = Broken()
    progress = WaitProgress("bar", 0.0, lambda _: shown)
    with progress.waiting(lambda: "the row index"):
        assert shown.next() == "the row index"
    progress.close()

    assert [record.event for record in caplog.records] == ["progress.failed"]


def test_events_come_each_time_the_wait_has_doubled(caplog):
    caplog.set_level(logging.INFO)
    show(wait_progress._display("log"), 2.0, 3.0, 4.0, 5.0, 8.0, 15.9, 16.0)  # noqa: SLF001

    assert [record.fields["waited_s"] for record in caplog.records] == [2.0, 4.0, 8.0, 16.0]


def show(display: wait_progress.Display, *waited_s: float) -> None:
    for seconds in waited_s:
        display.show("the row index", seconds)
    display.end()


def test_without_rich_and_where_they_are_asked_for_there_are_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    for way in ("bar", "lines"):
        show(wait_progress._display(way), 2.0, 3.0)  # noqa: SLF001

    assert sys.stderr.getvalue() == 2 * "asyncdata: the row index (2 s)\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_with_rich_there_is_a_bar_that_disappears_and_leaves_what_the_program_prints_where_it_goes(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", Terminal())

    display = wait_progress._display("bar")  # noqa: SLF001
    display.show("[the] row index", 2.0)
    print("a result")  # noqa: T201 - another thread does, while a call waits
    display.end()

    assert "asyncdata: [the] row index" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\x1b[2K")
    assert sys.stdout.getvalue() == "a result\n"
    assert "a result" not in sys.stderr.getvalue()


class ZMQInteractiveShell:
    """The name by which a notebook is known."""


def test_a_notebook_whose_packages_are_not_there_breaks_nothing(monkeypatch):
    pytest.importorskip("rich")
    shell, ipython = ZMQInteractiveShell(), types.ModuleType("IPython")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert way_of("auto", 0) != "bar"  # a module that is only half imported

    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)  # by this rich knows a notebook
    assert way_of("auto", 0) == "bar"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    show(wait_progress._display("bar"), 2.0)  # noqa: SLF001
    assert sys.stderr.getvalue() == "asyncdata: the row index (2 s)\n"


@pytest.mark.parametrize(
    ("progress", "rank", "is_terminal", "is_logged", "way"),
    [
        ("auto", 0, True, False, "bar"), ("auto", 1, True, False, "none"), ("auto", 0, False, False, "none"),
        ("auto", 0, False, True, "log"), ("bar", 3, False, False, "bar"), ("lines", 0, True, False, "lines"),
        ("none", 0, True, False, "none"),
    ],
)  # fmt: skip
def test_a_bar_is_shown_on_the_first_rank_in_a_terminal_and_events_where_someone_reads_them(
    monkeypatch, caplog, progress, rank, is_terminal, is_logged, way
):
    caplog.set_level(logging.INFO if is_logged else logging.WARNING)
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())

    assert way_of(progress, rank) == way


def test_the_oldest_of_several_waits_is_shown_on_one_display_and_it_ends_with_the_last():
    shown, displays = Shown(), []
    progress = WaitProgress("bar", 0.0, lambda way: displays.append(way) or shown)
    for first, second in (("a", "b"), ("c", "d")):
        older, newer = progress.waiting(lambda text=first: text), progress.waiting(lambda text=second: text)
        older.__enter__()
        newer.__enter__()
        with progress.waiting(lambda: "the youngest"):
            assert shown.next() == first
        older.__exit__(None, None, None)
        assert shown.next(unlike=first) == second
        newer.__exit__(None, None, None)
        assert shown.next(unlike=second) == "end"
    progress.close()

    assert displays == ["bar", "bar"]
