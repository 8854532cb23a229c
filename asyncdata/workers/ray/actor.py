"""What runs on a node: an actor without state, which answers requests one at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import Failed, Index, Ready, Scan, Short, Tokenize, decode_request, encode
from asyncdata.core.shortage import is_shortage
from asyncdata.core.user_traceback import user_traceback
from asyncdata.tokenization.base import open_spec
from asyncdata.workers.part_handler import handler_of
from asyncdata.workers.ray.by_bytes import inner, text_of
from asyncdata.workers.ray.node_proof import NodeFiles, Terms, check_function

if TYPE_CHECKING:
    from asyncdata.core.messages import Job, OfPart, Reply, Request
    from asyncdata.workers.part_handler import PartHandler
    from asyncdata.workers.ray.node_proof import FileFault
    from asyncdata.workers.request_handler import Handler

__all__ = ("Began", "RemoteWorker")

_PROVEN_AT_START = 64
"""Files that are compared before the first request; of more, the others are when they are first read."""


class Began(msgspec.Struct, frozen=True, array_like=True):
    """How an actor has started.

    :ivar ready: that it has; else why it has not.
    :ivar faults: files that its node sees otherwise: part, number and reason.
    """

    ready: Ready | Failed | Short
    faults: list[tuple[int, int, str]] = []


class _OneSlot:
    """The memory of the current request, for every number of a slot."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")

    def __getitem__(self, number: int) -> memoryview:
        return self.memory

    def __len__(self) -> int:
        return 1


class RemoteWorker:
    """See the module. The class is made an actor by ``cluster.new_actors``."""

    def __init__(self, terms: bytes) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._terms = msgspec.msgpack.decode(terms, type=Terms)
        self._handler: Handler | PartHandler | None = None
        self._files: list[NodeFiles] = []
        self._slot = _OneSlot()
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
            return Began(_not_opened(error))

        job, faults = self._proven(), []
        for part, files in enumerate(self._files):
            faults += [(part, *fault) for fault in files.prove(range(_PROVEN_AT_START))]
        try:
            assert job.tokenize is not None
            tokenizer = open_spec(job.tokenize)
        except BaseException as error:
            return Began(_not_opened(error))

        slots: Any = self._slot
        self._handler = handler_of(job, slots, tokenizer, self._note)
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
        self._slot.memory = self._memory_for(asked, text)
        reply = self._reply(asked)
        along = text_of(asked, reply, self._slot.memory)
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
        found = inner(asked)
        if not isinstance(found, Scan):
            return memoryview(text)

        return memoryview(bytearray(len(found.blocks) * self._job_of(asked).stride))

    def _job_of(self, asked: Request | OfPart) -> Job:
        job = self._terms.job
        return job.parts[asked.part] if job.parts else job  # type: ignore[union-attr]

    def _reply(self, asked: Request) -> Reply:
        assert self._handler is not None, "begin() comes first"
        faults = self._unproven(asked)
        return Failed("SourceError", faults[0].reason) if faults else self._handler(asked)

    def _unproven(self, asked: Request) -> list[FileFault]:
        """The files of a request that are compared only now, and differ."""
        found, part = inner(asked), getattr(asked, "part", 0)
        if isinstance(found, Scan | Index):
            numbers = {block.file_id for block in found.blocks}
        else:
            numbers = {place.file_id for place in found.overflow} if isinstance(found, Tokenize) else set()
        return self._files[part].prove(number for number in numbers if number >= _PROVEN_AT_START)


def _not_opened(error: BaseException) -> Failed | Short:
    message, trace = f"AD426 the tokenize function cannot be opened: {error!r}", user_traceback(error)
    return Short(message, trace) if is_shortage(error) else Failed("WorkerError", message, trace)
