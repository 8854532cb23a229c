"""Lists, verifies and removes token caches, for the command line: without a loader, and without Arrow."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.core.file_checks import open_regular
from asyncdata.prefetch.token_cache.folder import ABOUT, is_in_use, segment_files
from asyncdata.prefetch.token_cache.segment import DamagedError, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("Cache", "Fault", "caches", "chosen", "remove", "verify")

_KEY = re.compile(r"[0-9a-f]{32}")


class Fault(NamedTuple):
    """A segment that cannot be read completely."""

    path: str
    reason: str


class Cache(NamedTuple):
    """One token cache: the samples of one tokenize function.

    :ivar about: what the samples depend on.
    :ivar num_rows: rows of the segments, as far as they can be read.
    :ivar used_s: when a segment was last written or read, Unix time in seconds; 0 if there is none.
    """

    key: str
    path: str
    about: dict[str, Any]
    segments: list[str]
    num_bytes: int
    num_rows: int
    num_samples: int
    used_s: float
    is_in_use: bool
    faults: list[Fault]


def caches(root: str) -> list[Cache]:
    """The caches in ``root``, the most recently used last.

    :raises OSError: if the folder cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(root) if _KEY.fullmatch(name))
    except FileNotFoundError:
        return []

    files = list(segment_files(root))
    found = []
    for name in names:
        path = os.path.join(root, name)
        own = [file for file in files if os.path.dirname(file.name) == path]
        found.append(_cache(name, path, own))
    return sorted(found, key=lambda cache: cache.used_s)


def _cache(key: str, path: str, files: Sequence[Any]) -> Cache:
    num_rows, num_samples, faults = 0, 0, []
    for file in files:
        try:
            with closing(Segment(file.name)) as segment:
                for _, _, entry in segment.entries():
                    num_rows, num_samples = num_rows + entry.num_rows, num_samples + entry.num_samples
        except (OSError, DamagedError) as error:
            faults.append(Fault(file.name, str(error)))
    return Cache(
        key=key,
        path=path,
        about=_about(path),
        segments=sorted(file.name for file in files),
        num_bytes=sum(file.num_bytes for file in files),
        num_rows=num_rows,
        num_samples=num_samples,
        used_s=max((file.used_ns for file in files), default=0) / 1e9,
        is_in_use=is_in_use(path),
        faults=faults,
    )


def _about(path: str) -> dict[str, Any]:
    with suppress(OSError, ValueError), open_regular(os.path.join(path, ABOUT)) as file:
        found = json.load(file)
        return found if isinstance(found, dict) else {}

    return {}


def chosen(root: str, keys: Sequence[str]) -> list[Cache]:
    """The caches of these keys, which may be shortened; without keys, all caches.

    :raises ConfigError: for a key that matches no cache, or more than one.
    """
    found = caches(root)
    if not keys:
        return found

    picked = []
    for key in keys:
        matching = [cache for cache in found if cache.key.startswith(key)]
        if len(matching) != 1:
            has = ", ".join(cache.key for cache in (matching or found)) or "none"
            raise ConfigError(f"{len(matching)} token caches in {root} begin with {key!r}; there are {has}")

        picked.append(matching[0])
    return picked


def verify(cache: Cache) -> list[Fault]:
    """Read the whole cache and compare it with its checksums; return the faults."""
    faults = []
    for path in cache.segments:
        try:
            with closing(Segment(path)) as segment:
                segment.verify()
        except (OSError, DamagedError) as error:
            faults.append(Fault(path, str(error)))
    return faults


def remove(cache: Cache) -> None:
    """Remove the cache. Runs that read it tokenize the rows instead.

    :raises ConfigError: if a run is writing to it.
    :raises OSError: if it cannot be removed.
    """
    if is_in_use(cache.path):
        raise ConfigError(f"AD614 a run is writing to {cache.path}; end it first")

    shutil.rmtree(cache.path)
