"""asyncdata: an exactly resumable, prefetching data service for LLM post-training, inside the trainer's process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncdata.version import __version__

if TYPE_CHECKING:
    from asyncdata.buffer import first_in_first_out
    from asyncdata.config import LoaderConfig
    from asyncdata.diagnostics import Statistics
    from asyncdata.errors import (
        AsyncDataError,
        BadRowError,
        ConfigError,
        EndOfData,
        FilterError,
        InvalidGroupError,
        LoaderClosedError,
        LoaderForkedError,
        NoSamplesError,
        PrefetchTimeoutError,
        QuarantineError,
        SnapshotError,
        SnapshotMismatchError,
        SnapshotVersionError,
        SourceChangedError,
        SourceError,
        TooManyBadRowsError,
        WorkerError,
    )
    from asyncdata.loader import AsyncDataLoader, DataLoader
    from asyncdata.order import RowShuffle, Shuffle
    from asyncdata.sources.jsonl import JsonlSource
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.prompt import PromptTokenizeFn
    from asyncdata.types import Group, Position, Sample, SourceLocation, Status

__all__ = (
    "__version__",
    "AsyncDataError",
    "AsyncDataLoader",
    "BadRowError",
    "ConfigError",
    "DataLoader",
    "EndOfData",
    "FilterError",
    "first_in_first_out",
    "Group",
    "InvalidGroupError",
    "JsonlSource",
    "LoaderClosedError",
    "LoaderConfig",
    "LoaderForkedError",
    "NoSamplesError",
    "Position",
    "PrefetchTimeoutError",
    "PromptTokenizeFn",
    "QuarantineError",
    "RowShuffle",
    "Sample",
    "Shuffle",
    "SnapshotError",
    "SnapshotMismatchError",
    "SnapshotVersionError",
    "SourceChangedError",
    "SourceError",
    "SourceLocation",
    "Statistics",
    "Status",
    "TokenizeFn",
    "TooManyBadRowsError",
    "WorkerError",
)

# A worker imports only the modules it needs, and `import asyncdata` none of them.
_HOMES = {
    "buffer": ("first_in_first_out",),
    "config": ("LoaderConfig",),
    "diagnostics": ("Statistics",),
    "errors": (
        "AsyncDataError",
        "BadRowError",
        "ConfigError",
        "EndOfData",
        "FilterError",
        "InvalidGroupError",
        "LoaderClosedError",
        "LoaderForkedError",
        "NoSamplesError",
        "PrefetchTimeoutError",
        "QuarantineError",
        "SnapshotError",
        "SnapshotMismatchError",
        "SnapshotVersionError",
        "SourceChangedError",
        "SourceError",
        "TooManyBadRowsError",
        "WorkerError",
    ),
    "loader": ("AsyncDataLoader", "DataLoader"),
    "order": ("RowShuffle", "Shuffle"),
    "sources.jsonl": ("JsonlSource",),
    "tokenization.base": ("TokenizeFn",),
    "tokenization.prompt": ("PromptTokenizeFn",),
    "types": ("Group", "Position", "Sample", "SourceLocation", "Status"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'asyncdata' has no attribute {name!r}")

    value = getattr(importlib.import_module(f"asyncdata.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
