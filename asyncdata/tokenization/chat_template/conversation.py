"""A chat, and renderings of it and of its parts that show the positions of its messages."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat
    from asyncdata.tokenization.chat_template.template import ChatTemplate
    from asyncdata.tokenization.chat_template.texts import Texts
    from asyncdata.tokenization.spans import Span

Message = dict[str, Any]


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
