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
    )
    from asyncdata.integrations.slime.miles_buffer import AsyncDataBuffer as AsyncDataBuffer
    from asyncdata.integrations.slime.outcomes import report_outcomes

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError", "report_outcomes")


def __getattr__(name: str) -> Any:
    if name == "AsyncDataBuffer":  # not in __all__, as it needs miles
        module = importlib.import_module(f"{__name__}.miles_buffer")
    elif name == "report_outcomes":
        module = importlib.import_module(f"{__name__}.outcomes")
    elif name in __all__:
        module = importlib.import_module(f"{__name__}.data_source")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
