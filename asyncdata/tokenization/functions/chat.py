"""Chats for training: rendered whole, as ``apply_chat_template`` does, with loss on the assistant's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.functions.of_chat import Chats, OfChat, PairsOfTexts
from asyncdata.tokenization.functions.tokenizer_settings import Name, adopt_processor

if TYPE_CHECKING:
    from asyncdata.core.columns import Column
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.pictures.settings import Processor
else:
    Processor = Any  # imported where one is given


class ChatTokenizeFn(OfChat, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of messages to samples that train the assistant's messages: ``{"messages": [...], "tools": [...]}``.

    The tokens are those of ``apply_chat_template``. The trained part of a message begins where the model begins to
    generate, and ends with its stop token; it includes tool calls. A token that straddles the beginning is trained only
    if its other characters are white space; ``straddling_token`` counts rows with other straddling tokens.

    A row without trained tokens is dropped as ``no_trained_tokens``, and one that is too long as ``max_length``. If the
    chat template ends messages without a special token, no stop token is trained: ``no_stop_token`` counts such rows.
    If it ends earlier messages with another one, as that of gpt-oss, they are trained without it:
    ``answer_without_stop`` counts such rows.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param messages_key: the key of a row's messages: a list, or that list as JSON text.
    :param label_key: the key of a row's label, any JSON value, such as KTO's; every row must have one. None: no
        labels.
    :param dialect: the form of all rows: ``messages``, ``sharegpt`` (``conversations`` of ``from`` and ``value``),
        ``alpaca`` (``instruction``, ``input``, ``output``), ``prompt_completion`` (two lists of messages, or two texts
        that no template renders; the second is trained), ``xlam`` (``query``, and calls in ``answers``), or two texts
        that are a question and its answer: ``prompt_response``, ``query_response``, ``query_answer``,
        ``question_answer``, ``question_response``, ``instruction_response`` (``context``). None: a loader recognises it
        by the first row of its source; it is ``messages`` with ``messages_key``.
    :param dialect_keys: the row's own names of keys of the dialect, such as ``{"question": "ask"}``.
    :param dialect_row: the row by which a loader recognised the dialect. Loaders set it.
    :param processor: what makes pixels of pictures: a :class:`~asyncdata.Processor`, or its folder. None: a row with
        pictures is bad.
    :param train_on: every message of the assistant, or its last one; or all tokens of the chat, as SFTTrainer of TRL
        does by default. In each case, turns that their flags leave out are not trained.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.chat:ChatTokenizeFn"

    messages_key: Name = "messages"
    label_key: Name | None = None
    dialect: str | None = None
    dialect_keys: dict[Name, Name] = {}
    dialect_row: str | None = None
    processor: Processor | str | None = None
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dialect is not None or self.dialect_keys:
            from asyncdata.tokenization.functions.dialects import check_dialect

            check_dialect(self.dialect, self.dialect_keys)
        if self.dialect not in (None, "messages") and not self._has_default_keys:
            raise ConfigError(f"dialect={self.dialect!r} has keys of its own: leave messages_key out")

        if self.processor is not None:
            adopt_processor(self)

    @property
    def _adopted(self) -> Processor | None:
        """The processor, whose folder may have been given."""
        return cast("Processor | None", self.processor)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What samples have beside their tokens: nothing without a processor."""
        return () if self._adopted is None else self._adopted.columns(self.tokenizer, self.revision)

    @property
    def _has_default_keys(self) -> bool:
        return self.messages_key == "messages"

    @property
    def is_of_any_dialect(self) -> bool:
        """Whether a loader is to recognise the dialect."""
        return self.dialect is None and self._has_default_keys

    @property
    def may_be_text(self) -> bool:
        """Prompts and completions may be text; pictures need a template."""
        return self.dialect == "prompt_completion" and self.processor is None

    def settings_digest(self) -> str:
        """The same for a dialect that is named and one that is recognised; the processor counts by its files."""
        dialect = None if self.dialect == "messages" else self.dialect
        processor = self._adopted and self._adopted.named(self.tokenizer, self.revision)
        same = msgspec.structs.replace(self, dialect=dialect, dialect_row=None, processor=processor)
        return OfChat.settings_digest(same)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        keys = {"messages": self.messages_key} if self.dialect in (None, "messages") else self.dialect_keys
        args = self, self.dialect or "messages", keys, self.train_on, self.dialect_row or "", self.label_key
        if self._adopted is None:
            return PairsOfTexts(*args) if self.may_be_text else Chats(*args)

        from asyncdata.tokenization.functions.pictured import PicturedChats

        config = self._adopted.config(self.tokenizer, self.revision)
        opened = PicturedChats(*args, self._adopted.keys(config.kinds, self.ignore_keys))
        opened.open_processor(self._adopted, config)
        return opened
