"""The tokenize function: what a user passes for it, its description, its way to a worker, and its output.

A *description* (:class:`TokenizeFn`) is a value: it can be compared, fingerprinted, and created again from its
settings. A worker opens it as a :class:`BatchTokenizer`, which has the tokenizer and fills a :class:`ColumnWriter`. A
plain function of rows is accepted instead of a description; ``user_function.FunctionTokenizer`` runs it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import TokenizeSpec
from asyncdata.core.settings import resolve_path, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter


@runtime_checkable
class TokenizeFn(Protocol):
    """A description of how rows are tokenized: a value whose class has an import path."""

    def resolve(self) -> TokenizeFn:
        """The same description with every name resolved to a local file; runs once, in the trainer's process."""

    def fingerprints(self) -> dict[str, str]:
        """What the tokens depend on, by part: ``{"tokenizer": digest, "template": digest, "tokenize_fn": digest}``."""

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins."""

    def open(self) -> BatchTokenizer:
        """Load what is needed; runs once in the fork server, or once in each worker if memory cannot be shared."""


class BatchTokenizer(Protocol):
    """An opened tokenize function: converts raw rows to columns."""

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write each row of ``rows`` to ``out`` once: kept, dropped or failed. Kept rows must be in ascending order."""


class MediaTokenizer(BatchTokenizer, Protocol):
    """An opened tokenize function of two phases. A call of it is the plan, which reads no more than headers of media.

    The plan writes tokens, small columns, and how many values the load will give of each of its columns: the column
    ``media``, such as ``{"pixel_values": 1024}``.
    """

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write each row with the tokens of its plan and its heavy columns, or as bad."""


def describe(fn: TokenizeFn | Callable[..., Any]) -> TokenizeSpec:
    """The specification from which a worker creates ``fn`` again.

    :raises ConfigError: for a lambda, a closure, or anything defined in ``__main__``, which a worker cannot import.
    """
    is_description = isinstance(fn, TokenizeFn)  # asked once, as it is slow
    if isinstance(fn, type) and is_description:
        raise ConfigError(f"tokenize_fn is the class {fn.__name__}; pass an instance: {fn.__name__}(...)")

    owner = type(fn) if is_description else fn
    module, name = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    if module is None or name is None:
        raise ConfigError(
            f"AD420 {fn!r} has no import path. Pass a function, or an object with resolve(), fingerprints(), "
            "settings() and open(), or num_workers=0 to run it in this process."
        )

    path = f"{module}:{name}"
    if module == "__main__" or "<" in name or _imported(module, name) is not owner:
        raise ConfigError(
            f"AD420 {path!r} cannot be imported by a worker process. Move it to a module and pass it from there (or as "
            "'package.module:name'), or use num_workers=0 to run it in this process."
        )

    return TokenizeSpec(path, cast("TokenizeFn", fn).settings() if is_description else None)


def fingerprints_of(fn: TokenizeFn | Callable[..., Any]) -> dict[str, str]:
    """What the tokens of ``fn`` depend on, by part.

    A plain function is identified by its ``tag`` or import path, and its ``version``, if it has one. A hash of its
    source would miss the functions that it calls, and would change with a comment. Canaries check whether its tokens
    have changed.
    """
    if isinstance(fn, TokenizeFn):
        return fn.fingerprints()

    columns = "".join(f" {column.key}" for column in getattr(fn, "columns", None) or ())
    return {"tokenize_fn": f"{tag_of(fn)} version {getattr(fn, 'version', None)}{columns}"}


def has_fingerprint(fn: TokenizeFn | Callable[..., Any]) -> bool:
    """Whether it is known when the tokens of ``fn`` change: it is a description, or has a version."""
    return isinstance(fn, TokenizeFn) or getattr(fn, "version", None) is not None


def has_media(fn: TokenizeFn | Callable[..., Any]) -> bool:
    """Whether ``fn`` has two phases: it plans samples, and loads their media later."""
    return any(getattr(column, "phase", "") == "load" for column in getattr(fn, "columns", None) or ())


def _imported(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def open_spec(spec: TokenizeSpec) -> BatchTokenizer:
    """Load the tokenizer that ``spec`` describes; a worker calls this at its start."""
    target = resolve_path(spec.path)
    return open_tokenize_fn(target if spec.settings is None else target(**spec.settings))


def open_tokenize_fn(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    """Open ``fn`` in this process."""
    if isinstance(fn, TokenizeFn):
        return fn.open()

    from asyncdata.tokenization.user_function import FunctionTokenizer

    return FunctionTokenizer(fn)


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
