"""Whether a fast backend gives the ids of ``tokenizers``: a sweep over all characters, and over difficult texts.

The split of a text into words depends on the class of each character, and Unicode normalization also on its neighbours.
So the sweep tries every character that this Python knows, alone and next to letters, digits, spaces, line ends, quotes
and marks; every Unicode decomposition of a character; every special token in text; long runs; and random texts. A
character that causes a difference anywhere is never given to the backend. If no character explains a difference, the
backend is refused as a whole.

Every part of the sweep is the same for the same seed: it depends on the tokenizer, the backend and Unicode alone.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import unicodedata
from array import array
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.platform import end_with_parent
from asyncdata.tokenization.encoders.character_sets import complement, ranges_of, unknown_characters
from asyncdata.tokenization.encoders.fast_backends import SWEEP_VERSION, one_by_one
from asyncdata.tokenization.encoders.hf_encoder import flat_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from tokenizers import Tokenizer

    from asyncdata.tokenization.encoders.character_sets import Ranges
    from asyncdata.tokenization.encoders.fast_backends import FlatEncoder, FlatIds
    from asyncdata.tokenization.encoders.hf_encoder import TokenLengths

__all__ = ("NUM_COMMON_TEXTS", "OffsetCheck", "common_points", "sweep")


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

COMMON = ((0, 0x600), (0x2000, 0x2400))
"""The characters that are proven first, in 2.5 s of CPU, as ranges: of the languages that are written in Latin, Greek,
Cyrillic, Armenian and Hebrew letters, and of mathematics."""

NUM_RANDOM_TEXTS = 12_000
NUM_COMMON_TEXTS = 3000
"""Random texts of common characters: of each script there are more than among the others."""
LONGEST_TEXT = 100_000
_BATCH = 2048
_ASCII = 0x80
_ROUNDS = 3


class Findings(NamedTuple):
    """The result of a sweep.

    :ivar refusal: why the backend cannot be used at all; empty if it can.
    :ivar exceptions: the characters whose texts it must not get.
    :ivar num_texts: how many texts were compared.
    :ivar num_differences: how many of them had other ids.
    """

    refusal: str
    exceptions: Ranges
    num_texts: int
    num_differences: int


class _Comparison:
    """Encodes texts with both, and counts."""

    def __init__(self, trusted: FlatEncoder, tried: FlatEncoder) -> None:
        self._trusted = trusted
        self._tried = tried
        self.num_texts = 0
        self.num_differences = 0

    def differing(self, texts: Sequence[str]) -> list[int]:
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

    def findings(self, refusal: str, exceptions: Ranges | None = None) -> Findings:
        """The result of the sweep, with the counts of all comparisons."""
        return Findings(refusal, exceptions or [], self.num_texts, self.num_differences)


def sweep(
    trusted: OffsetCheck,
    tried: FlatEncoder,
    special: Sequence[str],
    *,
    separator: str | None = None,
    code_points: Sequence[int] | None = None,
    num_processes: int = 1,
    num_random_texts: int = NUM_RANDOM_TEXTS,
    longest_text: int = LONGEST_TEXT,
    progress: Callable[[str, float], object] = no_op,
) -> Findings:
    """Compare ``tried`` with ``trusted``.

    :param special: the tokenizer's added tokens, as text.
    :param separator: an added token that splits a text before all other steps. The ids on one side do not depend on the
        other side, so all contexts of a character can be one text, which takes less time.
    :param code_points: the characters to try; None: all that this Python's Unicode knows.
    :param num_processes: how many processes try the characters; if several, this one must have a single thread.
    :param longest_text: in characters.
    :param progress: told the part of the sweep, and how much of it is done.
    """
    compare = _Comparison(trusted, tried)
    points = known_points() if code_points is None else list(code_points)

    def part(number: int) -> bytes:
        bad = _characters(compare, points[number::num_processes], separator, no_op)
        found = _Part(sorted(bad), compare.num_texts, compare.num_differences, trusted.difference)
        return msgspec.msgpack.encode(found)

    others = ForkedParts(num_processes, part)  # before this process encodes: that may start threads
    fixed = list(_fixed_texts(special, longest_text))
    if refusal := _refusal(compare, filter(str.isascii, fixed)):
        return compare.findings(refusal)

    bad = _characters(compare, points[::num_processes], separator, progress)
    for data in others.results():
        found = msgspec.msgpack.decode(data, type=_Part)
        bad.update(found.bad)
        compare.num_texts += found.num_texts
        compare.num_differences += found.num_differences
        trusted.difference = trusted.difference or found.offset_difference
    bad |= _sequences(compare, points, bad)
    if len(bad) == len(points):
        return compare.findings("its ids differ for all characters")

    refusal = _refusal(compare, _without_bad(fixed, points, bad))
    refusal = refusal or _random_rounds(compare, points, bad, special, num_random_texts, progress)
    return compare.findings(refusal, complement(ranges_of(point for point in points if point not in bad)))


class _Part(NamedTuple):
    """What one process found of its part of the characters; the first three as in :class:`Findings`."""

    bad: list[int]
    num_texts: int
    num_differences: int
    offset_difference: str


def known_points() -> list[int]:
    """All characters that this Python's Unicode knows."""
    return [point for start, stop in complement(unknown_characters()) for point in range(start, stop)]


def common_points() -> list[int]:
    """Those of them that are proven first."""
    points = (point for start, stop in COMMON for point in range(start, stop))
    return [point for point in points if unicodedata.category(chr(point)) != "Cn"]


def _refusal(compare: _Comparison, texts: Iterable[str]) -> str:
    """A message with the first text on which the two differ; empty if there is none."""
    for batch in _batches(texts):
        if numbers := compare.differing(batch):
            return f"its ids differ on {_shown(batch[numbers[0]])}"

    return ""


def _without_bad(texts: Iterable[str], points: Sequence[int], bad: set[int]) -> Iterator[str]:
    """The texts that are not pure ASCII, without the characters that the backend never gets."""
    good = {chr(point) for point in points if point not in bad}.union(map(chr, range(_ASCII)))
    yield from ("".join(filter(good.__contains__, text)) for text in texts if not text.isascii())


def _shown(text: str, limit: int = 60) -> str:
    return ascii(text) if len(text) <= limit else f"{ascii(text[:limit])}... ({len(text)} characters)"


def _characters(
    compare: _Comparison, points: Sequence[int], separator: str | None, progress: Callable[[str, float], object]
) -> set[int]:
    """The characters that show a difference in any context."""
    # A character alone is always its own text: the end of a text may act differently from a separator.
    contexts = _usable_contexts(compare)
    layouts = contexts if separator is None else ("{c}", " {c}", separator.join((*contexts, "{c}")))
    bad: set[int] = set()
    for begin in range(0, len(points), _BATCH):
        progress("characters", begin / len(points))
        part = points[begin : begin + _BATCH]
        for layout in layouts:
            texts = [layout.replace("{c}", chr(point)) for point in part]
            bad.update(part[number] for number in compare.differing(texts))
    ascii_points = sorted(point for point in bad if point < _ASCII)
    bad.difference_update(ascii_points)
    return bad | _beside_ascii(compare, ascii_points, contexts)


def _beside_ascii(compare: _Comparison, points: Sequence[int], contexts: Sequence[str]) -> set[int]:
    """The characters to blame if a text with an ASCII character differs: a neighbour that is not ASCII, if there is
    one.

    Without an ASCII character hardly any text could be encoded; without a rare mark nearly all texts can.
    """
    texts = [context.replace("{c}", chr(point)) for point in points for context in contexts]
    return {max(map(ord, texts[number])) for number in compare.differing(texts)}


def _usable_contexts(compare: _Comparison) -> list[str]:
    """The contexts whose own characters agree. A wrong neighbour would make every character look wrong."""
    agreeing = {context for context in CONTEXTS if not compare.differing([context.replace("{c}", "x")])}
    return [context for context in CONTEXTS if context.isascii() or context in agreeing]


def _sequences(compare: _Comparison, points: Sequence[int], bad: set[int]) -> set[int]:
    """The characters whose Unicode decomposition differs: the highest code point of each such sequence."""
    known = set(points) - bad
    found: set[int] = set()
    for batch in _batches(_decomposed(known)):
        found.update(max(map(ord, batch[number])) for number in compare.differing(batch))
    return found


def _decomposed(known: set[int]) -> Iterator[str]:
    for point in sorted(known):
        text = unicodedata.normalize("NFD", chr(point))
        if len(text) > 1 and known.issuperset(map(ord, text)):
            yield text
            yield f"a{text}b {text}"
            yield text[0] + text[:0:-1] + "\u0301"  # its marks the other way round


def _random_rounds(
    compare: _Comparison,
    points: Sequence[int],
    bad: set[int],
    special: Sequence[str],
    num_texts: int,
    progress: Callable[[str, float], object],
) -> str:
    """Test random texts of the remaining characters. If a text differs, one of its characters must explain it.

    These characters are added to ``bad``; the last round must find no difference.
    """
    differing: list[str] = []
    for number in range(_ROUNDS):
        progress("random texts", number / _ROUNDS)
        texts = random_texts([point for point in points if point not in bad], special, num_texts, seed=number)
        differing = [batch[found] for batch in _batches(texts) for found in compare.differing(batch)]
        if not differing:
            return ""

        for text in differing:
            to_blame = _to_blame(compare, text)
            if to_blame is None:
                return f"its ids differ on {_shown(text)}, which no single character explains"

            bad.add(to_blame)
    return f"its ids differ on {_shown(differing[0])}, after {_ROUNDS} rounds of leaving characters out"


def _to_blame(compare: _Comparison, text: str) -> int | None:
    """The character without which the two agree; never an ASCII character, which nearly every text needs."""
    for point in sorted(set(map(ord, text)), reverse=True):
        if point < _ASCII:
            return None

        if not compare.differing([text.replace(chr(point), "")]):
            return point

    return None


def random_texts(points: Sequence[int], special: Sequence[str], num_texts: int, seed: int) -> Iterator[str]:
    """Texts of a few scripts each, with white space, digits, punctuation, marks and special tokens in between."""
    rng = random.Random(f"asyncdata conformance {SWEEP_VERSION} {seed}")
    scripts = _scripts(points)
    ascii_words = ["the", "'s", "'LL", "don't", "HTTPServer", "3.14", "1234567", "e.g.", "://", "foo_bar", "\\n", "{}"]
    spaces = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "   "]
    marks = [chr(point) for point in points if unicodedata.combining(chr(point))] or ["."]
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


def _scripts(points: Sequence[int]) -> list[str]:
    """The characters in runs of 128 code points, nearly all of one script each; those of ASCII first, and often."""
    runs: dict[int, list[str]] = {}
    for point in points:
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


class ForkedParts:
    """Forks a process for each part but the first, which is the caller's own.

    The process must have one thread. The others end with it, as they end with the thread that forked them.

    :param num_parts: the first among them.
    :param work: makes the result of a part, by its number.
    :raises OSError: if the system has no room for one more process.
    """

    def __init__(self, num_parts: int, work: Callable[[int], bytes]) -> None:
        context = multiprocessing.get_context("fork")
        self._parts = []
        for number in range(1, num_parts):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(os.getpid(), theirs, number, work), daemon=True)
            process.start()
            theirs.close()
            self._parts.append((process, ours))

    def results(self) -> list[bytes]:
        """What the other processes made, once they have ended.

        :raises ChildProcessError: if one of them has failed.
        """
        found, statuses = [], []
        for process, pipe in self._parts:
            with suppress(EOFError), pipe:
                found.append(pipe.recv_bytes())
            process.join()
            statuses.append(process.exitcode)
        if any(statuses):
            raise ChildProcessError(f"processes of a proof have failed: exit statuses {statuses}")

        return found


def _work(parent: int, pipe: Connection, number: int, work: Callable[[int], bytes]) -> None:
    end_with_parent(parent)
    pipe.send_bytes(work(number))
