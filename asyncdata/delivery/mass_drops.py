"""Rows that are dropped in mass: a file, or a whole source, of which more than one row in twenty yields no sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.errors import get_logger
from asyncdata.core.messages import ON_PURPOSE, is_mass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.core.types import SourceLocation
    from asyncdata.delivery.bad_rows import Rows
    from asyncdata.delivery.chunk import Chunk

    Numbers = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]

_MAX_NAMED = 20
"""Files that are named for one reason. What further ones drop counts for the whole source."""
_MAX_FILES = 1 << 16
"""Files that are counted one by one. It takes 8 bytes for each, and as many for each reason."""
_MAX_REASONS = 30
"""A tokenize function may make up a reason for each row: those after the first ones are counted together."""
_OTHER = "other reasons"
_COUNT_LINES_S = 0.25
"""Longest time for which counting the lines of a file may delay the samples, once a file and reason."""

_log = get_logger(__name__)


def rows_by_reason(chunk: Chunk) -> dict[str, Any]:
    """The rows of a chunk that yield no sample, by reason."""
    found: dict[str, Any] = {drop.reason: drop.rows for drop in chunk.drops}
    for error in chunk.errors:
        found.setdefault(f"bad row {error.code}", []).append(error.row)
    return found


class _Reason:
    """Rows that are dropped for one reason.

    :ivar of_files: how many of each file; ``named``: files that were named in the log.
    :ivar share_told: the share of the whole source that was told in the log; 0 if none was.
    """

    def __init__(self, num_files: int) -> None:
        self.num_dropped = 0
        self.of_files: Numbers = np.zeros(num_files, np.int64)
        self.named: list[int] = []
        self.share_told = 0.0

    @property
    def num_unnamed(self) -> int:
        """The rows of files that were not named."""
        return self.num_dropped - int(self.of_files[self.named].sum())


class MassDrops:
    """Counts what a source drops, by file and reason. Each is logged once; the whole source if no file explains it.

    It counts the rows that were read ahead since :meth:`restart`, those of a request at once.

    :param source: the name of a part of a mixture; empty for a single source.
    :param num_files: files of the source.
    """

    def __init__(self, source: str, num_files: int) -> None:
        self._source, self._num_files = {"source": source} if source else {}, num_files
        self._num_rows = 0
        self._of_files: Numbers = np.zeros(min(num_files, _MAX_FILES) if num_files > 1 else 0, np.int64)
        self._reasons: dict[str, _Reason] = {}
        self._log = _log.owned()

    def restart(self) -> None:
        """Rows come again, so they are counted anew. What was logged is not logged again."""
        self._num_rows = 0
        self._of_files.fill(0)
        for found in self._reasons.values():
            found.num_dropped = 0
            found.of_files.fill(0)

    def see(self, rows: Rows, drops: Mapping[str, Any], ours: Bools | None = None) -> None:
        """Count rows.

        :param drops: the rows that yield no sample, by reason.
        :param ours: whether this rank has each row; None: it has all.
        """
        self._num_rows += rows.num_rows if ours is None else int(ours.sum())
        ids = rows.file_ids() if len(self._of_files) else None
        if ids is not None:
            _add(self._of_files, ids if ours is None else ids[ours])
        others = []
        for reason, dropped in drops.items():
            if not len(dropped) or reason in ON_PURPOSE:
                continue

            if reason in self._reasons or len(self._reasons) < _MAX_REASONS:
                self._count(reason, np.asarray(dropped, np.int64), ids, rows)
            else:
                others.append(dropped)
        if others:
            self._count(_OTHER, np.concatenate(others).astype(np.int64), ids, rows)

    def _count(self, reason: str, dropped: Numbers, ids: Numbers | None, rows: Rows) -> None:
        found = self._reasons.setdefault(reason, _Reason(len(self._of_files)))
        found.num_dropped += len(dropped)
        if ids is not None:
            its_files = ids[dropped]
            for file in self._to_name(found, _add(found.of_files, its_files)):
                found.named.append(file)
                place = rows.row_location(int(dropped[np.argmax(its_files == file)]))
                self._tell(reason, int(found.of_files[file]), int(self._of_files[file]), place, path=place.path)
        number = found.num_unnamed
        if not found.share_told and is_mass(number, self._num_rows):
            found.share_told = number / self._num_rows
            place = rows.row_location(int(dropped[0]))
            path = {"path": place.path} if self._num_files == 1 else {}
            self._tell(reason, number, self._num_rows, place, **path)

    def _to_name(self, found: _Reason, files: Numbers) -> list[int]:
        """Those of the files of which too many rows are dropped: if the source was told of, twice its share."""
        dropped, rows = found.of_files[files], self._of_files[files]
        is_wanted = is_mass(dropped, rows) & (dropped >= 2 * found.share_told * rows)
        wanted = [file for file in files[is_wanted].tolist() if file not in found.named]
        return wanted[: _MAX_NAMED - len(found.named)]

    def _tell(self, reason: str, num_dropped: int, num_rows: int, place: SourceLocation, **path: str) -> None:
        counts = {"num_dropped": num_dropped, "num_rows": num_rows}
        self._log.warning(
            "rows.dropped", **self._source, **path, reason=reason, **counts, example=place.described(_COUNT_LINES_S)
        )


def _add(counts: Numbers, files: Numbers) -> Numbers:
    """Count the files, those that have a place; return them, each once."""
    found, numbers = np.unique(files[files < len(counts)], return_counts=True)
    counts[found] += numbers
    return found
