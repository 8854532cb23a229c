"""Requests and replies between processes that share no memory: rows travel as bytes, in place of a reference to a slot.

A request to tokenize takes the text of its rows along. A scan without samples brings the text of its blocks back, and
it is put into the slot. A scan with samples takes and brings no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import NO_SLOT, OfPart, Scan, Scanned, Tokenize

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Reply, Request

__all__ = ("Sent", "inner", "in_slot", "takes_samples", "to_send")


class Sent(NamedTuple):
    """A request, and the text that it is about."""

    request: Request
    text: bytes


def inner(request: Request) -> Request:
    """The request without its part of a mixture."""
    return request.request if isinstance(request, OfPart) else request


def takes_samples(request: Request) -> bool:
    """Whether it is a scan that asks for samples."""
    found = inner(request)
    return isinstance(found, Scan) and found.with_samples


def to_send(request: Request, memory: Callable[[int], memoryview]) -> Sent:
    """The request as an actor can answer it.

    :param memory: the bytes of a slot.
    """
    if isinstance(request, OfPart):
        found = to_send(request.request, lambda slot: memory(request.slot))
        return Sent(OfPart(request.part, found.request), found.text)  # type: ignore[arg-type]

    if isinstance(request, Scan):
        return Sent(msgspec.structs.replace(request, slot=0, base=0), b"")

    if isinstance(request, Tokenize) and request.slot != NO_SLOT:
        starts, lengths = np.frombuffer(request.starts, np.int32).copy(), np.frombuffer(request.lengths, np.int32)
        rows = np.flatnonzero((starts >= 0) & (lengths > 0))
        slot = memory(request.slot)
        pieces = [slot[s : s + n] for s, n in zip(starts[rows].tolist(), lengths[rows].tolist(), strict=True)]
        starts[starts >= 0] = 0  # an empty row, too, must lie in the text
        starts[rows] = np.cumsum(lengths[rows]) - lengths[rows]
        return Sent(msgspec.structs.replace(request, slot=0, starts=starts.tobytes()), b"".join(pieces))

    return Sent(request, b"")


def text_of(request: Request, reply: Reply, memory: memoryview) -> memoryview:
    """What a reply takes along of an actor's memory: the text of a scan that asked for no samples."""
    if not isinstance(reply, Scanned) or takes_samples(request):
        return memoryview(b"")

    starts, lengths = np.frombuffer(reply.starts, np.int32), np.frombuffer(reply.lengths, np.int32)
    is_here = starts >= 0
    return memory[: int((starts + lengths)[is_here].max(initial=0))]


def in_slot(request: Request, reply: Reply, text: memoryview, memory: Callable[[int], memoryview]) -> Reply:
    """The reply as it would be of a worker that shares the slot.

    :param text: what came along; it is put into the slot.
    """
    found = inner(request)
    if not isinstance(reply, Scanned) or not isinstance(found, Scan):
        return reply

    starts = np.frombuffer(reply.starts, np.int32)
    if found.with_samples:  # their text is not here
        starts = np.full(len(starts), -1, np.int32)
    else:
        memory(request.slot)[found.base : found.base + len(text)] = text
        starts = np.where(starts >= 0, starts + np.int32(found.base), starts).astype(np.int32)
    return msgspec.structs.replace(reply, starts=starts.tobytes())
