"""Converts rows to prompts, in the workers; labels and metadata stay undecoded."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from operator import sub
from typing import Any, NamedTuple, cast

import msgspec

from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
from asyncdata.tokenization.encoders.fast_backends import FlatIds
from asyncdata.tokenization.encoders.hf_encoder import Located
from asyncdata.tokenization.encoders.text_encoder import Encoder
from asyncdata.tokenization.functions.text import Draft, Drafting, RowTokenizer
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer, Templates
from asyncdata.tokenization.media import ReadChat
from asyncdata.tokenization.row_fields import NotWritten, RowReader, Tools
from asyncdata.tokenization.rows import TRAINED_CHATS

_EMPTY_PROMPT = "empty_prompt"
"""The reason to drop a prompt without text or tokens."""

_NO_NOTES: tuple[str, ...] = ()
_NULL = b"null"
_NOTHING = msgspec.Raw(b"")
_OBJECT = ord("{")


class PromptTokenizer(RowTokenizer):
    """A tokenize function of prompts, opened. Plain prompts are written in one call, unless a row is bad or unusual.

    :param row: reads ``prompt``, which it decodes, ``label``, ``metadata`` and ``tools``.
    :param templates: None: prompts are not rendered.
    :param tools: for a row that has none of its own.
    """

    may_have_pictures = False

    def __init__(
        self,
        fn: OfTokenizer,
        row: RowReader,
        encoder: Encoder,
        templates: Templates | None,
        max_length: int | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(fn, row, encoder)
        self._encode = encoder
        self._templates = templates
        self._tools = tools
        self._max_length = max_length
        self._not_written = NotWritten(() if row.account is None else row.account.ignored)

    def write_all(self, columns: dict[str, list[Any]], out: ColumnWriter) -> bool:
        plain = _plain_prompts(columns) if self._templates is None else None
        if plain is None:
            return False

        flat, errors = self._encode(plain.texts)
        if errors:
            return False

        if flat.utf8 is not None:  # encoded once
            plain.columns["prompt_text"] = flat.utf8
        _write_prompts(plain, flat, self._max_length, out)
        return True

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        tools = self._row.tools(fields.get("tools"), raw)
        self._row.schemas(tools, raw)
        prompt, notes = fields["prompt"], _NO_NOTES
        if self._templates is None:
            text = self._plain(prompt, raw)
        else:
            text, notes = self._rendered(self._templates, prompt, tools, raw)
        if not text:
            return _EMPTY_PROMPT

        columns: dict[str, Buffer] = {"prompt_text": text.encode()}
        if "label" in fields:
            columns["label"] = fields["label"]
        if metadata := self._row.metadata(fields.get("metadata"), tools, raw):
            columns["metadata"] = metadata
        return Drafting([Draft(text, [])], columns, notes=notes)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        tokens = found[0].ids
        if not tokens:
            out.drop(row, _EMPTY_PROMPT)
        elif self.is_too_long(tokens):
            out.drop(row, "max_length")
        else:
            out.keep(row, tokens, **drafting.columns)

    def is_too_long(self, tokens: array[int]) -> bool:
        """Whether the prompt has more tokens than the limit."""
        return self._max_length is not None and len(tokens) > self._max_length

    def _plain(self, prompt: Any, raw: Buffer) -> str:
        is_chat = isinstance(prompt, list)
        way_out = f"; set apply_chat_template=True to render messages. {TRAINED_CHATS}" if is_chat else ""
        return self._row.text("prompt", prompt, raw, way_out)

    def _rendered(
        self, templates: Templates, prompt: Any, tools: Tools | None, raw: Buffer
    ) -> tuple[str, tuple[str, ...]]:
        messages = self._row.messages("prompt", prompt, raw)
        if not messages:
            return "", ()  # templates do not support an empty chat

        schemas = self._tools if tools is None else tools.schemas
        template = templates.of(schemas)
        chat = ReadChat(self._row, "prompt", messages, schemas, raw, may_have_pictures=self.may_have_pictures)
        text = template.render(messages, schemas)
        chat.check_written(text, template)
        notes = _NO_NOTES
        if schemas or len(messages) > 1 or len(messages[0]) > 2:
            notes = self._not_written(template, messages, schemas)
        return self._row.encodable("prompt", text, raw), notes


class RowsOfPrompts(PromptTokenizer):
    """Keeps rows as they are, without those whose prompt is too long."""

    def write_all(self, columns: dict[str, list[Any]], out: ColumnWriter) -> bool:
        return False

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        found = super().read(fields, raw)
        return found if isinstance(found, str) else Drafting(found.drafts, {"extra": bytes(raw).removeprefix(BOM_UTF8)})

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        if self.is_too_long(found[0].ids):
            out.drop(row, "max_length")
        else:
            out.keep(row, (), **drafting.columns)


# Plain prompts, without a Python object for each part.


class _PlainPrompts(NamedTuple):
    """The texts of rows, and the values of their columns."""

    texts: list[str]
    columns: dict[str, list[bytes] | list[str]]


def _plain_prompts(fields: dict[str, list[Any]]) -> _PlainPrompts | None:
    """The prompts, if they are strings, and the other fields need no conversion; else None."""
    texts = fields["prompt"]
    if set(map(type, texts)) != {str}:
        return None

    columns = {name: _texts(column) for name, column in fields.items() if name != "prompt"}
    if not _is_ordinary(columns):
        return None

    columns.pop("tools", None)
    return _PlainPrompts(texts, {**columns, "prompt_text": texts})


def _texts(column: list[msgspec.Raw | None]) -> list[bytes]:
    """The JSON texts of the values; an empty list if no row has one."""
    missing = column.count(None)
    if missing == len(column):
        return []

    present = (_NOTHING if raw is None else raw for raw in column) if missing else cast("list[msgspec.Raw]", column)
    return list(map(bytes, present))


def _is_ordinary(columns: dict[str, list[bytes]]) -> bool:
    """Whether every row has its label, all metadata are objects or null, and all tools are null."""
    tools = columns.get("tools", ())
    if any(text and text != _NULL for text in tools):
        return False

    if "label" in columns and not (columns["label"] and all(columns["label"])):
        return False

    metadata = columns.get("metadata", [])
    for number, text in enumerate(metadata):
        if text and text[0] != _OBJECT:
            if text != _NULL:
                return False

            metadata[number] = b""
    return True


def _write_prompts(prompts: _PlainPrompts, flat: FlatIds, max_length: int | None, out: ColumnWriter) -> None:
    """Keep the prompts. Prompts without tokens, or with more than ``max_length`` tokens, are dropped."""
    ends, limit = flat.ends, len(flat.ids) if max_length is None else max_length
    starts = [0, *ends[:-1]]
    lengths = list(map(sub, ends, starts))
    if 0 < min(lengths) and max(lengths) <= limit and all(prompts.texts):
        out.keep_all(range(len(ends)), flat.ids, ends, prompts.columns)
        return

    for row, length in enumerate(lengths):
        if not length or not prompts.texts[row]:
            out.drop(row, _EMPTY_PROMPT)
        elif length > limit:
            out.drop(row, "max_length")
        else:
            tokens = array("i", bytes(flat.ids[4 * starts[row] : 4 * ends[row]]))
            out.keep(row, tokens, **_columns_of(prompts, row))


def _columns_of(prompts: _PlainPrompts, row: int) -> dict[str, bytes]:
    found = {name: values[row] for name, values in prompts.columns.items() if values and values[row]}
    return {name: value.encode() if isinstance(value, str) else value for name, value in found.items()}
