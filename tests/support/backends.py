"""Fast backends that are wrong where a test says so."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from asyncdata.loader import proving
from asyncdata.tokenization.encoders import equivalence_records, equivalence_sweep, fast_backends
from asyncdata.tokenization.encoders.fast_backends import FlatIds
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder

if TYPE_CHECKING:
    import pytest
    from tokenizers import Tokenizer

FEW = (9, 10, 13, *range(0x20, 0x7F), *range(0xDE, 0x102), 0x301, 0x323, *range(0x410, 0x418), 0x4E2D, 0xAC01, 0x1F600)
"""The characters of a short sweep."""


class Fake:
    """Gives the ids of ``tokenizers``, but for texts that are ``wrong``: those lose their last id, or raise."""

    def __init__(self, tokenizer: Tokenizer, wrong: Callable[[str], bool], *, raises: bool = False) -> None:
        self._right = HfEncoder(tokenizer)
        self._wrong = wrong
        self._raises = raises
        self.num_texts = 0

    def __call__(self, texts: list[str]) -> FlatIds:
        self.num_texts += len(texts)
        is_wrong = [self._wrong(text) for text in texts]
        if self._raises and any(is_wrong):
            raise ValueError("no such text")

        found = self._right(texts)
        if not any(is_wrong):
            return found

        pieces = [ids[:-4] if wrong else ids for ids, wrong in zip(found.of_each(), is_wrong, strict=True)]
        ends, end = array("I"), 0
        for piece in pieces:
            end += len(piece) // 4
            ends.append(end)
        return fast_backends.FlatIds(b"".join(pieces), ends)


def install(
    monkeypatch: pytest.MonkeyPatch,
    encoders: dict[str, Callable[[], fast_backends.FlatEncoder]],
    points: Iterable[int] = FEW,
) -> dict[str, int]:
    """Make ``encoders`` the fast backends that are installed, and sweeps short ones that begin with ``points``.

    :return: how often each was loaded.
    """
    loads = dict.fromkeys(encoders, 0)

    def load(name: str, _json: bytes, *, splits_special: bool = False) -> fast_backends.FlatEncoder:
        loads[name] += 1
        return encoders[name]()

    for module in (fast_backends, equivalence_records):
        monkeypatch.setattr(module, "version_of", lambda name: "1.0" if name in encoders else None)
    for module in (fast_backends, equivalence_sweep):
        monkeypatch.setattr(module, "load_backend", load)
    shorten(monkeypatch, points)
    return loads


def shorten(monkeypatch: pytest.MonkeyPatch, points: Iterable[int], longest_text: int = 500) -> None:
    """Make sweeps short, which begin with these characters."""
    for module in (equivalence_sweep, proving):
        monkeypatch.setattr(module, "FIRST", list(points))
    monkeypatch.setattr(equivalence_sweep, "NUM_RANDOM_TEXTS", 100)
    monkeypatch.setattr(equivalence_sweep, "LONGEST_TEXT", longest_text)
