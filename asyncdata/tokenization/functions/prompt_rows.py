"""Rows of prompts for frameworks that tokenize them, without those whose prompt is too long."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import TYPE_CHECKING, Any, ClassVar

from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.drafts import Drafting
from asyncdata.tokenization.functions.labelled import DraftTokenizer, PlainEncoder
from asyncdata.tokenization.functions.prompt import PromptReader, PromptTokenizeFn
from asyncdata.tokenization.row_fields import RowReader

if TYPE_CHECKING:
    from array import array

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter

__all__ = ("PromptRowFn",)

Buffer = bytes | memoryview


class PromptRowFn(PromptTokenizeFn, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """As :class:`~asyncdata.RowFn`, for rows with a chat as their prompt: one that is too long is dropped.

    The settings are those of :class:`~asyncdata.PromptTokenizeFn`. A sample has no tokens; ``sample.extra`` is the row.
    Labels, tools and metadata of a row are not looked at.

    :param tools: JSON schemas of tools that all rows have, for the template.
    """

    tag: ClassVar[str] = "asyncdata:PromptRowFn"

    tools: list[dict[str, Any]] | None = None

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        files = self.files()
        encoder = open_encoder(files, self.tokenizer_backend, add_special_tokens=self.add_special_tokens)
        required, optional = {"prompt": self.prompt_key, "label": None}, {"metadata": None, "tools": None}
        row = RowReader(required, optional, allows_media=True)  # the row is kept, with its media
        rows = _Rows(PromptReader(row, self.templates(files), self.tools), self.max_length)
        return DraftTokenizer(PlainEncoder(encoder), rows.read, rows.write)


class _Rows:
    """Reads the prompt of a row, and keeps the row."""

    def __init__(self, prompt: PromptReader, max_length: int | None) -> None:
        self._prompt = prompt
        self._max_length = max_length

    def read(self, raw: Buffer) -> Drafting | str:
        found = self._prompt(raw)
        return found if isinstance(found, str) else Drafting(found.drafts, {"extra": bytes(raw).removeprefix(BOM_UTF8)})

    def write(self, row: int, found: list[array[int]], drafting: Drafting, out: ColumnWriter) -> None:
        if self._max_length is not None and len(found[0]) > self._max_length:
            out.drop(row, "max_length")
        else:
            out.keep(row, (), **drafting.columns)
