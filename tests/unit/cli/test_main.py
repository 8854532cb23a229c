"""The command line: its commands and options, its errors, and its exit statuses."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import structlog

import asyncdata
from asyncdata.checkpoint.snapshot import load
from asyncdata.cli.main import main, make_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.support.commands import INLINE, ROOT, asyncdata_process


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
        "asyncdata report",
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
def test_help_goes_to_stdout_with_status_0(name, capsys):
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
        "print(sorted({'anyio', 'numpy', 'structlog', 'tokenizers'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert printed.splitlines()[-1] == "[]"


def test_version_prints_the_version_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])

    assert stop.value.code == 0
    assert capsys.readouterr().out == f"asyncdata {asyncdata.__version__}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "stream data as a trainer would"),
        ("fly", "invalid choice"),
        ("run", "name DATA, or a mixture by --mix FILE"),
        ("run d", "--tokenizer DIR or --tokenize-fn PATH is required"),
        ("inspect d --loss-mask", "--tokenizer DIR or --tokenize-fn PATH is required"),
        ("run d --tokenize-fn m:f --kind chat", "--kind chooses a tokenize function; leave it, or --tokenize-fn"),
        ("run d --tokenizer t --set overlong", "a setting is written NAME=VALUE"),
        ("inspect d --tokenizer t --kind novel", "invalid choice: 'novel'"),
        ("inspect d --tokenizer t --position 3", "a position is written EPOCH:WINDOW:ROW"),
        ("run d --tokenizer t --batch-size 0", "a whole number from 1 on is needed, not '0'"),
        ("run d --tokenizer t --step-s soon", "a number of seconds is needed, not 'soon'"),
        ("run d --tokenizer t --resume", "--resume needs --snapshot FILE"),
        ("run d --tokenizer t --bad-rows weep", "invalid choice: 'weep'"),
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


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_command_leaves_the_configuration_of_the_log_as_it_was(data, capsys, is_configured):
    if is_configured:
        structlog.configure(processors=[structlog.processors.add_log_level])
    before = structlog.get_config()

    assert main(["order", data, "--num", "1"]) == 0

    assert (structlog.is_configured(), structlog.get_config()) == (is_configured, before)


def test_an_error_of_the_operating_system_is_one_message_too(data, tmp_path, capsys):
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


def test_a_reader_that_stops_after_the_first_lines_causes_no_error(data):
    with asyncdata_process("order", data, "--num", "0") as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (0, "")
