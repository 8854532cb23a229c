"""Rows that are dropped in mass: one warning a file and reason, in the log, in ``inspect`` and on top of the report."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from asyncdata import BadRows, Mix, Part, RowShuffle, SoftPacking
from tests.support.html_page import read_page
from tests.support.loaders import make
from tests.support.parts import main
from tests.support.ranks import make as numbered_rows
from tests.support.ranks import write
from tests.support.tokenize_fns import drops_marked

NUM_ROWS = 150


@pytest.fixture
def good(tmp_path):
    return written(tmp_path / "good.jsonl", lambda _: False)


@pytest.fixture
def dropped(tmp_path):
    return written(tmp_path / "dropped.jsonl", lambda _: True)


def written(path, is_dropped, num_rows=NUM_ROWS):
    path.write_text("".join(json.dumps({"id": row, "is_dropped": is_dropped(row)}) + "\n" for row in range(num_rows)))
    return path


def warnings_of(source, function=drops_marked, **knobs):
    with capture_logs() as events, make(source, function, epochs=1, batch_size=10, **knobs) as loader:
        assert sum(map(len, loader)) > 0
    return [event for event in events if event["event"] == "rows.dropped"]


WAYS = {
    "windows": {},
    "in the order of the files": {"shuffle": False},
    "one window after the other": {"shuffle": {"block_bytes": 512, "window_blocks": 2}},
    "all rows shuffled": {"shuffle": "full"},
    "left out by the index": {"shuffle": RowShuffle(only_kept=True)},
    "planned packs": {"shuffle": "full", "packing": SoftPacking(max_length=8), "plan_packs": True},
    "workers": {"num_workers": 1},
}


@pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
def test_a_file_of_which_all_rows_are_dropped_is_named_with_a_row_and_its_line(good, dropped, knobs):
    (warning,) = warnings_of([str(good), str(dropped)], **knobs)

    assert (warning["path"], warning["reason"]) == (str(dropped), "marked")
    assert 20 <= warning["num_dropped"] == warning["num_rows"] <= NUM_ROWS
    path, line, _ = warning["example"].replace(" ", ":").split(":", 2)
    assert path == str(dropped)
    assert json.loads(dropped.read_text().splitlines()[int(line) - 1])["is_dropped"]


@pytest.mark.parametrize("knobs", [{}, {"shuffle": "full", "plan_packs": True}], ids=["online", "planned"])
def test_what_a_packing_drops_in_mass_is_told_once(tmp_path, knobs):
    path = write(tmp_path / "rows.jsonl", [20, 70] * 60)
    packing = {"packing": SoftPacking(max_length=64), "cache": {"folder": ""}, **knobs}
    with capture_logs() as events, numbered_rows(path, epochs=2, **packing) as loader:
        assert len([list(loader), list(loader)]) == 2

    (event,) = [event for event in events if event["event"] == "rows.dropped"]
    assert (event["reason"], 20 <= event["num_dropped"] <= event["num_rows"]) == ("overlong", True)


def test_files_that_are_too_small_are_told_together(tmp_path):
    for number in range(40):
        written(tmp_path / f"part-{number}.jsonl", lambda row: row % 2 == 0, num_rows=4)

    (warning,) = warnings_of(tmp_path)

    assert "path" not in warning
    assert warning["num_dropped"] >= 20
    assert str(tmp_path) in warning["example"]


def test_a_part_of_a_mixture_is_named(good, dropped):
    mix = Mix({"one": Part(good, when_done="leave"), "two": Part([str(good), str(dropped)], when_done="leave")})

    (warning,) = warnings_of(mix)

    assert (warning["source"], warning["path"]) == ("two", str(dropped))


def test_bad_rows_that_are_skipped_are_told_like_other_drops(good, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n" * NUM_ROWS)

    (warning,) = warnings_of([str(good), str(empty)], bad_rows=BadRows(policy="skip", max=None))

    assert (warning["path"], warning["reason"]) == (str(empty), "bad row AD421")


@pytest.mark.thorough
def test_parquet_files_are_named_with_the_number_of_a_row(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("good", "dropped"):
        rows = [{"id": row, "is_dropped": name == "dropped"} for row in range(NUM_ROWS)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")

    (warning,) = warnings_of(tmp_path)

    assert warning["path"] == str(tmp_path / "dropped.parquet")
    assert warning["example"].startswith(f"{warning['path']} (row ")


@pytest.mark.thorough
def test_inspect_and_the_report_say_it(good, dropped, tmp_path, capsys):
    paths, page = [str(good), str(dropped)], tmp_path / "page.html"

    assert main(["inspect", *paths, "--tokenize-fn", "tests.support.tokenize_fns:drops_marked", "--num", "0"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropped in mass")]
    assert f"150 of 150 rows of {dropped}: marked, such as {dropped}:" in line

    warnings_of(paths, telemetry=tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    top = read_page(page.read_bytes()).text.partition("Samples delivered")[0]
    for told in ("of the rows were dropped: marked.", "150 of 300 rows (50.0 %)", f"of {dropped}, such as {dropped}:"):
        assert told in top
