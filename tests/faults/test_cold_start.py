"""A loader that starts cold, with nothing on the disk: the first sample comes, and so does all that is left of D.

The data goes beyond every number at which something is cut: the rows of a window (65,536), its blocks (1,024), two
windows, the blocks of an index request, and the requests that all workers have room for.
"""

import functools
from typing import Any

import pytest

from asyncdata import DataLoader, RowShuffle, Shuffle
from asyncdata.order.order import ROWS_PER_WINDOW
from tests.support.faults import num_rounds
from tests.support.inner import change
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
NONE = RowShuffle(method="none")
SLICE = RowShuffle(method="none", first=10, stop=NUM_ROWS - 10)
KEPT = RowShuffle(method="none", only_kept=True)
AS_IT_LIES = (IN_ORDER, NONE, SLICE, KEPT)
ORDERS: dict[str, tuple[Any, ...]] = {
    "a JSONL file": (BLOCKS, IN_ORDER, NONE, SLICE, KEPT, "full", RowShuffle(method="slime")),
    "JSONL files": (BLOCKS, NONE),
    "Parquet, large row groups": (BLOCKS, NONE, "full"),
    "Parquet, one row group": (IN_ORDER,),
    "a saved dataset": (BLOCKS, NONE),
    "a dataset in memory": (BLOCKS,),
    "a gzip file": (BLOCKS,),
    "zstd files": (IN_ORDER,),
    "a JSON array": (IN_ORDER,),
    "an iterable": (BLOCKS,),
}
WAYS = [(kind, shuffle) for kind, orders in ORDERS.items() for shuffle in orders]
"""A kind of source, and an order; :data:`AS_IT_LIES` are those in which D is the rows as they lie."""


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """The source of a kind, written once: no test changes it, and nothing that a loader keeps is beside it."""
    rows = [{"id": i, "pad": "", "nested": []} for i in range(NUM_ROWS)]
    return functools.cache(lambda kind: KINDS[kind].write(tmp_path_factory.mktemp("cold"), rows))


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_cold_start_delivers_all_of_d(tmp_path, monkeypatch, source_of, way):
    """Each way has its own number of workers, and in a full run all of them."""
    kind, shuffle = WAYS[way]
    for module in KINDS[kind].needs:
        pytest.importorskip(module)
    change(monkeypatch, bytes_of_an_index_block=INDEX_BLOCK_BYTES)
    knobs: Any = {"shuffle": shuffle, "epochs": 1, "timeout_s": NEVER_S, "bad_rows": "raise", "batch_size": 4096}
    for number in range(way, way + num_rounds(quick=1, full=len(NUM_WORKERS))):
        cold = {"num_workers": NUM_WORKERS[number % 4], "cache": {"folder": str(tmp_path / f"cache {number}")}}
        with DataLoader(source_of(kind), tokenize_fn=row_id, **knobs, **cold) as loader:
            found = [int(sample.tokens[0]) for sample in loader.get_next_batch(1)]
            found += [int(sample.tokens[0]) for batch in loader for sample in batch]

        expected = range(10, NUM_ROWS - 10) if shuffle is SLICE else range(NUM_ROWS)
        assert (found if shuffle in AS_IT_LIES else sorted(found)) == list(expected)


@pytest.mark.parametrize("num_workers", NUM_WORKERS[: num_rounds(quick=2, full=4)])
def test_slimes_default_order_starts_cold(tmp_path, small_tokenizer, num_workers):
    """No shuffle, and a file of more than two index requests for each worker: no block is any smaller than it is."""
    from asyncdata.integrations.slime import AsyncDataSource

    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"input": "{i} qqqqqqqqqq"}}\n' for i in range(800_000))
    cache = {"folder": str(tmp_path / "cache")}
    given = {"asyncdata_num_workers": num_workers, "asyncdata_cache": cache, "label_key": None}
    source = AsyncDataSource(args_for(path, hf_checkpoint=str(small_tokenizer), **given))
    try:
        prompts = [group[0].prompt for group in [*source.get_samples(1), *source.get_samples(2000)]]
        assert prompts == [f"{i} qqqqqqqqqq" for i in range(2001)]
    finally:
        source.close()
