"""A chat, and renderings of it and of its parts that show the positions of its messages; and the questions that the
rules of ``assistant_spans`` ask about rendered texts, with real texts or with symbols.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NoReturn

from asyncdata.tokenization.chat_template.symbolic_values import MARKS, Trace, UnprovenError, has_symbol, symbols_in
from asyncdata.tokenization.column_writer import Span, common_prefix
from asyncdata.tokenization.rows import Message, RowFault

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat
    from asyncdata.tokenization.chat_template.template import ChatTemplate


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
        question = methodcaller("startswith", expected) if expected else partial(_agree, ahead)
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
        if has_symbol(text[-1:]) and self._trace.ask(text, lambda each: each.rstrip() != each, "ends with space"):
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


def _agree(one: str, other: str) -> bool:
    """Whether one of the two is a prefix of the other."""
    return one.startswith(other) or other.startswith(one)


def _refuse(what: str) -> NoReturn:
    raise UnprovenError(what)


# The chat


class Conversation:
    """A chat, rendered whole and in parts.

    :param texts: compares and searches rendered texts.
    :ivar text: the whole chat, rendered.
    """

    def __init__(
        self, template: ChatTemplate | SymbolicChat, messages: list[Message], tools: Any, texts: Texts
    ) -> None:
        self._template = template
        self._tools = tools
        self.messages = messages
        self.texts = texts
        self.text = template.rendered(messages, tools)

    @cached_property
    def header(self) -> str:
        """The generation prompt that the template adds to the whole chat; may be empty."""
        prompt = self.prompt(len(self.messages)) or ""
        return self.texts.constant(prompt[self.texts.num_shared(self.text, prompt) :])

    def prompt(self, length: int) -> str | None:
        """The first ``length`` messages as the prompt for the next one; None if the template rejects them."""
        return self._rendered(self.messages[:length], add_generation_prompt=True)

    def up_to(self, number: int, *, keeps_form: bool = False) -> str | None:
        """The chat up to and including a message; None if the template rejects it, or adds text at the end of a chat.

        :param keeps_form: a turn that is added after the last message has content of the same form as the message.
        """
        if number + 1 < len(self.messages):
            return self.alone(number)

        longer = self.longer(self._form(number, "", keeps_form))
        return self.text if longer is not None and self.texts.starts_with(longer, self.text) else None

    def longer(self, content: Any = "") -> str | None:
        """The chat with one more turn; None if the template rejects it."""
        return self._rendered([*self.messages, {"role": "user", "content": content}])

    def alone(self, number: int) -> str | None:
        """The chat that ends with a message; None if the template rejects it."""
        return self._rendered(self.messages[: number + 1])

    def header_of(self, number: int) -> str:
        """The generation prompt for message ``number``, or for an earlier one if that is not known; empty if none is.

        It is not known if the template renders the message before it differently as the last one of a chat.
        """
        for length in range(number, -1, -1):
            prompt, before = self.prompt(length), self._rendered(self.messages[:length])
            if prompt is not None and before is not None and prompt.startswith(before):
                return prompt[len(before) :]

        return ""

    def with_content(
        self, number: int, content: str, *, last: bool = False, keeps_form: bool = False, asks: bool = False
    ) -> str | None:
        """The chat with only ``content`` in message ``number``; None if the template rejects it.

        :param last: end the chat with this message.
        :param keeps_form: give the content the form of the message's: text, or a list of parts.
        :param asks: add the generation prompt for the next message.
        """
        message = {"role": self.messages[number]["role"], "content": self._form(number, content, keeps_form)}
        messages = [*self.messages[:number], message, *([] if last else self.messages[number + 1 :])]
        return self._rendered(messages, **({"add_generation_prompt": True} if asks else {}))

    def after(self, number: int, mark: str, length: int, *, asks: bool = False) -> str | None:
        """What the template writes after message ``number``, whose content is a mark, in a chat of ``length`` messages.

        None if it rejects this chat, or writes the mark more or less than once.

        :param asks: add the generation prompt for the next message.
        """
        marked = {**self.messages[number], "content": self._form(number, mark, keeps_form=True)}
        messages = [*self.messages[:number], marked, *self.messages[number + 1 : length]]
        pieces = (self._rendered(messages, add_generation_prompt=asks) or "").split(mark)
        return pieces[1] if len(pieces) == 2 else None

    def _form(self, number: int, content: str, keeps_form: bool) -> Any:
        is_parts = keeps_form and isinstance(self.messages[number].get("content"), list)
        return [{"type": "text", "text": content}] if is_parts else content

    def generation_blocks(self) -> list[Span] | None:
        """The ranges of the template's ``{% generation %}`` blocks; None if they are not properly separated."""
        opening, closing = self.unused_marks()
        marked = self._rendered(self.messages, generation_marks=(opening, closing))
        if marked is None or not self.texts.same(marked.replace(opening, "").replace(closing, ""), self.text):
            return None

        blocks, end = [], 0
        for number, piece in enumerate(re.split(f"([{opening}{closing}])", marked)):
            if number % 4 == 2:
                blocks.append((end, end + len(piece)))
            if number % 2 == 0:
                end += len(piece)
            elif piece != (opening if number % 4 == 1 else closing):
                return None
        return blocks

    def words_before(self, number: int, mark: str, before: str, *, keeps_form: bool = False) -> str:
        """The text that the template writes between message ``number`` and the one before it."""
        message = {"role": self.messages[number]["role"], "content": self._form(number, mark, keeps_form)}
        earlier = []
        if number:
            said = self._form(number - 1, before, keeps_form)
            earlier = [*self.messages[: number - 1], {**self.messages[number - 1], "content": said}]
        rendered = self._rendered([*earlier, message, *self.messages[number + 1 :]]) or ""
        return rendered.partition(mark)[0].rpartition(before)[2] if mark in rendered else ""

    def unused_marks(self) -> tuple[str, str]:
        """Two characters that do not occur in the text.

        :raises RowFault: if all candidates occur.
        """
        return self.texts.unused_marks(self.text)

    def _rendered(self, messages: list[Message], **variables: Any) -> str | None:
        try:
            return self._template.rendered(messages, self._tools, **variables)
        except RowFault:  # it renders the whole chat, so it rejects only this part
            return None
