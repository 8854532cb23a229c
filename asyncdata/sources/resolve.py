"""Resolves what a user passes as ``source`` to a description, and warns of files that look wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, get_logger
from asyncdata.core.identity import ObjectRefs
from asyncdata.sources.base import Blocks, Source
from asyncdata.sources.jsonl import CODING_OF_SUFFIX, JsonlSource
from asyncdata.sources.paths import is_saved_dataset

if TYPE_CHECKING:
    from asyncdata.sources.stream import RowStream

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_log = get_logger(__name__)
_MAX_PATHS = 5
_CODED = tuple(CODING_OF_SUFFIX)


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
        return _hugging_face(path) if is_saved_dataset(os.path.expanduser(path)) else _of_paths(path, [path])

    if isinstance(source, list | tuple) and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [os.fspath(path) for path in source]
        return described(paths[0]) if len(paths) == 1 else _of_paths(paths, paths)

    if isinstance(source, Source):
        return source

    if type(source).__module__.partition(".")[0] == "datasets":
        return _hugging_face(source)

    if isinstance(source, dict):
        raise ConfigError(
            "a dict of sources and weights is no source: mix data sets by Mix({name: Part(path, weight=...), ...})"
        )

    if isinstance(source, Iterable) and not isinstance(source, bytes | AbstractSet):
        raise ConfigError(
            f"a {type(source).__name__} of rows is no source: pass paths of files, or IterableSource(make) with a "
            "function that gives the rows of an epoch, each time from the first, such as lambda epoch: rows"
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

    if not any(kinds.values()):
        return JsonlSource(given)

    from asyncdata.sources.arrow.parquet import ParquetSource

    return ParquetSource(given)


def _is_parquet(path: str) -> bool:
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        return path.endswith(".parquet")

    suffixes = {os.path.splitext(name)[1] for name in os.listdir(path) if not name.startswith(".")}
    if {".jsonl", ".parquet"} <= suffixes:
        raise ConfigError(f"the folder {path} holds *.jsonl and *.parquet; say which with {path}/*.parquet")

    return ".parquet" in suffixes


def warn_about_files(source: Blocks | RowStream) -> None:
    """Log empty files among files with rows, files that begin with no row, and misleading names."""
    paths: Iterable[str]
    empty: list[str] = []  # of objects, that is not said
    if isinstance(source.files, ObjectRefs):
        paths = source.files.paths
    else:
        paths = [file.path for file in source.files]
        empty = [file.path for file in source.files if file.num_bytes == 0 and os.path.isfile(file.path)]
    if empty:
        _log.warning("source.empty", num_files=len(empty), paths=empty[:_MAX_PATHS])
    for path, num_rows in getattr(source, "undecoded", ()):
        _log.warning("source.undecoded", path=path, num_rows=num_rows)
    codings = getattr(source, "codings", ["plain"] * len(source.files))
    for path, coding in zip(paths, codings, strict=True):
        named = CODING_OF_SUFFIX.get(os.path.splitext(path)[1], coding) if path.endswith(_CODED) else coding
        if named != coding and path not in empty:
            _log.warning("source.misnamed", path=path, named=named, coding=coding)


def _hugging_face(source: Any) -> Source:
    from asyncdata.sources.arrow.huggingface import HuggingFaceSource

    return HuggingFaceSource(source)
