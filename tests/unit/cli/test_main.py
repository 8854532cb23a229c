"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

import asyncdata
from asyncdata import DataLoader, LengthGrouping, PromptTokenizeFn, RowShuffle, SoftPacking
from asyncdata.cli.commands.run_record import combined_digest, read_record
from asyncdata.cli.main import main, make_parser
from asyncdata.cli.output import fields, printable, shown_path, si, table
from asyncdata.cli.progress import Reading, meter
from asyncdata.demo import tokenizer_folder
from asyncdata.snapshot import load
from tests.support.signals import hear_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(asyncdata.__file__).parents[1]
NUM_ROWS = 200
INLINE = ("--tokenizer", tokenizer_folder(), "--num-workers", "0")


@pytest.fixture(autouse=True)
def the_log_is_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def data(jsonl_file: Callable[..., Path]) -> str:
    rows = [{"input": f"question {number} " * (number % 7 + 1), "label": number} for number in range(NUM_ROWS)]
    return str(jsonl_file(rows, "data.jsonl"))


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that runs a command with --json and returns what it printed."""

    def run(*words: object, status: int = 0) -> Any:
        assert main([*map(str, words), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


def asyncdata_process(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncdata", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **{**pipes, **options})


# The surface


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - argparse has no other way to list them


def commands(parser: argparse.ArgumentParser, name: str = "asyncdata") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in actions(parser):
        if action.nargs == argparse.PARSER:
            for word, child in action.choices.items():
                yield from commands(child, f"{name} {word}")


COMMANDS = dict(commands(make_parser()))


def test_these_are_the_commands():
    assert sorted(COMMANDS) == [
        "asyncdata",
        "asyncdata bench",
        "asyncdata cache",
        "asyncdata cache ls",
        "asyncdata cache rm",
        "asyncdata cache verify",
        "asyncdata demo",
        "asyncdata inspect",
        "asyncdata order",
        "asyncdata quarantine",
        "asyncdata quarantine retry",
        "asyncdata quarantine show",
        "asyncdata run",
        "asyncdata sample",
        "asyncdata snapshot",
        "asyncdata snapshot show",
        "asyncdata tokenizer",
        "asyncdata tokenizer prove",
        "asyncdata tokenizer show",
        "asyncdata verify",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_is(name):
    parser = COMMANDS[name]

    assert parser.description
    for action in actions(parser):
        if action.nargs != argparse.PARSER:
            assert action.help, f"{name} {action.option_strings or action.dest} has no help"
            if action.default not in (None, False, True, [], argparse.SUPPRESS):
                assert re.search(rf"\(.*{action.default}.*\)|%\(default\)s", action.help), action


@pytest.mark.parametrize("name", [name for name, parser in COMMANDS.items() if parser.get_default("run")])
def test_every_command_speaks_json_and_can_be_verbose(name):
    assert {"--json", "--verbose"} <= {word for action in actions(COMMANDS[name]) for word in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_data(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split()[1:], "--help"])

    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert f"usage: {name}" in out
    assert err == ""


def test_help_names_the_exit_statuses():
    assert all(f"\n  {status} " in make_parser().format_help() for status in (0, 1, 2, 130))


def test_help_does_not_wait_for_the_library():
    code = (
        "import sys\nfrom asyncdata.cli.main import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'anyio', 'numpy', 'rich', 'structlog', 'tokenizers'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert printed.splitlines()[-1] == "[]"


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])

    assert stop.value.code == 0
    assert capsys.readouterr().out == f"asyncdata {asyncdata.__version__}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "stream data as a trainer would"),
        ("fly", "invalid choice"),
        ("run", "required: DATA"),
        ("run d", "--tokenizer DIR or --tokenize-fn PATH is required"),
        ("inspect d --loss-mask", "--tokenizer DIR or --tokenize-fn PATH is required"),
        ("run d --tokenize-fn m:f --kind chat", "--kind chooses a tokenize function; leave it, or --tokenize-fn"),
        ("run d --tokenizer t --set overlong", "a setting is written NAME=VALUE"),
        ("inspect d --tokenizer t --kind novel", "invalid choice: 'novel'"),
        ("inspect d --tokenizer t --position 3", "a position is written EPOCH:WINDOW:ROW"),
        ("run d --tokenizer t --batch-size 0", "a whole number from 1 on is needed, not '0'"),
        ("run d --tokenizer t --step-s soon", "a number of seconds is needed, not 'soon'"),
        ("run d --tokenizer t --resume", "--resume needs --snapshot FILE"),
        ("run d --tokenizer t --on-bad-row weep", "invalid choice: 'weep'"),
        ("run d --tokenizer t --batch 3", "unrecognized arguments: --batch"),
        ("sample d", "one of the arguments --position --ordinal is required"),
        ("sample d --position 1:2", "a position is written EPOCH:WINDOW:ROW, as in 0:3:128, not '1:2'"),
        ("sample d --position 0:0:0 --ordinal 3", "not allowed with argument --position"),
        ("sample d --position 0:0:0 --snapshot s", "--snapshot is for --ordinal with --tokenizer"),
        ("snapshot", "required: COMMAND"),
        ("demo --rows 3", "a whole number from 500 on is needed"),
    ],
)
def test_a_wrong_command_line_is_status_2(words, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())

    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert out == ""


# Errors


def test_an_error_is_one_message_without_a_traceback(capsys, tmp_path):
    status = main(["order", str(tmp_path / "none.jsonl")])

    out, err = capsys.readouterr()
    assert status == 1
    assert out == ""
    assert err == f"asyncdata: SourceError: AD304 cannot read {tmp_path}/none.jsonl: No such file or directory\n"


def test_an_error_is_json_where_json_is_wanted(run_json, tmp_path):
    printed = run_json("order", tmp_path / "none.jsonl", status=1)

    assert printed["error"]["type"] == "SourceError"
    assert printed["error"]["message"].startswith("AD304")


def test_an_error_of_the_system_is_clean_too(data, tmp_path, capsys):
    status = main(["run", data, *INLINE, "--record", str(tmp_path / "no" / "folder")])

    assert status == 1
    assert "asyncdata: FileNotFoundError: [Errno 2]" in capsys.readouterr().err


def test_a_bad_row_is_named_and_what_came_before_it_is_saved(jsonl_file, tmp_path, capsys):
    path = jsonl_file([*({"input": "good"} for _ in range(50)), b'{"input": ', *({"input": "good"} for _ in range(50))])
    snapshot = tmp_path / "run.snapshot"

    status = main(["run", str(path), *INLINE, "--no-shuffle", "--batch-size", "8", "--snapshot", str(snapshot)])

    assert status == 1
    err = capsys.readouterr().err
    assert f"asyncdata: BadRowError: AD101 {path}:51 (byte 900)" in err
    assert "Traceback" not in err
    assert load(snapshot).position == (0, 0, 48)


def test_whoever_reads_only_the_first_lines_gets_no_error(data):
    with asyncdata_process("order", data, "--num", "0") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (0, "")


# run


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


def test_the_report_is_readable_too(data, capsys):
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
        samples = loader.get_next_batch(NUM_ROWS, timeout_s=30)
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
        *("run", path, *INLINE, "--max-length", 20, "--on-bad-row", "quarantine", "--quarantine-path", quarantine)
    )

    assert report["num_samples"] == 1
    assert report["dropped"] == {"empty_prompt": 1, "max_length": 1, "bad row AD101": 1}
    assert report["bad_rows"] == 1
    assert json.loads(quarantine.read_text())["line"] == 4


def test_bad_rows_that_are_passed_over_are_warned_of_on_stderr(jsonl_file, capsys):
    path = jsonl_file([{"input": "good"}, b"no json"])

    assert main(["run", str(path), *INLINE, "--on-bad-row", "skip", "--progress", "none"]) == 0

    out, err = capsys.readouterr()
    assert "dropped      1 bad row AD101" in out
    assert err.startswith("asyncdata: warning: row.bad code='AD101'")


def test_every_event_is_on_stderr_if_that_is_asked_for(data, tmp_path, capsys):
    words = ["run", data, *INLINE, "--snapshot", str(tmp_path / "s"), "--resume", "--num-batches"]
    main([*words, "1"])
    capsys.readouterr()

    assert main([*words, "2", "--verbose"]) == 0

    assert "asyncdata: info: snapshot.restored" in capsys.readouterr().err


def test_ctrl_c_saves_and_is_status_130(data, tmp_path):
    snapshot, record = tmp_path / "s", tmp_path / "record.jsonl"
    words = (data, "--tokenizer", tokenizer_folder(), "--snapshot", snapshot, "--record", record, "--batch-size", "1")
    with asyncdata_process("run", *words, "--num-workers", "1", "--step-s", "0.01", "--progress", "json") as process:
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


def test_progress_in_a_pipe_is_plain_lines(data):
    with asyncdata_process("run", data, "--tokenizer", tokenizer_folder(), "--num-workers", "1") as process:
        out, err = process.communicate()

    assert process.returncode == 0
    assert "\x1b" not in out + err
    assert err.startswith("100%  200 samples  ")


def test_a_meter_for_a_pipe_shows_rates_and_fill(capsys):
    meter("plain", indent="  ").show(READING)

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
            except OSError:  # how a terminal says that nobody is there any more
                break

            written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def test_progress_on_a_terminal_is_a_coloured_bar(data):
    written = on_a_terminal("run", data, "--tokenizer", tokenizer_folder(), "--num-workers", "1")

    assert "━━━" in written
    assert "\x1b[3" in written
    assert "rows/s" in written and "tokens/s" in written and "channel" in written
    assert "delivered    200 samples" in written


def test_no_color_is_obeyed(data):
    written = on_a_terminal("run", data, "--tokenizer", tokenizer_folder(), "--num-workers", "1", NO_COLOR="1")

    assert "━━━" in written
    assert "\x1b[3" not in written.replace("\x1b[39m", "")


# order


SLIME = """shuffle={"method": "slime", "stop": 150}"""
KEPT = """shuffle={"method": "keyed", "only_kept": true}"""


@pytest.mark.parametrize(
    ("words", "knobs"),
    [
        ([], {}),
        (["--no-shuffle"], {"shuffle": False}),
        (["--shuffle"], {"shuffle": True}),
        (["--shuffle", "full"], {"shuffle": "full"}),
        (["--loader", SLIME], {"shuffle": RowShuffle(method="slime", stop=150)}),
        (["--loader", KEPT, *INLINE[:2], "--max-length", "20"], {"shuffle": RowShuffle(only_kept=True)}),
    ],
    ids=["windows", "as they lie", "shuffle", "full", "slime", "only kept"],
)
def test_the_order_is_that_of_the_loader(data, capsys, tmp_path, words, knobs):
    cache = str(tmp_path / "cache")
    assert main(["order", data, "--seed", "5", "--num", "0", "--lines", *words, "--loader", f"cache_dir={cache}"]) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["position", "path", "byte_offset", "num_bytes", "line"]
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), max_length=20 if "--max-length" in words else None)
    knobs = {"seed": 5, "num_workers": 0, "cache_dir": cache, **knobs}
    with DataLoader(data, tokenize_fn=tokenize_fn, **knobs) as loader:
        samples = loader.get_next_batch(len(lines), timeout_s=30)
    assert len(lines) > NUM_ROWS // 5
    assert samples[-1].position.epoch == 0
    assert [line.split("\t") for line in lines] == [
        [
            str(sample.position),
            shown_path(data),
            str(sample.source.byte_offset),
            str(sample.source.num_bytes),
            str(sample.source.line_number()),
        ]
        for sample in samples
    ]


def test_the_order_is_json_lines_for_programs(data, capsys):
    assert main(["order", data, "--num", "3", "--json"]) == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["position"] for line in lines] == ["0:0:0", "0:0:1", "0:0:2"]
    assert all(set(line) == {"position", "path", "byte_offset", "num_bytes"} for line in lines)


def test_the_order_of_planned_packs_is_that_of_the_loader(data, capsys):
    words = ["--loader", 'packing={"SoftPacking": {"max_length": 64}}', "--loader", "plan_packs=true"]
    words += ["--loader", "batch_size=2", "--loader", 'length_grouping={"window": 4}', "--shuffle", "full"]
    assert main(["order", data, *INLINE[:2], *words, "--num", "0", "--json"]) == 0

    printed = [json.loads(line)["position"] for line in capsys.readouterr().out.splitlines()]
    tokenize_fn = PromptTokenizeFn(tokenizer_folder())
    knobs = {"packing": SoftPacking(max_length=64), "plan_packs": True, "batch_size": 2, "shuffle": "full"}
    grouping = LengthGrouping(window=4)
    with DataLoader(data, tokenize_fn=tokenize_fn, collate_fn=list, length_grouping=grouping, **knobs) as loader:
        delivered = [piece.sample for packs in loader for pack in packs for piece in pack]
    assert len(printed) == NUM_ROWS
    assert printed == [str(sample.position) for sample in delivered]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (['packing={"Trunk": {}}'], "packing"),
        (['packing={"SoftPacking": {"size": 4}}'], "SoftPacking cannot be made of the settings"),
        (["plan_packs=true"], "plan_packs=True plans packs: it needs a packing"),
        (["speed=9"], "there is no knob 'speed'"),
        (['shuffle={"method": "keyed", "only_kept": true}'], "say how rows are tokenized"),
    ],
)
def test_a_loader_s_argument_that_cannot_work_is_named(data, capsys, words, reason):
    assert main(["order", data, *(each for word in words for each in ("--loader", word))]) == 1

    assert reason in capsys.readouterr().err


def test_a_compressed_file_can_be_run_ordered_and_sampled(data, tmp_path, run_json, capsys):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(Path(data).read_bytes()))

    assert run_json("run", path, *INLINE)["num_samples"] == NUM_ROWS
    assert main(["order", str(path), "--num", "2"]) == 0
    head, first, _ = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["position", "path", "row_number", "num_bytes"]
    assert run_json("sample", path, "--position", "0:0:0")["row_number"] == int(first.split("\t")[2])


def positions(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["order", *words]) == 0
    return [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_the_order_crosses_windows_and_stops_at_the_end_of_the_epoch(data, capsys):
    small = ("--block-bytes", "1024", "--window-blocks", "4")
    everything = positions(capsys, data, *small, "--num", "0", "--epoch", "1")
    windows = [int(position.split(":")[1]) for position in everything]

    assert len(everything) == NUM_ROWS
    assert windows == sorted(windows) and len(set(windows)) > 3
    assert positions(capsys, data, *small, "--num", "90", "--from", "70", "--epoch", "1") == everything[70:160]
    in_second = [position for position in everything if position.startswith("1:1:")]
    assert positions(capsys, data, *small, "--epoch", "1", "--window", "1", "--num", "0") == in_second
    assert (
        positions(capsys, data, *small, "--epoch", "1", "--window", "1", "--from", "3", "--num", "2") == in_second[3:5]
    )


def test_an_order_beyond_the_end_is_refused(data, capsys):
    assert main(["order", data, "--from", "1000"]) == 1

    assert "--from 1000 is beyond the end" in capsys.readouterr().err


# sample


def test_a_sample_is_found_by_its_position(data, run_json, tmp_path):
    record = tmp_path / "record.jsonl"
    run_json("run", data, *INLINE, "--epochs", 2, "--record", record, "--apply-chat-template")
    wanted = json.loads(record.read_text().splitlines()[NUM_ROWS + 17])

    found = run_json(
        *("sample", data, "--position", wanted["position"], "--tokenizer", tokenizer_folder(), "--apply-chat-template")
    )

    assert found["position"] == wanted["position"] == "1:0:17"
    assert (found["path"], found["byte_offset"], found["num_bytes"]) == (
        wanted["path"],
        wanted["byte_offset"],
        wanted["num_bytes"],
    )
    assert len(found["tokens"]) == wanted["num_tokens"]
    row = json.loads(found["row"])
    assert found["line"] == row["label"] + 1
    assert found["prompt"] == f"<|user|>\n{row['input']}<|end|>\n<|assistant|>\n"
    assert (found["dropped"], found["error"], found["ordinal"]) == (None, None, None)


def test_a_sample_is_found_by_its_ordinal(data, run_json, tmp_path):
    record = tmp_path / "record.jsonl"
    run_json("run", data, *INLINE, "--epochs", 2, "--record", record)
    wanted = json.loads(record.read_text().splitlines()[NUM_ROWS + 17])

    without = run_json("sample", data, "--ordinal", NUM_ROWS + 17)
    with_tokenizer = run_json("sample", data, "--ordinal", NUM_ROWS + 17, *INLINE)

    assert without["position"] == with_tokenizer["position"] == wanted["position"]
    assert (without["tokens"], without["prompt"]) == (None, None)
    assert len(with_tokenizer["tokens"]) == wanted["num_tokens"]


def test_rows_that_the_run_dropped_do_not_count(data, run_json, tmp_path):
    record, snapshot = tmp_path / "record.jsonl", tmp_path / "s"
    words = (data, *INLINE, "--max-length", 20)
    report = run_json("run", *words, "--record", record)
    run_json("run", *words, "--num-batches", 2, "--snapshot", snapshot)
    wanted = json.loads(record.read_text().splitlines()[80])
    assert report["dropped"]["max_length"] > 50

    assert run_json("sample", *words, "--ordinal", 80)["position"] == wanted["position"]
    assert run_json("sample", *words, "--ordinal", 80, "--snapshot", snapshot)["position"] == wanted["position"]
    refused = run_json("sample", *words, "--ordinal", 10, "--snapshot", snapshot, status=1)
    assert "--ordinal 10 lies before" in refused["error"]["message"]


def test_a_row_that_became_no_sample_says_why(jsonl_file, capsys):
    path = jsonl_file([{"input": "far too long " * 50}, b'{"input": \x1b[31m'])
    words = ["sample", str(path), "--no-shuffle", "--tokenizer", tokenizer_folder(), "--max-length", "9", "--position"]

    assert main([*words, "0:0:0"]) == 0
    assert "dropped   max_length" in capsys.readouterr().out
    assert main([*words, "0:0:1"]) == 0
    out = capsys.readouterr().out
    assert "bad row   AD101" in out or "bad row   AD104" in out
    assert "\x1b" not in out


def test_a_sample_is_readable_too(data, capsys):
    assert main(["sample", data, "--ordinal", "3", "--no-shuffle", *INLINE]) == 0

    out = capsys.readouterr().out
    assert "position  0:0:3\nordinal   3\n" in out
    assert "line      4\n" in out
    assert 'row       {"input": "question 3 question 3 question 3 question 3 ", "label": 3}\n' in out
    assert "prompt    question 3 question 3" in out
    assert "tokens    " in out


@pytest.mark.parametrize(("position", "reason"), [("0:0:999", "no row 999 in window 0"), ("0:5:0", "no window 5")])
def test_a_position_that_is_not_there_is_named(data, run_json, position, reason):
    assert reason in run_json("sample", data, "--position", position, status=1)["error"]["message"]


# snapshot show


def test_a_snapshot_is_described(data, tmp_path, run_json, capsys):
    snapshot = tmp_path / "s"
    run_json("run", data, *INLINE, "--num-batches", 2, "--snapshot", snapshot, "--max-length", 20)

    found = run_json("snapshot", "show", snapshot)
    assert main(["snapshot", "show", str(snapshot)]) == 0

    assert (found["path"], found["counters"]["num_samples"], found["order"]["seed"]) == (str(snapshot), 64, 42)
    out = capsys.readouterr().out
    assert f"position     0:0:{found['row']} comes next" in out
    assert "delivered    64 samples, " in out
    assert "dropped      max_length " in out
    assert "order        seed 42, " in out


def test_a_damaged_snapshot_is_refused(tmp_path, capsys):
    path = tmp_path / "s"
    path.write_text("no snapshot")

    assert main(["snapshot", "show", str(path)]) == 1

    assert f"asyncdata: SnapshotError: AD602 {path} cannot be loaded" in capsys.readouterr().err


# Words


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (812, "812"), (999.4, "999"), (1000, "1.00k"), (81_234, "81.2k"), (99_960, "100k"), (8_123_456, "8.12M"),
     (2e9, "2.00G"), (3e12, "3T")],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_unit(number, text):
    assert si(number) == text


def test_columns_stand_under_one_another():
    assert table([("", "n"), ("some", "12"), ("x", "1,234")]) == "          n\nsome     12\nx     1,234"
    assert fields([("a", 1), ("longer", "")]) == "a       1\nlonger"
    assert fields([]) == ""


def test_no_text_can_command_the_terminal():
    assert printable("a\x1b[31m\nb é") == "a\\x1b[31m\\nb é"


def test_a_path_is_as_short_as_it_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert shown_path(str(tmp_path / "deep" / "x.jsonl")) == "deep/x.jsonl"
    assert shown_path("/elsewhere/x.jsonl") == "/elsewhere/x.jsonl"
