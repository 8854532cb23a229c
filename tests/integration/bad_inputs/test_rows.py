"""The catalogue of bad inputs, rows 1 to 24, 46, 47 and 50: each faulty line is met by each tokenize function."""

import json
import math
from typing import Any, NamedTuple

import pytest

from asyncdata import ChatTokenizeFn, FixedLengthTokenizeFn, JsonlSource, PreferenceTokenizeFn, RowFn, TextTokenizeFn
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import NoSamplesError, SourceError
from asyncdata.xtuner import XTunerTokenizeFn
from tests.support import loading
from tests.support.function_kinds import chat_prompt
from tests.support.loaders import GOOD, deliver, place_of_bad, prompts, with_bad
from tests.support.loading import write
from tests.support.tokenizers import CHAT

PROMPTS = """\
{%- for m in messages %}{{ raise_exception('no such role') if m.role == 'oracle' }}<{{ m.content }}>{% endfor %}"""
SPANS = """\
{%- for m in messages %}{{ raise_exception('no such role') if m.role == 'oracle' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{% endfor %}"""
ANSWER = {"role": "assistant", "content": "x"}
IMAGE = [{"role": "user", "content": [{"type": "image"}]}, ANSWER]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, ANSWER]
ORACLE = [{"role": "oracle", "content": "x"}, ANSWER]


class Case(NamedTuple):
    """A line that is a bad row.

    :ivar number: in the catalogue.
    :ivar reason: a part of it.
    """

    number: int
    line: bytes
    code: str
    reason: str


class Function(NamedTuple):
    """A tokenize function.

    :ivar good: a row that is none of the bad ones.
    :ivar cases: rows that are bad for this function.
    :ivar dropped: rows that are no samples, and the reasons.
    :ivar kept: rows that only look bad.
    """

    fn: Any
    good: bytes
    cases: list[Case] = []
    dropped: list[tuple[bytes, str]] = []
    kept: list[bytes] = []


LINES = [
    Case(1, b'{"input" "x"}', "AD101", "invalid JSON at column 10: Expecting ':' delimiter, near"),
    Case(1, b'{"input": "Wh', "AD101", "invalid JSON at column 11: Unterminated string starting at"),
    Case(1, b'{"input": 1', "AD101", "; the row is cut off"),
    Case(7, b'{"input": "a\0b"}', "AD104", "raw control byte 0x00 at column 13; in a string JSON needs \\u0000"),
    Case(8, b"\0" * 4096, "AD105", "4096 NUL bytes from column 1 on: its writer crashed"),
    Case(8, GOOD[0][:9] + b"\0" * 512, "AD105", "512 NUL bytes from column 10 on"),
    Case(9, b'{"caf\xc3\xa9": "\xff"}', "AD106", "byte 0xff at column 11 is not UTF-8; convert the file"),
    Case(9, b'{"other": "\xed\xa0\x80"}', "AD106", "byte 0xed at column 12 is not UTF-8"),
    Case(17, b"null", "AD113", "a row must be a JSON object, got null"),
    Case(17, b"[1, 2]", "AD113", "a row must be a JSON object, got an array"),
    Case(17, b"1.5", "AD113", "got a number"),
    Case(23, b'{"deep": ' + b"[" * 600 + b"]" * 600 + b"}", "AD118", "nested deeper than 512 levels"),
    Case(23, b'{"a": ' * 100_000, "AD118", "nested deeper than 512 levels"),
    Case(24, b'{"input": "x"}{"input": "y"}', "AD119", "extra data at column 15; write one object per line"),
    Case(24, b'{"input": "x",}', "AD101", "invalid JSON at column"),
    Case(24, b"{'input': 'x'}", "AD101", "invalid JSON at column 2"),
]
"""Whoever reads the row."""

DIGITS = b"9" * 5000
PLAIN = [
    Case(10, b'{"input": "a \\ud83d b", "label": 1}', "AD107", "unpaired surrogate \\ud83d in 'input'"),
    Case(14, b'{"prompt": "x", "label": 1}', "AD110", "no key 'input': the row has 'prompt', 'label': set prompt_key="),
    Case(14, b"{}", "AD110", "no key 'input': the row is empty"),
    Case(14, b'{"input": "x", "labels": 1}', "AD110", "no key 'label': the row has 'input', 'labels': set label_key="),
    Case(15, b'{"input": 7, "label": 1}', "AD111", "'input' must be a string, got a number"),
    Case(15, b'{"input": null, "label": 1}', "AD111", "got null"),
    Case(15, b'{"input": [{"role": "user"}], "label": 1}', "AD111", "got an array; set apply_chat_template=True"),
    Case(15, b'{"input": "a", "label": 1, "tools": 5}', "AD111", "must be a list of JSON schemas, got a number"),
    Case(15, b'{"input": "a", "label": 1, "tools": "{}"}', "AD111", "of JSON schemas, got an object"),
    Case(15, b'{"input": "a", "label": 1, "tools": [5]}', "AD111", "'tools'[0] must be a JSON schema, got a number"),
    Case(1, b'{"input": "a", "label": 1, "tools": "[{"}', "AD101", "'tools' is a string, and its text is not JSON"),
    Case(10, b'{"input": "a", "label": 1, "tools": "\\ud800"}', "AD107", "unpaired surrogate \\ud800 in 'tools'"),
    Case(15, b'{"input": "a", "label": 1, "tools": [], "metadata": "x"}', "AD111", "has tools, got a string"),
    Case(16, b'{"input": "x", "images": ["a.png"], "label": 1}', "AD130", "'images'"),
    Case(22, b'{"input": ' + DIGITS + b', "label": 1}', "AD117", "an integer of more than 4300 digits"),
]  # fmt: skip


class Accepted(NamedTuple):
    """A line that is no bad row, whatever it looks like."""

    number: int
    line: bytes
    label: Any
    metadata: dict[str, Any] = {}


ACCEPTED = [
    Accepted(6, '{"input": "a\u2028b\u0085c", "label": "\u2028"}'.encode(), "\u2028"),
    Accepted(6, b'{"input": "a\\u000bb\\n", "label": 9}', 9),
    Accepted(18, b'{"input": "x", "label": 1, "label": 9}', 9),
    Accepted(19, b'{"input": "x", "label": 9, "metadata": {"n": -Infinity}}', 9, {"n": -math.inf}),
    Accepted(20, b'{"input": "x", "label": 9, "metadata": {"n": 1e999}}', 9, {"n": math.inf}),
    Accepted(21, b'{"input": "x", "label": 123456789012345678901234567890}', 123456789012345678901234567890),
]
LOOKS_BAD = [*(case.line for case in ACCEPTED), b'{"input": "x", "label": 9, "other": ' + DIGITS + b"}"]


def text(**row: Any) -> bytes:
    return json.dumps(row).encode()


def chat_cases(key: str) -> list[Case]:
    start = b'{"label": 1, "%s": ' % key.encode()
    return [
        Case(16, start + b'[{"content": "x"}]}', "AD112", f"'{key}'[0] has no 'role'; it has 'content'"),
        Case(16, start + b'[{"role": null}]}', "AD112", "has no 'role'; it has 'role'"),
        Case(16, start + b"[{}]}", "AD112", "has no 'role'; it has nothing"),
        Case(16, start + b'[{"role": "user", "text": "x"}, {"role": "assistant", "content": "x"}]}', "AD132", ""),
        Case(16, start + json.dumps(IMAGE).encode() + b"}", "AD130", f"'{key}'[0] has 'image'"),
        Case(15, start + b"7}", "AD111", f"'{key}' must be a string or a list of messages, got a number"),
        Case(15, start + b'{"role": "user"}}', "AD111", "got an object"),
        Case(15, start + b'[{"role": "user", "content": "a"}, "b"]}', "AD111", f"'{key}'[1] must be an object with 'r"),
        Case(10, start + b'[{"role": "assistant", "content": "\\udc00"}]}', "AD107", "unpaired surrogate \\udc00 in"),
        Case(50, start + json.dumps(PARTS).encode() + b"}", "AD131", "which the template writes as Python's text"),
        Case(50, start + json.dumps(ORACLE).encode() + b"}", "AD412", "chat template line 1: no such role"),
    ]  # fmt: skip


LONG = "many words " * 99
PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
FUNCTIONS = {
    "prompt": Function(
        prompts(metadata_key="metadata", max_length=20), GOOD[0], PLAIN,
        [(text(input=LONG, label=9), "max_length"), (b'{"input": "", "label": 9}', "empty_prompt")], LOOKS_BAD,
    ),
    "chat prompt": Function(
        chat_prompt(tokenizer_folder(), label_key="label", chat_template=PROMPTS), GOOD[0],
        [*chat_cases("input"), *(case for case in PLAIN if case.code == "AD110")],
        [(text(input=[], label=9), "empty_prompt")],
        [text(input=[{"role": "user", "content": "question"}], label=9), *LOOKS_BAD],
    ),
    "text": Function(
        TextTokenizeFn(tokenizer_folder(), max_length=20, overlong="error"), text(text="a"),
        [Case(15, b'{"text": 5}', "AD111", "must be a string, got a number"),
         Case(14, b'{"txt": "a"}', "AD110", "no key"),
         Case(10, b'{"text": "\\ud800"}', "AD107", "in 'text'"),
         Case(46, text(text=LONG), "AD415", "tokens are more than max_length=20; raise it, or set overlong=")],
    ),
    "chat": Function(
        ChatTokenizeFn(tokenizer_folder(), chat_template=SPANS), text(messages=CHAT),
        [*chat_cases("messages"),
         *(Case(15, text(messages=chat), "AD111", "") for chat in ("hello", "", "[1, 2]", ["hello"], None)),
         Case(15, text(messages='{"role": "user", "content": "a"}'), "AD111", "or a list of messages, got an object"),
         Case(15, text(messages=CHAT, tools=5), "AD111", "'tools' must be a list of JSON schemas, got a number"),
         Case(1, text(messages="[{'role': 'user'}]"), "AD101", "its text is not JSON: invalid JSON at column 3"),
         Case(1, text(messages='[{"role": "user", "cont'), "AD101", "its text is not JSON"),
         Case(16, text(messages='[{"content": "a"}]'), "AD112", "'messages'[0] has no 'role'"),
         Case(14, b'{"message": []}', "AD110", "no key 'messages': the row has 'message': set messages_key='message'?"),
         Case(15, text(messages=[{**CHAT[2], "loss": 2.31}]), "AD111", "'messages'[0]: 'loss' must be true, false"),
         Case(15, text(messages=[{**CHAT[1], "loss": True}]), "AD111", "it is not the assistant's; set it to false")],
        [(text(messages=[]), "no_trained_tokens"), (text(messages=CHAT[:2]), "no_trained_tokens")],
        [text(messages=json.dumps(CHAT))],
    ),
    "pair": Function(
        PreferenceTokenizeFn(tokenizer_folder()), text(**PAIR),
        [Case(14, b'{"chosen": "a"}', "AD110", "no key 'rejected'"),
         Case(15, b'{"chosen": null, "rejected": null}', "AD111", "must be a string or a list of messages, got"),
         Case(15, b'{"chosen": "a", "rejected": []}', "AD111", "'rejected' is an array, and 'chosen' is not"),
         Case(15, b'{"prompt": [], "chosen": "a", "rejected": "b"}', "AD111", "'prompt' is an array, and 'chosen'"),
         Case(15, b'{"chosen": ["a"], "rejected": []}', "AD111", "'chosen'[0] must be an object"),
         Case(10, b'{"chosen": "\\ud800", "rejected": "a"}', "AD107", "in 'chosen'")],
        [(text(prompt="a", chosen=" b", rejected=" b"), "no_preference")],
    ),
    "fixed length": Function(
        FixedLengthTokenizeFn(tokenizer_folder(), max_length=64, prompt="{q}", answer="{a}"), text(q="a", a=" b"),
        [Case(14, b'{"q": "a"}', "AD110", "no key 'a'"),
         Case(15, b'{"q": 5, "a": "c"}', "AD111", "'q' must be a string, got a number"),
         Case(10, b'{"q": "\\ud800", "a": "c"}', "AD107", "in 'q'")],
        [(text(q=LONG, a="b"), "max_length")],
    ),
    "rows": Function(RowFn(), text(id=1), [Case(22, b'{"x": ' + DIGITS + b"}", "AD117", "")], [], LOOKS_BAD[:-1]),
    "a user's function": Function(
        loading.fails_on_13, text(id=1), [Case(52, text(id=13), "AD421", "raised KeyError('thirteen')")],
    ),
    "XTuner's": Function(
        XTunerTokenizeFn("tests.support.xtuner_fns:Characters"), text(text="a"),
        [Case(52, text(txt="a"), "AD421", "raised KeyError('text')")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_fault_is_put_aside_by_line_byte_and_code_and_every_other_row_is_a_sample_or_counted(tmp_path, function):
    cases, dropped = [*LINES, *function.cases], dict(function.dropped)
    lines = [function.good]
    for line in (*(case.line for case in cases), *dropped, *function.kept):
        lines += [line, function.good]
    path, file = tmp_path / "rows.jsonl", tmp_path / "quarantine.jsonl"
    path.write_bytes(b"\n".join(lines))

    found = deliver(str(path), function.fn, size=500, bad_rows={"policy": "quarantine", "path": str(file)})

    records = [json.loads(record) for record in file.read_bytes().splitlines()]
    starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    places = [(str(path), 2 * number + 2, starts[2 * number + 1]) for number in range(len(cases))]
    assert [record["code"] for record in records] == [case.code for case in cases]
    assert [(record["path"], record["line"], record["byte_offset"]) for record in records] == places
    reasons = [(record["reason"], case.reason) for record, case in zip(records, cases, strict=True)]
    assert [pair for pair in reasons if pair[1] not in pair[0]] == []
    assert all(record["excerpt"] for record in records)
    assert found.error is None
    assert len(found.samples) == len(lines) - len(cases) - len(dropped)
    counted = {reason: number for reason, number in found.statistics.dropped_total.items() if "AD" not in reason}
    assert counted == {reason: list(dropped.values()).count(reason) for reason in dropped.values()}


def test_what_only_looks_bad_is_delivered_as_it_is(tmp_path):
    nan = b'{"input": "x", "label": 9, "metadata": {"n": NaN}}'
    path = write(tmp_path / "rows.jsonl", b"\n".join([*(case.line for case in ACCEPTED), nan]))
    found = deliver(path, prompts(metadata_key="metadata"))
    *samples, last = found.samples
    assert [(one.label, one.metadata or {}) for one in samples] == [(one.label, one.metadata) for one in ACCEPTED]
    assert math.isnan(last.metadata["n"]), "what every reader built on JSON makes of it"


def test_47_a_prompt_of_no_token_is_dropped_and_counted(tmp_path):
    found = deliver(write(tmp_path / "rows.jsonl", with_bad(b'{"input": "", "label": 9}')))
    assert (found.labels, found.statistics.dropped_total) == ([0, 1, 2, 3], {"empty_prompt": 1})


def test_02_a_last_line_without_its_end_is_accepted_if_it_is_whole_and_else_is_no_silent_drop(tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = deliver(write(path, b"\n".join(GOOD)))
    cut = deliver(write(path, b"\n".join(GOOD)[:-5]))
    assert (whole.labels, whole.error, whole.events) == ([0, 1, 2, 3], None, [])
    assert cut.labels == [0, 1, 2]
    assert str(cut.error).startswith(f"AD101 {path}:4 (byte {len(GOOD[0]) * 3 + 3}): ")
    assert "; the row is cut off" in str(cut.error)


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_04_a_file_in_another_coding_is_refused_before_a_row_is_read(tmp_path, coding):
    path = write(tmp_path / "rows.jsonl", b"\n".join(GOOD).decode().encode(coding))
    found = deliver(path)
    assert isinstance(found.error, SourceError)
    name = coding.upper().removesuffix("-LE").removesuffix("-BE")
    assert str(found.error).startswith(f"AD103 {path} looks like {name}")
    assert f"convert it: iconv -f {name}" in str(found.error)


def test_03_05_a_byte_order_mark_and_the_line_ends_of_windows_are_no_part_of_a_row_and_are_counted(tmp_path):
    found = deliver(write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + b"\r\n".join([*GOOD, b""])))
    assert (found.labels, found.error) == ([0, 1, 2, 3], None)
    assert [sample.source.byte_offset for sample in found.samples] == [3 + n * (len(GOOD[0]) + 2) for n in range(4)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_11_a_huge_line_is_not_held_and_is_one_bad_row(tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    write(path, with_bad(b'{"input": "' + b"x" * 3_000_000 + b'"}'))
    source = JsonlSource(str(path), max_row_bytes=1000)
    found = deliver(source, num_workers=num_workers)
    skipped = deliver(source, num_workers=num_workers, bad_rows="skip")
    assert found.labels == [0, 1]
    assert str(found.error).startswith(f"AD108 {place_of_bad(path)}the row is longer than max_row_bytes (1000)")
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
