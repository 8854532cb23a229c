"""Rows for the training examples, made of the docstrings of Python's standard library; the same ones every time."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

from asyncdata.demo import docstring_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

PEOPLE, PLACES = "Mary John Sandra Daniel".split(), "bathroom bedroom garden hallway kitchen office".split()
MOVES = ["moved to", "went to", "journeyed to", "travelled to", "went back to"]


def write_chats(path: Path, num_rows: int) -> None:
    """``{"messages": [...]}``: a question about a docstring, and its answer; every third asks a second one."""
    write_rows(path, chats(num_rows))


def write_babilong(path: Path, num_rows: int, num_words: int) -> None:
    """``{"input", "question", "target"}``, as BABILong has it: facts of bAbI's first task, spread in other text."""
    write_rows(path, stories(num_rows, num_words))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def chats(num_rows: int) -> Iterator[dict[str, Any]]:
    for number, row in zip(range(num_rows), docstring_prompts(), strict=False):
        _, _, text = row["input"].partition("\n\n")
        messages = [turn("user", f"What is {row['label']}?"), turn("assistant", " ".join(text.split()[:60]))]
        if number % 3 == 0:
            kind = row["metadata"]["kind"]
            messages += [turn("user", "Is it a class?"), turn("assistant", f"It is a {kind}.")]
        yield {"messages": messages}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def stories(num_rows: int, num_words: int) -> Iterator[dict[str, Any]]:
    """The answer is where the one who is asked for went last."""
    sentences = list(prose(1500))
    for number in range(num_rows):
        draw = random.Random(number)
        facts = [(draw.choice(PEOPLE), draw.choice(PLACES)) for _ in range(2)]
        text: list[str] = []
        while sum(map(len, map(str.split, text))) < num_words:
            text.append(draw.choice(sentences))
        spots = sorted(draw.sample(range(len(text) + 1), len(facts)), reverse=True)
        for spot, (person, place) in zip(spots, reversed(facts), strict=True):
            text.insert(spot, f"{person} {draw.choice(MOVES)} the {place}.")
        person = draw.choice(facts)[0]
        yield {"input": " ".join(text), "question": f"Where is {person}?", "target": dict(facts)[person]}


def prose(num_sentences: int) -> Iterator[str]:
    """Sentences of docstrings that are plain words."""
    for _, row in zip(range(num_sentences), docstring_prompts(), strict=False):
        first = " ".join(row["input"].partition("\n\n")[2].split()).partition(". ")[0]
        if re.fullmatch(r"[A-Z][\w ,']{10,80}", first):
            yield f"{first}."
