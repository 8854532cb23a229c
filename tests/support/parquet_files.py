"""Parquet files of a few rows."""

import json

import pytest

from asyncdata.core.messages import Job, Overflow
from asyncdata.core.settings import resolve_path

pa = pytest.importorskip("pyarrow")


pq = pytest.importorskip("pyarrow.parquet")


def write(path, num_rows=100, *, group_rows=30, columns=None):
    """Rows ``{"id": ..., "pad": ...}``, or the columns given."""
    columns = columns or {"id": list(range(num_rows)), "pad": ["x" * (i * 37 % 90) for i in range(num_rows)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)
    return path


def reader_of(blocks):
    job = Job(files=blocks.files, tokenize=None, max_row_bytes=blocks.max_row_bytes, block_bytes=1, slack_bytes=0)
    return resolve_path(blocks.reader.path)(job, **blocks.reader.settings)


def rows_of(reader, block):
    found = reader.read_block(block, 1 << 30)
    return [json.loads(found.data[s : s + n]) for s, n in zip(found.starts, found.lengths, strict=True)]


def texts_of(reader, places, lengths):
    return reader.read_rows([Overflow(n, *place) for n, place in enumerate(places)], lengths)
