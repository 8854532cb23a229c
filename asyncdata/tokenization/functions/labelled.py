"""Shared code of the tokenize functions: a row's drafts, their tokens, and which tokens are trained.

A *draft* is a text with its trained blocks, as ranges of characters. The tokenizer's offsets convert these to ranges of
tokens. The sample's ``spans`` column stores them, and ``Sample.labels`` reads it.
"""

from __future__ import annotations

from array import array
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.shortage import raise_if_shortage
from asyncdata.tokenization.encoders.fast_backends import one_by_one
from asyncdata.tokenization.encoders.hf_encoder import encode_here
from asyncdata.tokenization.functions.drafts import Draft, Drafting, Encoded
from asyncdata.tokenization.functions.tokenizer_settings import Name, OfTokenizer
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import Span, trained_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenizers import AddedToken, Encoding, Tokenizer

    from asyncdata.tokenization.column_writer import ColumnWriter
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
    "SpanEncoder",
    "metadata_column",
    "named_token",
    "special_ids",
)

Buffer = bytes | memoryview
Overlong = Literal["drop", "truncate_right", "truncate_left", "error"]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class OfAnyLength(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of functions whose samples have the length of their rows.

    :param max_length: the largest sample that is kept whole, in tokens.
    :param overlong: what to do with a longer sample: drop it, counted as ``max_length``; cut its right or left end; or
        treat its row as bad.
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

    def __call__(self, raw: Buffer) -> Drafting | str:
        """The row's drafts, or the reason to drop the row.

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
    """

    def __init__(self, encoder: SpanEncoder | PlainEncoder | None, read: DraftReader, write: DraftWriter) -> None:
        self._encoder = encoder
        self._read = read
        self._write = write

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
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, rows[row]))

    def _read_each(self, rows: Sequence[Buffer], out: ColumnWriter) -> Iterator[tuple[int, Drafting]]:
        for row, raw in enumerate(rows):
            out.progress(row)  # a template is a program, and may run forever
            try:
                drafting = self._read(raw)
            except RowFault as fault:
                out.fail(row, fault)
                continue

            if isinstance(drafting, str):
                out.drop(row, drafting)
            else:
                yield row, drafting
        out.progress(None)


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
        if token is None:
            return array("i")

        (ids,) = self._encoder([token]).flat.of_each()
        return _one_id(array("i", ids), token, setting)


class SpanEncoder:
    """A tokenizer with reliable offsets, which only the library ``tokenizers`` gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Some post-processors exclude the space before a word from the offsets of its token, which contains it.
        tokenizer.post_processor = None
        self._tokenizer = tokenizer
        self._encode_all = partial(encode_here(tokenizer, with_offsets=True), add_special_tokens=False)
        self._stripping = {
            id: token for id, token in tokenizer.get_added_tokens_decoder().items() if token.lstrip or token.rstrip
        }

    def special(self) -> list[str]:
        """The texts of the special tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    def encode(self, texts: list[str]) -> list[Encoding] | list[Encoding | Exception]:
        """The encoding of each text without special tokens around it, or the error that the library raised for it."""
        try:
            return self._encode_all(texts)
        except Exception:  # a bare Exception, which does not name the text
            return one_by_one(self._encode_all, texts)

    def offsets(self, encoding: Encoding, text: str) -> list[Span]:
        """The range of characters of each token."""
        offsets: list[Span] = encoding.offsets
        if self._stripping:
            for number, id in enumerate(encoding.ids):
                if id in self._stripping:
                    offsets[number] = _own_characters(self._stripping[id], offsets[number], text)
        return offsets

    def encoded(self, encoding: Encoding, draft: Draft) -> Encoded:
        """The tokens of ``draft``, and which of them are trained."""
        spans, straddling = trained_tokens(self.offsets(encoding, draft.text), draft.blocks, draft.text)
        return Encoded(array("i", encoding.ids), spans, straddling, draft.has_stop)

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """The id of the special token that a setting names, as an array; empty for None.

        :raises ConfigError: if the tokenizer does not know it.
        """
        if token is None:
            return array("i")

        return _one_id(array("i", self._tokenizer.encode(token, add_special_tokens=False).ids), token, setting)


def _one_id(ids: array[int], token: str, setting: str) -> array[int]:
    if len(ids) != 1:
        raise ConfigError(f"{setting}={token!r} is {len(ids)} tokens of the tokenizer; name one of its own tokens")

    return ids


def special_ids(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """The special tokens that the tokenizer adds before plain text, and after it."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    inner = [number for number, special in enumerate(encoding.special_tokens_mask) if not special]
    ids = array("i", encoding.ids)
    return (ids[: inner[0]], ids[inner[-1] + 1 :]) if inner else (ids, array("i"))


def _own_characters(token: AddedToken, offsets: Span, text: str) -> Span:
    """The offsets without the white space that the token has absorbed: the model does not generate it."""
    start = text.find(token.content, *offsets)
    return (start, start + len(token.content)) if start >= 0 else offsets


def metadata_column(fields: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The column of the row's metadata, unchanged; no column for null."""
    text = fields.get("metadata", b"null")
    return {} if bytes(text) == b"null" else {"metadata": text}
