"""The commands for what runs leave behind: snapshots, token caches, quarantines, proofs of tokenizers."""

from __future__ import annotations

from typing import Any

from asyncdata.cli.arguments import add_tokenizer, command

__all__ = ("add_upkeep",)


def add_upkeep(commands: Any) -> None:
    """Add them to the others."""
    _add_snapshot(commands)
    _add_verify(commands)
    _add_cache(commands)
    _add_quarantine(commands)
    _add_tokenizer(commands)


def _add_snapshot(commands: Any) -> None:
    parser = commands.add_parser("snapshot", help="look into a snapshot", description="Look into a snapshot.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = command(actions, "show", "snapshot:show", "print what a snapshot holds, after checking that it is whole")
    show.add_argument("file", metavar="FILE", help="the snapshot")


def _add_verify(commands: Any) -> None:
    parser = command(
        commands,
        "verify",
        "verify:run",
        "say whether two runs saw the same stream, by the digests in their snapshots",
        "Exit status: 0 if they did, up to the same position; 3 if not; 4 if the digests do not say, as where one run "
        "is ahead of the other.",
    )
    parser.add_argument("first", metavar="FILE", help="a snapshot of the one")
    parser.add_argument("second", metavar="FILE", help="a snapshot of the other")


def _add_cache(commands: Any) -> None:
    about = "look after token caches and row indexes"
    parser = commands.add_parser("cache", help=about, description=f"{about[0].upper()}{about[1:]}.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ls = command(actions, "ls", "row_indexes:ls", "list token caches, or row indexes, those used last at the end")
    verify = command(
        actions,
        "verify",
        "cache:run_verify",
        "read token caches, and hold them against their checksums",
        "Exit status 1 if a segment is damaged. A run that meets one tokenizes its rows.",
    )
    rm = command(
        actions, "rm", "row_indexes:rm", "remove token caches, or row indexes", "One that a run is writing to stays."
    )
    for action in (ls, verify, rm):
        action.add_argument("--dir", metavar="DIR", help="the folder of the caches, where token_cache named one")
    for action in (ls, rm):
        action.add_argument(
            "--row-index",
            action="store_true",
            help="row indexes in place of token caches; DIR is index in cache_dir then",
        )
    for action in (verify, rm):
        action.add_argument("key", metavar="KEY", nargs="*", help="the first letters of its key, as ls prints it")
    rm.add_argument("--all", action="store_true", help="all of them")


def _add_quarantine(commands: Any) -> None:
    about = "look after the bad rows that a run put aside"
    parser = commands.add_parser("quarantine", help=about, description=f"{about[0].upper()}{about[1:]}.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = command(
        actions,
        "show",
        "quarantine:show",
        "print which rows are in a quarantine file, and what is wrong with them",
    )
    retry = command(
        actions,
        "retry",
        "quarantine:retry",
        "read the rows in a quarantine file again, and write those that are good now to a JSONL file",
        "Each is looked for in its file where it began, or, if rows before it were changed, by its line; by its number "
        "where there are no lines. It is tokenized in this process; one that brought down its worker is not tried. The "
        "quarantine file stays as it is.",
    )
    for action in (show, retry):
        action.add_argument("file", metavar="FILE", help="the quarantine file")
    retry.add_argument(
        "--output", metavar="FILE", default="retried.jsonl", help="where good rows are written (%(default)s)"
    )
    add_tokenizer(retry, kind="prompt")


def _add_tokenizer(commands: Any) -> None:
    parser = commands.add_parser(
        "tokenizer", help="prove fast tokenizer backends exact", description="Prove fast tokenizer backends exact."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    prove = command(
        actions,
        "prove",
        "tokenizer:prove",
        "find out whether the installed fast backends give the ids of tokenizers, and keep the answer",
        "Takes a minute for each, on one core. What is known already is shown, unless --again.",
    )
    prove.add_argument("--backend", choices=("gigatoken", "fastokens"), help="only this one; it must be installed")
    prove.add_argument("--again", action="store_true", help="forget what is known, and what an audit revoked")
    show = command(actions, "show", "tokenizer:show", "say what is known about the fast backends of a tokenizer")
    for each in (prove, show):
        each.add_argument("tokenizer", metavar="DIR", help="a folder with tokenizer.json, or a Hugging Face name")
