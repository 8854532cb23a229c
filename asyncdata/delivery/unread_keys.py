"""Keys of rows that no function reads: counted for each source, and named once in the log, with an example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.log import get_logger
from asyncdata.tokenization.account import MAX_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdata.core.messages import Unread
    from asyncdata.core.types import SourceLocation

__all__ = ("UnreadKeys",)

_COUNT_LINES_S = 0.25
_log = get_logger(__name__)


class UnreadKeys:
    """The unread keys of a source, as far as its rows were looked at.

    :param source: the name of a part of a mixture; empty for a single source.
    :ivar counts: rows that have each key; at most so many keys as are named.
    """

    def __init__(self, source: str) -> None:
        self._source = {"source": source} if source else {}
        self.counts: dict[str, int] = {}
        self._is_told = False
        self._log = _log.owned()

    def see(
        self, found: Mapping[str, Unread], location: Callable[[int], SourceLocation], *, shows_row: bool = True
    ) -> None:
        """Count the keys of a reply, whose rows lie at their ``location``; the first ones are logged."""
        for key, (number, _, _) in found.items():
            if key in self.counts or len(self.counts) < MAX_KEYS:
                self.counts[key] = self.counts.get(key, 0) + number
        told = {key: (row, text) for key, (_, row, text) in found.items() if text is not None and key in self.counts}
        if told and not self._is_told:
            self._is_told = True
            key, (row, text) = next(iter(told.items()))
            value = {"value": f"{key}: {text}"} if shows_row else {}
            place = location(row).described(_COUNT_LINES_S)
            self._log.info("rows.unread_keys", **self._source, keys=list(told), **value, example=place)
