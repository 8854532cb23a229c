"""Data sets and buckets of a hub on loopback: pinned to a commit or a hash, by ranges, without a secret shown."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from asyncdata import ConfigError, SourceError
from asyncdata.sources.remote.hub_store import HubStore, wait_asked_s
from asyncdata.sources.remote.listing import find_objects
from asyncdata.sources.remote.store import ObjectStamp, StoreError
from asyncdata.sources.remote.stored_files import write_stored
from tests.support.fault_proxy import FaultProxy, Faults
from tests.support.hub_server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("huggingface_hub")

TOKEN = "hf_verysecret"
FILES = {f"data/part-{number}.jsonl": b'{"id": %d}\n' % number * 50 for number in range(5)}
FILES |= {"data/more/part-9.jsonl": b"{}\n", "README.md": b"# rows\n", "a b+c.jsonl": b'{"id": 77}\n'}


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(TOKEN) as server:
        yield server


def dataset(server: HubServer, token: str = TOKEN, url: str = "") -> HubStore:
    return HubStore("hf://datasets", {"endpoint": url or server.url, "token": token})


def bucket(server: HubServer, url: str = "") -> HubStore:
    return HubStore("hf://buckets", {"endpoint": url or server.url, "token": TOKEN})


def test_a_branch_becomes_its_commit_and_a_later_commit_changes_nothing(hub):
    old = hub.commit("me/rows", FILES)
    store = dataset(hub)
    key = store.pinned("me/rows@main/data/part-1.jsonl")
    assert key == store.pinned("me/rows/data/part-1.jsonl") == f"me/rows@{old}/data/part-1.jsonl"
    found = store.head(key)
    hub.commit("me/rows", {path: data[::-1] for path, data in FILES.items()})

    assert (found.num_bytes, found.version, found.address.key) == (len(FILES["data/part-1.jsonl"]), old, key)
    assert store.read(found, 3, 200) == FILES["data/part-1.jsonl"][3:200]
    assert store.head(key) == found
    assert store.pinned(key) == key
    assert store.pinned("me/rows@main/data/part-1.jsonl") == key  # asked once
    assert dataset(hub).pinned("me/rows@main/data/part-1.jsonl") != key


def listed_in(store: HubStore, prefix: str) -> list[ObjectStamp]:
    """The stamps, sorted by key."""
    return sorted(store.list(prefix), key=lambda stamp: stamp.address.key)


def test_the_objects_of_a_glob_are_sorted_in_whatever_order_the_hub_lists_them(hub):
    sha = hub.commit("me/rows", FILES)
    found = find_objects("hf://datasets/me/rows/**", (".jsonl",), {"endpoint": hub.url, "token": TOKEN})

    assert [stamp.address.key for stamp in dataset(hub).list(f"me/rows@{sha}/")] != list(found.refs.keys)
    assert list(found.refs.keys) == sorted(f"me/rows@{sha}/{path}" for path in FILES)


def test_a_folder_is_listed_whatever_the_pages(hub):
    sha = hub.commit("me/rows", FILES)
    store = dataset(hub)

    listed = listed_in(store, store.pinned("me/rows/data/"))
    assert [stamp.address.key for stamp in listed] == sorted(
        f"me/rows@{sha}/{path}" for path in FILES if path.startswith("data/")
    )
    assert [stamp.num_bytes for stamp in listed] == [len(FILES[stamp.address.key.split("/", 2)[2]]) for stamp in listed]
    parts = listed_in(store, store.pinned("me/rows/data/part-"))
    assert len(parts) == 5
    assert listed == [store.head(stamp.address.key) for stamp in listed]
    assert len(listed_in(store, store.pinned("me/rows"))) == len(FILES)


def test_the_place_of_a_file_is_asked_once_and_again_when_it_has_ended(hub):
    hub.commit("me/rows", FILES)
    store = dataset(hub)
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
    monkeypatch.setattr("asyncdata.sources.remote.hub_store._MAX_PLACES", 2)
    hub.commit("me/rows", FILES)
    store = dataset(hub)
    files = [path for path in FILES if path.startswith("data/part-")]
    for path in [*files, *files]:
        assert store.read(store.head(store.pinned(f"me/rows/{path}")), 0, 9) == FILES[path][:9]

    assert len(store._places) == 2  # noqa: SLF001 - nothing public shows them


def test_a_bucket_is_pinned_by_the_hash_of_each_file(hub):
    hub.put("me/files", FILES)
    store = bucket(hub)
    listed = listed_in(store, "me/files/data/")
    assert [stamp.address.key for stamp in listed] == sorted(f"me/files/{path}" for path in FILES if "data/" in path)
    found = store.head("me/files/data/part-1.jsonl")
    assert found in listed
    assert store.read(found, 0, 20) == FILES["data/part-1.jsonl"][:20]

    hub.put("me/files", {"data/part-1.jsonl": b"x" * found.num_bytes})
    with pytest.raises(StoreError) as caught:
        bucket(hub).read(found, 0, 20)
    assert caught.value.kind == "changed"


@pytest.mark.parametrize(
    ("key", "kind"), [("me/rows/none.jsonl", "missing"), ("me/rows@v9/README.md", "missing"), ("me/no/x", "missing")]
)
def test_what_is_not_there_is_told(hub, key, kind):
    hub.commit("me/rows", FILES)
    store = dataset(hub)
    with pytest.raises(StoreError) as caught:
        store.head(store.pinned(key))
    assert caught.value.kind == kind


def test_a_wrong_token_is_denied_and_no_token_is_shown(hub):
    hub.commit("me/rows", FILES)
    with pytest.raises(StoreError) as caught:
        dataset(hub, "hf_wrong").pinned("me/rows/README.md")
    assert caught.value.kind == "denied"
    assert "hf_wrong" not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    found = dataset(hub).head(dataset(hub).pinned("me/rows/README.md"))
    assert TOKEN not in f"{found!r} {found.identity}"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("403", "denied"), ("404", "missing"), ("408", "transient"), ("429", "transient"), ("500", "transient")]
    + [(name, "transient") for name in ("503", "cut", "short", "shifted", "relabelled", "whole")],
)
def test_each_fault_is_told_as_what_it_is(hub, kind, expected):
    hub.commit("me/rows", FILES)
    with FaultProxy(hub.url) as proxy:
        store = dataset(hub, url=proxy.url)
        found = store.head(store.pinned("me/rows/data/part-1.jsonl"))
        store.read(found, 0, 5)
        proxy.faults = Faults((kind,), share=1, repeats=9, retry_after_s=7)
        with pytest.raises(StoreError) as caught:
            store.read(found, 40, 90)

    assert caught.value.kind == expected
    assert caught.value.retry_after_s == (7.0 if kind in {"429", "503"} else 0)
    assert "Signature" not in str(caught.value)


@pytest.mark.parametrize("kind", ["429", "500", "503", "cut"])
@pytest.mark.parametrize("opened", [dataset, bucket])
def test_a_look_at_a_file_is_one_try(hub, opened, kind):
    """The reads try again, count the tries, and end with the loader: a store that tries by itself would do neither."""
    sha = hub.commit("me/rows", FILES)
    hub.put("me/rows", FILES)
    key = "me/rows/README.md" if opened is bucket else f"me/rows@{sha}/README.md"
    with FaultProxy(hub.url) as proxy:
        store = opened(hub, url=proxy.url)
        found = store.head(key)
        proxy.faults = Faults((kind,), share=1, repeats=9, only_ranges=False, retry_after_s=7)
        with pytest.raises(StoreError) as caught:
            store.head(key)

        assert proxy.num_faults == 1
        proxy.faults = Faults()
        assert store.head(key) == found
    assert (caught.value.kind, caught.value.retry_after_s) == ("transient", 7.0 if kind in {"429", "503"} else 0)


def test_without_a_server_another_try_may_succeed(hub):
    hub.commit("me/rows", FILES)
    with FaultProxy(hub.url) as proxy:
        url = proxy.url
    with pytest.raises(StoreError) as caught:
        dataset(hub, url=url).pinned("me/rows/README.md")
    assert caught.value.kind == "transient"


def test_offline_mode_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE"):
        dataset(hub).pinned("me/rows/README.md")


@pytest.mark.parametrize("key", ["rows", "me", "me/rows@", ""])
def test_a_key_of_another_form_is_an_error_with_the_form(hub, key):
    with pytest.raises(SourceError, match=r"AD341 .*user/name@revision/path"):
        dataset(hub).head(key)


@pytest.mark.parametrize(("url", "options"), [("hf://spaces", {}), ("hf://datasets", {"tokn": "hf_x"})])
def test_another_kind_of_repository_or_option_is_refused(url, options):
    with pytest.raises(ConfigError, match="AD341") as caught:
        HubStore(url, options)
    assert "hf_x" not in str(caught.value)


def test_without_the_package_or_without_buckets_the_error_says_so(monkeypatch):
    import huggingface_hub

    monkeypatch.delattr(huggingface_hub.HfApi, "list_bucket_tree")
    with pytest.raises(ConfigError, match=r"AD340 .*no buckets"):
        HubStore("hf://buckets", {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"AD340 .*pip install"):
        HubStore("hf://datasets", {})


@pytest.mark.parametrize("keep", [1, 3])
def test_nothing_is_written_and_the_error_says_so(hub, keep):
    with pytest.raises(SourceError, match="nothing is written to the hub; choose another place"):
        write_stored("hf://buckets/me/rows/x", b"", keep, {"endpoint": hub.url})


def test_a_stamp_of_another_size_is_a_change(hub):
    hub.commit("me/rows", FILES)
    store = dataset(hub)
    found = store.head(store.pinned("me/rows/data/part-1.jsonl"))
    with pytest.raises(StoreError) as caught:
        store.read(ObjectStamp(found.address, 9999, found.etag, found.version), 0, 5)
    assert caught.value.kind == "changed"


def test_the_packages_are_imported_only_where_a_store_is_opened():
    """What a fork server loads is what these modules import."""
    code = (
        "import sys, asyncdata.sources.remote.hub_store, asyncdata.sources.remote.fsspec_store; "
        "import asyncdata.sources.remote.block_cache, asyncdata.sources.arrow.parquet_objects; "
        "print(*{'huggingface_hub', 'fsspec', 'obstore', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, "")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "Mon, 23 Nov 2026 10:00:30 GMT"}, 30.0),
        ({"retry-after": "Mon, 23 Nov 2026 09:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"ratelimit": '"resolvers";r=0;t=55'}, 55.0),
        ({"retry-after": "7", "ratelimit": '"api";r=0;t=55'}, 7.0),
        ({}, 0.0),
    ],
)
def test_how_long_to_wait_is_told_by_seconds_a_date_or_the_rate_limit(headers, expected):
    now = datetime(2026, 11, 23, 10, tzinfo=UTC)

    assert wait_asked_s(headers, now.timestamp()) == expected
