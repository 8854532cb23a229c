"""Prompts for rollouts: converts a row's text or chat to token ids, and keeps its label and metadata undecoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.drafts import Draft, Drafting
from asyncdata.tokenization.functions.labelled import DraftTokenizer, PlainEncoder
from asyncdata.tokenization.functions.prompt_batch import EMPTY_PROMPT, PlainReader, write_prompts
from asyncdata.tokenization.functions.tokenizer_settings import (
    TEMPLATE_ARGUMENTS,
    Name,
    OfTokenizer,
    Templates,
    check_template_settings,
    compile_templates,
    templates_digest,
)
from asyncdata.tokenization.functions.turns import ReadChat, unusual_turns
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import TRAINED_CHATS, decode_value

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.text_encoder import TextEncoder
    from asyncdata.tokenization.row_fields import Tools
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("PromptReader", "PromptTokenizeFn")

Buffer = bytes | memoryview


class PromptTokenizeFn(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows to prompts, as slime reads them: ``{"input": text or messages, "label": ..., "metadata": {...}}``.

    The text is that of ``apply_chat_template`` with ``add_generation_prompt=True``, and the ids are those of the
    tokenizer's ``tokenizer.json``: both are equal to the results of ``AutoTokenizer``. A sample has ``tokens``;
    ``prompt``, the rendered text or the row's string; and the row's ``label`` and ``metadata``. Tools of a row are also
    stored in ``metadata["tools"]``.

    A prompt without tokens is dropped as ``empty_prompt``, one with more than ``max_length`` tokens as ``max_length``.

    :param tokenizer: a folder with ``tokenizer.json`` (a string or a path object), or a name on the Hugging Face hub.
    :param prompt_key: the key of a row's prompt: a string, or a list of messages with ``role`` and ``content``.
    :param label_key: the key of its label, any JSON value; every row must have one. None: no labels.
    :param metadata_key: the key of its optional metadata. None: no metadata.
    :param tool_key: the key of its optional tools: a list of JSON schemas, or that list as JSON text. None: no tools.
    :param apply_chat_template: render the prompt as a chat; a string is one user turn. Without it a prompt must be a
        string.
    :param chat_template: the text of a template, or the name of one of the tokenizer's templates. None: its default.
    :param chat_template_kwargs: variables for the template, such as ``enable_thinking``; JSON values.
    :param today: the date, such as 2026-01-31, for templates that use the current date. The date of the clock would
        give other tokens for the same row tomorrow.
    :param add_special_tokens: keep the tokens that the tokenizer adds around plain text. A chat template adds its own.
    :param max_length: the largest number of tokens of a prompt that is kept.
    :param revision: a branch, tag or commit on the hub.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.prompt:PromptTokenizeFn"

    makes_prompts: ClassVar[bool] = True

    prompt_key: Name = "input"
    label_key: Name | None = None
    tool_key: Name | None = "tools"
    apply_chat_template: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    today: str | None = None
    add_special_tokens: bool = False
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        self.check_fields("chat_template_kwargs")
        if self.apply_chat_template and self.add_special_tokens:
            raise ConfigError(
                "add_special_tokens=True is for plain text: a chat template writes its special tokens itself"
            )

        if not self.apply_chat_template and (self.chat_template or self.chat_template_kwargs or self.today):
            raise ConfigError(
                "chat_template, chat_template_kwargs and today do nothing without apply_chat_template=True"
            )

        check_template_settings(self.chat_template_kwargs, self.today, TEMPLATE_ARGUMENTS)

    def check_files(self, files: TokenizerFiles) -> None:
        """Compile the templates, if they are needed."""
        self.templates(files)

    def template_digest(self, files: TokenizerFiles) -> str:
        """Digest of the templates and the special tokens that they see; ``"none"`` without a template."""
        return templates_digest(files, self.chat_template) if self.apply_chat_template else "none"

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        files = self.files()
        encoder = open_encoder(files, self.tokenizer_backend, add_special_tokens=self.add_special_tokens)
        return _PromptTokenizer(self, encoder, self.templates(files))

    def templates(self, files: TokenizerFiles) -> Templates | None:
        """The compiled templates; None if prompts are not rendered."""
        if not self.apply_chat_template:
            return None

        return compile_templates(files, self.chat_template, self.chat_template_kwargs, self.today)


class _PromptTokenizer:
    """A :class:`PromptTokenizeFn`, opened. Plain prompts are read in one call, unless a row is bad or unusual."""

    def __init__(self, fn: PromptTokenizeFn, encoder: TextEncoder, templates: Templates | None) -> None:
        required = {"prompt": fn.prompt_key, "label": fn.label_key}
        optional = {"metadata": fn.metadata_key, "tools": fn.tool_key}
        self._read_all = PlainReader(required | optional) if templates is None else None
        reader = PromptReader(RowReader(required, optional), templates)
        self._one_by_one = DraftTokenizer(PlainEncoder(encoder), reader, self._write, media=fn.media)
        self._encoder = encoder
        self._max_length = fn.max_length

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        plain = None if self._read_all is None else self._read_all(rows)
        if plain is not None:
            flat, errors = self._encoder(plain.texts)
            if not errors:
                write_prompts(plain, flat, self._max_length, out)
                return

        self._one_by_one(rows, out)

    def _write(self, row: int, found: list[array[int]], drafting: Drafting, out: ColumnWriter) -> None:
        tokens = found[0]
        if not tokens:
            out.drop(row, EMPTY_PROMPT)
        elif self._max_length is not None and len(tokens) > self._max_length:
            out.drop(row, "max_length")
        else:
            out.keep(row, tokens, **drafting.columns)


class PromptReader:
    """Reads the prompt's text and the sample's columns from a raw row.

    :param tools: those of a row that has none of its own.
    """

    def __init__(self, row: RowReader, templates: Templates | None, tools: list[dict[str, Any]] | None = None) -> None:
        self._templates = templates
        self._row = row
        self._tools = tools

    def __call__(self, raw: Buffer) -> Drafting | str:
        columns = self._row(raw)
        tools = self._row.tools(columns.pop("tools", None), raw)
        self._row.schemas(tools, raw)
        prompt = decode_value(columns.pop("prompt"), raw)
        if self._templates is None:
            text = self._plain(prompt, raw)
        else:
            text = self._rendered(self._templates, prompt, tools, raw)
        columns["prompt_text"] = text.encode()
        if metadata := self._row.metadata(columns.pop("metadata", None), tools, raw):
            columns["metadata"] = metadata
        return Drafting([Draft(text, [])], columns) if text else EMPTY_PROMPT

    def _plain(self, prompt: Any, raw: Buffer) -> str:
        if isinstance(prompt, str):
            return self._row.encodable("prompt", prompt, raw)

        way_out = (
            f"; set apply_chat_template=True to render messages. {TRAINED_CHATS}" if isinstance(prompt, list) else ""
        )
        raise self._row.wrong_type("prompt", "a string", prompt, raw, way_out)

    def _rendered(self, templates: Templates, prompt: Any, tools: Tools | None, raw: Buffer) -> str:
        messages = self._row.messages("prompt", prompt, raw)
        if not messages:
            return ""  # templates do not support an empty chat

        schemas = self._tools if tools is None else tools.schemas
        template = templates.of(schemas)
        unusual = unusual_turns(messages)
        if unusual:
            ReadChat(self._row, "prompt", messages, schemas, raw).refuse_media(unusual)
        text = template.render(messages, schemas)
        if unusual:
            ReadChat(self._row, "prompt", messages, schemas, raw).check_written(unusual, text, template)
        return self._row.encodable("prompt", text, raw)
