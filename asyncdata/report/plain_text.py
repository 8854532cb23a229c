"""Text of users on a page: nothing of it is markup, a program, or a character that changes how other text is shown."""

from __future__ import annotations

import json
from typing import Any

__all__ = ("script_json", "visible")

_IN_SCRIPTS = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def visible(text: str) -> str:
    """The text, with its code point in place of each character that cannot be seen: control characters, marks of the
    direction of writing, lone surrogates. Line breaks and tabs stay.
    """
    if text.isprintable():
        return text

    return "".join(char if char.isprintable() or char in "\n\t" else f"⟨U+{ord(char):04X}⟩" for char in text)


def script_json(value: Any) -> str:
    """JSON that can stand in a ``<script>``: no text in it ends the script or begins a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPTS)
