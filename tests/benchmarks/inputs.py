"""Inputs of any size, made from the standard library's docstrings and sources: the same wherever the Python is.

The text is fresh: rows are spans of running words, put together at random, with numbers and words that occur once. A
tokenizer that remembers words would be too fast on text that repeats itself, and so would its raw limit be. Each file
is made once, and kept in its folder.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

MAX_FRESH_MB = 500
"""Larger files repeat one of 50 MB: what they are for is their size, and nothing's speed is taken on their text."""

_REPEATED_MB = 50
_SOURCE_SHARE, _NUMBER_SHARE, _COINED_SHARE = 0.1, 0.15, 0.1
"""Of the spans: those of source code; followed by a number; by a word that was made up."""

_SPANS = (2, 22)
_WORDS = (4, 18)
"""Of a row, and of a span: rows have 860 bytes on average, as the RL prompts of the project's notes."""

_MEAN_LOG_WORDS, _SIGMA_LOG_WORDS, _MOST_WORDS = 4.1, 0.9, 1200
"""Words of a chat for SFT are lognormal: 90 on average, rows of about 800 bytes. No chat is as long as a pack of 4096
tokens: what the contestants do with those differs."""


@cache
def _words() -> tuple[list[str], list[str]]:
    """The running words of the standard library: of its docstrings, and of its sources."""
    docstrings, sources = [], []
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if left_out & set(path.relative_to(root).parts):
            continue

        text = path.read_text(encoding="utf-8", errors="replace")
        sources += text.split()
        tree = ast.parse(text)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        for node in [tree, *(node for node in ast.walk(tree) if isinstance(node, kinds))]:
            docstrings += (ast.get_docstring(node) or "").split()
    return docstrings, sources


def _text(rng: random.Random) -> str:
    docstrings, sources = _words()
    parts = []
    for _ in range(rng.randrange(*_SPANS)):
        running = sources if rng.random() < _SOURCE_SHARE else docstrings
        start, length = rng.randrange(len(running) - _WORDS[1]), rng.randrange(*_WORDS)
        parts += running[start : start + length]
        if rng.random() < _NUMBER_SHARE:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 8))))
        if rng.random() < _COINED_SHARE:
            # The beginning of a word and the end of another: new pieces come up in a text of any length.
            first, second = rng.choice(docstrings), rng.choice(docstrings)
            parts.append(first[: rng.randrange(1, len(first) + 1)] + second[rng.randrange(len(second)) :])
    return " ".join(parts)


def made(path: Path, pieces: Iterable[bytes], num_megabytes: float = float("inf")) -> Path:
    """The file, of so many bytes at least or of all pieces, if it is not there yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, size = path.with_suffix(".part"), 0
        with temporary.open("wb") as file:
            for piece in pieces:
                size += file.write(piece)
                if size >= num_megabytes * 1_000_000:
                    break
        temporary.rename(path)
    return path


def _lines(rows: Iterable[Any]) -> Iterator[bytes]:
    return (json.dumps(row).encode() + b"\n" for row in rows)


def prompts(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of RL prompts of about 860 bytes a row."""
    path, rng = folder / f"fresh_{num_megabytes}mb.jsonl", random.Random(0)
    if num_megabytes > MAX_FRESH_MB and not path.exists():
        data = prompts(folder, _REPEATED_MB).read_bytes()
        return made(path, (data for _ in range(num_megabytes * 1_000_000 // len(data))))

    rows = (
        {"input": _text(rng), "label": str(number % 97), "metadata": {"number": number, "source": "docstrings"}}
        for number in count()
    )
    return made(path, _lines(rows), num_megabytes)


_ALPHABETS = {"russian": (0x430, 32), "greek": (0x3B1, 17), "hebrew": (0x5D0, 27), "arabic": (0x627, 20)}
_ALPHABETS |= {"hindi": (0x915, 37), "thai": (0xE01, 46)}
_WORD_SIGNS = {"chinese": (0x4E00, 4000), "korean": (0xAC00, 2350)}
LANGUAGES = ("english", *_ALPHABETS, *_WORD_SIGNS)


def _translated(text: str, language: str) -> str:
    """As long and as repetitive a text, in the characters of another language: letter by letter, or word by word."""
    if language in _WORD_SIGNS:
        first, number = _WORD_SIGNS[language]
        return "".join(chr(first + crc32(word.encode()) % number) for word in text.split())

    first, number = _ALPHABETS.get(language, (ord("a"), 26))
    return text.lower().translate({ord("a") + letter: first + letter % number for letter in range(26)})


def languages(folder: Path, num_megabytes: int, names: tuple[str, ...]) -> Path:
    """A JSONL file of RL prompts, each in one of these languages."""
    rng = random.Random(0)
    rows = ({"input": _translated(_text(rng), rng.choice(names)), "label": "1"} for _ in count())
    name = names[0] if len(names) == 1 else f"{len(names)}_languages"
    return made(folder / f"{name}_{num_megabytes}mb.jsonl", _lines(rows), num_megabytes)


def chats(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of chats of four turns, about 1,750 bytes a row."""
    rng, roles = random.Random(0), ("user", "assistant", "user", "assistant")
    rows = ({"messages": [{"role": role, "content": _text(rng)[:800]} for role in roles]} for _ in count())
    return made(folder / f"chats_{num_megabytes}mb.jsonl", _lines(rows), num_megabytes)


def long_contexts(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of rows as BABILong's, with contexts of 160,000 characters: more than 32,768 tokens."""
    rng, question = random.Random(0), {"question": "Where is Mary?", "target": "garden"}
    rows = ({"input": " ".join(_text(rng) for _ in range(200))[:160_000], **question} for _ in count())
    return made(folder / f"long_{num_megabytes}mb.jsonl", _lines(rows), num_megabytes)


def sft_chats(folder: Path, num_rows: int) -> Path:
    """A JSONL file of chats for SFT: several turns, lengths as real data has them."""
    rng = random.Random(0)
    rows = ({"messages": _messages(rng)} for _ in range(num_rows))
    return made(folder / f"fresh_chats_{num_rows}.jsonl", _lines(rows))


def _messages(rng: random.Random) -> list[dict[str, str]]:
    """One to four turns: a question, and an answer three times as long; one chat in five has a system message."""
    words, _ = _words()

    def said(role: str, num_words: int) -> dict[str, str]:
        start = rng.randrange(len(words) - num_words)
        return {"role": role, "content": " ".join(words[start : start + max(num_words, 1)])}

    num_words = min(int(rng.lognormvariate(_MEAN_LOG_WORDS, _SIGMA_LOG_WORDS)), _MOST_WORDS)
    num_turns = rng.randint(1, 4)
    messages = [said("system", 12)] if rng.random() < 0.2 else []
    for _ in range(num_turns):
        messages.append(said("user", num_words // (4 * num_turns)))
        messages.append(said("assistant", 3 * num_words // (4 * num_turns)))
    return messages


def fuzzed(folder: Path, num_rows: int, special_tokens: list[str]) -> Path:
    """A JSONL file of texts that no one writes: every script, combining marks, broken words, special tokens."""
    path, rng = folder / f"fuzzed_{num_rows}.jsonl", random.Random(0)
    path.unlink(missing_ok=True)  # of other special tokens
    texts = ("".join(_piece(rng, special_tokens) for _ in range(rng.randrange(1, 40))) for _ in range(num_rows))
    rows = ({"input": text, "label": str(number)} for number, text in enumerate(texts))
    return made(path, _lines(rows))


def _piece(rng: random.Random, special_tokens: list[str]) -> str:
    kind = rng.randrange(6)
    if kind == 0 and special_tokens:
        return rng.choice(special_tokens)

    if kind == 1:
        return rng.choice(" \t\n\r'.,-_") * rng.randrange(1, 12)

    if kind == 2:
        return rng.choice(_words()[0])

    first, last = (0x20, 0x2FFF) if kind == 3 else (0x20, 0x1FFFF) if kind == 4 else (0x300, 0x36F)
    points = (rng.randrange(first, last) for _ in range(rng.randrange(1, 6)))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
