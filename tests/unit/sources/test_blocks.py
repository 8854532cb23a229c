"""Blocks of lines, of Parquet files and of datasets: each byte or row is in one, which is known by its start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import HuggingFaceSource, ParquetSource
from tests.support.parts import Block, FileBlocks, FileRef, Job, resolve_path

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.parts import ParquetBlocks


def of_lines(*sizes: int, block_bytes: int = 10) -> FileBlocks:
    """Files that exist by their sizes only: nothing is read."""
    stamps = [FileRef(f"/nowhere/{number}", size, number) for number, size in enumerate(sizes)]
    return FileBlocks(stamps, block_bytes, 1000)


class Footer(NamedTuple):
    """What a footer says of a file that no library wrote."""

    file: FileRef
    group_rows: list[int]
    sizes: list[int]
    digest: str = ""

    def group_bytes(self, columns: list[str]) -> list[int]:
        return self.sizes


def of_parquet(*files: list[tuple[int, int]], block_bytes: int = 100, reads: int = 4) -> ParquetBlocks:
    """Files of so many row groups, each of (rows, bytes)."""
    parquet = pytest.importorskip("asyncdata.sources.arrow.parquet")
    footers = [
        Footer(FileRef(f"/nowhere/{number}", 1, number), [g[0] for g in groups], [g[1] for g in groups])
        for number, groups in enumerate(files)
    ]
    return parquet.ParquetBlocks(footers, ["a"], block_bytes, reads, 1000)


def check(blocks: Any, extents: list[int], *, keeps_order: bool) -> list[Block]:
    """What holds for blocks of files that have so many bytes or rows."""
    found: list[Block] = blocks.blocks(range(blocks.num_blocks))

    everything = [(file_id, unit) for file_id, extent in enumerate(extents) for unit in range(extent)]
    assert [(block.file_id, unit) for block in found for unit in range(block.start, block.stop)] == everything
    assert blocks.extent == len(everything)
    backwards = range(blocks.num_blocks)[::-1]
    assert blocks.blocks(backwards) == (found[::-1] if keeps_order else found)
    assert all(blocks.blocks([number]) == [block] for number, block in enumerate(found))
    assert blocks.blocks([]) == []
    return found


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), block_bytes=st.integers(1, 60))
def test_lines(sizes, block_bytes):
    found = check(of_lines(*sizes, block_bytes=block_bytes), sizes, keeps_order=True)

    assert all(0 < block.stop - block.start <= block_bytes for block in found)


@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2000)), max_size=4), min_size=1, max_size=4),
    block_bytes=st.integers(1, 500),
    reads=st.integers(1, 8),
)
def test_parquet_files_whose_blocks_never_cross_row_groups(files, block_bytes, reads):
    if not any(rows for groups in files for rows, _ in groups):
        return
    extents = [sum(rows for rows, _ in groups) for groups in files]
    found = check(of_parquet(*files, block_bytes=block_bytes, reads=reads), extents, keeps_order=False)

    for file_id, groups in enumerate(files):
        mine = [block for block in found if block.file_id == file_id]
        ends = np.cumsum([0, *[rows for rows, _ in groups]]).tolist()
        assert not any(block.start < end < block.stop for block in mine for end in ends)
        for start, end in zip(ends, ends[1:], strict=False):
            assert sum(start <= block.start < end for block in mine) <= reads


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_block_is_about_as_large_as_asked_for(tmp_path: Path, kind: str) -> None:
    """Where no dictionary spares a file anything; many short columns, whose names count."""
    pytest.importorskip({"parquet": "pyarrow"}.get(kind, kind))
    columns: dict[str, Any] = {"id": list(range(5000)), "pad": ["x" * (i * 37 % 90) for i in range(5000)]}
    columns |= {f"c{number}": ["x"] * 5000 for number in range(8)}
    if kind == "datasets":
        import datasets

        blocks = HuggingFaceSource(datasets.Dataset.from_dict(columns)).open(16_000)
    else:
        from tests.support.parquet_files import pa, pq

        pq.write_table(pa.table(columns), tmp_path / "a", row_group_size=2000, use_dictionary=False, compression="zstd")
        blocks = ParquetSource(str(tmp_path / "a")).open(16_000)
    job = Job(files=blocks.files, tokenize=None, max_row_bytes=1 << 20, block_bytes=1, slack_bytes=0)
    reader = resolve_path(blocks.reader.path)(job, **json.loads(json.dumps(blocks.reader.settings)))

    sizes = [len(reader.read_block(block, 1 << 20).data) for block in blocks.blocks(range(blocks.num_blocks - 1))]
    reader.close()
    blocks.close()

    assert sum(sizes) / len(sizes) == pytest.approx(blocks.block_bytes, rel=0.3)
    assert blocks.block_bytes == pytest.approx(16_000, rel=0.3)
    assert max(sizes) < blocks.room_bytes
