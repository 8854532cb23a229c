"""The order over what is read from front to back, and rows that Python code makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import DataLoader, IterableSource, Shuffle
from asyncdata.errors import ConfigError
from asyncdata.order.order import order_keys, shuffled_rows
from tests.support.parts import MAX_ROW_BYTES, StreamOrder
from tests.support.reading_rows import AS_IT_LIES, read_until_fault, rows_of
from tests.support.streams import texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_order_of_files_and_rows_is_the_same_for_ever():
    order = StreamOrder(Shuffle(), 42, 9)

    assert order.files(0) == [1, 3, 4, 6, 8, 0, 2, 7, 5]
    assert order.files(1) == [8, 6, 0, 4, 1, 5, 2, 3, 7]
    assert order.rows(1, 2, 9).tolist() == [4, 7, 0, 8, 3, 1, 6, 5, 2]
    assert [order.key(0), order.key(1)] == [1551201877, 2132987933]
    expected = shuffled_rows(100, order_keys(42, 3, "rows 5")[0])  # as those of blocks are
    assert np.array_equal(order.rows(3, 5, 100), expected)

    lying = StreamOrder(Shuffle(enabled=False), 42, 5)
    assert (lying.files(3), lying.rows(3, 2, 4).tolist(), lying.key(3)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3], 0)
    described = {"seed": 42, "enabled": True, "block_bytes": 32768, "window_blocks": 1024, "num_files": 9}
    assert order.description() == described


def rows_of_a_module(epoch: int) -> Iterator[dict[str, int]]:
    yield from ({"id": n, "epoch": epoch} for n in range(600))


def test_bytes_are_a_rows_own_text_and_a_row_that_is_too_long_has_none():
    made = [b'{"id":  1}', {"id": 2}, b"no json", {"a": "x" * 99}]
    stream = IterableSource(lambda epoch: made, max_row_bytes=20).open(1024)

    found = stream.read(StreamOrder(Shuffle(), 0, 1), 0, None, bool)

    assert [text for rows in found for text in texts_of(rows, 20)] == [b'{"id":  1}', b'{"id":2}', b"no json", None]
    assert IterableSource(list, max_row_bytes=1 << 40).open(1024).max_row_bytes == MAX_ROW_BYTES
    assert rows_of(IterableSource(lambda epoch: made, max_row_bytes=20), bad_rows="skip") == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (KeyError("broken"), "AD129 the source raised KeyError('broken')"),
        ({"a": object()}, "example 300 cannot be written as JSON: a builtins.object has no"),
    ],
    ids=["an error", "an example without a form"],
)
def test_what_is_wrong_with_the_function_is_told_after_its_examples_and_closes_it(bad, words):
    is_closed = []

    def make(epoch: int) -> Iterator[dict[str, Any]]:
        try:
            yield from ({"id": n} for n in range(300))
            if isinstance(bad, Exception):
                raise bad
            yield bad
        finally:
            is_closed.append(True)

    found, error = read_until_fault(IterableSource(make))

    assert [row["id"] for row in found] == list(range(300))
    assert words in str(error)
    assert is_closed == [True]
    assert error.__cause__ is bad or isinstance(error.__cause__, TypeError)


def test_an_iterable_in_place_of_a_function_is_refused():
    with pytest.raises(ConfigError, match="takes a function from an epoch's number to an iterable; got a list, which"):
        DataLoader(IterableSource([{"id": 1}]), **AS_IT_LIES)


def test_its_fingerprint_is_the_functions_name_and_version():
    def digest_of(make: Any, version: int) -> str:
        return str(IterableSource(make, version=version).open(1024).fingerprint()["digest"])

    assert digest_of(rows_of_a_module, 1) == digest_of(rows_of_a_module, 1)
    assert len({digest_of(rows_of_a_module, 1), digest_of(rows_of_a_module, 2), digest_of(list, 1)}) == 3
