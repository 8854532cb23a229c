"""A declared column: its numbers come back as they were, and what it cannot hold is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncdata import Column
from asyncdata.core.columns import decoded
from asyncdata.errors import ConfigError
from tests.support.parts import Columns, bfloat16_bits, declared

KINDS = ["int8", "int64", "uint16", "uint64", "float16", "float32", "float64", "bool"]


@st.composite
def valued(draw: st.DrawFn) -> tuple[Column, Any]:
    """A column, and a value of it."""
    dtype, shape = draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    per = draw(st.sampled_from(["token", "sample", "item"]))
    whole = shape if per == "sample" else (draw(st.integers(1, 4)), *shape)
    return Column("x", dtype, per, shape), draw(arrays.arrays(dtype, whole))


@given(valued(), st.booleans(), st.integers(0, 3))
def test_a_value_comes_back_from_any_place_in_a_buffer(drawn, as_list, offset):
    column, value = drawn
    data = column.encode(value.tolist() if as_list else value, len(value) if value.ndim else 0)
    (name, found), *others = decoded({column.key: memoryview(b"\0" * offset + data)[offset:]}).items()

    assert (name, others) == ("x", [])
    assert (found.dtype, found.shape, found.flags.writeable, found.flags.aligned) == (value.dtype, value.shape, 0, 1)
    assert np.array_equal(found, value, equal_nan=value.dtype.kind == "f")
    assert declared(column.key) == column


@given(arrays.arrays(np.uint32, 40))
def test_bfloat16_is_rounded_as_torch_does(bits):
    torch = pytest.importorskip("torch")
    values = bits.view(np.float32)
    wanted = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    found = bfloat16_bits(values)
    assert np.array_equal(found[~np.isnan(values)], wanted[~np.isnan(values)])
    assert torch.from_numpy(found).view(torch.bfloat16).isnan().numpy().tolist() == np.isnan(values).tolist()


def test_a_tensor_is_taken_and_bfloat16_is_a_tensor_again():
    torch = pytest.importorskip("torch")
    from tests.support.parts import to_torch

    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        column = Column("x", str(dtype).removeprefix("torch."), shape=(2,))
        value = torch.tensor([[1, 2], [3, 4]]).to(dtype).requires_grad_(dtype.is_floating_point)
        found = to_torch(column.decode(memoryview(column.encode(value, 2))))
        assert (found.dtype, found.tolist()) == (dtype, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "tokens", "dtype": "int8"}, "the name 'tokens' is none"),
        ({"name": "two words", "dtype": "int8"}, "the name 'two words' is none"),
        ({"name": "x_counts", "dtype": "int8"}, "the name 'x_counts' is none"),
        ({"name": "x", "dtype": "int7"}, "there is no dtype 'int7'"),
        ({"name": "x", "dtype": "int8", "per": "row"}, "'token' or 'sample' or 'item'|token.*sample.*item"),
        ({"name": "x", "dtype": "int8", "shape": (2, 0)}, "a size below 1"),
        ({"name": "x", "dtype": "int8", "pad": 128}, "pad=128.0 is no int8"),
        ({"name": "x", "dtype": "int8", "per": "item", "pad": 1}, "is not padded"),
        ({"name": "x", "dtype": "int8", "per": "sample", "follows": "labels"}, "can follow labels"),
    ],
)
def test_a_column_that_cannot_work_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Column(**settings)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (Column("x", "int8"), [1, 2], r"x has the shape \(2,\), and must have \(3,\)"),
        (Column("x", "int8", "sample"), [1, 2, 3], r"must have \(\)"),
        (Column("x", "int8", "item", (2,)), [[1, 2], [3]], "inhomogeneous|as many in each row"),
        (Column("x", "int8"), [1, 2, 300], "x has np.int64.300., which int8 cannot hold"),
        (Column("x", "uint64"), [1, 2**64 - 1, -1], "out of bounds|cannot hold"),
        (Column("x", "uint64"), [1, 2, 1.5], "has real numbers"),
        (Column("x", "float32"), ["a", "b", "c"], "need numbers"),
        (Column("x", "float32"), {"a": 1}, "need numbers"),
        (Column("x", "int32"), b"12345", "buffer size must be a multiple"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(column, value, reason):
    with pytest.raises((TypeError, ValueError, OverflowError), match=reason):
        column.encode(value, 3)


def test_bytes_are_the_numbers_that_they_have():
    assert Column("x", "uint8", "item").decode(memoryview(b"ab")).tolist() == [97, 98]
    assert Column("x", "uint8", "item").encode(b"ab", 3) == b"ab"
    assert Column("x", "int16").encode(np.arange(3, dtype=np.int16).tobytes(), 3) == b"\0\0\1\0\2\0"


def test_columns_are_copied_and_pickled_with_what_they_are():
    column = Column("x", "bfloat16", pad=1)
    columns = Columns({column: column.padding(2)})
    for found in (copy.copy(columns), copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))):  # noqa: S301 - our own
        assert (found.declared, found["x"].tolist(), found["x"].flags.writeable) == ({"x": column}, [16256] * 2, False)
        assert found["x"].dtype.metadata == {"dtype": "bfloat16"}
        assert not np.shares_memory(found["x"], columns["x"])
