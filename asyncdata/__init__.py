"""asyncdata: an exactly resumable, prefetching data service for LLM post-training, inside the trainer's process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncdata.core import __version__

if TYPE_CHECKING:
    from asyncdata import errors as errors
    from asyncdata import filters as filters
    from asyncdata import xtuner as xtuner
    from asyncdata.batching.collators import Document, FixedCollator, PaddedCollator, PreferenceCollator
    from asyncdata.batching.length_grouping import LengthGrouping, balance
    from asyncdata.batching.packed_collator import PackedCollator
    from asyncdata.batching.packers import HardPacking, SoftPacking
    from asyncdata.core.columns import Column
    from asyncdata.core.types import Group, Position, Sample, SourceLocation, Status
    from asyncdata.delivery.outcome_policy import Outcomes, OutcomeTable, PassRate
    from asyncdata.loader.config import BadRows, Cache, Limits, LoaderConfig, Ranks
    from asyncdata.loader.loader import AsyncDataLoader, DataLoader
    from asyncdata.loader.mix import Mix, Part
    from asyncdata.loader.statistics import SourceStatistics, Statistics
    from asyncdata.order.shuffle import RowShuffle, Shuffle
    from asyncdata.sources.arrow.huggingface import HuggingFaceSource
    from asyncdata.sources.arrow.parquet import ParquetSource
    from asyncdata.sources.jsonl import JsonArraySource, JsonlSource
    from asyncdata.sources.stream import IterableSource
    from asyncdata.telemetry.settings import Telemetry
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.functions.chat import ChatTokenizeFn, PreferenceTokenizeFn, RendererTokenizeFn
    from asyncdata.tokenization.functions.fixed_length import FixedLengthTokenizeFn
    from asyncdata.tokenization.functions.prompt import PromptTokenizeFn
    from asyncdata.tokenization.functions.text import TextTokenizeFn
    from asyncdata.tokenization.functions.untokenized import RowFn
    from asyncdata.tokenization.pictures.settings import Processor
    from asyncdata.workers.ray import RayExecutor

__all__ = (
    "__version__",
    "AsyncDataLoader",
    "BadRows",
    "balance",
    "Cache",
    "ChatTokenizeFn",
    "Column",
    "DataLoader",
    "Document",
    "FixedCollator",
    "FixedLengthTokenizeFn",
    "Group",
    "HardPacking",
    "HuggingFaceSource",
    "IterableSource",
    "JsonArraySource",
    "JsonlSource",
    "LengthGrouping",
    "Limits",
    "LoaderConfig",
    "Mix",
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
    "Processor",
    "PromptTokenizeFn",
    "Ranks",
    "RayExecutor",
    "RendererTokenizeFn",
    "RowFn",
    "RowShuffle",
    "Sample",
    "Shuffle",
    "SoftPacking",
    "SourceLocation",
    "SourceStatistics",
    "Statistics",
    "Status",
    "Telemetry",
    "TextTokenizeFn",
    "TokenizeFn",
)

# A worker imports only the modules it needs, and `import asyncdata` none of them.
_HOMES = {
    "batching.length_grouping": "balance LengthGrouping",
    "batching.collators": "Document FixedCollator PaddedCollator PreferenceCollator",
    "batching.packed_collator": "PackedCollator",
    "batching.packers": "HardPacking SoftPacking",
    "core.columns": "Column",
    "core.types": "Group Position Sample SourceLocation Status",
    "delivery.outcome_policy": "Outcomes OutcomeTable PassRate",
    "loader.config": "BadRows Cache Limits LoaderConfig Ranks",
    "loader.loader": "AsyncDataLoader DataLoader",
    "loader.mix": "Mix Part",
    "loader.statistics": "SourceStatistics Statistics",
    "order.shuffle": "RowShuffle Shuffle",
    "sources.arrow.huggingface": "HuggingFaceSource",
    "sources.arrow.parquet": "ParquetSource",
    "sources.stream": "IterableSource",
    "sources.jsonl": "JsonArraySource JsonlSource",
    "telemetry.settings": "Telemetry",
    "tokenization.base": "TokenizeFn",
    "tokenization.functions.chat": "ChatTokenizeFn PreferenceTokenizeFn RendererTokenizeFn",
    "tokenization.functions.fixed_length": "FixedLengthTokenizeFn",
    "tokenization.functions.prompt": "PromptTokenizeFn",
    "tokenization.functions.text": "TextTokenizeFn",
    "tokenization.functions.untokenized": "RowFn",
    "tokenization.pictures.settings": "Processor",
    "workers.ray": "RayExecutor",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

_MODULES = ("errors", "filters", "xtuner")
"""They need no import of their own."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"asyncdata.{name}")

    if name not in _HOME_OF:
        raise AttributeError(f"module 'asyncdata' has no attribute {name!r}")

    value = getattr(importlib.import_module(f"asyncdata.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_MODULES))
