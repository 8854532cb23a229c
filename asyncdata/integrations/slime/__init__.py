"""slime and miles: a data source for their rollouts, with their checkpoints, and their dataset adapter.

``AsyncDataSource`` and ``ReadOnlyDataSource`` are what ``--data-source-path`` names. They are imported when they are
asked for: a worker imports only the module of its tokenize function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdata.integrations.slime.data_source import (
        AsyncDataSource,
        BadGroupError,
        ReadOnlyDataSource,
        ReadOnlyError,
    )

__all__ = ("AsyncDataSource", "BadGroupError", "ReadOnlyDataSource", "ReadOnlyError")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from asyncdata.integrations.slime import data_source

    value = globals()[name] = getattr(data_source, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
