"""``asyncdata quarantine retry`` finds the rows that a run has put aside, in files of every kind and after repairs."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader
from asyncdata.cli.inspection import find_rows
from asyncdata.demo import tokenizer_folder
from tests.support.bad_inputs import GOOD, prompts, with_bad

if TYPE_CHECKING:
    from collections.abc import Callable

BAD, MENDED = b'{"text": "x", "label": 9}', b'{"input": "mended", "label": 9}'
ROWS = [{"input": None if number == 3 else "x", "label": number, "other": "y"} for number in range(5)]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def retry(run_json: Callable[..., list[Any]]) -> Callable[..., dict[str, Any]]:
    """A function that tries the rows of ``quarantine.jsonl`` again, and returns what it printed."""

    def run(*words: str) -> dict[str, Any]:
        tokens = ("--tokenizer", tokenizer_folder(), "--label-key", "label")
        (found,) = run_json("quarantine", "retry", "quarantine.jsonl", *tokens, *words)
        return found

    return run


def put_aside(source: str, num: int = 4) -> None:
    """Run over ``source``, as far as to its first ``num`` samples."""
    knobs = {"num_workers": 0, "shuffle": False, "timeout_s": 240, "bad_rows": "quarantine"}
    with capture_logs(), DataLoader(source, tokenize_fn=prompts(), **knobs) as loader:
        loader.get_next_batch(num)


def lines(bad: bytes) -> str:
    Path("rows.jsonl").write_bytes(with_bad(bad))
    return "rows.jsonl"


def gzipped(bad: bytes) -> str:
    Path("rows.jsonl.gz").write_bytes(gzip.compress(with_bad(bad)))
    return "rows.jsonl.gz"


def array(bad: bytes) -> str:
    """Its elements are laid out over lines."""
    Path("rows.json").write_bytes(b"[" + b",\n".join([*GOOD[:2], bad.replace(b", ", b",\n "), *GOOD[2:]]) + b"]")
    return "rows.json"


def parquet() -> str:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(ROWS), "rows.parquet", row_group_size=2)
    return "rows.parquet"


def saved_dataset() -> str:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS, split="train").save_to_disk("saved")
    return "saved"


@pytest.mark.parametrize("write", [lines, gzipped, array])
def test_rows_that_were_mended_are_written_where_a_loader_can_read_them(retry, write):
    put_aside(write(BAD))
    before = Path("quarantine.jsonl").read_bytes()
    write(MENDED)

    found = retry("--output", "good.jsonl")

    assert [(row["status"], row["code"]) for row in found["rows"]] == [("good", "AD110")]
    assert (found["counts"], found["output"]) == ({"good": 1}, "good.jsonl")
    assert Path("good.jsonl").read_bytes() == MENDED + b"\n"
    assert stat.S_IMODE(Path("good.jsonl").stat().st_mode) == 0o600
    assert Path("quarantine.jsonl").read_bytes() == before
    with DataLoader("good.jsonl", tokenize_fn=prompts(), num_workers=0) as loader:
        assert [sample.label for sample in loader.get_next_batch(1)] == [9]


@pytest.mark.thorough
@pytest.mark.parametrize("write", [parquet, saved_dataset])
def test_rows_without_lines_are_found_by_their_numbers(retry, write):
    put_aside(write())

    found = retry("--prompt-key", "other")

    assert [(row["status"], row["row_number"]) for row in found["rows"]] == [("good", 3)]
    assert json.loads(Path("retried.jsonl").read_text()) == ROWS[3]


@pytest.mark.parametrize(
    ("mark", "change"),
    [
        (b"", 0),
        (b"\xef\xbb\xbf", -20),
        *(
            pytest.param(mark, change, marks=pytest.mark.thorough)
            for mark, change in ((b"\xef\xbb\xbf", 0), (b"", -20), (b"", 1), (b"\xef\xbb\xbf", 1))
        ),
    ],
)
def test_a_row_is_looked_for_where_it_begins_and_if_rows_before_it_were_mended_by_its_line(retry, mark, change):
    """Row 0 is the first bad one, and row 3 the second; the first is mended, and becomes shorter or longer."""
    rows = [b'{"input": "", "no": "' + b"x" * 30 + b'"', *GOOD[:2], b"{", *GOOD[:2]]
    Path("rows.jsonl").write_bytes(mark + b"\n".join([*rows, b""]))
    put_aside("rows.jsonl")
    first = b'{"input": "first", "label": 0}'
    rows[0] = first + b" " * (len(rows[0]) - len(first) + change)
    rows[3] = MENDED
    Path("rows.jsonl").write_bytes(mark + b"\n".join([*rows, b""]))

    found = retry()

    assert [(row["status"], row["line"]) for row in found["rows"]] == [("good", 1), ("good", 4)]
    assert [json.loads(line)["label"] for line in Path("retried.jsonl").read_bytes().splitlines()] == [0, 9]


def test_a_row_whose_line_was_not_known_is_found_by_its_byte_offset(retry):
    Path("rows.jsonl").write_bytes(b"\n".join([*GOOD, MENDED, GOOD[0], b""]))
    start = len(b"\n".join(GOOD)) + 1
    record = {"code": "AD101", "path": str(Path("rows.jsonl").absolute()), "line": None, "reason": "", "excerpt": ""}
    places = [json.dumps({**record, "byte_offset": offset}) for offset in (start, start + 1, 10**18)]
    Path("quarantine.jsonl").write_text("\n".join(places) + "\n")

    found = retry()

    assert [row["status"] for row in found["rows"]] == ["good", "not tried", "not tried"]
    assert Path("retried.jsonl").read_bytes() == MENDED + b"\n"


@pytest.mark.thorough
def test_a_row_that_did_not_move_costs_no_search_for_its_line(retry, monkeypatch):
    put_aside(lines(b"{"))
    monkeypatch.setattr(find_rows, "_line_start", lambda *_: pytest.fail("the file was searched"))

    assert [row["status"] for row in retry()["rows"]] == ["bad"]
