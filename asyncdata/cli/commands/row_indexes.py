"""``asyncdata cache`` without what needs the token cache's packages: row indexes, which every installation has."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from asyncdata.cli.output import shown_path, si, table
from asyncdata.errors import ConfigError
from asyncdata.import_path import resolve_path
from asyncdata.index_eviction import kept_indexes, remove_index
from asyncdata.index_file import cache_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from asyncdata.cli.output import Output
    from asyncdata.index_eviction import KeptIndex

__all__ = ("ls", "rm", "say_removed", "when")

_SHORT = 12


def ls(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache ls``."""
    if not args.row_index:
        status: int = resolve_path("asyncdata.cli.commands.cache:ls")(args, output)
        return status

    _ls_indexes(args, output)
    return 0


def rm(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache rm``."""
    if bool(args.key) == args.all:
        raise ConfigError("name the caches that are to go, or say --all")

    if not args.row_index:
        status: int = resolve_path("asyncdata.cli.commands.cache:rm")(args, output)
        return status

    _rm_indexes(args, output)
    return 0


def when(seconds: float) -> str:
    """A Unix time for people; 0 is never."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"


def say_removed(output: Output, what: str, keys: list[str], num_bytes: int) -> None:
    """Tell what is gone."""
    if output.as_json:
        output.json({"removed": keys, "num_bytes": num_bytes})
    else:
        output.data(f"removed {len(keys)} {what}, {si(num_bytes)}B")


def _index_root(args: argparse.Namespace) -> str:
    return str(args.dir) if args.dir is not None else os.path.join(cache_folder(), "index")


def _ls_indexes(args: argparse.Namespace, output: Output) -> None:
    root = _index_root(args)
    found = kept_indexes(root)
    if output.as_json:
        output.json([{"key": index.identity, **_facts(index)} for index in found])
    elif found:
        rows = [(index.identity[:_SHORT], si(index.num_bytes), when(index.used_ns / 1e9)) for index in found]
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
    say_removed(output, "row indexes", [index.identity for index in removed], num_bytes)


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
