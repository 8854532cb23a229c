"""What is told of the library's own work: its log, shortages of the machine, and calls into a loop."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
import structlog

import asyncdata
from asyncdata.errors import ConfigError
from tests.support import parts


def test_a_logger_made_before_structlog_is_configured_obeys():
    log, seen = parts.get_logger("here"), []
    before = structlog.get_config()

    def swallow(_: object, method: str, event: dict[str, object]) -> dict[str, object]:
        seen.append(f"{method} {event['event']}")
        raise structlog.DropEvent

    try:
        structlog.configure(processors=[swallow])
        log.info("loader.started")
    finally:
        structlog.configure(**before)

    assert seen == ["info loader.started"]


EVENTS = """
from asyncdata.core.errors import get_logger
get_logger('asyncdata.x').info('loader.started', n=1)
get_logger('asyncdata.x').warning('row.bad', path='/a', line=3)
try:
    1 / 0
except ZeroDivisionError:
    get_logger('asyncdata.x').exception('service.failed')
"""


CASES = {
    "": ("", "asyncdata: row.bad path='/a' line=3\nasyncdata: service.failed\nTraceback"),
    "import structlog": ("", "asyncdata: row.bad path='/a' line=3\nasyncdata: service.failed\nTraceback"),
    "import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(filename)s %(message)s')":
        ("<string> row.bad path='/a' line=3\n<string> service.failed\nTraceback", ""),
    "import structlog; structlog.configure(processors=[structlog.processors.KeyValueRenderer()])":
        ("n=1 event='loader.started'\npath='/a' line=3 event='row.bad'\n", ""),
}  # fmt: skip
"""What a program does first, and how what it says begins on stdout and stderr; empty: nothing is there."""


@pytest.mark.thorough
@pytest.mark.parametrize("code", CASES)
def test_events_go_to_structlog_or_logging_as_they_are_configured_and_else_warnings_to_stderr(code):
    done = subprocess.run([sys.executable, "-c", code + EVENTS], capture_output=True, text=True, check=True)

    for text, start in zip((done.stdout, done.stderr), CASES[code], strict=True):
        assert text.startswith(start)
        assert (bool(text), "ZeroDivisionError" in text) == (bool(start), "Traceback" in start)
        assert ("loader.started" in text) == ("loader.started" in start)


def test_what_the_application_has_told_logging_holds(caplog):
    log = parts.get_logger("asyncdata.x")
    with caplog.at_level("INFO", "asyncdata.x"):
        log.info("loader.started", n=1)
        log.warning("row.bad", path="/a", line=3)
    with caplog.at_level("CRITICAL", "asyncdata"):
        parts.get_logger("asyncdata.y").warning("row.bad")

    started, bad = caplog.records
    assert (started.levelname, started.name, started.getMessage()) == ("INFO", "asyncdata.x", "loader.started n=1")
    assert (bad.levelname, bad.getMessage()) == ("WARNING", "row.bad path='/a' line=3")
    assert (bad.event, bad.fields) == ("row.bad", {"path": "/a", "line": 3})


@pytest.mark.thorough
def test_a_logger_neither_imports_structlog_nor_configures_anything():
    code = (
        "import sys, logging; from asyncdata.core.errors import get_logger; get_logger('asyncdata.x').warning('a'); "
        "assert 'structlog' not in sys.modules; assert not logging.getLogger().handlers; "
        "assert not logging.getLogger('asyncdata').handlers; "
        "import structlog; get_logger('asyncdata.x').warning('a'); assert not structlog.is_configured()"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "asyncdata: a\nasyncdata: a\n")


def test_an_observer_is_told_the_events_of_its_owner_and_those_of_none():
    log, seen, left = parts.get_logger("here"), [], []
    one, other = object(), object()

    def observe(_: str, name: str, __: object) -> None:
        seen.append(name)

    def other_observer(_: str, name: str, __: object) -> None:
        left.append(name)

    parts.observe_events(observe, one)
    parts.observe_events(other_observer, other)
    try:
        with parts.owning_events(one):
            log.info("of.one")
            mine = log.owned()
            with parts.owning_events(other):
                log.info("of.another")
                mine.info("of.one_from_elsewhere")
                others = log.owned()
        others.info("of.another_from_elsewhere")
        log.info("of.none")
    finally:
        parts.stop_observing(observe)
    log.info("of.none_later")
    parts.stop_observing(other_observer)
    log.info("of.none_at_last")

    assert seen == ["of.one", "of.one_from_elsewhere", "of.none"]
    assert left == ["of.another", "of.another_from_elsewhere", "of.none", "of.none_later"]


def test_of_a_module_that_cannot_be_imported_its_own_frames_are_left(tmp_path, monkeypatch):
    (tmp_path / "broken_here.py").write_text("def f():\n    raise ImportError('x')\nf()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        parts.resolve_path("broken_here:fn")

    lines = parts.user_traceback(raised.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    frames = [line.strip().split(", ")[1:] for line in lines if line.startswith('  File "')]
    assert frames[-2:] == [["line 3", "in <module>"], ["line 2", "in f"]]
    assert lines[-1] == "ImportError: x"
    assert not any(asyncdata.__path__[0] in line or "importlib" in line for line in lines)


def test_where_no_frame_is_the_users_the_error_is_one_line():
    try:
        raise ConfigError("only words")
    except ConfigError as error:
        error.__traceback__ = None
        assert parts.user_traceback(error).strip() == "asyncdata.core.errors.ConfigError: only words"


class PanicException(BaseException):
    """What a panic in Rust is."""


def following(error, cause=None, handled=None, is_hidden=False):
    """The error as it is after ``raise error from cause``, or while another one was handled, and maybe hidden."""
    error.__cause__, error.__context__, error.__suppress_context__ = cause, handled or cause, is_hidden or not handled
    return error


def in_a_circle() -> BaseException:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    return first


SHORTAGES = [
    (MemoryError("of row 7"), "out of memory (MemoryError)"),
    *((OSError(number, "row 7"), os.strerror(number)) for number in (errno.ENOMEM, errno.EDQUOT, errno.ENFILE)),
    (OSError(errno.EMFILE, "row 7"), "Too many open files"),
    (RuntimeError("can't start new thread"), "can't start new thread"),
    (PanicException('Os { code: 11, kind: WouldBlock, message: "row 7" }'), os.strerror(errno.EAGAIN)),
    (PanicException("row 7 (os error 24)"), "Too many open files"),
    (ExceptionGroup("two", [MemoryError(), OSError(errno.EMFILE, "x")]), "out of memory (MemoryError)"),
    (following(ValueError("row 7"), MemoryError()), "out of memory (MemoryError)"),
    (following(ValueError("row 7"), handled=OSError(errno.ENOSPC, "x")), "No space left on device"),
    (parts.ShortageError(MemoryError(), 3, "row 7"), "out of memory (MemoryError)"),
]


@pytest.mark.parametrize(("error", "words"), SHORTAGES, ids=[repr(error) for error, _ in SHORTAGES])
def test_a_shortage_is_told_in_the_systems_words_and_none_of_the_rows(error, words):
    assert parts.short_of(error) == words
    assert parts.is_shortage(error)
    with pytest.raises(type(error)):
        parts.raise_if_shortage(error)


OTHERS = [
    ValueError("memory"), RuntimeError("can't start new thread of row 7"), FileNotFoundError(errno.ENOENT, "x"),
    OSError("no number"), PanicException("index out of bounds"), ExceptionGroup("two", [MemoryError(), ValueError()]),
    following(ValueError(), handled=KeyError()), RecursionError(), in_a_circle(),
    following(ValueError(), handled=MemoryError(), is_hidden=True),
]  # fmt: skip


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_another_error_is_a_rows(error):
    assert (parts.short_of(error), parts.is_shortage(error)) == ("", False)
    parts.raise_if_shortage(error)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_from_the_loop_itself_does_not_run_at_once_and_after_the_loop_has_ended_never(backend):
    called: list[int] = []

    async def main():
        call_soon, event = parts.call_soon_in_this_loop(), anyio.Event()
        call_soon(event.set)

        assert not event.is_set()
        await event.wait()
        return call_soon

    call_soon = anyio.run(main, backend=backend)
    call_soon(lambda: called.append(1))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call_soon, lambda: called.append(2)).result()
    assert called == []
