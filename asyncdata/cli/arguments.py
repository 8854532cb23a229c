"""The options that several commands have, and the words that they take."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = (
    "KINDS",
    "add_data",
    "add_order_options",
    "add_tokenizer",
    "add_workers",
    "command",
    "position",
    "seconds",
    "setting",
    "whole",
)

KINDS = ("prompt", "chat", "text", "preference", "babilong")
"""What rows may be: each has its tokenize function."""


def command(commands: Any, name: str, run: str, about: str, more: str = "") -> argparse.ArgumentParser:
    """A command with the options that all of them have.

    :param run: where in ``asyncdata.cli.commands`` it lies; imported when it is to run.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}".rstrip(), allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON to stdout")
    parser.add_argument("--verbose", action="store_true", help="log every event to stderr, not only warnings")
    parser.set_defaults(run=run)
    return parser


def add_data(parser: argparse.ArgumentParser) -> None:
    """What is read."""
    parser.add_argument("data", metavar="DATA", nargs="+", help="JSONL or Parquet files, globs, or folders of them")


def add_order_options(parser: argparse.ArgumentParser) -> None:
    """What D depends on besides."""
    group = parser.add_argument_group("order", "Each of these makes another order; give what the run was given.")
    group.add_argument("--seed", metavar="N", type=int, default=42, help="any integer (%(default)s)")
    group.add_argument(
        "--shuffle",
        nargs="?",
        const="windows",
        default="windows",
        choices=("windows", "full"),
        help="mix the rows of windows of blocks, or all rows (%(default)s)",
    )
    group.add_argument(
        "--no-shuffle", dest="shuffle", action="store_const", const="none", help="leave rows as they lie"
    )
    group.add_argument(
        "--block-bytes", metavar="N", type=whole(1), default=32 * 1024, help="size of a block (%(default)s)"
    )
    group.add_argument(
        "--window-blocks", metavar="N", type=whole(1), default=1024, help="blocks mixed together (%(default)s)"
    )
    group.add_argument(
        "--loader",
        metavar="NAME=VALUE",
        dest="loader",
        type=setting,
        action="append",
        default=[],
        help="another argument of the loader, as JSON or text, such as plan_packs=true; may be repeated",
    )


def add_tokenizer(parser: argparse.ArgumentParser, *, kind: str = "by the keys of the first row") -> None:
    """What the tokens depend on. An option that is not given leaves the class's own default.

    :param kind: what ``--kind`` is by default, for people.
    """
    group = parser.add_argument_group("tokens")
    group.add_argument("--tokenizer", metavar="DIR", help="a folder with tokenizer.json, or a Hugging Face name")
    group.add_argument(
        "--tokenize-fn",
        metavar="PATH",
        help="package.module:name of a function, a tokenize function's class, or an object for XTuner, for any rows",
    )
    group.add_argument("--kind", choices=KINDS, help=f"what the rows are ({kind})")
    group.add_argument("--prompt-key", metavar="KEY", help="where a row has its prompt (input)")
    group.add_argument("--label-key", metavar="KEY", help="where a row has its label")
    group.add_argument("--metadata-key", metavar="KEY", help="where it has metadata (metadata)")
    group.add_argument("--tool-key", metavar="KEY", help="where it has tools (tools)")
    group.add_argument("--apply-chat-template", action="store_const", const=True, help="render the prompt as a chat")
    group.add_argument("--chat-template", metavar="FILE", help="a chat template in place of the tokenizer's own")
    group.add_argument(
        "--max-length",
        metavar="N",
        type=whole(1),
        help="the most tokens of a sample; --set says what becomes of longer ones (dropped)",
    )
    group.add_argument(
        "--train-on",
        choices=("assistant", "last_assistant", "loss"),
        help="which messages of a chat are trained (assistant)",
    )
    group.add_argument(
        "--set",
        metavar="NAME=VALUE",
        dest="settings",
        type=setting,
        action="append",
        default=[],
        help="another setting of the tokenize function, as JSON or text; may be repeated",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Who does the work, and what is done about bad rows."""
    group = parser.add_argument_group("work")
    group.add_argument(
        "--num-workers", metavar="N", type=whole(0), help="worker processes; 0 for a thread (as many as it takes)"
    )
    group.add_argument(
        "--on-bad-row",
        default="raise",
        choices=("raise", "skip", "quarantine"),
        help="stop at a bad row, count it, or count it and write it down (%(default)s)",
    )
    group.add_argument(
        "--max-bad-rows", metavar="N", type=whole(0), default=100, help="more of them are an error (%(default)s)"
    )
    group.add_argument(
        "--quarantine-path", metavar="FILE", default="quarantine.jsonl", help="where they are written (%(default)s)"
    )
    group.add_argument(
        "--no-excerpts",
        dest="log_excerpts",
        action="store_false",
        help="show nothing of what bad rows say, also where they are written",
    )


# What argparse cannot say.


def whole(least: int) -> Callable[[str], int]:
    """Takes a whole number from ``least`` on."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on is needed, not {text!r}")

        return int(text)

    return convert


def seconds(text: str) -> float:
    """Takes a number of seconds."""
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", text):
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, not {text!r}")

    return float(text)


def position(text: str) -> str:
    """Takes a position."""
    if not re.fullmatch(r"\d+:\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"a position is written EPOCH:WINDOW:ROW, as in 0:3:128, not {text!r}")

    return text


def setting(text: str) -> tuple[str, str]:
    """Takes a setting."""
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"a setting is written NAME=VALUE, as in overlong=truncate_left, not {text!r}")

    return name, value
