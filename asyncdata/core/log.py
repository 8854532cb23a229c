"""Events, by structlog where the application has configured it, and else by ``logging``.

structlog without configuration prints everything to stdout, between the lines of the trainer's own output.
``logging`` without configuration sends only warnings, to stderr.
"""

from __future__ import annotations

import sys
from typing import Any

from asyncdata.core.errors import redacted

__all__ = ("Logger", "get_logger")


class Logger:
    """Logs a module's events, under the module's name. Each method takes an event's name and its fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **fields: Any) -> None:
        """Something worth knowing happened."""
        self._log("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something went wrong, but the run continues."""
        self._log("warning", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Something went wrong that should not have; with the traceback."""
        self._log("exception", event, fields)

    def _log(self, method: str, event: str, fields: dict[str, Any]) -> None:
        structlog = sys.modules.get("structlog")  # if it is configured, it is imported
        if structlog is not None and structlog.is_configured():
            getattr(structlog.get_logger(self._name), method)(event, **_clean(fields))
        else:
            _log_plainly(self._name, method, event, _clean(fields))


def _log_plainly(name: str, method: str, event: str, fields: dict[str, Any]) -> None:
    """One line, of which the event's name and fields are attributes of the record as well."""
    import logging  # not at a worker's start

    logger = logging.getLogger(name)
    text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
    text = text if logger.hasHandlers() else f"asyncdata: {text}"  # without a handler, the text has no name
    getattr(logger, method)("%s", text, extra={"event": event, "fields": fields}, stacklevel=4)


def _clean(value: Any) -> Any:
    """Without what gives access to a store."""
    if isinstance(value, str):
        return redacted(value)

    if isinstance(value, dict):
        return {name: _clean(each) for name, each in value.items()}

    return [_clean(each) for each in value] if isinstance(value, list) else value


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
