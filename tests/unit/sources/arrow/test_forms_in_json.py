"""Rows of Arrow and of Python's objects as JSON texts: one form for every type, which follows from the row alone."""

import base64
import datetime
import decimal
import json
import math
import uuid
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.support.parts import RowDecoder, RowFault, encode_row, plain_state

pa = pytest.importorskip("pyarrow")

from tests.support.parts import RowWriter, block_rows, is_same_form  # noqa: E402 - needs pyarrow

DAY = datetime.date(2024, 1, 31)
NOON = datetime.datetime(2024, 1, 31, 12)


def texts_of(array: Any) -> list[str]:
    batch = pa.record_batch({"v": array})
    return [row.decode()[len('{"v":') : -1] for row in RowWriter(batch.schema, ["v"])(batch)]


def bad_text(data: bytes) -> Any:
    return pa.array([data], pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.null(), None, "null"), (pa.bool_(), True, "true"), (pa.int8(), -128, "-128"),
        (pa.int64(), 2**63 - 1, "9223372036854775807"), (pa.uint64(), 2**64 - 1, "18446744073709551615"),
        (pa.float64(), 0.1, "0.1"), (pa.float64(), float("nan"), "NaN"), (pa.float64(), float("-inf"), "-Infinity"),
        *((kind, 0.5, "0.5") for kind in (pa.float32(), pa.float16())), (pa.string(), 'é"\n\u2028', '"é\\"\\n\u2028"'),
        *((kind, "a", '"a"') for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))),
        (pa.decimal128(10, 2), decimal.Decimal("1.20"), '"1.20"'),
        (pa.decimal256(50, 2), decimal.Decimal("-1.20"), '"-1.20"'),
        *((kind, DAY, '"2024-01-31"') for kind in (pa.date32(), pa.date64())),
        (pa.time32("s"), datetime.time(1, 2, 3), '"01:02:03"'),
        (pa.time64("us"), datetime.time(1, 2, 3, 40), '"01:02:03.000040"'),
        (pa.timestamp("s"), NOON, '"2024-01-31T12:00:00"'),
        (pa.timestamp("ms"), NOON.replace(microsecond=5000), '"2024-01-31T12:00:00.005000"'),
        (pa.timestamp("us", "UTC"), NOON.replace(tzinfo=datetime.UTC), '"2024-01-31T12:00:00+00:00"'),
        (pa.timestamp("us", "Asia/Kolkata"), NOON.replace(tzinfo=datetime.UTC), '"2024-01-31T17:30:00+05:30"'),
        (pa.timestamp("ns", "UTC"), 1, '"1970-01-01T00:00:00.000000001+00:00"'),
        (pa.timestamp("ns", "UTC"), 1000, '"1970-01-01T00:00:00.000001+00:00"'),
        (pa.timestamp("ns", "UTC"), 0, '"1970-01-01T00:00:00+00:00"'),
        (pa.duration("ms"), datetime.timedelta(milliseconds=1500), "1.5"),
        *((kind, b"\xff\x00", '"/wA="') for kind in (pa.binary(), pa.binary_view(), pa.binary(2))),
        (pa.list_(pa.int32()), [1, None], "[1,null]"), (pa.list_(pa.float64()), [float("nan"), None], "[NaN,null]"),
        (pa.large_list(pa.date32()), [DAY], '["2024-01-31"]'), (pa.list_(pa.bool_(), 2), [True, False], "[true,false]"),
        (pa.struct([("b", pa.int8()), ("a", pa.date32())]), {"a": DAY, "b": None}, '{"b":null,"a":"2024-01-31"}'),
        (pa.map_(pa.string(), pa.date32()), [("k", DAY), ("l", None)], '{"k":"2024-01-31","l":null}'),
        (pa.map_(pa.int8(), pa.string()), [(1, "x")], '[[1,"x"]]'),
        (pa.list_(pa.struct([("t", pa.timestamp("s"))])), [{"t": NOON}, None], '[{"t":"2024-01-31T12:00:00"},null]'),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, pa.DataType) else "",
)  # fmt: skip
def test_a_value_of_arrow_has_one_form_and_a_null_is_null(kind, value, text):
    assert texts_of(pa.array([value, None], kind)) == [text, "null"]


def test_times_that_python_cannot_hold_do_no_harm_and_a_uuid_is_text():
    found = uuid.UUID(int=5)

    assert all(json.loads(text) for text in texts_of(pa.array([2**62, -(2**62)], pa.timestamp("s"))))
    assert texts_of(pa.array([found.bytes], pa.uuid())) == [f'"{found}"']


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [None, True, "é\n"]}, '{"b":1,"a":[null,true,"é\\n"]}'),
        (2**70, str(2**70)),
        (0.1 + 0.2, "0.30000000000000004"),
        ([math.nan, math.inf, -math.inf], "[NaN,Infinity,-Infinity]"),
        ((1, 2), "[1,2]"),
        ({1: "a"}, '{"1":"a"}'),
        (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (datetime.time(1, 2, 3, 4), '"01:02:03.000004"'),
        (datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC), '"2024-02-29T01:02:03+00:00"'),
        (datetime.timedelta(minutes=1, microseconds=5), "60.000005"),
        (decimal.Decimal("1.10"), '"1.10"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"\x00\xff", '"AP8="'),
        (bytearray(b"a"), '"YQ=="'),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (np.array([[1, 2], [3, 4]]), "[[1,2],[3,4]]"),
        (np.array([b"a"], object), '["YQ=="]'),
        (np.bool_(True), "true"),
        ("\ud800é", '"\\ud800\\u00e9"'),  # a lone surrogate is an escape
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_python_has_one_form(value, text):
    assert encode_row({"a": value}).decode() == f'{{"a":{text}}}'


@pytest.mark.parametrize("value", [object(), {1, 2}, {(1, 2): 3}, 1j], ids=["object", "set", "dict", "complex"])
def test_a_value_of_python_without_a_form_is_refused(value):
    with pytest.raises(TypeError):
        encode_row({"a": value})


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [
        ({}, True),
        ({"a": [1, None, {"b": 2**70}], "c": "é"}, True),
        *((state, False) for state in (None, [1], {1: 2}, {"a": (1,)}, {"a": object()}, {"a": math.nan})),
    ],
    ids=map(str, range(8)),
)
def test_a_state_of_others_is_kept_if_json_gives_it_back_and_is_none_otherwise(state, is_kept):
    assert plain_state(state) == (state if is_kept else None)


@pytest.mark.parametrize(
    "kind",
    [
        pa.month_day_nano_interval(), pa.list_view(pa.int32()), pa.run_end_encoded(pa.int32(), pa.string()),
        pa.struct([("a", pa.list_(pa.month_day_nano_interval()))]), pa.timestamp("us", "No/Such_Zone"),
    ],
    ids=str,
)  # fmt: skip
def test_a_type_of_arrow_without_a_form_is_refused_by_its_columns_name(kind):
    with pytest.raises(TypeError, match="column 'what' is .* which has no form in JSON: "):
        RowWriter(pa.schema([("what", kind)]), ["what"])


@given(st.lists(st.tuples(st.none() | st.floats(), st.binary(max_size=3)), min_size=1, max_size=6))
def test_a_row_has_the_same_text_alone_and_among_others(rows):
    numbers, raw = zip(*rows, strict=True)
    batch = pa.record_batch({"n": pa.array(numbers, pa.float64()), "s": pa.array(raw, pa.binary()).view(pa.string())})
    write = RowWriter(batch.schema, ["n", "s"])

    assert write(batch) == [write(batch.slice(row, 1))[0] for row in range(batch.num_rows)]


def test_text_that_is_not_utf_8_is_a_bad_row_that_names_the_byte():
    columns = {
        "s": bad_text(b'a\xff"'), "b": pa.array([b"\xff"]), "l": pa.ListArray.from_arrays([0, 1], bad_text(b"\xfe")),
        "d": pa.array([DAY]),
    }  # fmt: skip
    batch = pa.record_batch(columns)

    (found,) = RowWriter(batch.schema, list(columns))(batch)

    assert found == b'{"s":"a\xff\\"","b":"' + base64.b64encode(b"\xff") + b'","l":["\xfe"],"d":"2024-01-31"}'
    with pytest.raises(RowFault, match="is not UTF-8") as caught:
        RowDecoder(["b"])(found)
    assert caught.value.code == "AD106"


def test_rows_next_to_text_that_is_not_utf_8_are_unchanged():
    """The row is read another way then, down to the last field."""
    kind = pa.map_(pa.string(), pa.list_(pa.int8()))
    struct = pa.struct({"n": pa.int8(), "t": pa.string(), "b": pa.binary()})
    rest = {
        "st": pa.array([{"n": 1, "t": None, "b": b"\x00"}], struct), "m": pa.array([[("k", [1, None])]], kind),
        "none": pa.nulls(1, pa.string()), "nothing": pa.nulls(1, kind),
    }  # fmt: skip
    bad, good = (pa.record_batch({"s": text, **rest}) for text in (bad_text(b"\xff"), pa.array(["?"])))

    (found,), (plain,) = (RowWriter(batch.schema, batch.schema.names)(batch) for batch in (bad, good))

    assert found == plain.replace(b"?", b"\xff")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (pa.int32(), pa.int64(), True), (pa.int32(), pa.float64(), False), (pa.string(), pa.large_string(), True),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), True), (pa.string(), pa.binary(), False),
        (pa.null(), pa.list_(pa.string()), True), (pa.timestamp("us"), pa.string(), True),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), True), (pa.list_(pa.int32()), pa.int32(), False),
        (pa.struct([("a", pa.int32()), ("b", pa.null())]), pa.struct([("b", pa.string()), ("a", pa.int8())]), True),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.int32())]), False),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.string()), False),
    ],
    ids=str,
)  # fmt: skip
def test_types_go_together_where_their_json_is_the_same(a, b, expected):
    assert is_same_form(a, b) is is_same_form(b, a) is expected


@given(st.lists(st.integers(0, 20).map(lambda n: b"x" * n), max_size=20), st.integers(0, 100), st.integers(0, 15))
def test_as_many_rows_as_find_room_are_in_a_block_and_the_others_are_told(rows, num_bytes, max_row_bytes):
    found = block_rows(rows, num_bytes, max_row_bytes)

    assert len(found.data) <= num_bytes
    assert found.offsets.tolist() == list(range(len(rows)))
    assert found.lengths.tolist() == [len(row) if len(row) <= max_row_bytes else -1 for row in rows]
    size = 0
    for row, start, length in zip(rows, found.starts, found.lengths, strict=True):
        if length >= 0 and size + length <= num_bytes:
            assert bytes(found.data[start : start + length]) == row
            size += length
        else:
            assert start == -1
    assert size == len(found.data)
