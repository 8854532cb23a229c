"""Commands, blocks of Markdown that are run and compared with what the page says, and pages of HTML that are read."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import asyncdata
from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder

ROOT = Path(asyncdata.__file__).parents[1]
NUM_ROWS = 200
"""Of the file that the fixture ``data`` writes."""

INLINE = ("--tokenizer", tokenizer_folder(), "--num-workers", "0")


def hear_ctrl_c() -> None:
    """In the child, before it runs: a shell starts its background jobs with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def asyncdata_process(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncdata", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **{**pipes, **options})


_SPEC = importlib.util.spec_from_file_location("reference", Path(__file__).parents[2] / "docs/site/reference.py")
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


INLINE_TAGS = {"a", "abbr", "b", "code", "em", "small", "span", "strong", "td", "th"}


class ReadPage(HTMLParser):
    """A page that was read: the cells of each table with an id, row by row, with its head; every element, with its
    attributes; the samples, and all text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables, self.tags, self.data, self.text = {}, [], [], ""
        self._shown, self._section, self._open, self._rows = {}, [], [], []

    def shown(self, section: str) -> str:
        """A section as lines of text, in which tables have a bar between their cells; ``data``: the samples."""
        if section == "data":
            return "\n".join(json.dumps(sample, ensure_ascii=False) for sample in self.data)

        lines = re.sub(r"[ \t\n]*\n[ \t\n]*", "\n", "".join(self._shown[section])).strip()
        return re.sub(r"(?m)^\| ", "", re.sub(r" {2,}", " ", lines))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._open.append((tag, found))
        if tag == "section":
            self._section = self._shown[found.get("id") or ""] = []
        if tag == "table":
            self._rows = self.tables.setdefault(found.get("id") or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"td", "th"}:
            self._rows[-1].append("")
            self._section.append(" | ")
        self._section.append(" " if tag in INLINE_TAGS else "\n")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
        self._section.append(" " if tag in INLINE_TAGS else "\n")

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script" and attributes.get("type") == "application/json":
            self.data = json.loads(data)
        if tag in {"script", "style"}:
            return

        self.text += data
        self._section.append(" ".join(f".{data}.".split())[1:-1])
        if any(name in {"td", "th"} for name, _ in self._open):
            self._rows[-1][-1] += data


def read_page(page: bytes) -> ReadPage:
    """Read a page, of which no two elements may have the same id."""
    reader = ReadPage()
    reader.feed(page.decode("utf-8"))
    reader.close()
    ids = [found["id"] for _, found in reader.tags if "id" in found]
    assert len(ids) == len(set(ids)), sorted(ids)
    return reader
