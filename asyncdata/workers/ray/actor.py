"""What runs on a node: an actor without state, which answers requests one at a time; requests without shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core import __version__
from asyncdata.core.errors import AsyncDataError, ConfigError
from asyncdata.core.identity import FileRef, FileRefs, ObjectRefs
from asyncdata.core.messages import (
    NO_SLOT,
    Failed,
    Index,
    Job,
    Ready,
    Reply,
    Request,
    Scan,
    Scanned,
    Short,
    Tokenize,
    TokenizeSpec,
    decode_request,
    decode_spec,
    encode,
)
from asyncdata.core.settings import resolve_path
from asyncdata.sources.files import file_digest
from asyncdata.tokenization.base import fingerprints_of, open_spec
from asyncdata.tokenization.part_functions import PartFunctions
from asyncdata.workers.base import takes_samples
from asyncdata.workers.request_handler import Handler, not_opened

Fingerprints = list[dict[str, str]]


class Terms(msgspec.Struct, frozen=True):
    """What an actor is told at its start.

    :ivar job: all files have digests, as far as the trainer's process could read them.
    :ivar fingerprints: of the tokenize functions, as they are in the trainer's process.
    :ivar versions: of the libraries that samples depend on.
    :ivar trainer: the node of the trainer's process.
    """

    job: Job
    fingerprints: Fingerprints
    versions: dict[str, str]
    trainer: str


def node_name() -> str:
    """The node, as its users know it."""
    return socket.gethostname()


def versions() -> dict[str, str]:
    """The versions of the libraries that samples depend on."""
    from importlib.metadata import version  # its import takes 20 ms

    return {"asyncdata": __version__, "tokenizers": version("tokenizers")}


def terms_of(job: Job) -> Terms:
    """The terms for a job of this process. It reads a sample of each file."""
    parts = [_with_digests(part) for part in job.parts]
    spec = decode_spec(encode(job.tokenize))  # as a node gets it: its settings are lists, and no tuples
    prints = fingerprints_of_all(spec) if spec is not None else []
    return Terms(msgspec.structs.replace(_with_digests(job), parts=parts), prints, versions(), node_name())


def _with_digests(job: Job) -> Job:
    if isinstance(job.files, ObjectRefs):  # a store pins what it reads
        return job

    files = [msgspec.structs.replace(file, digest=file.digest or _digest_of(file)) for file in job.files]
    return msgspec.structs.replace(job, files=files)


def _digest_of(file: FileRef) -> str:
    """The digest of its content; empty if it cannot be read: the request that reads it raises the error."""
    try:
        return "" if "://" in file.path else file_digest(file.path, file.num_bytes)
    except AsyncDataError:
        return ""


def made_function(spec: TokenizeSpec) -> object:
    """The tokenize function, or its description.

    :raises ConfigError: AD493, naming this node and the module.
    """
    try:
        target = resolve_path(spec.path)
    except ConfigError as error:
        module = spec.path.partition(":")[0]
        raise ConfigError(
            f"AD493 node {node_name()} cannot import the tokenize function from module {module!r}: {error.__cause__}. "
            'Install it on every node; or send it along, as the process connects: ray.init(runtime_env={"working_dir": '
            '"."}), or {"py_modules": ["path/of/the/package"]}; or, where all nodes see the folder, '
            'RayExecutor(runtime_env={"env_vars": {"PYTHONPATH": "/the/folder"}})'
        ) from error

    return target if spec.settings is None else target(**spec.settings)


def fingerprints_of_all(spec: TokenizeSpec) -> Fingerprints:
    """What the tokens depend on: of the function, or of each function of a mixture."""
    made = made_function(spec)
    if not isinstance(made, PartFunctions):
        return [fingerprints_of(made)]  # type: ignore[arg-type]

    return [found for one in made.functions for found in fingerprints_of_all(msgspec.convert(one, TokenizeSpec))]


def check_function(terms: Terms) -> None:
    """Check that this node makes the same samples.

    :raises ConfigError: AD493 or AD494, naming this node and what differs.
    """
    assert terms.job.tokenize is not None
    here, now = fingerprints_of_all(terms.job.tokenize), versions()
    differences = [
        f"{name} {now.get(name)} where the trainer has {value}"
        for name, value in terms.versions.items()
        if now.get(name) != value
    ]
    differences += [
        f"another {name}"
        for theirs, ours in zip(terms.fingerprints, here, strict=True)
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if differences:
        raise ConfigError(
            f"AD494 node {node_name()} would make other samples: it has {', '.join(dict.fromkeys(differences))}. "
            "Put the same packages, module of the tokenize function and tokenizer files on every node"
        )


class NodeFiles:
    """The files of a job as this node sees them.

    :ivar files: what readers compare with: as the trainer's, with what ``stat`` says here, as another mount or a copy
        has other inodes and times.
    """

    def __init__(self, files: FileRefs, trainer: str) -> None:
        self._trainer = trainer
        self._theirs = files
        self._unproven = set() if isinstance(files, ObjectRefs) else set(range(len(files)))
        self.files = files if isinstance(files, ObjectRefs) else [_pinned(file) for file in files]

    def prove(self, numbers: Iterable[int]) -> list[tuple[int, str]]:
        """Compare the files that were not compared yet, by size and a sample of the content.

        Return the numbers of those that this node sees otherwise, and why each cannot be used.
        """
        faults = list[tuple[int, str]]()
        for number in sorted(self._unproven.intersection(numbers)):
            reason = difference(self._theirs[number], self._trainer)
            if reason:
                faults.append((number, reason))
            else:
                self._unproven.discard(number)
        return faults


def _pinned(file: FileRef) -> FileRef:
    try:
        found = os.stat(file.path)
    except OSError:
        return file

    if not file.inode or found.st_size < file.num_bytes:
        return file

    times = {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    return msgspec.structs.replace(file, inode=found.st_ino, **times)


def difference(file: FileRef, trainer: str) -> str:
    """Why this node may not use the file; empty if it is the same."""
    if "://" in file.path or not file.digest:  # a store pins what it reads; what was not read cannot be compared
        return ""

    where = f"AD492 node {node_name()} does not see the same data: {file.path}"
    remedy = "Put the data on a file system that all nodes share, or copy it to the same path on every node"
    try:
        found = os.stat(file.path)
        if found.st_size < file.num_bytes:
            return f"{where} has {found.st_size} bytes there, and {file.num_bytes} on {trainer}. {remedy}"

        if file_digest(file.path, file.num_bytes) != file.digest:
            return f"{where} has other content there than on {trainer}, by a sample of it. {remedy}"

    except OSError as error:
        return f"{where} cannot be read there ({error.strerror}). {remedy}"
    except AsyncDataError as error:
        return f"{where} cannot be read there ({error}). {remedy}"

    return ""


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
