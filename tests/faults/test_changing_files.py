"""Files grow, shrink, are edited, replaced or deleted in an epoch: what comes is D, to its end or to an error.

An error names the file. Nothing of another content is ever delivered in this one's name; what leaves lines alone, such
as chmod, changes nothing.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncdata import DataLoader, HuggingFaceSource, Shuffle
from asyncdata.errors import EndOfData, SourceError
from tests.support.combinations import each_value
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S, ids
from tests.support.streams import frames, jsonl, members
from tests.support.tokenize_fns import row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=1, full=10)
SHUFFLE = Shuffle(block_bytes=1024, window_blocks=8)
CODES = ("AD302", "AD303", "AD304", "AD121", "AD122", "AD120", "AD128")
FIRST, OTHER = 100_000, 500_000
"""The ids of the rows at the start, and of other rows, which take as many bytes."""


def lines(ids: range) -> bytes:
    return jsonl({"id": number, "pad": "x" * (30 + number % 50)} for number in ids)


def zipped(ids: range) -> bytes:
    """Stored and not compressed, so that other rows of these lengths take as many bytes."""
    return members((lines(ids[start : start + 500]) for start in range(0, len(ids), 500)), level=0)


def parquet(ids: range) -> bytes:
    """Without what follows from the values: another file of the same size has the same footer."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = pa.BufferOutputStream()
    layout = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"id": list(ids)}), out, row_group_size=100, **layout)
    return bytes(out.getvalue())


def arrow(ids: range) -> bytes:
    """The file of a dataset as ``save_to_disk`` writes it."""
    pa = pytest.importorskip("pyarrow")
    table, out = pa.table({"id": list(ids)}), pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


class Way(NamedTuple):
    """A file of rows: its name, how it is made, how many rows fill several reads, and the knobs of its loader."""

    name: str
    make: Callable[[range], bytes]
    num_rows: int
    knobs: dict[str, Any] = {}

    def loader(self, path: Path, **knobs: Any) -> DataLoader:
        is_arrow = self.make is arrow
        source: Any = HuggingFaceSource("arrow", data_files=str(path), split="train") if is_arrow else str(path)
        settings = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "epochs": 2, "num_workers": 0, "timeout_s": NEVER_S}
        return DataLoader(source, **settings | self.knobs | knobs)


WAYS = {
    "JSONL": Way("rows.jsonl", lines, 1500),
    "JSONL, by its index": Way("rows.jsonl", lines, 1500, {"shuffle": "full", "cache": {"folder": ""}}),
    "Parquet": Way("rows.parquet", parquet, 2000),
    "a dataset": Way("rows.arrow", arrow, 2000),
    "gzip": Way("rows.jsonl.gz", zipped, 6000),
    "zstd": Way("rows.jsonl.zst", lambda ids: frames([lines(ids)]), 6000),
    "a JSON array": Way("rows.json", lambda ids: json.dumps([{"id": number} for number in ids]).encode(), 20_000),
}


def write_over(path: Path, data: bytes, *, keeps_time: bool = False) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


def append(path: Path, _: bytes) -> None:
    with path.open("ab") as file:
        file.write(b'{"id": 10000}\n' * 100)


# How a file is changed, given other rows that take as many bytes, and whether its rows are still those of the start.
CHANGES: dict[str, tuple[Callable[[Path, bytes], Any], bool]] = {
    "its mode": (lambda path, _: path.chmod(0o640), True),
    "another link": (lambda path, _: path.with_name("link").hardlink_to(path), True),
    "its time": (lambda path, _: os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9)), True),
    "grown": (append, True),
    "edited": (write_over, False),
    "edited, at the same time": (lambda path, other: write_over(path, other, keeps_time=True), False),
    "replaced": (replace, False),
    "cut": (lambda path, _: os.truncate(path, path.stat().st_size // 3), False),
    "deleted": (lambda path, _: path.unlink(), False),
}


def take(loader: DataLoader, found: list[int], stop: int = 1 << 62) -> None:
    """Append ids until there are no more, or ``stop`` are there."""
    try:
        while len(found) < stop:
            found += ids(loader.get_next_batch(20))
    except EndOfData as end:
        found += ids(end.samples)


def under_change(path: Path, way: Way, change: str, chance: random.Random, num_workers: int) -> str:
    """One run, and what became of it: ``whole``, or the code of its error."""
    path.parent.mkdir()
    make, keeps_rows = CHANGES[change]
    path.write_bytes(way.make(range(FIRST, FIRST + way.num_rows)))
    expected, found, outcome = list[int](), list[int](), "whole"
    with way.loader(path) as loader:
        take(loader, expected)
    with way.loader(path, num_workers=num_workers, buffer_size=chance.choice([1, 50])) as loader:
        if chance.random() < 0.5:
            loader.state_dict()  # with the fingerprint of the content
        take(loader, found, chance.choice([40, way.num_rows // 2, way.num_rows]))
        make(path, way.make(range(OTHER, OTHER + way.num_rows)))
        try:
            take(loader, found)
        except SourceError as error:
            assert str(path) in str(error), error
            assert str(error).startswith(CODES), error
            outcome = str(error)[:5]
    assert found == expected[: len(found)], change
    assert outcome == "whole" or not keeps_rows or way.make is not lines  # others may only say that they have changed
    assert len(found) == len(expected) or outcome != "whole"
    return outcome


@pytest.mark.parametrize(("way", "change", "num_workers"), each_value(list(WAYS), list(CHANGES), [0, 2]))
def test_what_is_delivered_is_what_was_there_at_the_start(tmp_path, way, change, num_workers):
    if way == "zstd":
        pytest.importorskip("zstandard")
    chance = random.Random(f"{way} {change} {num_workers}")
    paths = [tmp_path / str(number) / WAYS[way].name for number in range(ROUNDS)]
    outcomes = [under_change(path, WAYS[way], change, chance, num_workers) for path in paths]

    record("IO", f"{way} {change}", faults=ROUNDS, lost=0, repeated=0, unnamed=0)
    say(f"{way} {change}: {' '.join(outcomes)}")
