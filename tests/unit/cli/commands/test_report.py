"""``asyncdata inspect --html`` and ``asyncdata report --demo``: pages for which no run is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder
from asyncdata.report.samples import MAX_SAMPLES
from tests.support.html_page import read_page

if TYPE_CHECKING:
    from pathlib import Path

TEXT = ("--tokenizer", tokenizer_folder(), "--kind", "text", "--no-shuffle")


def test_a_page_of_rows_has_more_of_them_than_a_terminal_and_their_file_and_line(jsonl_file, tmp_path):
    data = jsonl_file([{"text": f"row {number}"} for number in range(250)])
    page = tmp_path / "rows.html"

    assert main(["inspect", str(data), *TEXT, "--html", str(page)]) == 0
    samples = read_page(page.read_bytes()).data
    assert len(samples) == 200
    assert samples[7]["place"].endswith("rows.jsonl:8")
    assert "".join(text for text, _ in samples[7]["texts"][0][1]).startswith("row 7")


@pytest.mark.thorough
def test_a_page_that_is_full_says_that_there_are_more_rows(jsonl_file, tmp_path, capsys):
    data = jsonl_file([{"text": "x"}] * (MAX_SAMPLES + 1))
    page = tmp_path / "rows.html"

    assert main(["inspect", str(data), *TEXT, "--html", str(page), "--num", "0"]) == 0
    assert "further rows: the page is full" in capsys.readouterr().out
    assert "further rows: the page is full" in read_page(page.read_bytes()).text
    assert len(read_page(page.read_bytes()).data) == MAX_SAMPLES

    assert main(["inspect", str(data), *TEXT, "--html", str(page), "--num", str(MAX_SAMPLES)]) == 0
    assert "further rows" not in capsys.readouterr().out


def test_a_row_without_a_sample_is_shown_as_it_is_in_its_file(jsonl_file, tmp_path):
    data = jsonl_file([b'{"text": \xff}', {"text": "", "other": "</script>"}])
    page = tmp_path / "rows.html"

    assert main(["inspect", str(data), *TEXT, "--set", "eos=false", "--html", str(page)]) == 0
    bad, dropped = read_page(page.read_bytes()).data
    assert (bad["state"], dropped["state"]) == ("bad", "dropped")
    assert bad["texts"][0][1][0][0] == '{"text": ⟨U+DCFF⟩}'
    assert "</script>" in dropped["texts"][0][1][0][0]


def test_a_page_replaces_an_older_one_and_a_folder_that_is_not_there_is_an_error(jsonl_file, tmp_path: Path, capsys):
    data, page = jsonl_file([{"text": "x"}]), tmp_path / "rows.html"
    page.write_text("old")

    assert main(["inspect", str(data), *TEXT, "--html", str(page)]) == 0
    assert page.read_bytes().startswith(b"<!doctype html>")
    assert main(["inspect", str(data), *TEXT, "--html", str(tmp_path / "none" / "rows.html")]) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report"], ["report", "runs/a", "--demo"]])
def test_a_report_is_of_a_run_or_of_the_demo(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(words)

    assert error.value.code == 2
    assert "name the FOLDER of a run's telemetry, or use --demo" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_demo_has_samples_packs_drops_a_mixture_and_a_bad_row(tmp_path):
    page = tmp_path / "demo.html"

    assert main(["report", "--demo", "-o", str(page)]) == 0
    found = read_page(page.read_bytes())
    assert {"packs-chart-data", "mix-chart-data", "lengths-chart-data", "waits-chart-data"} <= set(found.tables)
    assert found.tables["dropped-table"][1][0] == "max_length"
    assert found.tables["bad-rows-table"][1][0] == "AD101"
    assert {sample["source"] for sample in found.data if sample["state"] == "kept"} == {"function", "class", "module"}
    assert all(0 < sample["trained"] < sample["tokens"] for sample in found.data if sample["state"] == "kept")
