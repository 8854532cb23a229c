"""Proofs about a fast backend and a tokenizer: made by a sweep, stored in the cache folder, read by workers.

A proof is for one tokenizer, one version of the backend, of ``tokenizers`` and of Unicode, and one kind of processor:
its name is the digest of these. A file that lacks one of them, or is damaged, is not used; the sweep runs again.

A proof grows. It begins with ASCII and the special tokens. A worker that meets other characters asks for them
(:class:`ProvenTexts`), in a file beside the proof, and uses the backend for their texts once they are proven.
"""

from __future__ import annotations

import os
import platform
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from asyncdata.core import __version__
from asyncdata.core.checksummed_file import pack, unpack_file
from asyncdata.core.errors import SnapshotError
from asyncdata.core.files import cache_folder, lock, remove_left_over, replace_file, sync_folder
from asyncdata.core.identity import canonical, digest
from asyncdata.core.settings import prepared
from asyncdata.tokenization.encoders.fast_backends import PROOFS, SWEEP_VERSION, lock_path, open_lock, version_of

if TYPE_CHECKING:
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

NUM_CODE_POINTS = 0x110000
_ASCII = 0x80


def num_points(ranges: Iterable[tuple[int, int]]) -> int:
    """How many code points ranges have."""
    return sum(stop - start for start, stop in ranges)


def points_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """The code points of ranges."""
    return {point for start, stop in ranges for point in range(start, stop)}


class CharacterFinder:
    """Finds the texts that contain a character that is not of a set.

    A text of ASCII costs 25 ns, whatever its length, where the set has all of ASCII; another 3 to 4 ns a character.

    :param ranges: the set.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = list(ranges)
        self._has_ascii = bool(ranges) and ranges[0][0] == 0 and ranges[0][1] >= _ASCII
        self._is_other: Any = None

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts that contain one."""
        if not self._has_ascii:
            suspects = list(range(len(texts)))
        elif all(map(str.isascii, texts)):
            return []
        else:
            suspects = [number for number, text in enumerate(texts) if not text.isascii()]
        if not suspects or not self._others("".join([texts[number] for number in suspects])).size:
            return []

        return [number for number in suspects if self._others(texts[number]).size]

    def others_in(self, text: str) -> set[int]:
        """The characters of a text that are not of the set."""
        return set(self._others(text).tolist())

    def _others(self, text: str) -> Any:
        import numpy as np  # a worker that reads English never needs it

        if self._is_other is None:
            self._is_other = np.ones(NUM_CODE_POINTS, np.bool_)
            for start, stop in self._ranges:
                self._is_other[start:stop] = False
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return points[self._is_other[points]]


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

    @property
    def path(self) -> str:
        """The file of the proof."""
        return os.path.join(cache_folder(), PROOFS, f"{self.name}.proof")


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


def find(subject: Subject) -> Proof | None:
    """The stored proof of ``subject``; None if there is none, or if another user could have written it."""
    try:
        _, payload = unpack_file(subject.path, must_be_ours=True)
        proof = msgspec.msgpack.decode(payload, type=prepared(Proof))
    except (OSError, SnapshotError, msgspec.DecodeError):
        return None

    return proof if proof.subject == subject else None


def keep(proof: Proof) -> None:
    """Store a proof.

    :raises OSError: if it cannot be written; the older file is kept then.
    """
    path = proof.subject.path
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    payload = msgspec.msgpack.encode(proof)
    replace_file(path, [pack(payload, "msgpack", schema=_SCHEMA, library=__version__), payload], keep=1)
    sync_folder(path)
    remove_left_over(path)


def revoke(subject: Subject, reason: str) -> None:
    """Disable the backend for this tokenizer on this machine, until the file of the proof is removed."""
    with suppress(OSError):  # a folder that cannot be written: the caller says what is wrong in any case
        keep(Proof(subject=subject, refusal=reason))


def subjects_of(files: TokenizerFiles, backends: Sequence[str]) -> Iterator[Subject]:
    """The backends among ``backends`` that are installed."""
    return filter(None, (subject_of(files, backend) for backend in backends))


def find_usable(files: TokenizerFiles, backends: Sequence[str], *, needs_offsets: bool) -> Proof | None:
    """The proof of the first backend that can be used; None if there is none.

    :param needs_offsets: the offsets of tokens must be proven too.
    """
    proofs = filter(None, map(find, subjects_of(files, backends)))
    return next((proof for proof in proofs if proof.is_usable(needs_offsets=needs_offsets)), None)


def to_prove(files: TokenizerFiles, backends: Sequence[str], *, needs_offsets: bool) -> list[Subject]:
    """What to prove, in this order: the backend that workers use; if there is none, those that have no proof."""
    used = find_usable(files, backends, needs_offsets=needs_offsets)
    if used is not None:
        return [used.subject]

    return [subject for subject in subjects_of(files, backends) if find(subject) is None]


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


# What workers meet


class ProvenTexts:
    """Finds the texts that a backend must not be given yet, and asks that their characters be proven.

    :param needs_offsets: no text may be given to it once the offsets of its tokens turn out to be others.
    """

    def __init__(self, proof: Proof, *, needs_offsets: bool) -> None:
        self._subject, self._needs_offsets = proof.subject, needs_offsets
        self._path, self._stamp = proof.subject.path, (0, 0)
        self._asked: set[int] = set()
        self._follow(proof)

    def _follow(self, proof: Proof) -> None:
        self._finder = CharacterFinder(proof.proven if proof.is_usable(needs_offsets=self._needs_offsets) else [])
        self._asked |= points_of(proof.refused)  # these are answered

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts that must not reach the backend."""
        found = self._finder(texts)
        if found and self._has_grown():
            found = self._finder(texts)
        if found:
            new = set().union(*(self._finder.others_in(texts[number]) for number in found)) - self._asked
            if new:
                self._asked |= new
                ask_for(self._subject, new)
        return found

    def _has_grown(self) -> bool:
        try:
            status = os.stat(self._path)
        except OSError:
            return False

        stamp = status.st_ino, status.st_mtime_ns
        if stamp == self._stamp or (proof := find(self._subject)) is None:
            return False

        self._stamp = stamp
        self._follow(proof)
        return True


_MOST_ASKED_BYTES = 4 << 20
"""The requests that are kept for a process that proves; more are dropped."""


def ask_for(subject: Subject, points: Collection[int]) -> None:
    """Ask that characters be proven."""
    with suppress(OSError), alone(subject.name) as fd:
        if fd is not None and os.fstat(fd).st_size < _MOST_ASKED_BYTES:
            os.pwrite(fd, array("I", points).tobytes(), os.fstat(fd).st_size)


def is_asked(subject: Subject) -> bool:
    """Whether a character was asked for, and no process proves it now."""
    with suppress(OSError):
        if os.stat(lock_path(subject.name)).st_size:
            with alone("growing", waits=False) as is_ours:
                return is_ours is not None

    return False


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
