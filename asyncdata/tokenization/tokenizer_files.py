"""The files of a tokenizer: finds them, and reads them as transformers does.

Reads the files of ``AutoTokenizer`` without importing transformers, which would delay a worker's start by seconds. The
tokens are those of ``tokenizer.json``; changes in the code of some tokenizer classes of transformers are not known
here.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import open_regular
from asyncdata.core.identity import canonical, digest
from asyncdata.core.settings import prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
LEGACY_SPECIAL, LEGACY_ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PATTERNS = (TOKENIZER, CONFIG, LEGACY_SPECIAL, LEGACY_ADDED, TEMPLATE, f"{TEMPLATE_FOLDER}/*.jinja")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

T = TypeVar("T")


class TokenizerFolder(NamedTuple):
    """The folder of a tokenizer's files; ``commit`` is the hub's, or None for a local folder."""

    folder: str
    commit: str | None


def resolve(name: str, revision: str | None = None) -> TokenizerFolder:
    """The local folder of tokenizer ``name``: a folder, or a name on the Hugging Face hub.

    Only the tokenizer's files of a hub repository are downloaded, once; they stay in the hub's cache.

    :raises ConfigError: if there is no such tokenizer, or it has no ``tokenizer.json``.
    """
    folder = os.path.abspath(os.path.expanduser(name))
    commit = None
    if os.path.isfile(folder):
        raise ConfigError(f"AD413 tokenizer {name!r} is a file; pass the folder that it lies in")

    if not os.path.isdir(folder):
        folder = download(name, revision)
        commit = os.path.basename(folder)
    if not os.path.isfile(os.path.join(folder, TOKENIZER)):
        raise ConfigError(
            f"AD413 tokenizer {name!r} has no {TOKENIZER} in {folder}; write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder), and pass that folder. For a tokenizer that is "
            "code and can write none, slime's data source has asyncdata_trust_remote_code"
        )

    return TokenizerFolder(folder, commit)


def download(name: str, revision: str | None, patterns: Sequence[str] = PATTERNS) -> str:
    """The folder in the hub's cache with the files of a repository that match ``patterns``.

    :raises ConfigError: if they cannot be downloaded.
    """
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"AD413 tokenizer {name!r}: there is no such folder, and it is not a name on the Hugging Face hub"
        )

    try:
        from huggingface_hub import snapshot_download  # costs 0.3 s, and only hub names need it

        return str(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # network, authentication, a wrong name: many types, one cause
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"AD413 tokenizer {name!r} is not a folder here, and cannot be downloaded from the Hugging Face hub{at}: "
            f"{error}; check the name, or download it before and pass the folder"
        ) from error


class _Token(msgspec.Struct, frozen=True):
    """An added token as in the files. ``normalized`` is None if they do not set it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def filled(self, *, special: bool = False) -> _Token:
        """A copy with the default of ``normalized``, made special on request."""
        normalized = not (self.special or special) if self.normalized is None else self.normalized
        return msgspec.structs.replace(self, normalized=normalized, special=self.special or special)


class _Padding(msgspec.Struct):
    pad_token: str = "[PAD]"


class _Model(msgspec.Struct):
    """``type`` is None in old files."""

    type: str | None = None
    dropout: float | None = None
    byte_fallback: bool | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Step(msgspec.Struct):
    """A normalizer or a pre-tokenizer; one of the type ``Sequence`` has steps."""

    type: str
    normalizers: list[_Step] = []
    pretokenizers: list[_Step] = []
    behavior: str = ""
    add_prefix_space: bool = True

    @property
    def keeps_text(self) -> bool:
        """Whether a pre-tokenizer splits a text without changing it, apart from writing bytes as characters."""
        if self.type == "ByteLevel":
            return not self.add_prefix_space

        return self.type == "Digits" or (self.type == "Split" and self.behavior != "Removed")


class _Head(msgspec.Struct):
    """The parts of ``tokenizer.json`` that are read; its vocabulary is skipped."""

    added_tokens: list[_Token] = []
    padding: _Padding | None = None
    truncation: dict[str, Any] | None = None
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    model: _Model = msgspec.field(default_factory=_Model)


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The parts of ``tokenizer_config.json`` that are read, except the special tokens, which may have any name."""

    added_tokens_decoder: dict[int, _Token] | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    chat_template: str | list[_NamedTemplate] | dict[str, str] | None = None
    split_special_tokens: bool = False


class TokenizerFiles:
    """The contents of a tokenizer's folder.

    :ivar special_tokens: the named special tokens, ``{"eos_token": "</s>", ...}``, as a chat template gets them.
    :ivar chat_templates: the chat templates by name; one without a name is ``"default"``.
    :raises ConfigError: if a file is missing or damaged.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._json = _read(folder, TOKENIZER) or b""
        self._head = _decode(self._json, _Head, folder, TOKENIZER)
        values = _decode(_read(folder, CONFIG) or b"{}", dict[str, Any], folder, CONFIG)
        if "added_tokens_decoder" not in values:  # written before transformers 4.34
            values |= _decode(_read(folder, LEGACY_SPECIAL) or b"{}", dict[str, Any], folder, LEGACY_SPECIAL)
        try:
            self._config = msgspec.convert(values, prepared(_Config), str_keys=True)
            self._named = self._named_tokens(values)
        except msgspec.ValidationError as error:
            raise ConfigError(f"AD413 {os.path.join(folder, CONFIG)}: {error}") from error

        self.special_tokens = {name: token.content for name, token in self._named.items()}
        self.chat_templates = self._chat_templates()

    def load(self) -> Tokenizer:
        """Load the tokenizer as ``AutoTokenizer`` does, without truncation and padding.

        :raises ConfigError: if ``tokenizer.json`` is not a tokenizer.
        """
        from tokenizers import AddedToken, Tokenizer  # not needed in a process that only describes what others load

        try:
            tokenizer = Tokenizer.from_buffer(self._json)
        except Exception as error:  # the library raises a bare Exception
            raise ConfigError(f"AD413 {os.path.join(self.folder, TOKENIZER)} is not a tokenizer: {error}") from error

        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = self._config.split_special_tokens
        tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token)) for token in self._tokens_to_add()])
        return tokenizer

    @property
    def splits_special(self) -> bool:
        """Whether special tokens in a text are tokenized as plain text."""
        return self._config.split_special_tokens

    def unfit_for_fast(self) -> str:
        """Why no fast backend can give this tokenizer's ids; empty if one may."""
        model = self._head.model
        if model.type not in (None, "BPE"):
            return f"its model is {model.type}, and only BPE is known to other libraries"

        return "its merges are drawn at random (BPE dropout)" if model.dropout else ""

    @property
    def normal_form(self) -> str | None:
        """The Unicode normal form that the normalizer makes, empty for none; None if it does more."""
        normalizer = self._head.normalizer
        steps = [] if normalizer is None else normalizer.normalizers or [normalizer]
        forms = {step.type for step in steps}
        return "".join(forms) if forms <= {"NFC"} else None

    @property
    def is_byte_level(self) -> bool:
        """Whether the tokens of a text, one after another, are its bytes after normalization."""
        model, splitter = self._head.model, self._head.pre_tokenizer
        if splitter is None or model.byte_fallback or model.continuing_subword_prefix or model.end_of_word_suffix:
            return False

        steps = splitter.pretokenizers or [splitter]
        return steps[-1].type == "ByteLevel" and all(step.keeps_text for step in steps)

    def named_token(self, name: str, given: bool | str, setting: str) -> str | None:
        """The special token that a setting names: the tokenizer's own for True, None for False.

        :param name: the tokenizer's name for it, such as ``eos_token``.
        :raises ConfigError: if the tokenizer has no such token.
        """
        if isinstance(given, str) or not given:
            return given or None

        if name not in self.special_tokens:
            raise ConfigError(
                f"AD410 {setting}=True, but the tokenizer has no {name}; pass {setting}='the token', or False"
            )

        return self.special_tokens[name]

    def special_texts(self) -> list[str]:
        """The texts of the special tokens."""
        tokens = (*(token.filled() for token in self._head.added_tokens), *self._tokens_to_add())
        return list(dict.fromkeys(token.content for token in tokens if token.special))

    def plain_json(self) -> bytes:
        """A ``tokenizer.json`` with the changes of :meth:`load`: the added tokens, and no truncation.

        :raises ConfigError: if ``tokenizer.json`` is not a tokenizer.
        """
        if not (self._head.padding or self._head.truncation or self._tokens_to_add()):
            return self._json

        return self.load().to_str().encode()

    def digest(self) -> str:
        """Digest of everything that token ids depend on; without the folder's path and its chat template."""
        added = [msgspec.to_builtins(token) for token in self._tokens_to_add()]
        return digest(self._json, canonical([added, self._config.split_special_tokens]))

    def _named_tokens(self, values: dict[str, Any]) -> dict[str, _Token]:
        """Also the tokens that a model has a name of its own for, as ``image_token``."""
        named = {name: values[name] for name in NAMED_TOKENS if name in values}
        if self._head.padding is not None:
            named.setdefault("pad_token", self._head.padding.pad_token)
        named |= {name: value for name, value in values.items() if name.endswith("_token") and name not in named}
        if isinstance(self._config.extra_special_tokens, dict):
            named |= self._config.extra_special_tokens
        return {name: _token(value) for name, value in named.items() if isinstance(value, str | dict | _Token)}

    def _tokens_to_add(self) -> list[_Token]:
        """Tokens that the configuration has and ``tokenizer.json`` lacks, in the order in which they get their ids."""
        special = set(self.special_tokens.values())
        present = {token.filled() for token in self._head.added_tokens}
        declared = [token.filled() for token in self._declared_tokens()]
        tokens = [token.filled(special=token.content in special) for token in declared if token not in present]

        known = {token.content for token in (*present, *tokens)}
        for token in (*self._named.values(), *self._extra_tokens()):
            if token.content not in known:
                known.add(token.content)
                tokens.append(token.filled(special=True))
        return tokens

    def _declared_tokens(self) -> list[_Token]:
        if (decoder := self._config.added_tokens_decoder) is not None:
            return [decoder[index] for index in sorted(decoder)]

        ids = _decode(_read(self.folder, LEGACY_ADDED) or b"{}", dict[str, int], self.folder, LEGACY_ADDED)
        present = {token.content for token in self._head.added_tokens}
        special = {token.content for token in (*self._named.values(), *self._extra_tokens())}
        return [
            _Token(text, special=text in special) for text in sorted(ids, key=ids.__getitem__) if text not in present
        ]

    def _extra_tokens(self) -> list[_Token]:
        extra = self._config.extra_special_tokens
        tokens = extra if extra and isinstance(extra, list) else self._config.additional_special_tokens
        return [_token(token) for token in tokens or ()]

    def _chat_templates(self) -> dict[str, str]:
        """Files go before the configuration: where there is one, its templates do not count."""
        templates = {}
        if (text := _read_text(self.folder, TEMPLATE)) is not None:
            templates["default"] = text
        folder = os.path.join(self.folder, TEMPLATE_FOLDER)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if name.endswith(".jinja"):
                templates[name.removesuffix(".jinja")] = _read_text(folder, name) or ""
        return templates or _templates_of(self._config.chat_template)


def _templates_of(value: str | list[_NamedTemplate] | dict[str, str] | None) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}

    return {each.name: each.template for each in value} if isinstance(value, list) else dict(value or {})


def _token(value: Any) -> _Token:
    return _Token(value) if isinstance(value, str) else msgspec.convert(value, prepared(_Token))


def _decode(data: bytes, kind: type[T], folder: str, name: str) -> T:
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        path = os.path.join(folder, name)
        if data.startswith(b"version https://git-lfs"):
            raise ConfigError(f"AD413 {path} is a pointer of git-lfs; run 'git lfs pull' in its folder") from None
        raise ConfigError(f"AD413 {path} cannot be read: {error}; fetch the file again") from error


def _read(folder: str, name: str) -> bytes | None:
    try:
        with open_regular(os.path.join(folder, name)) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"AD413 {os.path.join(folder, name)} cannot be read: {error.strerror}") from error


def _read_text(folder: str, name: str) -> str | None:
    data = _read(folder, name)
    try:
        return None if data is None else data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"AD413 {os.path.join(folder, name)} is not UTF-8: {error}") from error
