"""Sets of characters as ranges of code points, and a search for texts with other characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

Ranges = list[tuple[int, int]]
"""Half-open ranges of code points: sorted, disjoint and not adjacent."""

NUM_CODE_POINTS = 0x110000
NUM_PUBLIC = 0xF0000
"""The planes from here on are private."""
_ASCII = 0x80


def ranges_of(code_points: Iterable[int]) -> Ranges:
    """The ranges that make up a set of code points."""
    ranges: Ranges = []
    for point in sorted(set(code_points)):
        if ranges and ranges[-1][1] == point:
            ranges[-1] = (ranges[-1][0], point + 1)
        else:
            ranges.append((point, point + 1))
    return ranges


def num_points(ranges: Iterable[tuple[int, int]]) -> int:
    """How many code points ranges have."""
    return sum(stop - start for start, stop in ranges)


def points_of(ranges: Iterable[tuple[int, int]]) -> set[int]:
    """The code points of ranges."""
    return {point for start, stop in ranges for point in range(start, stop)}


def is_known(point: int) -> bool:
    """Whether a sweep can prove a character: not surrogates, private planes, and what this Python does not know.

    Libraries of different ages differ on characters that are newer than one of them; how two such characters combine
    no sweep over single ones would show.
    """
    return point < NUM_PUBLIC and unicodedata.category(chr(point)) not in ("Cn", "Cs")


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
