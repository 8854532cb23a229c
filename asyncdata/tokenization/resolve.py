"""Resolves what a user passes as ``tokenize_fn``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.imports import resolve_path
from asyncdata.tokenization.base import TokenizeFn

if TYPE_CHECKING:
    from collections.abc import Callable


def resolved(tokenize_fn: TokenizeFn | Callable[..., Any] | str) -> TokenizeFn | Callable[..., Any]:
    """The function or the description, with every name in it resolved to a local file.

    An object of XTuner's protocol, or a class of such objects, is described by an :class:`XTunerTokenizeFn`.

    :param tokenize_fn: a description, a function of a row, such an object, or the import path of one of these.
    :raises ConfigError: if it does not exist, or cannot be created.
    """
    found: TokenizeFn | Callable[..., Any] = named(tokenize_fn)
    if isinstance(found, type) and isinstance(found, TokenizeFn):
        raise ConfigError(f"tokenize_fn is the class {found.__name__}; pass an instance: {found.__name__}(...)")

    if not callable(found) and not isinstance(found, TokenizeFn):
        raise ConfigError(
            "tokenize_fn is a function of a row, a description such as PromptTokenizeFn(...), or an import path; got "
            f"{type(found).__name__}"
        )

    if isinstance(found, TokenizeFn):
        return found.resolve()

    from asyncdata.tokenization.user_function import declared_of
    from asyncdata.tokenization.xtuner_function import XTunerTokenizeFn, is_of_xtuner

    if not is_of_xtuner(found):
        declared_of(found)  # refuses what are no columns
        return found

    return XTunerTokenizeFn(tokenize_fn if isinstance(tokenize_fn, str) else found).resolve()


def named(tokenize_fn: TokenizeFn | Callable[..., Any] | str) -> Any:
    """What an import path names; anything else as it is.

    :raises ConfigError: if it cannot be imported, or is only a tokenizer, a folder with one, or its name.
    """
    told = _tokenizer_in(tokenize_fn)
    if not told:
        return resolve_path(tokenize_fn) if isinstance(tokenize_fn, str) else tokenize_fn

    raise ConfigError(
        f"AD420 {told} is a tokenizer, which alone makes no sample of a row: pass ChatTokenizeFn({told}) for chats, "
        f"PromptTokenizeFn({told}) for prompts, or TextTokenizeFn({told}) for texts"
    )


def _tokenizer_in(given: Any) -> str:
    """The folder or the name of a tokenizer, as Python writes it; an empty string for anything else."""
    if isinstance(given, str):
        is_name = ":" not in given and given.count("/") == 1 and not given.startswith(("/", "."))
        return repr(given) if is_name or os.path.isfile(os.path.join(given, "tokenizer.json")) else ""

    found = None if isinstance(given, type) else getattr(given, "name_or_path", None)
    return repr(found) if isinstance(found, str) and hasattr(given, "convert_tokens_to_ids") else ""
