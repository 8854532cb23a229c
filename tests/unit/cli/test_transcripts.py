"""The command line does what ``tests/transcripts`` says: each command there is run, and prints what stands below it.

A block that has a file's name beside its language is written to that file. What a command writes to stderr stands
behind ``!``, without the usage before an error, and an exit status other than 0 in the last line; ``...`` stands for
anything. ``page FILE SECTION ...`` is no command of ours: it prints sections of a page for the browser as text, and
``data`` its samples.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncdata.demo import tokenizer_folder
from tests.support.html_page import read_page
from tests.support.pages import HOME, blocks_of, is_printed, run_block, run_command

PAGES = sorted((Path(__file__).parents[2] / "transcripts").glob("*.md"))
LONG = ("mixtures", "places", "turns")
_USAGE = re.compile(r"\AUsage: .*\n(?: .*\n)*Try .*\n\n")
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, but for the tokenizer of the demo, and for the cache of the tests."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "tokenizer").symlink_to(tokenizer_folder())
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    modules = set(sys.modules)
    yield here
    for name in set(sys.modules) - modules:
        if (here / f"{name}.py").exists():
            del sys.modules[name]


def said_by(command, folder):
    """What a command prints, as a transcript has it."""
    program, *words = command.split()
    if program == "page":
        page = read_page(Path(words[0]).read_bytes())
        return "\n\n".join(map(page.shown, words[1:])).replace(str(folder), HOME) + "\n"

    status, out, talk = run_command(command)
    told = out + "".join(f"! {line}\n" for line in _USAGE.sub("", talk).splitlines())
    return told.replace(str(folder), HOME).replace("\x1b", "␛") + (f"[exit status {status}]\n" if status else "")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=pytest.mark.thorough if page.stem in LONG else ()) for page in PAGES],
)
def test_the_commands_of_a_transcript_print_what_stands_below_them(page, folder):
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        language, _, name = block.language.partition(" ")
        if name:
            Path(name).write_text(block.text.replace(HOME, str(folder)), encoding="utf-8")
        elif language == "python":
            run_block(block, names, page.name)
        else:
            for command, wanted in _COMMAND.findall(block.text):
                printed = said_by(command, folder)
                assert is_printed(wanted, printed), f"{page.name}: $ {command}\n{printed}"
