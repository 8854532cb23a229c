"""What is known of the framework that runs the data source: slime, its relative miles, or neither of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ("current_rollout_id", "package_of", "register", "tells_rollouts")

_PACKAGES = ("slime", "miles")
_HOOKS = tuple(f"{package}.rollout.sample_hooks" for package in _PACKAGES)
_CURRENT = "_current_rollout_id"


def package_of(sample_type: type[Any]) -> str | None:
    """The framework whose sample this is: ``slime`` or ``miles``; None where neither is installed."""
    name = sample_type.__module__.partition(".")[0]
    return name if name in _PACKAGES else None


def current_rollout_id() -> int | None:
    """What the driver says is being generated; looked up, as a driver that is not imported runs nothing."""
    for name in _HOOKS:
        found = getattr(sys.modules.get(name), _CURRENT, None)
        if isinstance(found, int):
            return found
    return None


def tells_rollouts() -> bool:
    """Whether the driver says which rollout it generates: slime does from v0.3.1 on, miles does not."""
    return any(hasattr(sys.modules.get(name), _CURRENT) for name in _HOOKS)


def register(kind: type[Any], package: str | None) -> None:
    """Make the instances of ``kind`` instances of the framework's own ``DataSource``, where that can be imported."""
    if package is None:
        return

    try:
        base = importlib.import_module(f"{package}.rollout.data_source").DataSource
    except (ImportError, AttributeError):
        return  # an older driver, or one without a needed attribute: then it cannot be asked

    if not issubclass(kind, base):
        base.register(kind)
