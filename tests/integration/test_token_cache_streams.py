"""The token cache of data that are read from front to back: it changes the time and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, IterableSource
from asyncdata.core.messages import Tokenize
from asyncdata.workers.inline import InlineExecutor
from tests.support.cached import WINDOWS, Delivered, assert_same, compressed, loader, write_stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import row_cache

pytestmark = pytest.mark.thorough

NUM_ROWS = 300


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_MAX_ROWS", 32)
    monkeypatch.setattr(row_cache, "_PAGE_ROWS", 64)


@pytest.fixture(params=["gzip", "array", "two files"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return write_stream(request.param, tmp_path, NUM_ROWS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tokens"


def of(path: Any, cache: Path | None, **knobs: Any) -> DataLoader:
    return loader(path, cache, **({"shuffle": WINDOWS} | knobs))


def plain(path: Any, num_epochs: int = 1, **knobs: Any) -> Delivered:
    return Delivered(of(path, None, epochs=num_epochs, **knobs), num_epochs)


def fill(path: Any, cache: Path, **knobs: Any) -> Delivered:
    return Delivered(of(path, cache, **knobs), settle=True)


def test_a_row_in_the_cache_is_not_tokenized(path, cache, monkeypatch):
    fill(path, cache)
    real, requests = InlineExecutor.submit, list[Tokenize]()

    def submit(executor: InlineExecutor, request: Any, *more: Any) -> None:
        requests.extend([request] if isinstance(request, Tokenize) else [])
        real(executor, request, *more)

    monkeypatch.setattr(InlineExecutor, "submit", submit)
    Delivered(of(path, cache))

    assert sum(len(request.starts) // 4 for request in requests) == NUM_ROWS
    assert sum(request.num_cached for request in requests) == NUM_ROWS


def test_rows_of_other_content_are_tokenized(tmp_path, cache):
    rows = [b'{"id": %d, "pad": ""}\n' % i for i in range(200)]
    path = compressed(tmp_path / "a.jsonl.gz", rows)
    fill(path, cache)
    compressed(path, [*rows[:50], b'{"id": 9999, "pad": ""}\n', *rows[51:]])

    found = Delivered(of(path, cache))

    assert_same(found, plain(path))


def examples(epoch: int) -> Iterator[dict[str, Any]]:
    yield {"id": 1, "pad": ""}


def test_a_stream_without_files_is_refused_with_the_way_out(cache):
    with pytest.raises(ConfigError, match=r"AD613 .*convert the data to files"):
        loader(IterableSource(examples, version=1), cache)
