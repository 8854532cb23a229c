"""Rows that are passed through as they are, for frameworks that tokenize them."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import TYPE_CHECKING, Any, ClassVar, Self

from asyncdata.core.identity import digest
from asyncdata.core.settings import Description
from asyncdata.tokenization.rows import RowFault, decode_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter


class RowFn(Description, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each row becomes a sample without tokens: ``sample.extra`` is the row, a dict.

    For frameworks that tokenize prompts themselves, such as TRL and verl. Workers check that a row is one JSON
    object; the trainer's process decodes it when it is used.
    """

    tag: ClassVar[str] = "asyncdata:RowFn"

    def resolve(self) -> Self:
        """The same description."""
        return self

    def fingerprints(self) -> dict[str, str]:
        """What samples depend on: nothing but the row."""
        return {"tokenize_fn": digest(self.tag)}

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments: none."""
        return {}

    def open(self) -> BatchTokenizer:
        """Nothing has to be loaded."""
        return _keep_rows


def _keep_rows(rows: Sequence[Buffer], out: ColumnWriter) -> None:
    for number, raw in enumerate(rows):
        try:
            decode_object(raw)
        except RowFault as fault:
            out.fail(number, fault)
        else:
            out.keep(number, (), extra=bytes(raw).removeprefix(BOM_UTF8))
