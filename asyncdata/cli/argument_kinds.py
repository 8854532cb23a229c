"""What a table of arguments is made of: options, groups of them, and how argparse is told of each."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ("Group", "Option", "add_to", "flag", "option", "repeated")


class Option(NamedTuple):
    """An option, such as ``--seed N``, or an argument, such as ``DATA``; and the keywords of ``add_argument``."""

    words: str
    how: dict[str, Any]


class Group(NamedTuple):
    """Options that belong together. Of those of a group without a title, exactly one is needed."""

    title: str
    about: str | None
    options: tuple[Option, ...]


def option(words: str, about: str, kind: Any = None, default: Any = None, **how: Any) -> Option:
    """An option. The help shows its default.

    :param kind: converts its text; or the words to choose from.
    """
    if kind is not None:
        how["choices" if isinstance(kind, tuple) else "type"] = kind
    if default is not None:
        about, how["default"] = f"{about} (%(default)s)", default
    return Option(words, {"help": about, **how})


def flag(words: str, about: str) -> Option:
    """An option without a value."""
    return option(words, about, action="store_true")


def repeated(words: str, about: str, kind: Any = None, **how: Any) -> Option:
    """An option whose values are collected in a list."""
    one = option(words, f"{about}; may be repeated", kind, action="append", **how)
    return Option(words, {"default": [], **one.how})


def add_to(parser: Any, argument: Option | Group) -> None:
    """Tell a parser of an argument or a group."""
    if isinstance(argument, Option):
        *flags, metavar = argument.words.split(" ")
        if metavar.startswith("-"):
            parser.add_argument(metavar, **argument.how)
        else:
            name = flags or [argument.how.get("dest", metavar.lower())]
            how = {key: value for key, value in argument.how.items() if flags or key != "dest"}
            parser.add_argument(*name, metavar=metavar, **how)
        return

    if argument.title:
        group = parser.add_argument_group(argument.title, argument.about)
    else:
        group = parser.add_mutually_exclusive_group(required=True)
    for one in argument.options:
        add_to(group, one)
