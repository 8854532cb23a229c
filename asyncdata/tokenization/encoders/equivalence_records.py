"""Proofs about a fast backend and a tokenizer: made by a sweep, stored in the cache folder, read by workers.

A proof is for one tokenizer, one version of the backend, of ``tokenizers`` and of Unicode, and one kind of processor:
its name is the digest of these. A file that lacks one of them, or is damaged, is not used; the sweep runs again.

A proof grows. It begins with ASCII and the special tokens. A worker that meets other characters asks for them
(:class:`ProvenTexts`), in a file beside the proof, and uses the backend for their texts once they are proven.
"""

from __future__ import annotations

import os
import platform
import time
import unicodedata
from array import array
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from asyncdata.core.atomic_file import remove_left_over, replace_file, sync_folder
from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.checksummed_file import pack, unpack_file
from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.file_checks import lock
from asyncdata.core.version import __version__
from asyncdata.tokenization.encoders.character_sets import CharacterFinder, points_of, ranges_of
from asyncdata.tokenization.encoders.fast_backends import (
    FAST_BACKENDS,
    PROOFS,
    SWEEP_VERSION,
    load_backend,
    open_lock,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = (
    "GrowingProof",
    "Proof",
    "ProvenTexts",
    "Subject",
    "alone",
    "answered",
    "asked_for",
    "choose",
    "find",
    "is_work_left",
    "make",
    "proof_path",
    "revoke",
    "subject_of",
)

_SCHEMA = 1
_CPU_BYTES = 8192


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a proof is about.

    :ivar processor: digest of the kind of CPU, as a backend may run other code on another kind.
    """

    tokenizer: str
    backend: str
    backend_version: str
    tokenizers_version: str
    sweep_version: int = SWEEP_VERSION
    unicode_version: str = unicodedata.unidata_version
    processor: str

    @property
    def name(self) -> str:
        """The digest of all of it."""
        return digest(canonical(msgspec.to_builtins(self)))


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What sweeps have found about ``subject`` so far.

    :ivar refusal: why the backend is not used at all; empty if it is used.
    :ivar proven: the characters of texts that the backend may get: half-open ranges of code points.
    :ivar refused: those that are not tried again, as a text with one had other ids, or Python's Unicode has them not.
    :ivar around: the ids that the tokenizer adds before and after a text with ``add_special_tokens``; None if they
        depend on the text.
    :ivar token_lengths: the bytes of each token, as uint16 by its id, if they give the offsets of tokens; else empty.
    :ivar no_offsets: why they do not, whatever the backend; empty if they do.
    :ivar num_texts: how many texts were compared; ``num_differences`` of them had other ids.
    """

    subject: Subject
    refusal: str = ""
    proven: list[tuple[int, int]] = []
    refused: list[tuple[int, int]] = []
    around: tuple[list[int], list[int]] | None = None
    token_lengths: bytes = b""
    no_offsets: str = ""
    num_texts: int = 0
    num_differences: int = 0
    seconds: float = 0.0

    def is_usable(self, *, needs_offsets: bool) -> bool:
        """Whether the backend can be used, also for functions that need the offsets of tokens."""
        return not self.refusal and bool(self.token_lengths or not needs_offsets)


def subject_of(files: TokenizerFiles, backend: str) -> Subject | None:
    """The subject of a proof of ``backend`` for this tokenizer; None if the backend is not installed."""
    version = version_of(backend)
    if version is None:
        return None

    return Subject(
        tokenizer=files.digest(),
        backend=backend,
        backend_version=version,
        tokenizers_version=tokenizers.__version__,
        processor=_processor(),
    )


def _processor() -> str:
    """The CPU's instruction sets, by which libraries choose their code."""
    flags = b""
    with suppress(OSError), open("/proc/cpuinfo", "rb", buffering=0) as file:
        for line in file.read(_CPU_BYTES).splitlines():
            if line.startswith((b"flags", b"Features")):
                flags = line
                break
    return digest(platform.machine().encode(), flags)


def proof_path(subject: Subject) -> str:
    """The path of the file with the proof of ``subject``."""
    return os.path.join(cache_folder(), PROOFS, f"{subject.name}.proof")


def find(subject: Subject) -> Proof | None:
    """The stored proof of ``subject``; None if there is none, or if another user could have written it."""
    try:
        _, payload = unpack_file(proof_path(subject), must_be_ours=True)
        proof = msgspec.msgpack.decode(payload, type=Proof)
    except (OSError, SnapshotError, msgspec.DecodeError):
        return None

    return proof if proof.subject == subject else None


def keep(proof: Proof) -> None:
    """Store a proof.

    :raises OSError: if it cannot be written; the older file is kept then.
    """
    path = proof_path(proof.subject)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    payload = msgspec.msgpack.encode(proof)
    replace_file(path, [pack(payload, "msgpack", schema=_SCHEMA, library=__version__), payload], keep=1)
    sync_folder(path)
    remove_left_over(path)


def revoke(subject: Subject, reason: str) -> None:
    """Disable the backend for this tokenizer on this machine, until the file of the proof is removed."""
    with suppress(OSError):  # a folder that cannot be written: the caller says what is wrong in any case
        keep(Proof(subject=subject, refusal=reason))


def is_work_left(files: TokenizerFiles, backends: Sequence[str], *, needs_offsets: bool) -> bool | None:
    """Whether there is something to prove that no other process proves now; None if every backend is refused."""
    for subject in filter(None, (subject_of(files, backend) for backend in backends)):
        proof = find(subject)
        if proof is None:
            return True

        if proof.is_usable(needs_offsets=needs_offsets):
            with alone("growing", waits=False) as is_ours:
                return is_ours is not None and bool(asked_for(subject))

    return None


def choose(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof | None:
    """The proof of the backend to use; None for ``tokenizers`` itself.

    If a backend is given by name and has no proof, that of ASCII and the special tokens is made now, in about a second.

    :param needs_offsets: the offsets of tokens must be proven too.
    :raises ConfigError: if the named backend is not installed, or refused.
    """
    if backend == "auto":
        subjects = filter(None, (subject_of(files, name) for name in FAST_BACKENDS))
        proofs = filter(None, map(find, subjects))
        return next((proof for proof in proofs if proof.is_usable(needs_offsets=needs_offsets)), None)

    return None if backend == "hf" else require(files, backend, needs_offsets=needs_offsets)


def require(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof:
    """The proof of a backend that was given by name.

    :param needs_offsets: the offsets of tokens must be proven too.
    :raises ConfigError: if it is not installed, or refused.
    """
    subject = subject_of(files, backend)
    if subject is None:
        raise ConfigError(
            f"AD435 tokenizer_backend={backend!r} is not installed; pip install {backend}, or tokenizer_backend='auto'"
        )

    proof = make(files, subject)
    if proof.refusal:
        raise ConfigError(
            f"AD434 tokenizer_backend={backend!r} is not exact for the tokenizer in {files.folder}: {proof.refusal}. "
            f"Use tokenizer_backend='auto' or 'hf'; to have it tried again, remove {proof_path(subject)}"
        )

    if not proof.is_usable(needs_offsets=needs_offsets):
        raise ConfigError(
            f"AD434 tokenizer_backend={backend!r} does not tell where the tokens of a text lie, for the tokenizer in "
            f"{files.folder}: {proof.no_offsets}. Use tokenizer_backend='auto' or 'hf'"
        )

    return proof


def make(files: TokenizerFiles, subject: Subject) -> Proof:
    """The proof of ``subject``. If there is none, one of ASCII and the special tokens is made, in 0.9 s of CPU.

    Only one process of the machine does that; others wait and use its result.

    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """
    if (proof := find(subject)) is not None:
        return proof

    with alone("proving"):
        return find(subject) or GrowingProof(files, subject).proof


@contextmanager
def alone(name: str, *, waits: bool = True) -> Iterator[int | None]:
    """Hold a lock of the proofs for a ``with`` block; gives the descriptor of its file.

    :param waits: wait until it is free; without, the block gets None if another process has it.
    """
    try:
        fd = open_lock(name)
    except OSError:  # no cache folder: every process proves for itself
        yield -1
        return

    try:
        yield fd if lock(fd, waits=waits) else None
    finally:
        os.close(fd)


class GrowingProof:
    """The stored proof of ``subject``, or a new one, which is stored; and what lets it grow.

    :ivar proof: what is proven.
    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """

    def __init__(self, files: TokenizerFiles, subject: Subject) -> None:
        # Here, as who only reads a proof needs none of it.
        from asyncdata.tokenization.encoders.equivalence_sweep import OffsetCheck, Sweep
        from asyncdata.tokenization.encoders.hf_encoder import TokenLengths, ids_around, lengths_of, separator_of

        began, before = time.monotonic(), find(subject)
        self.proof = before or Proof(subject=subject)
        if unfit := files.unfit_for_fast():
            self._keep(began, refusal=unfit)
            return

        tokenizer = files.load()
        try:
            tried = load_backend(subject.backend, files.plain_json(), splits_special=files.splits_special)
        except Exception as error:  # whatever the library raises
            self._keep(began, refusal=f"{subject.backend} cannot load it: {type(error).__name__}: {error}")
            return

        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        around, lengths, separator = ids_around(tokenizer), lengths_of(files, tokenizer), separator_of(tokenizer)
        has_lengths = lengths and not self.proof.no_offsets
        self._trusted = OffsetCheck(tokenizer, TokenLengths(lengths, files.normal_form or "") if has_lengths else None)
        known = (points_of(self.proof.proven), points_of(self.proof.refused))
        self._sweep = Sweep(self._trusted, tried, special, separator=separator, proven=known[0], refused=known[1])
        if before is None:
            self._sweep.begin()
            no_offsets = "" if lengths else "its tokens are not the bytes of the text"
            self._keep(began, around=around, token_lengths=lengths, no_offsets=no_offsets, **self._found())

    def grow(self, points: Iterable[int]) -> None:
        """Try characters, unless they were tried before."""
        began = time.monotonic()
        if not self.proof.refusal:
            self._sweep.grow(points)
            self._keep(began, **self._found())

    def _found(self) -> dict[str, Any]:
        sweep, proof = self._sweep, self.proof
        found: dict[str, Any] = {
            "refusal": sweep.refusal,
            "proven": ranges_of(sweep.proven),
            "refused": ranges_of(sweep.refused),
            "num_texts": proof.num_texts + sweep.num_texts,
            "num_differences": proof.num_differences + sweep.num_differences,
        }
        sweep.num_texts = sweep.num_differences = 0
        return found

    def _keep(self, began: float, **changes: Any) -> None:
        seconds = round(self.proof.seconds + time.monotonic() - began, 1)
        self.proof = msgspec.structs.replace(self.proof, seconds=seconds, **changes)
        before = find(self.proof.subject)
        if before is not None and before.refusal:  # an audit has revoked it meanwhile
            self.proof = before
            return

        if not self.proof.refusal and self._trusted.difference:
            self.proof = msgspec.structs.replace(self.proof, token_lengths=b"", no_offsets=self._trusted.difference)
        with suppress(OSError):  # proven all the same, for this process
            keep(self.proof)


# What workers meet


class ProvenTexts:
    """Finds the texts that a backend must not be given yet, and asks that their characters be proven.

    :param needs_offsets: no text may be given to it once the offsets of its tokens turn out to be others.
    """

    def __init__(self, proof: Proof, *, needs_offsets: bool) -> None:
        self._proof, self._needs_offsets = proof, needs_offsets
        self._path = proof_path(proof.subject)
        self._finder = self._finder_of(proof)
        self._asked: set[int] = set()
        self._stamp = (0, 0)

    def _finder_of(self, proof: Proof) -> CharacterFinder:
        return CharacterFinder(proof.proven if proof.is_usable(needs_offsets=self._needs_offsets) else [])

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts that must not reach the backend."""
        found = self._finder(texts)
        if found and self._has_grown():
            found = self._finder(texts)
        if found:
            self._ask(set().union(*(self._finder.others_in(texts[number]) for number in found)))
        return found

    def _has_grown(self) -> bool:
        try:
            status = os.stat(self._path)
        except OSError:
            return False

        stamp = status.st_ino, status.st_mtime_ns
        if stamp == self._stamp or (proof := find(self._proof.subject)) is None:
            return False

        self._proof, self._stamp, self._finder = proof, stamp, self._finder_of(proof)
        return True

    def _ask(self, points: set[int]) -> None:
        if new := points - self._asked:
            self._asked |= new
            ask_for(self._proof.subject, new - points_of(self._proof.refused))


_MOST_ASKED_BYTES = 4 << 20
"""No more is asked for if nobody answers."""


def ask_for(subject: Subject, points: Collection[int]) -> None:
    """Ask that characters be proven."""
    with suppress(OSError), alone(subject.name) as fd:
        if fd is not None and points and os.fstat(fd).st_size < _MOST_ASKED_BYTES:
            os.pwrite(fd, array("I", points).tobytes(), os.fstat(fd).st_size)


def asked_for(subject: Subject) -> list[int]:
    """The characters that were asked for, in that order, some more than once."""
    with suppress(OSError), alone(subject.name) as fd:
        return [] if fd is None else [*memoryview(os.read(fd, 2 * _MOST_ASKED_BYTES)).cast("I")]

    return []


def answered(subject: Subject, number: int) -> None:
    """The first ``number`` of the characters that were asked for were tried."""
    with suppress(OSError), alone(subject.name) as fd:
        if fd is not None:
            left = os.pread(fd, 2 * _MOST_ASKED_BYTES, 4 * number)
            os.ftruncate(fd, 0)
            os.pwrite(fd, left, 0)
