"""``asyncdata bench``: the shape of its report, what it refuses, and that no process is left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.cli.commands.bench_report import as_text
from asyncdata.cli.main import main
from asyncdata.cli.output import MAX_WIDTH
from asyncdata.demo import tokenizer_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENIZER = ("--tokenizer", tokenizer_folder())
SHORT = ("--seconds", "0.5", "--num-workers", "1")
RATES = {"rows_per_s", "tokens_per_s", "tokenize_fn_rows_per_s", "tokenizer_rows_per_s"}
TIMES = {"first_batch_s", "call_us", "call_p999_us", "longest_call_us", "cpu_us_per_row"}


@pytest.fixture
def prompts(jsonl_file: Callable[..., Path]) -> str:
    return str(jsonl_file({"id": n, "input": f"What is {n} + 1?", "pad": "+", "label": n} for n in range(300)))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """A function that runs the command with --json and returns what it printed."""

    def run(*words: object, status: int = 0) -> dict[str, Any]:
        assert main(["bench", *map(str, words), "--json"]) == status
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return run


def made_up(**figures: Any) -> dict[str, Any]:
    """A report of a loader in good order."""
    return {
        "num_samples": 10_000,
        "rows_per_s": 5000.0,
        "tokens_per_s": 900_000.0,
        "cpu_us_per_row": 1.4,
        "num_calls": 500,
        "data_wait_share": 0.0,
        "call_us": 4.6,
        "call_p999_us": 120.0,
        "longest_call_us": 300.0,
        "memory_bytes": 250_000_000,
        "first_batch_s": 0.5,
        "tokenize_fn_rows_per_s": 5200.0,
        "tokenizer_rows_per_s": 5300.0,
        "num_workers": 2,
        "buffer_size": 1000,
        "num_cpus": 2,
    } | figures


# What is measured


@pytest.mark.thorough
def test_bench_measures_every_figure(prompts, report):
    found = report(prompts, *TOKENIZER, *SHORT, "--label-key", "label")

    assert RATES | TIMES <= set(found)
    assert all(found[name] > 0 for name in RATES | TIMES)
    assert 0 <= found["data_wait_share"] <= 1
    assert found["memory_bytes"] > 1_000_000
    assert found["num_samples"] >= 32
    assert found["num_calls"] >= 1
    assert (found["num_workers"], found["buffer_size"]) == (1, 1000)


@pytest.mark.thorough
def test_a_function_without_prompts_has_no_tokenizer_of_its_own_beside_it(prompts, report):
    found = report(prompts, "--tokenize-fn", "tests.support.tokenize_fns:id_and_text", *SHORT)

    assert found["tokenizer_rows_per_s"] is None
    assert found["tokenize_fn_rows_per_s"] > 0


@pytest.mark.thorough
def test_bench_works_without_worker_processes(prompts, report):
    found = report(prompts, *TOKENIZER, "--seconds", "0.5", "--num-workers", 0)

    assert found["num_workers"] == 0
    assert found["rows_per_s"] > 0


@pytest.mark.thorough
def test_bench_works_with_fewer_rows_than_a_batch(jsonl_file, report):
    path = jsonl_file([{"input": "One row."}])

    found = report(path, *TOKENIZER, *SHORT)

    assert found["num_samples"] >= 32
    assert found["tokenize_fn_rows_per_s"] > 0


@pytest.mark.thorough
def test_bad_rows_that_may_be_skipped_do_not_stop_it_however_often_they_come_by(jsonl_file, report):
    path = jsonl_file([{"input": "One."}, *[b"{"] * 120, {"input": "Two."}])

    found = report(path, *TOKENIZER, *SHORT, "--bad-rows", "skip")

    assert found["num_samples"] >= 32
    assert found["tokenizer_rows_per_s"] > 0


# What it refuses


@pytest.mark.thorough
def test_a_bad_row_is_an_error_that_names_it(jsonl_file, report):
    path = jsonl_file([{"input": "One."}, b"{"])

    found = report(path, *TOKENIZER, *SHORT, status=1)

    assert f"{path}:2" in found["error"]["message"]


def test_data_that_is_not_there_is_named(tmp_path, report):
    found = report(tmp_path / "none.jsonl", *TOKENIZER, *SHORT, status=1)

    assert "AD304" in found["error"]["message"]


def test_a_setting_that_cannot_work_is_refused_before_anything_is_measured(prompts, report, capsys):
    found = report(prompts, *TOKENIZER, *SHORT, "--set", "volume=11", status=1)

    assert "has no setting volume" in found["error"]["message"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("d",), "--tokenizer DIR or --tokenize-fn PATH is required"),
        (("d", *TOKENIZER, "--seconds", "soon"), "a number of seconds is needed"),
        (("d", *TOKENIZER, "--buffer-size", "0"), "a whole number from 1 on is needed"),
        ((), "required: DATA"),
    ],
)
def test_a_wrong_command_line_is_status_2(words, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])

    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


# What people read


def test_each_figure_comes_with_its_meaning_within_the_width_of_a_terminal(prompts, capsys):
    assert main(["bench", prompts, *TOKENIZER, *SHORT]) == 0

    out = capsys.readouterr().out
    heads = [line.split("  ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert heads == ["tokenizer", "tokenize fn", "loader", "first batch", "a call", "data wait", "memory"]
    assert all(len(line) <= MAX_WIDTH for line in out.splitlines())
    assert all(after.startswith(" ") for head, after in pairs(out.splitlines()) if not head.startswith(" "))


def pairs(lines: list[str]) -> list[tuple[str, str]]:
    return list(zip(lines, lines[1:], strict=False))


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ({}, "0.94 of the tokenizer alone, with 2 workers on 2 CPUs. More rows need more CPUs"),
        ({"num_cpus": 8}, "A faster trainer wants a larger --num-workers"),
        ({"rows_per_s": 4000.0}, "a larger --buffer-size makes larger chunks"),
        ({"rows_per_s": 3000.0, "tokenize_fn_rows_per_s": 3100.0}, "look at the template"),
        ({"tokenizer_rows_per_s": None}, "0.96 of the function alone"),
        ({"tokenizer_rows_per_s": 500.0}, "0.96 of the function alone"),
        ({"data_wait_share": 0.2}, "A larger --buffer-size (now 1,000) bridges"),
        ({"longest_call_us": 9000.0}, "A larger --buffer-size (now 1,000) bridges"),
        ({"memory_bytes": None}, "unknown"),
    ],
)
def test_the_advice_of_bench_follows_from_the_figures(figures, advice):
    text = " ".join(as_text(made_up(**figures)).split())

    assert advice in text


def test_bench_advises_no_larger_buffer_if_nothing_waits():
    assert "--buffer-size (now" not in as_text(made_up())
