"""Plain text that is trained whole, as in pretraining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncdata.tokenization.account import Account
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.labelled import Draft, Drafting, Encoded, OfAnyLength, RowTokenizer
from asyncdata.tokenization.functions.tokenizer_settings import Name
from asyncdata.tokenization.row_fields import RowReader

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles


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
