"""Encodes texts to the ids of ``tokenizers``: by a fast backend if it is proven, with an audit while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from asyncdata.core.cache_dir import cache_folder
from asyncdata.tokenization.encoders import idle_work
from asyncdata.tokenization.encoders.character_sets import CharacterFinder
from asyncdata.tokenization.encoders.fast_backends import (
    FAST_BACKENDS,
    BoundedEncoder,
    EncodedTexts,
    FlatIds,
    give_back_memory,
    load_backend,
    private_bytes,
    version_of,
)
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder
from asyncdata.tokenization.rows import excerpt
from asyncdata.tokenization.wrong_ids import WrongIdsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer

    from asyncdata.tokenization.encoders.equivalence_records import Proof
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("TextEncoder", "encoder_of", "open_encoder", "proof_of")

AUDIT_EVERY = 10_000
"""One text in so many is encoded by ``tokenizers`` too, weighed by length: 1 % of the time of a backend that is a
hundred times as fast."""

FIRST_AUDIT_TOKENS = 200_000
"""After how many tokens the audit begins, when the worker is idle."""

WORK_BEFORE_AUDIT_S = 40.0
"""CPU seconds after which the audit begins even if the worker is not idle: loading ``tokenizers``, which delays a
request, is 1 % of that."""


class _WrongText(NamedTuple):
    """A text for which an audit found that a backend is wrong, and what of it is wrong."""

    text: str
    what: str


class TextEncoder:
    """Encodes texts; see :func:`open_encoder`.

    :param load: loads ``tokenizers``. Called at once without ``fast``, otherwise only when a text needs it: it costs
        0.3 s and 60 MB for a vocabulary of 151k.
    :ivar audited: the text of the last call that was encoded by ``tokenizers`` too; None if none was.
    """

    def __init__(self, load: Callable[[], Tokenizer], fast: _Fast | None = None, *, adds_special: bool = False) -> None:
        self._load = load
        self._adds_special = adds_special
        self._fast = fast
        self._hf: HfEncoder | None = None
        self._audit_after_s = time.process_time() + WORK_BEFORE_AUDIT_S
        self._wrong: _WrongText | None = None
        self.audited: str | None = None
        if fast is None:
            self._trusted()

    def _trusted(self) -> HfEncoder:
        if self._hf is None:
            before = private_bytes()
            self._hf = HfEncoder(self._load(), add_special_tokens=self._adds_special)
            give_back_memory()
            if self._fast is not None:
                self._fast.encode.allow(private_bytes() - before)
        return self._hf

    def __call__(self, texts: list[str]) -> EncodedTexts:
        """The ids of each text.

        :raises WrongIdsError: if the audit finds wrong ids of the backend, and at every later call.
        """
        if self._fast is None:
            return self._trusted().each(texts)

        self.audited = None
        if self._wrong is not None:
            raise _found_out(self._fast.proof, self._wrong, is_here=self._wrong.text in texts)

        not_proven = self._fast.finder(texts)
        if not_proven:
            return self._routed(self._fast, texts, not_proven)

        return self._encode_fast(self._fast, texts)

    def _encode_fast(self, fast: _Fast, texts: list[str]) -> EncodedTexts:
        try:
            found = fast.encode(texts)
        except Exception:  # whatever a library raises: the other one knows whether the text or the backend is to blame
            return self._trusted().each(texts)

        if fast.around != ([], []):
            found = _with_ids_around(found, *fast.around)
        if fast.audit.is_due(len(found.ids) // 4) and texts and self._may_audit():
            self._audit(fast, texts, found)
        return EncodedTexts(found, {})

    def _may_audit(self) -> bool:
        """Whether the audit costs little now."""
        if self._hf is not None or time.process_time() >= self._audit_after_s:
            return True

        idle_work.wait_for_pause(self)
        return False

    def on_pause(self) -> None:
        """Load the library that the audit needs."""
        self._audit_after_s = 0.0
        with contextlib.suppress(Exception):  # the next batch has the same error, and reports it
            self._trusted()

    def _routed(self, fast: _Fast, texts: list[str], not_proven: Sequence[int]) -> EncodedTexts:
        """Encode with both: ``tokenizers`` gets the texts with a character that is not proven."""
        routed = frozenset(not_proven)
        others = [number for number in range(len(texts)) if number not in routed]
        proven = self._encode_fast(fast, [texts[number] for number in others])
        slow, errors = self._trusted().each([texts[number] for number in not_proven])
        pieces = dict(zip(others, proven.flat.of_each(), strict=True))
        pieces.update(zip(not_proven, slow.of_each(), strict=True))
        failed = {others[number]: error for number, error in proven.errors.items()}
        failed |= {not_proven[number]: error for number, error in errors.items()}
        return EncodedTexts(FlatIds.joined([pieces[number] for number in range(len(texts))]), failed)

    def _audit(self, fast: _Fast, texts: list[str], found: FlatIds) -> None:
        number = fast.audit.num_audits % len(texts)
        expected = self._trusted()([texts[number]]).ids
        fast.audit.is_done(len(expected) // 4)
        start = found.ends[number - 1] if number else 0
        self.audited = texts[number]
        if found.ids[4 * start : 4 * found.ends[number]] != expected:
            self.reject(texts[number], "ids")

    def reject(self, text: str, what: str) -> NoReturn:
        """Revoke the proof: the backend gives other ``what``, such as ids, for a text than ``tokenizers``.

        :raises WrongIdsError: always; and so does every later call of the encoder.
        """
        assert self._fast is not None  # it is what is rejected
        from asyncdata.tokenization.encoders.equivalence_records import revoke

        self._wrong = _WrongText(text, what)
        length = len(text)  # the text is the row's, and must not be shown to readers of the proof
        revoke(
            self._fast.proof.subject,
            f"an audit found other {what} than those of tokenizers for a text of {length} characters",
        )
        raise _found_out(self._fast.proof, self._wrong)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of ``tokenizers``, loaded if it was not needed before."""
        return self._trusted().tokenizer


def _found_out(proof: Proof, wrong: _WrongText, *, is_here: bool = True) -> WrongIdsError:
    from asyncdata.tokenization.encoders.equivalence_records import proof_path

    return WrongIdsError(
        f"AD436 tokenizer_backend {proof.subject.backend!r} {proof.subject.backend_version} gives other {wrong.what} "
        "than tokenizers for a text: samples that were delivered before may be wrong as well. Its proof "
        f"{proof_path(proof.subject)} is revoked, so that 'auto' no longer chooses it. Set tokenizer_backend='hf', "
        "continue from a snapshot that you trust, and report the text to the backend's authors",
        excerpt(wrong.text.encode("utf-8", "surrogatepass")),
        is_here=is_here,
    )


def _with_ids_around(found: FlatIds, before: list[int], after: list[int]) -> FlatIds:
    head, tail = array("i", before).tobytes(), array("i", after).tobytes()
    return FlatIds.joined([head + ids + tail for ids in found.of_each()])


class _Audit:
    """When to encode a text by both: after ``every`` times as many tokens as the last compared text had.

    Only one process of a run does this, so that only one loads ``tokenizers``; if it dies, another takes over.
    """

    def __init__(self, first: int, every: int) -> None:
        self._every = every
        self._left = first
        self._retry = max(first, 1)
        self._lock = -1
        self.num_audits = 0

    def is_due(self, num_tokens: int) -> bool:
        """Count ``num_tokens`` more; return whether to compare a text now."""
        self._left -= num_tokens
        if self._left > 0:
            return False

        if self._lock < 0 and not self._is_ours():
            self._left = self._retry
            return False

        return True

    def is_done(self, num_tokens: int) -> None:
        """Record that a text of ``num_tokens`` tokens was compared."""
        self.num_audits += 1
        self._left = self._every * max(num_tokens, 1)

    def _is_ours(self) -> bool:
        """Whether no other process of our parent's audits: a lock on the byte whose number is our parent's."""
        try:
            folder = os.path.join(cache_folder(), "conformance")
            os.makedirs(folder, mode=0o700, exist_ok=True)
            path = os.path.join(folder, "audit.lock")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:  # no cache folder: every process audits
            return True

        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, os.getppid())
        except OSError:
            os.close(fd)
            return False

        self._lock = fd
        return True


class _Fast(NamedTuple):
    """A proven backend.

    :ivar finder: finds the texts that it must not be given.
    :ivar around: the ids to be put around those of a text.
    """

    proof: Proof
    encode: BoundedEncoder
    finder: CharacterFinder
    around: tuple[list[int], list[int]]
    audit: _Audit


def open_encoder(files: TokenizerFiles, backend: str = "auto", *, add_special_tokens: bool = False) -> TextEncoder:
    """The encoder of a tokenizer, by the backend that is chosen for it.

    :param backend: "auto" for the first that is proven, "hf" for ``tokenizers``, or one by name.
    :param add_special_tokens: with what the tokenizer puts around plain text.
    :raises ConfigError: if the backend that is named is not installed, or not exact for this tokenizer.
    """
    return encoder_of(files, proof_of(files, backend), add_special_tokens=add_special_tokens)


def encoder_of(files: TokenizerFiles, proof: Proof | None, *, add_special_tokens: bool = False) -> TextEncoder:
    """The encoder of a tokenizer by the backend of ``proof``; None: by ``tokenizers``."""
    around = ([], []) if proof is None or not add_special_tokens else proof.around
    if proof is None or around is None:
        return TextEncoder(files.load, adds_special=add_special_tokens)

    name, text, splits = proof.subject.backend, files.plain_json(), files.splits_special
    encode = BoundedEncoder(lambda: load_backend(name, text, splits_special=splits))
    fast = _Fast(proof, encode, CharacterFinder(proof.exceptions), around, _Audit(FIRST_AUDIT_TOKENS, AUDIT_EVERY))
    return TextEncoder(files.load, fast, adds_special=add_special_tokens)


def proof_of(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof | None:
    """The proof of the backend to use; None for ``tokenizers`` itself.

    :raises ConfigError: if the backend that is named is not installed, or not exact for this tokenizer.
    """
    if backend == "hf" or (backend == "auto" and not any(map(version_of, FAST_BACKENDS))):
        return None  # most workers: they need not import what reads proofs

    from asyncdata.tokenization.encoders.equivalence_records import choose

    return choose(files, backend, needs_offsets=needs_offsets)
