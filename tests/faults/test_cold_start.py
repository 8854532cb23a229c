"""A loader that starts cold, with nothing on the disk: the first sample comes, and so does all that is left of D.

The data goes beyond every number at which something is cut: the rows of a window (65,536), its blocks (1,024), two
windows, the blocks of an index request, and the requests that all workers have room for.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from asyncdata import DataLoader, RowShuffle, Shuffle
from asyncdata.order.order import ROWS_PER_WINDOW
from tests.support.faults import num_rounds, say
from tests.support.loading import NEVER_S
from tests.support.slime_source import args_for
from tests.support.sources import KINDS
from tests.support.tokenize_fns import row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

NUM_ROWS = ROWS_PER_WINDOW * 9 // 8
INDEX_BLOCK_BYTES = 4 << 10
"""In place of a megabyte, so that data of a test's size takes hundreds of requests."""
NUM_WORKERS = [0, 1, 2, 8]
BLOCKS = Shuffle(block_bytes=1024, window_blocks=1024)
IN_ORDER = Shuffle(enabled=False, block_bytes=1024, window_blocks=1024)


class Way(NamedTuple):
    """A kind of source, and an order.

    :ivar shuffle: as the loader has it.
    :ivar is_as_it_lies: whether D is the rows as they lie.
    :ivar rows: the ids that are to come.
    """

    kind: str
    shuffle: Any
    is_as_it_lies: bool = False
    rows: range = range(NUM_ROWS)


NONE = RowShuffle(method="none")
SLICE = RowShuffle(method="none", first=10, stop=NUM_ROWS - 10)
WAYS = {
    "JSONL": Way("a JSONL file", BLOCKS),
    "JSONL in its order": Way("a JSONL file", IN_ORDER, is_as_it_lies=True),
    "JSONL files": Way("JSONL files", BLOCKS),
    "JSONL, row by row": Way("a JSONL file", NONE, is_as_it_lies=True),
    "JSONL files, row by row": Way("JSONL files", NONE, is_as_it_lies=True),
    "JSONL, a slice": Way("a JSONL file", SLICE, is_as_it_lies=True, rows=range(10, NUM_ROWS - 10)),
    "JSONL, kept rows": Way("a JSONL file", RowShuffle(method="none", only_kept=True), is_as_it_lies=True),
    "JSONL, permuted": Way("a JSONL file", "full"),
    "JSONL, as slime permutes": Way("a JSONL file", RowShuffle(method="slime")),
    "Parquet": Way("Parquet, large row groups", BLOCKS),
    "Parquet, one row group": Way("Parquet, one row group", IN_ORDER, is_as_it_lies=True),
    "Parquet, row by row": Way("Parquet, large row groups", NONE, is_as_it_lies=True),
    "Parquet, permuted": Way("Parquet, large row groups", "full"),
    "a saved dataset": Way("a saved dataset", BLOCKS),
    "a saved dataset, row by row": Way("a saved dataset", NONE, is_as_it_lies=True),
    "a dataset in memory": Way("a dataset in memory", BLOCKS),
    "gzip": Way("a gzip file", BLOCKS),
    "zstd": Way("zstd files", IN_ORDER, is_as_it_lies=True),
    "a JSON array": Way("a JSON array", IN_ORDER, is_as_it_lies=True),
    "an iterable": Way("an iterable", BLOCKS),
}


def numbers_of_workers(name: str) -> list[int]:
    """Each way has its own, and in a full run all of them."""
    first = list(WAYS).index(name) % len(NUM_WORKERS)
    return (NUM_WORKERS[first:] + NUM_WORKERS[:first])[: num_rounds(quick=1, full=len(NUM_WORKERS))]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """The source of a kind, written once: no test changes it, and nothing that a loader keeps is beside it."""
    rows = [{"id": i, "pad": "", "nested": []} for i in range(NUM_ROWS)]
    return functools.cache(lambda kind: KINDS[kind].write(tmp_path_factory.mktemp("cold"), rows))


@pytest.mark.parametrize("name", WAYS)
def test_a_cold_start_delivers_all_of_d(tmp_path, monkeypatch, source_of, name):
    way = WAYS[name]
    for module in KINDS[way.kind].needs:
        pytest.importorskip(module)
    monkeypatch.setattr("asyncdata.loader.opening._INDEX_BLOCK_BYTES", INDEX_BLOCK_BYTES)
    knobs: Any = {"shuffle": way.shuffle, "epochs": 1, "timeout_s": NEVER_S, "bad_rows": "raise"}
    for num_workers in numbers_of_workers(name):
        cold = {"num_workers": num_workers, "cache": {"folder": str(tmp_path / f"cache {num_workers}")}}
        with DataLoader(source_of(way.kind), tokenize_fn=row_id, batch_size=4096, **knobs, **cold) as loader:
            found = [int(sample.tokens[0]) for sample in loader.get_next_batch(1)]
            found += [int(sample.tokens[0]) for batch in loader for sample in batch]

        assert (found if way.is_as_it_lies else sorted(found)) == list(way.rows)
        say(f"cold start, {name}: {num_workers} workers, {len(found)} rows")


@pytest.mark.parametrize("num_workers", NUM_WORKERS[: num_rounds(quick=2, full=4)])
def test_slimes_default_order_starts_cold(tmp_path, small_tokenizer, num_workers):
    """No shuffle, and a file of more than two index requests for each worker: no block is any smaller than it is."""
    from asyncdata.integrations.slime import AsyncDataSource

    path = tmp_path / "rows.jsonl"
    num_rows = 800_000
    with path.open("w") as file:
        file.writelines(f'{{"input": "{i} qqqqqqqqqq"}}\n' for i in range(num_rows))
    cache = {"folder": str(tmp_path / "cache")}
    given = {"asyncdata_num_workers": num_workers, "asyncdata_cache": cache, "label_key": None}
    source = AsyncDataSource(args_for(path, hf_checkpoint=str(small_tokenizer), **given))
    try:
        (group,) = source.get_samples(1)
        assert group[0].prompt == "0 qqqqqqqqqq"
        last = [group[0].prompt for group in source.get_samples(2000)][-1]
        assert last == "2000 qqqqqqqqqq"
    finally:
        source.close()
