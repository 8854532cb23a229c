"""``asyncdata cache``: which samples and row indexes are kept, whether they are whole, and a way to be rid of them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from asyncdata.commands.output import printable, shown_path, si, table
from asyncdata.errors import ConfigError
from asyncdata.index_eviction import kept_indexes, remove_index
from asyncdata.index_file import cache_folder
from asyncdata.token_cache.folder import default_root
from asyncdata.token_cache.inventory import caches, chosen, remove, verify

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from asyncdata.commands.output import Output
    from asyncdata.index_eviction import KeptIndex
    from asyncdata.token_cache.inventory import Cache

__all__ = ("ls", "rm", "run_verify")

_SHORT = 12


def ls(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache ls``."""
    if args.row_index:
        _ls_indexes(args, output)
        return 0

    found = caches(_root(args))
    if output.as_json:
        output.json([_record(cache) for cache in found])
    elif found:
        heading = ("key", "segments", "rows", "samples", "bytes", "last used", "in use", "tokenize_fn")
        output.data(table([heading, *map(_row, found)]))
    else:
        output.say(f"no token cache in {shown_path(_root(args))}")
    return 0


def _root(args: argparse.Namespace) -> str:
    return str(args.dir) if args.dir is not None else default_root()


def _row(cache: Cache) -> tuple[str, ...]:
    damaged = f" ({len(cache.faults)} damaged)" if cache.faults else ""
    return (
        cache.key[:_SHORT],
        f"{len(cache.segments):,}{damaged}",
        f"{cache.num_rows:,}",
        f"{cache.num_samples:,}",
        si(cache.num_bytes),
        _when(cache.used_s),
        "yes" if cache.is_in_use else "no",
        printable(str(cache.about.get("function", {}).get("tokenize_fn", "unknown"))),
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"


def _record(cache: Cache) -> dict[str, Any]:
    record = cache._asdict()
    record["faults"] = [fault._asdict() for fault in cache.faults]
    return record


def run_verify(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache verify``."""
    found = {cache.key: verify(cache) for cache in chosen(_root(args), args.key)}
    faults = [fault for faults in found.values() for fault in faults]
    if output.as_json:
        output.json({key: [fault._asdict() for fault in faults] for key, faults in found.items()})
    else:
        for fault in faults:
            output.data(f"{shown_path(fault.path)}: {printable(fault.reason)}")
        output.say(f"{len(found)} token caches: {len(faults) or 'no'} damaged segments")
    return 1 if faults else 0


def rm(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache rm``."""
    if bool(args.key) == args.all:
        raise ConfigError("name the caches that are to go, or say --all")

    if args.row_index:
        _rm_indexes(args, output)
        return 0

    removed = chosen(_root(args), args.key)
    for cache in removed:
        remove(cache)
    _say_removed(output, "token caches", [cache.key for cache in removed], sum(cache.num_bytes for cache in removed))
    return 0


def _say_removed(output: Output, what: str, keys: list[str], num_bytes: int) -> None:
    if output.as_json:
        output.json({"removed": keys, "num_bytes": num_bytes})
    else:
        output.data(f"removed {len(keys)} {what}, {si(num_bytes)}B")


# Row indexes


def _index_root(args: argparse.Namespace) -> str:
    return str(args.dir) if args.dir is not None else os.path.join(cache_folder(), "index")


def _ls_indexes(args: argparse.Namespace, output: Output) -> None:
    root = _index_root(args)
    found = kept_indexes(root)
    if output.as_json:
        output.json([{"key": index.identity, **_facts(index)} for index in found])
    elif found:
        rows = [(index.identity[:_SHORT], si(index.num_bytes), _when(index.used_ns / 1e9)) for index in found]
        output.data(table([("key", "bytes", "last used"), *rows]))
    else:
        output.say(f"no row index in {shown_path(root)}")


def _facts(index: KeptIndex) -> dict[str, Any]:
    return {"num_bytes": index.num_bytes, "used_s": index.used_ns / 1e9}


def _rm_indexes(args: argparse.Namespace, output: Output) -> None:
    root = _index_root(args)
    removed = _chosen_indexes(root, args.key)
    for index in removed:
        if not remove_index(root, index.identity):
            raise ConfigError(f"AD614 a run is using {os.path.join(root, index.identity)}; end it first")

    num_bytes = sum(index.num_bytes for index in removed)
    _say_removed(output, "row indexes", [index.identity for index in removed], num_bytes)


def _chosen_indexes(root: str, keys: Sequence[str]) -> list[KeptIndex]:
    """The indexes of these keys, which may be shortened; of none, all."""
    found = kept_indexes(root)
    picked = []
    for key in keys:
        matching = [index for index in found if index.identity.startswith(key)]
        if len(matching) != 1:
            raise ConfigError(f"{len(matching)} row indexes in {root} begin with {key!r}; asyncdata cache ls has them")

        picked.append(matching[0])
    return picked if keys else found
