"""Runs what is written for XTuner: an object with ``__call__(item) -> dict`` and ``hash() -> str``, unchanged."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError
from asyncdata.core.import_path import resolve_path
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.tokenization.user_results import read_xtuner_result

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer

__all__ = ("XTunerTokenizeFn", "is_of_xtuner")


class XTunerTokenizeFn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows to samples by an object of XTuner's protocol: ``input_ids`` become tokens, ``labels`` become labels.

    The object is made once in every worker, and runs in its ``runtime`` state, as what is counted in ``cache`` follows
    from the tokens here. A result with ``num_tokens`` 0 is dropped as ``num_tokens_0``, XTuner's mark for a row that is
    filtered; what else a result has goes to ``extra``.

    Its fingerprint is the object's own ``hash()`` with ``build`` and ``arguments``: XTuner's own functions leave
    ``max_length`` out of their hash. One whose hash changes by itself, as where a template has today's date in it,
    is refused on another day unless ``allow_changed`` names ``tokenize_fn``.

    :param build: what makes the object: an import path ``pkg.mod:name``, or a class or function that has one. A
        tokenizer that the object needs is loaded there. With ``num_workers=0`` also the object itself, of which the
        settings are not known; then canaries have to find out what its hash does not tell.
    :param arguments: what ``build`` is called with, by keyword; JSON values.
    :raises ConfigError: for arguments that are no JSON values, or what has no import path.
    """

    build: Any
    arguments: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.build, str) and not _is_tokenize_fn(self.build):
            msgspec.structs.force_setattr(self, "build", _import_path(self.build))
        try:
            copy = msgspec.json.decode(canonical(self.arguments))
        except (TypeError, ValueError):
            copy = None
        if copy != self.arguments:
            raise ConfigError(f"arguments must be JSON values, got {self.arguments}")

        msgspec.structs.force_setattr(self, "arguments", copy)

    def resolve(self) -> XTunerTokenizeFn:
        """The same, once it is known that the object can be made.

        :raises ConfigError: if it has not what XTuner's protocol asks for.
        """
        self._make()
        return self

    def fingerprints(self) -> dict[str, str]:
        """The object's hash, with how it is made."""
        name = self.build if isinstance(self.build, str) else _path(type(self.build))
        return {"tokenize_fn": f"{name} {digest(canonical([self.arguments, str(self._make().hash())]))}"}

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins.

        :raises ConfigError: if it has the object itself, which no worker can be sent.
        """
        if not isinstance(self.build, str):
            raise ConfigError(
                f"AD420 a worker process cannot be sent a {type(self.build).__name__}; name what makes it, as "
                "XTunerTokenizeFn('package.module:name', {...}), or the variable of a module that holds it, as "
                "tokenize_fn='package.module:name', or use num_workers=0"
            )

        return msgspec.structs.asdict(self)

    def open(self) -> BatchTokenizer:
        """Make the object."""
        made = self._make()
        if hasattr(made, "set_state"):
            made.set_state("runtime")
        return FunctionTokenizer(made, read_xtuner_result)

    def _make(self) -> Any:
        found = resolve_path(self.build) if isinstance(self.build, str) else self.build
        made = found if _is_tokenize_fn(found) else self._made_by(found)
        if not _is_tokenize_fn(made):
            raise ConfigError(
                f"AD420 {self.build!r} makes a {type(made).__name__}, which lacks __call__ or hash(); "
                "name what makes an object of XTuner's protocol"
            )

        return made

    def _made_by(self, build: Any) -> Any:
        try:
            inspect.signature(build).bind(**self.arguments)
        except TypeError as error:
            raise ConfigError(
                f"AD420 {self.build!r} cannot be called with the arguments {self.arguments}: {error}; pass "
                f"tokenize_fn=XTunerTokenizeFn({self.build!r}, {{...}}) with those that it needs"
            ) from None
        except ValueError:  # some of Python's own do not tell
            pass

        return build(**self.arguments)


def is_of_xtuner(value: Any) -> bool:
    """Whether ``value`` is an object of XTuner's protocol, or a class of such objects."""
    if isinstance(value, type):
        return callable(getattr(value, "hash", None)) and any("__call__" in vars(each) for each in value.__mro__)

    return _is_tokenize_fn(value)


def _is_tokenize_fn(value: Any) -> bool:
    return not isinstance(value, type) and callable(value) and callable(getattr(value, "hash", None))


def _path(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', None)}"


def _import_path(build: Any) -> str:
    path = _path(build)
    if not hasattr(build, "__qualname__") or "<" in path or path.startswith("__main__:"):
        raise ConfigError(
            f"AD420 {build!r} has no import path; pass a class or function of a module, and the arguments beside it"
        )

    return path
