"""Loggers that import structlog at their first event: it takes longer to import than all of the library."""

from __future__ import annotations

from typing import Any

from asyncdata.errors import redacted

__all__ = ("Logger", "get_logger")


class Logger:
    """Stands for ``structlog.get_logger(name)``. Each method takes an event's name and its fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **fields: Any) -> None:
        """Something worth knowing happened."""
        self._logger().info(event, **_clean(fields))

    def warning(self, event: str, **fields: Any) -> None:
        """Something went wrong, and the run goes on."""
        self._logger().warning(event, **_clean(fields))

    def exception(self, event: str, **fields: Any) -> None:
        """Something went wrong that should not have; with the traceback."""
        self._logger().exception(event, **_clean(fields))

    def _logger(self) -> Any:
        import structlog

        return structlog.get_logger(self._name)


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
