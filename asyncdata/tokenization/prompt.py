"""Prompts for rollouts: a row's text or chat to token ids, with its label and metadata carried along undecoded."""

from __future__ import annotations

import os
from array import array
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec

from asyncdata.errors import ConfigError
from asyncdata.fingerprint import canonical, digest
from asyncdata.tokenization.rows import RowDecoder, RowFault, decode_value, json_type, missing_key
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from asyncdata.tokenization.base import BatchTokenizer, ColumnWriter
    from asyncdata.tokenization.chat_template import ChatTemplate

__all__ = ("PromptTokenizeFn",)

Buffer = bytes | memoryview
Name = Annotated[str, msgspec.Meta(min_length=1)]

# What templates cannot be given as a variable, since apply_chat_template takes it for an argument of its own.
_ARGUMENTS = frozenset(
    "conversation messages tools chat_template continue_final_message tokenize sanitize_control_tokens padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_NO_METADATA = (b"null", b"false", b"0", b'""', b"[]")


class _OfTokenizer(msgspec.Struct, frozen=True):
    """The one field that may be given by position."""

    tokenizer: Name


class PromptTokenizeFn(_OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows to prompts, as slime reads them: ``{"input": text or messages, "label": ..., "metadata": {...}}``.

    The ids are those of the tokenizer's ``tokenizer.json``, the text that of ``apply_chat_template`` with
    ``add_generation_prompt=True``: what ``AutoTokenizer`` gives. A sample has ``tokens``; ``prompt``, the rendered text
    or the string as the row has it; ``label`` and ``metadata`` as the row has them. Tools of a row are also put into
    ``metadata["tools"]``.

    A prompt of no tokens is dropped as ``empty_prompt``, one of more than ``max_length`` tokens as ``max_length``.

    :param tokenizer: a folder with ``tokenizer.json`` (a path object will do), or a name on the Hugging Face hub.
    :param prompt_key: where a row has its prompt: a string, or a list of messages with ``role`` and ``content``.
    :param label_key: where it has its label, any JSON value; every row must have one. None: no labels.
    :param metadata_key: where it may have metadata. None: no metadata.
    :param tool_key: where it may have tools: a list of JSON schemas, or that list as JSON text. None: no tools.
    :param apply_chat_template: render the prompt as a chat; a string is one user turn. Without it a prompt must be a
        string.
    :param chat_template: a template's text, or the name of one of the tokenizer's, in place of its own choice.
    :param chat_template_kwargs: variables for the template, such as ``enable_thinking``; JSON values.
    :param today: the date, as 2026-01-31, that a template is told when it asks for today's. The clock's would make
        other tokens of the same row tomorrow.
    :param add_special_tokens: what the tokenizer adds around plain text. A template writes its own.
    :param max_length: the longest prompt that is kept, in tokens.
    :param revision: the hub's branch, tag or commit.
    :raises ConfigError: for a setting that cannot work.
    """

    version: ClassVar[int] = 1
    """Part of the fingerprint: it changes when the same settings, or a default, come to mean other tokens."""

    prompt_key: Name = "input"
    label_key: Name | None = None
    metadata_key: Name | None = "metadata"
    tool_key: Name | None = "tools"
    apply_chat_template: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    today: str | None = None
    add_special_tokens: bool = False
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokenizer, os.PathLike):
            msgspec.structs.force_setattr(self, "tokenizer", os.fspath(self.tokenizer))
        self._check_types()
        if self.apply_chat_template and self.add_special_tokens:
            raise ConfigError(
                "add_special_tokens=True is for plain text: a chat template writes its special tokens itself"
            )

        if not self.apply_chat_template and (self.chat_template or self.chat_template_kwargs or self.today):
            raise ConfigError(
                "chat_template, chat_template_kwargs and today do nothing without apply_chat_template=True"
            )

        if self.today is not None:
            _date(self.today)

        if taken := sorted(_ARGUMENTS & set(self.chat_template_kwargs)):
            raise ConfigError(
                f"chat_template_kwargs are the template's variables; it cannot be given {', '.join(taken)}"
            )

    def _check_types(self) -> None:
        """A Struct's constructor does not."""
        for field in msgspec.structs.fields(type(self)):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                value = getattr(self, field.name)
                raise ConfigError(f"{type(self).__name__}: {field.name}={value!r}: {error}") from None

        # A copy, since the caller's dict may change later.
        kwargs = _json_copy(self.chat_template_kwargs)
        if kwargs != self.chat_template_kwargs:
            raise ConfigError(f"chat_template_kwargs must be JSON values, got {self.chat_template_kwargs}")

        msgspec.structs.force_setattr(self, "chat_template_kwargs", kwargs)

    def resolve(self) -> PromptTokenizeFn:
        """The same with the tokenizer's local folder, and the hub's commit as its revision.

        :raises ConfigError: if there is no such tokenizer, or it cannot render chats that it should.
        """
        folder, commit = resolve(self.tokenizer, self.revision)
        if self.apply_chat_template:
            _compile(self, TokenizerFiles(folder))
        return msgspec.structs.replace(self, tokenizer=folder, revision=commit or self.revision)

    def fingerprints(self) -> dict[str, str]:
        """What the tokens depend on, by part. Where the tokenizer lies is no part of it."""
        files = TokenizerFiles(resolve(self.tokenizer, self.revision).folder)
        # Without defaults, so that a setting which is new in a later release refuses no snapshot of this one.
        settings = msgspec.to_builtins(msgspec.structs.replace(self, tokenizer="-", revision=None))
        identity = [f"{type(self).__module__}:{type(self).__qualname__}", self.version, settings]
        return {
            "tokenizer": files.digest(),
            "template": self._template_digest(files) if self.apply_chat_template else "none",
            "tokenize_fn": digest(canonical(identity)),
        }

    def _template_digest(self, files: TokenizerFiles) -> str:
        from asyncdata.tokenization.chat_template import choose_templates

        texts = choose_templates(files.chat_templates, self.chat_template)
        return digest(*texts, canonical(files.special_tokens))

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins."""
        return msgspec.structs.asdict(self)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        files = TokenizerFiles(resolve(self.tokenizer, self.revision).folder)
        templates = _compile(self, files) if self.apply_chat_template else None
        return _PromptTokenizer(self, files.load(), templates)


def _json_copy(value: Any) -> Any:
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError):
        return None


class _Templates(NamedTuple):
    without_tools: ChatTemplate
    with_tools: ChatTemplate


def _compile(fn: PromptTokenizeFn, files: TokenizerFiles) -> _Templates:
    from asyncdata.tokenization.chat_template import ChatTemplate, choose_templates

    variables = {"add_generation_prompt": True, **files.special_tokens, **fn.chat_template_kwargs}
    texts = choose_templates(files.chat_templates, fn.chat_template)
    today = None if fn.today is None else _date(fn.today)
    return _Templates(*(ChatTemplate(text, variables, today) for text in texts))


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"today is a date such as 2026-01-31, got {text!r}") from error


class _Tools(NamedTuple):
    """A row's tools, as JSON text and decoded."""

    text: bytes
    schemas: list[dict[str, Any]]


class _Prompt(NamedTuple):
    """A row that has been read: what is to be tokenized, and what goes along."""

    row: int
    text: str
    columns: dict[str, Buffer]


class _PromptTokenizer:
    """A :class:`PromptTokenizeFn`, opened."""

    def __init__(self, fn: PromptTokenizeFn, tokenizer: Tokenizer, templates: _Templates | None) -> None:
        self._read = _PromptReader(fn, templates)
        self._tokenizer = tokenizer
        self._add_special_tokens = fn.add_special_tokens
        self._max_length = fn.max_length

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        prompts = []
        for row, raw in enumerate(rows):
            out.progress(row)  # a template is a program, and may not end
            try:
                prompts.append(_Prompt(row, *self._read(raw)))
            except RowFault as fault:
                out.fail(row, fault)
        out.progress(None)
        for prompt, tokens in zip(prompts, self._encode([prompt.text for prompt in prompts]), strict=True):
            if isinstance(tokens, Exception):
                reason = f"the tokenizer raised {type(tokens).__name__}: {tokens}"
                out.fail(prompt.row, RowFault("AD421", reason, rows[prompt.row]))
            elif not prompt.text or not tokens:
                out.drop(prompt.row, "empty_prompt")
            elif self._max_length is not None and len(tokens) > self._max_length:
                out.drop(prompt.row, "max_length")
            else:
                out.keep(prompt.row, tokens, **prompt.columns)

    def _encode(self, texts: list[str]) -> list[array[int] | Exception]:
        """The ids of each text; where the library refuses the batch, one by one, so that the one to blame is named."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._add_special_tokens)
        except Exception as error:  # the library raises a bare Exception
            return [error] if len(texts) == 1 else [result for text in texts for result in self._encode([text])]

        return [array("i", encoding.ids) for encoding in encodings]


class _PromptReader:
    """A raw row to the prompt's text and the sample's columns."""

    def __init__(self, fn: PromptTokenizeFn, templates: _Templates | None) -> None:
        self._templates = templates
        keys = {"prompt": fn.prompt_key, "label": fn.label_key, "metadata": fn.metadata_key, "tools": fn.tool_key}
        self._keys = {name: key for name, key in keys.items() if key is not None}
        self._decode = RowDecoder(tuple(self._keys.values()))

    def __call__(self, raw: Buffer) -> tuple[str, dict[str, Buffer]]:
        found = zip(self._keys, self._decode(raw), strict=True)
        columns: dict[str, Buffer] = {name: text for name, text in found if text is not None}
        for name in ("prompt", "label"):
            if name not in columns and name in self._keys:
                raise missing_key(raw, self._keys[name], f"{name}_key")

        tools = self._tools(columns.pop("tools"), raw) if "tools" in columns else None
        prompt = decode_value(columns["prompt"], raw)
        if self._templates is None:
            text = self._plain(prompt, raw)
        else:
            text = self._rendered(self._templates, prompt, tools, raw)
            columns["prompt"] = msgspec.json.encode(text)
        if "metadata" in columns or tools is not None:
            self._write_metadata(columns, tools, raw)
        return text, columns

    def _plain(self, prompt: Any, raw: Buffer) -> str:
        if isinstance(prompt, str):
            return self._encodable("prompt", prompt, raw)

        way_out = "; set apply_chat_template=True to render messages" if isinstance(prompt, list) else ""
        raise self._wrong_type("prompt", "a string", prompt, raw, way_out)

    def _rendered(self, templates: _Templates, prompt: Any, tools: _Tools | None, raw: Buffer) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list):
            raise self._wrong_type("prompt", "a string or a list of messages", prompt, raw)

        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise self._wrong_type(f"prompt[{number}]", "an object with 'role' and 'content'", message, raw)

            if message.get("role") is None:
                has = ", ".join(map(ascii, message)) or "nothing"
                raise RowFault("AD112", f"{self._name(f'prompt[{number}]')} has no 'role'; it has {has}", raw)

        if not messages:
            return ""  # no template is written for an empty chat

        template, schemas = (templates.without_tools, None) if tools is None else (templates.with_tools, tools.schemas)
        return self._encodable("prompt", template.render(messages, schemas), raw)

    def _tools(self, text: Buffer, raw: Buffer) -> _Tools | None:
        schemas = decode_value(text, raw)
        if schemas is None:
            return None

        if isinstance(schemas, str):
            text = self._encodable("tools", schemas, raw).encode()
            schemas = self._decode_inner("tools", text, raw)
        if not isinstance(schemas, list):
            raise self._wrong_type("tools", "a list of JSON schemas", schemas, raw)

        for number, schema in enumerate(schemas):
            if not isinstance(schema, dict):
                raise self._wrong_type(f"tools[{number}]", "a JSON schema", schema, raw)

        return _Tools(bytes(text), schemas)

    def _decode_inner(self, name: str, text: bytes, raw: Buffer) -> Any:
        try:
            return decode_value(text)
        except RowFault as fault:
            reason = f"{self._name(name)} is a string, and its text is no JSON: {fault.reason}"
            raise RowFault(fault.code, reason, raw) from None

    def _write_metadata(self, columns: dict[str, Buffer], tools: _Tools | None, raw: Buffer) -> None:
        """The row's own text, with its tools at the end: a later key goes before an earlier one of the same name."""
        metadata = bytes(columns.pop("metadata", b"null"))
        if metadata in _NO_METADATA:
            metadata = b"{}" if tools is not None else b""
        if tools is not None:
            if not metadata.startswith(b"{"):
                raise self._wrong_type("metadata", "an object, as the row has tools", decode_value(metadata), raw)

            comma = b"," if metadata[1:-1].strip() else b""
            metadata = metadata[:-1] + comma + b'"tools":' + tools.text + b"}"
        if metadata:
            columns["metadata"] = metadata

    def _encodable(self, name: str, text: str, raw: Buffer) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                reason = f"unpaired surrogate \\u{ord(text[error.start]):04x} in {self._name(name)}"
                raise RowFault("AD107", reason, raw) from None
        return text

    def _wrong_type(self, name: str, need: str, value: Any, raw: Buffer, way_out: str = "") -> RowFault:
        return RowFault("AD111", f"{self._name(name)} must be {need}, got {json_type(value)}{way_out}", raw)

    def _name(self, name: str) -> str:
        """The row's own key for what is here called ``name`` or ``name[number]``."""
        field, bracket, rest = name.partition("[")
        return ascii(self._keys[field]) + bracket + rest
