"""Commands as processes of a shell: workers, signals, terminals, pipes, and streams that cannot be written."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from asyncdata import DataLoader, PromptTokenizeFn
from asyncdata.checkpoint.snapshot import load
from asyncdata.cli import progress
from asyncdata.cli.commands.run_record import combined_digest, read_record
from asyncdata.cli.main import main
from asyncdata.cli.progress import Progress, Reading
from tests.support.combinations import each_value
from tests.support.commands import asyncdata_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ROWS = 200


@pytest.fixture
def data(jsonl_file: Callable[..., Path]) -> str:
    rows = [{"input": f"question {number} " * (number % 7 + 1), "label": number} for number in range(NUM_ROWS)]
    return str(jsonl_file(rows, "data.jsonl"))


@pytest.fixture
def run(data: str, run_json: Callable[..., list[Any]], demo_tokenizer: str) -> Callable[..., dict[str, Any]]:
    """A function that runs the data in this process; its report."""

    def report(*words: object) -> dict[str, Any]:
        (found,) = run_json("run", data, "--tokenizer", demo_tokenizer, "--num-workers", 0, *words)
        return found

    return report


# Runs


def test_the_digest_depends_on_the_order_and_on_nothing_else(run):
    digest = run()["digest"]

    assert run("--num-workers", 2, "--batch-size", 7, "--buffer-size", 11)["digest"] == digest
    others = [("--seed", 43), ("--no-shuffle",), ("--apply-chat-template",)]
    assert len({run(*other)["digest"] for other in others} | {digest}) == 4


def test_a_run_resumes_where_its_snapshot_is(run, tmp_path):
    again = ("--snapshot", tmp_path / "state", "--resume", "--record", tmp_path / "record", "--batch-size", 16)
    whole = run("--epochs", 2)

    first = run("--num-batches", 9, *again)
    second = run("--epochs", 2, *again)

    assert (first["num_samples"], first["samples_total"]) == (9 * 16, 9 * 16)
    assert (second["first_index"], second["num_samples"]) == (9 * 16, 2 * NUM_ROWS - 9 * 16)
    assert combined_digest(item.digest for item in read_record(tmp_path / "record")) == whole["digest"]
    assert (whole["position"], whole["samples_total"]) == ("2:0:0", 2 * NUM_ROWS)
    assert 0 < whole["first_batch_s"] <= whole["seconds"]
    assert 0 <= whole["data_wait_share"] <= 1


def test_the_record_says_what_the_loader_delivers_but_for_a_line_that_was_cut_off(run, data, tmp_path, demo_tokenizer):
    record = tmp_path / "record"
    report = run("--record", record, "--seed", 3)

    with DataLoader(data, tokenize_fn=PromptTokenizeFn(demo_tokenizer), seed=3, num_workers=0) as loader:
        samples = loader.get_next_batch(NUM_ROWS, timeout_s=240)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["index"], line["position"], line["byte_offset"], line["num_tokens"]) for line in lines] == [
        (index, str(sample.position), sample.source.byte_offset, len(sample.tokens))
        for index, sample in enumerate(samples)
    ]
    assert combined_digest(line["digest"] for line in lines) == report["digest"]
    record.write_bytes(record.read_bytes()[:-5])
    assert [item.index for item in read_record(record)] == list(range(NUM_ROWS - 1))


def test_ctrl_c_saves_and_is_status_130(data, tmp_path, demo_tokenizer):
    snapshot, record = tmp_path / "s", tmp_path / "record.jsonl"
    words = (data, "--tokenizer", demo_tokenizer, "--snapshot", snapshot, "--record", record, "--batch-size", "1")
    with asyncdata_process("run", *words, "--num-workers", "1", "--step-s", "1", "--progress", "json") as process:
        assert "progress" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.endswith("\ninterrupted\n")
    num_done = len(read_record(record))
    assert 0 < num_done < NUM_ROWS
    assert load(snapshot).position == (0, 0, num_done)


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_command_leaves_the_configuration_of_the_log_as_it_was(data, is_configured):
    if is_configured:
        structlog.configure(processors=[structlog.processors.add_log_level])
    before = structlog.get_config()

    assert main(["order", data, "--num", "1"]) == 0

    assert (structlog.is_configured(), structlog.get_config()) == (is_configured, before)


def test_help_does_not_wait_for_the_library():
    code = (
        "import sys\nfrom asyncdata.cli.main import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'anyio', 'numpy', 'structlog', 'tokenizers'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert printed.splitlines()[-1] == "[]"


# Progress

READING = Reading(
    samples=1234,
    rows=1300,
    epoch=1,
    seconds=2.5,
    rows_per_s=520.0,
    tokens_per_s=81_234.0,
    channel_fill=0.5,
    fraction=0.25,
    snapshot_samples=1200,
)
RATES = [(0, "0"), (812, "812"), (999.4, "999"), (1000, "1.00k"), (81_234, "81.2k"), (99_960, "100k"),
         (8_123_456, "8.12M"), (2e9, "2.00G"), (3e12, "3T")]  # fmt: skip


@pytest.mark.parametrize(("rate", "shown"), RATES)
def test_rates_have_three_digits_and_a_unit(rate, shown, capsys):
    Progress("plain", indent="  ").show(Reading(**{**_fields(READING), "tokens_per_s": rate}))

    line = f"   25%  1,234 samples    520 rows/s  {shown:>5} tokens/s  channel 50% full\n"
    assert capsys.readouterr().err == line


def _fields(reading: Reading) -> dict[str, Any]:
    return {name: getattr(reading, name) for name in reading.__struct_fields__}


def test_a_bar_is_no_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")

    Progress("bar").show(READING)

    assert capsys.readouterr().err == "\x1b[2K[###         ]  25%  1,234 samples    5\r"


@pytest.mark.parametrize("options", [(), ("--shuffle", "full"), ("--block-bytes", "512", "--window-blocks", "4")])
def test_the_fraction_of_a_run_is_that_of_its_rows(run, monkeypatch, capsys, options):
    monkeypatch.setitem(progress._EVERY_S, "json", 0.0)  # noqa: SLF001 - a reading after every batch
    said: list[str] = []
    monkeypatch.setattr(progress, "_write", said.append)

    run("--epochs", 2, "--progress", "json", *options)

    readings = [json.loads(line) for line in said]
    fractions = [reading["fraction"] for reading in readings]
    assert all(abs(each["fraction"] - each["rows"] / (2 * NUM_ROWS)) < 0.1 for each in readings[1:])
    assert (len(fractions), fractions[-1]) == (14, 1.0)
    assert {reading["event"] for reading in readings} == {"progress"}


def test_progress_in_a_pipe_is_plain_lines(data, demo_tokenizer):
    with asyncdata_process("run", data, "--tokenizer", demo_tokenizer, "--num-workers", "1") as process:
        out, err = process.communicate()

    assert process.returncode == 0
    assert "\x1b" not in out + err
    assert err.splitlines()[-1].startswith("100%  200 samples  ")  # before it, there are lines of a slow start


# Terminals


def on_a_terminal(*words: object, **environment: str) -> str:
    """What a command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LANG": "C.UTF-8"} | environment
    with asyncdata_process(*words, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how a terminal says that it was closed
                break

            written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")  # the terminal itself adds a \r to each line break


def test_progress_on_a_terminal_is_a_bar_on_one_line_that_is_redrawn(data, demo_tokenizer):
    written = on_a_terminal("run", data, "--tokenizer", demo_tokenizer, "--num-workers", "1")

    bars, _, report = written.rpartition("\r\n")
    bars = bars[bars.index("\x1b[2K[") :]  # before them, a start of more than two seconds is shown
    assert bars.count("\n") == 0
    last = bars.rpartition("\x1b[2K")[2]
    assert last.startswith("[############] 100%  200 samples  ")
    assert "rows/s" in last and "tokens/s" in last and "channel" in last
    assert len(last) < 100
    assert report.startswith("delivered    200 samples")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "no_color", "is_coloured"), [((), "", True), ((), "1", False), (("--color", "never"), "", False)]
)
def test_on_a_terminal_there_is_colour_unless_it_is_not_wanted(
    jsonl_file, demo_tokenizer, words, no_color, is_coloured
):
    path = jsonl_file([{"text": "A story."}])
    command = ("inspect", path, "--tokenizer", demo_tokenizer, "--kind", "text", "--loss-mask", *words)

    shown = on_a_terminal(*command, NO_COLOR=no_color, PYTHONIOENCODING="utf-8")

    assert ("\x1b[1;32m story." in shown) is is_coloured
    assert ("⟦ story.⟨<|end|>⟩⟧" in shown) is not is_coloured


# Streams that are closed or full


def test_a_reader_that_stops_after_the_first_lines_causes_no_error(data):
    with asyncdata_process("order", data, "--num", "0") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (0, "")


ROW_ID = ["--tokenize-fn", "tests.support.tokenize_fns:row_id"]


@pytest.fixture
def redirected(tmp_path: Path) -> Callable[[list[str], str], tuple[int, str]]:
    """A function that runs a command with streams redirected; its status, and stderr if that is not redirected too."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(20)))

    def run(words: list[str], redirect: str) -> tuple[int, str]:
        command = ["sh", "-c", f'exec "$0" -m asyncdata "$@" {redirect}', sys.executable, *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        streams: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, check=False, **streams)
        return done.returncode, done.stderr

    return run


COMMANDS = {
    "data": ["order", "rows.jsonl"],
    "JSON": ["order", "rows.jsonl", "--json"],
    "no JSON but an error": ["snapshot", "show", "nothing", "--json"],
    "colours": ["inspect", "rows.jsonl", *ROW_ID, "--color", "always"],
    "the version": ["--version"],
    "help": ["order", "--help"],
}
REASONS = {
    ">/dev/full": "asyncdata: cannot write to stdout: No space left on device",
    ">&-": "asyncdata: stdout is closed: open it, or send it to /dev/null",
}


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "redirect"), each_value(COMMANDS.keys(), REASONS.keys()))
def test_stdout_that_cannot_be_written_is_one_line_and_status_1(redirected, what, redirect):
    status, said = redirected(COMMANDS[what], redirect)

    assert said.splitlines()[-1] == REASONS[redirect]
    assert "Traceback" not in said
    assert status == 1


STATUSES = {
    "good": (["order", "rows.jsonl"], 0),
    "an error": (["order", "nothing.jsonl"], 1),
    "wrong usage": (["order"], 2),
    "a run": (["run", "rows.jsonl", *ROW_ID, "--num-workers", "0"], 0),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("ended", "redirect"), each_value(STATUSES, ["2>/dev/full", "2>&-", "2>&- <&-"]))
def test_stderr_that_cannot_be_written_changes_no_exit_status(redirected, ended, redirect):
    words, expected = ended

    assert redirected(words, redirect)[0] == expected


@pytest.mark.thorough
def test_with_every_stream_closed_no_file_takes_their_place(redirected, tmp_path):
    words = ["run", "rows.jsonl", *ROW_ID, "--num-workers", "1"]

    assert redirected([*words, "--record", "record.jsonl"], ">/dev/null 2>&- <&-")[0] == 0
    assert len([json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]) == 20
    assert redirected(words, ">&- 2>&- <&-")[0] == 1
