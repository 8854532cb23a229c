"""A command whose stdout or stderr is closed or full: one line says so where it can, and there is never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.combinations import each_value

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

COMMANDS = {
    "data": ["order", "rows.jsonl"],
    "JSON": ["order", "rows.jsonl", "--json"],
    "no JSON but an error": ["snapshot", "show", "nothing", "--json"],
    "colours": ["inspect", "rows.jsonl", "--tokenize-fn", "tests.support.tokenize_fns:row_id", "--color", "always"],
    "the version": ["--version"],
    "help": ["order", "--help"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(20)))
    return tmp_path


def run(folder: Path, words: list[str], redirect: str) -> tuple[int, str]:
    """The exit status, and what is on stderr, if that is not redirected too."""
    line = f'exec "$0" -m asyncdata "$@" {redirect}'
    command = ["sh", "-c", line, sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False
    )
    return done.returncode, done.stderr


REASONS = {
    ">/dev/full": "asyncdata: cannot write to stdout: No space left on device",
    ">&-": "asyncdata: stdout is closed: open it, or send it to /dev/null",
}


@pytest.mark.parametrize(("what", "redirect"), each_value(COMMANDS.keys(), REASONS.keys()))
def test_stdout_that_cannot_be_written_is_one_line_and_status_1(folder, what, redirect):
    status, said = run(folder, COMMANDS[what], redirect)

    assert said.splitlines()[-1] == REASONS[redirect]
    assert "Traceback" not in said
    assert status == 1


STATUSES = {
    "good": (["order", "rows.jsonl"], 0),
    "an error": (["order", "nothing.jsonl"], 1),
    "wrong usage": (["order"], 2),
    "a run": (["run", "rows.jsonl", "--tokenize-fn", "tests.support.tokenize_fns:row_id", "--num-workers", "0"], 0),
}


@pytest.mark.parametrize(("ended", "redirect"), each_value(STATUSES, ["2>/dev/full", "2>&-", "2>&- <&-"]))
def test_stderr_that_cannot_be_written_changes_no_exit_status(folder, ended, redirect):
    words, expected = ended
    assert run(folder, words, redirect)[0] == expected


def test_with_every_stream_closed_no_file_takes_their_place(folder):
    words = ["run", "rows.jsonl", "--tokenize-fn", "tests.support.tokenize_fns:row_id", "--num-workers", "1"]

    assert run(folder, [*words, "--record", "record.jsonl"], ">/dev/null 2>&- <&-")[0] == 0
    record = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    assert len(record) == 20
    assert run(folder, words, ">&- 2>&- <&-")[0] == 1
