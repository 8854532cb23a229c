"""Chats for SFT, made as :mod:`tests.benchmarks.inputs` makes prompts: several turns, lengths as real data has them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from tests.benchmarks.inputs import words_of_docstrings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("chats",)

_MEAN_LOG_WORDS, _SIGMA_LOG_WORDS = 4.1, 0.9
"""Words of a chat are lognormal: 90 on average, rows of about 800 bytes."""

_MOST_WORDS = 1200
"""No chat is as long as a pack of 4096 tokens: what the contestants do with those differs."""


def chats(folder: Path, num_rows: int) -> Path:
    """A JSONL file of so many rows ``{"messages": [...]}``; made once, and kept in ``folder``."""
    path = folder / f"fresh_chats_{num_rows}.jsonl"
    if path.exists():
        return path

    folder.mkdir(parents=True, exist_ok=True)
    rng, words = random.Random(0), words_of_docstrings()
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"messages": _messages(rng, words)}).encode() + b"\n")
    temporary.rename(path)
    return path


def _messages(rng: random.Random, words: list[str]) -> list[dict[str, str]]:
    """One to four turns: a question, and an answer three times as long; one chat in five has a system message."""
    num_words = min(int(rng.lognormvariate(_MEAN_LOG_WORDS, _SIGMA_LOG_WORDS)), _MOST_WORDS)
    num_turns = rng.randint(1, 4)
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": _text(rng, words, 12)})
    for _ in range(num_turns):
        messages.append({"role": "user", "content": _text(rng, words, num_words // (4 * num_turns))})
        messages.append({"role": "assistant", "content": _text(rng, words, 3 * num_words // (4 * num_turns))})
    return messages


def _text(rng: random.Random, words: list[str], num_words: int) -> str:
    start = rng.randrange(len(words) - num_words)
    return " ".join(words[start : start + max(num_words, 1)])
