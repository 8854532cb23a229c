"""What tokenize functions of chats for training have in common: settings, drafts of chats, and their reader."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from asyncdata.tokenization.column_writer import Buffer, ColumnWriter, join
from asyncdata.tokenization.encoders.text_encoder import Encoder, open_encoder
from asyncdata.tokenization.functions.text import NOTHING_TRAINED, Draft, Drafting, Encoded, OfAnyLength, RowTokenizer
from asyncdata.tokenization.functions.tokenizer_settings import TEMPLATE_ARGUMENTS, Name, Templates
from asyncdata.tokenization.media import ReadChat
from asyncdata.tokenization.row_fields import NOTED_KEYS, TURN_FLAGS, Account, NotWritten, RowReader, TurnFlag
from asyncdata.tokenization.rows import Message, RowFault, decode_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncdata.tokenization.chat_template.assistant_spans import ChatSpans
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles


_VARIABLES = "chat_template_kwargs"
"""The key of a row's own variables of the template, as SFTTrainer and DPOTrainer of TRL read it."""

_RESERVED = TEMPLATE_ARGUMENTS | {"add_generation_prompt"}
_KEPT_VARIABLES = 64
"""For so many different variables of rows, what was proven of their chats is kept."""


class OfChat(OfAnyLength, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The further settings of tokenize functions that train on chats.

    :param tool_key: the key of a row's optional tools: a list of JSON schemas, or that list as JSON text. None: no
        tools.
    :param chat_template: the text of a template, or the name of one of the tokenizer's templates. None: its default.
    :param chat_template_kwargs: variables for the template, such as ``enable_thinking``; JSON values. Those that a row
        has under ``chat_template_kwargs`` come before them.
    :param today: the date, such as 2026-01-31, for templates that use the current date.
    :param turn_flags: the keys of a turn of which false or 0 says that it is not trained. (): they are ignored.
    """

    version: ClassVar[int] = 3
    """Since version 2, a token of white space and the beginning of the trained text is trained; since 3, flags of turns
    are read."""

    needs_offsets: ClassVar[bool] = True

    tool_key: Name | None = msgspec.field(default="tools", name="tools_key")  # the name in fingerprints
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    today: str | None = None
    turn_flags: tuple[TurnFlag, ...] = TURN_FLAGS

    def __post_init__(self) -> None:
        self.check_fields("chat_template_kwargs")
        Templates.check(self.chat_template_kwargs, self.today, _RESERVED)

    @property
    def may_be_text(self) -> bool:
        """Whether rows may be text that no template renders."""
        return False

    def has_template(self, files: TokenizerFiles) -> bool:
        """Whether there is a chat template; without one, rows must be text."""
        return bool(files.chat_templates) or self.chat_template is not None or not self.may_be_text

    def check_files(self, files: TokenizerFiles) -> None:
        """Compile the templates, if there are any."""
        if self.has_template(files):
            self.chat_spans(files, [])

    def template_digest(self, files: TokenizerFiles) -> str:
        """Digest of the templates and the special tokens that they see; ``"none"`` if rows must be text."""
        return Templates.digest(files, self.chat_template) if self.has_template(files) else "none"

    def chat_spans(
        self, files: TokenizerFiles, special: list[str], row: Mapping[str, Any] | None = None
    ) -> tuple[ChatSpans, ChatSpans]:
        """The span finders for chats without tools, and with tools.

        :param special: the texts of the tokenizer's special tokens.
        :param row: a row's own variables of the template, which come before the settings.
        :raises ConfigError: if there is no such template, or it is invalid.
        """
        from asyncdata.tokenization.chat_template.assistant_spans import ChatSpans

        variables = {**self.chat_template_kwargs, **(row or {}), "add_generation_prompt": False}
        templates = Templates.compiled(files, self.chat_template, variables, self.today)
        name = "the chat template" if self.chat_template is None else self.chat_template
        name = f"chat template {name!r}" if name in files.chat_templates else "the chat template"
        eos = files.special_tokens.get("eos_token")
        without_tools, with_tools = (ChatSpans(each, name, special, eos) for each in templates)
        return without_tools, with_tools


class _Beside(NamedTuple):
    """What a row has beside its chats: its tools, and what finds the spans of chats with its tools and variables."""

    tools: list[Message] | None
    spans: ChatSpans


class ChatDrafts:
    """Converts the chats of rows to drafts.

    :param row: reads the rows.
    :param may_have_pictures: whether ``{"type": "image"}`` is a place of a picture.
    :raises ConfigError: if there is no such template, or it is invalid.
    """

    def __init__(self, fn: OfChat, row: RowReader, files: TokenizerFiles, *, may_have_pictures: bool = False) -> None:
        self._row, self._may_have_pictures = row, may_have_pictures
        self._spans = fn.chat_spans(files, special := files.special_texts())
        self._nothing = _Beside(None, self._spans[0])
        self._spans_of = lru_cache(_KEPT_VARIABLES)(lambda text: fn.chat_spans(files, special, self._variables(text)))
        self._not_written = NotWritten(() if row.account is None else row.account.ignored)

    def notes(self, messages: list[Message], beside: _Beside) -> tuple[str, ...]:
        """The notes of what the template does not write of a chat."""
        return self._not_written(beside.spans.template, messages, beside.tools)

    def beside(self, fields: Mapping[str, Any], raw: Buffer) -> _Beside:
        """What the row has beside its chats.

        :raises RowFault: if its tools are not a list of JSON schemas, or its variables have a reserved name.
        """
        given, text = fields.get("tools"), fields.get(_VARIABLES)
        if given is None and text is None:  # nearly always
            return self._nothing

        tools = self._row.schemas(self._row.tools(given, raw), raw)
        try:
            spans = self._spans if text is None or bytes(text) in (b"null", b"{}") else self._spans_of(bytes(text))
        except RowFault as fault:
            raise RowFault(fault.code, fault.reason, raw) from None

        return _Beside(tools, spans[tools is not None])

    def _variables(self, text: bytes) -> dict[str, Any]:
        variables = decode_value(text)
        if isinstance(variables, str) and variables.startswith("{"):
            variables = decode_value(variables.encode())
        if not isinstance(variables, dict):
            return {}  # it is something else

        if taken := sorted(_RESERVED & set(variables)):
            raise RowFault("AD111", f"{self._row.name(_VARIABLES)} has {', '.join(taken)}, which is no variable")

        return variables

    def draft(self, name: str, messages: list[Message], beside: _Beside, trained: list[int], raw: Buffer) -> Draft:
        """The rendered chat, with the blocks of the messages numbered in ``trained``.

        :param name: the row's field with the chat, for errors.
        :raises RowFault: if the template rejects the chat, or the blocks cannot be located.
        """
        tools, spans = beside
        chat = ReadChat(self._row, name, messages, tools, raw, may_have_pictures=self._may_have_pictures)
        text, blocks = spans(messages, tools, trained)
        chat.check_written(text, spans.template)
        return Draft(self._row.encodable(name, text, raw), blocks, spans.has_stop(text, blocks))

    def prompt(self, name: str, messages: list[Message], beside: _Beside, raw: Buffer) -> Draft:
        """The rendered chat with its generation prompt, which is not trained on.

        :raises RowFault: if the template rejects the chat.
        """
        tools, spans = beside
        return Draft(self._row.encodable(name, spans.prompt(messages, tools), raw), [])


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of equal messages, or ids, at the beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def more_keys(fn: OfChat) -> dict[str, str | None]:
    """``{field: key}`` of what a row may have beside its chats."""
    variables = None if _VARIABLES in fn.ignore_keys else _VARIABLES
    return {"tools": fn.tool_key, "metadata": fn.metadata_key, _VARIABLES: variables}


def chosen_messages(train_on: str, messages: list[Message]) -> list[int]:
    """The indices of the messages that ``train_on`` chooses, of the assistant alone."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return numbers[-1:] if train_on == "last_assistant" else numbers


class Chats(RowTokenizer):
    """An opened :class:`~asyncdata.ChatTokenizeFn`: renders the chat of a row, and cuts its tokens to length.

    :param keys: as :class:`~asyncdata.tokenization.functions.dialects.DialectReader` takes them; so is ``decided_by``.
    """

    def __init__(
        self,
        fn: OfChat,
        dialect: str,
        keys: Mapping[str, str],
        train_on: str,
        decided_by: str = "",
        label_key: str | None = None,
        picture_keys: dict[str, str | None] | None = None,
    ) -> None:
        from asyncdata.tokenization.functions.dialects import DIALECTS, DialectReader

        files = fn.files()
        account = Account.of_chats(fn.ignore_keys, fn.tool_key, are_trained=True)
        row = DialectReader(dialect, keys, more_keys(fn) | (picture_keys or {}), decided_by, label_key, account)
        super().__init__(fn, row, open_encoder(files, fn.tokenizer_backend, offsets=True))
        self._fn, self._train_on, self._flags = fn, train_on, frozenset(fn.turn_flags)
        self._noted = self._flags | NOTED_KEYS
        self._name, self._chat = DIALECTS[dialect].required[0], DIALECTS[dialect].read
        self._drafts = None
        if fn.has_template(files):
            self._drafts = ChatDrafts(fn, row, files, may_have_pictures=picture_keys is not None)

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        return self.read_chat(*self._chat(self._row, fields, raw), fields, raw)

    def read_chat(self, messages: list[Message], first: int, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        """As :meth:`read`, of a row's chat, whose messages may be trained from number ``first`` on."""
        if self._drafts is None:
            raise RowFault("AD411", "the tokenizer has no chat template: pass chat_template=, or pairs of texts", raw)

        beside = self._drafts.beside(fields, raw)
        is_plain = self._noted.isdisjoint(chain.from_iterable(messages))  # nearly always
        left_out = [] if is_plain else self._row.left_out(self._name, messages, self._flags, raw)
        is_bare = is_plain and not beside.tools and len(messages) < 3
        notes: tuple[str, ...] = () if is_bare else self._drafts.notes(messages, beside)
        if self._train_on == "all":
            draft = self._whole(messages, beside, left_out, raw)
            return Drafting.with_metadata([draft], fields, notes=notes, num_left_out=len(left_out))

        chosen = [number for number in chosen_messages(self._train_on, messages) if number >= first]
        trained = [number for number in chosen if number not in left_out] if left_out else chosen
        if not trained:
            return NOTHING_TRAINED

        draft = self._drafts.draft(self._name, messages, beside, trained, raw)
        return Drafting.with_metadata([draft], fields, notes=notes, num_left_out=len(chosen) - len(trained))

    def _whole(self, messages: list[Message], beside: _Beside, left_out: list[int], raw: Buffer) -> Draft:
        """The chat, of which all is trained but the answers that are left out.

        :raises RowFault: for another turn that is left out, whose text the template does not show.
        """
        for number in left_out:
            if messages[number]["role"] != "assistant":
                name = self._row.name(f"{self._name}[{number}]")
                reason = f"{name} has a flag that leaves it out, but train_on='all' leaves out only the assistant's"
                raise RowFault("AD111", f"{reason}; set train_on='assistant', or turn_flags=()", raw)

        assert self._drafts is not None
        text, blocks, _ = self._drafts.draft(self._name, messages, beside, left_out, raw)
        borders = [0, *chain.from_iterable(blocks), len(text)]
        return Draft(text, join(zip(borders[::2], borders[1::2], strict=True)))

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        self.write_sample(row, self._fn.fit(drafting.drafts[0].encoded(found[0])), drafting.columns, out)


class PairsOfTexts(Chats):
    """The same for prompts and completions, of which a row may have two texts: they are trained without a template.

    As SFTTrainer of TRL does it: the completion ends with the end token, and what the two texts together have beyond
    the ids of the prompt alone is trained.
    """

    def __init__(self, fn: OfChat, *args: Any) -> None:
        super().__init__(fn, *args)
        assert isinstance(self._encoder, Encoder)
        self._around = self._encoder.around()
        self._eos = fn.files().special_tokens.get("eos_token", "")

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        prompt, completion = fields["prompt"], fields["completion"]
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return super().read(fields, raw)

        prompt = self._row.encodable("prompt", prompt, raw)
        text = prompt + self._row.encodable("completion", completion.removesuffix(self._eos), raw) + self._eos
        return Drafting.with_metadata([Draft(text, [], has_stop=bool(self._eos)), Draft(prompt, [])], fields)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        if len(found) == 1:
            return super().write(row, found, drafting, out)

        before, after = self._around
        tokens, prompt = (before + each.ids + after for each in found)
        first = 0 if self._train_on == "all" else num_alike(prompt, tokens)
        spans = [(first, len(tokens))] if first < len(tokens) else []
        encoded = Encoded(tokens, spans, has_stop=drafting.drafts[0].has_stop)
        return self.write_sample(row, self._fn.fit(encoded), drafting.columns, out)
