"""What tokenize functions of prompts have in common: checked settings, compiled templates, rows read, ids made."""

from __future__ import annotations

import os
from array import array
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError
from asyncdata.core.import_path import tag_of
from asyncdata.core.shortage import raise_if_shortage
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncdata.tokenization.chat_template.template import ChatTemplate
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.text_encoder import Encoded
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = (
    "TEMPLATE_ARGUMENTS",
    "BackendName",
    "Name",
    "OfTokenizer",
    "Prompt",
    "Templates",
    "compile_templates",
    "encode_each",
    "parse_date",
    "read_each",
    "templates_digest",
    "tokenizer_fault",
)

Buffer = bytes | memoryview
Name = Annotated[str, msgspec.Meta(min_length=1)]
BackendName = Literal["auto", "hf", "gigatoken", "fastokens"]

# What templates cannot be given as a variable, since apply_chat_template takes it for an argument of its own.
TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template continue_final_message tokenize sanitize_control_tokens padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


class _First(msgspec.Struct, frozen=True):
    """The one field that may be given by position."""

    tokenizer: Name


class OfTokenizer(_First, frozen=True, kw_only=True):
    """What every description that has a tokenizer does with its fields.

    :param tokenizer_backend: the library that encodes: "auto" for the fastest that is proven to give the ids of
        ``tokenizers`` with this tokenizer, "hf" for ``tokenizers`` itself, or one by name. It never changes a token.
    """

    tag: ClassVar[str] = ""
    """Its name in fingerprints, which no later release changes. It is the path where the class lay in the first one."""

    version: ClassVar[int] = 1
    """Part of the fingerprint: it changes when the same settings, or a default, come to mean other tokens."""

    needs_offsets: ClassVar[bool] = False
    """Whether it must know where each token lies in the text: only ``tokenizers`` says that, so no other encodes."""

    tokenizer_backend: BackendName = "auto"

    def check_fields(self, *json_fields: str) -> None:
        """A Struct's constructor does not.

        :param json_fields: those of JSON values. They become copies, since the caller's dicts may change later.
        :raises ConfigError: for a field of the wrong type.
        """
        if isinstance(self.tokenizer, os.PathLike):
            msgspec.structs.force_setattr(self, "tokenizer", os.fspath(self.tokenizer))
        if way_out := _way_out(self.tokenizer):
            raise ConfigError(
                f"{type(self).__name__}: tokenizer must be a folder with tokenizer.json or a Hugging Face name, got a "
                f"{type(self.tokenizer).__name__}: {way_out}"
            )

        for field in msgspec.structs.fields(type(self)):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                value = getattr(self, field.name)
                raise ConfigError(f"{type(self).__name__}: {field.name}={value!r}: {error}") from None

        if self.needs_offsets and self.tokenizer_backend not in ("auto", "hf"):
            raise ConfigError(
                f"{type(self).__name__} needs to know where each token lies in the text, which only tokenizers says: "
                f"tokenizer_backend={self.tokenizer_backend!r} cannot be used; leave it, or use 'hf'"
            )

        for name in json_fields:
            given = getattr(self, name)
            copy = _json_copy(given)
            if copy != given:
                raise ConfigError(f"{name} must be JSON values, got {given}")

            msgspec.structs.force_setattr(self, name, copy)

    def settings_digest(self) -> str:
        """Digest of the kind and its settings. Where the tokenizer lies, and who encodes, is no part of it."""
        # Without defaults, so that a setting which is new in a later release refuses no snapshot of this one.
        same = msgspec.structs.replace(self, tokenizer="-", revision=None, tokenizer_backend="auto")
        settings = msgspec.to_builtins(same)
        return digest(canonical([tag_of(type(self)), self.version, settings]))

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins."""
        return msgspec.structs.asdict(self)


def _way_out(tokenizer: Any) -> str:
    """What to pass in place of a tokenizer: workers load its files, and an object of this process is no use to them."""
    name = getattr(tokenizer, "name_or_path", None)
    if isinstance(name, str) and name:
        return f"pass tokenizer.name_or_path, which is {name!r}; if it was changed, write it to a folder and pass that"

    if hasattr(tokenizer, "save_pretrained"):
        return "write it by tokenizer.save_pretrained(folder), and pass the folder"

    return (
        "write it by tokenizer.save('folder/tokenizer.json'), and pass the folder" if hasattr(tokenizer, "save") else ""
    )


def _json_copy(value: Any) -> Any:
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError):
        return None


class Templates(NamedTuple):
    """The compiled template for chats without tools, and the one for chats with tools."""

    without_tools: ChatTemplate
    with_tools: ChatTemplate

    def render(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]] | None) -> str:
        """The chat as text.

        :raises RowFault: if the template refuses the chat, or fails on it.
        """
        return (self.without_tools if schemas is None else self.with_tools).render(messages, schemas)


def compile_templates(
    files: TokenizerFiles, chosen: str | None, variables: dict[str, Any], today: str | None
) -> Templates:
    """The templates of a tokenizer, or the ``chosen`` one, for a model that is to answer.

    :raises ConfigError: if there is no such template, or it is none.
    """
    from asyncdata.tokenization.chat_template.template import ChatTemplate, choose_templates

    seen = {"add_generation_prompt": True, **files.special_tokens, **variables}
    texts = choose_templates(files.chat_templates, chosen)
    date = None if today is None else parse_date(today)
    return Templates(*(ChatTemplate(text, seen, date) for text in texts))


def templates_digest(files: TokenizerFiles, chosen: str | None) -> str:
    """Digest of what :func:`compile_templates` would compile."""
    from asyncdata.tokenization.chat_template.template import choose_templates

    return digest(*choose_templates(files.chat_templates, chosen), canonical(files.special_tokens))


def parse_date(text: str) -> datetime:
    """The date written ``2026-01-31``.

    :raises ConfigError: if it is none.
    """
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"today is a date such as 2026-01-31, got {text!r}") from error


class Prompt(NamedTuple):
    """A row that has been read: what is to be tokenized, None for nothing, and what goes along."""

    row: int
    text: str | None
    columns: dict[str, Buffer]


def read_each(
    read: Callable[[Buffer], tuple[str | None, dict[str, Buffer]]], rows: Sequence[Buffer], out: ColumnWriter
) -> list[Prompt]:
    """Every row that can be read. What is wrong with the others is written to ``out``."""
    prompts = []
    for row, raw in enumerate(rows):
        out.progress(row)  # a template is a program, and may not end
        try:
            prompts.append(Prompt(row, *read(raw)))
        except RowFault as fault:
            out.fail(row, fault)
    out.progress(None)
    return prompts


def encode_each(
    encoder: Callable[[list[str]], Encoded] | None, prompts: Sequence[Prompt]
) -> list[array[int] | Exception]:
    """The ids of each prompt's text, or what the library raised for it; none for one that has no text.

    :param encoder: None where no prompt has text.
    """
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    ids = iter(()) if encoder is None else _ids_of_each(encoder(texts))
    return [array("i") if prompt.text is None else next(ids) for prompt in prompts]


def _ids_of_each(encoded: Encoded) -> Iterator[array[int] | Exception]:
    for number, ids in enumerate(encoded.flat.of_each()):
        yield encoded.errors.get(number) or array("i", ids)


def tokenizer_fault(error: Exception, raw: Buffer) -> RowFault:
    """The fault of a row whose text the tokenizer refused.

    :raises Exception: ``error``, if the system was short of something.
    """
    raise_if_shortage(error)
    return RowFault("AD421", f"the tokenizer raised {type(error).__name__}: {error}", raw)
