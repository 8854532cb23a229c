"""What crosses between the trainer's process and a pool's processes besides requests and replies."""

from __future__ import annotations

import os
import struct

import msgspec

from asyncdata.core.messages import Failed, Short

PROGRESS = struct.Struct("<Qi")  # the id of the request that is being worked on (0: none), and its row (-1: all)
PROGRESS_BYTES = 64  # one cache line each, so that workers do not disturb one another
_COUNTS_AT = 16
STATUS_SHORT = os.EX_TEMPFAIL
"""Exit status of a process of the pool that ran out of a system resource: no row is to blame."""


def read_counts_at(number: int) -> int:
    """Where the page has the counts of requests to stores, of all workers that had this number: by their progress."""
    return number * PROGRESS_BYTES + _COUNTS_AT


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

decode_answer = msgspec.msgpack.Decoder(Answer).decode
