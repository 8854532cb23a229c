"""Events go to structlog if the application has configured that, and else to logging; which stay the application's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from asyncdata.core.log import get_logger, observe_events, owning_events, stop_observing


@pytest.mark.parametrize("level", ["info", "warning"])
def test_an_event_arrives_with_its_fields_and_level(level):
    with capture_logs() as events:
        getattr(get_logger("here"), level)("row.bad", code="AD101", line=3)

    assert events == [{"event": "row.bad", "code": "AD101", "line": 3, "log_level": level}]


def test_an_exception_is_an_error_with_its_traceback():
    with capture_logs() as events:
        try:
            raise ValueError("oh")
        except ValueError:
            get_logger("here").exception("service.failed", stage="read")

    assert events == [{"event": "service.failed", "stage": "read", "exc_info": True, "log_level": "error"}]


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


def said_by(code: str) -> tuple[str, str]:
    """What a program that logs events, with ``code`` before them, prints to stdout and stderr."""
    events = (
        "\nfrom asyncdata.core.log import get_logger"
        "\nget_logger('asyncdata.x').info('loader.started', n=1)"
        "\nget_logger('asyncdata.x').warning('row.bad', path='/a', line=3)"
        "\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    get_logger('asyncdata.x').exception('service.failed')"
    )
    result = subprocess.run([sys.executable, "-c", code + events], capture_output=True, text=True, check=True)
    return result.stdout, result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("code", ["", "import structlog"])
def test_without_configuration_warnings_go_to_stderr_and_nothing_to_stdout(code):
    out, err = said_by(code)

    assert out == ""
    assert err.startswith("asyncdata: row.bad path='/a' line=3\nasyncdata: service.failed\nTraceback")
    assert "ZeroDivisionError" in err
    assert "loader.started" not in err


def test_what_the_application_has_told_logging_holds():
    settings = "format='%(levelname)s %(name)s %(message)s|%(event)s|%(fields)s'"
    out, err = said_by(f"import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout, {settings})")

    assert out.splitlines()[:2] == [
        "INFO asyncdata.x loader.started n=1|loader.started|{'n': 1}",
        "WARNING asyncdata.x row.bad path='/a' line=3|row.bad|{'path': '/a', 'line': 3}",
    ]
    assert err == ""
    silent = said_by("import logging; logging.getLogger('asyncdata').setLevel(logging.CRITICAL)")
    assert silent == ("", "")


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
