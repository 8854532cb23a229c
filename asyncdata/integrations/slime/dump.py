"""Copies the tokenizer of the prompts to the folder of ``--dump-details``."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.slime.config import NO_TOKENIZER

if TYPE_CHECKING:
    from asyncdata.integrations.slime.config import SlimeSettings

__all__ = ("dump_tokenizer",)

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_MAX_BYTES = 100 << 20


def dump_tokenizer(settings: SlimeSettings) -> None:
    """Copy the tokenizer's files, which may be among a model's files, to ``tokenizer`` in that folder, if there is one.

    :raises ConfigError: if they cannot be copied.
    """
    folder, fn = settings.dump_folder, settings.tokenize_fn
    if folder is None or fn is None or fn.tokenizer == NO_TOKENIZER:
        return

    target = os.path.join(folder, "tokenizer")
    try:
        os.makedirs(target, mode=0o700, exist_ok=True)
        with os.scandir(fn.folder().folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIXES) and entry.is_file() and entry.stat().st_size <= _MAX_BYTES:
                    _copy(entry.path, os.path.join(target, entry.name))
    except OSError as error:
        raise ConfigError(f"the tokenizer cannot be copied to --dump-details {folder}: {error}") from error


def _copy(path: str, target: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "rb") as source, open(os.open(target, flags, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)
