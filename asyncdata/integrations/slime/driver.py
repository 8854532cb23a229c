"""The framework that runs the data source: slime, its relative miles, or neither."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ("current_rollout_id", "package_of", "register", "tells_rollouts")

_PACKAGES = ("slime", "miles")
_HOOKS = tuple(f"{package}.rollout.sample_hooks" for package in _PACKAGES)
_CURRENT = "_current_rollout_id"


def package_of(sample_type: type[Any]) -> str | None:
    """The framework of the sample class: ``slime`` or ``miles``; None if neither is installed."""
    name = sample_type.__module__.partition(".")[0]
    return name if name in _PACKAGES else None


def current_rollout_id() -> int | None:
    """The rollout that the driver says is being generated. Imports nothing: a running driver is imported already."""
    for name in _HOOKS:
        found = getattr(sys.modules.get(name), _CURRENT, None)
        if isinstance(found, int):
            return found
    return None


def tells_rollouts() -> bool:
    """Whether the driver says which rollout it generates: slime does since v0.3.1, miles does not."""
    return any(hasattr(sys.modules.get(name), _CURRENT) for name in _HOOKS)


def register(kind: type[Any], package: str | None) -> None:
    """Register ``kind`` as a virtual subclass of the framework's own ``DataSource``, if that can be imported."""
    if package is None:
        return

    try:
        base = importlib.import_module(f"{package}.rollout.data_source").DataSource
    except (ImportError, AttributeError):
        return  # an older driver, or one without this class

    if not issubclass(kind, base):
        base.register(kind)
