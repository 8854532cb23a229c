"""``asyncdata cache``: lists, checks and removes token caches and row indexes.

Token caches need packages that row indexes do not, so their modules are imported only when they are used.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from asyncdata.cli.output import shown_path, table
from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.errors import ConfigError, printable
from asyncdata.prefetch.row_index.index_file import kept_indexes, remove_index
from asyncdata.report.charts import short

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace

    from asyncdata.cli.output import Output
    from asyncdata.core.cache_dir import CacheEntry
    from asyncdata.prefetch.token_cache.inventory import Cache

__all__ = ("cache_ls", "cache_rm", "cache_verify")

_SHORT = 12


def cache_ls(args: SimpleNamespace, output: Output) -> int:
    """``asyncdata cache ls``."""
    if args.row_index:
        root, what = _index_root(args), "row index"
        indexes = kept_indexes(root)
        records = [
            {"key": index.name, "num_bytes": index.num_bytes, "used_s": index.used_ns / 1e9} for index in indexes
        ]
        head: tuple[str, ...] = ("key", "bytes", "last used")
        rows: list[tuple[str, ...]] = [
            (index.name[:_SHORT], short(index.num_bytes), _when(index.used_ns / 1e9)) for index in indexes
        ]
    else:
        from asyncdata.prefetch.token_cache.inventory import caches

        root, what = _cache_root(args), "token cache"
        found = caches(root)
        records = [cache._asdict() | {"faults": [fault._asdict() for fault in cache.faults]} for cache in found]
        head = ("key", "segments", "rows", "samples", "bytes", "last used", "in use", "tokenize_fn")
        rows = [_row(cache) for cache in found]
    if output.as_json:
        output.json(records)
    elif rows:
        output.data(table([head, *rows]))
    else:
        output.say(f"no {what} in {shown_path(root)}")
    return 0


def _cache_root(args: SimpleNamespace) -> str:
    from asyncdata.prefetch.token_cache.folder import default_root

    return str(args.dir) if args.dir is not None else default_root()


def _index_root(args: SimpleNamespace) -> str:
    return str(args.dir) if args.dir is not None else os.path.join(cache_folder(), "index")


def _when(seconds: float) -> str:
    """A Unix time as text; 0 is "never"."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"


def _row(cache: Cache) -> tuple[str, ...]:
    damaged = f" ({len(cache.faults)} damaged)" if cache.faults else ""
    return (
        cache.key[:_SHORT],
        f"{len(cache.segments):,}{damaged}",
        f"{cache.num_rows:,}",
        f"{cache.num_samples:,}",
        short(cache.num_bytes),
        _when(cache.used_s),
        "yes" if cache.is_in_use else "no",
        printable(str(cache.about.get("function", {}).get("tokenize_fn", "unknown"))),
    )


def cache_verify(args: SimpleNamespace, output: Output) -> int:
    """``asyncdata cache verify``."""
    from asyncdata.prefetch.token_cache.inventory import chosen, verify

    found = {cache.key: verify(cache) for cache in chosen(_cache_root(args), args.key)}
    faults = [fault for faults in found.values() for fault in faults]
    if output.as_json:
        output.json({key: [fault._asdict() for fault in faults] for key, faults in found.items()})
    else:
        for fault in faults:
            output.data(f"{shown_path(fault.path)}: {printable(fault.reason)}")
        output.say(f"{len(found)} token caches: {len(faults) or 'no'} damaged segments")
    return 1 if faults else 0


def cache_rm(args: SimpleNamespace, output: Output) -> int:
    """``asyncdata cache rm``."""
    if bool(args.key) == args.all:
        raise ConfigError("name the caches to remove, or pass --all")

    removed = _removed_indexes(args) if args.row_index else _removed_caches(args)
    what, num_bytes = "row indexes" if args.row_index else "token caches", sum(removed.values())
    text = f"removed {len(removed)} {what}, {short(num_bytes)}B"
    output.put({"removed": list(removed), "num_bytes": num_bytes}, lambda _: text)
    return 0


def _removed_caches(args: SimpleNamespace) -> dict[str, int]:
    """Remove the chosen caches: their keys, and the bytes of each."""
    from asyncdata.prefetch.token_cache.inventory import chosen, remove

    caches = chosen(_cache_root(args), args.key)
    for cache in caches:
        remove(cache)
    return {cache.key: cache.num_bytes for cache in caches}


def _removed_indexes(args: SimpleNamespace) -> dict[str, int]:
    """Remove the chosen row indexes: their keys, and the bytes of each."""
    root = _index_root(args)
    indexes = _chosen_indexes(root, args.key)
    for index in indexes:
        if not remove_index(root, index.name):
            raise ConfigError(f"AD614 a run is using {os.path.join(root, index.name)}; end it first")

    return {index.name: index.num_bytes for index in indexes}


def _chosen_indexes(root: str, keys: Sequence[str]) -> list[CacheEntry]:
    """The indexes of these keys, which may be shortened; without keys, all."""
    found = kept_indexes(root)
    matching = {key: [index for index in found if index.name.startswith(key)] for key in keys}
    for key, indexes in matching.items():
        if len(indexes) != 1:
            raise ConfigError(f"{len(indexes)} row indexes in {root} begin with {key!r}; asyncdata cache ls has them")

    return [index for indexes in matching.values() for index in indexes] if keys else found
