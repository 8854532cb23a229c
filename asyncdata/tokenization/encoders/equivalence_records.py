"""Proofs about a fast backend and a tokenizer: made once by a sweep, stored in the cache folder, read by workers.

A proof is for one tokenizer, one version of the backend, of ``tokenizers`` and of Unicode, and one kind of processor:
its name is the digest of these. A file that lacks one of them, or is damaged, is not used; the sweep runs again.
"""

from __future__ import annotations

import os
import platform
import time
import unicodedata
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import tokenizers

from asyncdata.core.atomic_file import remove_left_over, replace_file, sync_folder
from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.callbacks import no_op
from asyncdata.core.checksummed_file import pack, unpack_file
from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.file_checks import lock
from asyncdata.core.version import __version__
from asyncdata.tokenization.encoders.fast_backends import (
    FAST_BACKENDS,
    PROOFS,
    SWEEP_VERSION,
    load_backend,
    open_lock,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("Proof", "Subject", "choose", "find", "make", "make_first", "missing", "proof_path", "revoke", "subject_of")

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
    """The result of a sweep about ``subject``.

    :ivar refusal: why the backend is not used at all; empty if it is used.
    :ivar exceptions: the characters whose texts go to ``tokenizers``: half-open ranges of code points.
    :ivar around: the ids that the tokenizer adds before and after a text with ``add_special_tokens``; None if they
        depend on the text.
    :ivar token_lengths: the bytes of each token, as uint16 by its id, if they give the offsets of tokens; else empty.
    :ivar no_offsets: why they do not, whatever the backend; empty if they do.
    :ivar is_partial: only the common characters are proven yet; the others are among the exceptions.
    :ivar num_texts: how many texts were compared; ``num_differences`` of them had other ids.
    """

    subject: Subject
    refusal: str = ""
    exceptions: list[tuple[int, int]] = []
    around: tuple[list[int], list[int]] | None = None
    token_lengths: bytes = b""
    no_offsets: str = ""
    is_partial: bool = False
    num_texts: int = 0
    num_differences: int = 0
    seconds: float = 0.0

    def is_usable(self, *, needs_offsets: bool) -> bool:
        """Whether the backend can be used, also for functions that need the offsets of tokens."""
        return not self.refusal and bool(self.token_lengths or not needs_offsets)

    @property
    def num_exceptions(self) -> int:
        """The number of characters whose texts go to ``tokenizers``."""
        return sum(stop - start for start, stop in self.exceptions)


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


def missing(files: TokenizerFiles) -> list[str]:
    """The backends to prove, in this order, so that "auto" can use one for all texts; empty if it already can."""
    found = [(subject.backend, find(subject)) for subject in _subjects(files)]
    if any(_is_whole(proof) and not proof.refusal for _, proof in found):
        return []

    return [backend for backend, proof in found if not _is_whole(proof)]


def _is_whole(proof: Proof | None) -> TypeGuard[Proof]:
    return proof is not None and not proof.is_partial


def _subjects(files: TokenizerFiles) -> Iterator[Subject]:
    """Those of the fast backends that are installed, in the order in which "auto" prefers them."""
    return filter(None, (subject_of(files, name) for name in FAST_BACKENDS))


def choose(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof | None:
    """The proof of the backend to use; None for ``tokenizers`` itself.

    If a backend is given by name and has no proof, the sweep runs now, which takes a minute.

    :param needs_offsets: the offsets of tokens must be proven too.
    :raises ConfigError: if the named backend is not installed, or refused.
    """
    if backend == "auto":
        proofs = map(find, _subjects(files))
        usable = (proof for proof in proofs if proof is not None and proof.is_usable(needs_offsets=needs_offsets))
        first = next(usable, None)
        return next(filter(_is_whole, usable), first) if first is not None and first.is_partial else first

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


def make(
    files: TokenizerFiles, subject: Subject, progress: Callable[[str, float], object] = no_op, num_processes: int = 1
) -> Proof:
    """Run the sweep and store its result. Only one process of the machine does it; others wait and use its result.

    :param num_processes: how many processes share the work; if several, this one must have a single thread.
    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """
    if _is_whole(proof := find(subject)):
        return proof

    with _alone("proving"):
        if _is_whole(proof := find(subject)):
            return proof

        return _prove(files, subject, progress=progress, num_processes=num_processes)


def make_first(files: TokenizerFiles, subject: Subject) -> Proof:
    """The proof of ``subject``. If there is none, one of the common characters is made, in 2.5 s of CPU.

    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """
    from asyncdata.tokenization.encoders.equivalence_sweep import NUM_COMMON_TEXTS, common_points

    with _alone("proving_first"):
        return find(subject) or _prove(files, subject, code_points=common_points(), num_random_texts=NUM_COMMON_TEXTS)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    try:
        fd = open_lock(name)
    except OSError:  # no cache: every process proves for itself
        yield
        return

    try:
        lock(fd, waits=True)
        yield
    finally:
        os.close(fd)


def _prove(files: TokenizerFiles, subject: Subject, **settings: Any) -> Proof:
    """The result of the sweep, which is stored.

    :param settings: of the sweep; with ``code_points`` the proof is a partial one.
    """
    began = time.monotonic()
    proof = _swept(files, subject, settings)
    proof = msgspec.structs.replace(
        proof, is_partial="code_points" in settings and not proof.refusal, seconds=round(time.monotonic() - began, 1)
    )
    before = find(subject)
    if before is not None and before.refusal:  # an audit has revoked it meanwhile
        return before

    with suppress(OSError):  # proven all the same, for this process
        keep(proof)
    return proof


def _swept(files: TokenizerFiles, subject: Subject, settings: dict[str, Any]) -> Proof:
    # Here, as who only reads a proof needs none of it.
    from asyncdata.tokenization.encoders import equivalence_sweep
    from asyncdata.tokenization.encoders.hf_encoder import TokenLengths, ids_around, lengths_of, separator_of

    if unfit := files.unfit_for_fast():
        return Proof(subject=subject, refusal=unfit)

    tokenizer = files.load()
    try:
        tried = load_backend(subject.backend, files.plain_json(), splits_special=files.splits_special)
    except Exception as error:  # whatever the library raises
        return Proof(subject=subject, refusal=f"{subject.backend} cannot load it: {type(error).__name__}: {error}")

    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    around, lengths, separator = ids_around(tokenizer), lengths_of(files, tokenizer), separator_of(tokenizer)
    token_lengths = TokenLengths(lengths, files.normal_form or "") if lengths else None
    trusted = equivalence_sweep.OffsetCheck(tokenizer, token_lengths)
    found = equivalence_sweep.sweep(trusted, tried, special, separator=separator, **settings)
    no_offsets = trusted.difference if lengths else "its tokens are not the bytes of the text"
    return Proof(
        subject=subject,
        around=around,
        token_lengths=b"" if no_offsets else lengths,
        no_offsets=no_offsets,
        **found._asdict(),
    )
