"""Chats by a renderer: code that turns messages into token ids, and says which of them the model has generated."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from asyncdata.core.errors import ConfigError, raise_if_shortage, user_traceback
from asyncdata.core.imports import missing_package, resolve_path
from asyncdata.tokenization.account import Account
from asyncdata.tokenization.chat_template.calls import fit_calls
from asyncdata.tokenization.functions.labelled import (
    NOTHING_TRAINED,
    TURN_LEFT_OUT,
    Drafting,
    Encoded,
    OfAnyLength,
    RowTokenizer,
)
from asyncdata.tokenization.functions.of_chat import trained_messages
from asyncdata.tokenization.functions.tokenizer_settings import Name
from asyncdata.tokenization.row_fields import TURN_FLAGS, RowReader, TurnFlag
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import NOT_TRAINED, trained_runs

if TYPE_CHECKING:
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

_OURS = f"{__name__}:made_by_renderers"
_EMPTY_PROMPT = "empty_prompt"
Message = dict[str, Any]


class Renderer(Protocol):
    """What is needed of a renderer; those of the package ``renderers`` have it."""

    def render(
        self, messages: list[Message], *, tools: list[Message] | None = None, add_generation_prompt: bool = False
    ) -> Any:
        """An object with ``token_ids``, and of each token in ``sampled_mask`` whether the model generates it, and in
        ``message_indices`` the index of its message, or -1. With ``add_generation_prompt`` the ids are enough.
        """
        ...


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

        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("renderers")
        except PackageNotFoundError as error:
            raise missing_package(type(self).__name__, "renderers", error) from error

    def open(self) -> RowTokenizer:
        """Make the renderer."""
        return _Rendered(self, resolve_path(self.build or _OURS)(self.files().folder, **self.arguments))


def made_by_renderers(folder: str, **config: Any) -> Renderer:
    """A renderer of the package ``renderers``, by the fields of its configuration.

    :raises ConfigError: for a configuration that it does not have, or that needs another tokenizer.
    """
    try:
        from pydantic import TypeAdapter, ValidationError
        from renderers import RendererConfig, create_renderer
        from renderers.base import load_tokenizer
    except ImportError as error:
        raise missing_package(RendererTokenizeFn.__name__, "renderers[transformers]", error) from error

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
        chosen = [] if is_prompt else trained_messages(self._fn.train_on, messages)
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

        left = (TURN_LEFT_OUT,) * (len(chosen) - len(trained))
        return Drafting.with_metadata([], fields, encoded, left, **columns)

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
