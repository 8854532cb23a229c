"""``asyncdata quarantine``: what was put aside, and what of it is good by now."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from structlog.testing import capture_logs

from asyncdata import BadRowError, DataLoader
from asyncdata.cli.inspection import find_rows
from asyncdata.cli.main import main
from asyncdata.delivery.quarantine import Quarantine
from asyncdata.demo import tokenizer_folder
from tests.support.bad_inputs import GOOD, prompts, with_bad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKENS = ("--tokenizer", tokenizer_folder(), "--label-key", "label")
MENDED = b'{"input": "mended", "label": 9}'


@pytest.fixture(autouse=True)
def the_log_is_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    structlog.reset_defaults()


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*words: object, status: int = 0) -> Any:
        assert main(["quarantine", *map(str, words), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


def put_aside(source: Any, num: int = 4, **settings: Any) -> str:
    """The quarantine of a run over ``source``."""
    knobs = {"num_workers": 0, "shuffle": False, "timeout_s": 240, "bad_rows": "quarantine"}
    with capture_logs(), DataLoader(source, tokenize_fn=prompts(**settings), **knobs) as loader:
        loader.get_next_batch(num)
    return "quarantine.jsonl"


def add(path: str, code: str, reason: str = "was bad", **place: Any) -> None:
    """As a run does."""
    with capture_logs():
        Quarantine("quarantine.jsonl").add(BadRowError(code, reason, path=path, **place))


def test_quarantine_show_prints_place_reason_and_row_and_counts(capsys, tmp_path):
    Path("rows.jsonl").write_bytes(with_bad(b'{"input": "cut'))
    put_aside("rows.jsonl", num=9)

    assert main(["quarantine", "show", "quarantine.jsonl"]) == 0
    first, row, *counts = capsys.readouterr().out.splitlines()
    assert first.startswith("rows.jsonl:3  AD101 invalid JSON at column 11")
    assert first.endswith("(2 times)")
    assert row == '  row: {"input": "cut'
    assert counts == ["rows   1", "AD101  1"]


def test_quarantine_show_with_json_is_one_object(run_json):
    Path("rows.jsonl").write_bytes(with_bad(b"null"))
    put_aside("rows.jsonl")
    with Path("quarantine.jsonl").open("a") as file:
        file.write("{")

    found = run_json("show", "quarantine.jsonl")

    (row,) = found["rows"]
    assert (row["code"], row["line"], row["byte_offset"], row["excerpt"], row["times"]) == ("AD113", 3, 72, "null", 1)
    assert (found["codes"], found["num_unreadable"]) == ({"AD113": 1}, 1)


def test_control_characters_of_a_bad_row_are_escaped(capsys):
    add("/a", "AD101", "a\x1b[2Jb", line=1)

    assert main(["quarantine", "show", "quarantine.jsonl"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def plain(bad: bytes) -> str:
    Path("rows.jsonl").write_bytes(with_bad(bad))
    return "rows.jsonl"


def packed(bad: bytes) -> str:
    Path("rows.jsonl.gz").write_bytes(gzip.compress(with_bad(bad)))
    return "rows.jsonl.gz"


def array(bad: bytes) -> str:
    Path("rows.json").write_bytes(b"[" + b",\n".join([*GOOD[:2], bad, *GOOD[2:]]) + b"]")
    return "rows.json"


@pytest.mark.thorough
@pytest.mark.parametrize("write", [plain, packed, array])
def test_rows_that_were_mended_are_written_where_a_loader_can_read_them(run_json, write):
    quarantine = put_aside(write(b'{"text": "x", "label": 9}'))
    before = Path(quarantine).read_bytes()
    write(MENDED)

    found = run_json("retry", quarantine, *TOKENS, "--output", "good.jsonl")

    assert [(row["status"], row["code"]) for row in found["rows"]] == [("good", "AD110")]
    assert (found["counts"], found["output"]) == ({"good": 1}, "good.jsonl")
    assert Path("good.jsonl").read_bytes() == MENDED + b"\n"
    assert stat.S_IMODE(Path("good.jsonl").stat().st_mode) == 0o600
    assert Path(quarantine).read_bytes() == before
    with DataLoader("good.jsonl", tokenize_fn=prompts(), num_workers=0) as loader:
        assert [sample.label for sample in loader.get_next_batch(1)] == [9]


@pytest.mark.thorough
def test_a_row_whose_line_was_not_known_is_found_by_its_byte_offset(run_json):
    Path("rows.jsonl").write_bytes(b"\n".join([*GOOD, MENDED, GOOD[0], b""]))
    path = str(Path("rows.jsonl").absolute())
    start = len(b"\n".join(GOOD)) + 1
    for offset in (start, start + 1, 10**18):
        add(path, "AD101", byte_offset=offset)

    found = run_json("retry", "quarantine.jsonl", *TOKENS, "--output", "good.jsonl")

    assert [row["status"] for row in found["rows"]] == ["good", "not tried", "not tried"]
    assert Path("good.jsonl").read_bytes() == MENDED + b"\n"


@pytest.mark.thorough
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("change", [0, -20, 1])
def test_a_row_is_looked_for_where_it_begins_and_if_rows_before_it_were_mended_by_its_line(run_json, mark, change):
    """Row 0 is the first bad one, and row 3 the second; the first is mended, and becomes shorter or longer."""
    rows = [b'{"input": "", "no": "' + b"x" * 30 + b'"', *GOOD[:2], b"{", *GOOD[:2]]
    Path("rows.jsonl").write_bytes(mark + b"\n".join([*rows, b""]))
    quarantine = put_aside("rows.jsonl")
    first = b'{"input": "first", "label": 0}'
    rows[0] = first + b" " * (len(rows[0]) - len(first) + change)
    rows[3] = MENDED
    Path("rows.jsonl").write_bytes(mark + b"\n".join([*rows, b""]))

    found = run_json("retry", quarantine, *TOKENS, "--output", "good.jsonl")

    assert [(row["status"], row["line"]) for row in found["rows"]] == [("good", 1), ("good", 4)]
    assert [json.loads(line)["label"] for line in Path("good.jsonl").read_bytes().splitlines()] == [0, 9]


@pytest.mark.thorough
def test_a_row_that_did_not_move_costs_no_search_for_its_line(run_json, monkeypatch):
    quarantine = put_aside(_written([GOOD[0], b"{", *GOOD]))
    monkeypatch.setattr(find_rows, "_line_start", lambda *_: pytest.fail("the file was searched"))

    found = run_json("retry", quarantine, *TOKENS)

    assert [row["status"] for row in found["rows"]] == ["bad"]


def _written(rows: list[bytes]) -> str:
    Path("rows.jsonl").write_bytes(b"\n".join([*rows, b""]))
    return "rows.jsonl"


@pytest.mark.thorough
def test_rows_that_are_good_under_another_setting_are_written(run_json):
    quarantine = put_aside(plain(b'{"text": "x", "label": 9}'))

    found = run_json("retry", quarantine, *TOKENS, "--prompt-key", "text")

    assert found["counts"] == {"good": 1}
    assert Path("retried.jsonl").read_bytes() == b'{"text": "x", "label": 9}\n'


@pytest.mark.thorough
def test_an_element_laid_out_over_lines_is_written_on_one(run_json):
    Path("rows.json").write_bytes(b'[{"text":\n "x",\n "label": 9}, ' + b", ".join(GOOD) + b"]")
    quarantine = put_aside("rows.json")

    run_json("retry", quarantine, *TOKENS, "--prompt-key", "text")

    assert Path("retried.jsonl").read_bytes() == b'{"text": "x", "label": 9}\n'


@pytest.mark.thorough
def test_parquet_rows_are_found_by_their_numbers(run_json):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"input": f"text {number}", "label": number, "other": "y"} for number in range(5)]
    rows[3]["input"] = None
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet", row_group_size=2)
    quarantine = put_aside("rows.parquet")

    found = run_json("retry", quarantine, *TOKENS, "--prompt-key", "other")

    assert [(row["status"], row["row_number"]) for row in found["rows"]] == [("good", 3)]
    assert json.loads(Path("retried.jsonl").read_text()) == rows[3]


@pytest.mark.thorough
def test_rows_of_a_saved_dataset_are_found_by_their_numbers(run_json):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"input": None if number == 3 else "x", "label": number, "other": "y"} for number in range(5)]
    datasets.Dataset.from_list(rows, split="train").save_to_disk("saved")
    quarantine = put_aside("saved")

    found = run_json("retry", quarantine, *TOKENS, "--prompt-key", "other")

    assert [(row["status"], row["row_number"]) for row in found["rows"]] == [("good", 3)]


@pytest.mark.thorough
def test_rows_that_are_still_bad_or_dropped_or_not_tried_are_reported_and_not_written(capsys):
    Path("rows.jsonl").write_bytes(b"\n".join([*GOOD, b"null", b'{"input": ""}', b"{}", b"[]", b""]))
    quarantine = "quarantine.jsonl"
    path = str(Path("rows.jsonl").absolute())
    for line, code in ((5, "AD113"), (6, "AD110"), (1, "AD423"), (99, "AD101")):
        add(path, code, line=line, byte_offset=line)
    add("/gone", "AD101", line=1)
    add("module:make", "AD421", row_number=1, byte_offset=-1)

    assert main(["quarantine", "retry", quarantine, *TOKENS[:2]]) == 0
    out = capsys.readouterr().out
    lines = [line.split("  ") for line in out.splitlines()[:6]]
    assert [(line[0], line[1].partition(":")[0]) for line in lines] == [
        ("rows.jsonl:5", "bad"),
        ("rows.jsonl:6", "dropped"),
        ("rows.jsonl:1", "not tried"),
        ("rows.jsonl:99", "not tried"),
        ("/gone:1", "not tried"),
        ("module:make (row 1)", "not tried"),
    ]
    assert "AD423 its worker died, and this process might too" in out
    assert "/gone does not exist any more, or is not a file" in out
    assert out.splitlines()[6:] == ["good       0", "dropped    1", "bad        1", "not tried  4"]
    assert not Path("retried.jsonl").exists()


def test_retry_does_not_overwrite_its_output(capsys):
    quarantine = put_aside(plain(b"null"))
    Path("retried.jsonl").write_text("mine")

    assert main(["quarantine", "retry", quarantine, *TOKENS]) == 1
    assert "retried.jsonl exists already; name another file by --output" in capsys.readouterr().err
    assert Path("retried.jsonl").read_text() == "mine"


def test_retry_without_a_tokenizer_is_status_2(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["quarantine", "retry", "quarantine.jsonl"])
    assert "--tokenizer DIR or --tokenize-fn PATH is required" in capsys.readouterr().err


def test_a_quarantine_file_that_does_not_exist_is_named(run_json):
    found = run_json("show", "nothing.jsonl", status=1)

    assert found["error"]["message"] == "AD605 cannot read the quarantine nothing.jsonl: No such file or directory"


@pytest.mark.parametrize("action", [["show"], ["retry", *TOKENS]])
def test_a_file_that_is_not_a_quarantine_file_is_status_2(action, capsys):
    Path("rows.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n')
    words = ["quarantine", action[0], "rows.jsonl", *action[1:]]

    assert main([*words, "--json"]) == 2
    told = "rows.jsonl is not a quarantine file: none of its 2 lines describes a bad row"
    assert json.loads(capsys.readouterr().out)["error"]["message"] == told
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_no_excerpts_leaves_the_text_of_bad_rows_out(capsys):
    plain(b'{"input": "PRIVATE", "lab')
    policy = ("--bad-rows", "quarantine", "--num-workers", "0", "--no-excerpts")

    assert main(["run", "rows.jsonl", *TOKENS, *policy]) == 0
    said = capsys.readouterr()
    assert "PRIVATE" not in said.out + said.err + Path("quarantine.jsonl").read_text()
    assert json.loads(Path("quarantine.jsonl").read_text())["line"] == 3
