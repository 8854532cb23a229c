"""slime and miles: a data source for their rollouts, with their checkpoints, and their dataset adapter.

``AsyncDataSource`` and ``ReadOnlyDataSource`` are what ``--data-source-path`` names, ``generate_fully_async`` is what
slime's ``--rollout-function-path`` and ``AsyncDataBuffer`` what miles' ``--custom-async-data-buffer-path`` names. They
are imported when they are asked for: a worker imports only the module of its tokenize function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdata.integrations.slime.async_rollouts import AsyncDataBuffer as AsyncDataBuffer
    from asyncdata.integrations.slime.async_rollouts import generate_fully_async
    from asyncdata.integrations.slime.data_source import (
        AsyncDataSource,
        BadGroupError,
        ReadOnlyDataSource,
        ReadOnlyError,
        report_outcomes,
    )

__all__ = (
    "AsyncDataSource",
    "BadGroupError",
    "ReadOnlyDataSource",
    "ReadOnlyError",
    "generate_fully_async",
    "report_outcomes",
)
_ROLLOUTS = "generate_fully_async", "AsyncDataBuffer"  # the second is not in __all__, as it needs miles
_MODULES = dict.fromkeys(__all__, "data_source") | dict.fromkeys(_ROLLOUTS, "async_rollouts")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
