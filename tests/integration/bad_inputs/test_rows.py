"""The catalogue of bad inputs, rows 1 to 24, 46 to 47 and 50: what may be wrong with a line, and with a prompt."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import BadRowError, BadRows, JsonlSource, NoSamplesError, SourceError, TextTokenizeFn
from asyncdata.demo import tokenizer_folder
from tests.support.bad_inputs import BAD_AT, GOOD, deliver, place_of_bad, prompts, with_bad
from tests.support.loading import write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from pathlib import Path

CHAT = {"apply_chat_template": True}
WRITES_CONTENT = {**CHAT, "chat_template": "{% for message in messages %}<{{ message.content }}>{% endfor %}"}


class Case(NamedTuple):
    """A line that is a bad row.

    :ivar number: in the catalogue.
    :ivar text: what the error says after the place; a part of it.
    :ivar settings: of the tokenize function.
    """

    number: int
    name: str
    line: bytes
    code: str
    text: str
    settings: dict[str, Any] = {}


CASES = [
    Case(1, "malformed JSON", b'{"input" "x"}', "AD101", "invalid JSON at column 10: Expecting ':' delimiter, near"),
    Case(1, "cut off in the middle of the file", b'{"input": "Wh', "AD101", "; the row is cut off"),
    Case(
        7,
        "a raw NUL",
        b'{"input": "a\0b"}',
        "AD104",
        "raw control byte 0x00 at column 13; in a string JSON needs \\u0000",
    ),
    Case(7, "a raw tab", b'{"input": "a\tb"}', "AD104", "raw control byte 0x09 at column 13"),
    Case(
        8,
        "a run of NULs",
        b"\0" * 4096,
        "AD105",
        "4096 NUL bytes from column 1 on: its writer crashed",
    ),
    Case(8, "NULs behind half a row", GOOD[0][:9] + b"\0" * 512, "AD105", "512 NUL bytes from column 10 on"),
    Case(9, "invalid UTF-8", b'{"input": "a\xffb"}', "AD106", "byte 0xff at column 13 is not UTF-8; convert the file"),
    Case(10, "half of a surrogate pair", b'{"input": "a \\ud800", "label": 1}', "AD107", "unpaired surrogate"),
    Case(
        14,
        "a missing key",
        b'{"prompt": "x", "label": 1}',
        "AD110",
        "no key 'input': the row has 'prompt', 'label': set prompt_key='prompt'?",
    ),
    Case(14, "an empty row", b"{}", "AD110", "no key 'input': the row is empty"),
    Case(15, "a number as prompt", b'{"input": 7, "label": 1}', "AD111", "'input' must be"),
    Case(
        15,
        "messages without a template",
        b'{"input": [{"role": "user", "content": "x"}], "label": 1}',
        "AD111",
        "apply_chat_template",
    ),
    Case(16, "a message without a role", b'{"input": [{"content": "x"}], "label": 1}', "AD112", "no 'role'", CHAT),
    Case(
        16,
        "a picture",
        b'{"input": [{"role": "user", "content": [{"type": "image"}]}], "label": 1}',
        "AD130",
        "'input'[0] has 'image'",
        CHAT,
    ),
    Case(16, "a picture beside text", b'{"input": "x", "images": ["a.png"], "label": 1}', "AD130", "'images'"),
    Case(
        16,
        "a message without content",
        b'{"input": [{"role": "user", "text": "x"}], "label": 1}',
        "AD132",
        "'input'[0] has no 'content'",
        WRITES_CONTENT,
    ),
    Case(17, "null", b"null", "AD113", "a row must be a JSON object, got null"),
    Case(17, "an array", b"[1, 2]", "AD113", "a row must be a JSON object, got an array"),
    Case(17, "a string", b'"text"', "AD113", "a row must be a JSON object, got a string"),
    Case(
        22,
        "an integer of 5000 digits",
        b'{"input": ' + b"9" * 5000 + b"}",
        "AD117",
        "an integer of more than 4300 digits",
    ),
    Case(
        23,
        "600 levels",
        b'{"input": "x", "deep": ' + b"[" * 600 + b"]" * 600 + b"}",
        "AD118",
        "nested deeper than 512 levels",
    ),
    Case(
        23,
        "100,000 levels",
        b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "AD118",
        "nested deeper than 512 levels",
    ),
    Case(
        24,
        "two objects on a line",
        b'{"input": "x"}{"input": "y"}',
        "AD119",
        "write one object per line",
    ),
    Case(24, "a comma behind the object", b'{"input": "x"},', "AD119", "extra data at column 15"),
    Case(24, "a comma within it", b'{"input": "x",}', "AD101", "invalid JSON at column"),
    Case(24, "a comment", b'// {"input": "x"}', "AD101", "invalid JSON at column 1"),
    Case(24, "single quotes", b"{'input': 'x'}", "AD101", "invalid JSON at column 2"),
    Case(
        50,
        "a list that the template writes as text",
        b'{"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "label": 1}',
        "AD131",
        "which the template writes as Python's text",
        WRITES_CONTENT,
    ),
]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number} {case.name}")
def test_a_bad_line_is_named_at_its_turn_and_passed_over_where_that_is_asked(case, tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, with_bad(case.line))
    settings = prompts(**case.settings)

    raised = deliver(str(path), settings)
    assert raised.labels == list(range(BAD_AT))
    assert isinstance(raised.error, BadRowError)
    assert str(raised.error).startswith(f"{case.code} {place_of_bad(path)}")
    assert case.text in raised.error.reason
    assert raised.error.excerpt

    skipped = deliver(str(path), settings, bad_rows="skip")
    assert skipped.error is None
    assert skipped.labels == [0, 1, 2, 3]
    assert skipped.statistics.dropped_total == {f"bad row {case.code}": 1}

    file = tmp_path / "quarantine.jsonl"
    aside = deliver(str(path), settings, bad_rows=BadRows(policy="quarantine", path=str(file)))
    record = json.loads(file.read_text(encoding="ascii"))
    assert aside.labels == [0, 1, 2, 3]
    assert (record["code"], record["path"], record["line"]) == (case.code, str(path), BAD_AT + 1)
    assert record["byte_offset"] == raised.error.byte_offset


class Accepted(NamedTuple):
    """A line that is no bad row, whatever it looks like: the sample's label and metadata are as given."""

    number: int
    name: str
    line: bytes
    label: Any
    metadata: dict[str, Any] = {}


ACCEPTED = [
    Accepted(6, "line ends of Unicode", '{"input": "a\u2028b\u0085c", "label": "\u2028"}'.encode(), "\u2028"),
    Accepted(6, "and escaped ones", b'{"input": "a\\u000bb\\n", "label": 9}', 9),
    Accepted(18, "a key twice: the last one counts", b'{"input": "x", "label": 1, "label": 9}', 9),
    Accepted(
        19,
        "infinity",
        b'{"input": "x", "label": 9, "metadata": {"n": -Infinity}}',
        9,
        {"n": -math.inf},
    ),
    Accepted(20, "1e999 is infinity", b'{"input": "x", "label": 9, "metadata": {"n": 1e999}}', 9, {"n": math.inf}),
    Accepted(
        21,
        "30 digits stay exact",
        b'{"input": "x", "label": 123456789012345678901234567890}',
        123456789012345678901234567890,
    ),
    Accepted(16, "text where other rows have messages", b'{"input": "only text", "label": 9}', 9),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: f"{case.number} {case.name}")
def test_what_only_looks_bad_is_delivered(case, tmp_path):
    path = tmp_path / "rows.jsonl"
    write(path, with_bad(case.line))

    found = deliver(str(path), prompts(metadata_key="metadata"))

    assert found.error is None
    assert found.labels == [0, 1, case.label, 2, 3]
    assert found.samples[BAD_AT].metadata == case.metadata


def test_02_a_last_line_without_its_end_is_accepted_if_it_is_whole_and_else_is_no_silent_drop(tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = deliver(write(path, b"\n".join(GOOD)))
    cut = deliver(write(path, b"\n".join(GOOD)[:-5]))

    assert (whole.labels, whole.error) == ([0, 1, 2, 3], None)
    assert cut.labels == [0, 1, 2]
    assert str(cut.error).startswith(f"AD101 {path}:4 (byte {len(GOOD[0]) * 3 + 3}): ")
    assert "; the row is cut off" in str(cut.error)


def test_03_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    found = deliver(write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + b"\n".join(GOOD)))

    assert (found.labels, found.error) == ([0, 1, 2, 3], None)
    assert found.samples[0].source.byte_offset == 3


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_04_a_file_in_another_coding_is_refused_before_a_row_is_read(tmp_path, coding):
    path = write(tmp_path / "rows.jsonl", b"\n".join(GOOD).decode().encode(coding))

    found = deliver(path)

    assert isinstance(found.error, SourceError)
    name = coding.upper().removesuffix("-LE").removesuffix("-BE")
    assert str(found.error).startswith(f"AD103 {path} looks like {name}")
    assert f"convert it: iconv -f {name}" in str(found.error)


def test_05_lines_may_end_as_in_windows_and_offsets_count_every_byte(tmp_path):
    found = deliver(write(tmp_path / "rows.jsonl", b"\r\n".join([*GOOD, b""])))

    assert (found.labels, found.error) == ([0, 1, 2, 3], None)
    assert [sample.source.byte_offset for sample in found.samples] == [n * (len(GOOD[0]) + 2) for n in range(4)]


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_11_a_huge_line_is_not_held_and_is_one_bad_row(tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    write(path, with_bad(b'{"input": "' + b"x" * 3_000_000 + b'"}'))
    source = JsonlSource(str(path), max_row_bytes=1000)

    raised = deliver(source, num_workers=num_workers)
    skipped = deliver(source, num_workers=num_workers, bad_rows="skip")

    assert raised.labels == [0, 1]
    assert str(raised.error).startswith(f"AD108 {place_of_bad(path)}the row is longer than max_row_bytes (1000)")
    assert skipped.labels == [0, 1, 2, 3]


def test_12_empty_files_are_said_and_are_an_error_if_there_is_nothing_else(tmp_path):
    empty, full = write(tmp_path / "a.jsonl", b""), write(tmp_path / "b.jsonl", b"\n".join(GOOD))

    nothing, something = deliver([empty]), deliver([empty, full])

    assert str(nothing.error) == f"AD201 no rows in 1 files, all empty: {empty}"
    assert something.labels == [0, 1, 2, 3]
    assert something.of("source.empty") == [
        {"event": "source.empty", "num_files": 1, "paths": [empty], "log_level": "warning"}
    ]


def test_13_blank_lines_are_counted_and_are_an_error_if_there_is_nothing_else(tmp_path):
    """Lines are looked at when they are read, so that it is the epoch that is empty: AD401 in place of AD202."""
    nothing = deliver(write(tmp_path / "a.jsonl", b"\n \r\n\t\n" * 13))
    something = deliver(write(tmp_path / "b.jsonl", b"\n \n\n".join(GOOD)))

    assert isinstance(nothing.error, NoSamplesError)
    assert str(nothing.error) == "AD401 epoch 0: 0 rows read, 0 kept: there was no row"
    assert nothing.statistics.blank_lines_total == 39
    assert (something.labels, something.statistics.blank_lines_total) == ([0, 1, 2, 3], 6)


def test_16_text_and_messages_may_be_mixed(tmp_path):
    messages = json.dumps({"input": [{"role": "user", "content": "question"}], "label": 9}).encode()

    found = deliver(write(tmp_path / "rows.jsonl", with_bad(messages)), prompts(apply_chat_template=True))

    assert (found.labels, found.error) == ([0, 1, 9, 2, 3], None)
    assert len({tuple(sample.tokens[:3].tolist()) for sample in found.samples}) == 1  # the template's own


def test_19_nan_is_what_every_reader_built_on_json_makes_of_it(tmp_path):
    line = b'{"input": "x", "label": 9, "metadata": {"n": NaN}}'

    found = deliver(write(tmp_path / "rows.jsonl", with_bad(line)), prompts(metadata_key="metadata"))

    assert found.labels == [0, 1, 9, 2, 3]
    assert math.isnan(found.samples[BAD_AT].metadata["n"])


def test_46_what_is_too_long_is_dropped_and_counted_or_an_error_where_that_is_asked(tmp_path):
    line = json.dumps({"input": "many words " * 99, "label": 9, "text": "many words " * 99}).encode()
    path = tmp_path / "rows.jsonl"
    write(path, with_bad(line))

    dropped = deliver(str(path), prompts(max_length=20))
    refused = deliver(str(path), TextTokenizeFn(tokenizer_folder(), text_key="input", max_length=20, overlong="error"))

    assert (dropped.labels, dropped.error) == ([0, 1, 2, 3], None)
    assert dropped.statistics.dropped_total == {"max_length": 1}
    assert len(refused.samples) == 2
    assert str(refused.error).startswith(f"AD415 {place_of_bad(path)}")
    assert "max_length=20; raise it, or set overlong=" in str(refused.error)


def test_47_a_prompt_of_no_token_is_dropped_and_counted(tmp_path):
    found = deliver(write(tmp_path / "rows.jsonl", with_bad(b'{"input": "", "label": 9}')))

    assert (found.labels, found.error) == ([0, 1, 2, 3], None)
    assert found.statistics.dropped_total == {"empty_prompt": 1}


def test_a_good_file_has_none_of_this(tmp_path):
    found = deliver(str(write_rows(tmp_path / "rows.jsonl", 20)), row_id)

    assert (found.labels, found.error, found.events) == (list(range(20)), None, [])
