"""The process that finds texts of tokens and lines of rows: exact, and never waited for if it is gone."""

from __future__ import annotations

import os
import signal

from asyncdata.demo import tokenizer_folder
from asyncdata.telemetry.helper_process import Found, HelperProcess, Tokenizer, Wanted
from asyncdata.telemetry.records import Piece

TOKENIZER = Tokenizer(tokenizer_folder())


def test_it_finds_the_line_of_a_row_and_the_texts_of_its_tokens(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("a\nbb\nccc\n")
    helper = HelperProcess([TOKENIZER])

    found = helper(Wanted(str(path), 5, TOKENIZER, [5, 6, 7], [(1, 2)]))
    other = helper(Wanted(tokenizer=Tokenizer("elsewhere"), ids=[5]))
    gone = helper(Wanted(str(tmp_path / "gone"), 5))
    helper.close()

    assert found.line == 3
    assert [(piece.start, piece.stop, piece.is_trained) for piece in found.pieces] == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, False),
    ]
    assert (other, gone) == (Found(), Found())


def test_bytes_that_are_no_character_are_shown_as_such():
    helper = HelperProcess([TOKENIZER])
    ids = [id for id in range(400) if id not in range(256, 260)]

    pieces = helper(Wanted(tokenizer=TOKENIZER, ids=ids)).pieces
    helper.close()

    assert pieces and all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces).encode()  # nothing in it that JSON cannot hold


def test_a_process_that_was_killed_finds_nothing_any_more(tmp_path):
    helper = HelperProcess()
    helper.start()
    assert helper._process is not None  # noqa: SLF001 - which process it is
    os.kill(helper._process.pid, signal.SIGKILL)  # noqa: SLF001

    assert helper(Wanted(str(tmp_path), 5)) == Found()
    assert helper(Wanted(str(tmp_path), 5)) == Found()
    helper.close()


def test_a_call_after_an_abort_finds_nothing(tmp_path):
    helper = HelperProcess()
    helper.start()
    helper.abort()

    assert helper(Wanted(str(tmp_path), 5)) == Found()
    helper.close()


def test_a_process_that_cannot_be_started_finds_nothing(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    helper = HelperProcess([TOKENIZER])
    helper.start()

    assert helper(Wanted(tokenizer=TOKENIZER, ids=[5])) == Found()
    helper.close()


def test_it_has_a_low_priority_among_the_processes_of_the_trainer() -> None:
    """A session of its own would have an equal share of the CPUs, where Linux groups processes by session."""
    helper = HelperProcess()
    helper(Wanted())
    assert helper._process is not None  # noqa: SLF001 - which process it is
    pid = helper._process.pid  # noqa: SLF001

    assert os.getpriority(os.PRIO_PROCESS, pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid, "Ctrl-C does not reach it"
    helper.close()
