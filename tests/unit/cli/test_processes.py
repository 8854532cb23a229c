"""Commands as processes of a shell: workers, signals, terminals, pipes, streams that cannot be written; the doctor."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import structlog

from asyncdata.checkpoint.snapshot import load
from asyncdata.cli import run as run_command
from tests.support.examples import each_value
from tests.support.pages import asyncdata_process
from tests.support.parts import Progress, Reading, combined_digest, main, read_record

NUM_ROWS = 200


@pytest.fixture
def data(jsonl_file):
    rows = [{"input": f"question {number} " * (number % 7 + 1), "label": number} for number in range(NUM_ROWS)]
    return str(jsonl_file(rows, "data.jsonl"))


@pytest.fixture
def run(data, run_json, demo_tokenizer):
    """A function that runs the data in this process; its report."""
    return lambda *words: run_json("run", data, "--tokenizer", demo_tokenizer, "--num-workers", 0, *words)[0]


@pytest.mark.parametrize(("words", "completed"), [("rep", "plain,report"), ("run data --tokenizer ", "file,")])
def test_a_shell_completes_a_command_and_a_path(words, completed, monkeypatch, capsys):
    monkeypatch.setenv("_ASYNCDATA_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"asyncdata {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    assert (main([]), capsys.readouterr().out.splitlines()) == (0, [completed])


def test_a_run_resumes_where_its_snapshot_is(run, tmp_path):
    record = tmp_path / "record"
    again = ("--snapshot", tmp_path / "state", "--resume", "--record", record, "--batch-size", 16)
    whole = run("--epochs", 2)

    first = run("--num-batches", 9, *again)
    second = run("--epochs", 2, *again)

    assert (first["num_samples"], first["samples_total"]) == (9 * 16, 9 * 16)
    assert (second["first_index"], second["num_samples"]) == (9 * 16, 2 * NUM_ROWS - 9 * 16)
    assert combined_digest(item.digest for item in read_record(record)) == whole["digest"]
    assert (whole["position"], whole["samples_total"]) == ("2:0:0", 2 * NUM_ROWS)
    assert 0 < whole["first_batch_s"] <= whole["seconds"]
    assert 0 <= whole["data_wait_share"] <= 1
    record.write_bytes(record.read_bytes()[:-5])  # a line that was cut off is no record
    assert [item.index for item in read_record(record)] == list(range(2 * NUM_ROWS - 1))


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


def test_help_does_not_wait_for_the_library_and_a_bar_is_no_wider_than_the_terminal(monkeypatch, capsys):
    code = (
        "import sys\nfrom asyncdata.cli.main import main\n"
        "main(['run', '--help'])\n"
        "print(sorted({'anyio', 'numpy', 'structlog', 'tokenizers'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "[]"
    monkeypatch.setenv("COLUMNS", "40")
    Progress("bar").show(Reading(**READING))
    assert capsys.readouterr().err == "\x1b[2K[###         ]  25%  1,234 samples    5\r"


READING = {"samples": 1234, "rows": 1300, "epoch": 1, "seconds": 2.5, "rows_per_s": 520.0, "tokens_per_s": 81_234.0}
READING |= {"channel_fill": 0.5, "fraction": 0.25, "snapshot_samples": 1200}
RATES = {0: "0", 812: "812", 999.4: "999", 1000: "1k", 81_234: "81.2k", 99_960: "100k"}
RATES |= {8_123_456: "8.12M", 2e9: "2G", 3e12: "3T"}


@pytest.mark.parametrize(("rate", "shown"), RATES.items())
def test_rates_have_three_digits_and_a_unit(rate, shown, capsys):
    Progress("plain", indent="  ").show(Reading(**{**READING, "tokens_per_s": rate}))
    assert capsys.readouterr().err == f"   25%  1,234 samples    520 rows/s  {shown:>5} tokens/s  channel 50% full\n"


@pytest.mark.parametrize("options", [(), ("--shuffle", "full"), ("--block-bytes", "512", "--window-blocks", "4")])
def test_the_fraction_of_a_run_is_that_of_its_rows(run, monkeypatch, options):
    monkeypatch.setitem(run_command._EVERY_S, "json", 0.0)  # noqa: SLF001 - a reading after every batch
    said = []
    monkeypatch.setattr(run_command, "_write", said.append)
    run("--epochs", 2, "--progress", "json", *options)
    readings = [json.loads(line) for line in said]
    assert all(abs(each["fraction"] - each["rows"] / (2 * NUM_ROWS)) < 0.1 for each in readings[1:])
    assert (len(readings), readings[-1]["fraction"]) == (14, 1.0)


def on_a_terminal(*words, **environment):
    """What a command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LANG": "C.UTF-8"} | environment
    with asyncdata_process(*words, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # how a terminal says that it was closed
            while piece := os.read(ours, 65536):
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
    assert re.match(r"\[#{12}\] 100%  200 samples  .*rows/s.*tokens/s.*channel", last)
    assert len(last) < 100
    assert report.startswith("delivered    200 samples")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "no_color", "is_coloured"), [((), "", True), ((), "1", False), (("--color", "never"), "", False)]
)
def test_a_terminal_has_colour_unless_it_is_not_wanted(jsonl_file, demo_tokenizer, words, no_color, is_coloured):
    path = jsonl_file([{"text": "A story."}])
    command = ("inspect", path, "--tokenizer", demo_tokenizer, "--kind", "text", "--loss-mask", *words)
    shown = on_a_terminal(*command, NO_COLOR=no_color, PYTHONIOENCODING="utf-8")
    assert ("\x1b[1;32m story." in shown) is is_coloured
    assert ("⟦ story.⟨<|end|>⟩⟧" in shown) is not is_coloured


def test_a_reader_that_stops_after_the_first_lines_causes_no_error(data):
    with asyncdata_process("order", data, "--num", "0") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("--version",)])
def test_a_reader_that_is_gone_causes_no_error(words):
    ours, theirs = os.pipe()
    os.close(ours)
    with asyncdata_process(*words, stdout=theirs) as process:
        os.close(theirs)
        assert (process.wait(), process.stderr.read()) == (0, "")


ROW_ID = "--tokenize-fn tests.support.loading:row_id"


@pytest.fixture
def redirected(tmp_path):
    """A function that runs a command with streams redirected; its status, and stderr if that is not redirected too."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(20)))

    def run(words):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m asyncdata {words}"],
            cwd=tmp_path, env=environment, text=True, check=False, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stderr

    return run


COMMANDS = ["order rows.jsonl", "order rows.jsonl --json", "snapshot show nothing --json", "--version", "order --help"]
COMMANDS += [f"inspect rows.jsonl {ROW_ID} --color always"]
REASONS = {
    ">/dev/full": "asyncdata: cannot write to stdout: No space left on device",
    ">&-": "asyncdata: stdout is closed: open it, or send it to /dev/null",
}


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "redirect"), each_value(COMMANDS, REASONS.keys()))
def test_stdout_that_cannot_be_written_is_one_line_and_status_1(redirected, words, redirect):
    status, said = redirected(f"{words} {redirect}")
    assert (status, said.splitlines()[-1]) == (1, REASONS[redirect])
    assert "Traceback" not in said


STATUSES = {"order rows.jsonl": 0, "order nothing.jsonl": 1, "order": 2, f"run rows.jsonl {ROW_ID} --num-workers 0": 0}


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "redirect"), each_value(STATUSES.keys(), ["2>/dev/full", "2>&-", "2>&- <&-"]))
def test_stderr_that_cannot_be_written_changes_no_exit_status(redirected, words, redirect):
    assert redirected(f"{words} {redirect}")[0] == STATUSES[words]


@pytest.mark.thorough
def test_with_every_stream_closed_no_file_takes_their_place(redirected, tmp_path):
    words = f"run rows.jsonl {ROW_ID} --num-workers 1"
    assert redirected(f"{words} --record record.jsonl >/dev/null 2>&- <&-")[0] == 0
    assert len(read_record(tmp_path / "record.jsonl")) == 20
    assert redirected(f"{words} >&- 2>&- <&-")[0] == 1


def test_the_doctor_says_what_is_there_and_names_what_fails(run_json, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 5)

    (found,) = run_json("doctor", path)

    assert found[str(path)] == "1 files, 0.0 MB"
    told = {"workers": "64 rows are there", "cache": "0 proofs", "cpus": f"of {os.cpu_count()}", "packages": "msgspec "}
    assert [name for name in told if told[name] not in found[name]] == []

    monkeypatch.setenv("XDG_CACHE_HOME", str(path))

    (found,) = run_json("doctor", tmp_path / "missing.jsonl", status=1)

    assert found["cache"].startswith("FAILED: ")
    assert found[str(tmp_path / "missing.jsonl")].startswith("FAILED: AD304 cannot read")
