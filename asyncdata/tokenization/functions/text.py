"""Plain text that is trained whole, as in pretraining."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.drafts import Draft, Drafting, Encoded, write_sample
from asyncdata.tokenization.functions.labelled import (
    DraftTokenizer,
    Name,
    OfAnyLength,
    PlainEncoder,
    metadata_column,
    named_token,
)
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import decode_value

if TYPE_CHECKING:
    from array import array

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("TextTokenizeFn",)

Buffer = bytes | memoryview


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
        named_token(files, "bos_token", self.bos, "bos")
        named_token(files, "eos_token", self.eos, "eos")

    def open(self) -> BatchTokenizer:
        """Load the tokenizer."""
        files = self.files()
        encoder = PlainEncoder(open_encoder(files, self.tokenizer_backend))
        return DraftTokenizer(encoder, _TextReader(self), _TextWriter(self, encoder, files), media=self.media)


class _TextReader:
    """Reads the text of a raw row."""

    def __init__(self, fn: TextTokenizeFn) -> None:
        self._row = RowReader({"text": fn.text_key}, {"metadata": fn.metadata_key})

    def __call__(self, raw: Buffer) -> Drafting | str:
        fields = self._row(raw)
        text = decode_value(fields["text"], raw)
        if not isinstance(text, str):
            raise self._row.wrong_type("text", "a string", text, raw)

        text = self._row.encodable("text", text, raw)
        return Drafting([Draft(text, [(0, len(text))])], metadata_column(fields)) if text else "empty_text"


class _TextWriter:
    """Adds the tokens around a text, and cuts it to length."""

    def __init__(self, fn: TextTokenizeFn, encoder: PlainEncoder, files: TokenizerFiles) -> None:
        self._fn = fn
        self._before = encoder.ids_of(named_token(files, "bos_token", fn.bos, "bos"), "bos")
        self._after = encoder.ids_of(named_token(files, "eos_token", fn.eos, "eos"), "eos")

    def __call__(self, row: int, found: list[array[int]], drafting: Drafting, out: ColumnWriter) -> None:
        tokens = self._before + found[0] + self._after
        encoded = Encoded(tokens, [(0, len(tokens))])
        write_sample(row, self._fn.fit(encoded), drafting.columns, out)
