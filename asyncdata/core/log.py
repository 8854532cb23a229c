"""Events, by structlog where the application has configured it, and else by ``logging``.

structlog without configuration prints everything to stdout, between the lines of the trainer's own output.
``logging`` without configuration sends only warnings, to stderr.

A process may have several loaders. An event belongs to the loader for which the code runs that logs it: the loader's
threads and tasks know it by a context variable, and objects that the trainer's threads call have a logger of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from asyncdata.core.errors import printable_lines, redacted

Observer = Callable[[str, str, dict[str, Any]], object]

events_owner: ContextVar[object] = ContextVar("asyncdata_events_owner", default=None)
"""Stands for the loader for which the current code runs; None: for no one loader."""

_observers: list[tuple[Observer, object]] = []


def observe_events(observer: Observer, owner: object) -> None:
    """Call ``observer``, in any thread, with the method, the name and the fields of each event of this process that
    belongs to ``owner``, or to no one loader.
    """
    _observers.append((observer, owner))


def stop_observing(observer: Observer) -> None:
    """No longer call it."""
    _observers[:] = [pair for pair in _observers if pair[0] != observer]


@contextmanager
def owning_events(owner: object) -> Iterator[None]:
    """Events of the block, and of loggers that :meth:`Logger.owned` makes in it, belong to ``owner``."""
    before = events_owner.set(owner)
    try:
        yield
    finally:
        events_owner.reset(before)


class Logger:
    """Logs a module's events, under the module's name. Each method takes an event's name and its fields.

    :param owner: the loader that owns the events; None: the current one.
    """

    def __init__(self, name: str, owner: object = None) -> None:
        self._name, self._owner = name, owner

    def owned(self) -> Logger:
        """A logger whose events belong to the current loader, whatever code logs them later."""
        return Logger(self._name, events_owner.get())

    def own_thread(self) -> None:
        """From now on events of this thread, and of the tasks and threads of its event loop, belong to its owner."""
        events_owner.set(self._owner)

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
        fields = cleaned(fields)
        owner = self._owner or events_owner.get()
        for observer, wanted in tuple(_observers):
            if owner is None or owner is wanted:
                observer(method, event, fields)
        structlog = sys.modules.get("structlog")  # if it is configured, it is imported
        if structlog is not None and structlog.is_configured():
            getattr(structlog.get_logger(self._name), method)(event, **fields)
        else:
            _log_plainly(self._name, method, event, fields)


def _log_plainly(name: str, method: str, event: str, fields: dict[str, Any]) -> None:
    """One line, of which the event's name and fields are attributes of the record as well."""
    import logging  # not at a worker's start

    logger = logging.getLogger(name)
    text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
    text = text if logger.hasHandlers() else f"asyncdata: {text}"  # without a handler, the text has no name
    getattr(logger, method)("%s", text, extra={"event": event, "fields": fields}, stacklevel=4)


def cleaned(value: Any) -> Any:
    """The value without what gives access to a store, and without what a terminal obeys."""
    if isinstance(value, str):
        return printable_lines(redacted(value))

    if isinstance(value, dict):
        return {name: cleaned(each) for name, each in value.items()}

    return [cleaned(each) for each in value] if isinstance(value, list) else value


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
