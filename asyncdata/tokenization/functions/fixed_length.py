"""Samples of one length for questions about a long context: prompt and answer, padded, with loss on the answer.

Only the context is cut. A prompt that is cut at its right end, as is common, loses its question, and then the answer is
trained without it. ``legacy_recipe`` continues runs of an old recipe that does that; see ``babilong_recipe``.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.encoders.span_encoder import open_span_encoder
from asyncdata.tokenization.functions import babilong_recipe
from asyncdata.tokenization.functions.drafts import NOTHING_TRAINED, TRUNCATED, Draft, Drafting, predicted
from asyncdata.tokenization.functions.fixed_length_layout import Filled, Layout, place_cut
from asyncdata.tokenization.functions.labelled import (
    DraftTokenizer,
    Name,
    PositiveInt,
    metadata_column,
    named_token,
)
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import RowFault, decode_value
from asyncdata.tokenization.spans import encode_spans, join, token_spans

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.span_encoder import Located
    from asyncdata.tokenization.spans import Offsets, Span
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("FixedLengthTokenizeFn",)

Buffer = bytes | memoryview
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
OnOverlong = Literal["drop", "error", "truncate_context_left", "truncate_context_right", "truncate_context_middle"]


class FixedLengthTokenizeFn(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of a context, a question and an answer to samples of exactly ``max_length`` tokens that train the answer.

    A sample consists of the tokens that the tokenizer adds before text, the prompt, the answer, its end token, and
    padding at the right. ``extra["num_padding"]`` is the number of padding tokens; the attention mask is one before
    them. ``label`` is the answer. A token that straddles the border of prompt and answer is not trained.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param max_length: the number of tokens of every sample.
    :param prompt: the prompt's text, with keys of the row in braces.
    :param answer: the answer's text, with keys of the row in braces; it follows the prompt directly.
    :param context_key: the key of the context, which may be cut. None: nothing is cut.
    :param overlong: what to do with a row that is too long: drop it, counted as ``max_length``; treat it as bad; or
        cut its context at the beginning, at the end, or in the middle, noted as ``truncated``.
    :param min_context_tokens: a row with fewer tokens of context after the cut is dropped as ``context_too_short``.
    :param keep_answer: drop a row as ``answer_lost`` if its context after the cut does not contain the answer.
    :param add_special_tokens: keep the tokens that the tokenizer adds before plain text, such as its BOS.
    :param add_eos: train a token after the answer: the tokenizer's ``eos_token`` for True, or the token of this name.
        None means True, or False with ``legacy_recipe``.
    :param pad_id: the id of the padding. None: the tokenizer's ``pad_token``, or its ``eos_token`` if it has none.
    :param legacy_recipe: cut prompts at their right end to ``max_length - reserve`` tokens, tokenize the answer
        separately, and train no end token. ``extra["question_lost"]`` is true if the cut has removed the question.
        ``statistics().noted_total`` counts these samples, and as ``truncated`` all that were cut.
    :param reserve: the number of tokens that ``legacy_recipe`` keeps free for the answer.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.fixed_length:FixedLengthTokenizeFn"

    needs_offsets: ClassVar[bool] = True

    max_length: PositiveInt
    prompt: str
    answer: str
    context_key: Name | None = None
    overlong: OnOverlong = msgspec.field(default="drop", name="on_overlong")  # the name in fingerprints
    min_context_tokens: NotNegative = 1
    keep_answer: bool = False
    add_special_tokens: bool = True
    add_eos: bool | str | None = None
    pad_id: NotNegative | None = None
    legacy_recipe: bool = msgspec.field(default=False, name="seed_compat")  # the name in fingerprints
    reserve: NotNegative = 64

    @classmethod
    def babilong(cls, tokenizer: str, max_length: int, **settings: Any) -> FixedLengthTokenizeFn:
        """For rows of BABILong: ``{"input": context, "question": ..., "target": ...}``.

        With ``legacy_recipe`` a blank line separates context and question, as in the old recipe; otherwise a line end
        does.
        """
        between = babilong_recipe.BETWEEN if settings.get("legacy_recipe") else "\n"
        prompt = f"{{input}}{between}Question: {{question}}\nAnswer:"
        text = {"prompt": prompt, "answer": " {target}", "context_key": "input"}
        return cls(tokenizer, max_length=max_length, **{**text, **settings})

    def __post_init__(self) -> None:
        self.check_fields()
        Layout(self.prompt, self.answer, self.context_key)
        if self.context_key is None and self.overlong.startswith("truncate"):
            raise ConfigError(f"overlong={self.overlong!r} needs a context_key: which of the row's keys may be cut")

        if self.legacy_recipe and (self.overlong != "drop" or self.add_eos or self.keep_answer):
            raise ConfigError(
                "legacy_recipe cuts at the right and has no end token; leave overlong, add_eos, keep_answer"
            )

        if self.legacy_recipe and self.reserve >= self.max_length:
            raise ConfigError(f"reserve={self.reserve} leaves nothing of max_length={self.max_length} to the prompt")

    def check_files(self, files: TokenizerFiles) -> None:
        """Check that the end token and the padding token exist."""
        self._eos(files)
        self._pad(files)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer."""
        files = self.files()
        encoder = open_span_encoder(files, self.tokenizer_backend)
        around = encoder.around() if self.add_special_tokens else (array("i"), array("i"))
        eos, pad = encoder.ids_of(self._eos(files), "add_eos"), self._pad(files)
        padding = encoder.ids_of(pad, "pad_token")[0] if isinstance(pad, str) else pad
        return DraftTokenizer(encoder, _FixedReader(self), _FixedWriter(self, around, eos, padding), media=self.media)

    def _eos(self, files: TokenizerFiles) -> str | None:
        return named_token(
            files, "eos_token", not self.legacy_recipe if self.add_eos is None else self.add_eos, "add_eos"
        )

    def _pad(self, files: TokenizerFiles) -> str | int:
        named = files.special_tokens
        pad = named.get("pad_token", named.get("eos_token")) if self.pad_id is None else self.pad_id
        if pad is None:
            raise ConfigError("AD410 the tokenizer has neither pad_token nor eos_token; pass pad_id=")

        return pad


class _FixedReader:
    """Reads the text of the prompt and the answer from a raw row."""

    def __init__(self, fn: FixedLengthTokenizeFn) -> None:
        self._layout = Layout(fn.prompt, fn.answer, fn.context_key)
        self._drafts = babilong_recipe.drafts_of if fn.legacy_recipe else _drafts_of
        keys = {f"{{{key}}}": key for key in self._layout.keys}
        self._row = RowReader(keys, {"metadata": fn.metadata_key}, setting="{}")

    def __call__(self, raw: Buffer) -> Drafting | str:
        fields = self._row(raw)
        values = {key: self._text(f"{{{key}}}", fields, raw) for key in self._layout.keys}
        filled = self._layout.fill(values)
        columns = {**metadata_column(fields), "label": msgspec.json.encode(filled.answer.strip())}
        return Drafting(self._drafts(filled), columns, filled)

    def _text(self, name: str, fields: dict[str, Buffer], raw: Buffer) -> str:
        value = decode_value(fields[name], raw)
        if not isinstance(value, str):
            raise self._row.wrong_type(name, "a string", value, raw)

        return self._row.encodable(name, value, raw)


def _drafts_of(filled: Filled) -> list[Draft]:
    start = len(filled.prompt)
    return [Draft(filled.prompt + filled.answer, [(start, start + len(filled.answer))])]


class _FixedWriter:
    """Cuts the context if necessary, or makes the sample of the old recipe, and pads."""

    def __init__(
        self,
        fn: FixedLengthTokenizeFn,
        around: tuple[array[int], array[int]],
        eos: array[int],
        pad: int,
    ) -> None:
        self._fn = fn
        self._before, self._after = around
        self._eos = eos
        self._pad = pad

    def __call__(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        if self._fn.legacy_recipe:
            limits = {"max_length": self._fn.max_length, "reserve": self._fn.reserve}
            around = self._before, self._after
            made = babilong_recipe.sample_of(drafting, found, around, **limits)
            extra = {"question_lost": made.is_question_lost}
            notes = ["question_lost"] * made.is_question_lost + [TRUNCATED] * made.is_cut
            self._write(row, made.tokens, [(made.start, len(made.tokens))], drafting, out, extra, notes)
            return

        (draft,), filled = drafting.drafts, drafting.of
        tokens, offsets = found[0]
        surplus = len(self._before) + len(tokens) + len(self._eos) - self._fn.max_length
        cut = self._cut(surplus, filled, offsets)
        if isinstance(cut, str):
            out.drop(row, cut)
            return

        kept = self._before + tokens[: cut[0]] + tokens[cut[1] :]
        shift = len(self._before) - (cut[1] - cut[0])
        spans = [(start + shift, stop + shift) for start, stop in token_spans(offsets, draft.blocks)]
        spans.append((len(kept), len(kept) + len(self._eos)))
        self._write(row, kept + self._eos, spans, drafting, out, {}, [TRUNCATED] * (cut[1] > cut[0]))

    def _cut(self, surplus: int, filled: Filled, offsets: Offsets) -> Span | str:
        """The range of tokens to remove, or the reason to drop the row.

        :raises RowFault: if the row is too long, and ``overlong`` is "error".
        """
        fn = self._fn
        if surplus <= 0:
            return 0, 0

        if fn.overlong == "drop":
            return "max_length"

        if fn.overlong == "error":
            length = fn.max_length + surplus
            reason = f"{length} tokens are more than max_length={fn.max_length}; raise it, or set overlong="
            raise RowFault("AD415", reason)

        context = next(iter(token_spans(offsets, [filled.context])), (0, 0))
        if context[1] - context[0] < surplus:
            return "context_too_short"

        cut = place_cut(offsets, context, surplus, fn.overlong)
        if context[1] - context[0] - (cut[1] - cut[0]) < fn.min_context_tokens:
            return "context_too_short"

        return "answer_lost" if fn.keep_answer and _is_lost(filled, offsets, cut) else cut

    def _write(
        self,
        row: int,
        tokens: array[int],
        spans: list[Span],
        drafting: Drafting,
        out: ColumnWriter,
        facts: dict[str, bool],
        notes: list[str],
    ) -> None:
        """Pad and keep the sample. ``facts`` are stored in its ``extra``; the statistics count ``notes``."""
        trained = join(predicted(spans))
        if not trained:
            out.drop(row, NOTHING_TRAINED)
            return

        num_padding = self._fn.max_length - len(tokens)
        extra = msgspec.json.encode({"num_padding": num_padding, **facts})
        padded = tokens + array("i", [self._pad]) * num_padding
        out.keep(row, padded, spans=encode_spans(trained), extra=extra, **drafting.columns)
        for note in notes:
            out.note(row, note)


def _is_lost(filled: Filled, offsets: Offsets, cut: Span) -> bool:
    """Whether the cut context no longer contains the answer."""
    left = filled.prompt[filled.context[0] : offsets.starts[cut[0]]]
    right = filled.prompt[offsets.stops[cut[1] - 1] : filled.context[1]]
    words = filled.answer.strip()
    return words not in left and words not in right
