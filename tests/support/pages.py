"""Fenced blocks of Markdown pages: found, run, and compared with what the page says."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from asyncdata.cli.main import main

__all__ = ("HOME", "Block", "blocks_of", "is_printed", "reference", "run_block", "run_command")

_SPEC = importlib.util.spec_from_file_location("reference", Path(__file__).parents[2] / "docs/site/reference.py")
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
"""What makes the tables of the reference."""
_SPEC.loader.exec_module(reference)

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
        opened = 0 if opened else number
    assert not opened, f"{page}:{opened}: a block that is not closed"
    return blocks


def is_printed(wanted: str, printed: str) -> bool:
    """``...`` in what is wanted stands for anything, as in a doctest."""
    return doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS)


def run_block(block: Block, names: dict[str, Any], page: str) -> str:
    """What the block prints. One that begins with ``# name.py`` is a file, which is written instead."""
    if found := re.match(r"# (\w+\.py)\n", block.text):
        Path(found[1]).write_text(block.text, encoding="utf-8")
        importlib.invalidate_caches()
        return ""

    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)  # noqa: S102 - to run what the pages tell the reader to run is what this is for
    return out.getvalue()


def run_command(command: str) -> tuple[int, str, str]:
    """The exit status of a line of a shell, and what it writes to stdout and to stderr; ours runs in this process."""
    program, *words = shlex.split(command)
    if program != "asyncdata":
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as talk:
        status = main(words)
    return status, out.getvalue(), talk.getvalue()
