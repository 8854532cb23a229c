"""Pages for the browser, also of telemetry that was damaged; and the transcripts of ``tests/transcripts``.

Each command of a transcript is run, and prints what stands below it. A block that has a file's name beside its language
is written to that file. What a command writes to stderr stands behind ``!``, without the usage before an error, and an
exit status other than 0 in the last line; ``...`` stands for anything. ``page FILE SECTION ...`` is no command of ours:
it prints sections of a page for the browser as text, and ``data`` its samples.
"""

import random
import re
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asyncdata.demo import tokenizer_folder
from asyncdata.telemetry.records import End, encode
from tests.support.pages import HOME, asyncdata_process, blocks_of, is_printed, read_page, run_block, run_command
from tests.support.parts import MAX_SAMPLES, Event, main
from tests.support.telemetry_files import BEGAN, interval, start, write, write_run


@pytest.mark.thorough
def test_a_page_that_is_full_says_that_there_are_more_rows(jsonl_file, tmp_path, demo_tokenizer, capsys):
    data, page = jsonl_file([{"text": "x"}] * (MAX_SAMPLES + 1)), tmp_path / "rows.html"
    for num, is_said in ((0, True), (MAX_SAMPLES, False)):
        assert main(["inspect", str(data), "--tokenizer", demo_tokenizer, "--html", str(page), "--num", str(num)]) == 0
        found = read_page(page.read_bytes())
        assert ("further rows: the page is full" in capsys.readouterr().out) is is_said
        assert ("further rows" in found.text, len(found.data)) == (is_said, MAX_SAMPLES)


@pytest.mark.thorough
def test_the_demo_has_samples_packs_drops_a_mixture_and_a_bad_row(tmp_path):
    page = tmp_path / "demo.html"
    assert main(["report", "--demo", "-o", str(page)]) == 0
    found = read_page(page.read_bytes())
    assert {"packs-chart-data", "mix-chart-data", "lengths-chart-data", "waits-chart-0-data"} <= set(found.tables)
    assert found.tables["dropped-table"][1][0] == "max_length"
    assert found.tables["bad-rows-table"][1][0] == "AD101"
    assert {sample["source"] for sample in found.data if sample["state"] == "kept"} == {"function", "class", "module"}
    assert all(0 < sample["trained"] < sample["tokens"] for sample in found.data if sample["state"] == "kept")


def test_a_served_report_is_on_loopback_alone_renews_itself_until_the_run_ends_and_ends_with_ctrl_c(tmp_path):
    def got(host=None):
        asked = urllib.request.Request(address, headers={"Host": host} if host else {})
        with urllib.request.urlopen(asked) as answer:
            return answer.read()

    file = tmp_path / "rank-00000-0000.jsonl"
    write(file, [start(), interval(0, 0, 0, 0, 0), interval(0, 0, 1, 20, 20)])
    process = asyncdata_process("report", tmp_path, "--serve")
    try:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            got("attacker.example")
        assert b'data-renewed="5"' in got()
        assert tile(got(), "Samples delivered") == "80"
        with file.open("ab") as more:
            for record in (interval(0, 0, 2, 40, 40), End(at=BEGAN + 30, reason="closed")):
                more.write(encode(record) + b"\n")
        assert b"data-renewed=" not in got()
        assert tile(got(), "Samples delivered") == "160"
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, list(tmp_path.iterdir())) == (0, "", [file])


def tile(page, name):
    return read_page(page).shown("overview").partition(f"{name}\n")[2].splitlines()[0]


# Damaged telemetry: a page that counts the damage, or a named error

NUMBERS = re.compile(rb"(?<=[:\[,])-?[0-9]+(\.[0-9]+)?")
ABSURD = [b"-1", b"0", b"1e308", b"-1e308", b"1e400", b"5e-324", b"1" + b"0" * 30, b"-" + b"9" * 19, b"%d" % 2**63]
ABSURD += [b"NaN", b"null", b'"text"', b"true", b"[]", b"{}", b"9" * 5000]
# What is looked for, and what may be put in its place, at one of the places where it is.
REPLACED = [
    (NUMBERS, ABSURD),
    (re.compile(rb'(?<=")-?[0-9]+(?=":)'), [b"-5", b"9" * 30, b"1.5", b"", b"x"]),
    (re.compile(rb'(?<=")(?=[^"]+")'), [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000"]),
    (re.compile(rb"(?s)."), [bytes([byte]) for byte in range(256)]),
]


def damaged(data, rng):
    lines = data.splitlines(keepends=True)
    match rng.randrange(7):
        case 0:  # absurd numbers everywhere
            absurd = rng.choice(ABSURD)
            return b"".join(line if rng.random() < 0.5 else NUMBERS.sub(absurd, line) for line in lines)
        case 1:  # lines elsewhere, some left out and some twice
            return b"".join(rng.choices(lines, k=len(lines)) if rng.random() < 0.5 else rng.sample(lines, len(lines)))
        case 2:
            return data[: rng.randrange(len(data))] + rng.choice((b"", b"\n", b"{}\n", b'{"kind":"interval"}\n'))
        case _:
            wanted, others = rng.choice(REPLACED)
            place = rng.choice(list(wanted.finditer(data)))
            return data[: place.start()] + rng.choice(others) + data[place.end() :]


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run")
    fields = {"reason": "too long", "num_dropped": 30, "num_rows": 50, "path": "b.jsonl", "example": "b.jsonl:7"}
    event = encode(Event(at=BEGAN, name="rows.dropped", level="warning", fields=fields)) + b"\n"
    for path in (tmp_path / "run").iterdir():
        head, lines = path.read_bytes().split(b"\n", 1)
        path.write_bytes(head + b"\n" + event + lines)
    return tmp_path / "run"


def page_or_error(folder, capsys):
    """The page's text; empty if it was refused by name."""
    page = folder / "page.html"
    status = main(["report", str(folder), "-o", str(page)])
    errors = capsys.readouterr().err
    if status:
        assert (status, page.exists()) == (1, False)
        assert re.search(r"\bAD62[01]\b", errors), errors
        return ""

    text = read_page(page.read_bytes()).text
    page.unlink()
    return text


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 400), marks=pytest.mark.thorough)], ids=["4", "396"])
def test_damaged_folders_have_a_page_or_an_error_by_name(folder, capsys, seeds):
    paths = sorted(folder.iterdir())
    for seed in seeds:
        rng = random.Random(seed)
        path = rng.choice(paths)
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, rng))
        try:
            page_or_error(folder, capsys)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "line", [b'{"kind":"event","at":1,"name":"\xff"}', b'{"kind":"interval","at":1e300,"elapsed_s":0,"place":[0,0,0]}']
)
def test_a_damaged_line_is_left_out_and_counted(folder, capsys, line):
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert "1 lines of the files are damaged, and were left out." in page_or_error(folder, capsys)


PAGES = sorted((Path(__file__).parents[2] / "transcripts").glob("*.md"))
LONG = ("mixtures", "places", "turns")
_USAGE = re.compile(r"\AUsage: .*\n(?: .*\n)*Try .*\n\n")
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder, but for the tokenizer of the demo, and for the cache of the tests."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "tokenizer").symlink_to(tokenizer_folder())
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    modules = set(sys.modules)
    yield here
    for name in set(sys.modules) - modules:
        if (here / f"{name}.py").exists():
            del sys.modules[name]


def said_by(command, place):
    program, *words = command.split()
    if program == "page":
        page = read_page(Path(words[0]).read_bytes())
        return "\n\n".join(map(page.shown, words[1:])).replace(str(place), HOME) + "\n"

    status, out, talk = run_command(command)
    told = out + "".join(f"! {line}\n" for line in _USAGE.sub("", talk).splitlines())
    return told.replace(str(place), HOME).replace("\x1b", "␛") + (f"[exit status {status}]\n" if status else "")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=pytest.mark.thorough if page.stem in LONG else ()) for page in PAGES],
)
def test_the_commands_of_a_transcript_print_what_stands_below_them(page, place):
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        language, _, name = block.language.partition(" ")
        if name:
            Path(name).write_text(block.text.replace(HOME, str(place)), encoding="utf-8")
        elif language == "python":
            run_block(block, names, page.name)
        else:
            for command, wanted in _COMMAND.findall(block.text):
                printed = said_by(command, place)
                assert is_printed(wanted, printed), f"{page.name}: $ {command}\n{printed}"
