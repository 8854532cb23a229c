"""The process that finds texts of tokens and lines of rows: exact, and never waited for if it is gone."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from asyncdata.demo import tokenizer_folder
from asyncdata.telemetry.helper_process import Found, HelperProcess, Tokenizer, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZER = Tokenizer(tokenizer_folder())


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    process = HelperProcess([TOKENIZER])
    yield process
    process.close()


def pid_of(helper: HelperProcess) -> int:
    assert helper._process is not None  # noqa: SLF001 - which process it is
    return helper._process.pid  # noqa: SLF001


def test_it_finds_the_line_of_a_row_and_the_texts_of_its_tokens(helper, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("a\nbb\nccc\n")

    found = helper(Wanted(str(path), 5, TOKENIZER, [5, 6, 7], [(1, 2)]))

    assert found.line == 3
    pieces = [(piece.start, piece.stop, piece.is_trained) for piece in found.pieces]
    assert pieces == [(0, 1, False), (1, 2, True), (2, 3, False)]
    assert helper(Wanted(tokenizer=Tokenizer("elsewhere"), ids=[5])) == Found()
    assert helper(Wanted(str(tmp_path / "gone"), 5)) == Found()


def test_bytes_that_are_no_character_are_shown_as_such_and_priority_is_low(helper):
    """A session of its own would have an equal share of the CPUs, where Linux groups processes by session."""
    ids = [id for id in range(400) if id not in range(256, 260)]

    pieces = helper(Wanted(tokenizer=TOKENIZER, ids=ids)).pieces

    assert "".join(piece.text for piece in pieces).encode()  # nothing in it that JSON cannot hold
    pid = pid_of(helper)
    assert os.getpriority(os.PRIO_PROCESS, pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid, "Ctrl-C does not reach it"


@pytest.mark.parametrize("way", ["killed", "aborted", "not started"])
def test_a_process_that_is_gone_finds_nothing_any_more(helper, monkeypatch, way):
    if way == "not started":
        monkeypatch.setattr("sys.executable", "/nowhere/python")
    helper.start()
    if way == "killed":
        os.kill(pid_of(helper), signal.SIGKILL)
    elif way == "aborted":
        helper.abort()

    assert [helper(Wanted(tokenizer=TOKENIZER, ids=[5])) for _ in range(2)] == [Found()] * 2
