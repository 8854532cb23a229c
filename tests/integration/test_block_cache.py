"""Blocks of objects on the local disk: a second epoch or run reads nothing from the store, and gets the same D."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import Cache, ConfigError, DataLoader, EndOfData
from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("obstore")

NUM_ROWS = 600
COUNTS = [0, 0]
"""Blocks of the last run from the local disk, and those that failed there."""


class Origin:
    """An http server of one file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.etag, self.ranges = data, "v1", list[str]()

    async def answer(self, request: Request) -> Response:
        if request.method == "GET":
            self.ranges.append(request.headers.get("range", ""))
        return ranged(request, self.data, self.etag)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def origin(path) -> Iterator[tuple[Origin, str]]:
    served = Origin(path.read_bytes())
    with HttpServer(served.answer) as server:
        yield served, f"{server.url}/rows.jsonl"


def stream(address: str, folder: Path, num_epochs: int = 1, max_bytes: int = 64 << 20, **knobs: Any) -> list[int]:
    cache = Cache(folder=str(folder), remote_max_bytes=max_bytes)
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "num_workers": 0, "timeout_s": NEVER_S}
    found: list[int] = []
    with DataLoader(address, epochs=num_epochs, cache=cache, **settings | knobs) as loader:
        while True:
            try:
                found += [int(sample.tokens[0]) for sample in loader.get_next_batch(50)]
            except EndOfData as end:
                COUNTS[:] = [loader.statistics().store_cached_total, loader.statistics().store_cache_failures_total]
                return found + [int(sample.tokens[0]) for sample in end.samples]


def blocks(served: Origin) -> list[str]:
    """The ranges that were asked for, but for those at the start of a run."""
    asked, served.ranges = served.ranges, []
    return [one for one in asked if one and not one.startswith("bytes=0-63") and one != "bytes=0-0"]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_second_epoch_and_a_second_run_read_no_block_from_the_store(origin, path, tmp_path, num_workers):
    served, address = origin
    assert stream(address, tmp_path / "cache", 1, num_workers=num_workers) == order_of(path)
    first = blocks(served)
    assert len(first) > 1

    assert stream(address, tmp_path / "cache", 3, num_workers=num_workers) == order_of(path, 3)
    assert len(blocks(served)) <= 1  # the look at its first bytes
    assert COUNTS[0] > len(first)
    assert COUNTS[1] == 0


def test_an_object_of_another_version_is_read_anew(origin, path, tmp_path):
    served, address = origin
    stream(address, tmp_path / "cache")
    first = blocks(served)
    served.etag = "v2"
    served.data = served.data.replace(b"x", b"y")
    assert stream(address, tmp_path / "cache") == order_of(path)
    assert len(blocks(served)) >= len(first)


def test_a_limit_that_is_too_small_costs_only_speed(origin, path, tmp_path):
    served, address = origin
    assert stream(address, tmp_path / "cache", 2, max_bytes=1 << 16) == order_of(path, 2)
    assert blocks(served)


def test_blocks_that_are_damaged_are_counted_and_read_anew(origin, path, tmp_path):
    stream(origin[1], tmp_path / "cache")
    for file in (tmp_path / "cache").glob("blocks/*/*"):
        file.write_bytes(b"damaged")
    assert stream(origin[1], tmp_path / "cache") == order_of(path)
    assert COUNTS[1] > 0


def test_a_place_that_is_no_folder_is_refused_at_the_start(origin, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(ConfigError, match="AD345 .*leave remote_max_bytes out"):
        stream(origin[1], tmp_path / "cache")


def test_a_compressed_object_is_kept_as_well(origin, path, tmp_path):
    served, address = origin
    served.data = gzip.compress(path.read_bytes())
    first = stream(address, tmp_path / "cache", shuffle=False)
    blocks(served)
    assert stream(address, tmp_path / "cache", shuffle=False) == first == list(range(NUM_ROWS))
    assert len(blocks(served)) <= 1


def test_nothing_is_kept_unless_asked_and_nothing_of_an_object_without_an_identity(origin, path, tmp_path):
    served, address = origin
    served.etag = ""
    cache = tmp_path / "cache"
    stream(address, cache)
    assert not list(cache.glob("blocks/*/*"))
