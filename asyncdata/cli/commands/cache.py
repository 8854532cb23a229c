"""``asyncdata cache``: which samples are kept, whether they are whole, and a way to be rid of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.cli.commands.row_indexes import say_removed, when
from asyncdata.cli.output import printable, shown_path, si, table
from asyncdata.token_cache.folder import default_root
from asyncdata.token_cache.inventory import caches, chosen, remove, verify

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output
    from asyncdata.token_cache.inventory import Cache

__all__ = ("ls", "rm", "run_verify")

_SHORT = 12


def ls(args: argparse.Namespace, output: Output) -> int:
    """``asyncdata cache ls``."""
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
        when(cache.used_s),
        "yes" if cache.is_in_use else "no",
        printable(str(cache.about.get("function", {}).get("tokenize_fn", "unknown"))),
    )


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
    removed = chosen(_root(args), args.key)
    for cache in removed:
        remove(cache)
    say_removed(output, "token caches", [cache.key for cache in removed], sum(cache.num_bytes for cache in removed))
    return 0
