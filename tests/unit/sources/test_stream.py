"""The order over a stream, rows that Python code makes, and the one form that examples have as JSON."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import ConfigError, IterableSource, Shuffle, SourceError
from asyncdata.order.permutation import order_keys, shuffled_rows
from asyncdata.sources.base import Source
from asyncdata.sources.iterable import plain_state
from asyncdata.sources.row_json import encode_row
from asyncdata.sources.stream import MAX_ROW_BYTES, StreamOrder
from tests.support.streams import texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# The order


def test_the_order_of_files_and_rows_is_the_same_for_ever():
    order = StreamOrder(Shuffle(), 42, 9)

    assert order.files(0) == [1, 3, 4, 6, 8, 0, 2, 7, 5]
    assert order.files(1) == [8, 6, 0, 4, 1, 5, 2, 3, 7]
    assert order.rows(1, 2, 9).tolist() == [4, 7, 0, 8, 3, 1, 6, 5, 2]
    assert [order.key(0), order.key(1)] == [1551201877, 2132987933]


def test_the_rows_of_a_window_are_permuted_as_those_of_blocks_are():
    expected = shuffled_rows(100, order_keys(7, 3, "rows 5")[0])

    assert np.array_equal(StreamOrder(Shuffle(), 7, 1).rows(3, 5, 100), expected)


def test_without_shuffling_everything_is_as_it_lies():
    order = StreamOrder(Shuffle(enabled=False), 42, 5)

    assert order.files(3) == [0, 1, 2, 3, 4]
    assert order.rows(3, 2, 4).tolist() == [0, 1, 2, 3]
    assert order.key(3) == 0


def test_every_setting_that_changes_the_order_is_in_its_description():
    base = StreamOrder(Shuffle(), 42, 5).description()

    assert base == {"seed": 42, "enabled": True, "block_bytes": 32768, "window_blocks": 1024, "num_files": 5}
    assert StreamOrder(Shuffle(window_blocks=7), 42, 5).description() != base


# Rows that Python code makes


def opened(make: Any, **settings: Any) -> Any:
    return IterableSource(make, **settings).open(1024)


def read(stream: Any, epoch: int = 0) -> list[bytes | None]:
    found = stream.read(StreamOrder(Shuffle(), 0, 1), epoch, None, bool)
    return [text for rows in found for text in texts_of(rows, stream.max_row_bytes)]


def test_it_is_a_source():
    assert isinstance(IterableSource(lambda epoch: []), Source)


def test_examples_are_rows_in_order_and_created_again_for_each_epoch():
    stream = opened(lambda epoch: ({"id": n, "epoch": epoch} for n in range(600)))

    for epoch in (0, 3):
        assert [json.loads(text or b"") for text in read(stream, epoch)] == [
            {"id": n, "epoch": epoch} for n in range(600)
        ]


def test_bytes_are_a_rows_own_text():
    assert read(opened(lambda epoch: [b'{"id":  1}', {"id": 2}, b"no json"])) == [
        b'{"id":  1}',
        b'{"id":2}',
        b"no json",
    ]


def test_rows_are_numbered_and_located_by_the_function():
    stream = opened(rows_of_a_module)

    numbers = [n for rows in stream.read(StreamOrder(Shuffle(), 0, 1), 0, None, bool) for n in rows.numbers.tolist()]

    assert numbers == list(range(300))
    location = stream.location(0, 299, 7)
    assert (location.path, location.row_number, location.num_bytes) == (f"{__name__}:rows_of_a_module", 299, 7)


def rows_of_a_module(epoch: int) -> Iterator[dict[str, int]]:
    yield from ({"id": n} for n in range(300))


def test_a_row_that_is_too_long_has_no_bytes():
    stream = opened(lambda epoch: [{"a": 1}, {"a": "x" * 99}, {"a": 2}], max_row_bytes=20)

    assert read(stream) == [b'{"a":1}', None, b'{"a":2}']
    assert opened(list, max_row_bytes=1 << 40).max_row_bytes == MAX_ROW_BYTES


def test_an_error_of_the_function_comes_after_its_examples():
    def make(epoch: int) -> Iterator[dict[str, int]]:
        yield from ({"id": n} for n in range(300))
        raise KeyError("broken")

    found: list[Any] = []
    with pytest.raises(KeyError, match="broken"):
        for rows in opened(make).read(StreamOrder(Shuffle(), 0, 1), 0, None, bool):
            found += texts_of(rows)
    assert len(found) == 300


def test_an_example_that_has_no_form_in_json_is_named():
    found: list[Any] = []
    with pytest.raises(SourceError, match=r"^AD128 .*: example 2 cannot be written as JSON: a builtins\.object has no"):
        for rows in opened(lambda epoch: [{}, {}, {"a": object()}]).read(StreamOrder(Shuffle(), 0, 1), 0, None, bool):
            found += texts_of(rows)
    assert found == [b"{}", b"{}"]


def test_closing_it_closes_the_generator():
    is_closed = []

    def make(epoch: int) -> Iterator[dict[str, int]]:
        try:
            while True:
                yield {"id": 1}
        finally:
            is_closed.append(True)

    rows = opened(make).read(StreamOrder(Shuffle(), 0, 1), 0, None, bool)
    next(rows)
    rows.close()

    assert is_closed == [True]


def test_an_iterable_in_place_of_a_function_is_refused():
    with pytest.raises(ConfigError, match="takes a function from an epoch's number to an iterable; got a list, which"):
        opened([{"id": 1}])


def test_its_fingerprint_is_the_functions_name_and_version():
    one, same, other = (opened(rows_of_a_module, version=version).fingerprint() for version in (1, 1, 2))

    assert one == same
    assert one["digest"] != other["digest"] != opened(list, version=1).fingerprint()["digest"]


# The form of an example


@pytest.mark.thorough
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
    ],
    ids=repr,
)
def test_every_kind_of_value_has_one_form(value, text):
    assert encode_row(value).decode() == text


def test_a_lone_surrogate_is_an_escape():
    assert encode_row({"a": "\ud800é"}) == b'{"a":"\\ud800\\u00e9"}'


@pytest.mark.parametrize("value", [pytest.param(object(), id="object()"), {1, 2}, {(1, 2): 3}, 1j], ids=repr)
def test_a_value_without_a_json_form_is_refused(value):
    with pytest.raises(TypeError):
        encode_row({"a": value})


# States of others


@pytest.mark.parametrize("state", [{}, {"a": [1, None, {"b": 2**70}], "c": "é"}], ids=repr)
def test_a_state_that_json_gives_back_is_kept(state):
    assert plain_state(state) == state


@pytest.mark.parametrize(
    "state",
    [None, [1], {1: 2}, {"a": (1,)}, pytest.param({"a": object()}, id="{'a': object()}"), {"a": math.nan}],
    ids=repr,
)
def test_a_state_that_json_cannot_store_is_none(state):
    assert plain_state(state) is None
