"""Stores, one try at a time: what each gives, pins and refuses, and what it says of whatever a server did to a read."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncdata import HuggingFaceSource, JsonArraySource, JsonlSource, ParquetSource
from asyncdata.errors import ConfigError, SourceError
from tests.support import parts
from tests.support.servers import FaultProxy, Faults, HubServer
from tests.support.stores import FAST, HttpHost

TOKEN = "hf_verysecret"
ROWS = b'{"id": 1}\n' * 50
FILES = {f"data/part-{number}.jsonl": b'{"id": %d}\n' % number * 50 for number in range(5)}
FILES |= {"data/more/part-9.jsonl": b"{}\n", "README.md": b"# rows\n", "a b+c.jsonl": b'{"id": 77}\n'}
PART = "data/part-1.jsonl"


class Place(NamedTuple):
    """A bucket that holds :data:`FILES`.

    :ivar url: of its server; empty: there is none.
    :ivar open: opens it as a store, at this url.
    :ivar put: replaces an object.
    :ivar prefix: of all keys.
    """

    url: str
    open: Callable[[str], Any]
    put: Callable[[str, bytes], object]
    prefix: str


@pytest.fixture(autouse=True)
def online(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def host() -> Iterator[HttpHost]:
    pytest.importorskip("obstore")
    with HttpHost() as server:
        yield server


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(TOKEN) as server:
        yield server


@pytest.fixture
def memory() -> Iterator[Any]:
    files = pytest.importorskip("fsspec").filesystem("memory")
    yield files
    files.store.clear()


def dataset(url: str, token: str = TOKEN) -> parts.HubStore:
    return parts.HubStore("hf://datasets", {"endpoint": url, "token": token})


def bucket(url: str) -> parts.HubStore:
    return parts.HubStore("hf://buckets", {"endpoint": url, "token": TOKEN})


def http(url: str) -> parts.ObstoreStore:
    return parts.ObstoreStore(f"{url}/", {})


def of_cloud(url: str, options: dict[str, Any]) -> Callable[[str], parts.ObstoreStore]:
    """Opens it at its own address, without the settings that are not the store's."""
    return lambda _: parts.ObstoreStore(url, {name: options[name] for name in options.keys() - FAST.keys()})


NAMES = ("http", "google", "azure", "dataset", "bucket", "memory")


@pytest.fixture
def place(request) -> Place:
    name = request.param
    server = request.getfixturevalue({"dataset": "hub", "bucket": "hub", "memory": "memory"}.get(name, "host"))
    if name == "dataset":
        sha = server.commit("me/rows", FILES)
        return Place(server.url, dataset, lambda path, data: server.commit("me/rows", {path: data}), f"me/rows@{sha}/")
    if name == "bucket":
        server.put("me/files", FILES)
        return Place(server.url, bucket, lambda path, data: server.put("me/files", {path: data}), "me/files/")

    write = server.pipe if name == "memory" else server.put
    for path, data in FILES.items():
        write(f"/bucket/rows/{path}", data)
    url, open_store = {
        "http": lambda: (server.url, http),
        "google": lambda: (server.url, of_cloud("gs://bucket", server.google)),
        "azure": lambda: (server.url, of_cloud("az://bucket", server.azure)),
        "memory": lambda: ("", lambda _: parts.FsspecStore("memory://bucket", {})),
    }[name]()
    prefix = "bucket/rows/" if name == "http" else "rows/"
    return Place(url, open_store, lambda path, data: write(f"/bucket/rows/{path}", data), prefix)


def places(*names: str) -> Any:
    return pytest.mark.parametrize("place", names, indirect=True)


@contextmanager
def refused(kind: str, words: str | None = None) -> Iterator[Any]:
    with pytest.raises(parts.StoreError, match=words) as caught:
        yield caught
    assert caught.value.kind == kind


@places(*NAMES)
def test_an_object_is_looked_at_and_read_by_ranges(place):
    store = place.open(place.url)
    for path in (PART, "a b+c.jsonl"):
        found = store.head(place.prefix + path)

        assert (found.address.key, found.num_bytes) == (place.prefix + path, len(FILES[path]))
        assert bool(found.etag or found.version)
        assert store.head(store.pinned(place.prefix + path)) == found
        for start, stop in ((0, 3), (3, 9), (0, found.num_bytes)):
            assert store.read(found, start, stop) == FILES[path][start:stop]


@places("google", "azure", "dataset", "bucket", "memory")
def test_a_folder_and_the_beginning_of_names_are_listed_whatever_the_pages(place):
    store = place.open(place.url)

    def listed(prefix: str) -> list[parts.ObjectStamp]:
        return sorted(store.list(place.prefix + prefix), key=lambda stamp: stamp.address.key)

    for prefix in ("data/", "data/part-", ""):
        found = listed(prefix)
        names = sorted(path for path in FILES if path.startswith(prefix))
        assert [stamp.address.key for stamp in found] == [place.prefix + name for name in names]
        assert [stamp.num_bytes for stamp in found] == [len(FILES[name]) for name in names]
    one = listed("data/")[-1]
    assert store.read(one, 0, 5) == FILES[one.address.key.removeprefix(place.prefix)][:5]


@places(*NAMES)
def test_what_is_not_there_is_missing(place):
    with refused("missing"):
        place.open(place.url).head(f"{place.prefix}none.jsonl")


@places("http", "google", "azure", "bucket", "memory")
@pytest.mark.parametrize("data", [ROWS[::-1], ROWS + b"more", ROWS[:-10]], ids=["as long", "longer", "shorter"])
def test_an_object_that_was_replaced_is_never_read(place, data):
    store = place.open(place.url)
    found = store.head(place.prefix + PART)
    store.read(found, 0, 5)
    place.put(PART, data)

    with refused("changed"):
        place.open(place.url).read(found, 2, 7)


@places("http", "dataset")
def test_an_object_of_another_size_is_another_one_whatever_its_etag(place):
    store = place.open(place.url)
    found = store.head(place.prefix + PART)

    with refused("changed"):
        store.read(replace(found, num_bytes=found.num_bytes + 1), 0, 5)


FAULTS = {
    **dict.fromkeys(("408", "429", "500", "503"), ("transient", "transient")),
    **dict.fromkeys(("cut", "short", "shifted", "relabelled"), ("transient", "transient")),
    "403": ("denied", "denied"),
    "404": ("missing", "missing"),
    "412": ("changed", "changed"),
    "whole": ("permanent", "transient"),
    "etag": ("changed", ""),  # what the hub redirects to is known by its place
}
"""What a server does to an answer, and what it is told as: of a host of http, and of the hub."""


@places("http", "dataset", "bucket")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_as_what_it_is(place, fault):
    of_http, of_hub = FAULTS[fault]
    is_http = place.open is http
    wanted = of_http if is_http else of_hub
    with FaultProxy(place.url) as proxy:
        store = place.open(proxy.url)
        found = store.head(place.prefix + PART)
        store.read(found, 0, 5)
        proxy.faults = Faults((fault,), share=1, repeats=9, retry_after_s=7)
        if not wanted:
            assert store.read(found, 40, 90) == FILES[PART][40:90]
            return
        with refused(wanted) as caught:
            store.read(found, 40, 90)

    asks = fault in {"429", "503"}
    assert caught.value.is_throttled is asks
    assert caught.value.retry_after_s == (7.0 if asks and not is_http else 0)
    assert not any(secret in str(caught.value) for secret in ("Signature", TOKEN, place.url))


@places("http", "dataset", "bucket")
@pytest.mark.parametrize("fault", ["429", "500", "503"])
def test_a_look_at_a_file_is_one_try(place, fault):
    """The reads try again, count the tries, and end with the loader: a store that tries by itself would do neither."""
    with FaultProxy(place.url) as proxy:
        store = place.open(proxy.url)
        found = store.head(place.prefix + "README.md")
        proxy.faults = Faults((fault,), share=1, repeats=9, only_ranges=False, retry_after_s=7)
        with refused("transient") as caught:
            store.head(place.prefix + "README.md")

        assert proxy.num_faults == 1
        proxy.faults = Faults()
        assert store.head(place.prefix + "README.md") == found
    assert caught.value.retry_after_s == (7.0 if fault in {"429", "503"} and place.open is not http else 0)


@places("http", "dataset", "bucket")
def test_a_server_that_is_late_or_gone_may_be_asked_again(place, monkeypatch):
    parts.change(monkeypatch, hub_timeout_s=0.05)
    timeout = {"client_options": {"timeout": "50ms"}}
    with FaultProxy(place.url) as proxy:
        found = place.open(place.url).head(place.prefix + PART)
        proxy.faults = Faults(delay_s=600)
        store = parts.ObstoreStore(f"{proxy.url}/", timeout) if place.open is http else place.open(proxy.url)
        with refused("transient"):
            store.read(found, 0, 5)
    with refused("transient"):
        place.open(proxy.url).head(place.prefix + PART)


def test_every_read_carries_the_etag_but_for_a_weak_one(host):
    host.put("/a", ROWS)
    store = http(host.url)
    found = store.head("a")
    store.read(found, 0, 5)
    with refused("changed"):
        store.read(replace(found, etag=f"W/{found.etag}", version=""), 0, 5)

    asked = [request.headers.get("if-match") for request in host.requests if request.method == "GET"]
    assert asked == [found.etag, None]


@pytest.mark.parametrize(
    "options",
    [{"client_options": "timeout=1"}, {"client_options": 1}, {"retry_config": "none"}, {"nonsense": "s3cret"}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_cannot_be_are_refused_by_name(options):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=rf"^AD321 .*storage_options \({next(iter(options))}\)") as caught:
        parts.ObstoreStore("s3://bucket", options)
    assert "s3cret" not in str(caught.value)


def test_a_fork_of_a_process_that_has_read_refuses_to_read(host, monkeypatch):
    """It would wait for ever: obstore's threads are not there."""
    parts.change(monkeypatch, first_user_of_obstore=[os.getpid() - 1])
    with pytest.raises(ConfigError, match="^AD321 .*fork.*spawn"):
        http(host.url)


def test_the_objects_of_a_glob_are_sorted_in_whatever_order_the_hub_lists_them(hub):
    sha = hub.commit("me/rows", FILES)
    found = parts.find_objects("hf://datasets/me/rows/**", (".jsonl",), {"endpoint": hub.url, "token": TOKEN})

    assert [stamp.address.key for stamp in dataset(hub.url).list(f"me/rows@{sha}/")] != list(found.refs.keys)
    assert list(found.refs.keys) == sorted(f"me/rows@{sha}/{path}" for path in FILES)


def test_the_place_of_a_file_is_asked_once_and_again_when_it_has_ended(hub):
    hub.commit("me/rows", FILES)
    store = dataset(hub.url)
    found = store.head(store.pinned("me/rows/a b+c.jsonl"))
    before = len(hub.asked)
    for start in range(5):
        assert store.read(found, start, start + 4) == FILES["a b+c.jsonl"][start : start + 4]

    assert len([asked for asked in hub.asked[before:] if "/resolve/" in asked]) == 1
    hub.end_signatures()
    assert store.read(found, 0, 11) == FILES["a b+c.jsonl"]
    assert len([asked for asked in hub.asked[before:] if "/resolve/" in asked]) == 2


def test_the_places_of_few_files_are_kept(hub, monkeypatch):
    """Each takes 1 KB, and a data set may have very many files."""
    parts.change(monkeypatch, most_places_of_a_hub=2)
    hub.commit("me/rows", FILES)
    store = dataset(hub.url)
    for path in 2 * [path for path in FILES if path.startswith("data/part-")]:
        assert store.read(store.head(store.pinned(f"me/rows/{path}")), 0, 9) == FILES[path][:9]

    assert len(store._places) == 2  # noqa: SLF001 - nothing public shows them


@pytest.mark.parametrize(
    ("key", "token", "kind"),
    [
        ("me/rows@v9/README.md", TOKEN, "missing"), ("me/no/x", TOKEN, "missing"),
        ("me/rows/README.md", "hf_bad", "denied"),
    ],
)  # fmt: skip
def test_what_is_not_there_or_not_allowed_is_told_and_no_token_is_shown(hub, key, token, kind):
    hub.commit("me/rows", FILES)
    with refused(kind) as caught:
        dataset(hub.url, token).pinned(key)
    assert token not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    found = dataset(hub.url).head(dataset(hub.url).pinned("me/rows/README.md"))
    assert TOKEN not in f"{found!r} {found.identity}"


def test_offline_mode_is_named_and_a_key_of_another_form_with_the_form(hub, monkeypatch):
    for key in ("rows", "me", "me/rows@", ""):
        with pytest.raises(SourceError, match=r"AD341 .*user/name@revision/path"):
            dataset(hub.url).head(key)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("permanent", "HF_HUB_OFFLINE"):
        dataset(hub.url).pinned("me/rows/README.md")


def test_another_kind_of_repository_or_option_is_refused_and_a_missing_package_named(monkeypatch):
    import huggingface_hub

    for url, options in (("hf://spaces", {}), ("hf://datasets", {"tokn": "hf_x"})):
        with pytest.raises(ConfigError, match="AD341") as caught:
            parts.HubStore(url, options)
        assert "hf_x" not in str(caught.value)
    monkeypatch.delattr(huggingface_hub.HfApi, "list_bucket_tree")
    with pytest.raises(ConfigError, match=r"AD340 .*no buckets"):
        parts.HubStore("hf://buckets", {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"AD340 .*pip install"):
        parts.HubStore("hf://datasets", {})


@pytest.mark.parametrize("keep", [1, 3])
def test_nothing_is_written_to_the_hub_and_the_error_says_so(hub, keep):
    with pytest.raises(SourceError, match="nothing is written to the hub; choose another place"):
        parts.write_stored("hf://buckets/me/rows/x", b"", keep, {"endpoint": hub.url})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0), ({"retry-after": "Mon, 23 Nov 2026 10:00:30 GMT"}, 30.0),
        ({"retry-after": "Mon, 23 Nov 2026 09:00:00 GMT"}, 0.0), ({"retry-after": "soon"}, 0.0),
        ({"ratelimit": '"resolvers";r=0;t=55'}, 55.0), ({"retry-after": "7", "ratelimit": '"api";r=0;t=55'}, 7.0),
        ({}, 0.0),
    ],
)  # fmt: skip
def test_how_long_to_wait_is_told_by_seconds_a_date_or_the_rate_limit(headers, expected):
    assert parts.wait_asked_s(headers, datetime(2026, 11, 23, 10, tzinfo=UTC).timestamp()) == expected


def memory_that_tells(memory: Any, monkeypatch: Any, told: dict[str, Any]) -> parts.FsspecStore:
    memory.pipe("/bucket/rows", b"0123456789")
    info = {"size": 10, "type": "file"}
    monkeypatch.setattr(type(memory), "info", lambda self, path, **_: {"name": path, **info, **told})
    return parts.FsspecStore("memory://bucket", {})


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ETag", '"a"', '"b"'), ("md5Hash", "a", "b"), ("VersionId", "1", "2"), ("mtime", 1.5, 1.500001),
        ("LastModified", "2026-11-22T10:00:00+00:00", "2026-11-22T10:00:01+00:00"),
        ("LastModified", "Sun, 22 Nov 2026 10:00:00 GMT", "Sun, 22 Nov 2026 10:00:01 GMT"),
    ],
)  # fmt: skip
def test_each_kind_of_sign_tells_a_change(memory, monkeypatch, name, before, after):
    told = {name: before}
    store = memory_that_tells(memory, monkeypatch, told)
    found = store.head("rows")
    assert store.read(found, 0, 3) == b"012"
    told[name] = after
    with refused("changed"):
        store.read(found, 0, 3)


def test_a_file_system_without_any_sign_of_a_change_is_refused(memory, monkeypatch):
    with refused("permanent", "AD343 memory:// gives no etag"):
        memory_that_tells(memory, monkeypatch, {}).head("rows")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError(13, "no"), "denied"), (ConnectionResetError(), "transient"), (ValueError(), "permanent")],
    ids=["permission", "connection", "value"],
)
def test_errors_of_a_file_system_are_told_as_what_they_are(memory, monkeypatch, error, kind):
    store = memory_that_tells(memory, monkeypatch, {"ETag": "a"})
    found = store.head("rows")
    monkeypatch.setattr(type(memory), "cat_file", Mock(side_effect=error))
    with refused(kind):
        store.read(found, 0, 3)


def test_an_option_that_fsspec_refuses_is_named_without_its_value(memory):
    with pytest.raises(ConfigError, match=r"AD342 .*pasword") as caught:
        parts.FsspecStore("github://host", {"pasword": "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_the_packages_are_imported_only_where_a_store_is_opened():
    """What a fork server loads is what these modules import."""
    code = (
        "import sys, asyncdata.sources.remote.hub_store, asyncdata.sources.remote.store; "
        "import asyncdata.sources.remote.block_cache, asyncdata.sources.arrow.parquet_reader; "
        "print(*{'huggingface_hub', 'fsspec', 'obstore', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b""


# Addresses are taken apart exactly, and never shown with what gives access


HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}(:[0-9]{1,4})?", fullmatch=True)
KEYS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"), min_size=1, max_size=40)
SECRETS = st.from_regex(r"[A-Z]{4}[a-zA-Z0-9]{12}", fullmatch=True)


@given(st.sampled_from(["s3", "gs", "az", "http", "https"]), HOSTS, KEYS)
def test_an_address_is_parsed_to_what_it_was_made_of(scheme, host, key):
    address = parts.Address(scheme, host, key)

    assert parts.GivenAddress.parse(str(address)).address == address


@given(st.sampled_from(sorted(parts.HTTP)), HOSTS, KEYS, SECRETS, SECRETS)
def test_user_password_and_query_are_for_the_store_only(scheme, host, key, password, signature):
    path = str(parts.Address(scheme, host, key)).partition("://")[2]
    given_address = parts.GivenAddress.parse(f"{scheme}://user:{password}@{path}?sig={signature}")

    assert given_address.address == parts.Address(scheme, host, key)
    assert given_address.url == f"{scheme}://user:{password}@{host}?sig={signature}"
    shown = f"{given_address!r} {given_address.address} {parts.store_spec(given_address, {'token': signature})!r}"
    shown += parts.without_secrets(f"{scheme}://user:{password}@{path}?{signature}")
    assert password not in shown
    assert signature not in shown


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        *(("s3://bucket/" + key, "bucket", key) for key in ("a?b#c", "a b", "ä/ö", "a%20b", "a+b&c=d", "part-?.jsonl")),
        ("hdfs://name:8020/a", "name:8020", "a"),
        ("http://[::1]:80/a", "[::1]:80", "a"),
        ("abfss://container@account.dfs.core.windows.net/a", "container@account.dfs.core.windows.net", "a"),
    ],
)
def test_only_http_has_queries_and_percent_codes_and_a_bucket_may_have_a_port_or_an_account(text, bucket, key):
    address = parts.GivenAddress.parse(text).address

    assert (str(address), address.bucket, address.key) == (text, bucket, key)


@pytest.mark.parametrize("text", ["s3:///key", "http://", "https://?x=1", "gs://"])
def test_an_address_without_a_bucket_is_refused(text):
    with pytest.raises(ConfigError, match="^AD320 .*names no bucket or host"):
        parts.GivenAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "az://container/a.jsonl?sv=2024-01-01&se=2027&sig=verysecret",
        "abfs://container@account.dfs.core.windows.net/a?sig=verysecret", "s3://bucket/a?X-Amz-Signature=verysecret",
        "gs://bucket/a?X-Goog-Signature=verysecret", "oss://bucket/a?Signature=verysecret",
        "s3://AKIAX:verysecret@bucket/key", "s3://AKIAX:very/secret@bucket/key", "https://me:verysecret/x@host/a",
    ],
)  # fmt: skip
def test_credentials_that_their_store_does_not_read_are_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match="^AD320 .*storage_options") as caught:
        parts.GivenAddress.parse(text)

    assert "secret" not in f"{caught.value}{JsonlSource(text)}{ParquetSource(text)}"


@pytest.mark.parametrize("many", [False, True])
def test_a_source_shows_the_names_of_its_storage_options_only(many):
    address = "https://me:pass1@host/a.jsonl?X-Amz-Signature=sig2"
    options = {"storage_options": {"client_options": {"x": "secret3"}}}
    for kind in (JsonlSource, JsonArraySource):
        source = kind([address] if many else address, **options)

        assert all(secret not in f"{source} {source!r}" for secret in ("pass1", "sig2", "secret3"))
        assert "https://host/a.jsonl" in repr(source)
        assert "client_options" in repr(source)
    dataset = repr(HuggingFaceSource("json", data_files={"train": [address]}))
    assert "host/a.jsonl" in dataset
    assert all(secret not in dataset for secret in ("pass1", "sig2"))


@pytest.mark.parametrize("path", ["/a/b.jsonl", "a.jsonl", "C:/a", "a:b", "://x"])
def test_a_path_is_no_address(path):
    assert not parts.is_address(path)


@pytest.mark.parametrize(
    "options", [{"max_reads": 0}, {"max_reads": "many"}, {"retry_timeout_s": -1}, {"max_bytes": 0}], ids=str
)
def test_a_limit_out_of_range_is_refused(options):
    with pytest.raises(ConfigError, match=f"storage_options: .*{next(iter(options))}"):
        parts.store_spec(parts.GivenAddress.parse("s3://bucket/key"), options)
