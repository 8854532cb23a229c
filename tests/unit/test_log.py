"""Loggers are structlog's, from their first event on, and structlog stays the caller's to configure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from asyncdata.log import get_logger


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


def test_a_logger_imports_structlog_at_its_first_event_and_never_configures_it():
    code = (
        "import sys; from asyncdata.log import get_logger; log = get_logger('x'); "
        "assert 'structlog' not in sys.modules; log.info('a'); import structlog; assert not structlog.is_configured()"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert "a" in result.stdout
