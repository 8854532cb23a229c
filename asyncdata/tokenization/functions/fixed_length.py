"""Samples of one length for questions about a long context: prompt and answer, padded, with loss on the answer.

Only the context is cut. A prompt that is cut at its right end, as is common, loses its question, and then the answer is
trained without it. ``legacy_recipe`` continues runs of an old recipe that does that.
"""

from __future__ import annotations

from array import array
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.column_writer import Buffer, ColumnWriter, Offsets, Span, encode_spans, join, token_spans
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.text import NOTHING_TRAINED, TRUNCATED, Draft, Drafting, RowTokenizer, predicted
from asyncdata.tokenization.functions.tokenizer_settings import Name, OfTokenizer, PositiveInt
from asyncdata.tokenization.row_fields import Account, RowReader
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Cut = Literal["truncate_context_left", "truncate_context_right", "truncate_context_middle"]
OnOverlong = Literal["drop", "error"] | Cut
_RECIPE_BETWEEN = "\n\n"
"""The text between the context and the question."""


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
        between = _RECIPE_BETWEEN if settings.get("legacy_recipe") else "\n"
        prompt = f"{{input}}{between}Question: {{question}}\nAnswer:"
        text = {"prompt": prompt, "answer": " {target}", "context_key": "input"}
        return cls(tokenizer, max_length=max_length, **{**text, **settings})

    def __post_init__(self) -> None:
        self.check_fields()
        _Layout(self.prompt, self.answer, self.context_key)
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
        self.end_token(files)
        self.padding(files)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer."""
        return _Fixed(self)

    def end_token(self, files: TokenizerFiles) -> str | None:
        """The text of the token after the answer; None for no token."""
        add_eos = not self.legacy_recipe if self.add_eos is None else self.add_eos
        return files.named_token("eos_token", add_eos, "add_eos")

    def padding(self, files: TokenizerFiles) -> str | int:
        """The text of the padding token, or its id if it was given.

        :raises ConfigError: if there is none.
        """
        named = files.special_tokens
        pad = named.get("pad_token", named.get("eos_token")) if self.pad_id is None else self.pad_id
        if pad is None:
            raise ConfigError("AD410 the tokenizer has neither pad_token nor eos_token; pass pad_id=")

        return pad


class _Fixed(RowTokenizer):
    """The opened function: cuts the context if necessary, or makes the sample of the old recipe, and pads."""

    def __init__(self, fn: FixedLengthTokenizeFn) -> None:
        files = fn.files()
        encoder = open_encoder(files, fn.tokenizer_backend, offsets=True)
        self._layout = _Layout(fn.prompt, fn.answer, fn.context_key)
        self._names = {key: f"{{{key}}}" for key in self._layout.keys}
        keys = {name: key for key, name in self._names.items()}
        account = Account(ignored=fn.ignore_keys, is_told=False)
        optional = {"metadata": fn.metadata_key}
        super().__init__(fn, RowReader(keys, optional, setting="{}", decoded=[*keys], account=account), encoder)
        self._fn = fn
        self._before, self._after = encoder.around() if fn.add_special_tokens else (array("i"), array("i"))
        self._eos, pad = encoder.ids_of(fn.end_token(files), "add_eos"), fn.padding(files)
        self._pad = encoder.ids_of(pad, "pad_token") if isinstance(pad, str) else array("i", [pad])

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        filled = self._layout.fill({key: self._row.text(name, fields[name], raw) for key, name in self._names.items()})
        label = msgspec.json.encode(filled.answer.strip())
        if self._fn.legacy_recipe:  # which tokenizes both separately
            drafts = [Draft(filled.prompt, []), Draft(filled.answer, [])]
            return Drafting.with_metadata(drafts, fields, filled, label=label)

        start, text = len(filled.prompt), filled.prompt + filled.answer
        return Drafting.with_metadata([Draft(text, [(start, len(text))])], fields, filled, label=label)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        made = self._recipe_sample(found, drafting.of) if self._fn.legacy_recipe else self._sample(found[0], drafting)
        trained = join(predicted(made.spans)) if isinstance(made, _Sample) else []
        if not isinstance(made, _Sample) or not trained:
            out.drop(row, made if isinstance(made, str) else NOTHING_TRAINED)
            return

        num_padding = self._fn.max_length - len(made.tokens)
        extra = msgspec.json.encode({"num_padding": num_padding, **made.facts})
        padded = made.tokens + self._pad * num_padding
        out.keep(row, padded, spans=encode_spans(trained), extra=extra, **drafting.columns)
        for note in made.notes:
            out.note(row, note)

    def _sample(self, located: Located, drafting: Drafting) -> _Sample | str:
        tokens, offsets = located
        surplus = len(self._before) + len(tokens) + len(self._eos) - self._fn.max_length
        cut = self._cut(surplus, drafting.of, offsets)
        if isinstance(cut, str):
            return cut

        kept = self._before + tokens[: cut[0]] + tokens[cut[1] :]
        shift = len(self._before) - (cut[1] - cut[0])
        blocks = drafting.drafts[0].blocks
        spans = [(start + shift, stop + shift) for start, stop in token_spans(offsets, blocks)]
        spans.append((len(kept), len(kept) + len(self._eos)))
        return _Sample(kept + self._eos, spans, {}, [TRUNCATED] * (cut[1] > cut[0]))

    def _cut(self, surplus: int, filled: _Filled, offsets: Offsets) -> Span | str:
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

    def _recipe_sample(self, found: list[Located], filled: _Filled) -> _Sample:
        """The prompt is cut at its right end, and the answer is tokenized separately."""
        fn, (prompt, offsets), answer = self._fn, found[0], found[1].ids
        kept = prompt[: max(fn.max_length - fn.reserve - len(self._before) - len(self._after), 0)]
        end = offsets.stops[len(kept) - 1] if kept else 0
        start = len(self._before) + len(kept) + len(self._after)
        whole = self._before + kept + self._after + answer
        is_prompt_cut = len(kept) < len(prompt)
        is_question_lost = is_prompt_cut and end < filled.asked
        notes = ["question_lost"] * is_question_lost + [TRUNCATED] * (is_prompt_cut or len(whole) > fn.max_length)
        tokens = whole[: fn.max_length]
        return _Sample(tokens, [(start, len(tokens))], {"question_lost": is_question_lost}, notes)


class _Sample(NamedTuple):
    """A sample before padding. ``facts`` are stored in its ``extra``; the statistics count ``notes``."""

    tokens: array[int]
    spans: list[Span]
    facts: dict[str, bool]
    notes: list[str]


def _is_lost(filled: _Filled, offsets: Offsets, cut: Span) -> bool:
    """Whether the cut context no longer contains the answer."""
    left = filled.prompt[filled.context[0] : offsets.starts[cut[0]]]
    right = filled.prompt[offsets.stops[cut[1] - 1] : filled.context[1]]
    words = filled.answer.strip()
    return words not in left and words not in right


class _Filled(NamedTuple):
    """A layout with a row's values in it.

    :ivar context: the range of characters of the context in the prompt; empty if it has none.
    :ivar asked: the end of the row's last value in the prompt; only text of the layout follows.
    """

    prompt: str
    answer: str
    context: Span
    asked: int


class _Layout:
    """Two format strings whose fields are keys of a row.

    :ivar keys: the keys, each once.
    :raises ConfigError: if they are not valid format strings, or the context is not exactly one field of the prompt.
    """

    def __init__(self, prompt: str, answer: str, context_key: str | None) -> None:
        self._prompt = _pieces("prompt", prompt)
        self._answer = _pieces("answer", answer)
        self._context_key = context_key
        self.keys = list(dict.fromkeys(key for _, key in self._prompt + self._answer if key is not None))
        if context_key is not None and [key for _, key in self._prompt].count(context_key) != 1:
            raise ConfigError(f"context_key={context_key!r} must be one field of prompt={prompt!r}")

        if not any(key for _, key in self._answer):
            raise ConfigError(f"answer={answer!r} has no field, such as '{{target}}', to be filled from the row")

    def fill(self, values: Mapping[str, str]) -> _Filled:
        """The texts for a row.

        :param values: one for each of :attr:`keys`.
        """
        prompt, context, asked = "", (0, 0), 0
        for words, key in self._prompt:
            prompt += words
            if key is not None:
                start, prompt = len(prompt), prompt + values[key]
                asked = len(prompt.rstrip())
                if key == self._context_key:
                    context = start, len(prompt)
        answer = "".join(words + (values[key] if key is not None else "") for words, key in self._answer)
        return _Filled(prompt, answer, context, asked)


def _pieces(name: str, text: str) -> list[tuple[str, str | None]]:
    """Pairs of literal text, and the key whose value follows it."""
    try:
        pieces = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: {error}; write two braces for a literal one") from None

    for _, key, spec, conversion in pieces:
        if key is not None and (not key or set(key) & set(".[]") or spec or conversion):
            raise ConfigError(f"{name}={text!r}: a field is a key of the row in braces, as {{question}}; got {key!r}")

    return [(words, key) for words, key, _, _ in pieces]


def place_cut(offsets: Offsets, context: Span, num_tokens: int, cut: Cut) -> Span:
    """The range of tokens to remove from the context: at least ``num_tokens``.

    No character is split: if several tokens share one, all of them are removed.

    :param context: the range of tokens of the context, at least ``num_tokens``.
    """
    first, last = context
    start = {
        "truncate_context_left": first,
        "truncate_context_right": last - num_tokens,
        "truncate_context_middle": first + (last - first - num_tokens + 1) // 2,
    }[cut]
    stop = start + num_tokens
    while start > first and offsets.stops[start - 1] > offsets.starts[start]:
        start -= 1
    while stop < last and offsets.starts[stop] < offsets.stops[stop - 1]:
        stop += 1
    return start, stop
