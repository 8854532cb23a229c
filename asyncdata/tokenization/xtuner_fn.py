"""Runs what is written for XTuner: an object with ``__call__(item) -> dict`` and ``hash() -> str``, unchanged."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.errors import ConfigError
from asyncdata.fingerprint import canonical, digest
from asyncdata.import_path import resolve_path
from asyncdata.tokenization.base import FunctionTokenizer
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import NOT_TRAINED, encode_spans, trained_runs

if TYPE_CHECKING:
    from asyncdata.tokenization.base import BatchTokenizer, ColumnWriter

__all__ = ("XTunerTokenizeFn",)

Buffer = bytes | memoryview

_COUNTS = ("num_tokens", "proxy_attn_flops")  # what follows from the tokens


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
                "XTunerTokenizeFn('package.module:name', {...}), or use num_workers=0"
            )

        return msgspec.structs.asdict(self)

    def open(self) -> BatchTokenizer:
        """Make the object."""
        made = self._make()
        if hasattr(made, "set_state"):
            made.set_state("runtime")
        return _XTunerTokenizer(made)

    def _make(self) -> Any:
        found = resolve_path(self.build) if isinstance(self.build, str) else self.build
        made = found if _is_tokenize_fn(found) else found(**self.arguments)
        if not _is_tokenize_fn(made):
            raise ConfigError(
                f"AD420 {self.build!r} makes a {type(made).__name__}, which lacks __call__ or hash(); "
                "name what makes an object of XTuner's protocol"
            )

        return made


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


class _XTunerTokenizer(FunctionTokenizer):
    """An :class:`XTunerTokenizeFn`, opened."""

    def _write(self, row: int, result: Any, raw: Buffer, out: ColumnWriter) -> None:
        if isinstance(result, Mapping) and result.get("num_tokens") == 0:
            out.drop(row, "num_tokens_0")
            return

        try:
            tokens, columns = _unpack(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            out.fail(row, RowFault("AD425", f"XTuner's tokenize function returned what is no sample: {error}", raw))
            return

        out.keep(row, tokens, **columns)


def _unpack(result: Any) -> tuple[array[int], dict[str, bytes]]:
    if not isinstance(result, Mapping) or "input_ids" not in result:
        raise TypeError("need a dict with 'input_ids'")

    extra = {name: value for name, value in result.items() if name not in _COUNTS}
    ids = _list(extra.pop("input_ids"))
    labels = _list(extra.pop("labels", ids))
    if len(labels) != len(ids):
        raise ValueError(f"{len(labels)} labels for {len(ids)} tokens")

    wrong = [at for at, (label, id) in enumerate(zip(labels, ids, strict=True)) if label not in (id, NOT_TRAINED)]
    if wrong:
        raise ValueError(f"labels[{wrong[0]}] is {labels[wrong[0]]}; need the token itself, or {NOT_TRAINED}")

    tokens = array("i", ids)
    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)} is negative")

    columns = {"spans": encode_spans(trained_runs(labels))}
    if extra:
        columns["extra"] = json.dumps(extra).encode("ascii")
    return tokens, columns


def _list(values: Any) -> list[int]:
    return list(values.tolist() if hasattr(values, "tolist") else values)
