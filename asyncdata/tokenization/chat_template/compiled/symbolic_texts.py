"""Questions about rendered texts with symbols: an answer holds for every chat of the shape that passes the guards."""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, NoReturn

from asyncdata.tokenization.chat_template.compiled.symbolic_values import UnprovenError, has_symbol, symbols_in
from asyncdata.tokenization.chat_template.rendered_texts import Texts
from asyncdata.tokenization.spans import common_prefix
from asyncdata.tokenization.template_marks import MARKS

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Sequence

    from asyncdata.tokenization.chat_template.compiled.symbolic_values import Trace

__all__ = ("UnknownTexts",)


class UnknownTexts(Texts):
    """The answers for texts with symbols. Each symbol stands for any text, also the empty one.

    An answer holds for every chat, or for every chat that passes a guard that it records; otherwise the question is
    refused with :class:`UnprovenError`. If two texts first differ in two constants, they differ there for every chat,
    because the text before is the same in both.

    :param trace: records the guards.
    :ivar marks: the characters that no chat may contain for the answers to hold.
    """

    def __init__(self, special: Sequence[str], trace: Trace) -> None:
        super().__init__(special)
        self._trace = trace
        self.marks: tuple[str, ...] = ()

    def same(self, one: str, other: str) -> bool:
        """See :class:`Texts`."""
        return True if one == other else _refuse("two texts that may be the same")

    def starts_with(self, text: str, words: str, at: int = 0) -> bool:
        """See :class:`Texts`."""
        text = text[at:]
        shared = common_prefix(text, words)
        if shared == len(words):
            return True

        text, words = text[shared:], words[shared:]
        ahead, expected = symbols_in(text)[0], symbols_in(words)[0]
        if (ahead and expected) or (not text and any(symbols_in(words)[::2])):
            return False  # they differ in constants, or the text ends before one

        if not (ahead or expected):
            _refuse("two messages that may begin alike")
        head = _head(text, len(expected)) if expected else _head(words, len(ahead))
        question: Callable[[str], bool] = partial(_begins_with, expected) if expected else partial(_agree, ahead)
        if self._trace.ask(head, question, "begins with", ahead, expected):
            _refuse("a message that begins as something else does")
        return False

    def ends_with(self, text: str, words: Sequence[str]) -> bool:
        """See :class:`Texts`."""
        ending = symbols_in(text)[-1]
        if ending.endswith(tuple(words)):
            return True

        if ending == text or not any(each.endswith(ending) for each in words):
            return False

        return bool(self._trace.ask(text, methodcaller("endswith", tuple(words)), "ends with", *words))

    def num_shared(self, one: str, other: str) -> int:
        """See :class:`Texts`."""
        shared = common_prefix(one, other)
        if has_symbol(one[shared : shared + 1] + other[shared : shared + 1]) and shared < min(len(one), len(other)):
            _refuse("two texts that may be alike for longer")
        return shared

    def without_trailing_space(self, text: str) -> str:
        """See :class:`Texts`."""
        text = text.rstrip()
        if has_symbol(text[-1:]) and self._trace.ask(text, _ends_with_space, "ends with space"):
            _refuse("white space that is a message's")
        return text

    def stop_at(self, text: str, at: int) -> re.Match[str] | None:
        """See :class:`Texts`."""
        words = symbols_in(text[at:])[0]
        num_space = len(words) - len(words.lstrip())
        if at + len(words) < len(text) and any(
            token.startswith(words[start:]) and len(token) > len(words) - start
            for token in self.special
            for start in range(num_space + 1)
        ):
            _refuse("a special token that a message may complete")
        return super().stop_at(text, at)

    def constant(self, text: str) -> str:
        """See :class:`Texts`."""
        return _refuse("words that depend on a message") if has_symbol(text) else text

    def refuse_unknown(self, what: str) -> None:
        """See :class:`Texts`."""
        _refuse(what)

    def unused_marks(self, text: str) -> tuple[str, str]:
        """See :class:`Texts`. Always the first two, which are the same for every chat without them."""
        first, second = MARKS[0], MARKS[1]
        if first in text or second in text:
            _refuse("a template with marks of its own")
        self.marks = (first, second)
        return first, second


def _head(text: str, length: int) -> str:
    """The beginning of the text that has ``length`` constant characters, so at least as many for every chat."""
    num_constants = 0
    for number, char in enumerate(text):
        if num_constants == length:
            return text[:number]

        num_constants += not has_symbol(char)
    return text


def _begins_with(words: str, text: str) -> bool:
    return text.startswith(words)


def _agree(one: str, other: str) -> bool:
    """Whether one of the two is a prefix of the other."""
    return one.startswith(other) or other.startswith(one)


def _ends_with_space(text: str) -> bool:
    return text.rstrip() != text


def _refuse(what: str) -> NoReturn:
    raise UnprovenError(what)
