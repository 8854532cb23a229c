"""The format of a segment of the token cache, on disk and in a slot.

A segment is an Arrow IPC stream of one record batch per block, followed by data that Arrow ignores::

    schema | batch | batch | ... | end of stream | records | entries | meta | footer

A *record* has the place of one row in its file, and whether it became a sample; an *entry* has the places of a block's
batch and records; *meta* names the files. In a slot, a block is its names, its records, and the body of its batch, one
after the other; a record has the distance from itself to each of its values.

All numbers are little-endian, as Arrow's are. A segment never changes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.extras import missing_package

try:
    import xxhash
except ImportError as error:  # said here, as every way into the token cache comes by
    raise missing_package("the token cache", "xxhash", error) from error

__all__ = (
    "ENTRY",
    "FOOTER_BYTES",
    "NO_SUM",
    "RECORD_WORDS",
    "ROWS_SUFFIX",
    "SUFFIX",
    "SUFFIXES",
    "VERSION",
    "WORDS_PER_COLUMN",
    "DamagedError",
    "Entry",
    "Footer",
    "Meta",
    "Names",
    "Word",
    "block_head",
    "checksum",
    "decode_meta",
    "decode_names",
    "encode_meta",
    "names_digest",
    "pack_footer",
    "pad",
    "sealed_entries",
    "unpack_entry",
    "unpack_footer",
)

VERSION = 1
SUFFIX, ROWS_SUFFIX = ".arrow", ".rows"
"""Of segments of blocks, and of single rows."""

SUFFIXES = (SUFFIX, ROWS_SUFFIX)
NO_SUM = 0
"""Stands for the checksum of a text that is not known."""

_MAGIC = b"ADTOKEN1"
_FOOTER = struct.Struct("<8sQQIIQ16s")
FOOTER_BYTES = _FOOTER.size

ENTRY = np.dtype(
    [
        ("file", "<i4"),
        ("num_rows", "<i4"),
        ("start", "<i8"),
        ("stop", "<i8"),
        ("num_samples", "<i4"),
        ("num_blank", "<i4"),
        ("records", "<i8"),
        ("body", "<i8"),
        ("body_bytes", "<i8"),
        ("records_sum", "<u8"),
        ("body_sum", "<u8"),
        ("text_sum", "<u8"),
        ("own_sum", "<u8"),
    ]
)
_ENTRY = struct.Struct("<iiqqiiqqqQQQQ")


class DamagedError(Exception):
    """A segment is not what was written. The message says how."""


class Word:
    """The words (int32) of a record. After them, each column has two: the distance to its value, and its bytes.

    :cvar BACK: bytes from the block's first record to this one.
    :cvar OFFSET: the row's place in its file, counted from the block's start.
    :cvar LENGTH: the row's bytes there.
    :cvar VERDICT: 0: it is a sample; else -1 less the number of the reason for its drop.
    :cvar NOTES: which notes are of it, a bit each.
    """

    BACK, OFFSET, LENGTH, VERDICT, NOTES = range(5)


RECORD_WORDS = 5
WORDS_PER_COLUMN = 2


class Names(msgspec.Struct, frozen=True, array_like=True):
    """The names of the numbers in records. The first column is that of the tokens, and has no name."""

    columns: list[str]
    reasons: list[str]
    notes: list[str]

    @property
    def record_words(self) -> int:
        """Words of a record."""
        return RECORD_WORDS + WORDS_PER_COLUMN * (1 + len(self.columns))


class Meta(msgspec.Struct, frozen=True):
    """The description of a segment.

    :ivar files: digest, bytes and mtime (ns) of the files that its blocks come from, in the order of their numbers.
    :ivar created: Unix time, for people; nothing depends on it.
    :ivar entries_sum: checksum of all entries.
    """

    names: Names
    files: list[tuple[str, int, int]]
    num_rows: int
    num_samples: int
    library: str
    created: float
    version: int = VERSION
    entries_sum: int = 0


class Entry(NamedTuple):
    """Where a block of the segment is: the fields of :data:`ENTRY`."""

    file: int
    num_rows: int
    start: int
    stop: int
    num_samples: int
    num_blank: int
    records: int
    body: int
    body_bytes: int
    records_sum: int
    body_sum: int
    text_sum: int
    own_sum: int


class Footer(NamedTuple):
    """The last bytes of a segment.

    :ivar digest: of meta and of the rest of the footer.
    """

    entries: int
    meta: int
    meta_bytes: int
    num_entries: int
    num_bytes: int


encode_meta = msgspec.msgpack.Encoder().encode
decode_meta = msgspec.msgpack.Decoder(Meta).decode
_encode_names = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=256)
def decode_names(data: bytes) -> Names:
    """The names that stand before the records of a block in a slot."""
    return msgspec.msgpack.decode(data, type=Names)


def checksum(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """xxh3-64 (Yann Collet): it finds damage, at the speed of memory, but not attacks."""
    return xxhash.xxh3_64_intdigest(data, seed)


def pad(num_bytes: int) -> int:
    """The next multiple of eight."""
    return -(-num_bytes // 8) * 8


def block_head(names: Names) -> bytes:
    """What stands before the records of a block in a slot: names, their length (int32), and which columns (int32)."""
    data = _encode_names(names)
    room = bytes(pad(len(data)) - len(data))
    return room + data + struct.pack("<ii", len(data), names_digest(names))


def names_digest(names: Names) -> int:
    """Records of equal columns have equal ones: 31 bits."""
    return xxhash.xxh32_intdigest(_encode_names(names.columns)) >> 1


def sealed_entries(entries: np.ndarray[Any, Any]) -> bytes:
    """The entries, each with the checksum of what it says, if it has a field for that."""
    if "own_sum" not in (entries.dtype.names or ()):
        return entries.tobytes()

    data = bytearray(entries.tobytes())
    view, size = memoryview(data), entries.dtype.itemsize
    for end in range(size, len(data) + 1, size):
        struct.pack_into("<Q", data, end - 8, checksum(view[end - size : end - 8]))
    return bytes(data)


def unpack_entry(data: bytes) -> Entry:
    """One entry.

    :raises DamagedError: if it is not what was written.
    """
    if len(data) != ENTRY.itemsize:
        raise DamagedError("an entry is cut off")

    entry = Entry._make(_ENTRY.unpack(data))
    if entry.own_sum != checksum(data[:-8]):
        raise DamagedError("an entry's checksum does not match")

    return entry


def pack_footer(footer: Footer, meta: bytes) -> bytes:
    """The footer as it is in the file, after ``meta``."""
    head = _FOOTER.pack(_MAGIC, *footer, b"")[:-16]
    return head + blake2b(head + meta, digest_size=16).digest()


def unpack_footer(data: bytes, num_bytes: int) -> tuple[Footer, bytes]:
    """The footer of a file of ``num_bytes`` bytes, and the digest of meta and footer.

    :raises DamagedError: if it is none.
    """
    if len(data) != FOOTER_BYTES or not data.startswith(_MAGIC):
        raise DamagedError("it does not end as a segment does")

    _, *fields, digest = _FOOTER.unpack(data)
    footer = Footer(*fields)
    if footer.num_bytes != num_bytes or footer.meta + footer.meta_bytes + FOOTER_BYTES != num_bytes:
        raise DamagedError(f"it has {num_bytes} bytes and says {footer.num_bytes}")

    return footer, digest


def check_meta(footer: bytes, meta: bytes, digest: bytes) -> None:
    """Compare footer and meta with their digest.

    :raises DamagedError: if they are not what was written.
    """
    if blake2b(footer[:-16] + meta, digest_size=16).digest() != digest:
        raise DamagedError("its checksum does not match")
