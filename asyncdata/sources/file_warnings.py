"""Warnings about files that can be read but look wrong, logged once at the start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asyncdata.core.file_refs import ObjectRefs
from asyncdata.core.log import get_logger
from asyncdata.sources.text.compression import CODING_OF_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.sources.base import Blocks
    from asyncdata.sources.stream import RowStream

__all__ = ("warn_about_files",)

_log = get_logger(__name__)
_MAX_PATHS = 5
_CODED = tuple(CODING_OF_SUFFIX)


def warn_about_files(source: Blocks | RowStream) -> None:
    """Log empty files among files with rows, and files whose names suggest another format."""
    paths: Iterable[str]
    empty: list[str] = []  # of objects, that is not said
    if isinstance(source.files, ObjectRefs):
        paths = source.files.paths
    else:
        paths = [file.path for file in source.files]
        empty = [file.path for file in source.files if file.num_bytes == 0 and os.path.isfile(file.path)]
    if empty:
        _log.warning("source.empty", num_files=len(empty), paths=empty[:_MAX_PATHS])
    codings = getattr(source, "codings", ["plain"] * len(source.files))
    for path, coding in zip(paths, codings, strict=True):
        named = CODING_OF_SUFFIX.get(os.path.splitext(path)[1], coding) if path.endswith(_CODED) else coding
        if named != coding and path not in empty:
            _log.warning("source.misnamed", path=path, named=named, coding=coding)
