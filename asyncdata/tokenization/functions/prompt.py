"""Prompts for rollouts: how a row's text or chat becomes token ids. ``prompt_reader`` does it, in the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.functions.tokenizer_settings import TEMPLATE_ARGUMENTS, Name, OfTokenizer, Templates

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.encoders.text_encoder import Encoder
    from asyncdata.tokenization.pictures.settings import Processor
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles
else:
    Processor = Any  # imported where one is given


class PromptTokenizeFn(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows to prompts, as slime reads them: ``{"input": text or messages, "label": ..., "metadata": {...}}``.

    The text is that of ``apply_chat_template`` with ``add_generation_prompt=True``, and the ids are those of the
    tokenizer's ``tokenizer.json``: both are equal to the results of ``AutoTokenizer``. A sample has ``tokens``;
    ``prompt``, the rendered text or the row's string; and the row's ``label`` and ``metadata``. Tools of a row are also
    stored in ``metadata["tools"]``.

    A prompt without tokens is dropped as ``empty_prompt``, one with more than ``max_length`` tokens as ``max_length``.

    :param tokenizer: a folder with ``tokenizer.json`` (a string or a path object), or a name on the Hugging Face hub.
    :param prompt_key: the key of a row's prompt: a string, or a list of messages with ``role`` and ``content``.
    :param label_key: the key of its label, any JSON value; every row must have one. None: no labels. In this and all
        keys, ``reward_model.ground_truth`` is a key in an object, if the row has no key with the dot.
    :param metadata_key: the key of its optional metadata. None: no metadata.
    :param tool_key: the key of its optional tools: a list of JSON schemas, or that list as JSON text. None: no tools.
    :param apply_chat_template: render the prompt as a chat; a string is one user turn. Without it a prompt must be a
        string.
    :param chat_template: the text of a template, or the name of one of the tokenizer's templates. None: its default.
    :param chat_template_kwargs: variables for the template, such as ``enable_thinking``; JSON values.
    :param today: the date, such as 2026-01-31, for templates that use the current date. The date of the clock would
        give other tokens for the same row tomorrow.
    :param add_special_tokens: keep the tokens that the tokenizer adds around plain text. A chat template adds its own.
    :param max_length: the largest number of tokens of a prompt that is kept.
    :param processor: what makes pixels of pictures: a :class:`~asyncdata.Processor`, or its folder. None: a row with
        pictures is bad.
    :param revision: a branch, tag or commit on the hub.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.tokenization.prompt:PromptTokenizeFn"

    makes_prompts: ClassVar[bool] = True

    prompt_key: Name = "input"
    label_key: Name | None = None
    tool_key: Name | None = "tools"
    apply_chat_template: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    today: str | None = None
    add_special_tokens: bool = False
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    processor: Processor | str | None = None

    def __post_init__(self) -> None:
        self.check_fields("chat_template_kwargs")
        if self.processor is not None:
            self._adopt_processor()
            if not self.apply_chat_template:
                raise ConfigError("a processor of pictures needs apply_chat_template=True: the template writes marks")

        if self.apply_chat_template and self.add_special_tokens:
            raise ConfigError(
                "add_special_tokens=True is for plain text: a chat template writes its special tokens itself"
            )

        if not self.apply_chat_template and (self.chat_template or self.chat_template_kwargs or self.today):
            raise ConfigError(
                "chat_template, chat_template_kwargs and today do nothing without apply_chat_template=True"
            )

        Templates.check(self.chat_template_kwargs, self.today, TEMPLATE_ARGUMENTS)

    def check_files(self, files: TokenizerFiles) -> None:
        """Compile the templates, if they are needed."""
        self.templates(files)

    def template_digest(self, files: TokenizerFiles) -> str:
        """Digest of the templates and the special tokens that they see; ``"none"`` without a template."""
        return Templates.digest(files, self.chat_template) if self.apply_chat_template else "none"

    def settings_digest(self) -> str:
        """The folder of the processor counts by what its files say."""
        if self._adopted is None:
            return super().settings_digest()

        same = msgspec.structs.replace(self, processor=self._adopted.named(self.tokenizer, self.revision))
        return OfTokenizer.settings_digest(same)

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        from asyncdata.tokenization.functions.prompt_reader import PromptTokenizer
        from asyncdata.tokenization.row_fields import Account, RowReader

        required = {"prompt": self.prompt_key, "label": self.label_key}
        optional = {"metadata": self.metadata_key, "tools": self.tool_key}
        account = Account(ignored=self.ignore_keys)  # in a text that was rendered before, there may be all
        if self.apply_chat_template:
            account = Account.of_chats(self.ignore_keys, self.tool_key, are_trained=False)
        if self._adopted is None:
            row = RowReader(required, optional, decoded=["prompt"], account=account)
            return PromptTokenizer(self, row, *self._opened())

        from asyncdata.tokenization.functions.pictured import PicturedPrompts

        config = self._adopted.config(self.tokenizer, self.revision)
        optional = {**optional, **self._adopted.keys(config.kinds, self.ignore_keys)}
        row = RowReader(required, optional, decoded=["prompt"], account=account)
        opened = PicturedPrompts(self, row, *self._opened())
        opened.open_processor(self._adopted, config)
        return opened

    def _opened(self) -> tuple[Encoder, Templates | None, int | None]:
        """The encoder, the compiled templates, and the limit of tokens."""
        from asyncdata.tokenization.encoders.text_encoder import open_encoder

        files = self.files()
        encoder = open_encoder(files, self.tokenizer_backend, add_special_tokens=self.add_special_tokens)
        return encoder, self.templates(files), self.max_length

    def templates(self, files: TokenizerFiles) -> Templates | None:
        """The compiled templates; None if prompts are not rendered."""
        if not self.apply_chat_template:
            return None

        return Templates.compiled(files, self.chat_template, self.chat_template_kwargs, self.today)


class PromptRowFn(PromptTokenizeFn, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """As :class:`~asyncdata.RowFn`, for rows with a chat as their prompt: one that is too long is dropped.

    The settings are those of :class:`~asyncdata.PromptTokenizeFn`. A sample has no tokens; ``sample.extra`` is the row.
    Labels, tools and metadata of a row are not looked at.

    :param tools: JSON schemas of tools that all rows have, for the template.
    """

    tag: ClassVar[str] = "asyncdata:PromptRowFn"

    tools: list[dict[str, Any]] | None = None

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template."""
        from asyncdata.tokenization.functions.prompt_reader import RowsOfPrompts
        from asyncdata.tokenization.row_fields import RowReader

        row = RowReader({"prompt": self.prompt_key}, {}, decoded=["prompt"], allows_media=True)  # media stay in the row
        return RowsOfPrompts(self, row, *self._opened(), tools=self.tools)
