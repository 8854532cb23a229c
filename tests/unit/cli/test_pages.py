"""Pages for the browser: of inspected rows, of the demo, and of telemetry that was damaged, by chance or on purpose."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.cli.main import main
from asyncdata.report.samples import MAX_SAMPLES
from asyncdata.telemetry.records import Event, encode
from tests.support.html_page import ReadPage, read_page
from tests.support.telemetry_files import BEGAN, write_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Rows


@pytest.fixture
def inspect(tmp_path: Path, demo_tokenizer: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that makes a page of text rows; the page, and what was printed."""

    def made(data: Path, *words: str) -> tuple[ReadPage, str]:
        page = tmp_path / "rows.html"
        text = ("--tokenizer", demo_tokenizer, "--kind", "text", "--no-shuffle")
        assert main(["inspect", str(data), *text, "--html", str(page), *words]) == 0
        return read_page(page.read_bytes()), capsys.readouterr().out

    return made


def test_a_page_of_rows_has_more_of_them_than_a_terminal_and_their_file_and_line(jsonl_file, tmp_path, inspect):
    (tmp_path / "rows.html").write_text("an older page")

    page, _ = inspect(jsonl_file([{"text": f"row {number}"} for number in range(250)]))

    assert len(page.data) == 200
    assert page.data[7]["place"].endswith("rows.jsonl:8")
    assert "".join(text for text, _ in page.data[7]["texts"][0][1]).startswith("row 7")


@pytest.mark.thorough
def test_a_page_that_is_full_says_that_there_are_more_rows(jsonl_file, inspect):
    data = jsonl_file([{"text": "x"}] * (MAX_SAMPLES + 1))

    page, out = inspect(data, "--num", "0")
    assert "further rows: the page is full" in out
    assert "further rows: the page is full" in page.text
    assert len(page.data) == MAX_SAMPLES
    assert "further rows" not in inspect(data, "--num", str(MAX_SAMPLES))[1]


def test_a_row_without_a_sample_is_shown_as_it_is_in_its_file(jsonl_file, inspect):
    page, _ = inspect(jsonl_file([b'{"text": \xff}', {"text": "", "other": "</script>"}]), "--set", "eos=false")

    bad, dropped = page.data
    assert (bad["state"], dropped["state"]) == ("bad", "dropped")
    assert bad["texts"][0][1][0][0] == '{"text": ⟨U+DCFF⟩}'
    assert "</script>" in dropped["texts"][0][1][0][0]


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


# Damaged telemetry: a page that counts the damage, or a named error

NUMBERS = re.compile(rb"(?<=[:\[,])-?[0-9]+(\.[0-9]+)?")
KEYS = re.compile(rb'"(-?[0-9]+)":')
ABSURD = [b"-1", b"0", b"1e308", b"-1e308", b"1e400", b"5e-324", b"1" + b"0" * 30, b"-" + b"9" * 19, b"%d" % 2**63]
ABSURD += [b"NaN", b"null", b'"text"', b"true", b"[]", b"{}", b"9" * 5000]


def with_other_bytes(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 20))):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def with_an_absurd_number(data: bytes, rng: random.Random) -> bytes:
    place = rng.choice(list(NUMBERS.finditer(data)))
    return data[: place.start()] + rng.choice(ABSURD) + data[place.end() :]


def with_absurd_numbers_everywhere(data: bytes, rng: random.Random) -> bytes:
    absurd = rng.choice(ABSURD)
    lines = data.splitlines(keepends=True)
    return b"".join([lines[0], *(NUMBERS.sub(absurd, line) if rng.random() < 0.5 else line for line in lines[1:])])


def with_an_absurd_key(data: bytes, rng: random.Random) -> bytes:
    place = rng.choice(list(KEYS.finditer(data)))
    return data[: place.start(1)] + rng.choice((b"-5", b"9" * 30, b"1.5", b"", b"x")) + data[place.end(1) :]


def with_no_utf8(data: bytes, rng: random.Random) -> bytes:
    start = rng.choice(list(re.finditer(rb'"[^"]+"', data))).start() + 1
    return data[:start] + rng.choice((b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000")) + data[start:]


def with_lines_elsewhere(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(rng.choices(lines, k=len(lines)) if rng.random() < 0.5 else lines)


def cut_off(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] + rng.choice((b"", b"\n", b"{}\n", b'{"kind":"interval"}\n'))


WAYS = [with_other_bytes, with_an_absurd_number, with_an_absurd_number, with_absurd_numbers_everywhere]
WAYS += [with_an_absurd_key, with_no_utf8, with_lines_elsewhere, cut_off]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    fields = {"reason": "too long", "num_dropped": 30, "num_rows": 50, "path": "b.jsonl", "example": "b.jsonl:7"}
    for path in (tmp_path / "run").iterdir():
        head, *lines = path.read_bytes().splitlines(keepends=True)
        event = encode(Event(at=BEGAN, name="rows.dropped", level="warning", fields=fields))
        path.write_bytes(b"".join([head, event, b"\n", *lines]))
    return tmp_path / "run"


def page_or_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page's text; empty if it was refused by name."""
    page = folder / "page.html"
    status = main(["report", str(folder), "-o", str(page)])
    errors = capsys.readouterr().err
    if status:
        assert (status, page.exists()) == (1, False)
        assert re.search(r"\bAD62[01]\b", errors), errors
        return ""

    return read_page(page.read_bytes()).text


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 400), marks=pytest.mark.thorough)], ids=["4", "396"])
def test_damaged_folders_have_a_page_or_an_error_by_name(folder, capsys, seeds):
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for seed in seeds:
        rng = random.Random(seed)
        for path in folder.iterdir():
            path.unlink()
        for path, data in whole.items():
            path.write_bytes(data)
        damaged = rng.choice(sorted(whole))
        damaged.write_bytes(rng.choice(WAYS)(whole[damaged], rng))

        try:
            page_or_error(folder, capsys)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize(
    "line",
    [b'{"kind":"event","at":1.0,"name":"\xff"}', b'{"kind":"interval","at":1e300,"elapsed_s":0,"place":[0,0,0]}'],
    ids=["no UTF-8", "an absurd time"],
)
def test_a_damaged_line_is_left_out_and_counted(folder, capsys, line):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes() + line + b"\n")

    assert "1 lines of the files are damaged, and were left out." in page_or_error(folder, capsys)


def test_a_file_that_begins_with_no_utf8_is_refused_by_name(folder, capsys):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b'"', b'"\xff', 1))

    assert page_or_error(folder, capsys) == ""
