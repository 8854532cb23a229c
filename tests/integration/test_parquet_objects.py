"""Parquet in a store: the same D as of a local file, only the needed columns are read, and damage is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import BadRows, Cache, DataLoader, EndOfData, ParquetSource, SourceChangedError, SourceError
from tests.support.fault_proxy import FaultProxy, Faults
from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.loading import NEVER_S, SHUFFLE
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pa = pytest.importorskip("pyarrow")
pytest.importorskip("obstore")

NUM_ROWS = 240


class Origin:
    """Objects by http; the ranges that were asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.num_bytes = 0

    async def answer(self, request: Request) -> Response:
        if request.path not in self.objects:
            return Response(404, {})

        found = ranged(request, *self.objects[request.path])
        self.num_bytes += len(found.body) if request.method == "GET" else 0
        return found


def write(path: Path, group_rows: int, first: int = 0) -> bytes:
    import pyarrow.parquet as pq

    numbers = range(first, first + NUM_ROWS)
    columns = {
        "id": list(numbers),
        "pad": ["x" * (number * 37 % 90) for number in numbers],
        "large": [bytes([number % 251]).hex() * 2000 + str(number**9) for number in numbers],
        "chat": [[{"role": "user", "content": f"row {number}"}] for number in numbers],
    }
    pq.write_table(pa.table(columns), path, row_group_size=group_rows, compression="none", write_page_checksum=True)
    return path.read_bytes()


@pytest.fixture
def origin() -> Iterator[tuple[Origin, str]]:
    served = Origin()
    with HttpServer(served.answer) as server:
        yield served, server.url


def stream(source: Any, **knobs: Any) -> list[int]:
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "epochs": 2, "num_workers": 0, "timeout_s": NEVER_S}
    found: list[int] = []
    with DataLoader(source, **settings | knobs) as loader:
        while True:
            try:
                found += [int(sample.tokens[0]) for sample in loader.get_next_batch(50)]
            except EndOfData as end:
                return found + [int(sample.tokens[0]) for sample in end.samples]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("group_rows", [pytest.param(7, marks=pytest.mark.thorough), 90, 1000])
@pytest.mark.parametrize("columns", [None, pytest.param(["pad", "chat", "id"], marks=pytest.mark.thorough)])
def test_d_is_that_of_the_local_files(tmp_path, origin, group_rows, columns, num_workers):
    served, url = origin
    paths = [tmp_path / f"{part}.parquet" for part in range(2)]
    for part, path in enumerate(paths):
        served.objects[f"/{part}.parquet"] = write(path, group_rows, part * NUM_ROWS), "v1"
    settings = {"columns": columns, "reads_per_group": 4}
    local = stream(ParquetSource([str(path) for path in paths], **settings))

    remote = ParquetSource([f"{url}/{part}.parquet" for part in range(2)], **settings)
    assert stream(remote, num_workers=num_workers) == local
    assert sorted(local) == sorted([*range(2 * NUM_ROWS)] * 2)


def test_only_the_bytes_of_the_needed_columns_are_read(tmp_path, origin):
    served, url = origin
    served.objects["/rows.parquet"] = data, _ = write(tmp_path / "rows.parquet", 100), "v1"
    stream(ParquetSource(f"{url}/rows.parquet", columns=["id", "pad"], reads_per_group=1), epochs=1)

    assert len(data) > 900_000
    assert served.num_bytes < 200_000  # the footer twice, and two columns of five


def test_rows_by_a_full_permutation_and_a_second_run_from_the_disk(tmp_path, origin):
    served, url = origin
    path = tmp_path / "rows.parquet"
    served.objects["/rows.parquet"] = write(path, 90), "v1"
    cache = Cache(folder=str(tmp_path / "cache"), remote_max_bytes=64 << 20)
    assert stream(f"{url}/rows.parquet", shuffle="full", cache=cache) == stream(str(path), shuffle="full")
    source = ParquetSource(f"{url}/rows.parquet", columns=["id", "pad"])
    first = stream(source, cache=cache)
    served.num_bytes = 0
    assert stream(source, cache=cache) == first
    assert served.num_bytes < 3 * (64 << 10)  # the footer


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["503", "500", "cut", "short", "shifted", "relabelled", "429", "408"])
def test_each_fault_is_tried_again(tmp_path, origin, kind, num_workers):
    served, url = origin
    path = tmp_path / "rows.parquet"
    served.objects["/rows.parquet"] = write(path, 50), "v1"
    local = stream(ParquetSource(str(path), columns=["id", "pad"], reads_per_group=2))
    with FaultProxy(url, Faults((kind,), share=0.5, seed=3)) as proxy:
        remote = ParquetSource(f"{proxy.url}/rows.parquet", columns=["id", "pad"], reads_per_group=2)
        assert stream(remote, num_workers=num_workers) == local
        assert proxy.num_faults > 3


def test_a_server_that_knows_no_ranges_is_named(tmp_path, origin):
    served, url = origin
    served.objects["/rows.parquet"] = write(tmp_path / "rows.parquet", 50), "v1"
    with FaultProxy(url, Faults(("whole",), share=1)) as proxy, pytest.raises(SourceError, match=r"AD325 .*Range"):
        stream(f"{proxy.url}/rows.parquet")


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_file_that_is_replaced_in_a_run_is_named_with_both_identities(tmp_path, origin, num_workers):
    served, url = origin
    served.objects["/rows.parquet"] = data, _ = write(tmp_path / "rows.parquet", 50), "v1"
    with DataLoader(
        f"{url}/rows.parquet",
        tokenize_fn=id_and_text,
        shuffle=SHUFFLE,
        buffer_size=10,
        num_workers=num_workers,
        timeout_s=NEVER_S,
    ) as loader:
        loader.get_next_batch(10)
        served.objects["/rows.parquet"] = data, "v2"
        with pytest.raises(SourceChangedError, match=r"(?s)AD322 .*rows.parquet.*v1.*v2"):
            for _ in range(NUM_ROWS):
                loader.get_next_batch(10)


def test_bytes_of_another_place_are_found_by_the_checksum_of_the_page(tmp_path, origin):
    served, url = origin
    served.objects["/rows.parquet"] = write(tmp_path / "rows.parquet", 50), "v1"
    with FaultProxy(url) as proxy:
        source = ParquetSource(f"{proxy.url}/rows.parquet", columns=["id", "pad", "large"])
        with DataLoader(
            source, tokenize_fn=id_and_text, num_workers=0, timeout_s=NEVER_S, bad_rows=BadRows(policy="raise")
        ) as loader:
            proxy.faults = Faults(("other_bytes",), share=1, repeats=1000)
            with pytest.raises(SourceError, match=r"rows.parquet"):
                loader.get_next_batch(10)


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "AD124"), (b'{"id": 1}\n', "AD123"), (b"PAR1" + b"x" * 300, "AD124"), (b"PAR1xxxxxxxxxPAR1", "AD124")],
)
def test_what_is_no_parquet_is_named_as_a_file_is(origin, data, code):
    served, url = origin
    served.objects["/rows.parquet"] = data, "v1"
    with pytest.raises(SourceError, match=f"{code} {url}/rows.parquet"):
        stream(f"{url}/rows.parquet")
