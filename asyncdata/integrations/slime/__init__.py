"""slime and miles: a data source for their rollouts, with their checkpoints, and their dataset adapter.

``AsyncDataSource`` and ``ReadOnlyDataSource`` are what ``--data-source-path`` names, and ``AsyncDataBuffer`` is what
miles' ``--custom-async-data-buffer-path`` names. They are imported when they are asked for: a worker imports only the
module of its tokenize function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdata.integrations.slime.data_source import (
        AsyncDataSource,
        BadGroupError,
        ReadOnlyDataSource,
        ReadOnlyError,
        report_outcomes,
    )
    from asyncdata.integrations.slime.miles_buffer import AsyncDataBuffer as AsyncDataBuffer

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError", "report_outcomes")


def __getattr__(name: str) -> Any:
    module = "data_source" if name in __all__ else "miles_buffer"
    if name not in (*__all__, "AsyncDataBuffer"):  # the latter is not in __all__, as it needs miles
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
