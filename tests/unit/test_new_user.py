"""A new user comes from README.md to a training loop of their own framework in at most three pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MAX_PAGES = 3
HOW_TO = sorted(
    page
    for page in (ROOT / "docs" / "how-to").glob("*.md")
    if re.match(r"use-it-with-|train-with-torch|move-a-slime-run", page.name)
)
_INSTALL = re.compile(r'`pip install "path/to/asyncdata\[fast\]"`')
_LOOP = re.compile(r"^```(?:py|python|sh|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def linked_from(page: Path) -> set[Path]:
    """The pages and programs that a page has links to."""
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def programs_of(page: Path) -> list[Path]:
    """The programs to copy that a page leads to."""
    return sorted(
        found for found in linked_from(page) if found.suffix == ".py" and found.is_relative_to(ROOT / "examples")
    )


def pages_to_read(page: Path) -> list[Path]:
    """What is read on the way to a loop that runs: README.md, the how-to, and what it needs or offers to copy."""
    path = [README, page] if page in linked_from(README) else [README, ROOT / "docs" / "index.md", page]
    if programs := programs_of(page):
        return [*path, programs[0]]

    first = next(block for block in _LOOP.findall(page.read_text(encoding="utf-8")) if "asyncdata" in block)
    return [*path, *([ROOT / "docs" / "tutorial" / "first-loader.md"] if "tokenizer" in first else [])]


def test_the_frameworks_are_found() -> None:
    names = {page.stem.removeprefix("use-it-with-") for page in HOW_TO}

    assert {"move-a-slime-run", "train-with-torch", "trl", "verl"} < names
    assert len(names) >= 13


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_training_loop_is_at_most_three_pages_away_and_can_be_installed_and_started(page: Path) -> None:
    path, text = pages_to_read(page), page.read_text(encoding="utf-8")
    assert len(path) <= MAX_PAGES, [str(each.relative_to(ROOT)) for each in path]
    assert all(each.is_file() for each in path)

    installs, parts = _INSTALL.search(text), [found.start() for found in re.finditer(r"^## ", text, re.MULTILINE)]
    assert installs is not None
    assert installs.start() < [*parts, len(text), len(text)][1], "it says how to install before its second part"

    for program in programs_of(page):
        code = program.read_text(encoding="utf-8")
        assert "asyncdata" in code, program
        assert "__main__" in code, program
