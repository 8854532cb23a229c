"""The row index: where every row lies, which rows have a number, and when that is known."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import RowShuffle, SourceError
from asyncdata.core.messages import Block, Indexed, RowError
from asyncdata.prefetch.row_index.row_index import RowIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GOOD, NO_SAMPLE, NO_OBJECT = 0, 1, 2
BLOCK = 100


class Pieces:
    """Blocks of two files, each of 100 bytes."""

    num_blocks = 6
    are_arrays: Sequence[bool] = ()

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        return [Block(number // 3, BLOCK * (number % 3), BLOCK * (number % 3 + 1)) for number in ids]


def part(marks: Sequence[Sequence[int]], **fields: Any) -> Indexed:
    """What a worker finds in blocks: rows at 0, 10, 20 ... of each, as long as their number."""
    counts = [len(block) for block in marks]
    offsets = [10 * row for block in marks for row in range(len(block))]
    flat = [mark for block in marks for mark in block]
    fields = {
        "num_tokens": array("i", [3 * row if mark == GOOD else 0 for row, mark in enumerate(flat)]).tobytes(),
        **fields,
    }
    return Indexed(
        counts=array("i", counts).tobytes(),
        offsets=array("i", offsets).tobytes(),
        lengths=array("i", range(len(flat))).tobytes(),
        marks=bytes(flat) if any(flat) else b"",
        num_blank=0,
        **fields,
    )


def index_of(shuffle: RowShuffle, *parts: Indexed) -> RowIndex:
    index = RowIndex(Pieces(), shuffle)
    for found in parts:
        index.append(found)
    return index


marks = st.lists(st.lists(st.sampled_from([GOOD, GOOD, NO_SAMPLE, NO_OBJECT]), max_size=5), min_size=6, max_size=6)
bounds = st.none() | st.integers(-12, 25)


@pytest.mark.thorough
@given(marks, bounds, bounds, st.booleans(), st.integers(1, 5))
def test_the_rows_that_have_a_number_are_those_of_a_list_filtered_and_sliced(blocks, first, stop, only_kept, cut):
    index = index_of(
        RowShuffle(first=first, stop=stop, only_kept=only_kept or (first, stop) == (None, None)),
        part(blocks[:cut]),
        part(blocks[cut:]),
    )
    shuffle = index._shuffle  # noqa: SLF001 - what it was made with

    rows = [
        ((number // 3, BLOCK * (number % 3) + 10 * row), mark)
        for number, block in enumerate(blocks)
        for row, mark in enumerate(block)
    ]
    expected = [row for row in rows if row[1] != NO_OBJECT][first:stop]
    if shuffle.only_kept:
        expected = [row for row in expected if row[1] == GOOD]

    assert index.num_rows == len(expected)
    places = index.places(np.arange(len(expected)))
    assert list(zip(places.file_ids.tolist(), places.offsets.tolist(), strict=True)) == [place for place, _ in expected]


@pytest.mark.thorough
@given(marks, bounds, bounds, st.booleans(), st.floats(0, 1), st.integers(0, 2**31))
def test_the_parts_of_a_split_are_disjoint_and_together_all_rows(blocks, first, stop, only_kept, ratio, seed):
    settings = {"first": first, "stop": stop, "only_kept": only_kept}
    split = {"train_ratio": ratio, "split_seed": seed}
    both, train, evaluated = (
        index_of(RowShuffle(part=name, **settings, **split), part(blocks)) for name in (None, "train", "eval")
    )
    numbers = [index.places(np.arange(index.num_rows)).rows.tolist() for index in (both, train, evaluated)]

    assert sorted(numbers[1] + numbers[2]) == numbers[0]
    assert len(numbers[1]) == int(len(numbers[0]) * ratio)
    assert all(rows == sorted(rows) for rows in numbers)
    assert sum(index.rows_of_files.sum() for index in (train, evaluated)) == both.num_rows
    assert not (train.is_settled or evaluated.is_settled)


@pytest.mark.parametrize("seed", [0, 42])
def test_a_split_is_torchs(seed):
    torch = pytest.importorskip("torch")
    chosen = torch.randperm(30, generator=torch.Generator().manual_seed(seed)).tolist()

    for name, expected in (("train", chosen[:20]), ("eval", chosen[20:])):
        shuffle = RowShuffle(part=name, train_ratio=0.69, split_seed=seed)
        index = index_of(shuffle, part([[GOOD] * 5] * 6))
        assert index.places(np.arange(index.num_rows)).rows.tolist() == sorted(expected)


@pytest.mark.thorough
@given(marks, bounds, bounds)
def test_tokens_are_those_of_the_rows_that_have_a_number(blocks, first, stop):
    index = index_of(RowShuffle(first=first, stop=stop, only_kept=True), part(blocks))
    flat = [(number // 3, mark, 3 * row) for row, (number, mark) in enumerate(numbered(blocks))]
    expected = [row for row in [row for row in flat if row[1] != NO_OBJECT][first:stop] if row[1] == GOOD]

    assert index.num_tokens.tolist() == [num_tokens for _, _, num_tokens in expected]
    assert index.num_tokens.dtype == np.int32
    every_other = np.arange(0, len(expected), 2)
    assert index.num_tokens_of(every_other).tolist() == [num_tokens for _, _, num_tokens in expected][::2]
    assert index.rows_of_files.tolist() == [[file for file, _, _ in expected].count(file) for file in (0, 1)]


def numbered(blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The number of each row's block, and its mark."""
    return [(number, mark) for number, block in enumerate(blocks) for mark in block]


def test_without_a_tokenizing_pass_there_are_no_token_counts():
    index = index_of(RowShuffle(), part([[GOOD] * 3], num_tokens=b""))

    assert index.num_tokens.tolist() == []
    assert index.rows_of_files.tolist() == [3, 0]


def test_rows_that_were_copied_are_read_from_the_copy_and_named_by_their_origin():
    index = RowIndex(Pieces(), RowShuffle(), "folder")
    index.append(part([[GOOD] * 3, [GOOD]]))
    index.append(part([[], [GOOD] * 2]))

    places = index.places(np.arange(6))
    origins = index.origins(places.rows)

    assert places.copies is not None
    assert places.copies[0].tolist() == [0, 0, 0, 0, 2, 2]
    assert places.copies[1].tolist() == [0, 10, 20, 0, 0, 10], "as the worker said"
    assert origins[0].tolist() == places.file_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert origins[1].tolist() == places.offsets.tolist() == [0, 1, 2, 100, 0, 1], "counted in their file"


@pytest.mark.thorough
@given(marks, st.integers(0, 25), st.integers(0, 25))
def test_when_it_is_settled_no_further_row_gets_a_number(blocks, first, stop):
    index = RowIndex(Pieces(), RowShuffle(method="none", first=first, stop=stop, only_kept=True))
    settled = None
    for block in blocks:
        index.append(part([block]))
        if settled is None and index.is_settled:
            settled = index.num_rows

    assert settled is None or settled == index.num_rows


def test_without_bounds_every_row_has_a_number_and_nothing_is_looked_at():
    index = index_of(RowShuffle(), part([[GOOD] * 3, [GOOD]]), part([[], [GOOD] * 2, [], [GOOD]]))

    assert (index.num_rows, index.num_found, index.num_blocks) == (7, 7, 6)
    places = index.places(np.array([6, 0, 3]))
    assert places.file_ids.tolist() == [1, 0, 0]
    assert places.offsets.tolist() == [200, 0, 100]
    assert places.lengths.dtype == np.int32


def test_what_is_left_out_is_counted_by_its_reason():
    error = RowError(1, "AD101", "cut off")
    index = index_of(
        RowShuffle(only_kept=True),
        part([[GOOD, NO_OBJECT]], drops={"max_length": 2}, errors=[error]),
        part([[GOOD]], drops={"max_length": 1}),
    )

    assert index.excluded == {"max_length": 3, "bad row AD101": 1}


def test_a_waiting_thread_wakes_when_the_index_is_complete_or_has_failed():
    index, broken = RowIndex(Pieces(), RowShuffle()), RowIndex(Pieces(), RowShuffle())

    assert not index.wait(0.0)
    index.complete()
    broken.fail(SourceError("gone"))

    assert index.wait(0.0)
    assert broken.wait(0.0)
    assert isinstance(broken.fault, SourceError)


@pytest.mark.parametrize(
    ("settings", "check", "grows"),
    [
        ({}, "none", False),
        ({"method": "none"}, "none", True),
        ({"method": "none", "stop": 5}, "json", True),
        ({"method": "none", "first": -5}, "json", False),
        ({"method": "slime", "only_kept": True}, "samples", False),
    ],
)
def test_rows_are_looked_at_as_far_as_the_order_needs_it(settings, check, grows):
    shuffle = RowShuffle(**settings)

    assert (shuffle.looks_at, shuffle.grows) == (check, grows)
