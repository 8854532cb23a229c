"""Opens the token cache that a loader's settings ask for."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.cache_messages import CacheJob
from asyncdata.core.errors import ConfigError
from asyncdata.core.log import get_logger
from asyncdata.core.version import __version__
from asyncdata.sources.base import KnownFiles, NumberedBlocks
from asyncdata.tokenization.base import fingerprints_of, has_fingerprint

if TYPE_CHECKING:
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.row_index.row_index import RowIndex
    from asyncdata.prefetch.token_cache.cache import TokenCache
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.prefetch.token_cache.row_cache import RowCache
    from asyncdata.sources.base import Blocks
    from asyncdata.sources.stream import RowStream
    from asyncdata.workers.base import Executor

__all__ = ("CachedJob", "cache_of", "library_versions", "root_of", "row_cache_of", "stream_cache_of")

_log = get_logger(__name__)
_ROOM = 7
"""Bytes of a slot for a block's samples, per byte of its text: enough for one token per character, and the text again.

Only the bytes that are used take memory.
"""
_MAX_SLOT_BYTES = (1 << 31) - 1
_NEEDED = ("pyarrow", "xxhash")


class CachedJob:
    """The workers' job, and the folder of the token cache if there is one."""

    def __init__(self, job: Job, files: Blocks, folder: CacheFolder | None, max_bytes: int | None) -> None:
        self.job = job
        self._files = files
        self._folder = folder
        self._max_bytes = max_bytes

    def open(self, executor: Executor) -> TokenCache | None:
        """Open the cache, with the executor that reads and writes it."""
        files, job = self._files, self.job
        if self._folder is None or job.cache is None or not isinstance(files, NumberedBlocks):
            return None

        from asyncdata.prefetch.token_cache.cache import TokenCache

        room = job.cache.room_bytes
        cache = TokenCache(files, files.num_blocks, self._folder, executor, self._max_bytes, room)
        cache.reads_in_place = not job.with_token_sums
        return cache

    def open_rows(self, executor: Executor, index: RowIndex | None = None) -> RowCache | None:
        """Open the cache of single rows: of an order over ``index``, or of a stream."""
        if self._folder is None:
            return None

        from asyncdata.prefetch.token_cache.row_cache import IndexNumbers, RowCache, StreamNumbers

        numbers = StreamNumbers() if index is None else IndexNumbers(index, len(self._files.files))
        return RowCache(numbers, self._folder, executor, self._max_bytes)

    def close(self) -> None:
        """Let another process write."""
        if self._folder is not None:
            self._folder.close()


def cache_of(files: Blocks, job: Job, max_window_blocks: int, config: LoaderConfig, function: Any) -> CachedJob:
    """The job with the token cache that ``config`` asks for.

    :raises ConfigError: if the cache cannot be opened.
    """
    limits = {"block_bytes": job.block_bytes, "slack_bytes": job.slack_bytes, "max_row_bytes": job.max_row_bytes}
    room = min(_ROOM * job.block_bytes, _MAX_SLOT_BYTES // max_window_blocks - job.text_bytes)
    return _cached_job(files, job, config, function, limits, max(0, room))


def row_cache_of(files: Blocks, job: Job, config: LoaderConfig, function: Any, kind: str = "rows") -> CachedJob:
    """The same for an order of rows, or for a stream, which numbers its rows in another way.

    :param kind: ``rows`` or ``stream``.
    """
    return _cached_job(files, job, config, function, {kind: 1, "max_row_bytes": job.max_row_bytes}, 0, has_rows=True)


def stream_cache_of(stream: RowStream, job: Job, config: LoaderConfig, function: Any) -> CachedJob:
    """The same for a stream.

    :raises ConfigError: if ``config`` asks for a cache, and the stream's rows cannot be known again.
    """
    if root_of(config) and not isinstance(stream, KnownFiles):
        raise ConfigError(
            f"AD613 {stream.files[0].path} has no files whose content could be compared, so that the token cache could "
            "not know its rows again: convert the data to files, or leave Cache(tokens=...) out"
        )

    return row_cache_of(stream, job, config, function, "stream")


def _cached_job(
    files: Blocks,
    job: Job,
    config: LoaderConfig,
    function: Any,
    limits: dict[str, int],
    room_bytes: int,
    *,
    has_rows: bool = False,
) -> CachedJob:
    if config.cache.tokens:
        _check_installed()
    root = root_of(config)
    reason = _why_not(files, function, KnownFiles if has_rows else NumberedBlocks) if root else ""
    if reason:
        _log.warning("token_cache.off", reason=reason)
    if not root or reason or not isinstance(files, KnownFiles):
        return CachedJob(job, files, None, None)

    from asyncdata.prefetch.token_cache.folder import CacheFolder, about_of
    from asyncdata.prefetch.token_cache.segment.layout import ROWS_SUFFIX, SUFFIX

    about = about_of(_fingerprints(function), job.reader.identity, job.reader.settings, **limits)
    try:
        folder = CacheFolder(root, about, ROWS_SUFFIX if has_rows else SUFFIX)
    except OSError as error:
        raise ConfigError(
            f"AD612 the token cache cannot be opened: {error.filename or root}: {error.strerror or error}; set "
            "Cache(tokens=...) to a folder that can be written, or to False"
        ) from error

    cache = CacheJob(folder.path, files.cached_files(), room_bytes, has_rows)
    return CachedJob(msgspec.structs.replace(job, cache=cache), files, folder, config.cache.max_tokens_bytes)


def root_of(config: LoaderConfig) -> str:
    """The folder of all token caches that ``config`` names; empty without a cache."""
    if isinstance(config.cache.tokens, str) and config.cache.tokens:
        return os.path.expanduser(config.cache.tokens)

    if config.cache.tokens is not True:
        return ""

    if config.cache.folder:
        return os.path.join(config.cache.folder, "tokens")

    from asyncdata.prefetch.token_cache.folder import default_root

    return default_root()


def _why_not(files: Blocks, function: Any, needed: type) -> str:
    if not has_fingerprint(function):
        return "the tokenize function has no fingerprint: give it a version, as in `tokenize.version = 1`"

    if not isinstance(files, needed):
        return f"{type(files).__name__} has no numbers() and cached_files(), by which blocks are known again"

    return ""


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Cache(tokens=...) needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _fingerprints(function: Any) -> dict[str, str]:
    """What samples depend on: the function's own fingerprints, and the versions of the libraries that it uses."""
    return {**fingerprints_of(function), **library_versions()}


def library_versions() -> dict[str, str]:
    """The versions of the libraries that samples depend on."""
    from importlib.metadata import version  # its import takes 20 ms

    return {"asyncdata": __version__, "tokenizers": version("tokenizers")}
