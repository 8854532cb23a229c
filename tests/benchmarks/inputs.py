"""Inputs of any size, made from the standard library's docstrings: fresh text, the same wherever the Python is."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from pathlib import Path

__all__ = ("prompts",)

_WORDS_PER_SENTENCE = 14


def _sentences() -> list[str]:
    """Word sequences of the docstrings, cut to sentences of equal length."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        nodes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))]
        for node in nodes:
            words += (ast.get_docstring(node) or "").split()
    starts = range(0, len(words) - _WORDS_PER_SENTENCE, _WORDS_PER_SENTENCE)
    return [" ".join(words[start : start + _WORDS_PER_SENTENCE]) + ". " for start in starts]


def prompts(folder: Path, num_megabytes: int) -> Path:
    """A JSONL file of RL prompts of about 860 bytes a row; made once, and kept in ``folder``."""
    path = folder / f"prompts_{num_megabytes}mb.jsonl"
    if path.exists():
        return path

    folder.mkdir(parents=True, exist_ok=True)
    if num_megabytes > 100:  # the text may repeat: what large files are for is their size
        _repeat(prompts(folder, 50), path, num_megabytes)
        return path

    rng, sentences, size, number = random.Random(0), _sentences(), 0, 0
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        while size < num_megabytes * 1_000_000:
            text = "".join(rng.choices(sentences, k=rng.randrange(2, 16)))
            row = {"input": text, "label": str(number % 97), "metadata": {"number": number, "source": "docstrings"}}
            size += file.write(json.dumps(row).encode() + b"\n")
            number += 1
    temporary.rename(path)
    return path


def _repeat(source: Path, path: Path, num_megabytes: int) -> None:
    data = source.read_bytes()
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        for _ in range(num_megabytes * 1_000_000 // len(data)):
            file.write(data)
    temporary.rename(path)
