"""transformers' own tokenizer, for those that are code: they have no ``tokenizer.json`` from which ids would follow.

It costs a worker seconds and some hundred megabytes, and runs the code that comes with the tokenizer. So only the
caller can ask for it; nothing that data say does.
"""

from __future__ import annotations

import fnmatch
import os
from array import array
from collections.abc import Sequence
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import digest
from asyncdata.core.settings import needing
from asyncdata.tokenization.chat_template.calls import Fitting
from asyncdata.tokenization.encoders.fast_backends import one_by_one
from asyncdata.tokenization.encoders.hf_encoder import Located
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.tokenizer_files import TokenizerFolder, download

_PATTERNS = (
    *("*.py", "tokenizer*", "*token*.json", "config.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja"),
)
"""What a tokenizer with code of its own may read."""


def coded_folder(name: str, revision: str | None) -> TokenizerFolder:
    """The local folder of a tokenizer; a name of the hub is fetched, with the code that comes with it.

    :raises ConfigError: if there is none.
    """
    folder = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(folder):
        return TokenizerFolder(folder, None)

    folder = download(name, revision, _PATTERNS)
    return TokenizerFolder(folder, os.path.basename(folder))


def coded_digest(folder: str) -> str:
    """Digest of all files that the tokenizer may read, its code among them."""
    names = [name for name in sorted(os.listdir(folder)) if any(fnmatch.fnmatch(name, each) for each in _PATTERNS)]
    contents: list[str | bytes] = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                contents += [name, file.read()]
    return digest(*contents)


class CodedTokenizer:
    """Renders chats and encodes texts as ``AutoTokenizer`` does.

    :param variables: for the chat template.
    :raises ConfigError: if transformers is not installed, or cannot load the tokenizer.
    """

    def __init__(self, folder: str, variables: dict[str, Any]) -> None:
        with needing("trust_remote_code", "transformers"):
            from transformers import AutoTokenizer
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        except Exception as error:  # whatever the tokenizer's code raises
            raise ConfigError(f"AD413 transformers cannot load the tokenizer in {folder}: {error}") from error

        self._variables = variables
        self._fitted = Fitting(self._rendered)

    def encode(self, texts: list[str]) -> list[Located | Exception]:
        """The ids of each text, without special tokens around it, or the error that the tokenizer raised for it."""
        return one_by_one(self._ids, texts)

    def _ids(self, texts: list[str]) -> list[Located]:
        return [Located(array("i", self._tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts]

    def render(self, messages: list[dict[str, Any]], schemas: Sequence[dict[str, Any]] | None) -> str:
        """The chat as text, for a model that is to answer.

        :raises RowFault: if the template refuses the chat, or fails on it.
        """
        return self._rendered(self._fitted(messages), schemas)

    def _rendered(self, messages: list[dict[str, Any]], schemas: Sequence[dict[str, Any]] | None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=schemas, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except Exception as error:  # a template's own, or of the tokenizer's code
            raise RowFault("AD412", f"the chat template failed: {type(error).__name__}: {error}", b"") from error

        return str(text)
