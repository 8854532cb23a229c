"""Rewrites the library's settings in a message as options of the command: ``max_length=9`` is ``--max-length 9``."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ("BAD_ROWS", "as_options")

BAD_ROWS = {"policy": "bad_rows", "max": "max_bad_rows", "path": "quarantine_path", "excerpts": "excerpts"}
"""Settings of ``BadRows``, and the options that set them, by their names in Python."""
_OF_BAD_ROWS = re.compile(r"BadRows\((?P<setting>\w+)=(?P<value>[^()]+)\)")

_SETTING = re.compile(
    r"""(?<![\w.-])(?P<name>[a-z]\w*)=(?:(?P<items>\{[^{}]*\}|\[[^\[\]]*\])|(?P<text>"[^"]*"|'[^']*')|(?P<word>[\w.:/-]*\w))"""
)
_BARE = re.compile(r"[\w.:/-]+")


def as_options(message: str, names: Collection[str]) -> str:
    """The message with each ``name=value`` as ``--name value``, where the command has that option.

    A set or a list is the option once for each of its values; True, the option alone.

    :param names: the options of the command, by their names in Python.
    """

    def option(match: re.Match[str]) -> str:
        name, items, text, word = match.group("name", "items", "text", "word")
        if name not in names or word in ("None", "False"):
            return match[0]

        told = "--" + name.replace("_", "-")
        if items:
            return " ".join(f"{told} {item.strip().strip(_QUOTES)}" for item in items[1:-1].split(","))

        value = word if text is None else text[1:-1]
        return told if value == "True" else f"{told} {value if _BARE.fullmatch(value) else json.dumps(value)}"

    def single(match: re.Match[str]) -> str:
        name = BAD_ROWS.get(match["setting"])
        return f"{name}={match['value']}" if name in names and match["value"] != "False" else match[0]

    return _SETTING.sub(option, _OF_BAD_ROWS.sub(single, message))


_QUOTES = "\"'"
