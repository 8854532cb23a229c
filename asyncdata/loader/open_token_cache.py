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
from asyncdata.sources.base import NumberedBlocks
from asyncdata.tokenization.base import fingerprints_of, has_fingerprint

if TYPE_CHECKING:
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.token_cache.cache import TokenCache
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.sources.base import Blocks
    from asyncdata.workers.base import Executor

__all__ = ("CachedJob", "cache_of", "library_versions", "root_of", "warn_uncached")

_log = get_logger(__name__)
_NEEDED = ("pyarrow", "xxhash")


class CachedJob:
    """The workers' job, and the folder of the token cache if there is one."""

    def __init__(self, job: Job, files: Blocks, folder: CacheFolder | None) -> None:
        self.job = job
        self._files = files
        self._folder = folder

    def open(self, executor: Executor) -> TokenCache | None:
        """Open the cache, with the executor that reads and writes it."""
        files, job = self._files, self.job
        if self._folder is None or job.cache is None or not isinstance(files, NumberedBlocks):
            return None

        from asyncdata.prefetch.token_cache.cache import TokenCache
        from asyncdata.prefetch.token_cache.catalog import Catalog, RowCatalog

        catalog = RowCatalog(files) if job.cache.has_rows else Catalog(files)
        return TokenCache(catalog, self._folder, executor, job.cache.max_bytes)

    def close(self) -> None:
        """Let another process write."""
        if self._folder is not None:
            self._folder.close()


def cache_of(files: Blocks, job: Job, config: LoaderConfig, function: Any, *, has_rows: bool = False) -> CachedJob:
    """The job with the token cache that ``config`` asks for.

    :param has_rows: whether rows are asked for one by one.
    :raises ConfigError: if the cache cannot be opened.
    """
    if config.cache.tokens:
        _check_installed()
    root = root_of(config)
    reason = _why_not(files, function) if root else ""
    if reason:
        _log.warning("token_cache.off", reason=reason)
    if not root or reason or not isinstance(files, NumberedBlocks):
        return CachedJob(job, files, None)

    from asyncdata.prefetch.token_cache.folder import CacheFolder, about_of

    about = about_of(
        {**fingerprints_of(function), **library_versions()},
        job.reader.identity,
        job.reader.settings,
        max_row_bytes=job.max_row_bytes,
    )
    try:
        folder = CacheFolder(root, about)
    except OSError as error:
        raise ConfigError(
            f"AD612 the token cache cannot be opened: {error.filename or root}: {error.strerror or error}; set "
            "Cache(tokens=...) to a folder that can be written, or to False"
        ) from error

    limit = config.cache.max_tokens_bytes
    cache = CacheJob(folder.path, files.cached_files(), limit, folder.since_ns, has_rows)
    return CachedJob(msgspec.structs.replace(job, cache=cache), files, folder)


def warn_uncached(config: LoaderConfig, reason: str) -> None:
    """Log that rows are not cached, though ``config`` asks for it."""
    if config.cache.tokens:
        _check_installed()
        _log.warning("token_cache.off", reason=reason)


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
    if not has_fingerprint(function):
        return "the tokenize function has no fingerprint: give it a version, as in `tokenize.version = 1`"

    if not isinstance(files, NumberedBlocks):
        return f"{type(files).__name__} has no numbers() and cached_files(), by which blocks are known again"

    return ""


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Cache(tokens=...) needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def library_versions() -> dict[str, str]:
    """The versions of the libraries that samples depend on."""
    from importlib.metadata import version  # its import takes 20 ms

    return {"asyncdata": __version__, "tokenizers": version("tokenizers")}
