"""Pairs of a chosen and a rejected answer to one prompt, for DPO and reward models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from asyncdata.tokenization.account import Account
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.labelled import NOTHING_TRAINED, Draft, Drafting, RowTokenizer, predicted
from asyncdata.tokenization.functions.of_chat import VARIABLES, ChatDrafts, OfChat, assistants, num_alike
from asyncdata.tokenization.functions.tokenizer_settings import Name
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import RowFault, decode_object, is_empty, json_type
from asyncdata.tokenization.spans import common_prefix

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

_QUESTIONS = frozenset({"prompt", "question", "instruction", "query", "input", "system"})
"""Keys of a row that have its question, or a part of it, in lower case."""


class PreferenceTokenizeFn(OfChat, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of a prompt and two answers to samples: ``{"prompt": ..., "chosen": ..., "rejected": ...}``.

    The formats are TRL's. Each of the three is text, or a list of messages. If there is no prompt, the common
    beginning of ``chosen`` and ``rejected`` is the prompt: whole messages, or text up to the last white space.

    A sample has the prompt with the chosen answer as ``tokens`` and ``labels``. The prompt with the rejected answer is
    in ``extra``: ``rejected_input_ids``, and ``rejected_spans``, the ranges of its trained tokens. So a pair is one
    sample, and no shuffle, resume or filter can separate it. ``max_length`` applies to both.

    A pair of equal answers is dropped as ``no_preference``; if one answer has no trained tokens, the pair is dropped as
    ``no_trained_tokens``.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param prompt_key: the key of a row's optional prompt. None: it is the common beginning, whatever other keys there
        are; otherwise, two answers without a prompt are a bad row beside a key like a question.
    :param chosen_key: the key of the better answer.
    :param rejected_key: the key of the other answer.
    :param eos: add a token after answers that are text: the tokenizer's ``eos_token`` for True, or the token of this
        name. It is trained. A chat template adds its own.
    :param train_on: of chats, the assistant's messages up to their stop tokens; or the completion: all tokens after
        those that the prompt, with its generation prompt, has alone, as DPOTrainer of TRL trains them.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.preference:PreferenceTokenizeFn"

    prompt_key: Name | None = "prompt"
    chosen_key: Name = "chosen"
    rejected_key: Name = "rejected"
    eos: bool | str = True
    train_on: Literal["assistant", "completion"] = "assistant"

    def check_files(self, files: TokenizerFiles) -> None:
        """Check that the token of ``eos`` exists, and compile the templates if there are any."""
        files.named_token("eos_token", self.eos, "eos")
        super().check_files(files)

    @property
    def may_be_text(self) -> bool:
        """Each pair may be text."""
        return True

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        return _Pairs(self)


class _Pair(NamedTuple):
    """A prompt and its two answers: all text, or all messages. The prompt is None if the row has none."""

    prompt: Any
    chosen: Any
    rejected: Any


class _Pairs(RowTokenizer):
    """The opened function: reads drafts of both answers, cuts them to length, and stores the rejected one in ``extra``.

    If the completion is trained, the prompt is a third draft.
    """

    def __init__(self, fn: PreferenceTokenizeFn) -> None:
        files = fn.files()
        encoder = open_encoder(files, fn.tokenizer_backend, offsets=True)
        eos = files.named_token("eos_token", fn.eos, "eos")
        encoder.ids_of(eos, "eos")  # it must be one
        row = RowReader(
            {"chosen": fn.chosen_key, "rejected": fn.rejected_key},
            {"prompt": fn.prompt_key, "system": "system", "tools": fn.tool_key, "metadata": fn.metadata_key}
            | {VARIABLES: None if VARIABLES in fn.ignore_keys else VARIABLES},
            decoded=(*_Pair._fields, "system"),
            account=Account.of_chats(fn.ignore_keys, fn.tool_key, are_trained=True),
        )
        if "system" not in (fn.prompt_key, fn.tool_key, fn.metadata_key):
            row.read_keys.discard("system")  # it is only looked at
        super().__init__(fn, row, encoder)
        self._fn, self._flags = fn, frozenset(fn.turn_flags)
        self._eos = eos or ""
        self._trains_completion = fn.train_on == "completion"
        has_template = fn.has_template(files)
        self._drafts = ChatDrafts(fn, row, files) if has_template else None

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        pair = _Pair(*map(fields.get, _Pair._fields))
        kind = self._kind(pair, raw)
        if pair.chosen == pair.rejected:
            return "no_preference"

        if self._fn.prompt_key is not None:
            self._refuse_unread(pair, fields.get("system"), raw)
        notes: set[str] = set()
        drafts = self._of_text(pair, raw) if kind is str else self._of_chats(pair, fields, raw, notes)
        return Drafting.with_metadata(drafts, fields, notes=tuple(sorted(notes))) if drafts else NOTHING_TRAINED

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        both = [draft.encoded(each) for draft, each in zip(drafting.drafts, found, strict=True)]
        if self._trains_completion:
            prompt = both.pop().tokens
            start = min(num_alike(prompt, each.tokens) for each in both)
            both = [each._replace(spans=[(start, len(each.tokens))]) for each in both]
        chosen, rejected = map(self._fn.fit, both)
        spans = [] if rejected is None else predicted(rejected.spans)
        if chosen is None or rejected is None:
            self.write_sample(row, None, {}, out)
        elif not spans:
            out.drop(row, NOTHING_TRAINED)
        else:
            extra = {"rejected_input_ids": rejected.tokens.tolist(), "rejected_spans": spans}
            columns = {**drafting.columns, "extra": msgspec.json.encode(extra)}
            self.write_sample(row, chosen, columns, out, rejected.notes())

    def _kind(self, pair: _Pair, raw: Buffer) -> type:
        kind = type(pair.chosen)
        for name, value in pair._asdict().items():
            if type(value) not in (str, list) and not (name == "prompt" and value is None):
                raise self._row.wrong_type(name, "a string or a list of messages", value, raw)

            if value is not None and type(value) is not kind:
                reason = f"{self._row.name(name)} is {json_type(value)}, and {self._row.name('chosen')} is not"
                begin_alike = name == "prompt" and kind is type(pair.rejected) is list and num_alike(*pair[1:])
                way_out = "; both answers begin with the same messages: set prompt_key=None?" if begin_alike else ""
                raise RowFault("AD111", f"{reason}: a pair must be all text, or all messages{way_out}", raw)

        return kind

    def _refuse_unread(self, pair: _Pair, system: Any, raw: Buffer) -> None:
        """Refuse a pair that would be trained without its question, or its system prompt, which no setting names."""
        fn = self._fn
        if pair.prompt is not None or (type(pair.chosen) is list and num_alike(pair.chosen, pair.rejected)):
            begins = pair.chosen if pair.prompt is None else pair.prompt
            has_system = any(isinstance(one, dict) and one.get("role") == "system" for one in begins)
            is_read = has_system or "system" in (fn.prompt_key, fn.tool_key, fn.metadata_key)
            unread = [] if is_read or is_empty(system) else ["system"]
            way_out = "make the prompt a list of messages that begins with it"
        else:
            read = {fn.chosen_key, fn.rejected_key, fn.tool_key, fn.metadata_key}
            row = decode_object(raw)
            unread = [key for key in row if key == fn.prompt_key or (key not in read and key.lower() in _QUESTIONS)]
            unread = [key for key in unread if key == fn.prompt_key or not is_empty(row[key])]
            way_out = "set prompt_key to the question's key, or to None if both answers begin with the question"
        unread = [key for key in unread if key not in fn.ignore_keys]
        if unread:
            has = ", ".join(map(ascii, unread))
            reason = f"the pair would be trained without {has}; {way_out}; ignore_keys={tuple(unread)} leaves it out"
            raise RowFault("AD110", reason, raw)

    def _of_text(self, pair: _Pair, raw: Buffer) -> list[Draft]:
        for name, text in pair._asdict().items():
            self._row.encodable(name, text or "", raw)
        prompt = pair.prompt or ""
        if self._trains_completion:
            ends = [each if each.endswith(self._eos) else each + self._eos for each in (pair.chosen, pair.rejected)]
            shared = prompt if pair.prompt is not None else pair.chosen[: _num_shared(pair.chosen, pair.rejected)]
            return [Draft(text, []) for text in (prompt + ends[0], prompt + ends[1], shared)]

        start = len(prompt) if pair.prompt is not None else _shared_words(pair.chosen, pair.rejected)
        texts = [prompt + answer + self._eos for answer in (pair.chosen, pair.rejected)]
        return [Draft(text, [(start, len(text))]) for text in texts]

    def _of_chats(self, pair: _Pair, fields: dict[str, Any], raw: Buffer, notes: set[str]) -> list[Draft]:
        """The drafts; what the template does not write of them is added to ``notes``."""
        if self._drafts is None:
            reason = "the pair consists of messages, but the tokenizer has no chat template; pass chat_template="
            raise RowFault("AD411", reason, raw)

        prompt, chosen, rejected = (
            [] if chat is None else self._row.chat(name, chat, raw) for name, chat in pair._asdict().items()
        )
        count = _num_shared if self._trains_completion else num_alike
        num_shared = len(prompt) if pair.prompt is not None else count(chosen, rejected)
        self._row.left_out("prompt", prompt, self._flags, raw)
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            self._refuse_left_out(name, answer, num_shared - len(prompt), raw)
        beside = self._drafts.beside(fields, raw)
        notes.update(self._drafts.notes(prompt + chosen, beside), self._drafts.notes(prompt + rejected, beside))
        if self._trains_completion:
            shared = (prompt + chosen)[:num_shared]
            chats = {"chosen": prompt + chosen, "rejected": prompt + rejected}
            drafts = [self._drafts.draft(name, messages, beside, [], raw) for name, messages in chats.items()]
            return [*drafts, self._drafts.prompt("prompt", shared, beside, raw)]

        drafts = []
        for name, messages in (("chosen", prompt + chosen), ("rejected", prompt + rejected)):
            trained = [number for number in assistants(messages) if number >= num_shared]
            if trained:
                drafts.append(self._drafts.draft(name, messages, beside, trained, raw))
        return drafts if len(drafts) == 2 else []

    def _refuse_left_out(self, name: str, answer: list[dict[str, Any]], first: int, raw: Buffer) -> None:
        """Refuse an answer that is to be trained from message ``first`` on, if a flag leaves out a part of that."""
        for number in self._row.left_out(name, answer, self._flags, raw):
            if number >= first and (self._trains_completion or answer[number]["role"] == "assistant"):
                reason = f"{self._row.name(f'{name}[{number}]')} has a flag that leaves it out, but answers are trained"
                raise RowFault("AD111", f"{reason}; leave the pair out, or set turn_flags=()", raw)


def _num_shared(chosen: Any, rejected: Any) -> int:
    """Where TRL divides pairs without a prompt: messages, or characters without a space before them."""
    first = num_alike(chosen, rejected)
    if first == min(len(chosen), len(rejected)):
        return max(0, first - 1)

    return first - 1 if first and chosen[first - 1] == " " else first


def _shared_words(one: str, other: str) -> int:
    """The position of the last white space in the common beginning of both, so that no word is split."""
    space = re.search(r"\s\S*\Z", one[: common_prefix(one, other)])
    return space.start() if space else 0
