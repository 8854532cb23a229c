"""Whether a node sees the same data as the trainer's process, and makes the same samples of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError
from asyncdata.core.file_refs import FileRef, FileRefs, ObjectRefs
from asyncdata.core.imports import resolve_path
from asyncdata.core.messages import Job, TokenizeSpec, decode_spec, encode
from asyncdata.core.version import __version__
from asyncdata.sources.fingerprint import file_digest
from asyncdata.tokenization.base import fingerprints_of
from asyncdata.tokenization.part_functions import PartFunctions

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
