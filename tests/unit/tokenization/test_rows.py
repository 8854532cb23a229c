"""A row is read as Python's JSON reads it, only as far as it is asked for, or is bad."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata.core.messages import RowError, encode
from asyncdata.tokenization.rows import (
    MAX_NESTING,
    RowDecoder,
    RowFault,
    decode_object,
    decode_value,
    excerpt,
    json_type,
    missing_key,
)
from tests.support.examples import in_ci

ROW = b'{"input": "caf\xc3\xa9", "label": [1, 2.50], "metadata": {"n": 1}, "other": null}'

LENIENT_ROWS = [
    b'{"input": NaN}',
    b'{"input": [Infinity, -Infinity]}',
    b'{"input": 1e400}',
    b'{"input": "\\ud800"}',
    b'{"input": "\\udc00\\ud800 x"}',
    b'{"input": {"\\ud800": 1}}',
    b'\xef\xbb\xbf{"input": 1}',
    b'{"input": 123456789012345678901234567890}',
    b'{"input": -0.0}',
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated_rows(draw: st.DrawFn) -> bytes:
    """A row with bytes cut out and put in where they do harm."""
    row = draw(st.dictionaries(st.sampled_from(["input", "label", "in\u00e9", "x"]), json_values, max_size=4))
    data = bytearray(json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"\\", b"\\u", b"\\ud8", b"{", b"]", b"}", b",", b":", b"0", b"-", b"e9", b"."])
            | st.binary(max_size=2)
        )
    return bytes(data)


def loads(raw: bytes) -> Any:
    """What slime's reader makes of a row."""
    return json.loads(raw.decode("utf-8").removeprefix("\ufeff"))


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # so that NaN is NaN, and -0.0 is not 0


def test_bytes_that_no_loader_gives_as_a_row_are_named_too():
    """Those of every row are in the catalogue of bad inputs; a loader takes blank lines and UTF-16 out before."""
    for raw, code, reason in (
        (b"", "AD101", "the row is cut off"),
        (b'\xff\xfe{\x00"\x00', "AD106", "byte 0xff at column 1"),
        (b'{"\x00a\x00"\x00', "AD104", "raw control byte 0x00 at column 3"),
        (b'{"input": ' + b"9" * 5000 + b"}", "AD117", "more than 4300 digits"),
    ):
        for read in (decode_object, RowDecoder(["input"])):
            with pytest.raises(RowFault, match=reason) as caught:
                read(memoryview(raw))
            assert (caught.value.code, caught.value.excerpt) == (code, excerpt(raw))


@pytest.mark.parametrize("raw", LENIENT_ROWS, ids=range(len(LENIENT_ROWS)))
def test_every_row_that_pythons_json_accepts_is_accepted(raw):
    assert same(decode_object(raw), loads(raw))
    (text,) = RowDecoder(["input"])(memoryview(raw))
    assert text is not None
    assert same(decode_value(text), loads(raw)["input"])


@in_ci(max_examples=50)
@given(st.binary())
@example(b'{"input": "\\ud83d\\ud83d"}')
def test_no_bytes_raise_anything_but_a_row_fault(raw):
    for read in (decode_object, decode_value, RowDecoder(["input", "label"])):
        try:
            read(raw)
        except RowFault as fault:
            encode(RowError(0, fault.code, fault.reason, fault.excerpt, fault.traceback))


@in_ci(max_examples=50)
@given(mutated_rows())
def test_rows_are_accepted_and_refused_as_by_json(raw):
    try:
        expected: Any = loads(raw)
    except ValueError:
        expected = None

    keys = ["input", "label", "in\u00e9"]
    if not isinstance(expected, dict):
        for read in (decode_object, RowDecoder(keys)):
            with pytest.raises(RowFault):
                read(raw)
        return

    assert same(decode_object(raw), expected)
    found = {key: decode_value(text) for key, text in zip(keys, RowDecoder(keys)(raw), strict=True) if text is not None}
    assert same(found, {key: expected[key] for key in keys if key in expected})


def test_only_the_keys_asked_for_are_taken_and_stay_as_they_are():
    found = RowDecoder(["label", "input", "nothing"])(memoryview(ROW))

    assert [None if text is None else bytes(text) for text in found] == [b"[1, 2.50]", b'"caf\xc3\xa9"', None]


@pytest.mark.parametrize(
    "keys", [["input", "input"], ["label", "input", "label"], ['in"put', "input"], ["a\\b", "input"]]
)
def test_any_keys_can_be_asked_for(keys):
    row = {"input": 1, "label": 2, 'in"put': 3, "a\\b": 4}

    found = RowDecoder(keys)(json.dumps(row).encode())

    assert [decode_value(text or b"") for text in found] == [row[key] for key in keys]


def test_the_last_of_two_equal_keys_counts():
    raw = b'{"input": 1, "in\\u0070ut": 2}'

    assert decode_object(raw) == {"input": 2}
    assert [bytes(text or b"") for text in RowDecoder(["input"])(raw)] == [b"2"]


def test_a_value_of_another_key_is_checked_but_not_decoded():
    assert RowDecoder(["x"])(b'{"other": ' + b"9" * 5000 + b"}") == (None,)
    with pytest.raises(RowFault, match="AD106|not UTF-8"):
        RowDecoder(["x"])(b'{"other": "\xff"}')


@pytest.mark.parametrize(
    ("opening", "closing", "levels"),
    [(b"[", b"]", 1), (b'{"[{": ', b"}", 1), (b'[{"\\"[\\\\": ', b"}]", 2)],
    ids=["arrays", "objects", "both"],
)
def test_the_nesting_limit_does_not_depend_on_the_python_version(opening, closing, levels):
    depth = (MAX_NESTING - 1) // levels

    def row(count: int) -> bytes:
        return b'{"input": ' + opening * count + b"1" + closing * count + b"}"

    assert "input" in decode_object(row(depth))
    assert RowDecoder(["other"])(row(depth)) == (None,)
    for read in (decode_object, RowDecoder(["other"])):
        with pytest.raises(RowFault, match="nested deeper than 512"):
            read(memoryview(row(depth + 1)))


def test_brackets_in_strings_are_no_nesting():
    raw = json.dumps({"input": '[{"' * 2000, "label": ['\\"[', "\\"] * 600}).encode()

    assert decode_object(raw) == json.loads(raw)
    assert RowDecoder(["label"])(raw)[0] is not None


def test_a_missing_key_lists_the_keys_of_the_row_and_suggests_one():
    def reason(row: dict[str, Any], key: str, setting: str) -> str:
        return missing_key(json.dumps(row).encode(), key, setting).reason

    assert reason({"input": 1, "label": 2}, "prompt", "prompt_key") == (
        "no key 'prompt': the row has 'input', 'label': set prompt_key='input'?"
    )
    assert reason({"a": 1, "labels": 2}, "label", "label_key").endswith("set label_key='labels'?")
    assert reason({"a": 1, "\ud800": 2}, "label", "label_key").endswith(
        "the row has 'a', '\\ud800'; set label_key to the right one"
    )
    assert reason({}, "label", "label_key") == "no key 'label': the row is empty"
    assert reason(dict.fromkeys(map(str, range(99))), "x", "label_key").count("'") == 42


def test_a_fault_can_always_be_sent():
    fault = RowFault("AD421", "it said \ud800", b'{"a": "\xff\n\xe2\x82"', "Traceback:\n\udfff")

    encode(RowError(0, fault.code, fault.reason, fault.excerpt, fault.traceback))
    assert fault.reason == "it said \\ud800"
    assert fault.excerpt == '{"a": "\\\\xff\\n\\\\xe2\\\\x82"'


def test_an_excerpt_is_one_short_line():
    assert excerpt(b"a" * 80) == "a" * 80
    assert excerpt(memoryview(b"a" * 81)) == "a" * 80 + "..."
    assert excerpt("é\n".encode() * 100) == "\\xe9\\n" * 40 + "..."
    assert excerpt("\U0001f600".encode() * 80) == "\\U0001f600" * 80


def test_json_types_have_json_names():
    names = [json_type(value) for value in ({}, [], "", True, None, 1, math.inf)]

    assert names == ["an object", "an array", "a string", "a boolean", "null", "a number", "a number"]
