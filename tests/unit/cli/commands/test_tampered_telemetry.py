"""``asyncdata report`` of damaged files, by chance or on purpose: a page that counts the damage, or a named error."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest

from asyncdata.cli.main import main
from asyncdata.telemetry.records import Event, encode
from tests.support.html_page import read_page
from tests.support.telemetry_files import BEGAN, write_run

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = re.compile(rb"(?<=[:\[,])-?[0-9]+(\.[0-9]+)?")
ABSURD = [
    b"-1",
    b"0",
    b"1e308",
    b"-1e308",
    b"1e400",
    b"5e-324",
    b"1" + b"0" * 30,
    b"-" + b"9" * 19,
    b"%d" % 2**63,
    b"NaN",
    b"null",
]
ABSURD += [b'"text"', b"true", b"[]", b"{}", b"9" * 5000]
KEYS = re.compile(rb'"(-?[0-9]+)":')


def tampered(folder: Path, seed: int) -> None:
    """Damage one of the files."""
    rng = random.Random(seed)
    path = rng.choice(sorted(folder.glob("rank-*.jsonl")))
    data = path.read_bytes()
    path.write_bytes(rng.choice(WAYS)(data, rng))


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
    place = rng.choice(list(re.finditer(rb'"[^"]+"', data)))
    return (
        data[: place.start() + 1]
        + rng.choice((b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000"))
        + data[place.start() + 1 :]
    )


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


def check_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The page's text; empty if it was refused by name."""
    page = folder / "page.html"
    status = main(["report", str(folder), "-o", str(page)])
    errors = capsys.readouterr().err
    if status:
        assert (status, page.exists()) == (1, False)
        assert re.search(r"\bAD62[01]\b", errors), errors
        return ""

    return read_page(page.read_bytes()).text


def check_tampered(folder: Path, capsys: pytest.CaptureFixture[str], seeds: range) -> None:
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for seed in seeds:
        for path in folder.iterdir():
            path.unlink()
        for path, data in whole.items():
            path.write_bytes(data)
        tampered(folder, seed)
        try:
            check_report(folder, capsys)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_damaged_folder_has_a_page_or_an_error_by_name(folder, capsys):
    check_tampered(folder, capsys, range(4))


@pytest.mark.thorough
def test_400_damaged_folders_have_a_page_or_an_error_by_name(folder, capsys):
    check_tampered(folder, capsys, range(400))


@pytest.mark.parametrize(
    "line",
    [b'{"kind":"event","at":1.0,"name":"\xff"}', b'{"kind":"interval","at":1e300,"elapsed_s":0,"place":[0,0,0]}'],
    ids=["no UTF-8", "an absurd time"],
)
def test_a_damaged_line_is_left_out_and_counted(folder, capsys, line):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes() + line + b"\n")

    assert "1 lines of the files are damaged, and were left out." in check_report(folder, capsys)


def test_a_file_that_begins_with_no_utf8_is_refused_by_name(folder, capsys):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b'"', b'"\xff', 1))

    assert check_report(folder, capsys) == ""
