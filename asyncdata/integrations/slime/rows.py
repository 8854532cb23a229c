"""Reads slime's rows in workers, as slime's own ``Dataset`` reads them."""

from __future__ import annotations

import json
import re
from array import array
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.slime import miles_chats
from asyncdata.sources.row_json import python_value
from asyncdata.tokenization.encoders.text_encoder import Encoder, open_encoder
from asyncdata.tokenization.encoders.transformers_tokenizer import CodedTokenizer, coded_digest, coded_folder
from asyncdata.tokenization.functions.text import Draft, Drafting, RowTokenizer
from asyncdata.tokenization.functions.tokenizer_settings import TEMPLATE_ARGUMENTS, Name, OfTokenizer, Templates
from asyncdata.tokenization.row_fields import Account, RowReader, Tools
from asyncdata.tokenization.rows import Buffer, RowFault, decode_value
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, TokenizerFolder, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.columns import Column
    from asyncdata.integrations.slime.samples import Process
    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.hf_encoder import Located


# slime's kinds of media. Each placeholder in a text stands for the next item of its kind.
_PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}

# Begins bytes and maps of Parquet columns; see row_json.python_value.
_MARK = b'{"\\u0000'

# How large the inputs are is known once they are made; a megabyte, in items of 8 bytes, is reserved until then.
_PLANNED = b'{"multimodal_inputs": 131072}'

# Arguments that slime passes to the template itself, so that a second one would be an error.
_GIVEN = TEMPLATE_ARGUMENTS - {"chat_template"} | {"add_generation_prompt"}


class SlimeTokenizeFn(OfTokenizer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows to slime's prompts, as ``slime.utils.data.Dataset`` makes them of the same rows with the same settings.

    A sample has ``prompt``: the rendered text if ``apply_chat_template`` is set, otherwise the row's own value: a
    string, a list of messages, or null; ``label`` and ``metadata`` as in the row, with the row's tools in
    ``metadata["tools"]``; and ``tokens``, which are empty unless ``pretokenize`` is set, as slime's rollout tokenizes
    prompts itself. The row's images, videos and audio are in ``extra["multimodal"]``, ``{"images": [...], "videos":
    [...], "audios": [...]}``, with the row's values in the order of the chat.

    A rendered or plain prompt of more than ``max_length`` tokens is dropped as ``max_length``. Prompts other than text
    have no length, as with slime; an image counts as its placeholder text.

    Rows on which slime's start fails are bad rows here. A few rows that slime accepts are read differently:

    - A row without ``prompt_key`` is bad, as a mistyped key would make an empty epoch. In slime its prompt is None;
      here, such a row has null.
    - In a row that has none of its ``multimodal_keys``, a text stays one part. slime makes one part per character,
      which templates render to the same text.
    - A chat is a list of messages, which have a role if a template is applied; media are lists, also a single item.
    - Tools may be null: then there are none.

    :param tokenizer: a folder with ``tokenizer.json``, or a name on the Hugging Face hub. Nothing of it is read unless
        a template is applied, and no token is made without ``max_length`` or ``pretokenize``.
    :param prompt_key: key of a row's prompt (slime: ``--input-key``).
    :param label_key: key of its label; every row must have one. None: no labels.
    :param metadata_key: key of its metadata, which it may lack. None: no metadata.
    :param tool_key: key of its tools, which it may lack: a list, or that list as JSON text. None: no tools.
    :param multimodal_keys: keys of its lists of media, by kind: ``{"image": "images"}``; kinds are ``image``, ``video``
        and ``audio``. A string then becomes a user turn, and each ``<image>`` in a text stands for the next image.
    :param apply_chat_template: render the prompt as a chat; a string is one user turn.
    :param apply_chat_template_kwargs: variables for the template, and ``chat_template`` for another one. Without
        ``apply_chat_template`` they have no effect, as with slime.
    :param today: the date that a template gets when it asks for today's, such as 2026-01-31.
    :param max_length: the longest prompt that is kept, in tokens (slime: ``--rollout-max-prompt-len``).
    :param pretokenize: store the tokens of a prompt that is text without media: slime's rollout uses them.
    :param revision: the hub's branch, tag or commit.
    :param trust_remote_code: render and encode by transformers' ``AutoTokenizer``, with the code that comes with the
        tokenizer, for tokenizers that have no ``tokenizer.json``. Each worker imports transformers then.
    :param shows_media: also collect media in messages if no template is applied.
    :param tool_form: read and render as miles does, with this form of tools (``miles_chats``). miles wraps media that
        are objects in a part of their kind; slime takes such a dict for a part.
    :param processing: what makes ``multimodal_inputs`` in a worker (``media.to_worker``), shortly before the sample is
        delivered; None: nothing does. It is in no fingerprint.
    :raises ConfigError: for a setting that cannot work.
    """

    tag: ClassVar[str] = "asyncdata.integrations.slime_rows:SlimeTokenizeFn"

    prompt_key: Name = "input"
    label_key: Name | None = None
    tool_key: Name | None = "tools"
    multimodal_keys: dict[str, Name] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = {}
    today: str | None = None
    max_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    pretokenize: bool = False
    trust_remote_code: bool = False
    shows_media: bool = False
    tool_form: dict[str, Any] | None = None
    processing: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.check_fields("multimodal_keys", "apply_chat_template_kwargs", "tool_form")
        if self.today is not None:
            Templates.date(self.today)
            if self.trust_remote_code:
                raise ConfigError("today cannot be told to a template that transformers renders (trust_remote_code)")

        if unknown := sorted(set(self.multimodal_keys or ()) - set(_PLACEHOLDERS)):
            raise ConfigError(f"multimodal_keys has {', '.join(unknown)}; slime's kinds are {', '.join(_PLACEHOLDERS)}")

        if taken := sorted(_GIVEN & set(self.apply_chat_template_kwargs)):
            raise ConfigError(
                "apply_chat_template_kwargs are the template's variables, or another chat_template; it cannot be given "
                f"{', '.join(taken)}"
            )

        if not isinstance(self._chosen_template, str | None):
            raise ConfigError(f"chat_template is a template's text or name, got {self._chosen_template!r}")

    @property
    def _chosen_template(self) -> Any:
        return self.apply_chat_template_kwargs.get("chat_template")

    @property
    def _makes_tokens(self) -> bool:
        return self.pretokenize or self.max_length is not None

    @property
    def columns(self) -> tuple[Column, ...]:
        """The column of the inputs."""
        if self.processing is None:
            return ()

        from asyncdata.integrations.slime.samples import INPUTS  # imports numpy, which a worker needs for nothing else

        return (INPUTS,)

    def settings_digest(self) -> str:
        return OfTokenizer.settings_digest(msgspec.structs.replace(self, processing=None))

    def resolve(self) -> SlimeTokenizeFn:
        """The same with the tokenizer's local folder, and the hub's commit as its revision, if a tokenizer is needed.

        :raises ConfigError: if there is no such tokenizer, or it cannot render chats although it must.
        """
        if not (self._makes_tokens or self.apply_chat_template):
            return self

        folder, commit = self.folder()
        if self.apply_chat_template and not self.trust_remote_code:
            self._templates(TokenizerFiles(folder))
        return msgspec.structs.replace(self, tokenizer=folder, revision=commit or self.revision)

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the parts on which samples depend; ``"none"`` for parts on which they do not."""
        prints = {"tokenizer": "none", "template": "none", "tokenize_fn": self.settings_digest()}
        if self.trust_remote_code:
            of_files = coded_digest(self.folder().folder)
            is_used = {"tokenizer": self._makes_tokens, "template": self.apply_chat_template}
            return prints | {name: of_files for name, used in is_used.items() if used}

        if self._makes_tokens:
            prints["tokenizer"] = self.files().digest()
        if self.apply_chat_template:
            prints["template"] = Templates.digest(self.files(), self._chosen_template)
        return prints

    def open(self) -> BatchTokenizer:
        """Load the tokenizer and compile the template, if they are needed."""
        makes_tokens, renders = self._makes_tokens, self.apply_chat_template
        if self.trust_remote_code and (makes_tokens or renders):
            coded = CodedTokenizer(self.folder().folder, self.apply_chat_template_kwargs)
            return _SlimeRows(self, coded if makes_tokens else None, coded if renders else None)

        encoder = open_encoder(self.files(), self.tokenizer_backend) if makes_tokens else None
        return _SlimeRows(self, encoder, self._templates(self.files()) if renders else None)

    def folder(self) -> TokenizerFolder:
        """The local folder of the tokenizer, which has a ``tokenizer.json`` unless its own code is trusted.

        :raises ConfigError: if there is no such tokenizer.
        """
        return (coded_folder if self.trust_remote_code else resolve)(self.tokenizer, self.revision)

    def _templates(self, files: TokenizerFiles) -> Templates:
        variables = {name: value for name, value in self.apply_chat_template_kwargs.items() if name != "chat_template"}
        return Templates.compiled(files, self._chosen_template, variables, self.today)


class _SlimeRows(RowTokenizer):
    """The opened function: reads the sample's columns and the text to tokenize, and drops prompts that are too long."""

    def __init__(
        self,
        fn: SlimeTokenizeFn,
        encoder: Encoder | CodedTokenizer | None,
        templates: Templates | CodedTokenizer | None,
    ) -> None:
        self._media = fn.multimodal_keys or {}
        required = {"prompt": fn.prompt_key, "label": fn.label_key}
        optional = {"metadata": fn.metadata_key, "tools": fn.tool_key, **self._media}
        account = Account(ignored=fn.ignore_keys)  # slime passes over all other keys
        super().__init__(fn, RowReader(required, optional, allows_media=True, account=account), encoder)
        self._templates = templates
        self._tool_form = fn.tool_form
        self._makes_tokens = encoder is not None
        self._is_chat = fn.apply_chat_template or fn.multimodal_keys is not None
        self._shows_media = fn.shows_media
        self._max_length = fn.max_length
        self._keeps_tokens = fn.pretokenize
        self._processing = fn.processing
        self._opened: Process | None = None

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        tokens = found[0].ids if found else array("i")
        if self._max_length is not None and len(tokens) > self._max_length:
            out.drop(row, "max_length")
        else:
            # The rollout puts an image's own tokens in the place of its placeholder, but only into an empty list.
            has_media = "extra" in drafting.columns
            columns = dict(drafting.columns)
            if has_media and self._processing is not None:
                columns["media"] = _PLANNED
            out.keep(row, tokens if self._keeps_tokens and not has_media else (), **columns)

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write the inputs made of each row's media. Such a row has no tokens."""
        from asyncdata.integrations.slime.samples import INPUTS, packed_inputs

        for row, raw in enumerate(rows):
            out.progress(row)
            try:
                columns = self.read(self._row(raw), raw).columns
                media = python_value(decode_value(columns["extra"], raw))["multimodal"]
                out.keep(row, (), **{INPUTS.key: packed_inputs(self._process, media)})
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, raw))

    def _process(self) -> Process:
        from asyncdata.integrations.slime.samples import opened_in_worker

        if self._opened is None:
            assert self._processing is not None
            self._opened = opened_in_worker(self._processing)
        return self._opened

    def read(self, columns: dict[str, Any], raw: Buffer) -> Drafting:
        media = {kind: columns.pop(kind) for kind in self._media if kind in columns}
        tools = self._row.tools(columns.pop("tools", None), raw)
        if metadata := self._row.metadata(self._metadata(columns.pop("metadata", None), tools, raw), tools, raw):
            columns["metadata"] = metadata
        if self._is_chat:
            prompt, shown = self._chat(decode_value(columns["prompt"], raw), media, tools, raw)
            columns["prompt"] = _to_json(prompt)
            if shown:
                columns["extra"] = _to_json({"multimodal": shown})
        else:
            prompt = decode_value(columns["prompt"], raw) if self._makes_tokens or self._shows_media else None
            if self._shows_media and isinstance(prompt, list) and (shown := _shown_in(prompt)):
                columns["extra"] = _to_json({"multimodal": shown})
        if not (self._makes_tokens and isinstance(prompt, str)):
            return Drafting([], columns)

        return Drafting([Draft(self._row.encodable("prompt", prompt, raw), [])], columns)

    def _metadata(self, text: Buffer | None, tools: Tools | None, raw: Buffer) -> Buffer | None:
        """The metadata, unless they are the bytes or the map of a Parquet column, and empty.

        :raises RowFault: if they are, and not empty, and the row has tools, which belong in an object.
        """
        if text is None or not bytes(text).startswith(_MARK):
            return text

        value = python_value(decode_value(text, raw))
        if value and tools is not None:
            shown = value if isinstance(value, list) else ""
            raise self._row.wrong_type("metadata", "an object, as the row has tools", shown, raw)

        return text if value else None

    def _chat(
        self, prompt: Any, media: dict[str, Buffer], tools: Tools | None, raw: Buffer
    ) -> tuple[Any, dict[str, list[Any]]]:
        """slime's prompt for the row, and the media in it."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._templates is not None:
            messages = self._row.messages("prompt", messages, raw)
            if not messages:
                raise self._row.wrong_type("prompt", "a string or a list of messages that is not empty", messages, raw)

        shown = _Shown(self._items(media, raw), wraps_objects=self._tool_form is not None)
        if self._media:
            self._put_in(messages, shown, raw)
        elif isinstance(messages, list):
            shown.look(messages)
        if self._templates is None:
            return messages, shown.by_kind()

        return self._rendered(self._templates, messages, tools, raw), shown.by_kind()

    def _rendered(
        self, templates: Templates | CodedTokenizer, messages: list[Any], tools: Tools | None, raw: Buffer
    ) -> str:
        if self._tool_form is None:
            return templates.render(python_value(messages), python_value(self._row.schemas(tools, raw)))

        schemas = None if tools is None else python_value(tools.schemas)
        try:
            return miles_chats.render(templates, python_value(messages), schemas, self._tool_form)
        except miles_chats.UnfitError as error:
            name, need, value = error.args
            raise self._row.wrong_type(name, need, value, raw) from None

    def _items(self, media: dict[str, Buffer], raw: Buffer) -> dict[str, list[Any]]:
        """The row's media by kind; null means none."""
        items = {kind: decode_value(text, raw) for kind, text in media.items()}
        for kind, value in items.items():
            if not isinstance(value, list | None):
                raise self._row.wrong_type(kind, f"a list of {kind}s", value, raw)

        return {kind: value for kind, value in items.items() if value is not None}

    def _put_in(self, messages: Any, shown: _Shown, raw: Buffer) -> None:
        """Replace texts by lists of parts, in place, with the media at their placeholders."""
        if not isinstance(messages, list):
            raise self._row.wrong_type("prompt", "a string or a list of messages", messages, raw)

        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise self._row.wrong_type(f"prompt[{number}]", "an object with 'content'", message, raw)

            content = message.get("content")
            if isinstance(content, str):
                message["content"] = shown.split(content)
            elif isinstance(content, list):
                shown.look([message])
            else:
                name = f"prompt[{number}]['content']"
                raise self._row.wrong_type(name, "a string or a list of parts", content, raw)

        for kind, num_wanted, num_given in shown.mismatches():
            reason = f"{self._row.name('prompt')} has {num_wanted} {_PLACEHOLDERS[kind]}, and {self._row.name(kind)}"
            raise RowFault("AD114", f"{reason} has {num_given}; there must be one item for each placeholder", raw)


def _shown_in(messages: list[Any]) -> dict[str, list[Any]]:
    shown = _Shown({}, wraps_objects=False)
    shown.look(messages)
    return shown.by_kind()


class _Shown:
    """The media of one row, in the order of its chat.

    :param items: the items for the placeholders, by kind. Placeholders of other kinds are text.
    :param wraps_objects: whether an item that is an object is wrapped in a part, or is itself a part.
    """

    def __init__(self, items: dict[str, list[Any]], *, wraps_objects: bool) -> None:
        self._items = items
        self._wraps_objects = wraps_objects
        self._kinds = {_PLACEHOLDERS[kind]: kind for kind in items}
        self._pattern = re.compile(f"({'|'.join(map(re.escape, self._kinds))})") if items else None
        self._num_wanted = dict.fromkeys(items, 0)
        self._shown: dict[str, list[Any]] = {kind: [] for kind in _PLACEHOLDERS}

    def split(self, text: str) -> list[Any]:
        """The parts of a text."""
        segments = [text] if self._pattern is None else self._pattern.split(text)
        return [self._part(segment) for segment in segments if segment]

    def _part(self, segment: str) -> Any:
        kind = self._kinds.get(segment)
        if kind is None:
            return {"type": "text", "text": segment}

        number = self._num_wanted[kind]
        self._num_wanted[kind] += 1
        if number >= len(self._items[kind]):
            return None  # a mismatch, which makes the row bad

        item = self._items[kind][number]
        self._shown[kind].append(item)
        is_part = isinstance(python_value(item), dict) and not self._wraps_objects
        return item if is_part else {"type": kind, kind: item}

    def look(self, messages: list[Any]) -> None:
        """Collect the media that the messages contain already."""
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in _PLACEHOLDERS:
                    self._shown[kind].append(part)

    def mismatches(self) -> list[tuple[str, int, int]]:
        """Kinds with another number of placeholders than items: the kind, and both numbers."""
        counts = [(kind, wanted, len(self._items[kind])) for kind, wanted in self._num_wanted.items()]
        return [count for count in counts if count[1] != count[2]]

    def by_kind(self) -> dict[str, list[Any]]:
        """The media found, under ``images``, ``videos`` and ``audios``."""
        return {f"{kind}s": items for kind, items in self._shown.items() if items}


def _to_json(value: Any) -> bytes:
    """JSON text in which NaN and lone surrogates are kept, as a row may have them."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode("ascii")
