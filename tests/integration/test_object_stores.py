"""Objects in stores: the same order as of files, pinned, tried again, kept on the disk, and no secret shown."""

import gzip
import hashlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from asyncdata import Cache, DataLoader, JsonArraySource, JsonlSource, Mix, ParquetSource, Shuffle
from asyncdata.errors import ConfigError, SnapshotMismatchError, SourceChangedError, SourceError
from tests.support import loaders
from tests.support.loaders import rows_of
from tests.support.loading import NEVER_S, id_and_text, ids, row_id, write
from tests.support.parts import Redirects, StoreError, change
from tests.support.servers import FaultProxy, Faults, HubServer, byte_range
from tests.support.sources import jsonl
from tests.support.stores import BUCKET, FAST, SECRET, Answer, HttpHost, http_host, jsonl_of, s3

pytest.importorskip("obstore")

NUM_ROWS = 700
DATA = jsonl_of(NUM_ROWS)
OTHER = DATA.replace(b'{"id": ', b'{"id":9')  # of the same size
SHORT = jsonl({"id": i} for i in range(500))
DIGEST = "8838263997030688"
TOKEN = "hf_verysecrettoken"
LONG_BY_WORKERS = pytest.param("1 % long", 2, marks=pytest.mark.thorough)
WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])


def a_host() -> Iterator[HttpHost]:
    with HttpHost() as server:
        yield server


host, other = pytest.fixture(a_host, name="host"), pytest.fixture(a_host, name="other")


@pytest.fixture
def hub(monkeypatch) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for workers
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer(TOKEN) as server:
        yield server


def make(source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    return loaders.make(source, tokenize_fn, **{"cache": {"folder": ""}, "seed": 7} | knobs)


def take(source: Any, number: int, **knobs: Any) -> list[int]:
    with make(source, **knobs) as loader:
        return ids(loader.get_next_batch(number))


def digest_of(source: Any, **knobs: Any) -> str:
    return digest(take(source, 2 * NUM_ROWS, **knobs))


def digest(rows: list[int]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def on_file(folder: Path, name: str, data: bytes) -> JsonlSource:
    return JsonlSource(write(folder / name, data))


def on_s3(folder: Path, name: str, data: bytes) -> JsonlSource:
    return JsonlSource(s3().put(f"{folder.name}/{name}", data), storage_options=s3().options)


def by_http(folder: Path, name: str, data: bytes) -> JsonlSource:
    return JsonlSource(http_host().put(f"/{folder.name}/{name}", data), storage_options=FAST)


def on_google(folder: Path, name: str, data: bytes) -> JsonlSource:
    http_host().put(f"/bucket/{folder.name}/{name}", data)
    return JsonlSource(f"gs://bucket/{folder.name}/{name}", storage_options=http_host().google)


def in_memory(folder: Path, name: str, data: bytes) -> JsonlSource:
    pytest.importorskip("fsspec").filesystem("memory").pipe(f"/{folder.name}/{name}", data)
    return JsonlSource(f"memory://{folder.name}/{name}")


@pytest.mark.parametrize("place", [on_file, by_http, in_memory])
def test_the_order_is_the_same_wherever_the_rows_are(place, tmp_path):
    """For more stores and for workers, see ``test_one_order_everywhere``."""
    assert digest_of(place(tmp_path, "rows.jsonl", DATA)) == DIGEST


def test_the_next_compressed_objects_are_begun_before_one_ends(host):
    """Four of them wait for one another: they would wait for ever if they were read in turn."""
    together = threading.Barrier(4)
    left = iter(range(4))
    addresses = [host.put(f"/{n}.jsonl.gz", gzip.compress(jsonl([{"id": n}]))) for n in range(6)]
    with make(JsonlSource(addresses), shuffle=False) as loader:
        host.answer = lambda _: None if next(left, None) is None else together.wait(NEVER_S) and None
        assert ids(loader.get_next_batch(6)) == list(range(6))


@pytest.fixture(params=["google", "azure"])
def folder(request, host) -> tuple[str, dict[str, Any]]:
    """A folder of a bucket with rows 0 to 5, and its store's options."""
    for number, name in enumerate(("b.jsonl", "a.jsonl", "c.txt", "deep/d.jsonl", "deep/er/e.jsonl")):
        host.put(f"/bucket/data/{name}", jsonl([{"id": number}]))
    host.put("/bucket/data/other.json.gz", gzip.compress(jsonl([{"id": 5}])))
    scheme, options = {"google": ("gs", host.google), "azure": ("az", host.azure)}[request.param]
    return f"{scheme}://bucket/data", options


def named(root: str, names: str | list[str]) -> str | list[str]:
    return root + names if isinstance(names, str) else [root + name for name in names]


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ("", [1, 0]),
        ("/", [1, 0]),
        ("/deep", [3]),
        ("/*.jsonl", [1, 0]),
        ("/**/*.jsonl", [1, 0, 3, 4]),
        ("/[!b].*", [1, 2]),
        (["/c.txt", "/a.jsonl"], [2, 1]),
    ],
    ids=["a folder", "a folder/", "a folder below", "a glob", "a glob of all", "a glob with a set", "a list"],
)
def test_folders_globs_and_lists_name_objects_as_they_name_files_in_all_pages(folder, names, rows):
    root, options = folder
    source = JsonlSource(named(root, names), storage_options=options)
    assert take(source, len(rows), shuffle=False) == rows


@pytest.mark.parametrize(
    ("paths", "code"),
    [
        ("/nothing-*.jsonl", "AD308 {root}"),
        ("/nothing/", "AD306 "),
        ("/nothing.jsonl", "AD323 {root}"),
        (["/a.jsonl", "/a.jsonl"], "AD309 {root}"),
    ],
    ids=["a glob", "a folder", "an object", "a list"],
)
def test_objects_that_are_not_there_or_listed_twice_are_named(folder, paths, code):
    root, options = folder
    given = named(root, paths)
    with pytest.raises((SourceError, ConfigError), match=f"^{code.format(root=root)}"):
        make(JsonlSource(given, storage_options=options))
    if code.startswith("AD309"):
        assert take(JsonlSource(given, storage_options=options, allow_repeats=True), 2) == [1, 1]


@pytest.mark.parametrize("how", ["a glob", "a list", "a list of a large folder", "a bucket of versions", "not allowed"])
def test_ten_thousand_objects_are_listed_by_the_page_and_not_looked_at_one_by_one(host, monkeypatch, how):
    num_objects = 10_000 if how in ("a glob", "a list") else 100
    monkeypatch.setattr("tests.support.stores.PAGE", 1000)
    for number in range(num_objects):
        host.put(f"/bucket/many/{number:05d}.jsonl", jsonl([{"id": number}]))
    for number in range(20_000 if how == "a list of a large folder" else 2):
        host.objects[f"/bucket/many/other-{number}.txt"] = b"x"
    if how == "a bucket of versions":
        host.answer = lambda _: Answer(headers={"x-goog-generation": "7", "x-amz-version-id": "v7"})
    elif how == "not allowed":
        host.answer = lambda request: Answer(status=403) if "list-type" in request.target else None

    names = [f"/{number:05d}.jsonl" for number in reversed(range(num_objects))]
    root, is_glob = "gs://bucket/many", how == "a glob"
    source = JsonlSource(named(root, "/*.jsonl" if is_glob else names), storage_options=host.google)
    rows = take(source, 3, shuffle=False)

    assert rows == ([0, 1, 2] if is_glob else [num_objects - 1 - number for number in range(3)])
    num_heads = sum(request.method == "HEAD" for request in host.requests)
    num_pages = sum("list-type" in request.target for request in host.requests)
    assert (num_heads, num_pages) == {
        "a glob": (0, 11),
        "a list": (1, 11),
        "a list of a large folder": (100, 11),
        "a bucket of versions": (101, 1),
        "not allowed": (100, 1),
    }[how]


def test_a_manifest_names_objects_and_nothing_is_listed_or_looked_at(host):
    parts = {f"{number}.jsonl": jsonl([{"id": number}]) for number in (2, 0, 1)}
    lines = []
    for name, data in parts.items():
        host.put(f"/data/{name}", data)
        lines.append({"path": name, "size": len(data), "etag": hashlib.md5(data).hexdigest(), "rows": 1})
    address = host.put("/data/all.manifest.jsonl", jsonl(lines))
    assert take(JsonlSource(address), 3, shuffle=False) == [2, 0, 1]
    assert [request.path for request in host.requests if request.method == "HEAD"] == ["/data/all.manifest.jsonl"]
    host.put("/data/all.manifest.jsonl", jsonl([lines[0] | {"etag": "older"}]))
    with pytest.raises(SourceChangedError, match='^AD322 .*etag "older"; now'):
        take(JsonlSource(address), 1)


@pytest.mark.parametrize("line", [b'{"path": "a.jsonl"}', b"no json", b'{"path": "s3://o/a", "size": 1, "etag": ""}'])
def test_a_damaged_manifest_is_named_by_its_line(host, line):
    address = host.put("/x.manifest.jsonl", b"\n" + line)
    with pytest.raises(SourceError, match="^AD328 .*x.manifest.jsonl:2: "):
        make(JsonlSource(address))


def test_what_objects_cannot_be_is_refused(host, tmp_path):
    lines, array = host.put("/a.jsonl", DATA), host.put("/b.jsonl", b'[{"id": 1}]')
    for words, source in (
        ("^AD320 ", JsonlSource([str(tmp_path / "a.jsonl"), lines])),
        ("^AD320 python_lines", JsonlSource(lines, python_lines=True)),
        ("^AD327 .*manifest", JsonlSource(f"{host.url}/folder/")),
        ("^AD120 ", JsonlSource(array)),
    ):
        with pytest.raises((ConfigError, SourceError), match=words):
            make(source)
    assert take(JsonArraySource(array), 1) == [1]


@WORKERS
def test_a_file_of_the_hubs_bucket_that_changes_in_the_middle_is_an_error_and_gives_no_row(hub, num_workers):
    """For other objects, see ``test_every_source``."""
    hub.put("me/files", {"a.jsonl": DATA})
    path = "hf://buckets/me/files/a.jsonl"
    with make(of_hub(hub, path), buffer_size=1, num_workers=num_workers) as loader:
        seen = ids(loader.get_next_batch(1))
        hub.put("me/files", {"a.jsonl": OTHER})
        hub.end_signatures()
        with pytest.raises(SourceChangedError, match=rf"^AD322 .*{path} .*at the start it was .*; now it is") as caught:
            while True:
                seen += ids(loader.get_next_batch(1))

    assert max(seen) < NUM_ROWS
    assert not any(secret in str(caught.value) for secret in (TOKEN, "Signature"))


def of_hub(hub: HubServer, addresses: Any = "hf://datasets/me/rows/*.jsonl") -> JsonlSource:
    return JsonlSource(addresses, storage_options={"endpoint": hub.url, "token": TOKEN})


def test_a_listing_of_the_hub_tells_of_many_files_what_each_one_tells(hub, monkeypatch):
    hub.commit("me/rows", {f"{number}.jsonl": jsonl([{"id": number}]) for number in range(70)})
    names = [f"hf://datasets/me/rows/{number}.jsonl" for number in range(70)]

    def opened() -> Any:
        with make(of_hub(hub, names)) as loader:
            return ids(loader.get_next_batch(70)), loader.state_dict()

    change(monkeypatch, most_heads=70)
    each = opened()
    change(monkeypatch, most_heads=69)
    change(monkeypatch, single_object=None)  # none is looked at
    assert opened() == each


def test_a_run_stays_at_its_commit_and_a_resume_on_another_one_is_refused_with_the_way_back(hub, tmp_path):
    expected = take(on_file(tmp_path, "rows.jsonl", DATA), 100)
    old = hub.commit("me/rows", {"rows.jsonl": DATA})
    with make(of_hub(hub), buffer_size=1) as loader:
        seen = ids(loader.get_next_batch(10))
        state = loader.state_dict()
        hub.commit("me/rows", {"rows.jsonl": OTHER})
        assert seen + ids(loader.get_next_batch(90)) == expected
    assert old in json.dumps(state)
    assert TOKEN not in json.dumps(state)

    with make(of_hub(hub)) as loader, pytest.raises(SnapshotMismatchError, match=f"hf://datasets/me/rows@{old}"):
        loader.load_state_dict(state)
    with make(of_hub(hub, f"hf://datasets/me/rows@{old}/*.jsonl")) as loader:
        loader.load_state_dict(state)
        assert seen + ids(loader.get_next_batch(90)) == expected
    hub.commit("me/rows", {"rows.jsonl": DATA, "README.md": b"# more words\n"})  # newer, with the same rows
    with make(of_hub(hub)) as loader:
        loader.load_state_dict(state)
        assert seen + ids(loader.get_next_batch(90)) == expected


@WORKERS
def test_faulty_reads_are_tried_again_counted_and_lose_no_row(host, monkeypatch, num_workers):
    change(monkeypatch, first_wait_s=0.0)
    host.put("/a.jsonl", DATA)
    kinds = ("408", "429", "500", "503", "cut", "short", "shifted", "relabelled")
    with FaultProxy(host.url, Faults(kinds, share=0.5, seed=3)) as proxy:
        with make(JsonlSource(f"{proxy.url}/a.jsonl", storage_options=FAST), num_workers=num_workers) as loader:
            found = ids(loader.get_next_batch(2 * NUM_ROWS))
            now = loader.statistics()
    assert digest(found) == DIGEST
    assert now.store_retries_total > 3
    assert now.store_reads_total > 0


def test_the_reads_of_every_part_of_a_mixture_are_counted(host, tmp_path):
    """What is read from front to back, this process reads, and counts itself."""
    mix = Mix({"here": on_file(tmp_path, "rows.jsonl", DATA), "there": host.put("/b.jsonl.gz", gzip.compress(DATA))})
    with make(mix) as loader:
        loader.get_next_batch(NUM_ROWS)
        assert loader.statistics().store_reads_total > 0


@WORKERS
def test_a_store_that_stays_away_is_an_error_and_the_run_resumes_exactly(host, num_workers):
    source = JsonlSource(host.put("/a.jsonl", DATA), storage_options={"retry_timeout_s": 0.2})
    expected = take(source, NUM_ROWS)
    away = Answer(503, b"<Error><Code>SlowDown</Code><RequestId>RQ-4711</RequestId></Error>")
    with make(source, buffer_size=1, num_workers=num_workers) as loader:
        seen = ids(loader.get_next_batch(20))
        host.answer = lambda _: away
        with pytest.raises(SourceError, match="^AD326 ") as caught:
            while True:
                seen += ids(loader.get_next_batch(1))
        state = loader.state_dict()
    host.answer = lambda _: None

    for word in ("bucket 127.0.0.1", "key a.jsonl", "bytes ", "RQ-4711", "SlowDown"):
        assert word in str(caught.value)
    assert len(seen) < NUM_ROWS
    with make(source) as loader:
        loader.load_state_dict(state)
        assert seen + ids(loader.get_next_batch(NUM_ROWS - len(seen))) == expected


def test_a_store_that_is_away_while_a_loader_is_opened_is_an_error_after_its_timeout(host):
    """Not after ``retry_timeout_s``, which is two minutes."""
    source = JsonlSource(host.put("/a.jsonl", DATA))
    host.answer = lambda _: Answer(503, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(SourceError, match=r"^AD326 .* tries in [0-5]?\d(\.\d+)? s: status 503"):
        make(source, timeout_s=0.4)  # the request and the answer may take some of it
    host.answer = lambda _: None
    with make(source, timeout_s=0.4) as loader:
        assert len(loader.get_next_batch(NUM_ROWS, timeout_s=240)) == NUM_ROWS


def parquet_of(folder: Path) -> bytes:
    """240 rows, of a few MB: most of them in one column."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "id": list(range(240)),
        "pad": ["x" * (number * 37 % 90) for number in range(240)],
        "large": [bytes([number]).hex() * 2000 + str(number**9) for number in range(240)],
        "chat": [[{"role": "user", "content": f"row {number}"}] for number in range(240)],
    }
    pq.write_table(pa.table(columns), folder / "a", row_group_size=50, compression="none", write_page_checksum=True)
    return (folder / "a").read_bytes()


def test_only_the_bytes_of_the_needed_columns_are_read_and_the_second_run_reads_the_disk(host, tmp_path):
    data = parquet_of(tmp_path)
    address, path = host.put("/a.parquet", data), str(tmp_path / "a")
    local, remote = (ParquetSource(one, columns=["pad", "id"], reads_per_group=1) for one in (path, address))
    cache = Cache(folder=str(tmp_path / "cache"), remote_max_bytes=64 << 20)
    expected = take(local, 480, tokenize_fn=id_and_text)
    assert take(remote, 480, tokenize_fn=id_and_text, cache=cache) == expected
    assert host.num_sent_bytes < 200_000 < 900_000 < len(data)  # the footer twice, and two columns of five
    before = host.num_sent_bytes
    assert take(remote, 480, tokenize_fn=id_and_text, cache=cache) == expected
    assert host.num_sent_bytes - before < 3 * (64 << 10)  # the footer
    assert take(address, 240, shuffle="full") == take(ParquetSource(path), 240, shuffle="full")


@pytest.mark.parametrize(("fault", "words"), [("whole", "AD325 .*Range"), ("other_bytes", r"a\.parquet")])
def test_bytes_of_another_place_and_a_server_without_ranges_are_found_out(host, tmp_path, fault, words):
    """The former by the checksum of the page."""
    host.objects["/a.parquet"] = parquet_of(tmp_path)
    with FaultProxy(host.url) as proxy:
        source = ParquetSource(f"{proxy.url}/a.parquet", columns=["id", "pad", "large"])
        with make(source, id_and_text, bad_rows="raise") as loader:
            proxy.faults = Faults((fault,), share=1, repeats=1000)
            with pytest.raises(SourceError, match=words):
                loader.get_next_batch(10)


def test_a_row_group_that_could_not_be_read_to_its_end_is_read_anew(host, tmp_path):
    """What was decoded of it before the failure is not its end."""
    host.objects["/a.parquet"] = parquet_of(tmp_path)
    with FaultProxy(host.url) as proxy:
        options, columns = {"retry_timeout_s": 0.1}, ["id", "pad", "large"]
        source = ParquetSource(f"{proxy.url}/a.parquet", columns=columns, storage_options=options)
        knobs = {"shuffle": False, "buffer_size": 1, "num_workers": 1, "bad_rows": "raise"}
        with make(source, id_and_text, **knobs) as loader:
            rows = ids(loader.get_next_batch(1))
            for faults in (Faults(("503",), share=1, repeats=1000), Faults(("403",), share=1, repeats=1000)):
                proxy.faults = faults
                with pytest.raises(SourceError, match=r"^AD32\d "):
                    while True:
                        rows += ids(loader.get_next_batch(1))
                proxy.faults = Faults()
                loader.load_state_dict(loader.state_dict())
            rows += ids(loader.get_next_batch(240))
    assert rows == [row % 240 for row in range(len(rows))]


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "AD124"), (b'{"id": 1}\n', "AD123"), (b"PAR1" + b"x" * 300, "AD124"), (b"PAR1xxxxxxxxxPAR1", "AD124")],
    ids=["nothing", "lines", "no footer", "a short footer"],
)
def test_what_is_no_parquet_is_named_as_a_file_is(host, data, code):
    address = host.put("/rows.parquet", data)
    with pytest.raises(SourceError, match=f"{code} {address}"):
        make(address)


def cached(host: HttpHost, folder: Path, path: str = "/a.jsonl", **knobs: Any) -> tuple[str, int, Any]:
    cache = Cache(folder=str(folder), remote_max_bytes=knobs.pop("max_bytes", 64 << 20))
    before = len(host.requests)
    with make(JsonlSource(host.url + path), cache=cache, **knobs) as loader:
        return digest(ids(loader.get_next_batch(2 * NUM_ROWS))), len(host.requests) - before, loader.statistics()


@WORKERS
def test_a_second_epoch_and_a_second_run_read_no_block_from_the_store(host, tmp_path, num_workers):
    host.put("/a.jsonl", DATA)
    order, num_first, now = cached(host, tmp_path, num_workers=num_workers)
    assert (order, now.store_cached_total > 0) == (DIGEST, True)
    order, num_asked, now = cached(host, tmp_path, num_workers=num_workers)
    assert (order, now.store_cache_failures_total) == (DIGEST, 0)
    assert num_asked <= 3 < num_first  # looks at it, and at its first bytes
    host.put("/a.jsonl", OTHER)
    assert cached(host, tmp_path, num_workers=num_workers)[1] > 3, "of another version"


def long_rows(kind: str) -> bytes:
    """8 MB of rows of a length, in bytes."""
    chance = random.Random(7)
    sizes = {"200 B": (160, 240), "2 KB": (1600, 2400), "60 KB": (200, 60_000), "1 MB": (400_000, 1_000_000)}
    rows, num_bytes = [], 0
    while num_bytes < 8_000_000:
        bounds = sizes["60 KB" if chance.random() < 0.01 else "200 B"] if kind == "1 % long" else sizes[kind]
        rows.append({"id": len(rows), "pad": "x" * chance.randint(*bounds)})
        num_bytes += len(rows[-1]["pad"])
    return jsonl(rows)


def ranges_of(host: HttpHost) -> list[tuple[int, int]]:
    """The parts of the object that were asked for, without the look at its start."""
    asked = (byte_range(request, 1 << 40) for request in host.requests if request.method == "GET")
    return [found for found in asked if found is not None and found != (0, 32768)]


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("200 B", 0), ("2 KB", 0), ("60 KB", 0), ("1 MB", 0), ("1 % long", 0), LONG_BY_WORKERS]
)
def test_rows_of_all_lengths_are_fetched_about_once_in_shuffled_order(host, tmp_path, kind, num_workers):
    data = long_rows(kind)
    num_rows = data.count(b"\n")
    knobs = {"shuffle": Shuffle(window_blocks=32), "num_workers": num_workers, "epochs": 1}
    expected = take(on_file(tmp_path, "rows.jsonl", data), num_rows, **knobs)
    host.requests.clear()
    assert take(JsonlSource(host.put("/a.jsonl", data)), num_rows, **knobs) == expected
    assert len(data) <= sum(stop - start for start, stop in ranges_of(host)) <= 1.3 * len(data)


@pytest.mark.parametrize(("kind", "num_workers"), [("2 KB", 0), ("1 MB", 0), LONG_BY_WORKERS])
def test_what_a_short_run_has_read_is_on_the_disk_once_when_it_is_closed(host, tmp_path, kind, num_workers):
    address, cache = host.put("/a.jsonl", long_rows(kind)), Cache(folder=str(tmp_path), remote_max_bytes=1 << 30)
    knobs = {"shuffle": Shuffle(window_blocks=32), "num_workers": num_workers, "cache": cache}
    expected = take(JsonlSource(address), 5, **knobs)
    first = {page for start, stop in ranges_of(host) for page in range(start >> 12, stop >> 12)}
    num_kept_bytes = sum(path.stat().st_size for path in tmp_path.glob("blocks/*/*"))
    assert num_kept_bytes <= 1.3 * (len(first) << 12)  # a block with the start of the next one
    host.requests.clear()
    assert take(JsonlSource(address), 5, **knobs) == expected
    again = {page for start, stop in ranges_of(host) for page in range((start + 16384) >> 12, (stop - 16384) >> 12)}
    assert not again & first


@pytest.mark.parametrize("how", ["damaged", "a small limit"])
def test_blocks_that_are_damaged_or_find_no_room_cost_only_speed(host, tmp_path, how):
    host.put("/a.jsonl", DATA)
    knobs = {"max_bytes": 1 << 16} if how == "a small limit" else {}
    cached(host, tmp_path, **knobs)
    if how == "damaged":
        for file in tmp_path.glob("blocks/*/*"):
            file.write_bytes(b"damaged")
    order, num_asked, now = cached(host, tmp_path, **knobs)
    assert order == DIGEST
    assert num_asked > 3
    assert bool(now.store_cache_failures_total) is (how == "damaged")


def test_a_compressed_object_is_kept_too_and_nothing_without_an_identity_or_where_no_folder_is(host, tmp_path):
    host.put("/a.jsonl.gz", gzip.compress(DATA))
    host.put("/b.jsonl", DATA)
    first = cached(host, tmp_path / "gz", "/a.jsonl.gz")
    second = cached(host, tmp_path / "gz", "/a.jsonl.gz")
    assert second[0] == first[0]
    assert second[1] <= 3
    host.answer = lambda _: Answer(headers={"etag": ""})
    cached(host, tmp_path / "none", "/b.jsonl")
    assert not list((tmp_path / "none").glob("blocks/*/*"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="AD345 .*leave remote_max_bytes out"):
        cached(host, tmp_path / "file", "/b.jsonl")


@pytest.mark.thorough
def test_only_the_reader_opens_a_store_and_it_is_never_forked(host):
    """obstore is not fork-safe: the process that workers are forked from must not have loaded it."""
    with make(JsonlSource(host.put("/a.jsonl", SHORT)), num_workers=2) as loader:
        loader.get_next_batch(500)
        pids = [worker.pid for worker in loader.statistics().workers]
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        found = {pid: b"obstore" in Path(f"/proc/{pid}/maps").read_bytes() for pid in children}
        parents = {psutil.Process(pid).ppid() for pid in pids}

    *tokenizing, reader = pids
    assert len(tokenizing) == 2
    assert found.pop(reader)
    assert not any(found.values())  # the fork server is among them
    assert len(parents) == 1
    assert parents.isdisjoint(pids)


@pytest.mark.thorough
def test_snapshots_in_a_store_resume_exactly_and_the_last_three_are_kept(tmp_path):
    source = on_file(tmp_path, "rows.jsonl", DATA)
    address, options = f"s3://{BUCKET}/{tmp_path.name}/run/data.state", s3().options
    expected = take(source, 100)
    with make(source) as loader:
        for _ in range(5):
            loader.get_next_batch(10)
            loader.save(address, storage_options=options)

    for suffix, number in (("", 50), (".1", 40), (".2", 30)):
        with make(source) as loader:
            loader.restore(address + suffix, storage_options=options)
            assert ids(loader.get_next_batch(5)) == expected[number : number + 5]
    assert len(s3().client.list_objects_v2(Bucket=BUCKET, Prefix=f"{tmp_path.name}/run/")["Contents"]) == 3


@pytest.mark.thorough
def test_no_secret_is_in_a_log_an_error_a_state_a_cache_or_a_list_of_processes(tmp_path):
    options = s3().options
    source = on_s3(tmp_path, "a.jsonl", DATA)
    cache = {"folder": str(tmp_path / "cache")}
    texts: list[Any] = [repr(source), str(source)]
    with capture_logs() as logs:
        with make(source, num_workers=2, cache=cache, shuffle="full") as loader:
            loader.get_next_batch(50)
            texts += [loader.state_dict(), repr(loader), loader.statistics().to_dict()]
            for child in psutil.Process().children(recursive=True):
                texts += [child.cmdline(), Path(f"/proc/{child.pid}/environ").read_bytes()]
        with pytest.raises(SourceError) as caught:
            make(JsonlSource(f"s3://nobucket/{tmp_path.name}/none.jsonl", storage_options=options))
    texts += [logs, str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    texts += [str(path) for path in tmp_path.rglob("*")]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]

    assert all(SECRET not in str(text) for text in texts)


def test_a_signed_address_is_read_and_its_signature_shown_nowhere(host):
    host.put("/a.jsonl", DATA)
    address = f"{host.url.replace('//', '//me:pAsSwOrD@')}/a.jsonl?X-Sig=sIgNaTuRe"
    with capture_logs() as logs, make(JsonlSource(address)) as loader:
        loader.get_next_batch(5)
        texts = [logs, loader.state_dict(), repr(loader)]
        host.answer = lambda _: Answer(403, b"no")
        with pytest.raises(SourceError, match="^AD324 ") as caught:
            make(JsonlSource(address))
    assert all(request.target == "/a.jsonl?X-Sig=sIgNaTuRe" for request in host.requests)
    assert all(request.headers["authorization"].startswith("Basic ") for request in host.requests)
    assert all(secret not in f"{texts} {caught.value}" for secret in ("sIgNaTuRe", "pAsSwOrD"))


# Redirections, which are not followed into a nearer network than the server's own


ROWS = b'{"id": 1}\n{"id": 2}\n'
METADATA = "169.254.169.254"


@pytest.fixture
def place(other) -> str:
    """An address of the other host, by a name that is not that of the first one."""
    return other.put("/b", ROWS).replace("127.0.0.1", "localhost")


@pytest.fixture
def addresses(monkeypatch) -> dict[str, str]:
    """The addresses that names have for asyncdata, and not for obstore."""
    found: dict[str, str] = {}
    ask = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        return ask(found.get(host, host), *args, **kwargs)

    monkeypatch.setattr("asyncdata.sources.remote.obstore_store.socket.getaddrinfo", getaddrinfo)
    return found


def redirect(host: HttpHost, to: str) -> str:
    host.answer = lambda _: Answer(302, b"", {"location": to})
    return host.put("/a.jsonl", ROWS)


def num_rows(address: str, **options: Any) -> int:
    return len(rows_of(JsonlSource(address, storage_options={**FAST, **options})))


@pytest.mark.parametrize(
    "target", [f"http://{METADATA}/data?sig=s3cret", "http://2852039166/latest", f"http://[::ffff:{METADATA}]/"]
)
def test_a_redirection_to_a_link_local_address_is_refused_before_a_request_is_sent(host, target):
    with pytest.raises(SourceError, match="^AD346 .*/a.jsonl is redirected .*allow_private_redirects") as caught:
        num_rows(redirect(host, target))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("origin", "target", "is_refused"),
    [
        ("1.1.1.1", "8.8.8.8", False),
        ("1.1.1.1", "127.0.0.1", True),
        ("1.1.1.1", "10.0.0.7", True),
        ("1.1.1.1", "::1", True),
        ("1.1.1.1", "fd00:ec2::254", True),
        ("1.1.1.1", "100.100.100.200", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", METADATA, True),
        ("10.0.0.1", "fe80::1", True),
        ("169.254.1.1", METADATA, False),
    ],
)
def test_a_server_may_not_redirect_into_a_nearer_network_than_its_own(addresses, origin, target, is_refused):
    addresses |= {"origin.example": origin, "target.example": target}
    redirects = Redirects("http://origin.example/a")
    try:
        redirects.take_in("http://target.example/b")
    except StoreError as error:
        assert error.kind == "elsewhere"
        assert is_refused
    else:
        assert not is_refused
        assert "target.example" in redirects.client_options()["proxy_excludes"]


def test_a_name_is_looked_up_and_a_setting_allows_what_is_refused(host, other, place, addresses):
    addresses["localhost"] = METADATA
    address = redirect(host, place)
    with pytest.raises(SourceError, match="^AD346 .*http://localhost is in a nearer network"):
        num_rows(address)
    assert other.requests == []
    assert num_rows(address, allow_private_redirects=True) == 2


def test_other_redirections_are_followed_without_credentials_and_lead_no_further_than_they_may(host, other, place):
    assert num_rows(redirect(host, place).replace("//", "//me:pass@")) == 2
    assert all("authorization" in request.headers for request in host.requests)
    assert not any("authorization" in request.headers for request in other.requests)
    host.answer = lambda request: Answer(302, b"", {"location": "/c"}) if request.path == "/a.jsonl" else None
    host.put("/c", ROWS)
    assert num_rows(f"{host.url}/a.jsonl") == 2
    redirect(other, f"http://{METADATA}/")
    with pytest.raises(SourceError, match="^AD346 "):
        num_rows(redirect(host, place))


def test_a_redirection_that_cannot_be_looked_at_is_not_followed(host, other, place, monkeypatch):
    change(monkeypatch, look_at_redirects=lambda *_: None)
    with pytest.raises(SourceError, match="^AD326 .*a host that cannot be looked at; allow_private_redirects"):
        num_rows(redirect(host, place), retry_timeout_s=0)
    assert other.requests == []


def test_behind_a_proxy_every_request_goes_to_the_proxy(other, monkeypatch):
    monkeypatch.setenv("http_proxy", other.url)
    monkeypatch.setenv("no_proxy", METADATA)
    target = f"http://{METADATA}/b"
    other.put(target, ROWS)
    other.answer = lambda request: Answer(302, b"", {"location": target}) if "a.jsonl" in request.path else None
    other.put("http://data.example/a.jsonl", ROWS)
    assert num_rows("http://data.example/a.jsonl") == 2
    assert {request.path for request in other.requests} == {"http://data.example/a.jsonl", target}
