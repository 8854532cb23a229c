"""Inputs of any size, made from the standard library's docstrings and sources: the same wherever the Python is.

The text is fresh: rows are spans of running words, put together at random, with numbers and words that occur once. A
tokenizer that remembers words would be too fast on text that repeats itself, and so would its raw limit be.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("MAX_FRESH_MB", "chats", "fuzzed", "long_contexts", "prompts", "words_of_docstrings")

MAX_FRESH_MB = 500
"""Larger files repeat one of 50 MB: what they are for is their size, and nothing's speed is taken on their text."""

_REPEATED_MB = 50
_SOURCE_SHARE, _NUMBER_SHARE, _COINED_SHARE = 0.1, 0.15, 0.1
"""Of the spans: those of source code; followed by a number; by a word that was made up."""

_SPANS = (2, 22)
_WORDS = (4, 18)
"""Of a row, and of a span: rows have 860 bytes on average, as the RL prompts of the project's notes."""


class _Words(NamedTuple):
    docstrings: list[str]
    sources: list[str]


@cache
def _words() -> _Words:
    """The running words of the standard library: of its docstrings, and of its sources."""
    docstrings: list[str] = []
    sources: list[str] = []
    for path in _modules():
        text = path.read_text(encoding="utf-8", errors="replace")
        sources += text.split()
        tree = ast.parse(text)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        for node in [tree, *(node for node in ast.walk(tree) if isinstance(node, kinds))]:
            docstrings += (ast.get_docstring(node) or "").split()
    return _Words(docstrings, sources)


def _modules() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not left_out & set(path.relative_to(root).parts):
            yield path


def words_of_docstrings() -> list[str]:
    """The running words of the standard library's docstrings."""
    return _words().docstrings


def prompts(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of RL prompts of about 860 bytes a row; made once, and kept in ``folder``."""
    path = folder / f"fresh_{num_megabytes}mb.jsonl"
    if path.exists():
        return path

    folder.mkdir(parents=True, exist_ok=True)
    if num_megabytes > MAX_FRESH_MB:
        _repeat(prompts(folder, _REPEATED_MB), path, num_megabytes)
        return path

    rng, size, number = random.Random(0), 0, 0
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        while size < num_megabytes * 1_000_000:
            row = {
                "input": _text(rng),
                "label": str(number % 97),
                "metadata": {"number": number, "source": "docstrings"},
            }
            size += file.write(json.dumps(row).encode() + b"\n")
            number += 1
    temporary.rename(path)
    return path


def _text(rng: random.Random) -> str:
    words, parts = _words(), []
    for _ in range(rng.randrange(*_SPANS)):
        running = words.sources if rng.random() < _SOURCE_SHARE else words.docstrings
        start, length = rng.randrange(len(running) - _WORDS[1]), rng.randrange(*_WORDS)
        parts += running[start : start + length]
        if rng.random() < _NUMBER_SHARE:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 8))))
        if rng.random() < _COINED_SHARE:
            parts.append(_coined(rng, words.docstrings))
    return " ".join(parts)


def _coined(rng: random.Random, words: list[str]) -> str:
    """The beginning of a word and the end of another: new pieces come up in any text, however long it is already."""
    first, second = rng.choice(words), rng.choice(words)
    return first[: rng.randrange(1, len(first) + 1)] + second[rng.randrange(len(second)) :]


def _repeat(source: Path, path: Path, num_megabytes: int) -> None:
    data = source.read_bytes()
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        for _ in range(num_megabytes * 1_000_000 // len(data)):
            file.write(data)
    temporary.rename(path)


def chats(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of chats of four turns, about 1,750 bytes a row; made once, and kept in ``folder``."""
    path, rng = folder / f"chats_{num_megabytes}mb.jsonl", random.Random(0)
    if not path.exists():
        roles = ("user", "assistant", "user", "assistant")
        rows = ({"messages": [{"role": role, "content": _text(rng)[:800]} for role in roles]} for _ in count())
        _write(path, rows, num_megabytes)
    return path


def long_contexts(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of rows as BABILong's, with contexts of 160,000 characters: more than 32,768 tokens."""
    path, rng = folder / f"long_{num_megabytes}mb.jsonl", random.Random(0)
    if not path.exists():
        question = {"question": "Where is Mary?", "target": "garden"}
        rows = ({"input": " ".join(_text(rng) for _ in range(200))[:160_000], **question} for _ in count())
        _write(path, rows, num_megabytes)
    return path


def _write(path: Path, rows: Iterator[dict[str, Any]], num_megabytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, size = path.with_suffix(".part"), 0
    with temporary.open("wb") as file:
        while size < num_megabytes * 1_000_000:
            size += file.write(json.dumps(next(rows)).encode() + b"\n")
    temporary.rename(path)


def fuzzed(folder: Path, num_rows: int, special_tokens: list[str]) -> Path:
    """A JSONL file of texts that no one writes: every script, combining marks, broken words, special tokens."""
    path = folder / f"fuzzed_{num_rows}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            text = "".join(_piece(rng, special_tokens) for _ in range(rng.randrange(1, 40)))
            file.write(json.dumps({"input": text, "label": str(number)}) + "\n")
    return path


def _piece(rng: random.Random, special_tokens: list[str]) -> str:
    kind = rng.randrange(6)
    if kind == 0 and special_tokens:
        return rng.choice(special_tokens)

    if kind == 1:
        return rng.choice(" \t\n\r'.,-_") * rng.randrange(1, 12)

    if kind == 2:
        return rng.choice(_words().docstrings)

    first, last = (0x20, 0x2FFF) if kind == 3 else (0x20, 0x1FFFF) if kind == 4 else (0x300, 0x36F)
    points = (rng.randrange(first, last) for _ in range(rng.randrange(1, 6)))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
