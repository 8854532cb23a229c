"""The trained tokens of a sample, with the text of each token and its turn of the chat."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.chat_template.conversation import Conversation
from asyncdata.tokenization.chat_template.texts import Texts
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.tokenization.functions.preference import PreferenceTokenizeFn
from asyncdata.tokenization.functions.tokenizer_settings import compile_templates
from asyncdata.tokenization.media import without_media
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import LIST_OF_OBJECTS, RowDecoder, decode_value
from asyncdata.tokenization.token_text import TokenTexts, without_texts
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from asyncdata.cli.rows import InspectedRow
    from asyncdata.core.types import Sample
    from asyncdata.tokenization.functions.of_chat import OfChat
    from asyncdata.tokenization.functions.tokenizer_settings import Templates
    from asyncdata.tokenization.token_text import Piece

_LONE_BYTES = "".join(map(chr, range(0xDC80, 0xDD00)))
"""Characters for the single bytes of a character that was cut in two."""


class Turn(NamedTuple):
    """A message of ``role`` from character ``start`` on; ``user+assistant`` if two messages have no visible border."""

    start: int
    role: str


class MaskedText(NamedTuple):
    """One text of a sample.

    :ivar name: ``chosen`` or ``rejected`` in a pair, else empty.
    :ivar pieces: its tokens, in their order.
    :ivar turns: with offsets in the joined texts of the pieces; empty if it is not a chat.
    :ivar is_labelled: whether the sample has labels.
    """

    name: str
    pieces: list[Piece]
    turns: list[Turn]
    is_labelled: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def num_trained(self) -> int:
        """Trained tokens of the text."""
        return sum(piece.stop - piece.start for piece in self.pieces if piece.is_trained)


class LossMask:
    """Finds the tokens that a tokenize function trains.

    :param tokenize_fn: the function, or its description.
    :param tokenizer: the tokenizer that decodes; None: the description's own. Without either, tokens are
        shown as numbers.
    :raises ConfigError: if there is no such tokenizer.
    """

    def __init__(self, tokenize_fn: Any, tokenizer: str | None = None) -> None:
        own = getattr(tokenize_fn, "tokenizer", None)
        name = tokenizer or (os.fspath(own) if isinstance(own, str | os.PathLike) else None)
        revision = getattr(tokenize_fn, "revision", None) if tokenizer is None else None
        self._texts = None if name is None else TokenTexts(TokenizerFiles(resolve(name, revision).folder).load())
        self._turns = _turns_of(tokenize_fn)

    def __call__(self, row: InspectedRow) -> list[MaskedText]:
        """The texts of a row's sample: two for a pair, none if the row yields no sample."""
        sample = row.sample
        if sample is None:
            return []

        labels = sample.labels
        trained = [False] * len(sample.tokens) if labels is None else (labels == sample.tokens).tolist()
        other = _rejected(sample)
        name = "" if other is None else "chosen"
        masked = [self._masked(row, name, sample.tokens.tolist(), trained, labels is not None)]
        return masked if other is None else [*masked, self._masked(row, "rejected", *other, is_labelled=True)]

    def _masked(
        self, row: InspectedRow, name: str, ids: list[int], trained: list[bool], is_labelled: bool
    ) -> MaskedText:
        pieces = without_texts(ids, trained) if self._texts is None else self._texts(ids, trained)
        find = self._turns.get(name)
        turns = [] if find is None else find(row.raw, "".join(piece.text for piece in pieces))
        return MaskedText(name, pieces, turns, is_labelled)


def _turns_of(tokenize_fn: Any) -> dict[str, Turns]:
    if isinstance(tokenize_fn, ChatTokenizeFn):
        return {"": Turns(tokenize_fn, [tokenize_fn.messages_key])}

    if isinstance(tokenize_fn, PreferenceTokenizeFn):
        prompt = [] if tokenize_fn.prompt_key is None else [tokenize_fn.prompt_key]
        keys = {"chosen": tokenize_fn.chosen_key, "rejected": tokenize_fn.rejected_key}
        return {name: Turns(tokenize_fn, [*prompt, key]) for name, key in keys.items()}

    return {}


def _rejected(sample: Sample) -> tuple[list[int], list[bool]] | None:
    """The other text of a pair."""
    ids, spans = sample.extra.get("rejected_input_ids"), sample.extra.get("rejected_spans")
    if ids is None or spans is None:
        return None

    trained = [False] * len(ids)
    for start, stop in spans:
        trained[start:stop] = [True] * (stop - start)
    return ids, trained


# Which message of a chat each part of its text belongs to


class Turns:
    """Finds the turns in the text of a chat.

    The template renders the chat up to each message. If the result is not a prefix of the whole text, as with templates
    that change earlier turns, the message and the next one are one turn.

    :param keys: the keys of a row's parts of the chat.
    """

    def __init__(self, fn: OfChat, keys: list[str]) -> None:
        self._keys = keys
        self._tool_key = fn.tool_key
        self._row = RowReader({"prompt": keys[-1]}, {"tools": fn.tool_key})
        self._decode = RowDecoder((*keys, fn.tool_key or keys[-1]))
        self._leaves_media_out = fn.media == "leave_out"
        files = fn.files()
        self._templates: Templates | None = None
        if files.chat_templates or fn.chat_template is not None:
            variables = {**fn.chat_template_kwargs, "add_generation_prompt": False}
            self._templates = compile_templates(files, fn.chat_template, variables, fn.today)

    def __call__(self, raw: bytes, text: str) -> list[Turn]:
        """The turns of ``text``, which may be cut at either end; none if the row has no chat, or another one.

        :param raw: a row that became a sample.
        """
        *parts, tools_text = self._decode(without_media(raw, ()) if self._leaves_media_out else raw)
        values = [decode_value(part) for part in parts if part is not None]
        chats = [value for value in values if value is not None]
        texts = [chat for chat in chats if isinstance(chat, str)]
        if self._templates is None or any(len(self._keys) > 1 or not LIST_OF_OBJECTS.match(text) for text in texts):
            return []

        messages = [message for chat in chats for message in self._row.chat("prompt", chat, raw)]
        tools = None if self._tool_key is None or tools_text is None else self._row.tools(tools_text, raw)
        schemas = self._row.schemas(tools, raw)
        template = self._templates.without_tools if schemas is None else self._templates.with_tools
        conversation = Conversation(template, template.fitted(messages), schemas, Texts([]))
        first = _place(text, conversation.text)
        return [] if first is None else _seen(_turns(conversation), first, text)


def _turns(chat: Conversation) -> list[Turn]:
    turns, start, roles = [], 0, list[str]()
    for number, message in enumerate(chat.messages):
        roles.append(str(message["role"]))
        up_to: str | None = chat.text
        if number + 1 < len(chat.messages):
            up_to = chat.up_to(number)
        if up_to is not None and chat.text.startswith(up_to):
            turns.append(Turn(start, "+".join(roles)))
            start, roles = len(up_to), []
    return turns


def _place(text: str, chat: str) -> int | None:
    """The offset of the text in the chat; None if it is not there. The text may be cut at one end."""
    whole = text.strip(_LONE_BYTES)
    if chat.startswith(whole):
        return -_num_lone(text)

    return len(chat) - len(whole) - _num_lone(text) if chat.endswith(whole) else None


def _num_lone(text: str) -> int:
    """The number of bytes of a cut character at the start of the text."""
    return len(text) - len(text.lstrip(_LONE_BYTES))


def _seen(turns: list[Turn], first: int, text: str) -> list[Turn]:
    """The turns of a text that begins at character ``first`` of the chat."""
    moved = [Turn(turn.start - first, turn.role) for turn in turns if turn.start - first < len(text)]
    num_before = sum(turn.start <= max(0, _num_lone(text) - 1) for turn in moved)
    return [Turn(0, moved[num_before - 1].role), *moved[num_before:]] if num_before else moved
