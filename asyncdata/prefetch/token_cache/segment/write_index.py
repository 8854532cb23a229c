"""Writes the end of a segment: entries, meta and footer."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.version import __version__
from asyncdata.prefetch.token_cache.segment.layout import (
    FOOTER_BYTES,
    DamagedError,
    Footer,
    Meta,
    checksum,
    encode_meta,
    pack_footer,
    sealed_entries,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.cache_messages import CacheJob
    from asyncdata.prefetch.token_cache.segment.layout import Names

__all__ = ("Origins", "write_at", "write_index")


class Origins(NamedTuple):
    """What the files of the data are known by.

    :ivar digest_of: returns the digest of the content of a file of the job; empty if it cannot be read.
    """

    cache: CacheJob
    digest_of: Callable[[int], str]

    def file(self, file_id: int) -> tuple[str, int, int]:
        """Digest, bytes and mtime of a file.

        :raises DamagedError: if its content cannot be identified.
        """
        digest, file = self.digest_of(file_id), self.cache.files[file_id]
        if not digest:
            raise DamagedError("a file of the data is not what it was")

        return digest, file.num_bytes, file.mtime_ns


def write_at(fd: int, data: Any, offset: int) -> int:
    """Write all of ``data``; return the offset after it."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        offset += written
        left = left[written:]
    return offset


def write_index(
    fd: int, end: int, entries: np.ndarray[Any, Any], names: Names, counts: tuple[int, int], origins: Origins
) -> int:
    """Write what follows the rows of a segment, from offset ``end`` on; return the size of the file.

    :param entries: they have the job's numbers of files; the segment has its own.
    :param counts: rows and samples of the segment.
    """
    ids = np.unique(entries["file"])
    files = [origins.file(file_id) for file_id in ids.tolist()]
    entries["file"] = np.searchsorted(ids, entries["file"])
    sealed = sealed_entries(entries)
    meta = encode_meta(
        Meta(
            names=names,
            files=files,
            num_rows=counts[0],
            num_samples=counts[1],
            library=__version__,
            created=time.time(),
            entries_sum=checksum(sealed),
        )
    )
    meta_at = write_at(fd, sealed, end)
    footer_at = write_at(fd, meta, meta_at)
    footer = Footer(end, meta_at, len(meta), len(entries), footer_at + FOOTER_BYTES)
    return write_at(fd, pack_footer(footer, meta), footer_at)
