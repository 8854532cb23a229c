"""Frames between the trainer's process and a worker: the length and the number of the request, then the message."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.messages import Tokenized, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import Column, Data, Reply

HEADER = struct.Struct("<IQ")  # body length in bytes, request id

_FIXARRAY, _BIN32, _MAP32 = 0x90, b"\xc6", b"\xdf"
_PACKED = frozenset({"tokens", "token_ends"})
_LARGE, _ALIGNMENT = 1 << 16, 16
_PADDING: tuple[bytes, ...] = (encode(""), bytes([_FIXARRAY | 2]))
_encoder = msgspec.msgpack.Encoder()


def frame(request_id: int, message: msgspec.Struct | None) -> bytearray:
    """``message`` with its header, ready to be sent."""
    data = bytearray(HEADER.size)
    _encoder.encode_into(message, data, HEADER.size)
    HEADER.pack_into(data, 0, len(data) - HEADER.size, request_id)
    return data


def pieces(request_id: int, reply: Reply) -> Sequence[Data | bytearray]:
    """The frame of ``reply``, in pieces: the samples of a request are sent from where they lie."""
    if not isinstance(reply, Tokenized):
        return [frame(request_id, reply)]

    body: list[Data] = [bytes([_FIXARRAY | 1 + len(reply.__struct_fields__)]), encode(Tokenized.__name__)]
    for name, value in msgspec.structs.asdict(reply).items():
        if name == "columns":
            body += _columns_of(value, sum(map(len, body)))
        else:
            body += _binary(value) if name in _PACKED else [encode(value)]
    return [HEADER.pack(sum(map(len, body)), request_id), *body]


def _binary(data: Data) -> list[Data]:
    return [_BIN32 + len(data).to_bytes(4), data]


def _columns_of(columns: dict[str, Column], offset: int) -> list[Data]:
    """The columns, from this offset of the body on.

    Large ones are aligned by a column without a name before them, so that their reader needs no copy.
    """
    found: list[Data] = []
    num_columns, offset = len(columns), offset + 5
    for name, column in columns.items():
        head = encode(name) + bytes([_FIXARRAY | 2])
        if len(column.data) >= _LARGE:
            num_columns += 1
            filler = [*_PADDING, *_binary(bytes(-(offset + 12 + len(head) + 5) % _ALIGNMENT)), *_binary(b"")]
            found += filler
            offset += sum(map(len, filler))
        entry = [head, *_binary(column.data), *_binary(column.ends)]
        found += entry
        offset += sum(map(len, entry))
    return [_MAP32 + num_columns.to_bytes(4), *found]
