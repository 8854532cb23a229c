"""``asyncdata run``: what it delivers, reports, records and resumes, and how it shows its progress."""

from __future__ import annotations

import json
import os
import pty
import signal

import pytest

from asyncdata import DataLoader, PromptTokenizeFn
from asyncdata.checkpoint.snapshot import load
from asyncdata.cli import progress
from asyncdata.cli.commands.run_record import combined_digest, read_record
from asyncdata.cli.main import main
from asyncdata.cli.progress import Progress, Reading
from asyncdata.demo import tokenizer_folder
from tests.support.commands import INLINE, NUM_ROWS, asyncdata_process


def test_a_run_delivers_everything_and_says_so(data, run_json):
    report = run_json("run", data, *INLINE, "--epochs", "2", "--batch-size", "30")

    assert report["num_samples"] == report["samples_total"] == 2 * NUM_ROWS
    assert report["num_batches"] == 14
    assert report["first_index"] == 0
    assert report["position"] == "2:0:0"
    assert report["dropped"] == {}
    assert report["rows_per_s"] > 0
    assert 0 <= report["data_wait_share"] <= 1
    assert 0 < report["first_batch_s"] <= report["seconds"]


def test_without_json_the_report_of_a_run_is_text(data, capsys):
    assert main(["run", data, *INLINE, "--progress", "none"]) == 0

    out, err = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in out.replace("data wait", "data_wait").splitlines())
    assert lines["delivered"].startswith("200 samples in 7 batches, ")
    assert lines["dropped"] == "nothing"
    assert lines["data_wait"].endswith("% of the time after the first batch")
    assert err == ""


def test_the_digest_depends_on_the_order_and_on_nothing_else(data, run_json):
    digests = {
        tuple(extra): run_json("run", data, "--tokenizer", tokenizer_folder(), *extra)["digest"]
        for extra in (
            ["--num-workers", 0],
            ["--num-workers", 2, "--batch-size", 7, "--buffer-size", 11],
            ["--num-workers", 0, "--seed", 43],
            ["--num-workers", 0, "--no-shuffle"],
            ["--num-workers", 0, "--apply-chat-template"],
        )
    }

    assert list(digests.values())[0] == list(digests.values())[1]
    assert len(set(digests.values())) == 4


def test_the_record_says_what_the_loader_delivers(data, tmp_path, run_json):
    record = tmp_path / "record.jsonl"
    report = run_json("run", data, *INLINE, "--record", record, "--seed", 3)

    with DataLoader(data, tokenize_fn=PromptTokenizeFn(tokenizer_folder()), seed=3, num_workers=0) as loader:
        samples = loader.get_next_batch(NUM_ROWS, timeout_s=240)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(NUM_ROWS))
    assert [
        (line["position"], line["path"], line["byte_offset"], line["num_bytes"], line["num_tokens"]) for line in lines
    ] == [
        (
            str(sample.position),
            sample.source.path,
            sample.source.byte_offset,
            sample.source.num_bytes,
            len(sample.tokens),
        )
        for sample in samples
    ]
    assert combined_digest(line["digest"] for line in lines) == report["digest"]


def test_a_record_that_was_cut_off_ends_with_its_last_whole_line(data, tmp_path, run_json):
    record = tmp_path / "record.jsonl"
    run_json("run", data, *INLINE, "--record", record)
    record.write_bytes(record.read_bytes()[:-5])

    assert [item.index for item in read_record(record)] == list(range(NUM_ROWS - 1))


def test_a_run_resumes_where_its_snapshot_is(data, tmp_path, run_json):
    snapshot, record = tmp_path / "run.snapshot", tmp_path / "record.jsonl"
    again = ("--snapshot", snapshot, "--resume", "--record", record, "--batch-size", 16)
    whole = run_json("run", data, *INLINE, "--epochs", 2)

    first = run_json("run", data, *INLINE, "--num-batches", 9, *again)
    second = run_json("run", data, *INLINE, "--epochs", 2, *again)
    third = run_json("run", data, *INLINE, "--epochs", 2, *again)

    assert (first["num_samples"], first["snapshot"]) == (9 * 16, str(snapshot))
    assert (second["first_index"], second["num_samples"]) == (9 * 16, 2 * NUM_ROWS - 9 * 16)
    assert combined_digest(item.digest for item in read_record(record)) == whole["digest"]
    assert (third["num_samples"], third["samples_total"], third["first_batch_s"]) == (0, 2 * NUM_ROWS, None)


def test_batches_before_a_resume_count(data, tmp_path, run_json):
    words = ("run", data, *INLINE, "--snapshot", tmp_path / "s", "--resume", "--batch-size", 10, "--num-batches")

    assert run_json(*words, 3)["num_samples"] == 30
    assert run_json(*words, 5)["num_samples"] == 20
    assert run_json(*words, 5)["num_samples"] == 0


def test_two_runs_of_the_command_are_compared_by_their_snapshots(data, tmp_path, run_json):
    words = ("run", data, *INLINE, "--digest", "tokens", "--num-batches")
    run_json(*words, 6, "--batch-size", 20, "--snapshot", tmp_path / "whole")
    run_json(*words, 3, "--batch-size", 10, "--snapshot", tmp_path / "cut")
    ahead = run_json("verify", tmp_path / "whole", tmp_path / "cut", status=4)
    run_json(*words, 6, "--batch-size", 20, "--snapshot", tmp_path / "cut", "--resume")

    assert (ahead["verdict"], ahead["num_ahead"]) == ("undecided", -90)
    found = run_json("verify", tmp_path / "whole", tmp_path / "cut")
    assert (found["verdict"], found["compares"], found["num_samples"]) == ("same", "tokens", [120, 120])


@pytest.mark.parametrize("option", ["--snapshot", "--record"])
def test_a_file_is_not_overwritten_by_a_run_that_does_not_resume(data, tmp_path, capsys, option):
    path = tmp_path / "something"
    path.write_text("anything")

    with pytest.raises(SystemExit) as stop:
        main(["run", data, *INLINE, option, str(path)])

    assert stop.value.code == 2
    assert f"{path} is there already: add --resume to continue from there" in capsys.readouterr().err
    assert path.read_text() == "anything"


def test_a_snapshot_of_another_order_is_refused_unless_that_is_allowed(data, tmp_path, run_json):
    words = ("run", data, *INLINE, "--snapshot", tmp_path / "s", "--resume", "--num-batches")
    run_json(*words, 2)

    refused = run_json(*words, 4, "--seed", 43, status=1)
    allowed = run_json(*words, 4, "--seed", 43, "--allow-changed", "seed")

    assert refused["error"]["type"] == "SnapshotMismatchError"
    assert "seed: saved 42, present 43" in refused["error"]["message"]
    assert allowed["num_samples"] == 64


def test_rows_that_yield_no_sample_are_counted_by_reason(jsonl_file, tmp_path, run_json):
    rows = [{"input": "short"}, {"input": ""}, {"input": "far too long " * 50}, b"no json"]
    path, quarantine = jsonl_file(rows), tmp_path / "bad.jsonl"

    report = run_json(
        *("run", path, *INLINE, "--max-length", 20, "--bad-rows", "quarantine", "--quarantine-path", quarantine)
    )

    assert report["num_samples"] == 1
    assert report["dropped"] == {"empty_prompt": 1, "max_length": 1, "bad row AD101": 1}
    assert report["bad_rows"] == 1
    assert json.loads(quarantine.read_text())["line"] == 4


def test_skipped_bad_rows_are_warnings_on_stderr(jsonl_file, capsys):
    path = jsonl_file([{"input": "good"}, b"no json"])

    assert main(["run", str(path), *INLINE, "--bad-rows", "skip", "--progress", "none"]) == 0

    out, err = capsys.readouterr()
    assert "dropped      1 bad row AD101" in out
    assert err.startswith("asyncdata: warning: row.bad code='AD101'")


def test_verbose_logs_every_event_to_stderr(data, tmp_path, capsys):
    words = ["run", data, *INLINE, "--snapshot", str(tmp_path / "s"), "--resume", "--num-batches"]
    main([*words, "1"])
    capsys.readouterr()

    assert main([*words, "2", "--verbose"]) == 0

    assert "asyncdata: info: snapshot.restored" in capsys.readouterr().err


def test_ctrl_c_saves_and_is_status_130(data, tmp_path):
    snapshot, record = tmp_path / "s", tmp_path / "record.jsonl"
    words = (data, "--tokenizer", tokenizer_folder(), "--snapshot", snapshot, "--record", record, "--batch-size", "1")
    with asyncdata_process("run", *words, "--num-workers", "1", "--step-s", "1", "--progress", "json") as process:
        assert "progress" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.endswith("\ninterrupted\n")
    position = load(snapshot).position
    assert 0 < len(read_record(record)) < NUM_ROWS
    assert position == (0, 0, len(read_record(record)))


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


def test_progress_for_programs_is_json_on_stderr(data, capsys):
    assert main(["run", data, *INLINE, "--progress", "json"]) == 0

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["event"] for line in lines} == {"progress"}
    assert (lines[-1]["samples"], lines[-1]["fraction"]) == (NUM_ROWS, 1.0)


@pytest.mark.parametrize("options", [(), ("--shuffle", "full"), ("--block-bytes", "512", "--window-blocks", "4")])
def test_the_fraction_of_a_run_is_that_of_its_rows(data, monkeypatch, capsys, tmp_path, options):
    monkeypatch.setitem(progress._EVERY_S, "json", 0.0)  # noqa: SLF001 - a reading after every batch
    cache = f'cache={{"folder": "{tmp_path}"}}'

    assert main(["run", data, *INLINE, "--epochs", "2", "--progress", "json", *options, "--loader", cache]) == 0

    readings = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    fractions = [reading["fraction"] for reading in readings]
    assert all(abs(each["fraction"] - each["rows"] / (2 * NUM_ROWS)) < 0.1 for each in readings[1:])
    assert (len(fractions), fractions[-1]) == (14, 1.0)


def test_progress_in_a_pipe_is_plain_lines(data):
    with asyncdata_process("run", data, "--tokenizer", tokenizer_folder(), "--num-workers", "1") as process:
        out, err = process.communicate()

    assert process.returncode == 0
    assert "\x1b" not in out + err
    assert err.splitlines()[-1].startswith("100%  200 samples  ")  # before it, there are lines of a slow start


def test_a_line_of_progress_in_a_pipe_shows_rates_and_fill(capsys):
    Progress("plain", indent="  ").show(READING)

    assert capsys.readouterr().err == "   25%  1,234 samples    520 rows/s  81.2k tokens/s  channel 50% full\n"


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
    return written.decode()


def test_progress_on_a_terminal_is_a_bar_on_one_line_that_is_redrawn(data):
    written = on_a_terminal("run", data, "--tokenizer", tokenizer_folder(), "--num-workers", "1")

    bars, _, report = written.rpartition("\r\r\n")  # the terminal itself adds a \r to each line break
    bars = bars[bars.index("\x1b[2K[") :]  # before them, a start of more than two seconds is shown
    assert bars.count("\n") == 0
    last = bars.rpartition("\x1b[2K")[2]
    assert last.startswith("[############] 100%  200 samples  ")
    assert "rows/s" in last and "tokens/s" in last and "channel" in last
    assert len(last) < 100
    assert report.startswith("delivered    200 samples")


def test_a_bar_is_no_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")

    Progress("bar").show(READING)

    assert capsys.readouterr().err == "\x1b[2K[###         ]  25%  1,234 samples    5\r"
