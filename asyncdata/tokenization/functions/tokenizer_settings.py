"""The settings of every tokenize function with a tokenizer, their checks, and its chat templates."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import canonical, digest
from asyncdata.core.settings import Description, tag_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Set

    from asyncdata.core.columns import Column
    from asyncdata.tokenization.chat_template.template import ChatTemplate

Name = Annotated[str, msgspec.Meta(min_length=1)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
BackendName = Literal["auto", "hf", "gigatoken", "fastokens"]
Media = Literal["error", "leave_out"]

# Names that cannot be variables of a template, because apply_chat_template has arguments of these names.
TEMPLATE_ARGUMENTS = frozenset(
    "conversation messages tools chat_template continue_final_message tokenize sanitize_control_tokens padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


class _First(Description, frozen=True):
    """The only field that may be a positional argument."""

    tokenizer: Name


class OfTokenizer(_First, frozen=True, kw_only=True):
    """The fields of every tokenize function with a tokenizer, and their checks.

    :param metadata_key: the key of a row's optional metadata. None: no metadata.
    :param media: what to do with a row that has pictures, videos or sounds: it is bad; or they are left out, and the
        sample is noted as ``media_left_out``.
    :param ignore_keys: keys of a row, or of a turn, of which nothing is said if they are not read: no row is bad for
        them.
    :param revision: a branch, tag or commit on the hub.
    :param tokenizer_backend: the library that encodes: "auto" for the fastest one that is proven to give the ids of
        ``tokenizers`` with this tokenizer, "hf" for ``tokenizers`` itself, or the name of a library. The tokens are
        always the same.
    """

    tag: ClassVar[str] = ""
    """Its name in fingerprints, which never changes. It is the import path that the class had at first."""

    version: ClassVar[int] = 1
    """Part of the fingerprint: it is raised when the same settings, or a default, give other tokens than before."""

    makes_prompts: ClassVar[bool] = False
    """Whether its samples are prompts for rollouts, without labels."""

    needs_offsets: ClassVar[bool] = False
    """Whether it needs the offsets of tokens: then these must be proven too, before a fast backend is used."""

    tokenizer_backend: BackendName = "auto"
    metadata_key: Name | None = "metadata"
    revision: str | None = None
    media: Media = "error"
    ignore_keys: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        self.check_fields()

    def check_fields(self, *json_fields: str) -> None:
        """Check the types of the fields, which a Struct's constructor does not.

        :param json_fields: the fields with JSON values. They are copied, as the caller may change its dicts later.
        :raises ConfigError: for a field of the wrong type.
        """
        if way_out := _way_out(self.tokenizer):
            raise ConfigError(
                f"{type(self).__name__}: tokenizer must be a folder with tokenizer.json or a Hugging Face name, got a "
                f"{type(self.tokenizer).__name__}: {way_out}"
            )

        super().__post_init__()
        for name in json_fields:
            given = getattr(self, name)
            copy = _json_copy(given)
            if copy != given:
                raise ConfigError(f"{name} must be JSON values, got {given}")

            msgspec.structs.force_setattr(self, name, copy)

    def resolve(self) -> Self:
        """A copy with the tokenizer's local folder, and the hub's commit as its revision.

        :raises ConfigError: if the tokenizer does not exist, or lacks what the settings need.
        """
        folder, commit = resolve(self.tokenizer, self.revision)
        self.check_files(TokenizerFiles(folder))
        return msgspec.structs.replace(self, tokenizer=folder, revision=commit or self.revision)

    def check_files(self, files: TokenizerFiles) -> None:
        """Check in the trainer's process that the files have what a worker needs.

        :raises ConfigError: if something is missing.
        """

    def files(self) -> TokenizerFiles:
        """Read the tokenizer's files."""
        return TokenizerFiles(resolve(self.tokenizer, self.revision).folder)

    def fingerprints(self) -> dict[str, str]:
        """Digests of what the tokens depend on, by part. The tokenizer's location is not included."""
        files = self.files()
        return {
            "tokenizer": files.digest(),
            "template": self.template_digest(files),
            "tokenize_fn": self.settings_digest(),
        }

    @property
    def _adopted(self) -> Any:
        """The :class:`~asyncdata.Processor`, where there is such a field; its folder may have been given."""
        return getattr(self, "processor", None)

    def _adopt_processor(self) -> None:
        """Have ``processor`` be a :class:`~asyncdata.Processor`: it may be given as a folder, or as its settings.

        :raises ConfigError: if it is none, or pictures are to be left out.
        """
        from asyncdata.tokenization.pictures.settings import processor_of

        msgspec.structs.force_setattr(self, "processor", processor_of(self._adopted))
        if self.media == "leave_out":
            kind = type(self).__name__
            raise ConfigError(f'{kind} has a processor of pictures, and media="leave_out" leaves them out')

    @property
    def columns(self) -> tuple[Column, ...]:
        """What samples have beside their tokens: nothing without a processor."""
        return () if self._adopted is None else tuple(self._adopted.columns(self.tokenizer, self.revision))

    def template_digest(self, files: TokenizerFiles) -> str:
        """Digest of the chat template; ``"none"`` if the function has none."""
        return "none"

    def settings_digest(self) -> str:
        """Digest of the class and its settings, without the tokenizer's location and backend."""
        # Without defaults, so that a setting that a later release adds does not invalidate snapshots of this one.
        same = msgspec.structs.replace(self, tokenizer="-", revision=None, tokenizer_backend="auto")
        return digest(canonical([tag_of(type(self)), self.version, _changed_settings(same)]))

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins."""
        return msgspec.structs.asdict(self)


def _changed_settings(settings: msgspec.Struct) -> dict[str, Any]:
    """The settings that are not the defaults, as builtins.

    msgspec leaves out a default that is the same object; a text that was read from a file is another, equal one.
    """
    changed = {}
    for field in msgspec.structs.fields(settings):
        value, make = getattr(settings, field.name), field.default_factory
        default = field.default if make is msgspec.NODEFAULT else make()
        if type(value) is not type(default) or value != default:
            found = changed[field.encode_name] = msgspec.to_builtins(value)
            for name in getattr(value, "unset", list)():
                del found[name]
    return changed


def _way_out(tokenizer: Any) -> str:
    """What to pass instead of a tokenizer object. Workers load its files; they cannot use an object of this process."""
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

        :raises RowFault: if the template rejects the chat, or fails.
        """
        return self.of(schemas).render(messages, schemas)

    def of(self, schemas: list[dict[str, Any]] | None) -> ChatTemplate:
        """The template for chats with these tools."""
        return self.without_tools if schemas is None else self.with_tools

    @classmethod
    def compiled(cls, files: TokenizerFiles, chosen: str | None, variables: dict[str, Any], today: str | None) -> Self:
        """Those of a tokenizer, or the ``chosen`` one, with ``add_generation_prompt``.

        :raises ConfigError: if there is no such template, or it is invalid.
        """
        from asyncdata.tokenization.chat_template.template import ChatTemplate, choose_templates

        seen = {"add_generation_prompt": True, **files.special_tokens, **variables}
        texts = choose_templates(files.chat_templates, chosen)
        date = None if today is None else cls.date(today)
        return cls(*(ChatTemplate(text, seen, date) for text in texts))

    @staticmethod
    def digest(files: TokenizerFiles, chosen: str | None) -> str:
        """Digest of what :meth:`compiled` would compile."""
        from asyncdata.tokenization.chat_template.template import choose_templates

        return digest(*choose_templates(files.chat_templates, chosen), canonical(files.special_tokens))

    @classmethod
    def check(cls, variables: dict[str, Any], today: str | None, reserved: Set[str]) -> None:
        """Check ``chat_template_kwargs`` and ``today``.

        :param reserved: names that cannot be variables of the template.
        :raises ConfigError: for a reserved name, or if ``today`` is not a date.
        """
        if today is not None:
            cls.date(today)
        if taken := sorted(reserved & set(variables)):
            raise ConfigError(
                f"chat_template_kwargs are variables of the template; these names are reserved: {', '.join(taken)}"
            )

    @staticmethod
    def date(text: str) -> datetime:
        """A date such as ``2026-01-31``.

        :raises ConfigError: if it is not a date.
        """
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"today is a date such as 2026-01-31, got {text!r}") from error
