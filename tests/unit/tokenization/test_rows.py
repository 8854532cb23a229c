"""A row is read as Python's JSON reads it, as far as it is asked for, or is bad; what is written of it is read back."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from asyncdata import Position
from asyncdata.core.messages import encode
from asyncdata.tokenization.rows import excerpt
from tests.support.examples import in_ci
from tests.support.parts import (
    MAX_NESTING,
    Chunk,
    ColumnWriter,
    RowDecoder,
    RowError,
    RowFault,
    SampleRange,
    decode_object,
    decode_reply,
    decode_value,
    missing_key,
)
from tests.unit.tokenization import Nowhere, faults

LENIENT_ROWS = [
    b'{"input": NaN}', b'{"input": [Infinity, -Infinity]}', b'{"input": 1e400}', b'{"input": "\\ud800"}',
    b'{"input": "\\udc00\\ud800 x"}', b'{"input": {"\\ud800": 1}}', b'\xef\xbb\xbf{"input": 1}',
    b'{"input": 123456789012345678901234567890}', b'{"input": -0.0}',
]  # fmt: skip

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


@pytest.mark.parametrize(
    "keys",
    [["input", "input"], ["label", "input", "label"], ['in"put', "input"], ["a\\b", "input"], ["label", "nothing"]],
)
def test_only_the_keys_asked_for_are_taken_and_stay_as_they_are(keys):
    texts = {"input": b'"caf\xc3\xa9"', "label": b"[1, 2.50]", 'in"put': b"3", "a\\b": b"4"}
    row = b"{%s}" % b", ".join(json.dumps(key).encode() + b": " + text for key, text in texts.items())

    found = RowDecoder(keys)(memoryview(row))

    assert [text and decode_value(text) for text in found] == [json.loads(texts.get(key, "null")) for key in keys]
    if "label" in keys:  # without an escape in a key, the bytes are the row's own
        assert [text and bytes(text) for text in found] == [texts.get(key) for key in keys]


def test_the_last_of_two_equal_keys_counts_and_a_value_of_another_key_is_checked_but_not_decoded():
    raw = b'{"input": 1, "in\\u0070ut": 2}'

    assert decode_object(raw) == {"input": 2}
    assert [bytes(text or b"") for text in RowDecoder(["input"])(raw)] == [b"2"]
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

    in_strings = json.dumps({"input": '[{"' * 2000, "label": ['\\"[', "\\"] * 600}).encode()
    assert decode_object(in_strings) == json.loads(in_strings)
    assert RowDecoder(["label"])(in_strings)[0] is not None


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


def test_an_excerpt_is_one_short_line_and_a_fault_can_always_be_sent():
    fault = RowFault("AD421", "it said \ud800", b'{"a": "\xff\n\xe2\x82"', "Traceback:\n\udfff")

    encode(RowError(0, fault.code, fault.reason, fault.excerpt, fault.traceback))
    assert (fault.reason, fault.excerpt) == ("it said \\ud800", '{"a": "\\\\xff\\n\\\\xe2\\\\x82"')
    assert excerpt(b"a" * 80) == "a" * 80
    assert excerpt(memoryview(b"a" * 81)) == "a" * 80 + "..."
    assert excerpt("é\n".encode() * 100) == "\\xe9\\n" * 40 + "..."
    assert excerpt("\U0001f600".encode() * 80) == "\\U0001f600" * 80


COLUMNS = ("prompt", "label", "metadata", "extra")
kept = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=5), st.dictionaries(st.sampled_from(COLUMNS), json_values, max_size=4)
)
Fate = tuple[list[int], dict[str, Any]] | str
fates = st.lists(kept | st.sampled_from(["short", "dull", "", "AD101", "AD421"]), max_size=12)
"""Rows are kept, with tokens and columns; dropped, with a reason; or bad, with a code."""


def written(rows: list[Fate], cut: int = 0) -> ColumnWriter:
    """In two pieces, as a worker does after a batch that raised."""
    out = ColumnWriter()
    for piece in (range(min(cut, len(rows))), range(min(cut, len(rows)), len(rows))):
        part = ColumnWriter(numbers=range(piece.start, len(rows))) if cut else out
        for number, row in enumerate(piece):
            place, fate = (number if cut else row), rows[row]
            if not isinstance(fate, str):
                part.keep(place, fate[0], **{name: json.dumps(value).encode() for name, value in fate[1].items()})
                part.note(place, f"{len(fate[1])} columns")
            elif fate.startswith("AD"):
                part.fail(place, RowFault(fate, "why"))
            else:
                part.drop(place, fate)
        if cut:
            out.extend(part)
    return out


@in_ci(max_examples=20)
@given(rows=fates, cut=st.integers(1, 12))
def test_every_row_is_a_sample_or_a_drop_or_bad_and_is_read_as_it_was_written(rows, cut):
    reply = written(rows).finish(len(rows), 0.0)
    chunk = Chunk(decode_reply(encode(reply)), Position(1, 2, 10), len(rows), Nowhere(), ends_epoch=False)
    kept = [(row, *fate) for row, fate in enumerate(rows) if not isinstance(fate, str)]

    assert written(rows, cut).finish(len(rows), 0.0) == reply
    assert chunk.num_samples == len(kept)
    for number, (row, tokens, columns) in enumerate(kept):
        sample = SampleRange(chunk, number, number + 1, 0, 0, 1).samples()[0]
        assert sample.tokens.tolist() == tokens
        assert same([chunk.value(name, number) for name in COLUMNS], [columns.get(name) for name in COLUMNS])
        assert (sample.position, sample.source) == (Position(1, 2, 10 + row), Nowhere().location(10 + row))
    named = {row: fate for row, fate in enumerate(rows) if isinstance(fate, str)}
    dropped = {row: drop.reason for drop in chunk.drops for row in drop.rows.tolist()}
    assert dropped | dict(faults(chunk)) == named
    assert [row for row, _ in faults(chunk)] == [row for row, fate in named.items() if fate.startswith("AD")]
    for row in range(len(rows) + 1):
        before = sum(number < row for number, *_ in kept)
        assert chunk.samples_before(row) == before
        assert chunk.num_tokens(0, before) == sum(len(tokens) for _, tokens, _ in kept[:before])
        assert chunk.num_tokens(before, len(kept)) == sum(len(tokens) for _, tokens, _ in kept[before:])
