"""The demo: its data, its tokenizer, its proof, and what it says when the proof fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata
from asyncdata import PromptTokenizeFn, demo
from asyncdata.cli.commands import demo as command
from asyncdata.cli.commands.demo import compare
from asyncdata.cli.commands.run_record import Delivered
from asyncdata.cli.commands.watched_run import RunProcess
from asyncdata.cli.main import main
from asyncdata.demo import docstring_prompts, tokenizer_folder, write_docstring_prompts
from asyncdata.errors import ConfigError, SourceError
from asyncdata.tokenization.base import ColumnWriter
from tests.support.signals import hear_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_ROWS = 500


# The data


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "prompts.jsonl"
    assert write_docstring_prompts(path, num_rows=1500) == 1500
    return path


def test_the_prompts_are_questions_whose_answer_is_the_label(prompts):
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]

    assert all(set(row) == {"input", "label", "metadata"} for row in rows)
    assert {row["metadata"]["kind"] for row in rows} == {"module", "class", "function"}
    found = next(row for row in rows if row["label"] == "argparse.ArgumentParser")
    assert found["metadata"]["module"] == "argparse"
    assert found["metadata"]["line"] > 1000
    assert found["input"].startswith("Which class of Python's standard library is described here? Answer with its")
    assert "Object for parsing command line strings into Python objects." in found["input"]


def test_the_same_python_writes_the_same_prompts(prompts, tmp_path):
    again = tmp_path / "again.jsonl"
    write_docstring_prompts(again, num_rows=1500)

    assert again.read_bytes() == prompts.read_bytes()


def test_there_are_thousands_of_prompts():
    assert sum(1 for _ in islice(docstring_prompts(), 5000)) == 5000


def test_a_library_of_odd_files_has_the_docstrings_that_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""')
    (tmp_path / "lone.py").write_text('"""a lone \\ud800 surrogate"""')
    (tmp_path / "old.py").write_text('"""An escape of old: \\d"""')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text('class A:\n    async def b(self):\n        """In A."""')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text('"""Not of the library."""')
    monkeypatch.setattr(demo, "_library", lambda: tmp_path)

    rows = list(docstring_prompts())

    assert [(row["label"], row["metadata"]) for row in rows] == [
        ("old", {"kind": "module", "module": "old", "line": 1}),
        ("package.A.b", {"kind": "function", "module": "package", "line": 2}),
    ]


def test_a_python_without_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_library", lambda: tmp_path / "lib")

    with pytest.raises(SourceError, match="AD201 no docstring was found in .*lib"):
        write_docstring_prompts(tmp_path / "prompts.jsonl")


def test_no_prompts_cannot_be_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="num_rows must be at least 1, got 0"):
        write_docstring_prompts(tmp_path / "prompts.jsonl", num_rows=0)


# The tokenizer


def test_the_tokenizer_is_small():
    sizes = {path.name: path.stat().st_size for path in Path(tokenizer_folder()).iterdir()}

    assert set(sizes) == {"tokenizer.json", "tokenizer_config.json"}
    assert sum(sizes.values()) < 500_000


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_tokenizer_is_the_same_for_transformers(prompts, is_chat):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(tokenizer_folder())
    lines = prompts.read_bytes().splitlines()[:300]
    texts = [json.loads(line)["input"] for line in lines]
    out = ColumnWriter()

    PromptTokenizeFn(tokenizer_folder(), apply_chat_template=is_chat).open()(lines, out)

    if is_chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [oracle.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    expected = [token for text in texts for token in oracle(text, add_special_tokens=False)["input_ids"]]
    tokens = memoryview(out.finish(len(lines), 0.0).tokens).cast("i").tolist()
    assert tokens == expected
    assert {oracle.eos_token, oracle.pad_token} == {"<|end|>", "<|pad|>"}


def test_the_template_of_the_tokenizer_is_the_one_in_the_source():
    config = json.loads((Path(tokenizer_folder()) / "tokenizer_config.json").read_text())

    assert config["chat_template"] == demo.CHAT_TEMPLATE


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
    monkeypatch.setattr(command, "_RUN_S", 1.0)


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

    assert main(["demo", "--rows", str(NUM_ROWS), "--num-workers", "1", "--json", "--keep", str(tmp_path)]) == 0

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


class WithAnotherSeed(RunProcess):
    """Makes the run that nobody interrupts another one."""

    def __init__(self, arguments: Sequence[str]) -> None:
        is_whole = any("uninterrupted" in argument for argument in arguments)
        super().__init__([*arguments, "--seed", "43"] if is_whole else arguments)


def test_a_difference_is_found_and_is_status_1(monkeypatch, capsys, in_a_hurry):
    monkeypatch.setattr(command, "RunProcess", WithAnotherSeed)

    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1

    out = capsys.readouterr().out
    assert out.splitlines()[3] == "DIFFERENT from sample 0 on"


def test_a_run_that_is_over_before_it_can_be_killed_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(command, "_KILL_AT", 2.0)
    monkeypatch.setattr(command, "_RUN_S", 0.1)

    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1

    assert "the run was over before it could be killed; try more --rows" in capsys.readouterr().err


class WithNoTokenizer(RunProcess):
    """Makes every run fail."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__([*arguments, "--tokenizer", "/no/such/folder"])


def test_what_a_failed_run_said_is_passed_on(monkeypatch, capsys):
    monkeypatch.setattr(command, "RunProcess", WithNoTokenizer)

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
