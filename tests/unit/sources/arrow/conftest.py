"""Parquet files of a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncdata import ParquetSource

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata.sources.arrow.parquet import ParquetBlocks


@pytest.fixture
def two(tmp_path: Path) -> ParquetBlocks:
    """200 rows in two files of several row groups."""
    from tests.support.parquet_files import write  # it needs pyarrow

    columns = {"id": list(range(100, 200)), "pad": ["y"] * 100}
    paths = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", group_rows=45, columns=columns)]
    return ParquetSource([str(path) for path in paths]).open(300)
