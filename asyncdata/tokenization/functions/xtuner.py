"""Runs tokenize functions of XTuner unchanged: objects with ``__call__(item) -> dict`` and ``hash() -> str``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError
from asyncdata.core.import_path import resolve_path
from asyncdata.core.settings import Settings
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.tokenization.user_results import read_xtuner_result

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer

__all__ = ("XTunerTokenizeFn", "is_of_xtuner")


class XTunerTokenizeFn(Settings, frozen=True, forbid_unknown_fields=True):
    """Rows to samples by an object of XTuner's protocol: ``input_ids`` become tokens, ``labels`` become labels.

    Every worker creates the object once. It runs in its ``runtime`` state; its ``cache`` state is not used, as this
    package counts the tokens itself. A result with ``num_tokens`` 0 is dropped as ``num_tokens_0``: this is how XTuner
    marks a filtered row. All other keys of a result are stored in ``extra``.

    The fingerprint is the object's own ``hash()`` with ``build`` and ``arguments``, as the hashes of XTuner's own
    functions do not include ``max_length``. If the hash changes by itself, for example because a template contains
    today's date, a state is refused on another day unless ``allow_changed`` names ``tokenize_fn``.

    :param build: creates the object: an import path ``pkg.mod:name``, or a class or function that has one. It also
        loads the tokenizer that the object needs. With ``num_workers=0`` this may be the object itself. Its settings
        are not known then, so only canaries detect changes that its hash does not show.
    :param arguments: the keyword arguments of ``build``; JSON values.
    :raises ConfigError: for arguments that are not JSON values, or a ``build`` without an import path.
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
        """Check that the object can be created, and return self.

        :raises ConfigError: if the object does not follow XTuner's protocol.
        """
        self._make()
        return self

    def fingerprints(self) -> dict[str, str]:
        """The object's hash, with ``build`` and ``arguments``."""
        name = self.build if isinstance(self.build, str) else _path(type(self.build))
        return {"tokenize_fn": f"{name} {digest(canonical([self.arguments, str(self._make().hash())]))}"}

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins.

        :raises ConfigError: if ``build`` is the object itself, which cannot be sent to a worker.
        """
        if not isinstance(self.build, str):
            raise ConfigError(
                f"AD420 a worker process cannot be sent a {type(self.build).__name__}; name what makes it, as "
                "XTunerTokenizeFn('package.module:name', {...}), or the variable of a module that holds it, as "
                "tokenize_fn='package.module:name', or use num_workers=0"
            )

        return msgspec.structs.asdict(self)

    def open(self) -> BatchTokenizer:
        """Create the object."""
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
        except ValueError:  # some built-in callables have no signature
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
