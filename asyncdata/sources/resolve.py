"""Resolves what a user passes as ``source`` (paths, a Hugging Face dataset ...) to a description."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.sources.arrow.huggingface import HuggingFaceSource, is_saved_dataset
from asyncdata.sources.arrow.parquet import ParquetSource
from asyncdata.sources.base import Source
from asyncdata.sources.text.jsonl import JsonlSource

__all__ = ("Paths", "described")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def described(source: Source | Paths | Any) -> Source:
    """The description of the source.

    Paths that end in ``.parquet`` are Parquet, and a folder is what it contains: a dataset that ``save_to_disk`` wrote,
    ``*.jsonl``, or ``*.parquet``. All other paths are JSONL.

    :raises ConfigError: if it is not a source, or is ambiguous.
    """
    if isinstance(source, type):
        raise ConfigError(f"the source is the class {source.__name__}; pass an instance: {source.__name__}(...)")

    # In this order: a Path has an open(), as a Source has.
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return HuggingFaceSource(path) if is_saved_dataset(os.path.expanduser(path)) else _of_paths(path, [path])

    if isinstance(source, list | tuple) and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [os.fspath(path) for path in source]
        return described(paths[0]) if len(paths) == 1 else _of_paths(paths, paths)

    if isinstance(source, Source):
        return source

    if type(source).__module__.partition(".")[0] == "datasets":
        return HuggingFaceSource(source)

    if isinstance(source, dict):
        raise ConfigError(
            "a dict of sources and weights is no source: mix data sets by Mix({name: Part(path, weight=...), ...})"
        )

    raise ConfigError(
        "a source is a path, a list of paths, a JsonlSource, a ParquetSource, a HuggingFaceSource, a Mix, or a dataset "
        f"of Hugging Face; got {type(source).__name__}"
    )


def _of_paths(given: str | list[str], paths: list[str]) -> Source:
    kinds = {path: _is_parquet(path) for path in paths}
    if len(set(kinds.values())) > 1:
        one, other = (next(path for path, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        raise ConfigError(f"{one} is Parquet and {other} is not; the rows of a source are all in one format")

    return ParquetSource(given) if any(kinds.values()) else JsonlSource(given)


def _is_parquet(path: str) -> bool:
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        return path.endswith(".parquet")

    suffixes = {os.path.splitext(name)[1] for name in os.listdir(path)}
    if {".jsonl", ".parquet"} <= suffixes:
        raise ConfigError(f"the folder {path} holds *.jsonl and *.parquet; say which with {path}/*.parquet")

    return ".parquet" in suffixes
