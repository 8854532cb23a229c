"""What options may be: the types of their values, and checks of options that depend on each other."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = (
    "has_tokenize_fn",
    "names_a_run",
    "names_data",
    "names_one_function",
    "needs_tokens",
    "overwrites_nothing",
    "position",
    "seconds",
    "setting",
    "uses_the_snapshot",
    "whole",
)


# The types of options


def whole(least: int) -> Callable[[str], int]:
    """Converts to a whole number of at least ``least``."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on is needed, not {text!r}")

        return int(text)

    return convert


def seconds(text: str) -> float:
    """Converts to seconds."""
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", text):
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, not {text!r}")

    return float(text)


def position(text: str) -> str:
    """Checks that it is a position in D."""
    if not re.fullmatch(r"\d+:\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"a position is written EPOCH:WINDOW:ROW, as in 0:3:128, not {text!r}")

    return text


def setting(text: str) -> tuple[str, str]:
    """Converts to a name and the text of its value."""
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"a setting is written NAME=VALUE, as in overlong=truncate_left, not {text!r}")

    return name, value


# Checks: each returns an error, or None


def has_tokenize_fn(args: argparse.Namespace) -> bool:
    """Whether the options say how rows are tokenized."""
    return args.tokenizer is not None or args.tokenize_fn is not None


def names_data(args: argparse.Namespace) -> str | None:
    """The data are files, or a mixture."""
    return None if bool(args.data) != (args.mix is not None) else "name DATA, or a mixture by --mix FILE"


def names_a_run(args: argparse.Namespace) -> str | None:
    """The run is one that was recorded, or the demo's."""
    return None if (args.folder is not None) != args.demo else "name the FOLDER of a run's telemetry, or use --demo"


def needs_tokens(args: argparse.Namespace) -> str | None:
    """The options must say how rows are tokenized, unless each part of a mixture may say so."""
    is_known = has_tokenize_fn(args) or getattr(args, "mix", None) is not None
    return None if is_known else "--tokenizer DIR or --tokenize-fn PATH is required"


def names_one_function(args: argparse.Namespace) -> str | None:
    """``--kind`` and ``--tokenize-fn`` each choose a tokenize function."""
    if args.kind is None or args.tokenize_fn is None:
        return None

    return "--kind chooses a tokenize function; leave it, or --tokenize-fn"


def overwrites_nothing(args: argparse.Namespace) -> str | None:
    """Only a run that resumes may write to a file that exists."""
    if args.resume:
        return None if args.snapshot is not None else "--resume needs --snapshot FILE to continue from"

    old = next((path for path in (args.snapshot, args.record) if path is not None and os.path.exists(path)), None)
    return old and f"{old} is there already: add --resume to continue from there, or name another file"


def uses_the_snapshot(args: argparse.Namespace) -> str | None:
    """A snapshot is no help where no row before the sample is tokenized."""
    if args.snapshot is None or (args.ordinal is not None and needs_tokens(args) is None):
        return None

    return "--snapshot is for --ordinal with --tokenizer; it does nothing else"
