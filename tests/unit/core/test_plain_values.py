"""Values as plain builtins: nothing is lost on the way, and what cannot be kept is named."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum, StrEnum
from typing import Any

import numpy as np
import pytest

from tests.support.parts import from_builtins, to_builtins


class Colour(StrEnum):
    RED = "red"


class Number(int, Enum):
    ONE = 1


def carried(value: Any) -> Any:
    return from_builtins(json.loads(json.dumps(to_builtins(value))))


VALUES: list[Any] = [None, True, -1, 2**80, 0.1, "\u00fcber", "\ud800", [], [1, [2.5, None]], {}, {"a": {"b": [1]}}]
VALUES += [(), (1, ("a", [2])), b"", b"\x00\xff"]
LOOK_ALIKES = [{"__ndarray__": 1}, {"__bytes__": "eA=="}, {"__tuple__": [1]}, {"__dict__": {"__dict__": {}}}]


def test_a_value_comes_back_as_it_was():
    for value in (*VALUES, *LOOK_ALIKES, {"a": {"__dunder__": (b"x",)}}):
        back = carried(value)

        assert back == value
        assert type(back) is type(value)


ARRAYS = [
    np.array(5, np.int64), np.array([[1.5, np.nan]], np.float16), np.array([], np.float32).reshape(0, 4),
    np.arange(6, dtype=np.int16).reshape(2, 3).T, np.arange(10, dtype=np.int64)[::3], np.array([1, 2], ">i4"),
    np.array([1 + 2j], np.complex64), np.array(["a", "bc"]), np.array(["2026-11-20"], "datetime64[D]"),
    *(np.zeros(2, dtype) for dtype in ("<i4", ">f8", "|b1", "|u1", "<U3", "|S7", "<M8[ns]", "<c16", "|V3")),
]  # fmt: skip


def test_an_array_comes_back_with_its_type_shape_and_bits():
    for array in ARRAYS:
        back = carried(array)

        assert (back.dtype.str, back.shape, back.tobytes()) == (array.dtype.str, array.shape, array.tobytes())
        dtype, shape, text = to_builtins(array)["__ndarray__"]
        assert (dtype, tuple(shape), type(text)) == (array.dtype.str, array.shape, str), "no list of numbers"
        assert back.flags.writeable


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"), (Number.ONE, 1), (np.float64(0.5), 0.5), (np.int8(-3), -3), (np.bool_(True), True),
        (np.str_("a"), "a"), ({np.str_("key"): 1, Colour.RED: 2}, {"key": 1, "red": 2}),
        (bytearray(b"x"), {"__bytes__": "eA=="}), (memoryview(b"xyz")[::2], {"__bytes__": "eHo="}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_subclasses_become_what_a_decoder_can_give_back(value, plain):
    found = to_builtins(value)

    assert found == plain
    assert type(found) is type(plain)
    if isinstance(found, dict):
        assert {type(key) for key in found} == {str}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), ({1, 2}, "builtins.set"), (1j, "builtins.complex"),
        (date(2026, 11, 20), "datetime.date"), (np.datetime64("2026-11-20"), "numpy.datetime64"),
        (np.timedelta64(1, "s"), "numpy.timedelta64"), (np.array([object()]), "numpy.ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_kept_without_loss_is_refused_by_name(value, kind):
    with pytest.raises(TypeError) as caught:
        to_builtins({"rollout": [1, {"images": (0, value)}]})

    assert str(caught.value) == f"$.rollout[1].images[1] is a {kind}, which a snapshot cannot hold"


@pytest.mark.parametrize("key", [1, None, b"a", (1,)])
def test_keys_that_are_no_text_are_refused(key):
    with pytest.raises(TypeError, match=r"^\$\.extra has the key .*; only text keys survive JSON$"):
        to_builtins({"extra": {key: 1}})


@pytest.mark.parametrize("dtype", ["9" * 5000 + ",i4", "i4,i4", "(3,)i4", "O", "|O", ["<i4"], 3, None, "<i4\n", ""])
def test_a_type_that_is_not_of_one_number_is_refused_before_numpy_sees_it(dtype):
    with pytest.raises(ValueError, match="not a dtype of numbers"):
        from_builtins({"__ndarray__": [dtype, [1], "AAAAAA=="]})
