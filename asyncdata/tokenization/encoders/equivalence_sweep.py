"""Whether a fast backend gives the ids of ``tokenizers``: tried on characters in all contexts, and on difficult texts.

The split of a text into words depends on the class of each character, and Unicode normalization also on its neighbours.
So a character is tried alone and next to letters, digits, spaces, line ends, quotes and marks; then every sequence that
Unicode makes of it and of characters that are proven, every special token in text, long runs, and random texts. A
character that causes a difference anywhere is never given to the backend. If no character explains a difference, the
backend is refused as a whole.

ASCII and the special tokens are tried first, then the rest of Latin text (``FIRST``), and the other characters as the
data bring them: what is proven grows. Every part is the same for the same tokenizer, backend, Unicode, and characters
in the same order.
"""

from __future__ import annotations

import random
import time
import unicodedata
from array import array
from contextlib import suppress
from functools import cache
from itertools import chain, filterfalse, islice
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.encoders.equivalence_records import Proof, Subject, alone, find, keep, points_of, subject_of
from asyncdata.tokenization.encoders.fast_backends import SWEEP_VERSION, FlatEncoder, FlatIds, load_backend, one_by_one
from asyncdata.tokenization.encoders.hf_encoder import TokenLengths, flat_ids, ids_around, lengths_of, separator_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from tokenizers import Tokenizer

    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

CONTEXTS = (
    "{c}",
    "{c}{c}",
    "{c}{c}{c}{c}",
    "a{c}b",
    "{c}a",
    "B{c}",
    "a{c}A",
    "A{c}a",
    "1{c}2",
    "12{c}",
    "{c}1",
    " {c} ",
    "{c} {c}",
    "  {c}  ",
    " {c}a",
    ".{c}.",
    " {c}.{c}\n",
    "\n{c}\n",
    "\n\n {c}",
    "{c}\r\n",
    "\t{c}\t",
    "'{c}",
    "{c}'s",
    "'{c}e",
    "{c}\u0301",
    "e{c}\u0301",
    "e\u0301{c}\u0323",
    "\u0645{c}\u0645",
    "\u4e2d{c}\u4e2d",
    "\u00e9{c}\u0416",
)
"""The contexts in which each character is tested."""

NUM_RANDOM_TEXTS = 3000
"""Random texts of what is tried first; of what is tried later, one for two characters, and at most so many."""
LONGEST_TEXT = 100_000
_BATCH, _STORE_EVERY = 2048, 512
_ASCII, _MOST_COMPOSED, _ACUTE = 0x80, 0x30000, "\u0301"
_NUM_PUBLIC = 0xF0000
"""The planes from here on are private."""
FIRST = (*range(0x100), *range(0x2010, 0x2065))
"""The characters that are tried without a request: Latin-1, and the quotes, dashes and other marks that typography
adds. For a text with another one a worker must load ``tokenizers``."""

_ROUNDS = 3


class Sweep:
    """Compares ``tried`` with ``trusted``, and keeps which characters are proven.

    :param special: the tokenizer's added tokens, as text.
    :param separator: an added token that splits a text before all other steps. The ids on one side do not depend on the
        other side, so all contexts of a character can be one text, which takes less time.
    :param proven: code points whose texts agreed in an earlier sweep.
    :param refused: code points that are not to be tried again.
    :ivar refusal: why the backend cannot be used at all; empty if it can.
    :ivar num_texts: how many texts were compared; ``num_differences`` of them had other ids.
    """

    def __init__(
        self,
        trusted: OffsetCheck,
        tried: FlatEncoder,
        special: Sequence[str],
        *,
        separator: str | None = None,
        proven: Collection[int] = (),
        refused: Collection[int] = (),
    ) -> None:
        self._trusted, self._tried = trusted, tried
        self._special, self._separator = special, separator
        self.proven, self.refused = set(proven), set(refused)
        self._fixed = list(_fixed_texts(special, LONGEST_TEXT))
        self.refusal = ""
        self.num_texts = self.num_differences = 0

    def begin(self) -> None:
        """Try what every text may have: ASCII, its difficult texts, and the special tokens."""
        for batch in _batches(filter(str.isascii, self._fixed)):
            if numbers := self._differing(batch):
                self.refusal = f"its ids differ on {_shown(batch[numbers[0]])}"
                return

        every = {*map(ord, chain.from_iterable(self._special)), *(point for point in FIRST if point < _ASCII)}
        self.grow(every, NUM_RANDOM_TEXTS)
        if not (self.proven or self.refusal):
            self.refusal = "its ids differ for all characters"

    def grow(self, points: Iterable[int], num_random_texts: int | None = None) -> None:
        """Try characters. They are among ``proven`` or ``refused`` then, unless there is a ``refusal``.

        :param num_random_texts: None: one for two characters.
        """
        new = set(points) - self.proven - self.refused
        self.refused |= set(filterfalse(is_known, new))
        wanted = sorted(new - self.refused)
        self.refused |= self._characters(wanted)
        self.refused |= self._sequences(set(wanted) - self.refused)
        if num_random_texts is None:
            num_random_texts = min(NUM_RANDOM_TEXTS, 1 + len(wanted) // 2)
        self.refusal = self._mixed(set(wanted), num_random_texts)
        self.proven = (self.proven | set(wanted)) - self.refused

    def _differing(self, texts: Sequence[str]) -> list[int]:
        """The indices of the texts whose ids differ, or for which the backend raises."""
        self.num_texts += len(texts)
        expected = self._trusted(list(texts))
        try:
            found = self._tried(list(texts))
            if found.ends == expected.ends and bytes(found.ids) == bytes(expected.ids):
                return []

            each: Sequence[bytes | Exception] = found.of_each()
        except Exception:  # any error of the library
            each = one_by_one(lambda text: self._tried(text).of_each(), texts)
        numbers = [
            number for number, pair in enumerate(zip(expected.of_each(), each, strict=True)) if pair[0] != pair[1]
        ]
        self.num_differences += len(numbers)
        return numbers

    def _characters(self, points: Sequence[int]) -> set[int]:
        """The characters that show a difference in any context."""
        # A character alone is always its own text: the end of a text may act differently from a separator.
        contexts = self._usable_contexts()
        separator = self._separator
        layouts = contexts if separator is None else ("{c}", " {c}", separator.join((*contexts, "{c}")))
        bad: set[int] = set()
        for begin in range(0, len(points), _BATCH):
            part = points[begin : begin + _BATCH]
            for layout in layouts:
                texts = [layout.replace("{c}", chr(point)) for point in part]
                bad.update(part[number] for number in self._differing(texts))
        ascii_points = sorted(point for point in bad if point < _ASCII)
        bad.difference_update(ascii_points)
        return bad | self._beside_ascii(ascii_points, contexts)

    def _beside_ascii(self, points: Sequence[int], contexts: Sequence[str]) -> set[int]:
        """The characters to blame if a text with an ASCII character differs: a neighbour that is not ASCII, if there is
        one.

        Without an ASCII character hardly any text could be encoded; without a rare mark nearly all texts can.
        """
        texts = [context.replace("{c}", chr(point)) for point in points for context in contexts]
        return {max(map(ord, texts[number])) for number in self._differing(texts)}

    def _usable_contexts(self) -> list[str]:
        """The contexts whose own characters agree. A wrong neighbour would make every character look wrong."""
        wrong = {CONTEXTS[number] for number in self._differing([context.replace("{c}", "x") for context in CONTEXTS])}
        return [context for context in CONTEXTS if context.isascii() or context not in wrong]

    def _sequences(self, new: set[int]) -> set[int]:
        """The characters of which Unicode makes another one, if that differs: the highest of each such sequence."""
        found: set[int] = set()
        for batch in _batches(_composed(self.proven | new, new)):
            found.update(max(map(ord, batch[number])) for number in self._differing(batch))
        return found

    def _mixed(self, wanted: set[int], num_texts: int) -> str:
        """Try difficult and random texts in which the wanted characters are mixed with those that are proven. If a text
        differs, one of its characters must explain it.

        These characters are refused; the last round must find no difference.

        :returns: a refusal of the backend, or an empty text.
        """
        differing: list[str] = []
        for number in range(_ROUNDS):
            new = wanted - self.refused
            known = (self.proven | new) - self.refused
            texts = random_texts(known, new, self._special, num_texts if new else 0, seed=len(known) + number)
            batches = _batches(chain(self._difficult(known, new), texts))
            differing = [batch[found] for batch in batches for found in self._differing(batch)]
            if not differing:
                return ""

            for text in differing:
                to_blame = self._to_blame(text)
                if to_blame is None:
                    return f"its ids differ on {_shown(text)}, which no single character explains"

                self.refused.add(to_blame)
        return f"its ids differ on {_shown(differing[0])}, after {_ROUNDS} rounds of leaving characters out"

    def _difficult(self, known: set[int], new: set[int]) -> Iterator[str]:
        """The fixed texts that have a new character and are not pure ASCII, without what is not proven."""
        good, fresh = set(map(chr, known)), set(map(chr, new))
        for text in self._fixed:
            if not (text.isascii() or fresh.isdisjoint(text)):
                yield "".join(filter(good.__contains__, text))

    def _to_blame(self, text: str) -> int | None:
        """The character without which the two agree; never an ASCII character, which nearly every text needs."""
        for point in sorted(set(map(ord, text)), reverse=True):
            if point < _ASCII:
                return None

            if not self._differing([text.replace(chr(point), "")]):
                return point

        return None


def ranges_of(code_points: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges that make up a set of code points: half-open, sorted, disjoint and not adjacent."""
    ranges: list[tuple[int, int]] = []
    for point in sorted(set(code_points)):
        if ranges and ranges[-1][1] == point:
            ranges[-1] = (ranges[-1][0], point + 1)
        else:
            ranges.append((point, point + 1))
    return ranges


def is_known(point: int) -> bool:
    """Whether a sweep can prove a character: not surrogates, private planes, and what this Python does not know.

    Libraries of different ages differ on characters that are newer than one of them; how two such characters combine
    no sweep over single ones would show.
    """
    return point < _NUM_PUBLIC and unicodedata.category(chr(point)) not in ("Cn", "Cs")


def known_points() -> list[int]:
    """All characters that a sweep can prove."""
    return list(filter(is_known, range(_NUM_PUBLIC)))


@cache
def _compositions() -> list[tuple[str, frozenset[int]]]:
    """The decomposition of each character that has one, and its code points."""
    texts = (unicodedata.normalize("NFD", chr(point)) for point in range(_MOST_COMPOSED))
    return [(text, frozenset(map(ord, text))) for text in texts if len(text) > 1]


def _composed(known: set[int], new: set[int]) -> Iterator[str]:
    """Texts of the sequences that can be made of known characters, with a new one."""
    for text, points in _compositions():
        if points <= known and not points.isdisjoint(new):
            yield text
            yield f"a{text}b {text}"
            yield text[0] + text[:0:-1] + _ACUTE * (ord(_ACUTE) in known)  # its marks the other way round


def _shown(text: str, limit: int = 60) -> str:
    return ascii(text) if len(text) <= limit else f"{ascii(text[:limit])}... ({len(text)} characters)"


def random_texts(
    known: Collection[int], new: Collection[int], special: Sequence[str], num_texts: int, seed: int
) -> Iterator[str]:
    """Texts of a few scripts each, with white space, digits, punctuation, marks and special tokens in between.

    :param known: their characters; every second script is one of ``new``.
    """
    rng = random.Random(f"asyncdata conformance {SWEEP_VERSION} {seed}")
    scripts, fresh = _scripts(known), _scripts(new)
    scripts += fresh * (len(scripts) // max(1, len(fresh)))
    ascii_words = ["the", "'s", "'LL", "don't", "HTTPServer", "3.14", "1234567", "e.g.", "://", "foo_bar", "\\n", "{}"]
    spaces = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "   "]
    marks = [chr(point) for point in sorted(known) if unicodedata.combining(chr(point))] or ["."]
    for _ in range(num_texts):
        chosen = rng.choices(scripts, k=rng.randint(1, 3))
        pieces: list[str] = []
        for _ in range(rng.randint(1, 40)):
            kind = rng.random()
            if kind < 0.5:
                pieces.append("".join(rng.choices(rng.choice(chosen), k=rng.randint(1, 8))))
            elif kind < 0.65:
                pieces.append(rng.choice(ascii_words))
            elif kind < 0.9:
                pieces.append(rng.choice(spaces))
            elif kind < 0.97 or not special:
                pieces.append(rng.choice("aeio") + "".join(rng.choices(marks, k=rng.randint(1, 3))))
            else:
                pieces.append(rng.choice(special))
        yield "".join(pieces)


def _scripts(points: Iterable[int]) -> list[str]:
    """The characters in runs of 128 code points, nearly all of one script each; ASCII first, and often."""
    runs: dict[int, list[str]] = {}
    for point in sorted(points):
        runs.setdefault(point >> 7, []).append(chr(point))
    scripts = ["".join(run) for run in runs.values()]
    return [*scripts[:1] * (len(scripts) // 4), *scripts]


def _fixed_texts(special: Sequence[str], longest: int) -> Iterator[str]:
    """Fixed texts that must agree: the empty text, long runs, emoji, special tokens."""
    yield ""
    for run in ("a", "A", "1", " ", "\n", "\r\n", "\t", ".", "'", "-", "_", "ab", " a", "a ", "1 ", ". ", " \n", "\n "):
        yield from (run * length for length in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100))
        yield f"x{run * (min(longest, 10_000) // len(run))}y"
    rng = random.Random(f"asyncdata long texts {SWEEP_VERSION}")
    letters, wide = "abcdefghijklmnopqrstuvwxyz", "\u4e2d\u6587\u0436\u00e9\U0001f600\u0e01\u0633"
    yield from ("".join(rng.choices(alphabet, k=longest // 5)) for alphabet in (letters, wide))
    yield "".join(rng.choices([*letters, *wide, " ", "\n", "7", "."], k=longest))
    yield from _EMOJI
    yield from (" ".join(_EMOJI[start : start + 3]) + "!" for start in range(len(_EMOJI)))
    for token in special:
        yield from (token, f" {token} ", f"a{token}b", f"1{token}\n", f"\n{token} {token}{token}", f"{token}'s")
        yield from (
            token[:-1],
            token[1:],
            token[0] + token,
            token.upper(),
            f"{token[:2]} {token[2:]}",
            f"\u00e9{token}",
        )


_EMOJI = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f\u200d\U0001f525",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "1\ufe0f\u20e3",
    "\U0001f9d1\U0001f3fb\u200d\u2764\ufe0f\u200d\U0001f48b\u200d\U0001f9d1\U0001f3ff",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0e19\u0e49\u0e33",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA\u036b",
    "\u05e9\u05c1\u05dc\u05d5\u05b9\u05dd \u200f(\u0645\u0631\u062d\u0628\u0627)\u200e",
)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(islice(left, _BATCH)):
        yield batch


class OffsetCheck:
    """``tokenizers`` as the sweep's reference. It compares its own offsets with those that follow from its ids.

    :param lengths: None: nothing is compared.
    :ivar difference: the first text whose offsets differ; empty if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, lengths: TokenLengths | None) -> None:
        tokenizer.post_processor = None  # it may leave white space out of the offsets
        self._tokenizer = tokenizer
        self._lengths = lengths
        self.difference = ""

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text.

        :raises Exception: whatever the library raises for a text.
        """
        if self._lengths is None or self.difference:
            return flat_ids(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

        import numpy as np

        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        flat = flat_ids(encodings)
        pairs = chain.from_iterable(each.offsets for each in encodings)
        given = np.frombuffer(array("i", chain.from_iterable(pairs)), np.int32)
        # Whether a text is normal takes as long as all the rest. It matters only if its offsets differ.
        starts, stops, borders, known = self._lengths.of_all(texts, flat, lambda _: True)
        differing = np.flatnonzero((given[::2] != starts) | (given[1::2] != stops))
        for number in np.unique(np.searchsorted(borders, differing, "right") - 1).tolist():
            if known[number] and (texts[number].isascii() or self._lengths.is_normal(texts[number])):
                self.difference = f"the offsets of tokens differ in {ascii(texts[number][:60])}"
                break
        return flat


class GrowingProof:
    """The stored proof of ``subject``, or a new one, which is stored; and what lets it grow.

    :ivar proof: what is proven.
    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """

    def __init__(self, files: TokenizerFiles, subject: Subject) -> None:
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
        known = {"proven": points_of(self.proof.proven), "refused": points_of(self.proof.refused)}
        self._sweep = Sweep(self._trusted, tried, special, separator=separator, **known)
        self._sweep.num_texts, self._sweep.num_differences = self.proof.num_texts, self.proof.num_differences
        if before is None:
            self._sweep.begin()
            no_offsets = "" if lengths else "its tokens are not the bytes of the text"
            self._keep(began, around=around, token_lengths=lengths, no_offsets=no_offsets, **self._found())

    def grow(self, points: Collection[int]) -> None:
        """Try characters, unless they were tried before. What is proven is stored as it grows."""
        if self.proof.refusal:
            return

        left = filterfalse((self._sweep.proven | self._sweep.refused).__contains__, points)
        # To store, and to mix with what is proven, takes longer the more is proven: so there is more to try each time.
        while not self.proof.refusal and (some := list(islice(left, max(_STORE_EVERY, len(self._sweep.proven) // 8)))):
            began = time.monotonic()
            self._sweep.grow(some)
            self._keep(began, **self._found())

    def _found(self) -> dict[str, Any]:
        sweep = self._sweep
        return {
            "refusal": sweep.refusal,
            "proven": ranges_of(sweep.proven),
            "refused": ranges_of(sweep.refused),
            "num_texts": sweep.num_texts,
            "num_differences": sweep.num_differences,
        }

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


def require(files: TokenizerFiles, backend: str, *, needs_offsets: bool = False) -> Proof:
    """The proof of a backend that was given by name. If it has none, one is made: see :func:`make`.

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
            f"Use tokenizer_backend='auto' or 'hf'; to have it tried again, remove {subject.path}"
        )

    if not proof.is_usable(needs_offsets=needs_offsets):
        raise ConfigError(
            f"AD434 tokenizer_backend={backend!r} does not tell where the tokens of a text lie, for the tokenizer in "
            f"{files.folder}: {proof.no_offsets}. Use tokenizer_backend='auto' or 'hf'"
        )

    return proof


def make(files: TokenizerFiles, subject: Subject) -> Proof:
    """The proof of ``subject``. If there is none, one of Latin text and the special tokens is made, in 1.6 s of CPU
    for a vocabulary of 151,000.

    Only one process of the machine does that; others wait and use its result.

    :raises ConfigError: if the tokenizer cannot be loaded by ``tokenizers``.
    """
    if (proof := find(subject)) is not None:
        return proof

    with alone("proving"):
        if (proof := find(subject)) is not None:
            return proof

        made = GrowingProof(files, subject)
        made.grow(FIRST)
        return made.proof
