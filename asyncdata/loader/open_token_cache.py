"""Opens the token cache that a loader's settings ask for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.cache_messages import CacheJob
from asyncdata.core.errors import ConfigError
from asyncdata.core.log import get_logger
from asyncdata.core.version import __version__
from asyncdata.sources.base import NumberedBlocks
from asyncdata.tokenization.base import TokenizeFn, fingerprints_of

if TYPE_CHECKING:
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.token_cache.cache import TokenCache
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.sources.base import Blocks
    from asyncdata.workers.base import Executor

__all__ = ("CachedJob", "cache_of", "check_streamed", "root_of", "warn_rows_not_cached")

_log = get_logger(__name__)
_ROOM = 7
"""Bytes of a slot for a block's samples, per byte of its text: enough for one token per character, and the text again.

Only the bytes that are used take memory.
"""
_MAX_SLOT_BYTES = (1 << 31) - 1
_NEEDED = ("pyarrow", "xxhash")


class CachedJob:
    """The workers' job, and the token cache if there is one.

    :ivar cache: the cache; None without one, and before :meth:`open`.
    """

    def __init__(self, job: Job, files: Blocks, folder: CacheFolder | None, max_bytes: int | None) -> None:
        self.job = job
        self.cache: TokenCache | None = None
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
        self.cache = TokenCache(files, files.num_blocks, self._folder, executor, self._max_bytes, room)
        self.cache.reads_in_place = not job.with_token_sums
        return self.cache

    def close(self) -> None:
        """Let another process write."""
        if self._folder is not None:
            self._folder.close()


def cache_of(files: Blocks, job: Job, max_window_blocks: int, config: LoaderConfig, function: Any) -> CachedJob:
    """The job with the token cache that ``config`` asks for.

    :raises ConfigError: if the cache cannot be opened.
    """
    if config.cache.tokens:
        _check_installed()
    root = root_of(config)
    reason = _why_not(files, function) if root else ""
    if reason:
        _log.warning("token_cache.off", reason=reason)
    if not root or reason or not isinstance(files, NumberedBlocks):
        return CachedJob(job, files, None, None)

    from asyncdata.prefetch.token_cache.folder import CacheFolder, about_of

    limits = {"block_bytes": job.block_bytes, "slack_bytes": job.slack_bytes, "max_row_bytes": job.max_row_bytes}
    about = about_of(_fingerprints(function), job.reader.identity, job.reader.settings, **limits)
    try:
        folder = CacheFolder(root, about)
    except OSError as error:
        raise ConfigError(
            f"AD612 the token cache cannot be opened: {error.filename or root}: {error.strerror or error}; set "
            "Cache(tokens=...) to a folder that can be written, or to False"
        ) from error

    room = min(_ROOM * job.block_bytes, _MAX_SLOT_BYTES // max_window_blocks - job.text_bytes)
    cache = CacheJob(folder.path, files.cached_files(), max(0, room))
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


def _why_not(files: Blocks, function: Any) -> str:
    if not isinstance(function, TokenizeFn) and getattr(function, "version", None) is None:
        return "the tokenize function has no fingerprint: give it a version, as in `tokenize.version = 1`"

    if not isinstance(files, NumberedBlocks):
        return f"{type(files).__name__} has no numbers() and cached_files(), by which blocks are known again"

    return ""


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Cache(tokens=...) needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _fingerprints(function: Any) -> dict[str, str]:
    """What samples depend on: the function's own fingerprints, and the versions of the libraries that it uses."""
    versions = {"asyncdata": __version__, "tokenizers": importlib.metadata.version("tokenizers")}
    return {**fingerprints_of(function), **versions}


def check_streamed(config: LoaderConfig, path: str) -> None:
    """Refuse a token cache for a source that can only be read from front to back.

    :raises ConfigError: if ``config`` asks for a token cache.
    """
    if root_of(config):
        raise ConfigError(
            f"AD613 {path} can only be read from front to back, so that its rows have no blocks by which the token "
            "cache could find them again: decompress or convert the data, or leave Cache(tokens=...) out"
        )


def warn_rows_not_cached(config: LoaderConfig) -> None:
    """Warn that the token cache is off, as an order of single rows reads no blocks."""
    if root_of(config):
        _log.warning("token_cache.off", reason="rows ordered one by one are not cached; those of shuffle=True are")
