"""What the token cache asks of workers, and what it is told, besides what :mod:`asyncdata.core.messages` has."""

from __future__ import annotations

import msgspec

__all__ = (
    "CacheJob",
    "CachedBlock",
    "CachedFile",
    "CachedRows",
    "ListTokens",
    "Refused",
    "SegmentListing",
    "Stored",
    "TokensListed",
)

_NO_SLOT = -1


class CachedFile(msgspec.Struct, frozen=True, array_like=True):
    """A source's file as the token cache knows it. Without a digest, workers find out that of its content.

    :ivar mtime_ns: while it is the same, so is the text; else the text of a block is compared.
    """

    digest: str
    num_bytes: int
    mtime_ns: int


class CacheJob(msgspec.Struct, frozen=True):
    """The token cache.

    :ivar folder: where its segments are.
    :ivar files: the job's, in the same order.
    :ivar has_rows: whether rows are asked for one by one, from blocks of any size.
    :ivar max_bytes: limit for all caches in the parent folder; None: no limit.
    :ivar since_ns: when this run began, by the clock of the file system: it may use segments that were used since.
    """

    folder: str
    files: list[CachedFile]
    max_bytes: int | None = None
    since_ns: int = 0
    has_rows: bool = False


class CachedBlock(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of a scan is at ``entry`` of a segment of the token cache.

    :ivar is_sure: whether the file is known to be the same; else the block's text is read too, and compared.
    """

    block: int
    segment: str
    entry: int
    is_sure: bool


class CachedRows(msgspec.Struct, frozen=True, array_like=True):
    """Where rows of a request are in the token cache: arrays of shape (num_rows,).

    :ivar owners: the number of each row's segment in ``segments``, int32; -1 if it is in none.
    :ivar entries: the place of its block there, int64; ``offsets`` (int32) that of the row in the block.
    """

    segments: list[str]
    owners: bytes
    entries: bytes
    offsets: bytes


class ListTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which segments does the token cache have, and what is in those of ``names``, from an entry on?

    Without ``names``: what is in the first ``num`` of them?
    """

    names: dict[str, int] | None
    num: int = 0
    slot: int = _NO_SLOT
    part: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of a scan was tokenized, though it is in the token cache.

    ``kind``: ``gone`` (the segment was evicted), ``damaged``, ``other_text`` (the file has changed there), or
    ``other_block`` (it is cut otherwise there).
    """

    block: int
    kind: str
    reason: str


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a scan that were appended to the token cache.

    :ivar blocks: their numbers in the scan, int32; ``entries`` (int64) where each is in ``segment``.
    :ivar stop: where the next entry of that segment will be.
    :ivar num_bytes: bytes of the segment by now.
    :ivar write_s: seconds that it took.
    :ivar num_evicted_bytes: bytes of segments that were removed to make room; ``is_full``: there was too little.
    :ivar fault: why a block could not be written; empty if all could.
    """

    segment: str = ""
    blocks: bytes = b""
    entries: bytes = b""
    stop: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    write_s: float = 0.0
    num_evicted_bytes: int = 0
    is_full: bool = False
    fault: str = ""


class SegmentListing(msgspec.Struct, frozen=True, array_like=True):
    """What a segment of the token cache has of the job's files.

    ``entries`` (int64) are places in the segment, ``file_ids`` (int32), ``starts`` and ``stops`` (int64) which blocks
    are there, ``are_sure`` (bool) whether their file is known to be the same.
    """

    name: str
    num_bytes: int
    stop: int
    entries: bytes
    file_ids: bytes
    starts: bytes
    stops: bytes
    are_sure: bytes


class TokensListed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The segments of the token cache, and where the next entry of each will be; ``faults`` (name -> why) are those
    that cannot be read.
    """

    names: dict[str, int]
    segments: list[SegmentListing]
    faults: dict[str, str] = {}
