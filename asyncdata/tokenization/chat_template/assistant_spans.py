"""Locates the text of each assistant message in a rendered chat: from the model's first character to its stop token.

A template with ``{% generation %}`` marks it itself. For any other template there are four methods; each proves its
result or gives up:

- *Prefixes.* The prompt for a message, and the chat up to and including it, are both rendered. If the first is a prefix
  of the second, and the second of the whole chat, the message is the difference of the two. For the last message, the
  whole chat must be a prefix of the chat with one more turn.
- *A mark.* Some templates change earlier turns when a chat grows, for example those that keep the thinking of the last
  turn only. Then the whole chat is rendered again with a mark instead of the message: the message is where the two
  texts differ. It must begin after the header of an assistant's turn. A special token must follow it, and the same
  token must follow it in a chat that ends with the message.
- *Both ends separately*, see :func:`_by_turn`, for templates where neither prefixes nor a mark locate the message.
- *Prefixes after the turn before*, for templates that write something new into turns before that one, such as tools
  before the last question: what follows the content of the turn before is compared in place of whole texts.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.tokenization.chat_template.conversation import Conversation, Texts
from asyncdata.tokenization.chat_template.programs import Program, Shapes
from asyncdata.tokenization.column_writer import Span, common_prefix, common_suffix, join
from asyncdata.tokenization.rows import Message, RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat
    from asyncdata.tokenization.chat_template.template import ChatTemplate


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
        self._name = name
        self._eos = eos
        self._texts = Texts(special)
        self._stops = (*special, *([eos] if eos else []))
        self._shapes = Shapes(self._prove)

    def __call__(
        self, messages: list[Message], tools: list[Message] | None, trained: list[int]
    ) -> tuple[str, list[Span]]:
        """The chat as text, and the blocks of the assistant messages with the indices ``trained``.

        :raises RowFault: if the template rejects the chat, or the blocks cannot be located.
        """
        messages = self.template.fitted(messages)
        parts = self._shapes.texts(messages, tools, tuple(trained))
        if parts is None:
            return self.asked(messages, tools, trained)

        borders = list(accumulate(map(len, parts)))
        return "".join(parts), list(zip(borders[:-1:2], borders[1::2], strict=True))

    def prompt(self, messages: list[Message], tools: list[Message] | None) -> str:
        """The chat as a prompt for its next message.

        :raises RowFault: if the template rejects it.
        """
        return self.template.rendered(self.template.fitted(messages), tools, add_generation_prompt=True)

    def has_stop(self, text: str, blocks: list[Span]) -> bool | None:
        """Whether the blocks end with a stop token; True if there are none; None if some do, and others do not.

        Of ``{% generation %}`` blocks one is enough: a message may have several, as its template's author wants it.
        """
        if all(text.endswith(self._stops, start, stop) for start, stop in blocks):  # nearly always
            return True

        ends = [text[start:stop].rstrip().endswith(self._stops) for start, stop in blocks]
        return all(ends) or (None if any(ends) and not self.template.has_generation else any(ends))

    def asked(
        self, messages: list[Message], tools: list[Message] | None, trained: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """The same as a call, by rendering this chat, which is fitted."""
        chat = Conversation(self.template, messages, tools, self._texts)
        return chat.text, self._blocks(chat, trained)

    def proven(self, messages: list[Message], tools: list[Message] | None, trained: Sequence[int]) -> Program:
        """The program for chats of the shape of this one: every second part is a block.

        A position in a symbolic text is a position in the text of each such chat: the rules find positions only as
        common prefixes of two renderings, and move from there by constant texts.
        """
        from asyncdata.tokenization.chat_template.conversation import UnknownTexts

        def cut(symbolic: SymbolicChat) -> tuple[list[str], tuple[str, ...]]:
            texts = UnknownTexts(self._special, symbolic.trace)
            chat = Conversation(symbolic, symbolic.messages, symbolic.tools, texts)
            return _cut(chat.text, self._blocks(chat, trained)), texts.marks

        return self.template.proven(messages, tools, cut)

    def _prove(self, messages: list[Message], tools: list[Message] | None, trained: tuple[int, ...]) -> Program:
        program = self.proven(messages, tools, trained)
        return program.checked(messages, tools, lambda: _cut(*self.asked(messages, tools, trained)))

    def _blocks(self, chat: Conversation, trained: Sequence[int]) -> list[Span]:
        """The blocks of the messages ``trained``.

        :raises RowFault: if they cannot be located.
        """
        if self.template.has_generation:
            return self._own_blocks(chat, trained)

        blocks: list[Span] = []
        for number in trained:
            floor = blocks[-1][1] if blocks else 0
            block = self._by_prefixes(chat, number) or self._by_mark(chat, number)
            block = block or _by_turn(chat, number) or _by_the_turn_before(chat, number)
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

        # The header for the model's next turn may be longer than an earlier turn's: it may open its thinking.
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


def _cut(text: str, blocks: Sequence[Span]) -> list[str]:
    """The text before the first block, the block's text, the text up to the next one, and so on."""
    borders = [0, *(border for block in blocks for border in block), len(text)]
    return [text[start:stop] for start, stop in pairwise(borders)]


class _Marked(NamedTuple):
    """The chat with a mark instead of a message.

    :ivar text: the rendered text.
    :ivar place: the index of the mark.
    :ivar tail: the text after the mark.
    """

    text: str
    place: int
    tail: str


def _by_turn(chat: Conversation, number: int) -> Span | None:
    """The range of message ``number``; None if it cannot be proven. Chats of unknown texts are not supported.

    The beginning. If the prompt for the message is a prefix of the whole chat, the message begins after it. Otherwise
    the chat is rendered with a mark instead of the message. The message begins where the whole chat and the prompt
    start to differ, as a turn with thoughts differs from a prompt that closes the thoughts. Their common part must
    contain the header of the turn.

    The end, by one of three proofs:

    - The chat up to and including the message is a prefix of the whole chat.
    - The text after the mark is also the end of the whole chat, so the message ends before it. The text that the
      template writes after the message before the next generation prompt belongs to the message as its stop token, if
      the template writes the same at the end of a chat. A different token there occurs only in past turns, and is not
      trained.
    - The template drops the beginning of the message in later turns, such as thoughts before a call. Then the text of
      the chat from the beginning up to the special token that ends the message must be a suffix of the chat up to and
      including the message, and there must be only one such place.
    """
    chat.texts.refuse_unknown("each end of a message for itself")
    marked = _marked(chat, number)
    start = _start(chat, number, marked)
    if start is None:
        return None

    stop = _stop(chat, number, start, marked)
    return None if stop is None or stop < start else (start, stop)


def _marked(chat: Conversation, number: int) -> _Marked | None:
    mark = chat.unused_marks()[0]
    text = chat.with_content(number, mark, keeps_form=True)
    if text is None or text.count(mark) != 1:
        return None

    place = text.index(mark)
    return _Marked(text, place, text[place + 1 :])


def _start(chat: Conversation, number: int, marked: _Marked | None) -> int | None:
    prompt = chat.prompt(number)
    if prompt is not None and chat.text.startswith(prompt):
        return len(prompt)

    if marked is None:
        return None

    header, words = chat.header_of(number), chat.words_before(number, *chat.unused_marks(), keeps_form=True)
    first = next((token for token in chat.texts.special if header.startswith(token)), None)
    at = -1 if first is None else words.rfind(first)
    if first is None or at < 0:
        return None

    header_at = marked.place - len(words) + at
    shared = min(header_at + common_prefix(words[at:], header), common_prefix(chat.text, marked.text))
    if shared in (header_at + len(header), marked.place):
        return shared  # the whole header, or as much of it as the template writes

    start = header_at + _whole_words(chat.text[header_at:shared], chat.text[header_at:], chat.texts)
    return start if start > header_at + len(first) else None


def _by_the_turn_before(chat: Conversation, number: int) -> Span | None:
    """By prefixes of what follows the content of the turn before. The last message is no such one."""
    mark, length = chat.unused_marks()[0], len(chat.messages)
    if not 0 < number < length - 1:
        return None

    prompt, up_to = chat.after(number - 1, mark, number, asks=True), chat.after(number - 1, mark, number + 1)
    whole = chat.after(number - 1, mark, length)
    if prompt is None or up_to is None or whole is None or not chat.text.endswith(whole):
        return None

    start = len(chat.text) - len(whole) + len(prompt)
    is_same = whole.startswith(up_to) and up_to.startswith(prompt)
    return (start, start + len(_said(up_to[len(prompt) :], chat.texts))) if is_same else None


def _whole_words(shared: str, text: str, texts: Texts) -> int:
    """The length of the part of ``shared``, a prefix of ``text``, that ends after white space or a special token."""
    length = 0
    for found in re.finditer("|".join([r"\s", *map(re.escape, texts.special)]), text):
        if found.end() <= len(shared):
            length = found.end()
    return length


def _stop(chat: Conversation, number: int, start: int, marked: _Marked | None) -> int | None:
    up_to = chat.up_to(number) or chat.up_to(number, keeps_form=True)
    if up_to is not None and chat.text.startswith(up_to) and len(up_to) >= start:
        return start + len(_said(up_to[start:], chat.texts))

    by_mark = None if marked is None else _stop_by_mark(chat, number, marked)
    return by_mark if by_mark is not None else _stop_by_end(chat, number, start)


def _said(text: str, texts: Texts) -> str:
    """The text without white space after a final special token: the model does not generate that white space."""
    said = text.rstrip()
    return said if said.endswith(texts.special) else text


def _stop_by_mark(chat: Conversation, number: int, marked: _Marked) -> int | None:
    if not chat.text.endswith(marked.tail):
        return None

    end, mark = len(chat.text) - len(marked.tail), marked.text[marked.place]
    last = chat.with_content(number, mark, last=True, keeps_form=True)
    ending = _ending(chat, number, mark)
    if last is None or last.count(mark) != 1 or ending is None:
        return None

    at_end = last.partition(mark)[2]
    if marked.tail.startswith(ending):
        said = _said(ending, chat.texts)
        return end + len(said) if at_end.startswith(said) else end

    stop = chat.texts.stop_at(marked.tail, 0)
    return end + stop.end() if stop is not None and marked.tail == at_end else None


def _ending(chat: Conversation, number: int, mark: str) -> str | None:
    """The text that the template writes between a message and the next generation prompt."""
    asked, header = chat.with_content(number, mark, last=True, keeps_form=True, asks=True), chat.header_of(number)
    if asked is None or not header or asked.count(mark) != 1:
        return None

    rest = asked.partition(mark)[2]
    return rest[: -len(header)] if rest.endswith(header) else None


def _stop_by_end(chat: Conversation, number: int, start: int) -> int | None:
    """The end of a message whose beginning the template has dropped."""
    whole = (chat.alone(number) or "").rstrip()
    token = next((each for each in chat.texts.special if whole.endswith(each)), None)
    if token is None:
        return None

    places = [start + found.end() for found in re.finditer(re.escape(token), chat.text[start:])]
    stops = [stop for stop in places if whole.endswith(chat.text[start:stop]) and stop - start > len(token)]
    return stops[0] if len(stops) == 1 else None
