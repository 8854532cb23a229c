"""Objects in stores: the same order as of files, pinned, tried again, secret, and read by a process of their own."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from asyncdata import (
    AsyncDataLoader,
    ConfigError,
    DataLoader,
    JsonArraySource,
    JsonlSource,
    Mix,
    SnapshotError,
    SnapshotMismatchError,
    SourceChangedError,
    SourceError,
)
from tests.support.loading import SHUFFLE, ids
from tests.support.stores import BUCKET, FAST, SECRET, Answer, HttpHost, Request, http_host, jsonl_of, s3
from tests.support.streams import jsonl
from tests.support.tokenize_fns import row_id, whether_obstore_is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_ROWS = 700
DATA = jsonl_of(NUM_ROWS)
DIGEST = "8838263997030688"


@pytest.fixture
def host() -> Iterator[HttpHost]:
    found = HttpHost()
    yield found
    found.close()


@pytest.fixture
def many_tries(monkeypatch) -> None:
    """Another try comes at once; for reads in this process."""
    monkeypatch.setattr("asyncdata.sources.remote.reads._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("asyncdata.sources.remote.reads._FIRST_WAIT_WHEN_ASKED_S", 0.0)


def make(source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    defaults = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240, "cache": {"folder": ""}, "seed": 7}
    return DataLoader(source, tokenize_fn=tokenize_fn, **defaults | knobs)


def digest_of(source: Any, num_samples: int = 2 * NUM_ROWS, **knobs: Any) -> str:
    with make(source, **knobs) as loader:
        return hashlib.sha256(json.dumps(ids(loader.get_next_batch(num_samples))).encode()).hexdigest()[:16]


# One order


def on_file(folder: Path, name: str, data: bytes) -> JsonlSource:
    path = folder / name
    path.write_bytes(data)
    return JsonlSource(str(path))


def on_s3(folder: Path, name: str, data: bytes) -> JsonlSource:
    return JsonlSource(s3().put(f"{folder.name}/{name}", data), storage_options=s3().options)


def by_http(folder: Path, name: str, data: bytes) -> JsonlSource:
    return JsonlSource(http_host().put(f"/{folder.name}/{name}", data), storage_options=FAST)


def on_google(folder: Path, name: str, data: bytes) -> JsonlSource:
    http_host().put(f"/bucket/{folder.name}/{name}", data)
    options = http_host().google | {"client_options": {"allow_http": True}}
    return JsonlSource(f"gs://bucket/{folder.name}/{name}", storage_options=options)


def on_azure(folder: Path, name: str, data: bytes) -> JsonlSource:
    http_host().put(f"/container/{folder.name}/{name}", data)
    return JsonlSource(f"az://container/{folder.name}/{name}", storage_options=http_host().azure)


MORE = [pytest.param(place, marks=pytest.mark.thorough) for place in (on_s3, on_google, on_azure)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("place", [on_file, by_http, *MORE])
def test_the_order_is_the_same_wherever_the_rows_are(place, num_workers, tmp_path):
    assert digest_of(place(tmp_path, "rows.jsonl", DATA), num_workers=num_workers) == DIGEST


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json"])
@pytest.mark.parametrize("place", [on_s3, by_http])
def test_the_order_of_compressed_rows_and_arrays_is_the_same_too(place, name, tmp_path):
    rows = [json.loads(line) for line in DATA.splitlines()]
    data = gzip.compress(DATA) if name.endswith(".gz") else json.dumps(rows, indent=1).encode()

    assert digest_of(place(tmp_path, name, data)) == digest_of(on_file(tmp_path, name, data))


@pytest.mark.thorough
def test_the_default_shuffle_is_that_of_files(tmp_path):
    expected = digest_of(on_file(tmp_path, "rows.jsonl", DATA), shuffle=True)

    assert digest_of(on_s3(tmp_path, "rows.jsonl", DATA), shuffle=True) == expected


def test_the_next_compressed_objects_are_begun_before_one_ends(host):
    """Four of them wait for one another: they would wait for ever if they were read in turn."""
    together = threading.Barrier(4)
    left = iter(range(4))
    addresses = [host.put(f"/{n}.jsonl.gz", gzip.compress(jsonl([{"id": n}]))) for n in range(6)]
    with make(JsonlSource(addresses), shuffle=False) as loader:
        host.answer = lambda _: None if next(left, None) is None else _waits(together)
        assert ids(loader.get_next_batch(6)) == list(range(6))


def _waits(together: threading.Barrier) -> None:
    together.wait(240)


# Which objects


@pytest.fixture
def folder(tmp_path) -> str:
    """A folder of a bucket with rows 0 to 5."""
    names = ("b.jsonl", "a.jsonl", "c.txt", "deep/d.jsonl", "deep/er/e.jsonl", "other.json.gz")
    for number, name in enumerate(names):
        data = jsonl([{"id": number}])
        s3().put(f"{tmp_path.name}/{name}", gzip.compress(data) if name.endswith("gz") else data)
    return f"s3://{BUCKET}/{tmp_path.name}"


def read(paths: Any, num_samples: int, **knobs: Any) -> list[int]:
    with make(JsonlSource(paths, storage_options=s3().options, **knobs), shuffle=False) as loader:
        return ids(loader.get_next_batch(num_samples))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ("", [1, 0]),
        ("/", [1, 0]),
        ("/deep", [3]),
        ("/*.jsonl", [1, 0]),
        ("/**/*.jsonl", [1, 0, 3, 4]),
        ("/[!b].*", [1, 2]),
        ("/c.txt", [2]),
        (["/c.txt", "/a.jsonl"], [2, 1]),
    ],
)
def test_folders_globs_and_lists_name_objects_as_they_name_files(folder, names, rows):
    paths = folder + names if isinstance(names, str) else [folder + name for name in names]

    assert read(paths, len(rows)) == rows


@pytest.mark.parametrize("kind", ["google", "azure"])
@pytest.mark.parametrize(
    ("names", "rows"), [("", [1, 0]), ("/*.jsonl", [1, 0]), ("/**/*.jsonl", [1, 0, 3, 4]), ("/[!b].*", [1, 2])]
)
def test_googles_and_azures_folders_and_globs_are_listed_in_all_their_pages(host, kind, names, rows):
    for number, name in enumerate(("b.jsonl", "a.jsonl", "c.txt", "deep/d.jsonl", "deep/er/e.jsonl")):
        host.put(f"/bucket/data/{name}", jsonl([{"id": number}]))
    options = host.azure if kind == "azure" else host.google | {"client_options": {"allow_http": True}}
    source = JsonlSource(f"{'az' if kind == 'azure' else 'gs'}://bucket/data{names}", storage_options=options)
    with make(source, shuffle=False) as loader:
        assert ids(loader.get_next_batch(len(rows))) == rows

    assert len([request for request in host.requests if "list" in request.path]) == 3  # of two objects each


def test_a_manifest_names_objects_and_nothing_is_listed_or_looked_at(host):
    parts = {f"/data/{number}.jsonl": jsonl([{"id": number}]) for number in (2, 0, 1)}
    lines = [
        {"path": path[6:], "size": len(data), "etag": hashlib.md5(data).hexdigest(), "rows": 1}
        for path, data in parts.items()
    ]
    for path, data in parts.items():
        host.put(path, data)
    address = host.put("/data/all.manifest.jsonl", jsonl(lines))

    with make(JsonlSource(address), shuffle=False) as loader:
        assert ids(loader.get_next_batch(3)) == [2, 0, 1]
    assert [request.path for request in host.requests if request.method == "HEAD"] == ["/data/all.manifest.jsonl"]


def test_a_manifest_that_names_an_older_object_is_found_out_at_the_read(host):
    data = jsonl([{"id": 1}])
    host.put("/a.jsonl", data)
    address = host.put("/x.manifest.jsonl", jsonl([{"path": "a.jsonl", "size": len(data), "etag": "older"}]))

    with pytest.raises(SourceChangedError, match='^AD322 .*etag "older"; now'), make(JsonlSource(address)) as loader:
        loader.get_next_batch(1)


OTHER_BUCKET = b'{"path": "s3://other/a", "size": 1, "etag": ""}'


@pytest.mark.parametrize("line", [b'{"path": "a.jsonl"}', b"no json", OTHER_BUCKET])
def test_a_damaged_manifest_is_named_by_its_line(host, line):
    address = host.put("/x.manifest.jsonl", b"\n" + line)

    with pytest.raises(SourceError, match="^AD328 .*x.manifest.jsonl:2: "):
        make(JsonlSource(address))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("paths", "code"),
    [
        ("/nothing-*.jsonl", "AD308"),
        ("/nothing/", "AD306"),
        ("/nothing.jsonl", "AD323"),
        (["/a.jsonl", "/a.jsonl"], "AD309"),
    ],
)
def test_objects_that_are_not_there_are_named(folder, paths, code):
    given = folder + paths if isinstance(paths, str) else [folder + path for path in paths]
    with pytest.raises((SourceError, ConfigError), match=f"^{code} {'' if code == 'AD306' else folder}"):
        read(given, 1)


@pytest.mark.thorough
def test_an_object_may_be_listed_twice_on_request(folder):
    assert read([f"{folder}/a.jsonl"] * 2, 2, allow_repeats=True) == [1, 1]


def test_files_and_objects_are_not_mixed(tmp_path):
    with pytest.raises(ConfigError, match="^AD320 "):
        make(JsonlSource([str(tmp_path / "a.jsonl"), "s3://bucket/a.jsonl"]))


def test_http_has_no_folders(host):
    with pytest.raises(SourceError, match="^AD327 .*manifest"):
        make(JsonlSource(f"{host.url}/folder/"))


def test_lines_as_pythons_are_of_files_only(host):
    with pytest.raises(ConfigError, match="^AD320 python_lines"):
        make(JsonlSource(host.put("/a.jsonl", DATA), python_lines=True))


def test_an_array_is_known_by_its_first_bytes(host):
    address = host.put("/a.jsonl", b'[{"id": 1}]')

    with pytest.raises(SourceError, match="^AD120 "):
        make(JsonlSource(address))
    with make(JsonArraySource(address)) as loader:
        assert ids(loader.get_next_batch(1)) == [1]


# Pinned


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_object_that_changes_in_the_middle_is_an_error_and_no_row_of_it_is_delivered(host, num_workers):
    address = host.put("/a.jsonl", DATA)
    before = hashlib.md5(DATA).hexdigest()
    seen: list[int] = []

    with make(JsonlSource(address), buffer_size=1, num_workers=num_workers) as loader:
        seen += ids(loader.get_next_batch(1))
        host.put("/a.jsonl", DATA.replace(b'{"id": ', b'{"id":9'))  # of the same size
        after = hashlib.md5(host.objects["/a.jsonl"]).hexdigest()
        with pytest.raises(SourceChangedError, match="^AD322 ") as caught:
            while True:
                seen += ids(loader.get_next_batch(1))

    assert before in str(caught.value)
    assert after in str(caught.value)
    assert max(seen) < NUM_ROWS


def test_a_snapshot_is_refused_for_another_object_of_the_same_size(host):
    address = host.put("/a.jsonl", DATA)
    with make(JsonlSource(address)) as loader:
        loader.get_next_batch(10)
        state = loader.state_dict()
    host.put("/a.jsonl", DATA.replace(b'{"id": ', b'{"id":9'))

    with make(JsonlSource(address)) as loader, pytest.raises(SnapshotMismatchError, match="data: "):
        loader.load_state_dict(state)


def test_the_content_is_not_read_for_a_fingerprint(host):
    with make(JsonlSource(host.put("/a.jsonl", DATA))) as loader:
        loader.state_dict()

    assert sum(request.stop - request.start for request in host.requests if request.method == "GET") < len(DATA) * 2


# Faults


def faulty(every: int, answers: list[Answer]) -> Callable[[Request], Answer | None]:
    """Each ``every``th read fails, in each of the ways in turn; its next try may succeed."""
    count = iter(range(10**9))

    def answer(request: Request) -> Answer | None:
        number = next(count)
        return answers[number // every % len(answers)] if number % every == 0 and request.method == "GET" else None

    return answer


def test_faulty_reads_are_tried_again_and_lose_no_row(host, many_tries):
    address = host.put("/a.jsonl", DATA)
    expected = digest_of(JsonlSource(address))
    ways = [Answer(status, b"x") for status in (408, 429, 500, 503)] + [Answer(cut_to=10), Answer(206, b"short")]
    with make(JsonlSource(address)) as loader:
        host.answer = faulty(3, ways)
        found = ids(loader.get_next_batch(2 * NUM_ROWS))
        now = loader.statistics()

    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == expected
    assert now.store_retries_total > 10
    assert now.store_reads_total > now.store_retries_total


def test_the_reads_of_every_part_of_a_mixture_are_counted(host, tmp_path):
    """What is read from front to back, this process reads, and counts itself."""
    mix = Mix({"here": on_file(tmp_path, "rows.jsonl", DATA), "there": host.put("/b.jsonl.gz", gzip.compress(DATA))})
    with make(mix) as loader:
        loader.get_next_batch(NUM_ROWS)
        assert loader.statistics().store_reads_total > 0


@pytest.mark.thorough
def test_a_worker_counts_its_reads_too(host):
    address = host.put("/a.jsonl", DATA)
    with make(JsonlSource(address), num_workers=1) as loader:
        host.answer = faulty(40, [Answer(503, b"x")])
        loader.get_next_batch(NUM_ROWS)
        now = loader.statistics()

    assert now.store_reads_total > now.store_retries_total > 0


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_store_that_stays_away_is_an_error_and_the_run_resumes_exactly(host, num_workers):
    address = host.put("/a.jsonl", DATA)
    source = JsonlSource(address, storage_options={"retry_timeout_s": 0.2})
    with make(source) as loader:
        expected = ids(loader.get_next_batch(NUM_ROWS))
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


# Processes


def children_with_obstore() -> dict[int, bool]:
    """Of each process below this one: whether it has loaded obstore."""
    return {
        child.pid: "obstore" in Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8", errors="replace")
        for child in psutil.Process().children(recursive=True)
    }


@pytest.mark.thorough
def test_only_the_reader_opens_a_store_and_it_is_never_forked(host):
    """obstore is not fork-safe: the process that workers are forked from must not have loaded it."""
    with make(JsonlSource(host.put("/a.jsonl", jsonl([{"id": i} for i in range(500)]))), num_workers=2) as loader:
        loader.get_next_batch(500)
        pids = [worker.pid for worker in loader.statistics().workers]
        found = children_with_obstore()
        parents = {psutil.Process(pid).ppid() for pid in pids}

    *tokenizing, reader = pids
    assert len(tokenizing) == 2
    assert found.pop(reader)
    assert not any(found.values())  # the fork server is among them
    assert len(parents) == 1
    assert parents.isdisjoint(pids)


@pytest.mark.thorough
def test_a_store_is_not_even_imported_where_a_worker_is_forked_from(host):
    """It stays so in workers that are started after the store was read."""
    source = JsonlSource(host.put("/a.jsonl", jsonl([{"id": i} for i in range(500)])))
    with make(source, whether_obstore_is_here, num_workers=1, buffer_size=10) as loader:
        seen = ids(loader.get_next_batch(300))
        psutil.Process(loader.statistics().workers[0].pid).kill()
        seen += ids(loader.get_next_batch(700))

    assert set(seen) == {0}


@pytest.mark.thorough
def test_a_reader_that_is_killed_costs_no_row(host):
    address = host.put("/a.jsonl", DATA)
    expected = digest_of(JsonlSource(address))
    with make(JsonlSource(address), num_workers=1, buffer_size=1) as loader:
        seen: list[int] = []
        while len(seen) < 2 * NUM_ROWS:
            if len(seen) % 280 == 140:
                psutil.Process(_reader(loader)).kill()
            seen += ids(loader.get_next_batch(20))
        assert loader.statistics().worker_restarts_total > 0

    assert hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16] == expected


def _reader(loader: DataLoader) -> int:
    while (pid := loader.statistics().workers[-1].pid) is None:  # it is being started
        pass
    return pid


def test_a_bad_row_of_an_object_is_logged_with_its_byte(host):
    address = host.put("/a.jsonl", DATA.replace(b'"', b"", 1))
    with capture_logs() as events, make(JsonlSource(address), num_workers=0, bad_rows="skip", shuffle=False) as loader:
        loader.get_next_batch(1)

    (bad,) = [event for event in events if event["event"] == "row.bad"]
    assert (bad["path"], bad["byte_offset"], "line" in bad) == (address, 0, False)


# Snapshots


@pytest.mark.thorough
def test_snapshots_in_a_store_resume_exactly_and_the_last_three_are_kept(tmp_path):
    source = on_file(tmp_path, "rows.jsonl", DATA)
    address, options = f"s3://{BUCKET}/{tmp_path.name}/run/data.state", s3().options
    with make(source) as loader:
        expected = ids(loader.get_next_batch(100))
    with make(source) as loader:
        for _ in range(5):
            loader.get_next_batch(10)
            loader.save(address, storage_options=options)
        loader.save(tmp_path / "file.state")

    for suffix, number in (("", 50), (".1", 40), (".2", 30)):
        with make(source) as loader:
            loader.restore(address + suffix, storage_options=options)
            assert ids(loader.get_next_batch(5)) == expected[number : number + 5]
    assert len(s3().client.list_objects_v2(Bucket=BUCKET, Prefix=f"{tmp_path.name}/run/")["Contents"]) == 3


@pytest.mark.thorough
def test_a_snapshot_that_is_not_there_or_damaged_is_named(tmp_path):
    options = s3().options
    damaged = s3().put(f"{tmp_path.name}/damaged.state", b"ADSNAP1\n" + bytes(40))
    with make(on_file(tmp_path, "rows.jsonl", DATA)) as loader:
        with pytest.raises(SnapshotError, match="^AD602 s3://.*none.state cannot be read: AD323 "):
            loader.restore(f"s3://{BUCKET}/{tmp_path.name}/none.state", storage_options=options)
        with pytest.raises(SnapshotError, match="^AD602 s3://.*damaged.state cannot be loaded: "):
            loader.restore(damaged, storage_options=options)
        with pytest.raises(SnapshotError, match="^AD601 s3://nobucket/a.state was not written: AD32"):
            loader.save("s3://nobucket/a.state", storage_options=options)


# Secrets


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_secret_is_in_a_log_an_error_a_state_a_cache_or_a_list_of_processes(tmp_path, num_workers):
    options = s3().options
    source = JsonlSource(s3().put(f"{tmp_path.name}/a.jsonl", DATA), storage_options=options)
    cache = {"folder": str(tmp_path / "cache")}
    texts: list[Any] = [repr(source), str(source)]
    with capture_logs() as logs:
        with make(source, num_workers=num_workers, cache=cache, shuffle="full") as loader:
            loader.get_next_batch(50)
            texts += [loader.state_dict(), repr(loader), loader.statistics().to_dict()]
            for child in psutil.Process().children(recursive=True):
                texts += [child.cmdline(), Path(f"/proc/{child.pid}/environ").read_bytes()]
            s3().put(f"{tmp_path.name}/a.jsonl", DATA + DATA)
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

    assert all(request.path == "/a.jsonl?X-Sig=sIgNaTuRe" for request in host.requests)
    assert all(request.headers["authorization"].startswith("Basic ") for request in host.requests)
    assert all(secret not in f"{texts} {caught.value}" for secret in ("sIgNaTuRe", "pAsSwOrD"))


# A mixture, and asyncio


@pytest.mark.asyncio
async def test_an_object_is_read_without_a_thread_of_the_caller(host):
    async with AsyncDataLoader(
        JsonlSource(host.put("/a.jsonl", DATA)), tokenize_fn=row_id, num_workers=0, shuffle=SHUFFLE
    ) as loader:
        assert len(await loader.get_next_batch(10)) == 10
        assert msgspec.structs.asdict(loader.statistics())["store_reads_total"] > 0
