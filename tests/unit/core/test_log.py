"""Events go to structlog if the application has configured that, and else to logging; a traceback is the user's."""

from __future__ import annotations

import subprocess
import sys
import traceback
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

import asyncdata
from asyncdata import ConfigError
from asyncdata.core.import_path import resolve_path
from asyncdata.core.log import get_logger, observe_events, owning_events, stop_observing
from asyncdata.core.user_traceback import user_traceback
from asyncdata.tokenization.base import open_tokenize_fn


def test_an_event_arrives_with_its_fields_and_level():
    log = get_logger("here")
    with capture_logs() as events:
        log.info("row.bad", code="AD101", line=3)
        log.warning("row.bad", code="AD102")
        try:
            raise ValueError("oh")
        except ValueError:
            log.exception("service.failed", stage="read")

    assert events == [
        {"event": "row.bad", "code": "AD101", "line": 3, "log_level": "info"},
        {"event": "row.bad", "code": "AD102", "log_level": "warning"},
        {"event": "service.failed", "stage": "read", "exc_info": True, "log_level": "error"},
    ]


def test_a_logger_made_before_structlog_is_configured_obeys():
    log = get_logger("here")
    seen: list[str] = []
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
from asyncdata.core.log import get_logger
get_logger('asyncdata.x').info('loader.started', n=1)
get_logger('asyncdata.x').warning('row.bad', path='/a', line=3)
try:
    1 / 0
except ZeroDivisionError:
    get_logger('asyncdata.x').exception('service.failed')
"""


def said_by(code: str) -> tuple[str, str]:
    """What a program that logs events, with ``code`` before them, prints to stdout and stderr."""
    result = subprocess.run([sys.executable, "-c", code + EVENTS], capture_output=True, text=True, check=True)
    return result.stdout, result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("code", ["", "import structlog"])
def test_without_configuration_warnings_go_to_stderr_and_nothing_to_stdout(code):
    out, err = said_by(code)

    assert out == ""
    assert err.startswith("asyncdata: row.bad path='/a' line=3\nasyncdata: service.failed\nTraceback")
    assert "ZeroDivisionError" in err
    assert "loader.started" not in err


def test_what_the_application_has_told_logging_holds(caplog):
    log = get_logger("asyncdata.x")
    with caplog.at_level("INFO", "asyncdata.x"):
        log.info("loader.started", n=1)
        log.warning("row.bad", path="/a", line=3)
    with caplog.at_level("CRITICAL", "asyncdata"):
        get_logger("asyncdata.y").warning("row.bad")

    started, bad = caplog.records
    assert (started.levelname, started.name, started.getMessage()) == ("INFO", "asyncdata.x", "loader.started n=1")
    assert (bad.levelname, bad.getMessage()) == ("WARNING", "row.bad path='/a' line=3")
    assert (bad.event, bad.fields) == ("row.bad", {"path": "/a", "line": 3})


@pytest.mark.thorough
def test_a_record_of_logging_names_the_file_that_logged_the_event():
    out, err = said_by("import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(filename)s %(message)s')")

    assert out.startswith("<string> row.bad ")
    assert err == ""


@pytest.mark.thorough
def test_where_structlog_is_configured_it_gets_every_event():
    out, err = said_by("import structlog; structlog.configure(processors=[structlog.processors.KeyValueRenderer()])")

    assert out.splitlines()[:2] == ["n=1 event='loader.started'", "path='/a' line=3 event='row.bad'"]
    assert err == ""


@pytest.mark.thorough
def test_a_logger_neither_imports_structlog_nor_configures_anything():
    code = (
        "import sys, logging; from asyncdata.core.log import get_logger; get_logger('asyncdata.x').warning('a'); "
        "assert 'structlog' not in sys.modules; assert not logging.getLogger().handlers; "
        "assert not logging.getLogger('asyncdata').handlers; "
        "import structlog; get_logger('asyncdata.x').warning('a'); assert not structlog.is_configured()"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "asyncdata: a\nasyncdata: a\n")


def test_an_observer_is_told_the_events_of_its_owner_and_those_of_none():
    log, seen = get_logger("here"), []
    one, other = object(), object()

    def observe(_: str, name: str, __: object) -> None:
        seen.append(name)

    observe_events(observe, one)
    try:
        with owning_events(one):
            log.info("of.one")
            mine = log.owned()
            with owning_events(other):
                log.info("of.another")
                mine.info("of.one_from_elsewhere")
        with owning_events(other):
            others = log.owned()
        others.info("of.another_from_elsewhere")
        log.info("of.none")
    finally:
        stop_observing(observe)
    log.info("of.none_later")

    assert seen == ["of.one", "of.one_from_elsewhere", "of.none"]


# Tracebacks


def test_of_a_module_that_cannot_be_imported_its_own_frames_are_left(tmp_path, monkeypatch):
    (tmp_path / "broken_here.py").write_text("def f():\n    raise ImportError('x')\nf()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        resolve_path("broken_here:fn")

    lines = user_traceback(raised.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip().split(", ")[1:] for line in lines if line.startswith('  File "')][-2:] == [
        ["line 3", "in <module>"],
        ["line 2", "in f"],
    ]
    assert lines[-1] == "ImportError: x"
    assert not any(asyncdata.__path__[0] in line or "importlib" in line for line in lines)


def test_where_no_frame_is_the_users_the_error_is_one_line():
    try:
        raise ConfigError("only words")
    except ConfigError as error:
        error.__traceback__ = None
        assert user_traceback(error).strip() == "asyncdata.core.errors.ConfigError: only words"


def test_frames_of_every_folder_of_the_package_are_left_out():
    class Broken:
        def resolve(self) -> Broken:
            return self

        def fingerprints(self) -> dict[str, str]:
            return {}

        def settings(self) -> dict[str, Any]:
            return {}

        def open(self) -> None:
            raise RuntimeError("cannot be opened")

    with pytest.raises(RuntimeError) as raised:
        open_tokenize_fn(Broken())

    text = user_traceback(raised.value)
    assert asyncdata.__path__[0] in "".join(traceback.format_exception(raised.value))
    assert asyncdata.__path__[0] not in text
    assert "cannot be opened" in text
