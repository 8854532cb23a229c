"""Answers about texts of a chat whose messages are unknown: those that every chat gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from asyncdata.tokenization.chat_texts import Texts
from asyncdata.tokenization.spans import common_prefix
from asyncdata.tokenization.template_marks import MARKS
from asyncdata.tokenization.template_trace import UnprovenError, has_symbol, symbols_in

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

__all__ = ("UnknownTexts",)


class UnknownTexts(Texts):
    """Answers for a chat in whose texts are symbols, each of which stands for any text, an empty one too.

    An answer is that of every chat, or the question is refused with :class:`UnprovenError`. Two texts whose first
    difference lies between two constants differ there whatever stands before, as it is the same in both.

    :ivar marks: the characters that no chat may have for the answers to hold.
    """

    def __init__(self, special: Sequence[str]) -> None:
        super().__init__(special)
        self.marks: tuple[str, ...] = ()

    def same(self, one: str, other: str) -> bool:
        """See :class:`Texts`."""
        return True if one == other else _refuse("two texts that may be the same")

    def starts_with(self, text: str, words: str, at: int = 0) -> bool:
        """See :class:`Texts`."""
        return _begins(text[at:], words)

    def ends_with(self, text: str, words: Sequence[str]) -> bool:
        """See :class:`Texts`."""
        return text.endswith(tuple(words)) or any(_begins(text[::-1], each[::-1]) for each in words)

    def num_shared(self, one: str, other: str) -> int:
        """See :class:`Texts`."""
        shared = common_prefix(one, other)
        if has_symbol(one[shared : shared + 1] + other[shared : shared + 1]) and shared < min(len(one), len(other)):
            _refuse("two texts that may be alike for longer")
        return shared

    def without_space_behind(self, text: str) -> str:
        """See :class:`Texts`."""
        text = text.rstrip()
        return _refuse("white space that may be a message's") if has_symbol(text[-1:]) else text

    def stop_behind(self, text: str, at: int) -> re.Match[str] | None:
        """See :class:`Texts`."""
        words = symbols_in(text[at:])[0]
        num_space = len(words) - len(words.lstrip())
        if at + len(words) < len(text) and any(
            token.startswith(words[start:]) and len(token) > len(words) - start
            for token in self.special
            for start in range(num_space + 1)
        ):
            _refuse("a special token that a message may complete")
        return super().stop_behind(text, at)

    def constant(self, text: str) -> str:
        """See :class:`Texts`."""
        return _refuse("words that depend on a message") if has_symbol(text) else text

    def unused_marks(self, text: str) -> tuple[str, str]:
        """See :class:`Texts`. They are the first ones, so those of every chat that does not have them either."""
        first, second = MARKS[0], MARKS[1]
        if first in text or second in text:
            _refuse("a template with marks of its own")
        self.marks = (first, second)
        return first, second


def _begins(text: str, words: str) -> bool:
    shared = common_prefix(text, words)
    if shared == len(words):
        return True

    if shared == len(text):  # shorter, unless all that is missing may be empty
        return _refuse("a text that may end alike") if not any(_constants(words[shared:])) else False

    return _refuse("texts that may be alike") if has_symbol(text[shared] + words[shared]) else False


def _constants(text: str) -> list[str]:
    return symbols_in(text)[::2]


def _refuse(what: str) -> NoReturn:
    raise UnprovenError(what)
