"""What the trainer's process and the template of its workers say to one another."""

from __future__ import annotations

import struct

import msgspec

from asyncdata.wire import HEADER, Failed

__all__ = (
    "COMMAND",
    "FORK",
    "NUM_FDS",
    "REAP",
    "Answer",
    "Born",
    "NotBorn",
    "Opened",
    "Reaped",
    "decode_answer",
    "framed",
)

COMMAND = struct.Struct("<Bi")  # FORK and the number of a worker, or REAP and the pid of one that has ended
FORK, REAP = 1, 2
NUM_FDS = 2
"""With a FORK come two descriptors: the worker's end of its socket, and what it writes its output to."""


class Opened(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tokenize function is open. ``reason`` says why a fork could not share it; empty: it can.

    With a reason, the template itself becomes the worker of the first FORK.
    """

    reason: str


class Born(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker was forked."""

    pid: int


class NotBorn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The system has no room for one more."""

    errno: int


class Reaped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How a worker ended: its exit status, or a signal as a negative number; None if that is not known."""

    status: int | None


Answer = Opened | Born | NotBorn | Reaped | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(answer: Answer) -> bytes:
    """``answer`` with its header, ready to be sent."""
    body = _encode(answer)
    return HEADER.pack(len(body), 0) + body
