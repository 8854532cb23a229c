"""The messages between the trainer's process and the fork server of its workers."""

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
    "ForkedWorker",
    "Loaded",
    "NotForked",
    "Reaped",
    "decode_answer",
    "framed",
)

COMMAND = struct.Struct("<Bi")
SHARE, FORK, REAP = 1, 2, 3
"""The commands:

- SHARE, sent once: carries the descriptors of the shared memory; the frame of the job follows. It has no answer.
- FORK, with the number of a worker: carries the worker's end of its socket, and the descriptor of its output pipe.
- REAP, with the pid of a worker that has ended.
"""
MAX_FDS = 16


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a description: the tokenize function is open.

    ``reason`` says why forked workers cannot share it; empty if they can. With a reason, the fork server itself becomes
    the worker of the first FORK.
    """

    reason: str


class ForkedWorker(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker was forked."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The system has no room for one more process."""

    errno: int


class Reaped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How a worker ended: its exit status, or a signal as a negative number; None if that is not known."""

    status: int | None


Answer = Loaded | ForkedWorker | NotForked | Reaped | Failed | Short

_encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(answer: Answer) -> bytes:
    """``answer`` with its header, ready to send."""
    body = _encode(answer)
    return HEADER.pack(len(body), 0) + body
