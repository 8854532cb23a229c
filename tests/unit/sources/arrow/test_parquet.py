"""Parquet files: which are meant, what is wrong, how they are read, damaged and changed; and rows of Arrow as JSON."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import os
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import DataLoader, ParquetSource, Shuffle
from asyncdata.errors import ConfigError, NoSamplesError
from asyncdata.order.order import Order
from asyncdata.sources.arrow import parquet_reader
from tests.support import parts
from tests.support.loaders import AS_IT_LIES, refusal_of, rows_of, samples_of
from tests.support.loading import all_dropped
from tests.support.parquet_files import pa, pq, reader_of, texts_of, write
from tests.support.parquet_files import rows_of as rows_of_block


def refused(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataLoader(source, **AS_IT_LIES)


def test_a_path_is_known_for_parquet_wherever_a_loader_is_made_and_formats_are_not_mixed(tmp_path):
    path = write(tmp_path / "a.parquet")
    write(tmp_path / "sub" / "b.parquet")
    for source in (path, str(tmp_path / "*.parquet"), tmp_path, [tmp_path, tmp_path / "sub"]):
        assert [row["id"] for row in rows_of(source)][:100] == list(range(100))

    (tmp_path / "b.jsonl").write_text('{"id": 1}\n')
    refused([str(path), str(tmp_path / "b.jsonl")], r"a\.parquet is Parquet and .*b\.jsonl is not")
    refused(str(tmp_path), r"the folder .* holds \*\.jsonl and \*\.parquet; say which")
    refused(5, "a source is a path, .* a ParquetSource, .* got int")


def test_every_fault_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "good.parquet").read_bytes()
    bad = {
        "cut": data[:-20], "text": b'{"id": 1}\n' * 10, "zeros": b"\0" * 100, "empty": b"",
        "locked": data[:-4] + b"PARE", "length": data[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
        "footer": data[: -8 - 40] + b"\xff" * 40 + data[-8:],
    }  # fmt: skip
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()

    *found, footer = refusal_of(ParquetSource(["folder", "missing", *bad, "good.parquet"])).splitlines()

    assert found == [
        "AD306 the folder folder holds no *.parquet; name the files, or a glob",
        "AD304 cannot read missing: No such file or directory",
        "AD124 cut is cut off: it has no footer at its end; perhaps it is still being written",
        "AD123 text is not Parquet: it begins with b'{\"id'; read it with JsonlSource",
        "AD123 zeros is not Parquet: it begins with b'\\x00\\x00\\x00\\x00'",
        "AD124 empty has no bytes at all; a Parquet file without rows has a footer",
        "AD124 locked is encrypted; decrypt it first",
        "AD124 length is cut off: it has no footer at its end; perhaps it is still being written",
    ]
    assert footer.startswith("AD124 footer: its footer cannot be read: ")
    refused(ParquetSource(["good.parquet"] * 2), "^AD309 ")


def test_files_without_rows_are_refused_only_if_all_are(tmp_path):
    empty, full = write(tmp_path / "empty", 0), write(tmp_path / "full")

    assert refusal_of(ParquetSource(str(empty))) == f"AD201 no rows in 1 files, all empty: {empty}"
    assert {sample.source.path for sample in samples_of(ParquetSource([str(empty), str(full)]))} == {str(full)}


def test_columns_that_differ_are_named_with_their_files_before_a_row_is_read(tmp_path):
    first = write(tmp_path / "1", columns={"a": [1], "b": ["x"], "c": [1.5]})
    other = write(tmp_path / "2", columns={"a": ["one"], "b": [None], "d": [1]})
    both = [str(first), str(other)]

    assert refusal_of(ParquetSource(both)).splitlines() == [
        f"AD124 {other}: column 'a' is string, and int64 in {first}",
        f"AD124 {other}: it has no column 'c'; it has a, b, d",
        f"AD124 {other}: it has d, which {first} has not; name what to read with columns=[...]",
    ]
    assert rows_of(ParquetSource(both, columns=["b"])) == [{"b": "x"}, {"b": None}]
    missing = ParquetSource(str(first), columns=["b", "z"])
    assert refusal_of(missing) == f"AD124 {first}: it has no column 'z'; it has a, b, c"


def test_a_column_twice_or_one_without_a_form_is_refused(tmp_path):
    path = tmp_path / "twice"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), path)
    zoned = write(tmp_path / "z", columns={"t": pa.array([0], pa.timestamp("us", "No/Such"))})

    refused(ParquetSource(str(path)), "columns must name some columns, each once")
    refused(ParquetSource(str(zoned), columns=[]), "columns must name some")
    assert "more than one column 'a'" in refusal_of(ParquetSource(str(path), columns=["a"]))
    assert refusal_of(ParquetSource(str(zoned))).startswith(
        f"AD124 {zoned}: column 't' is timestamp[us, tz=No/Such], which has no form"
    )


def test_a_source_is_a_value_and_says_what_it_needs(monkeypatch):
    assert ParquetSource("a") == ParquetSource("a") != ParquetSource("a", columns=["b"])
    with pytest.raises(ConfigError, match="reads_per_group must be at least 1, got 0"):
        ParquetSource("a", reads_per_group=0)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(ParquetSource("a"), "Parquet needs pyarrow .*: pip install pyarrow")


def test_where_blocks_must_be_larger_a_window_keeps_its_size_and_has_fewer(tmp_path):
    path, orders = str(write(tmp_path / "a", 4000, group_rows=2000)), {}
    for reads in (1, 4, 100):
        with closing(ParquetSource(path, reads_per_group=reads).open(1024)) as opened:
            orders[reads] = Order(Shuffle(block_bytes=1024, window_blocks=32), 0, opened.num_blocks, opened.block_bytes)

    assert [order.num_blocks for order in orders.values()] == [2, 8, pytest.approx(200, rel=0.5)]
    assert [order.max_window_blocks for order in orders.values()] == [1, 2, pytest.approx(32, abs=6)]
    assert orders[4].description()["window_blocks"] == 32


@pytest.fixture
def two(tmp_path: Path) -> parts.ParquetBlocks:
    columns = {"id": list(range(100, 200)), "pad": ["y"] * 100}
    paths = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", group_rows=45, columns=columns)]
    return ParquetSource([str(path) for path in paths]).open(300)


@pytest.mark.parametrize("held_bytes", [0, 3000, 1 << 20])
def test_single_rows_are_equal_to_those_of_their_blocks_in_any_order(two, monkeypatch, held_bytes):
    """Whether row groups are kept in memory, take turns there, or are too large for it."""
    parts.change(monkeypatch, most_bytes_held_of_parquet=held_bytes)
    reader = reader_of(two)
    texts = {}
    for block in two.blocks(range(two.num_blocks)):
        found = reader.read_block(block, 1 << 20)
        for start, length, offset in zip(found.starts, found.lengths, found.offsets, strict=True):
            texts[block.file_id, block.start + offset] = found.data[start : start + length]
    places = [(n % 2, n * 37 % 100) for n in range(300)]

    for first in range(0, 300, 50):
        some = places[first : first + 50]
        assert texts_of(reader, some, [len(texts[place]) for place in some]) == [texts[place] for place in some]
    reader.close()


def test_neighbouring_blocks_cost_one_pass_over_their_row_group(two, monkeypatch):
    passes, file = [], parquet_reader.ParquetFile  # how often it decodes is what is counted
    batches = file.batches
    monkeypatch.setattr(file, "batches", lambda *args: passes.append(args[1]) or batches(*args))
    reader = reader_of(two)

    for block in two.blocks(range(two.num_blocks)):
        reader.read_block(block, 1 << 20)
    reader.close()

    assert passes == [0, 1, 2, 3, 0, 1, 2]


def test_a_row_that_is_too_long_is_a_bad_row_and_rows_of_nulls_are_rows(tmp_path):
    path = write(tmp_path / "a", columns={"id": [0, 1, 2], "pad": ["", "x" * 200, ""]})
    nulls = write(tmp_path / "b", columns={"id": pa.nulls(3)})

    assert [row["id"] for row in rows_of(ParquetSource(str(path), max_row_bytes=100), bad_rows="skip")] == [0, 2]
    assert rows_of(ParquetSource(str(nulls))) == [{"id": None}] * 3
    with pytest.raises(NoSamplesError, match="3"):
        samples_of(ParquetSource(str(nulls)), tokenize_fn=all_dropped)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_was_cut_or_edited_is_named_at_the_next_block(two, is_open):
    reader = reader_of(two)
    path = two.files[0].path
    first, second, *_ = two.blocks(range(2))
    if is_open:
        rows_of_block(reader, first)
    data = Path(path).read_bytes()
    os.truncate(path, len(data) - 1)
    with pytest.raises(
        parts.FileChangedError, match=rf"^AD302 {path} shrank from {len(data)} to {len(data) - 1} bytes"
    ):
        rows_of_block(reader, second)
    Path(path).write_bytes(data[:-20] + b"?" + data[-19:])
    with pytest.raises(
        parts.FileChangedError, match=rf"^AD303 {path} was replaced or edited .* its footer is another one"
    ):
        rows_of_block(reader, second)
    with pytest.raises(parts.FileChangedError, match=r"^AD30"):
        texts_of(reader, [(0, 5)], [3])
    reader.close()


def test_a_row_that_is_another_one_when_it_is_read_by_itself_is_named(two):
    reader = reader_of(two)

    with pytest.raises(
        parts.FileChangedError, match=r"^AD303 .*a\.parquet was edited while it was read: row 5 is another"
    ):
        texts_of(reader, [(0, 5)], [3])
    reader.close()


DAY = datetime.date(2024, 1, 31)
NOON = datetime.datetime(2024, 1, 31, 12)


def json_texts_of(array: Any) -> list[str]:
    batch = pa.record_batch({"v": array})
    return [row.decode()[len('{"v":') : -1] for row in parts.RowWriter(batch.schema, ["v"])(batch)]


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
    assert json_texts_of(pa.array([value, None], kind)) == [text, "null"]


def test_times_that_python_cannot_hold_do_no_harm_and_a_uuid_is_text():
    found = uuid.UUID(int=5)

    assert all(json.loads(text) for text in json_texts_of(pa.array([2**62, -(2**62)], pa.timestamp("s"))))
    assert json_texts_of(pa.array([found.bytes], pa.uuid())) == [f'"{found}"']


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [None, True, "é\n"]}, '{"b":1,"a":[null,true,"é\\n"]}'), (2**70, str(2**70)), ((1, 2), "[1,2]"),
        (0.1 + 0.2, "0.30000000000000004"), ([math.nan, math.inf, -math.inf], "[NaN,Infinity,-Infinity]"),
        ({1: "a"}, '{"1":"a"}'), (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (datetime.time(1, 2, 3, 4), '"01:02:03.000004"'), (datetime.timedelta(minutes=1, microseconds=5), "60.000005"),
        (datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC), '"2024-02-29T01:02:03+00:00"'),
        (decimal.Decimal("1.10"), '"1.10"'), (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"\x00\xff", '"AP8="'), (bytearray(b"a"), '"YQ=="'), (np.float32(0.5), "0.5"), (np.int64(3), "3"),
        (np.array([[1, 2], [3, 4]]), "[[1,2],[3,4]]"), (np.array([b"a"], object), '["YQ=="]'), (np.bool_(True), "true"),
        ("\ud800é", '"\\ud800\\u00e9"'),  # a lone surrogate is an escape
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_of_python_has_one_form(value, text):
    assert parts.encode_row({"a": value}).decode() == f'{{"a":{text}}}'


@pytest.mark.parametrize("value", [object(), {1, 2}, {(1, 2): 3}, 1j], ids=["object", "set", "dict", "complex"])
def test_a_value_of_python_without_a_form_is_refused(value):
    with pytest.raises(TypeError):
        parts.encode_row({"a": value})


@pytest.mark.parametrize(
    ("state", "is_kept"),
    [
        *((state, True) for state in ({}, {"a": [1, None, {"b": 2**70}], "c": "é"})),
        *((state, False) for state in (None, [1], {1: 2}, {"a": (1,)}, {"a": object()}, {"a": math.nan})),
    ],
)
def test_a_state_of_others_is_kept_if_json_gives_it_back_and_is_none_otherwise(state, is_kept):
    assert parts.plain_state(state) == (state if is_kept else None)


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
        parts.RowWriter(pa.schema([("what", kind)]), ["what"])


@given(st.lists(st.tuples(st.none() | st.floats(), st.binary(max_size=3)), min_size=1, max_size=6))
def test_a_row_has_the_same_text_alone_and_among_others(rows):
    numbers, raw = zip(*rows, strict=True)
    batch = pa.record_batch({"n": pa.array(numbers, pa.float64()), "s": pa.array(raw, pa.binary()).view(pa.string())})
    write = parts.RowWriter(batch.schema, ["n", "s"])

    assert write(batch) == [write(batch.slice(row, 1))[0] for row in range(batch.num_rows)]


def test_text_that_is_not_utf_8_is_a_bad_row_that_names_the_byte():
    columns = {
        "s": bad_text(b'a\xff"'), "b": pa.array([b"\xff"]), "l": pa.ListArray.from_arrays([0, 1], bad_text(b"\xfe")),
        "d": pa.array([DAY]),
    }  # fmt: skip
    batch = pa.record_batch(columns)

    (found,) = parts.RowWriter(batch.schema, list(columns))(batch)

    assert found == b'{"s":"a\xff\\"","b":"' + base64.b64encode(b"\xff") + b'","l":["\xfe"],"d":"2024-01-31"}'
    with pytest.raises(parts.RowFault, match="is not UTF-8") as caught:
        parts.RowDecoder(["b"])(found)
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

    (found,), (plain,) = (parts.RowWriter(batch.schema, batch.schema.names)(batch) for batch in (bad, good))

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
    assert parts.is_same_form(a, b) is parts.is_same_form(b, a) is expected


@given(st.lists(st.integers(0, 20).map(lambda n: b"x" * n), max_size=20), st.integers(0, 100), st.integers(0, 15))
def test_as_many_rows_as_find_room_are_in_a_block_and_the_others_are_told(rows, num_bytes, max_row_bytes):
    found = parts.block_rows(rows, num_bytes, max_row_bytes)

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
