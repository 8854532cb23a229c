"""The questions that the rules of ``assistant_spans`` ask about rendered texts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import common_prefix
from asyncdata.tokenization.template_marks import MARKS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("Texts",)


class Texts:
    """The answers for a chat with its real texts.

    :param special: the texts of the tokenizer's special tokens.
    """

    def __init__(self, special: Sequence[str]) -> None:
        self.special = tuple(sorted(special, key=len, reverse=True))
        self._stop = re.compile(r"\s*(?:" + "|".join(map(re.escape, self.special)) + ")")

    def same(self, one: str, other: str) -> bool:
        """Whether the two are the same."""
        return one == other

    def starts_with(self, text: str, words: str, at: int = 0) -> bool:
        """Whether the text has ``words`` at index ``at``."""
        return text.startswith(words, at)

    def ends_with(self, text: str, words: Sequence[str]) -> bool:
        """Whether the text ends with any of ``words``."""
        return text.endswith(tuple(words))

    def num_shared(self, one: str, other: str) -> int:
        """The length of the common prefix."""
        return common_prefix(one, other)

    def without_trailing_space(self, text: str) -> str:
        """The text without the white space that it ends with."""
        return text.rstrip()

    def stop_at(self, text: str, at: int) -> re.Match[str] | None:
        """The special token at index ``at``, possibly after white space."""
        return self._stop.match(text, at)

    def constant(self, text: str) -> str:
        """The text, which must come from the template only, and not from the messages."""
        return text

    def refuse_unknown(self, what: str) -> None:
        """Fail if the texts are unknown: the rule ``what`` does not support them."""

    def unused_marks(self, text: str) -> tuple[str, str]:
        """Two characters that do not occur in the text.

        :raises RowFault: if all candidates occur.
        """
        unused = [mark for mark in MARKS if mark not in text]
        if len(unused) < 2:
            raise RowFault("AD414", f"the chat has nearly all of the noncharacters U+{ord(MARKS[0]):X} to U+FDEF in it")

        return unused[0], unused[1]
