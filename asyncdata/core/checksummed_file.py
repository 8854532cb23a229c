"""A payload and the proof that it is whole: ``ADSNAP1\\n | u32 header length | header (msgpack) | payload``.

What the payload means is ``snapshot``'s business.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated

import msgspec

from asyncdata.core.errors import SnapshotError
from asyncdata.core.files import open_regular, refuse_foreign
from asyncdata.core.settings import prepared

MAX_FILE_BYTES = 16 << 30
"""A larger file is refused before memory is taken for it: 200 000 samples of 8k tokens need less."""

_MANY_BYTES = 1 << 20
_MAGIC = b"ADSNAP1\n"
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = len(_MAGIC) + _LENGTH.size
_MAX_HEADER_BYTES = 1 << 24
_NO_SUM = "0" * 64
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80": "a pickle",
    b"{": "JSON text; load it with json and load_state_dict",
    b"[": "JSON text",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header, which comes before the payload.

    :ivar blake2b: checksum of the whole file with zeros in this place. It is the first field, so that no other run of
        64 zeros can come before it.
    :ivar schema: layout of the payload.
    :ivar library: version of asyncdata that wrote it.
    :ivar created: Unix time, for people; nothing depends on it.
    :ivar payload_len: bytes of the payload.
    :ivar encoding: of the payload: msgpack or json.
    :ivar files: names of other files that belong to this one; unset where there are none.
    """

    blake2b: str
    schema: int
    library: str
    created: float
    payload_len: Annotated[int, msgspec.Meta(ge=0)]
    encoding: str = "msgpack"
    files: list[str] | msgspec.UnsetType = msgspec.UNSET


def pack(
    payload: bytes | Iterable[bytes],
    encoding: str,
    *,
    schema: int,
    library: str,
    created: float | None = None,
    files: Iterable[str] = (),
) -> bytes:
    """The bytes to write before ``payload``, or before its pieces, in its file.

    :param created: Unix time; now, unless it is given. The same in all other respects, it gives the same checksum.
    """
    pieces = [payload] if isinstance(payload, bytes) else list(payload)
    header = Header(
        blake2b=_NO_SUM,
        schema=schema,
        library=library,
        created=time.time() if created is None else created,
        payload_len=sum(map(len, pieces)),
        encoding=encoding,
        files=list(files) or msgspec.UNSET,
    )
    raw = msgspec.msgpack.encode(header)
    blank = _MAGIC + _LENGTH.pack(len(raw)) + raw
    return blank.replace(_NO_SUM.encode(), _checksum(blank, *pieces).encode(), 1)


def checksum_in(head: bytes) -> str:
    """The checksum in what :func:`pack` gave."""
    return msgspec.msgpack.decode(head[_HEAD_BYTES:], type=prepared(Header)).blake2b


def _checksum(blank: bytes, *pieces: bytes | memoryview) -> str:
    state = blake2b(blank, digest_size=32)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def unpack_file(path: str, *, must_be_ours: bool = False) -> tuple[Header, memoryview]:
    """The header and the payload of the file, which is in memory of its own that may be written to.

    :param must_be_ours: refuse a link, and a file that another user may have written.
    :raises SnapshotError: if it is not whole, or no such file at all; the message is the reason alone.
    :raises OSError: if it cannot be read.
    """
    with open_regular(path, os.O_NOFOLLOW if must_be_ours else 0) as file:
        if must_be_ours:
            refuse_foreign(file.fileno(), path)
        return _unpack(file, os.fstat(file.fileno()).st_size)


def unpack(data: bytes) -> tuple[Header, memoryview]:
    """The same of the bytes of a file.

    :raises SnapshotError: as above.
    """
    return _unpack(io.BytesIO(data), len(data))


def _unpack(file: io.BufferedIOBase, size: int) -> tuple[Header, memoryview]:
    header, head, raw = _read_header(file, size)
    payload = _memory(header.payload_len)
    num_bytes = file.readinto(payload)
    if num_bytes < len(payload):
        raise SnapshotError("it was cut off while it was read")

    if _checksum(head + raw.replace(header.blake2b.encode(), _NO_SUM.encode(), 1), payload) != header.blake2b:
        raise SnapshotError("its checksum does not match: bytes were changed after it was written")

    return header, payload


def read_header(path: str) -> Header:
    """The header of the file, whose payload is not looked at.

    :raises SnapshotError: if the file has not the header of one that is whole; the message is the reason alone.
    :raises OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        return _read_header(file, os.fstat(file.fileno()).st_size)[0]


def _memory(num_bytes: int) -> memoryview:
    """Room to read into. A bytearray is filled with zeros first, which takes long; but a worker has no numpy."""
    if num_bytes < _MANY_BYTES:
        return memoryview(bytearray(num_bytes))

    import numpy as np

    return np.empty(num_bytes, np.uint8).data


def _read_header(file: io.BufferedIOBase, size: int) -> tuple[Header, bytes, bytes]:
    """The header, and all bytes up to its end: those before it, and its own."""
    head = file.read(_HEAD_BYTES)
    raw = file.read(_header_length(head, size))
    return _header(raw, size), head, raw


def _header_length(head: bytes, num_bytes: int) -> int:
    if not head:
        raise SnapshotError("it is empty (0 bytes)")

    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        kind = next((kind for magic, kind in _FOREIGN.items() if head.startswith(magic)), "some other file")
        raise SnapshotError(f"it is not a snapshot but {kind} (it starts with {head[:8]!r})")

    if num_bytes > MAX_FILE_BYTES:
        raise SnapshotError(f"it has {num_bytes} bytes, more than the {MAX_FILE_BYTES} allowed")

    _refuse_cut_off(_HEAD_BYTES, num_bytes)
    (length,) = _LENGTH.unpack_from(head, len(_MAGIC))
    if length > _MAX_HEADER_BYTES:
        raise SnapshotError(f"its header claims {length} bytes, more than any has: the file is damaged")

    _refuse_cut_off(_HEAD_BYTES + length, num_bytes)
    return int(length)


def _header(raw: bytes, num_bytes: int) -> Header:
    try:
        header = msgspec.msgpack.decode(raw, type=prepared(Header))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"its header is damaged: {error}") from error

    expected = _HEAD_BYTES + len(raw) + header.payload_len
    _refuse_cut_off(expected, num_bytes)
    if num_bytes > expected:
        raise SnapshotError(f"it has {num_bytes - expected} bytes too many: expected {expected}, got {num_bytes}")

    return header


def _refuse_cut_off(expected: int, num_bytes: int) -> None:
    if num_bytes < expected:
        raise SnapshotError(f"it is cut off: expected {expected} bytes or more, got {num_bytes}")
