"""What the token cache asks of workers and is told, beside what crosses in any case (``wire``)."""

from __future__ import annotations

import msgspec

__all__ = (
    "CacheJob",
    "CachedBlock",
    "CachedFile",
    "CachedPlaces",
    "EvictTokens",
    "Evicted",
    "ListTokens",
    "Refused",
    "RowsPlan",
    "RowsRefused",
    "SegmentListing",
    "StorePlan",
    "StoreTokens",
    "Stored",
    "TokensListed",
)

_NO_SLOT = -1


class CachedFile(msgspec.Struct, frozen=True, array_like=True):
    """A source's file as the token cache knows it. Without a digest, workers find out that of its content.

    :ivar mtime_ns: while it is the same, so is the text; else the text of a block is looked at.
    """

    digest: str
    num_bytes: int
    mtime_ns: int


class CacheJob(msgspec.Struct, frozen=True):
    """The token cache.

    :ivar folder: where its segments are.
    :ivar files: the job's, in the same order.
    :ivar room_bytes: of a slot, for each block, beside those for its text.
    :ivar has_rows: whether its segments have single rows, for orders of rows, in place of blocks.
    """

    folder: str
    files: list[CachedFile]
    room_bytes: int
    has_rows: bool = False


class CachedBlock(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of a scan is entry number ``entry`` of a segment of the token cache.

    :ivar is_sure: whether the file is known to be the same; else the block's text is read too, and compared.
    """

    block: int
    segment: str
    entry: int
    is_sure: bool


class CachedPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a request for tokens that are in segments of rows.

    ``rows`` are numbers in the request, ``owners`` numbers of ``segments``, ``entries`` numbers of entries there; all
    int32 of shape (num_cached,). ``are_sure`` (bool) says whether a row's file is known to be the same; else the row's
    text is read too, and compared: the request's ``overflow`` has its place, or ``texts`` (int32) its start in the
    request's slot.
    """

    segments: list[str]
    rows: bytes
    owners: bytes
    entries: bytes
    are_sure: bytes
    texts: bytes = b""


class ListTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which segments does the token cache have? With ``names``, what is in those; else also in the first ``num``."""

    names: list[str] | None
    num: int = 0
    slot: int = _NO_SLOT


class StoreTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Append a piece to a segment of the token cache; with ``is_last``, its index as well.

    ``file`` is the segment while it is unfinished, and ``offset`` where it ends; the schema comes before the first
    piece, number 0. ``plan`` is a file with a :class:`StorePlan`: a request must be small.
    """

    file: str
    offset: int
    piece: int
    is_last: bool
    plan: str
    slot: int = _NO_SLOT


class StorePlan(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a piece, and where their rows are.

    ``columns``, ``reasons`` and ``notes`` are the same for all pieces of a segment. ``file_ids`` (int32), ``starts``
    and ``stops`` (int64) are the blocks, ``counts`` (int32) their rows, ``blanks`` (int32) their blank lines, ``sums``
    (uint64) what their text was. ``places``, ``offsets`` and ``lengths``, int32 of shape (num_rows,), say of each row
    which one it is of those of ``spills``, end to end, where it begins in its block, and its bytes. ``ends`` (int32)
    has where the rows of each spill stop.
    """

    columns: list[str]
    reasons: list[str]
    notes: list[str]
    file_ids: bytes
    starts: bytes
    stops: bytes
    counts: bytes
    blanks: bytes
    sums: bytes
    places: bytes
    offsets: bytes
    lengths: bytes
    spills: list[str]
    ends: bytes


class RowsPlan(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a segment of rows.

    ``columns``, ``reasons`` and ``notes`` are the names in all ``spills``. ``ends`` (int32) has where the rows of each
    spill stop. ``file_ids`` (int32), ``numbers`` (int64; counted in the file) and ``are_kept`` (bool; whether to store
    it) are of each row.
    """

    columns: list[str]
    reasons: list[str]
    notes: list[str]
    spills: list[str]
    ends: bytes
    file_ids: bytes
    numbers: bytes
    are_kept: bytes


class EvictTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make room for ``num_bytes`` more in the folder of all token caches, by removing what was not used for longest.

    Of the cache itself, the segments stay that the file ``keep`` names, in msgpack. Nothing is removed if that does not
    do.
    """

    num_bytes: int
    max_bytes: int
    keep: str
    slot: int = _NO_SLOT


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """Block number ``block`` of a scan was read from its file, though it is in the token cache.

    ``kind``: ``gone`` (the segment was evicted), ``damaged``, ``other_text`` (the file has changed there),
    ``other_block`` (it is cut otherwise there), or ``no_room`` (the samples are too large for the slot).
    """

    block: int
    kind: str
    reason: str


class RowsRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A row of a request could not be read from the token cache: nothing was answered.

    ``kind``: ``gone`` (the segment was evicted), ``damaged``, or ``other_text``: the texts of ``rows`` of the request,
    int32, are others now.
    """

    segment: str
    kind: str
    reason: str
    rows: bytes = b""


class SegmentListing(msgspec.Struct, frozen=True, array_like=True):
    """What a segment of the token cache has of the job's files.

    ``entries`` (int32) are numbers of its entries, ``file_ids`` (int32) and ``starts`` (int64) which blocks they are
    (or which rows: ``starts`` are numbers in the file then), ``are_sure`` (bool) whether their file is known to be the
    same.
    """

    name: str
    num_bytes: int
    entries: bytes
    file_ids: bytes
    starts: bytes
    are_sure: bytes


class TokensListed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The segments of the token cache; ``faults`` (name -> why) are those that cannot be read."""

    names: list[str]
    segments: list[SegmentListing]
    faults: dict[str, str] = {}


class Stored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The segment ends at ``end``. ``entries`` (int32) has which of the request's blocks are in it, in their order."""

    end: int
    entries: bytes
    num_rows: int


class Evicted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """There is room now, or ``is_full``; ``names`` are what was removed of the cache itself."""

    is_full: bool
    names: list[str]
    num_bytes: int
