"""Blocks: each byte or row is in one, which is known by its start; and what is read from front to back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncdata import DataLoader, HuggingFaceSource, IterableSource, ParquetSource, Shuffle
from asyncdata.errors import ConfigError
from asyncdata.order.order import order_keys, shuffled_rows
from tests.support.loaders import AS_IT_LIES, read_until_fault, rows_of
from tests.support.parts import MAX_ROW_BYTES, Block, FileBlocks, FileRef, ParquetBlocks, StreamOrder
from tests.support.sources import texts_of


class Footer(NamedTuple):
    """What a footer says of a file that no library wrote."""

    file: FileRef
    group_rows: list[int]
    sizes: list[int]
    digest: str = ""

    def group_bytes(self, columns: list[str]) -> list[int]:
        return self.sizes


def check(blocks: Any, extents: list[int], *, keeps_order: bool) -> list[Block]:
    """What holds for blocks of files that have so many bytes or rows."""
    found: list[Block] = blocks.blocks(range(blocks.num_blocks))

    everything = [(file_id, unit) for file_id, extent in enumerate(extents) for unit in range(extent)]
    assert [(block.file_id, unit) for block in found for unit in range(block.start, block.stop)] == everything
    assert blocks.extent == len(everything)
    assert blocks.blocks(range(blocks.num_blocks)[::-1]) == (found[::-1] if keeps_order else found)
    assert all(blocks.blocks([number]) == [block] for number, block in enumerate(found))
    assert blocks.blocks([]) == []
    return found


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), block_bytes=st.integers(1, 60))
def test_lines(sizes, block_bytes):
    files = [FileRef(f"/nowhere/{number}", size, number) for number, size in enumerate(sizes)]  # nothing is read
    found = check(FileBlocks(files, block_bytes, 1000), sizes, keeps_order=True)

    assert all(0 < block.stop - block.start <= block_bytes for block in found)


@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2000)), max_size=4), min_size=1, max_size=4),
    block_bytes=st.integers(1, 500),
    reads=st.integers(1, 8),
)
def test_parquet_files_whose_blocks_never_cross_row_groups(files, block_bytes, reads):
    """Files of some row groups, each of (rows, bytes)."""
    extents = [sum(rows for rows, _ in groups) for groups in files]
    assume(any(extents))
    footers: Any = [
        Footer(FileRef(f"/nowhere/{number}", 1, number), [rows for rows, _ in groups], [size for _, size in groups])
        for number, groups in enumerate(files)
    ]
    found = check(ParquetBlocks(footers, ["a"], block_bytes, reads, 1000), extents, keeps_order=False)

    for file_id, groups in enumerate(files):
        mine = [block for block in found if block.file_id == file_id]
        ends = np.cumsum([0, *[rows for rows, _ in groups]]).tolist()
        assert not any(block.start < end < block.stop for block in mine for end in ends)
        for start, end in zip(ends, ends[1:], strict=False):
            assert sum(start <= block.start < end for block in mine) <= reads


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_block_is_about_as_large_as_asked_for(tmp_path: Path, kind: str) -> None:
    """Where no dictionary spares a file anything; many short columns, whose names count."""
    parquet_files = pytest.importorskip("tests.support.parquet_files")
    columns: dict[str, Any] = {"id": list(range(5000)), "pad": ["x" * (i * 37 % 90) for i in range(5000)]}
    columns |= {f"c{number}": ["x"] * 5000 for number in range(8)}
    if kind == "datasets":
        blocks: Any = HuggingFaceSource(pytest.importorskip("datasets").Dataset.from_dict(columns)).open(16_000)
    else:
        table, layout = parquet_files.pa.table(columns), {"use_dictionary": False, "compression": "zstd"}
        parquet_files.pq.write_table(table, tmp_path / "a", row_group_size=2000, **layout)
        blocks = ParquetSource(str(tmp_path / "a")).open(16_000)
    reader = parquet_files.reader_of(blocks)

    sizes = [len(reader.read_block(block, 1 << 20).data) for block in blocks.blocks(range(blocks.num_blocks - 1))]
    reader.close()
    blocks.close()

    assert sum(sizes) / len(sizes) == pytest.approx(blocks.block_bytes, rel=0.3)
    assert blocks.block_bytes == pytest.approx(16_000, rel=0.3)
    assert max(sizes) < blocks.room_bytes


def test_the_order_of_files_and_rows_is_the_same_for_ever():
    order = StreamOrder(Shuffle(), 42, 9)

    assert (order.files(0), order.files(1)) == ([1, 3, 4, 6, 8, 0, 2, 7, 5], [8, 6, 0, 4, 1, 5, 2, 3, 7])
    assert order.rows(1, 2, 9).tolist() == [4, 7, 0, 8, 3, 1, 6, 5, 2]
    assert [order.key(0), order.key(1)] == [1551201877, 2132987933]
    assert np.array_equal(order.rows(3, 5, 100), shuffled_rows(100, order_keys(42, 3, "rows 5")[0]))

    lying = StreamOrder(Shuffle(enabled=False), 42, 5)
    assert (lying.files(3), lying.rows(3, 2, 4).tolist(), lying.key(3)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3], 0)
    described = {"seed": 42, "enabled": True, "block_bytes": 32768, "window_blocks": 1024, "num_files": 9}
    assert order.description() == described


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

    assert digest_of(list, 1) == digest_of(list, 1)
    assert len({digest_of(list, 1), digest_of(list, 2), digest_of(dict, 1)}) == 3
