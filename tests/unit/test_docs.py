"""README.md and docs/: every example runs and prints what its page says, and what the reference lists is all there is."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import json
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import structlog

import asyncdata
from asyncdata import AsyncDataLoader, AsyncDataError, DataLoader, LoaderConfig, Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FIRST_SCREEN_LINES = 40
HOME = "/home/me"
"""What the pages call the folder that their examples run in."""


class Block(NamedTuple):
    """A fenced block of a page. ``line`` is that of its first line of content, ``end`` that of its closing fence."""

    language: str
    text: str
    line: int
    end: int


def blocks_of(page: Path) -> list[Block]:
    blocks, opened, lines = [], 0, page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue

        if opened:
            text = "".join(f"{content}\n" for content in lines[opened : number - 1])
            blocks.append(Block(lines[opened - 1][3:].strip(), text, opened + 1, number))
            opened = 0
        else:
            opened = number
    assert not opened, f"{name_of(page)}:{opened}: a block that is not closed"
    return blocks


def prose_of(page: Path) -> str:
    """The page without its fenced blocks, line by line as before."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks_of(page):
        for number in range(block.line - 2, block.end):
            lines[number] = ""
    return "\n".join(lines)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def first_cells(name: str) -> list[str]:
    """What the first column of a page's tables has in backquotes, row by row."""
    return [text for row in re.findall(r"^\|([^|]+)\|", read(name), re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]


# Examples

PAGES_WITH_EXAMPLES = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the pages assume: prompts.jsonl as the first tutorial writes it, and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    first = next(block for block in blocks_of(DOCS / "tutorial" / "first-loader.md") if block.language == "python")
    run(first, {}, "docs/tutorial/first-loader.md")
    modules = set(sys.modules)
    with structlog.testing.capture_logs():
        yield tmp_path
    for name in set(sys.modules) - modules:  # files that a page has written
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]
    importlib.invalidate_caches()


def run(block: Block, names: dict[str, Any], page: str) -> str:
    """What the block prints. One that begins with ``# name.py`` is a file, which is written instead."""
    if found := re.match(r"# (\w+\.py)\n", block.text):
        Path(found[1]).write_text(block.text, encoding="utf-8")
        return ""

    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, names)  # noqa: S102 - to run what the pages tell the reader to run is what this file is for
    return out.getvalue()


def differs(wanted: str, printed: str) -> bool:
    """``...`` in what is wanted stands for anything, as in a doctest."""
    return not doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS)


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, folder):
    blocks, names = blocks_of(page), {"__name__": "__main__"}
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python":
            continue

        try:
            printed = run(block, names, name_of(page)).replace(str(folder), HOME)
        except Exception:
            pytest.fail(f"{name_of(page)}:{block.line}\n{traceback.format_exc()}", pytrace=False)
        if following is not None and following.language == "text" and following.line <= block.end + 3:
            where = f"{name_of(page)}:{following.line}"
            assert not differs(following.text, printed), f"{where} is not what is printed:\n{printed}"


def test_an_output_block_is_compared():
    assert differs("a\nb\n", "a\nc\n")
    assert not differs("a ... c\n", "a b c\n")
