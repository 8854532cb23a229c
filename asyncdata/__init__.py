"""asyncdata: an exactly resumable, prefetching data service for LLM post-training, inside the trainer's process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncdata.version import __version__

if TYPE_CHECKING:
    from asyncdata.buffer import first_in_first_out
    from asyncdata.collators.base import Document
    from asyncdata.collators.packed import PackedCollator
    from asyncdata.collators.padded import FixedCollator, PaddedCollator
    from asyncdata.collators.xtuner import XTunerCollator
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
    from asyncdata.length_grouping import LengthGrouping
    from asyncdata.loader import AsyncDataLoader, DataLoader
    from asyncdata.order import RowShuffle, Shuffle
    from asyncdata.packing.hard import HardPacking
    from asyncdata.packing.soft import SoftPacking
    from asyncdata.packing.xtuner import XTunerPacking
    from asyncdata.sources.huggingface import HuggingFaceSource
    from asyncdata.sources.iterable import IterableSource
    from asyncdata.sources.jsonl import JsonArraySource, JsonlSource
    from asyncdata.sources.parquet import ParquetSource
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.chat import ChatTokenizeFn
    from asyncdata.tokenization.fixed_length import FixedLengthTokenizeFn
    from asyncdata.tokenization.preference import PreferenceTokenizeFn
    from asyncdata.tokenization.prompt import PromptTokenizeFn
    from asyncdata.tokenization.text import TextTokenizeFn
    from asyncdata.tokenization.xtuner_fn import XTunerTokenizeFn
    from asyncdata.types import Group, Position, Sample, SourceLocation, Status

__all__ = (
    "__version__",
    "AsyncDataError",
    "AsyncDataLoader",
    "BadRowError",
    "ChatTokenizeFn",
    "ConfigError",
    "DataLoader",
    "Document",
    "EndOfData",
    "FilterError",
    "first_in_first_out",
    "FixedCollator",
    "FixedLengthTokenizeFn",
    "Group",
    "HardPacking",
    "HuggingFaceSource",
    "InvalidGroupError",
    "IterableSource",
    "JsonArraySource",
    "JsonlSource",
    "LengthGrouping",
    "LoaderClosedError",
    "LoaderConfig",
    "LoaderForkedError",
    "NoSamplesError",
    "PackedCollator",
    "PaddedCollator",
    "ParquetSource",
    "Position",
    "PreferenceTokenizeFn",
    "PrefetchTimeoutError",
    "PromptTokenizeFn",
    "QuarantineError",
    "RowShuffle",
    "Sample",
    "Shuffle",
    "SnapshotError",
    "SnapshotMismatchError",
    "SnapshotVersionError",
    "SoftPacking",
    "SourceChangedError",
    "SourceError",
    "SourceLocation",
    "Statistics",
    "Status",
    "TextTokenizeFn",
    "TokenizeFn",
    "TooManyBadRowsError",
    "WorkerError",
    "XTunerCollator",
    "XTunerPacking",
    "XTunerTokenizeFn",
)

# A worker imports only the modules it needs, and `import asyncdata` none of them.
_HOMES = {
    "buffer": ("first_in_first_out",),
    "collators.base": ("Document",),
    "collators.packed": ("PackedCollator",),
    "collators.padded": ("FixedCollator", "PaddedCollator"),
    "collators.xtuner": ("XTunerCollator",),
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
    "length_grouping": ("LengthGrouping",),
    "loader": ("AsyncDataLoader", "DataLoader"),
    "order": ("RowShuffle", "Shuffle"),
    "packing.hard": ("HardPacking",),
    "packing.soft": ("SoftPacking",),
    "packing.xtuner": ("XTunerPacking",),
    "sources.huggingface": ("HuggingFaceSource",),
    "sources.iterable": ("IterableSource",),
    "sources.jsonl": ("JsonArraySource", "JsonlSource"),
    "sources.parquet": ("ParquetSource",),
    "tokenization.base": ("TokenizeFn",),
    "tokenization.chat": ("ChatTokenizeFn",),
    "tokenization.fixed_length": ("FixedLengthTokenizeFn",),
    "tokenization.preference": ("PreferenceTokenizeFn",),
    "tokenization.prompt": ("PromptTokenizeFn",),
    "tokenization.text": ("TextTokenizeFn",),
    "tokenization.xtuner_fn": ("XTunerTokenizeFn",),
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
