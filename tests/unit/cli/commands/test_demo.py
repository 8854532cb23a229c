"""``asyncdata demo``: its proof, and what it says when the proof fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata
from asyncdata.cli.commands import demo as command
from asyncdata.cli.commands.demo import compare
from asyncdata.cli.commands.run_record import Delivered
from asyncdata.cli.main import main
from asyncdata.telemetry.reader import read
from tests.support.signals import hear_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_ROWS = 500


# The proof


def delivered(*indices: int, seed: int = 0) -> list[Delivered]:
    return [Delivered(index, f"0:0:{index}", 3, f"{seed + index:032x}") for index in indices]


def test_a_resumed_run_that_goes_on_is_identical():
    outcome = compare(delivered(0, 1, 2, 3, 4), delivered(3, 4, 5, 6), delivered(0, 1, 2, 3, 4, 5, 6))

    assert outcome.is_identical and outcome.repeated_identical
    assert (outcome.killed_at, outcome.resumed_at, outcome.repeated) == (5, 3, 2)
    assert (outcome.samples, outcome.tokens, outcome.first_difference) == (7, 21, None)
    assert outcome.digest == outcome.uninterrupted_digest


@pytest.mark.parametrize(
    ("resumed", "first_difference"),
    [
        (delivered(4, 5, 6), 3),  # lost
        (delivered(3, 5, 4, 6), 4),  # out of order
        (delivered(3, 4, 4, 5, 6), 5),  # repeated
        (delivered(3, 4, 5), 6),  # cut off
        (delivered(3, 4, 5, 6, 7), 7),  # too much
        (delivered(3, 4, 5, 6, seed=9), 3),  # other tokens
        ([], 3),  # nothing at all
    ],
)
def test_a_resumed_run_that_differs_is_found(resumed, first_difference):
    outcome = compare(delivered(0, 1, 2), resumed, delivered(0, 1, 2, 3, 4, 5, 6))

    assert not outcome.is_identical
    assert outcome.first_difference == first_difference
    assert outcome.digest != outcome.uninterrupted_digest


def test_samples_that_come_again_otherwise_are_found():
    outcome = compare(delivered(0, 1, 2, 3, seed=1), delivered(3, 4), delivered(0, 1, 2, 3, 4))

    assert not outcome.is_identical
    assert not outcome.repeated_identical


# The command


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are short, but for the steps of the one that is killed: it is not over before the kill, however late."""
    monkeypatch.setattr(command, "_RUN_S", 1.0)
    monkeypatch.setattr(command, "_KILL_AT", 0.0)
    run = command._Demo._run  # noqa: SLF001 - nothing public makes one run slower than the others

    def slowly(self: Any, name: str, options: Sequence[str], *is_enough: Any) -> Any:
        return run(self, name, [*options, "--step-s", "0.5"] if name == "killed" else options, *is_enough)

    monkeypatch.setattr(command._Demo, "_run", slowly)  # noqa: SLF001


def test_a_killed_and_resumed_run_is_the_uninterrupted_one(capsys, in_a_hurry):
    assert main(["demo", "--rows", str(NUM_ROWS)]) == 0

    out, err = capsys.readouterr()
    lines = out.splitlines()
    killed, whole = (line.split() for line in lines[1:3])
    assert killed[:3] == ["killed", "and", "resumed"] and whole[:2] == ["never", "interrupted"]
    assert killed[3:] == whole[2:]
    assert killed[3] == f"{2 * NUM_ROWS:,}"
    assert lines[3] == "identical: no sample lost, repeated or out of order"
    assert "killed after" in err and "resumed at sample" in err and "samples came again" in err
    assert "\x1b" not in out + err


def test_the_numbers_of_the_demo_are_there_for_programs_and_its_files_can_be_kept(tmp_path, capsys, in_a_hurry):
    (tmp_path / "run.snapshot").write_text("of an earlier demo")
    (tmp_path / "killed.record.jsonl").write_text("of an earlier demo\n")

    words = ["--num-workers", "1", "--json", "--keep", str(tmp_path), "--telemetry", str(tmp_path / "telemetry")]
    assert main(["demo", "--rows", str(NUM_ROWS), *words]) == 0

    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err.endswith(f"Data, snapshot and records are in {tmp_path}\n")
    assert facts["is_identical"] is True
    assert (facts["rows"], facts["samples"], facts["folder"]) == (NUM_ROWS, 2 * NUM_ROWS, str(tmp_path))
    assert facts["digest"] == facts["uninterrupted_digest"]
    assert 0 < facts["resumed_at"] <= facts["killed_at"] < 2 * NUM_ROWS
    assert facts["repeated"] == facts["killed_at"] - facts["resumed_at"]
    assert 0 < facts["first_batch_s"] < 30
    kept = {path.name for path in tmp_path.iterdir()}
    records = {f"{name}.record.jsonl" for name in ("killed", "resumed", "uninterrupted")}
    assert kept >= {"prompts.jsonl", "run.snapshot", *records}
    killed, resumed = read(tmp_path / "telemetry").starts
    assert (killed.end, resumed.header.samples) == (None, facts["resumed_at"])


def test_a_demo_with_a_difference_is_status_1(monkeypatch, capsys, in_a_hurry):
    words_of = command._run_words  # noqa: SLF001 - one of the three runs gets another seed

    def with_another_seed(data: Path, record: Path) -> list[str]:
        return [*words_of(data, record), *(["--seed", "43"] if "uninterrupted" in record.name else [])]

    monkeypatch.setattr(command, "_run_words", with_another_seed)

    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1

    out = capsys.readouterr().out
    assert out.splitlines()[3] == "DIFFERENT from sample 0 on"


def test_a_demo_run_that_ends_before_the_kill_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(command, "_KILL_AT", 2.0)
    monkeypatch.setattr(command, "_RUN_S", 0.1)

    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1

    assert "the run was over before it could be killed; try more --rows" in capsys.readouterr().err


def test_the_demo_passes_on_the_message_of_a_run_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(command, "tokenizer_folder", lambda: "/no/such/folder")

    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1

    err = capsys.readouterr().err
    assert "a run ended with exit status 1: asyncdata: ConfigError: AD413 tokenizer '/no/such/folder'" in err


def test_ctrl_c_ends_the_demo_and_everything_it_started():
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-m", "asyncdata", "demo", "--rows", str(NUM_ROWS)]
    root = Path(asyncdata.__file__).parents[1]
    with subprocess.Popen(words, cwd=root, start_new_session=True, preexec_fn=hear_ctrl_c, **options) as process:
        while "killed with SIGKILL" not in process.stderr.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the run is told as well
        out, err = process.communicate()

    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
