"""The tokenize functions of a mixture's parts, as one description: each is loaded once, even if many parts have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import TokenizeSpec
from asyncdata.core.settings import prepared
from asyncdata.tokenization.base import BatchTokenizer, describe, fingerprints_of, open_spec, open_tokenize_fn, resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter


class PartFunctions:
    """A tokenize function for each part; see :class:`~asyncdata.tokenization.base.TokenizeFn`.

    :param functions: of each part: a function or a description; in a worker, a dict of a ``TokenizeSpec``.
    :param numbers: of each part, which of ``functions`` it has; None: each has its own.
    """

    def __init__(self, functions: Sequence[Any], numbers: Sequence[int] | None = None) -> None:
        self.functions = list(functions) if numbers is None else [functions[number] for number in numbers]

    def resolve(self) -> PartFunctions:
        found = {number: resolved(function) for number, function in self._distinct().items()}
        return PartFunctions([found[id(function)] for function in self.functions])

    def _distinct(self) -> dict[int, Any]:
        return {id(function): function for function in self.functions}

    def fingerprints(self) -> dict[str, str]:
        """Nothing: each part has fingerprints of its own."""
        return {}

    def fingerprints_of(self, part: int) -> dict[str, str]:
        """The fingerprints of a part's function."""
        return fingerprints_of(self.functions[part])

    def settings(self) -> dict[str, Any]:
        distinct = self._distinct()
        numbers = {key: number for number, key in enumerate(distinct)}
        return {
            "functions": [msgspec.to_builtins(describe(function)) for function in distinct.values()],
            "numbers": [numbers[id(function)] for function in self.functions],
        }

    def open(self) -> PartTokenizers:
        opened: dict[bytes | int, BatchTokenizer] = {}
        found: dict[int, BatchTokenizer] = {}
        for number, function in self._distinct().items():
            spec = msgspec.convert(function, prepared(TokenizeSpec)) if isinstance(function, dict) else None
            key = number if spec is None else msgspec.msgpack.encode(function, order="deterministic")
            if key not in opened:
                opened[key] = open_tokenize_fn(function) if spec is None else open_spec(spec)
            found[number] = opened[key]
        return PartTokenizers([found[id(function)] for function in self.functions])


class PartTokenizers:
    """The opened functions of all parts."""

    def __init__(self, tokenizers: list[BatchTokenizer]) -> None:
        self._tokenizers = tokenizers

    def of(self, part: int) -> BatchTokenizer:
        """The opened function of a part."""
        return self._tokenizers[part]

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Refused: which part a row is of is not known here."""
        raise ConfigError("rows of a mixture are tokenized by the function of their part")
