"""Encodes texts to the ids of ``tokenizers``: by a fast backend where it is proven, with an audit while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from array import array
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from asyncdata.core.errors import ConfigError, excerpt
from asyncdata.tokenization.encoders import fast_backends
from asyncdata.tokenization.encoders.fast_backends import BoundedEncoder, EncodedTexts, FlatIds
from asyncdata.tokenization.encoders.hf_encoder import NOWHERE, HfEncoder, LengthsById, Located, TokenLengths
from asyncdata.tokenization.rows import WrongIdsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncdata.tokenization.column_writer import Offsets
    from asyncdata.tokenization.encoders.equivalence_records import Proof, ProvenTexts
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

AUDIT_EVERY = 10_000
"""One text in so many is encoded by ``tokenizers`` too, weighed by length: 1 % of the time of a backend that is a
hundred times as fast."""

FIRST_AUDIT_TOKENS = 200_000
"""After how many tokens the audit begins, when the worker is idle."""

WORK_BEFORE_AUDIT_S = 40.0
"""CPU seconds after which the audit begins even if the worker is not idle: loading ``tokenizers``, which delays a
request, is 1 % of that."""


class Encoder:
    """Encodes texts; see :func:`open_encoder`.

    ``tokenizers`` is loaded at once without ``fast``, otherwise only when a text needs it: it costs 0.3 s and 60 MB for
    a vocabulary of 151k.

    :param offsets: whether :meth:`encode` gives the offsets of tokens.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        fast: _Fast | None = None,
        *,
        add_special_tokens: bool = False,
        offsets: bool = False,
    ) -> None:
        self._files = files
        self._add_special_tokens = add_special_tokens
        self._offsets = offsets
        self._fast = fast
        self._hf: HfEncoder | None = None
        self._audit_after_s = time.process_time() + WORK_BEFORE_AUDIT_S
        self._wrong: tuple[str, str] | None = None  # a text for which an audit found other ids, and what is wrong
        self._audited: str | None = None
        if fast is None:
            self._trusted()

    def _trusted(self) -> HfEncoder:
        if self._hf is None:
            before = fast_backends.private_bytes()
            tokenizer = self._files.load()
            # Where a backend is audited, the offsets must not follow from lengths: the proof's may be wrong.
            lengths = LengthsById.of(self._files, tokenizer) if self._offsets and self._fast is None else None
            self._hf = HfEncoder(
                tokenizer, add_special_tokens=self._add_special_tokens, offsets=self._offsets, lengths=lengths
            )
            fast_backends.give_back_memory()
            if self._fast is not None:
                self._fast.encode.allow(fast_backends.private_bytes() - before)
        return self._hf

    def encode(self, texts: list[str]) -> list[Located | Exception]:
        """Each text's ids, and the offsets of its tokens if they are wanted; or the error that the library raised.

        A fast backend gives ids. Their offsets follow from the lengths of tokens, where the proof says that these are
        the offsets of ``tokenizers``; it encodes the other texts.

        :raises WrongIdsError: as a call.
        """
        if self._offsets and self._fast is None:
            return self._trusted().located(texts)

        flat, known = self(texts)
        ids = array("i")
        ids.frombytes(flat.ids)
        places: Iterable[Offsets | None] = repeat(None, len(texts))
        if self._offsets and self._fast is not None:
            places = self._fast.lengths(texts, flat)
        borders = pairwise([0, *flat.ends])
        found = [
            Located(ids[start:stop], place or NOWHERE) for (start, stop), place in zip(borders, places, strict=True)
        ]
        if not self._offsets:
            return _replaced(found, known)

        self._audit_offsets(texts, found)
        others = [number for number, each in enumerate(found) if each.offsets is NOWHERE or number in known]
        slow = self._trusted().located([texts[number] for number in others]) if others else []
        return _replaced(found, dict(zip(others, slow, strict=True)))

    def _audit_offsets(self, texts: list[str], found: list[Located]) -> None:
        """Compare the offsets of the text whose ids were compared.

        :raises WrongIdsError: if ``tokenizers`` gives others.
        """
        text = self._audited
        offsets = NOWHERE if text is None else found[texts.index(text)].offsets
        if text is None or offsets is NOWHERE:
            return

        (expected,) = self._trusted().located([text])
        if isinstance(expected, Exception) or list(map(tuple, expected.offsets)) != list(map(tuple, offsets)):
            self._reject(text, "offsets")

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """The id of the special token that a setting names, as an array; empty for None.

        :raises ConfigError: if it is not one token.
        """
        if token is None:
            return array("i")

        (found,) = self.encode([token])
        num_ids = 0 if isinstance(found, Exception) else len(found.ids)
        if isinstance(found, Exception) or num_ids != 1:
            raise ConfigError(f"{setting}={token!r} is {num_ids} tokens of the tokenizer; name one of its own tokens")

        return found.ids

    def around(self) -> tuple[array[int], array[int]]:
        """The special tokens that the tokenizer adds before plain text, and after it; for an encoder with offsets."""
        if self._fast is None:
            return self._trusted().around

        before, after = self._fast.proof.around or ([], [])
        return array("i", before), array("i", after)

    def __call__(self, texts: list[str]) -> EncodedTexts:
        """The ids of each text.

        :raises WrongIdsError: if the audit finds wrong ids of the backend, and at every later call.
        """
        if self._fast is None:
            return self._trusted().each(texts)

        self._audited = None
        if self._wrong is not None:
            raise _found_out(self._fast.proof, *self._wrong, is_here=self._wrong[0] in texts)

        not_proven = self._fast.not_proven(texts)
        if not_proven:
            return self._routed(self._fast, texts, not_proven)

        return self._encode_fast(self._fast, texts)

    def _encode_fast(self, fast: _Fast, texts: list[str]) -> EncodedTexts:
        try:
            found = fast.encode(texts)
        except Exception:  # whatever a library raises: the other one knows whether the text or the backend is to blame
            return self._trusted().each(texts)

        if fast.around != ([], []):
            head, tail = (array("i", ids).tobytes() for ids in fast.around)
            found = FlatIds.joined([head + ids + tail for ids in found.of_each()])
        if fast.audit.is_due(len(found.ids) // 4) and texts and self._may_audit():
            self._audit(fast, texts, found)
        return EncodedTexts(found, {})

    def _may_audit(self) -> bool:
        """Whether the audit costs little now."""
        if self._hf is not None or time.process_time() >= self._audit_after_s:
            return True

        fast_backends.do_when_idle(self)
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
        slow = self._trusted().each([texts[number] for number in not_proven])
        pieces = dict(zip([*others, *not_proven], [*proven.each(), *slow.each()], strict=True))
        return EncodedTexts.of_each([pieces[number] for number in range(len(texts))])

    def _audit(self, fast: _Fast, texts: list[str], found: FlatIds) -> None:
        number = fast.audit.num_audits % len(texts)
        expected = self._trusted()([texts[number]]).ids
        fast.audit.is_done(len(expected) // 4)
        start = found.ends[number - 1] if number else 0
        self._audited = texts[number]
        if found.ids[4 * start : 4 * found.ends[number]] != expected:
            self._reject(texts[number], "ids")

    def _reject(self, text: str, what: str) -> NoReturn:
        """Revoke the proof: the backend gives other ``what``, such as ids, for a text than ``tokenizers``.

        :raises WrongIdsError: always; and so does every later call of the encoder.
        """
        assert self._fast is not None  # it is what is rejected
        from asyncdata.tokenization.encoders.equivalence_records import revoke

        self._wrong = text, what
        length = len(text)  # the text is the row's, and must not be shown to readers of the proof
        revoke(
            self._fast.proof.subject,
            f"an audit found other {what} than those of tokenizers for a text of {length} characters",
        )
        raise _found_out(self._fast.proof, text, what)


def _found_out(proof: Proof, text: str, what: str, *, is_here: bool = True) -> WrongIdsError:
    return WrongIdsError(
        f"AD436 tokenizer_backend {proof.subject.backend!r} {proof.subject.backend_version} gives other {what} "
        "than tokenizers for a text: samples that were delivered before may be wrong as well. Its proof "
        f"{proof.subject.path} is revoked, so that 'auto' no longer chooses it. Set tokenizer_backend='hf', "
        "continue from a snapshot that you trust, and report the text to the backend's authors",
        excerpt(text.encode("utf-8", "surrogatepass")),
        is_here=is_here,
    )


def _replaced(found: list[Located], others: Mapping[int, Located | Exception]) -> list[Located | Exception]:
    return [others.get(number, each) for number, each in enumerate(found)] if others else [*found]


class _Audit:
    """When to encode a text by both: after ``AUDIT_EVERY`` times as many tokens as the last compared text had.

    Only one process of a run does this, so that only one loads ``tokenizers``; if it dies, another takes over.
    """

    def __init__(self) -> None:
        self._left = FIRST_AUDIT_TOKENS
        self._lock = -1
        self.num_audits = 0

    def is_due(self, num_tokens: int) -> bool:
        """Count ``num_tokens`` more; return whether to compare a text now."""
        self._left -= num_tokens
        if self._left > 0:
            return False

        if self._lock < 0 and not self._is_ours():
            self._left = max(FIRST_AUDIT_TOKENS, 1)
            return False

        return True

    def is_done(self, num_tokens: int) -> None:
        """Record that a text of ``num_tokens`` tokens was compared."""
        self.num_audits += 1
        self._left = AUDIT_EVERY * max(num_tokens, 1)

    def _is_ours(self) -> bool:
        """Whether no other process of our parent's audits: a lock on the byte whose number is our parent's."""
        try:
            fd = fast_backends.open_lock("audit")
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

    :ivar not_proven: finds the texts that it must not be given.
    :ivar around: the ids to be put around a text's.
    :ivar lengths: finds the offsets of tokens.
    """

    proof: Proof
    encode: BoundedEncoder
    not_proven: ProvenTexts
    around: tuple[list[int], list[int]]
    lengths: TokenLengths
    audit: _Audit


def open_encoder(
    files: TokenizerFiles, backend: str = "auto", *, add_special_tokens: bool = False, offsets: bool = False
) -> Encoder:
    """The encoder of a tokenizer, by the backend that is chosen for it.

    :param backend: "auto" for the first that is proven, "hf" for ``tokenizers``, or one by name.
    :param add_special_tokens: with what the tokenizer puts around plain text.
    :param offsets: the offsets of tokens must be proven too; not together with ``add_special_tokens``.
    :raises ConfigError: if the backend that is named is not installed, or not exact for this tokenizer.
    """
    proof = choose(files, backend, needs_offsets=offsets)
    if proof is None or (proof.around is None and (add_special_tokens or offsets)):
        return Encoder(files, add_special_tokens=add_special_tokens, offsets=offsets)

    from asyncdata.tokenization.encoders.equivalence_records import ProvenTexts

    name, text, splits = proof.subject.backend, files.plain_json(), files.splits_special
    fast = _Fast(
        proof,
        encode=BoundedEncoder(lambda: fast_backends.load_backend(name, text, splits_special=splits)),
        not_proven=ProvenTexts(proof, needs_offsets=offsets),
        around=(proof.around if add_special_tokens else None) or ([], []),
        lengths=TokenLengths(proof.token_lengths, files.normal_form or ""),
        audit=_Audit(),
    )
    return Encoder(files, fast, add_special_tokens=add_special_tokens, offsets=offsets)


def choose(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof | None:
    """The proof of the backend to use; None for ``tokenizers`` itself.

    If a backend is given by name and has no proof, Latin text and the special tokens are proven now, in a second
    or two.

    :raises ConfigError: as :func:`open_encoder`.
    """
    if backend == "hf" or (backend == "auto" and not any(map(fast_backends.version_of, fast_backends.FAST_BACKENDS))):
        return None  # most workers: they need not import what reads proofs

    if backend == "auto":
        from asyncdata.tokenization.encoders.equivalence_records import find_usable

        return find_usable(files, fast_backends.FAST_BACKENDS, needs_offsets=needs_offsets)

    from asyncdata.tokenization.encoders.equivalence_sweep import require

    return require(files, backend, needs_offsets=needs_offsets)
