"""Chats for training: rendered whole, as ``apply_chat_template`` does, with loss on the assistant's messages; in pairs
of a chosen and a rejected answer to one prompt, for DPO and reward models; or by a renderer: code that turns messages
into token ids, and says which of them the model has generated.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from asyncdata.core.errors import ConfigError, raise_if_shortage, user_traceback
from asyncdata.core.settings import needing, resolve_path
from asyncdata.tokenization.chat_template.calls import fit_calls
from asyncdata.tokenization.column_writer import NOT_TRAINED, Buffer, ColumnWriter, common_prefix, trained_runs
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.functions.of_chat import (
    ChatDrafts,
    Chats,
    OfChat,
    PairsOfTexts,
    chosen_messages,
    more_keys,
    num_alike,
)
from asyncdata.tokenization.functions.text import NOTHING_TRAINED, Draft, Drafting, Encoded, OfAnyLength, RowTokenizer
from asyncdata.tokenization.functions.tokenizer_settings import Name
from asyncdata.tokenization.row_fields import TURN_FLAGS, Account, RowReader, TurnFlag
from asyncdata.tokenization.rows import Message, RowFault, decode_object, is_empty, json_type

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.pictures.settings import Processor
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles
else:
    Processor = Any  # imported where one is given


class ChatTokenizeFn(OfChat, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of messages to samples that train the assistant's messages: ``{"messages": [...], "tools": [...]}``.

    The tokens are those of ``apply_chat_template``. The trained part of a message begins where the model begins to
    generate, and ends with its stop token; it includes tool calls. A token that straddles the beginning is trained only
    if its other characters are white space; ``straddling_token`` counts rows with other straddling tokens.

    A row without trained tokens is dropped as ``no_trained_tokens``, and one that is too long as ``max_length``. If the
    chat template ends messages without a special token, no stop token is trained: ``no_stop_token`` counts such rows.
    If it ends earlier messages with another one, as that of gpt-oss, they are trained without it:
    ``answer_without_stop`` counts such rows.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param messages_key: the key of a row's messages: a list, or that list as JSON text.
    :param label_key: the key of a row's label, any JSON value, such as KTO's; every row must have one. None: no
        labels.
    :param dialect: the form of all rows: ``messages``, ``sharegpt`` (``conversations`` of ``from`` and ``value``),
        ``alpaca`` (``instruction``, ``input``, ``output``), ``prompt_completion`` (two lists of messages, or two texts
        that no template renders; the second is trained), ``xlam`` (``query``, and calls in ``answers``), or two texts
        that are a question and its answer: ``prompt_response``, ``query_response``, ``query_answer``,
        ``question_answer``, ``question_response``, ``instruction_response`` (``context``). None: a loader recognises it
        by the first row of its source; it is ``messages`` with ``messages_key``.
    :param dialect_keys: the row's own names of keys of the dialect, such as ``{"question": "ask"}``.
    :param dialect_row: the row by which a loader recognised the dialect. Loaders set it.
    :param processor: what makes pixels of pictures: a :class:`~asyncdata.Processor`, or its folder. None: a row with
        pictures is bad.
    :param train_on: every message of the assistant, or its last one; or all tokens of the chat, as SFTTrainer of TRL
        does by default. In each case, turns that their flags leave out are not trained.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.chat:ChatTokenizeFn"

    messages_key: Name = "messages"
    label_key: Name | None = None
    dialect: str | None = None
    dialect_keys: dict[Name, Name] = {}
    dialect_row: str | None = None
    processor: Processor | str | None = None
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dialect is not None or self.dialect_keys:
            from asyncdata.tokenization.functions.dialects import check_dialect

            check_dialect(self.dialect, self.dialect_keys)
        if self.dialect not in (None, "messages") and not self._has_default_keys:
            raise ConfigError(f"dialect={self.dialect!r} has keys of its own: leave messages_key out")

        if self.processor is not None:
            self._adopt_processor()

    @property
    def _has_default_keys(self) -> bool:
        return self.messages_key == "messages"

    @property
    def is_of_any_dialect(self) -> bool:
        """Whether a loader is to recognise the dialect."""
        return self.dialect is None and self._has_default_keys

    @property
    def may_be_text(self) -> bool:
        """Prompts and completions may be text; pictures need a template."""
        return self.dialect == "prompt_completion" and self.processor is None

    def settings_digest(self) -> str:
        """The same for a dialect that is named and one that is recognised; the processor counts by its files."""
        dialect = None if self.dialect == "messages" else self.dialect
        processor = self._adopted and self._adopted.named(self.tokenizer, self.revision)
        same = msgspec.structs.replace(self, dialect=dialect, dialect_row=None, processor=processor)
        return OfChat.settings_digest(same)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        keys = {"messages": self.messages_key} if self.dialect in (None, "messages") else self.dialect_keys
        args = self, self.dialect or "messages", keys, self.train_on, self.dialect_row or "", self.label_key
        if self._adopted is None:
            return PairsOfTexts(*args) if self.may_be_text else Chats(*args)

        from asyncdata.tokenization.functions.pictured import PicturedChats

        config = self._adopted.config(self.tokenizer, self.revision)
        opened = PicturedChats(*args, self._adopted.keys(config.kinds, self.ignore_keys))
        opened.open_processor(self._adopted, config)
        return opened


# Pairs

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
            {"prompt": fn.prompt_key, "system": "system", **more_keys(fn)},
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
        spans = [] if rejected is None else rejected.predicted
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
            trained = [number for number in chosen_messages("assistant", messages) if number >= num_shared]
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


# By a renderer

_OURS = f"{__name__}:made_by_renderers"
_EMPTY_PROMPT = "empty_prompt"


class Renderer(Protocol):
    """What is needed of a renderer; those of the package ``renderers`` have it."""

    def render(
        self, messages: list[Message], *, tools: list[Message] | None = None, add_generation_prompt: bool = False
    ) -> Any:
        """An object with ``token_ids``, and of each token in ``sampled_mask`` whether the model generates it, and in
        ``message_indices`` the index of its message, or -1. With ``add_generation_prompt`` the ids are enough.
        """


class RendererTokenizeFn(OfAnyLength, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of messages to samples by a renderer: ``{"messages": [...], "tools": [...]}``.

    The ids are those of the renderer alone, so that a rollout by the same renderer and its training have the same.
    Trained is what the model generates: ``sampled_mask``. If nothing ends the last message, as with GLM, the first of
    the renderer's ``get_stop_token_ids()`` is added to it, and trained.

    A row without trained tokens is dropped as ``no_trained_tokens``, and one that is too long as ``max_length``.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub.
    :param build: the import path of a function, which each worker calls: ``build(folder, **arguments)`` returns the
        renderer. None: one of the package ``renderers``, with its configuration as ``arguments``.
    :param arguments: JSON values, such as ``{"name": "qwen3", "enable_thinking": False}``.
    :param messages_key: the key of a row's messages: a list, or that list as JSON text.
    :param tool_key: the key of a row's optional tools: a list of JSON schemas, or that list as JSON text. None: no
        tools.
    :param label_key: the key of a row's label, any JSON value. None: no labels.
    :param train_on: every message of the assistant, or its last one; or none: the sample is a prompt for rollouts, with
        ``add_generation_prompt``.
    :param turn_flags: the keys of a turn of which false or 0 says that it is not trained. (): they are ignored.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.rendered:RendererTokenizeFn"

    version: ClassVar[int] = 2
    """Since version 2, flags of turns are read."""

    build: Name | None = None
    arguments: dict[str, Any] = {}
    messages_key: Name = "messages"
    tool_key: Name | None = "tools"
    label_key: Name | None = None
    train_on: Literal["assistant", "last_assistant", "none"] = "assistant"
    turn_flags: tuple[TurnFlag, ...] = TURN_FLAGS

    def __post_init__(self) -> None:
        self.check_fields("arguments")
        if self.tokenizer_backend not in ("auto", "hf"):
            raise ConfigError(f"tokenizer_backend={self.tokenizer_backend!r} has no effect: the renderer tokenizes")

        msgspec.structs.force_setattr(self, "tokenizer_backend", "hf")  # nothing is to be proven

    @property
    def makes_prompts(self) -> bool:  # type: ignore[override]
        """Whether its samples are prompts for rollouts."""
        return self.train_on == "none"

    def check_files(self, files: TokenizerFiles) -> None:
        """Import what makes the renderer."""
        self._version()

    def template_digest(self, files: TokenizerFiles) -> str:
        """What makes the renderer, and its version: a renderer is code, and another version may give other tokens."""
        return f"{self.build or 'renderers'} version {self._version()}"

    def _version(self) -> Any:
        if self.build is not None:
            return getattr(resolve_path(self.build), "version", None)

        from importlib.metadata import version

        with needing(type(self).__name__, "renderers"):
            return version("renderers")

    def open(self) -> RowTokenizer:
        """Make the renderer."""
        return _Rendered(self, resolve_path(self.build or _OURS)(self.files().folder, **self.arguments))


def made_by_renderers(folder: str, **config: Any) -> Renderer:
    """A renderer of the package ``renderers``, by the fields of its configuration.

    :raises ConfigError: for a configuration that it does not have, or that needs another tokenizer.
    """
    with needing(RendererTokenizeFn.__name__, "renderers[transformers]"):
        from pydantic import TypeAdapter, ValidationError
        from renderers import RendererConfig, create_renderer
        from renderers.base import load_tokenizer

    try:
        wanted = TypeAdapter[Any](RendererConfig).validate_python(config or {"name": "auto"})
        renderer: Renderer = create_renderer(load_tokenizer(folder), wanted)
    except (ValidationError, ValueError, AssertionError) as error:
        wrong = error.errors() if isinstance(error, ValidationError) else []
        why = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in wrong) or error
        raise ConfigError(f"renderers refuses arguments={config} with the tokenizer in {folder}: {why}") from error

    return renderer


class _Rendered(RowTokenizer):
    """An opened :class:`RendererTokenizeFn`."""

    def __init__(self, fn: RendererTokenizeFn, renderer: Renderer) -> None:
        optional = {"tools": fn.tool_key, "metadata": fn.metadata_key}
        account = Account.of_chats(fn.ignore_keys, fn.tool_key, are_trained=not fn.makes_prompts)
        required = {"messages": fn.messages_key, "label": fn.label_key}
        row = RowReader(required, optional, decoded=["messages"], account=account)
        super().__init__(fn, row, None)
        self._fn, self._renderer, self._flags = fn, renderer, frozenset(fn.turn_flags)

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        messages, is_prompt = self._row.chat("messages", fields["messages"], raw), self._fn.makes_prompts
        for number, message in enumerate(messages):  # a renderer may pass over arguments that it cannot decode
            fit_calls(number, message)
        tools = self._row.tools(fields.get("tools"), raw)
        schemas = self._row.schemas(tools, raw)
        chosen = [] if is_prompt else chosen_messages(self._fn.train_on, messages)
        left_out = [] if is_prompt else self._row.left_out("messages", messages, self._flags, raw)
        trained = {*chosen} - {*left_out}
        if not (messages if is_prompt else trained):
            return _EMPTY_PROMPT if is_prompt else NOTHING_TRAINED

        columns = {name: fields[name] for name in ("label",) if name in fields}
        if is_prompt:
            columns["prompt"] = msgspec.json.encode(messages)
            if metadata := self._row.metadata(fields.get("metadata"), tools, raw):
                columns["metadata"] = metadata
        num_messages = len(messages)  # of the row: the renderer may change the list
        try:
            found = self._renderer.render(messages, tools=schemas, add_generation_prompt=is_prompt)
        except Exception as error:
            raise_if_shortage(error)
            raise RowFault("AD421", f"the renderer raised {error!r}", raw, user_traceback(error)) from None

        try:
            encoded = self._encoded(found, num_messages, trained)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise RowFault("AD425", f"the renderer returned something that is not a sample: {error}", raw) from None

        if is_prompt:
            return Drafting([], columns, encoded)

        return Drafting.with_metadata([], fields, encoded, num_left_out=len(chosen) - len(trained), **columns)

    def _encoded(self, found: Any, num_messages: int, trained: set[int]) -> Encoded:
        tokens = array("i", found.token_ids)
        if not trained:
            return Encoded(tokens, [])

        sampled, owners = found.sampled_mask, found.message_indices
        if not len(tokens) == len(sampled) == len(owners):
            raise ValueError(
                f"sampled_mask has {len(sampled)} values, message_indices {len(owners)}, and there are {len(tokens)} "
                "tokens; a renderer of templates gives no mask, and ChatTokenizeFn renders templates"
            )

        is_trained = [bool(one) and owner in trained for one, owner in zip(sampled, owners, strict=True)]
        spans = trained_runs([0 if one else NOT_TRAINED for one in is_trained])
        stops: list[int] = getattr(self._renderer, "get_stop_token_ids", list)()
        if stops and num_messages - 1 in trained and not (spans and tokens[spans[-1][1] - 1] in stops):
            tokens.append(stops[0])
            spans.append((len(tokens) - 1, len(tokens)))
        return Encoded(tokens, spans)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        fitted = self._fn.fit(drafting.of)
        if fitted is None or not self._fn.makes_prompts:
            self.write_sample(row, fitted, drafting.columns, out)
        elif fitted.tokens:
            out.keep(row, fitted.tokens, **drafting.columns)
        else:
            out.drop(row, _EMPTY_PROMPT)
