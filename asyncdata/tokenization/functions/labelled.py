"""Shared code of the tokenize functions: a row's drafts, their tokens, and which tokens are trained.

A *draft* is a text with its trained blocks, as ranges of characters. The offsets of tokens convert these to ranges of
tokens. The sample's ``spans`` column stores them, and ``Sample.labels`` reads it.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.shortage import raise_if_shortage
from asyncdata.tokenization.encoders.span_encoder import one_id
from asyncdata.tokenization.functions.drafts import Draft, Drafting, Encoded
from asyncdata.tokenization.functions.tokenizer_settings import Media, Name, OfTokenizer
from asyncdata.tokenization.media import MEDIA_LEFT_OUT, without_media
from asyncdata.tokenization.rows import MediaFault, RowFault
from asyncdata.tokenization.spans import trained_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.span_encoder import Located, SpanEncoder
    from asyncdata.tokenization.encoders.text_encoder import TextEncoder
    from asyncdata.tokenization.encoders.transformers_tokenizer import CodedTokenizer
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = (
    "Name",
    "DraftTokenizer",
    "OfAnyLength",
    "Overlong",
    "PlainEncoder",
    "PositiveInt",
    "encoded",
    "metadata_column",
    "named_token",
)

Buffer = bytes | memoryview
Overlong = Literal["drop", "truncate_right", "truncate_left", "error"]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class OfAnyLength(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of functions whose samples have the length of their rows.

    :param max_length: the largest sample that is kept whole, in tokens.
    :param overlong: what to do with a longer sample: drop it, counted as ``max_length``; cut its right or left end,
        counted as ``truncated``; or treat its row as bad.
    """

    max_length: PositiveInt | None = None
    overlong: Overlong = "drop"

    def fit(self, encoded: Encoded) -> Encoded | None:
        """The sample, cut if necessary; None to drop it.

        :raises RowFault: if it is too long, and ``overlong`` is "error".
        """
        length, limit = len(encoded.tokens), self.max_length
        if limit is None or length <= limit:
            return encoded

        if self.overlong == "error":
            raise RowFault("AD415", f"{length} tokens are more than max_length={limit}; raise it, or set overlong=")

        if self.overlong == "drop":
            return None

        start = length - limit if self.overlong == "truncate_left" else 0
        return encoded.cut(start, start + limit)


def named_token(files: TokenizerFiles, name: str, given: bool | str, setting: str) -> str | None:
    """The special token that a setting names: the tokenizer's own for True, None for False.

    :param name: the tokenizer's name for it, such as ``eos_token``.
    :raises ConfigError: if the tokenizer has no such token.
    """
    if isinstance(given, str) or not given:
        return given or None

    if name not in files.special_tokens:
        raise ConfigError(
            f"AD410 {setting}=True, but the tokenizer has no {name}; pass {setting}='the token', or False"
        )

    return files.special_tokens[name]


class DraftReader(Protocol):
    """Reads a raw row."""

    def __call__(self, raw: Buffer, /, *decoded: Any) -> Drafting | str:
        """The row's drafts, or the reason to drop the row.

        :param decoded: the row's value from ``decode`` of :class:`DraftTokenizer`, if that has decoded the rows.
        :raises RowFault: if it is bad.
        """
        ...


class DraftWriter(Protocol):
    """Writes the sample of a row."""

    def __call__(self, row: int, found: list[Any], drafting: Drafting, out: ColumnWriter) -> None:
        """Keep the row, or drop it; ``found`` are the encodings of its drafts.

        :raises RowFault: if it is bad.
        """
        ...


class DraftTokenizer:
    """An opened tokenize function: reads the drafts of rows, tokenizes all of them at once, and writes samples.

    :param encoder: None if no row has a draft.
    :param decode: decodes many rows in one call, to a value for each; it returns None if a row is bad, or may be.
    :param media: what to do with a row that has media.
    """

    def __init__(
        self,
        encoder: SpanEncoder | PlainEncoder | None,
        read: DraftReader,
        write: DraftWriter,
        decode: Callable[[Sequence[Buffer]], Sequence[Any] | None] = lambda _: None,
        media: Media = "error",
    ) -> None:
        self._encoder = encoder
        self._read = read
        self._write = write
        self._decode = decode
        self._leaves_out = media == "leave_out"

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        draftings = list(self._read_each(rows, out))
        texts = [draft.text for _, drafting in draftings for draft in drafting.drafts]
        encodings = iter(() if self._encoder is None else self._encoder.encode(texts))
        for row, drafting in draftings:
            found = list(islice(encodings, len(drafting.drafts)))
            try:
                for each in found:
                    if isinstance(each, Exception):
                        raise _refused(each)

                self._write(row, found, drafting, out)
                if drafting.has_left_out and out.has_kept(row):
                    out.note(row, MEDIA_LEFT_OUT)
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, rows[row]))

    def _read_each(self, rows: Sequence[Buffer], out: ColumnWriter) -> Iterator[tuple[int, Drafting]]:
        decoded = self._decode(rows)
        arguments: Iterable[tuple[Any, ...]] = zip(rows) if decoded is None else zip(rows, decoded, strict=True)
        for row, given in enumerate(arguments):
            out.progress(row)  # a template is a program, and may run forever
            drafting: Drafting | str | RowFault
            try:
                drafting = self._read(*given)
            except RowFault as fault:
                drafting = self._read_again(given[0], fault)
            if isinstance(drafting, RowFault):
                out.fail(row, drafting)
            elif isinstance(drafting, str):
                out.drop(row, drafting)
            else:
                yield row, drafting
        out.progress(None)

    def _read_again(self, raw: Buffer, fault: RowFault) -> Drafting | str | RowFault:
        """The row without its media, if they are the fault and are to be left out; else the fault."""
        if not (self._leaves_out and isinstance(fault, MediaFault)):
            return fault

        try:
            drafting = self._read(without_media(raw, fault.keys))
        except RowFault as other:
            return RowFault(other.code, other.reason, raw)

        return drafting if isinstance(drafting, str) else drafting._replace(has_left_out=True)


def _refused(error: Exception) -> RowFault:
    """The fault of a row whose text the tokenizer rejected.

    :raises Exception: ``error``, if a system resource ran out.
    """
    raise_if_shortage(error)
    return RowFault("AD421", f"the tokenizer raised {type(error).__name__}: {error}")


class PlainEncoder:
    """The encoder for prompts and for text that is trained whole: they need no offsets, so any backend works."""

    def __init__(self, encoder: TextEncoder | CodedTokenizer) -> None:
        self._encoder = encoder

    def encode(self, texts: list[str]) -> list[array[int] | Exception]:
        """The ids of each text, or the error that the library raised for it."""
        flat, errors = self._encoder(texts)
        found: list[array[int] | Exception] = [array("i", ids) for ids in flat.of_each()]
        for number, error in errors.items():
            found[number] = error
        return found

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """The id of the special token that a setting names, as an array; empty for None.

        :raises ConfigError: if the tokenizer does not know it.
        """
        return one_id(lambda text: array("i", self._encoder([text]).flat.of_each()[0]), token, setting)


def encoded(located: Located, draft: Draft) -> Encoded:
    """The tokens of ``draft``, and which of them are trained."""
    spans, straddling = trained_tokens(located.offsets, draft.blocks, draft.text)
    return Encoded(located.ids, spans, straddling, draft.has_stop)


def metadata_column(fields: Mapping[str, Any]) -> dict[str, Buffer]:
    """The column of the row's metadata, unchanged; no column for null."""
    text = fields.get("metadata")
    return {} if text is None or bytes(text) == b"null" else {"metadata": text}
