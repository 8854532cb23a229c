"""Locates the text of each assistant message in a rendered chat: from the model's first character to its stop token.

A template with ``{% generation %}`` marks it itself. For any other template there are two methods; each one proves its
result or gives up:

- *Prefixes.* The prompt for a message, and the chat up to and including it, are both rendered. If the first is a prefix
  of the second, and the second of the whole chat, the message is the difference of the two. For the last message, the
  whole chat must be a prefix of the chat with one more turn.
- *A mark.* Some templates change earlier turns when a chat grows, for example those that keep the thinking of the last
  turn only. Then the whole chat is rendered again with a mark instead of the message: the message is where the two
  texts differ. It must begin after the header of an assistant's turn. A special token must follow it, and the same
  token must follow it in a chat that ends with the message.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.chat_template.call_arguments import guarded, parsed
from asyncdata.tokenization.chat_template.compiled.cache import Shapes
from asyncdata.tokenization.chat_template.rendered_texts import Texts
from asyncdata.tokenization.functions.chat_by_turn import by_turn
from asyncdata.tokenization.functions.conversation import Conversation
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import Span, common_prefix, common_suffix, join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.chat_template.compiled.program import Program
    from asyncdata.tokenization.chat_template.compiled.symbolic_template import SymbolicChat
    from asyncdata.tokenization.chat_template.template import ChatTemplate

__all__ = ("ChatSpans",)

Message = dict[str, Any]


class ChatSpans:
    """Renders chats and finds the blocks that are trained.

    The rules run once for each shape of chats, with unknown texts; their result then holds for every chat of this
    shape. If that is not possible, the rules run for each chat.

    :param template: renders a chat.
    :param name: the name of the template in errors.
    :param special: the texts of the tokenizer's special tokens.
    :param eos: the text of its end-of-sequence token, if it has one.
    """

    def __init__(self, template: ChatTemplate, name: str, special: Sequence[str], eos: str | None) -> None:
        self.template = template
        self._special = special
        self._rules = _Rules(name, eos, template.has_generation)
        self._texts = Texts(special)
        self._stops = (*special, *([eos] if eos else []))
        self._shapes = Shapes(self._prove)

    def __call__(
        self, messages: list[Message], tools: list[Message] | None, trained: list[int]
    ) -> tuple[str, list[Span]]:
        """The chat as text, and the blocks of the assistant messages with the indices ``trained``.

        If the template rejects arguments of tool calls that are JSON text, they are decoded to objects.

        :raises RowFault: if the template rejects the chat, or the blocks cannot be located.
        """
        parts = self._shapes.texts(messages, tools, tuple(trained))
        if parts is None:
            try:
                return self.asked(messages, tools, trained)
            except RowFault as fault:
                return self._asked_with_objects(fault, messages, tools, trained)

        borders = list(accumulate(map(len, parts)))
        return "".join(parts), list(zip(borders[:-1:2], borders[1::2], strict=True))

    def _asked_with_objects(
        self, fault: RowFault, messages: list[Message], tools: list[Message] | None, trained: list[int]
    ) -> tuple[str, list[Span]]:
        chat = parsed(messages) if fault.code == "AD412" else None
        if chat is None:
            raise fault

        try:
            return self(chat, tools, trained)
        except RowFault as other:
            raise (fault if other.code == fault.code else other) from None

    def prompt(self, messages: list[Message], tools: list[Message] | None) -> str:
        """The chat as a prompt for its next message.

        :raises RowFault: if the template rejects it.
        """
        return self.template.rendered(guarded(messages), tools, add_generation_prompt=True)

    def has_stop(self, text: str, blocks: list[Span]) -> bool:
        """Whether a block ends with a stop token; True if there are no blocks."""
        if not blocks or text.endswith(self._stops, *blocks[-1]):  # nearly always
            return True

        return any(text[start:stop].rstrip().endswith(self._stops) for start, stop in reversed(blocks))

    def asked(
        self, messages: list[Message], tools: list[Message] | None, trained: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """The same as a call, by rendering this chat."""
        chat = Conversation(self.template, guarded(messages), tools, self._texts)
        return chat.text, self._rules.blocks(chat, trained)

    def proven(self, messages: list[Message], tools: list[Message] | None, trained: Sequence[int]) -> Program:
        """The program for chats of the shape of this one: every second part is a block.

        A position in a symbolic text is a position in the text of each such chat: the rules find positions only as
        common prefixes of two renderings, and move from there by constant texts.
        """
        from asyncdata.tokenization.chat_template.compiled.symbolic_texts import UnknownTexts

        def cut(symbolic: SymbolicChat) -> tuple[list[str], tuple[str, ...]]:
            texts = UnknownTexts(self._special, symbolic.trace)
            chat = Conversation(symbolic, symbolic.messages, symbolic.tools, texts)
            return _cut(chat.text, self._rules.blocks(chat, trained)), texts.marks

        return self.template.proven(messages, tools, cut)

    def _prove(self, messages: list[Message], tools: list[Message] | None, trained: tuple[int, ...]) -> Program:
        program = self.proven(messages, tools, trained)
        return program.checked(messages, tools, lambda: _cut(*self.asked(messages, tools, trained)))


def _cut(text: str, blocks: Sequence[Span]) -> list[str]:
    """The text before the first block, that of the block, the text up to the next one, and so on."""
    borders = [0, *(border for block in blocks for border in block), len(text)]
    return [text[start:stop] for start, stop in pairwise(borders)]


class _Rules:
    """The rules that locate the blocks of a conversation."""

    def __init__(self, name: str, eos: str | None, has_generation: bool) -> None:
        self._name = name
        self._eos = eos
        self._has_generation = has_generation

    def blocks(self, chat: Conversation, trained: Sequence[int]) -> list[Span]:
        """The blocks of the messages ``trained``.

        :raises RowFault: if they cannot be located.
        """
        if self._has_generation:
            return self._own_blocks(chat, trained)

        blocks: list[Span] = []
        for number in trained:
            floor = blocks[-1][1] if blocks else 0
            block = self._by_prefixes(chat, number) or self._by_mark(chat, number) or by_turn(chat, number)
            if block is None or block[0] < floor:
                raise self._not_located(number)

            blocks.append(block)
        return blocks

    def _own_blocks(self, chat: Conversation, trained: Sequence[int]) -> list[Span]:
        assistants = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        blocks = chat.generation_blocks()
        if blocks is None:
            raise RowFault("AD414", f"{self._name} changes the text of its {{% generation %}} blocks after them")

        starts = {start for start, _ in blocks}
        for start, stop in blocks:
            if stop not in starts:  # otherwise the next block is trained as well
                self._refuse_untrained_stop(chat, start, stop)
        if list(trained) == assistants:
            return blocks

        blocks = blocks if len(blocks) == len(assistants) else join(blocks)
        if len(blocks) != len(assistants):
            raise RowFault(
                "AD414",
                f"{self._name} has {len(blocks)} {{% generation %}} blocks for {len(assistants)} messages of the "
                "assistant, so the block of each message is unknown; set train_on='assistant'",
            )

        return [block for block, number in zip(blocks, assistants, strict=True) if number in trained]

    def _refuse_untrained_stop(self, chat: Conversation, start: int, stop: int) -> None:
        text, texts, eos = chat.text, chat.texts, self._eos
        if not eos or not texts.starts_with(text, eos, stop) or texts.ends_with(text[start:stop], [eos]):
            return

        if texts.ends_with(texts.without_trailing_space(text[start:stop]), texts.special):
            longer = chat.longer()
            if longer is not None and texts.starts_with(longer, text[:stop]):
                if not texts.starts_with(longer, eos, stop):
                    return  # the block has a stop token of its own, and the other one ends the chat

        raise RowFault(
            "AD414",
            f"{self._name} writes the stop token {self._eos!r} after {{% endgeneration %}}, so that the model "
            "would not learn to stop; pass chat_template= with the token inside the block",
        )

    def _by_prefixes(self, chat: Conversation, number: int) -> Span | None:
        texts, before, up_to = chat.texts, chat.prompt(number), chat.up_to(number)
        if before is None or up_to is None:
            return None

        if not (texts.starts_with(chat.text, up_to) and texts.starts_with(up_to, before)):
            return None

        start, stop = len(before), len(up_to)
        if texts.special:
            # White space after a stop token is not generated; without a stop token it is the only end of the message.
            said = texts.without_trailing_space(up_to[start:])
            stop = start + len(said) if texts.ends_with(said, texts.special) else stop
        return start, stop

    def _by_mark(self, chat: Conversation, number: int) -> Span | None:
        text, texts, (mark, before) = chat.text, chat.texts, chat.unused_marks()
        marked, header = chat.with_content(number, mark), chat.header
        if marked is None or marked.count(mark) != 1 or not header or not texts.special:
            return None

        place = marked.index(mark)
        shared = common_prefix(text, marked)
        num_after = common_suffix(text[shared:], marked[shared:])
        start = self._start(texts.constant(chat.words_before(number, mark, before)), header, shared, place)
        stop = texts.stop_at(text, len(text) - num_after)
        if start is None or stop is None or num_after != len(marked) - place - len(mark):
            return None

        texts.constant(marked[start:place])
        # The last message of a chat is followed by its end; an earlier one may be followed by the next header.
        last = chat.with_content(number, mark, last=True) or ""
        return (start, stop.end()) if last.partition(mark)[2].startswith(stop.group()) else None

    def _start(self, words: str, header: str, shared: int, place: int) -> int | None:
        """The beginning of the message.

        :param words: the template's text before the mark.
        :param shared: the length of the common prefix of the chat and the rendering with the mark.
        :param place: the index of the mark.
        """
        at = words.rfind(header)
        if at >= 0:
            start = place - (len(words) - at - len(header))
            return start if start <= shared else None

        # The header for the model's next turn may be longer than that of an earlier one: it may open its thinking.
        is_header = any(words.endswith(header[:length]) for length in range(len(header), 0, -1))
        return shared if is_header and shared == place else None

    def _not_located(self, number: int) -> RowFault:
        return RowFault(
            "AD414",
            f"{self._name} renders earlier turns differently when the chat grows, so the position of "
            f"messages[{number}] in the text is unknown; pass chat_template= with {{% generation %}} and "
            "{% endgeneration %} around the assistant's text: TRL has such training templates for many models "
            "(get_training_chat_template)",
        )
