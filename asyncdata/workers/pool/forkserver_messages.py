"""What the trainer's process and the template of its workers say to one another."""

from __future__ import annotations

import struct

import msgspec

from asyncdata.core.framing import HEADER
from asyncdata.core.messages import Failed, Short

__all__ = (
    "COMMAND",
    "FORK",
    "MAX_FDS",
    "REAP",
    "SHARE",
    "Answer",
    "Born",
    "Loaded",
    "NotBorn",
    "Reaped",
    "decode_answer",
    "framed",
)

COMMAND = struct.Struct("<Bi")
SHARE, FORK, REAP = 1, 2, 3
"""What to do:

- SHARE, once: with it come the descriptors of the shared memory, and behind it the frame of the job. No answer.
- FORK, with the number of a worker: with it come the worker's end of its socket, and what it writes its output to.
- REAP, with the pid of a worker that has ended.
"""
MAX_FDS = 16


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a description: the tokenize function is open.

    ``reason`` says why a fork could not share it; empty: it can. With a reason, the template itself becomes the worker
    of the first FORK.
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


Answer = Loaded | Born | NotBorn | Reaped | Failed | Short

_encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(answer: Answer) -> bytes:
    """``answer`` with its header, ready to be sent."""
    body = _encode(answer)
    return HEADER.pack(len(body), 0) + body
