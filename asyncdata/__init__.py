"""asyncdata: an exactly resumable, prefetching data service for LLM post-training, inside the trainer's process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncdata.core.version import __version__

if TYPE_CHECKING:
    from asyncdata.batching.balance import balance
    from asyncdata.batching.collators.base import Document
    from asyncdata.batching.collators.packed import PackedCollator, XTunerCollator
    from asyncdata.batching.collators.padded import FixedCollator, PaddedCollator, PreferenceCollator
    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.packers import HardPacking, SoftPacking
    from asyncdata.batching.xtuner_packing import XTunerPacking
    from asyncdata.core.columns import Column
    from asyncdata.core.errors import (
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
    from asyncdata.core.types import Group, Position, Sample, SourceLocation, Status
    from asyncdata.delivery.buffer_filters import (
        BalancedByMetadata,
        ByMetadata,
        ByReward,
        ByStaleness,
        Chain,
        has_reward_spread,
        reset_response,
    )
    from asyncdata.delivery.outcomes.policy import Outcomes, OutcomeTable, PassRate
    from asyncdata.delivery.rollout_buffer import first_in_first_out
    from asyncdata.loader.config import BadRows, Cache, Limits, LoaderConfig, Ranks
    from asyncdata.loader.loader import AsyncDataLoader, DataLoader
    from asyncdata.loader.mix import Mix, Part
    from asyncdata.loader.statistics import SourceStatistics, Statistics
    from asyncdata.order.shuffle import RowShuffle, Shuffle
    from asyncdata.sources.arrow.huggingface import HuggingFaceSource
    from asyncdata.sources.arrow.parquet import ParquetSource
    from asyncdata.sources.stream import IterableSource
    from asyncdata.sources.text.jsonl import JsonArraySource, JsonlSource
    from asyncdata.telemetry.settings import Telemetry
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.functions.chat import ChatTokenizeFn
    from asyncdata.tokenization.functions.fixed_length import FixedLengthTokenizeFn
    from asyncdata.tokenization.functions.preference import PreferenceTokenizeFn
    from asyncdata.tokenization.functions.prompt import PromptTokenizeFn
    from asyncdata.tokenization.functions.rendered import RendererTokenizeFn
    from asyncdata.tokenization.functions.text import TextTokenizeFn
    from asyncdata.tokenization.functions.untokenized import RowFn
    from asyncdata.tokenization.pictures.settings import Processor
    from asyncdata.tokenization.user_function import XTunerTokenizeFn
    from asyncdata.workers.ray.settings import RayExecutor

__all__ = (
    "__version__",
    "AsyncDataError",
    "AsyncDataLoader",
    "BadRowError",
    "BadRows",
    "balance",
    "BalancedByMetadata",
    "ByMetadata",
    "ByReward",
    "ByStaleness",
    "Cache",
    "Chain",
    "ChatTokenizeFn",
    "Column",
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
    "has_reward_spread",
    "HuggingFaceSource",
    "InvalidGroupError",
    "IterableSource",
    "JsonArraySource",
    "JsonlSource",
    "LengthGrouping",
    "Limits",
    "LoaderClosedError",
    "LoaderConfig",
    "LoaderForkedError",
    "Mix",
    "NoSamplesError",
    "Outcomes",
    "OutcomeTable",
    "PackedCollator",
    "PaddedCollator",
    "ParquetSource",
    "Part",
    "PassRate",
    "Position",
    "PreferenceCollator",
    "PreferenceTokenizeFn",
    "PrefetchTimeoutError",
    "Processor",
    "PromptTokenizeFn",
    "QuarantineError",
    "Ranks",
    "RayExecutor",
    "RendererTokenizeFn",
    "reset_response",
    "RowFn",
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
    "SourceStatistics",
    "Statistics",
    "Status",
    "Telemetry",
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
    "batching.balance": "balance",
    "batching.collators.base": "Document",
    "batching.collators.packed": "PackedCollator XTunerCollator",
    "batching.collators.padded": "FixedCollator PaddedCollator PreferenceCollator",
    "batching.length_grouping": "LengthGrouping",
    "batching.packers": "HardPacking SoftPacking",
    "batching.xtuner_packing": "XTunerPacking",
    "core.columns": "Column",
    "core.errors": (
        "AsyncDataError BadRowError ConfigError EndOfData FilterError InvalidGroupError LoaderClosedError "
        "LoaderForkedError NoSamplesError PrefetchTimeoutError QuarantineError SnapshotError SnapshotMismatchError "
        "SnapshotVersionError SourceChangedError SourceError TooManyBadRowsError WorkerError"
    ),
    "core.types": "Group Position Sample SourceLocation Status",
    "delivery.buffer_filters": (
        "BalancedByMetadata ByMetadata ByReward ByStaleness Chain has_reward_spread reset_response"
    ),
    "delivery.outcomes.policy": "Outcomes OutcomeTable PassRate",
    "delivery.rollout_buffer": "first_in_first_out",
    "loader.config": "BadRows Cache Limits LoaderConfig Ranks",
    "loader.loader": "AsyncDataLoader DataLoader",
    "loader.mix": "Mix Part",
    "loader.statistics": "SourceStatistics Statistics",
    "order.shuffle": "RowShuffle Shuffle",
    "sources.arrow.huggingface": "HuggingFaceSource",
    "sources.arrow.parquet": "ParquetSource",
    "sources.stream": "IterableSource",
    "sources.text.jsonl": "JsonArraySource JsonlSource",
    "telemetry.settings": "Telemetry",
    "tokenization.base": "TokenizeFn",
    "tokenization.functions.chat": "ChatTokenizeFn",
    "tokenization.functions.fixed_length": "FixedLengthTokenizeFn",
    "tokenization.functions.preference": "PreferenceTokenizeFn",
    "tokenization.functions.prompt": "PromptTokenizeFn",
    "tokenization.functions.rendered": "RendererTokenizeFn",
    "tokenization.functions.text": "TextTokenizeFn",
    "tokenization.functions.untokenized": "RowFn",
    "tokenization.pictures.settings": "Processor",
    "tokenization.user_function": "XTunerTokenizeFn",
    "workers.ray.settings": "RayExecutor",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'asyncdata' has no attribute {name!r}")

    value = getattr(importlib.import_module(f"asyncdata.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
