"""What runs on a node: an actor without state, which answers requests one at a time; requests without shared memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import (
    NO_SLOT,
    Failed,
    Index,
    Ready,
    Scan,
    Scanned,
    Short,
    Tokenize,
    decode_request,
    encode,
)
from asyncdata.tokenization.base import open_spec
from asyncdata.workers.base import takes_samples
from asyncdata.workers.ray.node_proof import NodeFiles, Terms, check_function
from asyncdata.workers.request_handler import Handler, not_opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job, Reply, Request

_PROVEN_AT_START = 64
"""Files that are compared before the first request; of more, the others are when they are first read."""


class Began(msgspec.Struct, frozen=True, array_like=True):
    """How an actor has started.

    :ivar ready: that it has; else why it has not.
    :ivar faults: files that its node sees otherwise: part, number and reason.
    """

    ready: Ready | Failed | Short
    faults: list[tuple[int, int, str]] = []


class RemoteWorker:
    """See the module. The class is made an actor by ``cluster.new_actors``."""

    def __init__(self, terms: bytes) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._terms = msgspec.msgpack.decode(terms, type=Terms)
        self._handler: Handler | None = None
        self._files: list[NodeFiles] = []
        self._slots = [memoryview(b"")]  # one, for the current request
        self._progress = (0, -1)
        self._number = 0

    def begin(self) -> bytes:
        """Prove that this node has what is needed, and open the tokenize function; a :class:`Began`, encoded."""
        return encode(self._begin())

    def _begin(self) -> Began:
        try:
            check_function(self._terms)
        except ConfigError as error:
            return Began(Failed("ConfigError", str(error)))
        except BaseException as error:  # also SystemExit: whatever a user's module does at import
            return Began(not_opened(error))

        job, faults = self._proven(), []
        for part, files in enumerate(self._files):
            faults += [(part, *fault) for fault in files.prove(range(_PROVEN_AT_START))]
        try:
            assert job.tokenize is not None
            tokenizer = open_spec(job.tokenize)
        except BaseException as error:
            return Began(not_opened(error))

        self._handler = Handler(job, self._slots, tokenizer, self._note)
        return Began(Ready(os.getpid()), faults)

    def _proven(self) -> Job:
        """The job with the files as this node sees them."""
        job = self._terms.job
        jobs = job.parts or [job]
        self._files = [NodeFiles(one.files, self._terms.trainer) for one in jobs]
        seen = [msgspec.structs.replace(one, files=files.files) for one, files in zip(jobs, self._files, strict=True)]
        return msgspec.structs.replace(job, parts=seen) if job.parts else seen[0]

    def _note(self, row: int) -> None:
        self._progress = (self._number, row)

    def progress(self) -> tuple[int, int]:
        """The number of the current request (0: none), and its row."""
        return self._progress

    def answer(self, number: int, request: bytes, text: bytes) -> tuple[Any, Any]:
        """The reply, and text that belongs into the slot: uint8 each, so that Ray copies neither.

        :param text: of the rows that the request has.
        """
        self._number = number
        self._note(-1)
        asked: Request = decode_request(request)
        self._slots[0] = self._memory_for(asked, text)
        reply = self._reply(asked)
        along = text_of(asked, reply, self._slots[0])
        self._progress = (0, -1)
        return np.frombuffer(encode(reply), np.uint8), np.frombuffer(along, np.uint8)

    def reopen(self) -> str:
        """Open the tokenize function again; returns why that failed, and then the first one stays in use."""
        assert self._handler is not None and self._terms.job.tokenize is not None, "begin() comes first"
        try:
            self._handler.use(open_spec(self._terms.job.tokenize))
        except BaseException as error:  # also SystemExit
            return repr(error)

        return ""

    def _memory_for(self, asked: Request, text: bytes) -> memoryview:
        if not isinstance(asked, Scan):
            return memoryview(text)

        job = self._terms.job
        return memoryview(bytearray(len(asked.blocks) * (job.parts[asked.part] if job.parts else job).stride))

    def _reply(self, asked: Request) -> Reply:
        assert self._handler is not None, "begin() comes first"
        faults = self._unproven(asked)
        return Failed("SourceError", faults[0][1]) if faults else self._handler(asked)

    def _unproven(self, asked: Request) -> list[tuple[int, str]]:
        """The files of a request that are compared only now, and differ."""
        if isinstance(asked, Scan | Index):
            numbers = {block.file_id for block in asked.blocks}
        else:
            numbers = {place.file_id for place in asked.overflow} if isinstance(asked, Tokenize) else set()
        return self._files[asked.part].prove(number for number in numbers if number >= _PROVEN_AT_START)


class Sent(NamedTuple):
    """A request, and the text that it is about."""

    request: Request
    text: bytes


def to_send(request: Request, memory: Callable[[int], memoryview]) -> Sent:
    """The request as an actor can answer it.

    :param memory: the bytes of a slot.
    """
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
    if not isinstance(reply, Scanned) or not isinstance(request, Scan):
        return reply

    starts = np.frombuffer(reply.starts, np.int32)
    if request.with_samples:  # their text is not here
        starts = np.full(len(starts), -1, np.int32)
    else:
        memory(request.slot)[request.base : request.base + len(text)] = text
        starts = np.where(starts >= 0, starts + np.int32(request.base), starts).astype(np.int32)
    return msgspec.structs.replace(reply, starts=starts.tobytes())
