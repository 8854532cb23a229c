"""What fsspec knows and obstore does not: pinned by what the file system says of an object."""

from __future__ import annotations

import pytest

from asyncdata import ConfigError
from asyncdata.sources.remote.fsspec_store import FsspecStore
from asyncdata.sources.remote.store import StoreError
from asyncdata.sources.remote.stored_files import read_stored, write_stored

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/rows/b.jsonl": b"0123456789", "/bucket/rows/a.jsonl": b"abc", "/bucket/other.txt": b"x"})
    yield files
    files.store.clear()


def test_objects_are_listed_and_read_by_ranges(memory):
    store = FsspecStore("memory://bucket", {})

    listed = sorted(store.list("rows/"), key=lambda stamp: stamp.address.key)
    assert [(stamp.address.key, stamp.num_bytes) for stamp in listed] == [("rows/a.jsonl", 3), ("rows/b.jsonl", 10)]
    assert [str(stamp.address) for stamp in store.list("rows/b")] == ["memory://bucket/rows/b.jsonl"]
    assert [store.head(stamp.address.key) for stamp in listed] == listed
    assert store.read(listed[1], 2, 7) == b"23456"


def test_an_object_that_was_replaced_is_never_read(memory):
    store = FsspecStore("memory://bucket", {})
    found = store.head("rows/b.jsonl")
    memory.pipe("/bucket/rows/b.jsonl", b"9876543210")

    with pytest.raises(StoreError) as caught:
        store.read(found, 2, 7)
    assert caught.value.kind == "changed"


def test_a_file_is_written_and_the_older_ones_are_kept(memory):
    for number in range(4):
        write_stored("memory://bucket/new/state.bin", b"state %d" % number, 3, {})

    paths = [f"memory://bucket/new/state.bin{ending}" for ending in ("", ".1", ".2")]
    assert [read_stored(path, {}) for path in paths] == [b"state 3", b"state 2", b"state 1"]
    assert not memory.exists("/bucket/new/state.bin.3")


def test_copying_what_is_not_there_says_so(memory):
    with pytest.raises(StoreError) as caught:
        FsspecStore("memory://bucket", {}).copy("new/state.bin", "new/state.bin.1")
    assert caught.value.kind == "missing"


@pytest.mark.parametrize(
    ("info", "changed"),
    [
        ({"ETag": '"a"'}, {"ETag": '"b"'}),
        ({"md5Hash": "a"}, {"md5Hash": "b"}),
        ({"VersionId": "1"}, {"VersionId": "2"}),
        ({"mtime": 1.5}, {"mtime": 1.500001}),
        ({"LastModified": "2026-11-22T10:00:00+00:00"}, {"LastModified": "2026-11-22T10:00:01+00:00"}),
        ({"LastModified": "Sun, 22 Nov 2026 10:00:00 GMT"}, {"LastModified": "Sun, 22 Nov 2026 10:00:01 GMT"}),
    ],
)
def test_each_kind_of_sign_tells_a_change(memory, monkeypatch, info, changed):
    store = FsspecStore("memory://bucket", {})
    now = dict(info)
    monkeypatch.setattr(type(memory), "info", lambda self, path, **_: {"name": path, "size": 10, "type": "file", **now})
    found = store.head("rows/b.jsonl")
    assert store.read(found, 0, 3) == b"012"
    now.update(changed)
    with pytest.raises(StoreError) as caught:
        store.read(found, 0, 3)
    assert caught.value.kind == "changed"


def test_a_file_system_without_any_sign_of_a_change_is_refused(memory, monkeypatch):
    store = FsspecStore("memory://bucket", {})
    monkeypatch.setattr(type(memory), "info", lambda self, path, **_: {"name": path, "size": 10, "type": "file"})
    with pytest.raises(StoreError, match=r"AD343 memory:// gives no etag"):
        store.head("rows/b.jsonl")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError(13, "no"), "denied"), (ConnectionResetError(), "transient"), (ValueError(), "permanent")],
)
def test_errors_are_told_as_what_they_are(memory, monkeypatch, error, kind):
    def fail(*_: object, **__: object) -> None:
        raise error

    store = FsspecStore("memory://bucket", {})
    found = store.head("rows/b.jsonl")
    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(StoreError) as caught:
        store.read(found, 0, 3)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("url", "code"), [("nonsense://bucket", "AD310"), ("oss://bucket", "AD342")])
def test_a_scheme_that_is_not_known_or_lacks_its_package_is_named(url, code):
    with pytest.raises(ConfigError, match=f"{code} .*{url[:4]}"):
        FsspecStore(url, {})


def test_a_refused_option_is_named_without_its_value():
    with pytest.raises(ConfigError, match=r"AD342 .*pasword") as caught:
        FsspecStore("github://host", {"pasword": "secret"})
    assert "secret" not in str(caught.value)
