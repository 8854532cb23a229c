"""Texts with labels: a row's drafts, their tokens, which of them are trained; and plain text that is trained whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from asyncdata.core.errors import raise_if_shortage
from asyncdata.tokenization.column_writer import Buffer, ColumnWriter, Span, clip, encode_spans, trained_tokens
from asyncdata.tokenization.encoders.text_encoder import Encoder, open_encoder
from asyncdata.tokenization.functions.tokenizer_settings import Name, OfTokenizer, PositiveInt
from asyncdata.tokenization.media import MEDIA_LEFT_OUT, without_media
from asyncdata.tokenization.row_fields import Account, RowReader
from asyncdata.tokenization.rows import MediaFault, RowFault

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from asyncdata.core.messages import Unread
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.encoders.transformers_tokenizer import CodedTokenizer
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles


Overlong = Literal["drop", "truncate_right", "truncate_left", "error"]
NOTHING_TRAINED = "no_trained_tokens"
TRUNCATED = "truncated"
_TURN_LEFT_OUT = "turn_left_out"


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


class RowTokenizer(ABC):
    """An opened tokenize function: reads the drafts of rows, tokenizes all of them at once, and writes samples.

    :param row: reads the fields of rows.
    :param encoder: None if no row has a draft.
    """

    def __init__(self, fn: OfTokenizer, row: RowReader, encoder: Encoder | CodedTokenizer | None) -> None:
        self._row = row
        self._encoder = encoder
        self._leaves_out = fn.media == "leave_out"

    @abstractmethod
    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        """The drafts of a row, or the reason to drop it.

        :param fields: the row's fields; None for one that it lacks, unless it is not there.
        :param raw: the row, for errors.
        :raises RowFault: if it is bad.
        """

    @abstractmethod
    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        """Keep a row, or drop it; ``found`` are the tokens of its drafts.

        :raises RowFault: if it is bad.
        """

    def rest(self, raw: Buffer) -> dict[str, str]:
        """The keys of a row that are not read, each with the beginning of its value."""
        with suppress(RowFault):
            raw = without_media(raw, self._row.media) if self._leaves_out else raw
        return self._row.rest(raw)

    def unread(self, rows: Sequence[Buffer], looks: Iterable[int]) -> dict[str, Unread]:
        """The keys of some rows that are not read."""
        found: dict[str, Unread] = {}
        is_told = self._row.account is not None and self._row.account.is_told
        for row in looks:
            for key, text in self.rest(rows[row]).items() if row < len(rows) else ():
                number, first, shown = found.get(key, (0, row, text if is_told else None))
                found[key] = number + 1, first, shown
        return found

    def write_all(self, columns: dict[str, list[Any]], out: ColumnWriter) -> bool:
        """Write all rows at once, by the columns of their fields; false if a row needs the other methods."""
        return False

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        columns = self._row.columns(rows)
        if columns is not None and self.write_all(columns, out):
            return

        draftings = list(self._read_each(rows, columns, out))
        texts = [draft.text for _, drafting in draftings for draft in drafting.drafts]
        encodings = iter(() if self._encoder is None else self._encoder.encode(texts))
        for row, drafting in draftings:
            found = list(islice(encodings, len(drafting.drafts)))
            try:
                self.write(row, list(map(accepted, found)), drafting, out)
                if drafting.notes and out.has_kept(row):
                    for note in drafting.notes:
                        out.note(row, note)
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, rows[row]))

    def _read_each(
        self, rows: Sequence[Buffer], columns: dict[str, list[Any]] | None, out: ColumnWriter
    ) -> Iterator[tuple[int, Drafting]]:
        fields: list[dict[str, Any]] | None = None
        if columns is not None:
            fields = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for row, raw in enumerate(rows):
            out.progress(row)  # a template is a program, and may run forever
            try:
                found = self._read(raw, None if fields is None else fields[row])
            except RowFault as fault:
                out.fail(row, fault)
                continue

            if isinstance(found, str):
                out.drop(row, found)
            else:
                yield row, found
        out.progress(None)

    def _read(self, raw: Buffer, fields: dict[str, Any] | None) -> Drafting | str:
        """The drafts of a row; without its media, if they are its fault and are to be left out."""
        try:
            return self.read(self._row(raw) if fields is None else fields, raw)
        except MediaFault as fault:
            if not self._leaves_out:
                raise

            keys = fault.keys
        try:
            bare = without_media(raw, keys)
            found = self.read(self._row(bare), bare)
        except RowFault as fault:
            raise RowFault(fault.code, fault.reason, raw) from None

        return found if isinstance(found, str) else found._replace(notes=(*found.notes, MEDIA_LEFT_OUT))

    @staticmethod
    def write_sample(
        row: int, encoded: Encoded | None, columns: Mapping[str, Buffer], out: ColumnWriter, notes: Iterable[str] = ()
    ) -> None:
        """Keep a sample, unless it is too long or has nothing to train on.

        :param encoded: None if the sample is too long.
        :param notes: further notes that statistics count.
        """
        if encoded is None:
            out.drop(row, "max_length")
            return

        spans = encoded.predicted
        if not spans:
            out.drop(row, NOTHING_TRAINED)
            return

        out.keep(row, encoded.tokens, spans=encode_spans(spans), **columns)
        for note in sorted(set(chain(encoded.notes(), notes))):
            out.note(row, note)


def accepted(found: Located | Exception) -> Located:
    """The tokens of a text.

    :raises RowFault: if the tokenizer rejected it.
    """
    if not isinstance(found, Exception):
        return found

    raise_if_shortage(found)
    raise RowFault("AD421", f"the tokenizer raised {type(found).__name__}: {found}")


class Draft(NamedTuple):
    """A text to tokenize, and its trained blocks: ranges of characters, sorted and disjoint.

    :ivar has_stop: whether the blocks end with a stop token, at which the model stops; None: some of them.
    """

    text: str
    blocks: list[Span]
    has_stop: bool | None = True

    def encoded(self, located: Located) -> Encoded:
        """The tokens, and which of them are trained."""
        spans, straddling = trained_tokens(located.offsets, self.blocks, self.text)
        return Encoded(located.ids, spans, straddling, self.has_stop)


class Drafting(NamedTuple):
    """A row that was read: its drafts, the columns of its sample, and in ``of`` further data for its writer.

    :ivar notes: notes of the row that statistics count, if it is kept; one may occur several times.
    """

    drafts: list[Draft]
    columns: dict[str, Buffer]
    of: Any = None
    notes: tuple[str, ...] = ()

    @classmethod
    def with_metadata(
        cls,
        drafts: list[Draft],
        fields: Mapping[str, Any],
        of: Any = None,
        notes: tuple[str, ...] = (),
        num_left_out: int = 0,
        **columns: Buffer,
    ) -> Drafting:
        """With columns of the row's label and metadata, unchanged; without metadata for null.

        :param num_left_out: turns that would be trained, but for their flags.
        """
        if "label" in fields:
            columns["label"] = fields["label"]
        metadata = fields.get("metadata")
        if metadata is not None and bytes(metadata) != b"null":
            columns["metadata"] = metadata
        return cls(drafts, columns, of, notes + (_TURN_LEFT_OUT,) * num_left_out)


class Encoded(NamedTuple):
    """The tokens of a draft, and which of them are trained.

    :ivar straddling: the indices of tokens that cross the border of a block, and so are not trained.
    :ivar has_stop: as in the draft.
    :ivar is_cut: whether tokens of the draft are missing.
    """

    tokens: array[int]
    spans: list[Span]
    straddling: Sequence[int] = ()
    has_stop: bool | None = True
    is_cut: bool = False

    def cut(self, start: int, stop: int) -> Encoded:
        """The tokens in ``[start, stop)``."""
        straddling = [place - start for place in self.straddling if start <= place < stop]
        return Encoded(self.tokens[start:stop], clip(self.spans, start, stop), straddling, self.has_stop, is_cut=True)

    @property
    def predicted(self) -> list[Span]:
        """The spans without the first token."""
        return predicted(self.spans)

    def notes(self) -> list[str]:
        """The notes that statistics count for the sample."""
        about_training = ["straddling_token"] * bool(self.straddling) + [TRUNCATED] * self.is_cut
        if self.has_stop:  # nearly always
            return about_training

        return [*about_training, "no_stop_token" if self.has_stop is False else "answer_without_stop"]


def predicted(spans: list[Span]) -> list[Span]:
    """The spans without a sample's first token, which no token before it can predict."""
    return [(max(start, 1), stop) for start, stop in spans if stop > 1]


class TextTokenizeFn(OfAnyLength, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of text to samples that train every token except the first, which no token before it can predict.

    An empty text is dropped as ``empty_text``, and one of a single token as ``no_trained_tokens``. A row is one sample:
    packing may split a long text into several, this function does not.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param text_key: the key of a row's text.
    :param bos: add a token before the text: the tokenizer's ``bos_token`` for True, or the token of this name.
    :param eos: add a token after the text: the tokenizer's ``eos_token`` for True, or the token of this name. It is
        trained. Both count for ``max_length``, and are cut first if the text is cut at their end.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.text:TextTokenizeFn"

    text_key: Name = "text"
    bos: bool | str = False
    eos: bool | str = True

    def check_files(self, files: TokenizerFiles) -> None:
        """Check that the tokenizer has the tokens that the settings name."""
        files.named_token("bos_token", self.bos, "bos")
        files.named_token("eos_token", self.eos, "eos")

    def open(self) -> BatchTokenizer:
        """Load the tokenizer."""
        return _Texts(self)


class _Texts(RowTokenizer):
    """The opened function: adds the tokens around a text, and cuts it to length."""

    def __init__(self, fn: TextTokenizeFn) -> None:
        files = fn.files()
        encoder = open_encoder(files, fn.tokenizer_backend)
        account = Account(ignored=fn.ignore_keys, is_told=False)
        row = RowReader({"text": fn.text_key}, {"metadata": fn.metadata_key}, decoded=["text"], account=account)
        super().__init__(fn, row, encoder)
        self._fn = fn
        self._before = encoder.ids_of(files.named_token("bos_token", fn.bos, "bos"), "bos")
        self._after = encoder.ids_of(files.named_token("eos_token", fn.eos, "eos"), "eos")

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        text = self._row.text("text", fields["text"], raw)
        return Drafting.with_metadata([Draft(text, [])], fields) if text else "empty_text"

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        tokens = self._before + found[0].ids + self._after
        self.write_sample(row, self._fn.fit(Encoded(tokens, [(0, len(tokens))])), drafting.columns, out)
