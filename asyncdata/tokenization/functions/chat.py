"""Chats for training: rendered whole, as ``apply_chat_template`` does, with loss on the assistant's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncdata.tokenization.encoders.span_encoder import open_span_encoder
from asyncdata.tokenization.functions.chat_settings import ChatDrafts, OfChat, assistants
from asyncdata.tokenization.functions.drafts import NOTHING_TRAINED, Drafting, write_sample
from asyncdata.tokenization.functions.labelled import DraftTokenizer, Name, encoded, metadata_column
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import RowFault, decode_value, json_type

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.chat_template.assistant_spans import ChatSpans
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.span_encoder import Located

__all__ = ("ChatTokenizeFn",)

Buffer = bytes | memoryview
Message = dict[str, Any]


class ChatTokenizeFn(OfChat, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of messages to samples that train the assistant's messages: ``{"messages": [...], "tools": [...]}``.

    The tokens are those of ``apply_chat_template``. The trained part of a message begins where the model begins to
    generate, and ends with its stop token; it includes tool calls. A token that straddles the beginning is trained only
    if its other characters are white space; ``straddling_token`` counts rows with other straddling tokens.

    A row without trained tokens is dropped as ``no_trained_tokens``, and one that is too long as ``max_length``. If the
    chat template ends messages without a special token, no stop token is trained: ``no_stop_token`` counts such rows.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param messages_key: the key of a row's messages: a list, or that list as JSON text.
    :param train_on: every message of the assistant, its last one, or those whose own ``loss`` is not false; or all
        tokens of the chat, as SFTTrainer of TRL does by default.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.chat:ChatTokenizeFn"

    messages_key: Name = "messages"
    train_on: Literal["assistant", "last_assistant", "loss", "all"] = "assistant"

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        files = self.files()
        reader = _ChatReader(self, self.chat_spans(files, files.special_texts()))
        encoder = open_span_encoder(files, self.tokenizer_backend)
        return DraftTokenizer(encoder, reader, _ChatWriter(self), decode=reader.decode, media=self.media)


class _ChatReader:
    """Reads a raw row, and renders its chat."""

    def __init__(self, fn: ChatTokenizeFn, spans: tuple[ChatSpans, ChatSpans]) -> None:
        self._train_on = fn.train_on
        optional = {"tools": fn.tool_key, "metadata": fn.metadata_key}
        self._row = RowReader({"messages": fn.messages_key}, optional, decoded="messages")
        self._drafts = ChatDrafts(self._row, spans)
        self.decode = self._row.all

    def __call__(self, raw: Buffer, fields: dict[str, Any] | None = None) -> Drafting | str:
        if fields is None:
            fields = self._row(raw)
            fields["messages"] = decode_value(fields["messages"], raw)
        messages = self._row.chat("messages", fields["messages"], raw)
        tools = self._drafts.tools(fields.get("tools"), raw)
        trained = self._trained(messages, raw)
        if not trained and self._train_on != "all":
            return NOTHING_TRAINED

        draft = self._drafts.draft("messages", messages, tools, trained, raw)
        if self._train_on == "all":
            draft = draft._replace(blocks=[(0, len(draft.text))])
        return Drafting([draft], metadata_column(fields))

    def _trained(self, messages: list[Message], raw: Buffer) -> list[int]:
        if self._train_on == "all":
            return []

        numbers = assistants(messages)
        if self._train_on == "loss":
            return [number for number, message in enumerate(messages) if self._has_loss(number, message, raw)]

        return numbers if self._train_on == "assistant" else numbers[-1:]

    def _has_loss(self, number: int, message: Message, raw: Buffer) -> bool:
        loss, is_assistant = message.get("loss"), message["role"] == "assistant"
        if loss is not None and not isinstance(loss, bool):
            reason = f"{self._row.name(f'messages[{number}]')}: 'loss' must be true or false, got {json_type(loss)}"
            raise RowFault("AD111", reason, raw)

        if loss and not is_assistant:
            name = self._row.name(f"messages[{number}]")
            reason = f"{name} has loss, but is not a message of the assistant; set its 'loss' to false"
            raise RowFault("AD111", reason, raw)

        return is_assistant and loss is not False


class _ChatWriter:
    """Cuts a chat to length."""

    def __init__(self, fn: ChatTokenizeFn) -> None:
        self._fn = fn

    def __call__(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        write_sample(row, self._fn.fit(encoded(found[0], drafting.drafts[0])), drafting.columns, out)
