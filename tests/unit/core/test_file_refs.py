"""Objects in columns: the same values as one by one, in every process, and no value is made before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata import ConfigError, JsonlSource
from asyncdata.core.file_refs import ObjectRefs, ObjectsOfStore, joined
from asyncdata.core.messages import Job, decode_job, encode
from asyncdata.core.object_address import Address
from asyncdata.sources.fingerprint import data_fingerprint, objects_fingerprint
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from collections.abc import Iterator

STAMPS = [
    ObjectStamp(Address("s3", "bucket", "data/a.jsonl"), 10, '"etag"', "v1", 7),
    ObjectStamp(Address("s3", "bucket", "b"), 0, "", "v2", 0),
    ObjectStamp(Address("http", "host:80", "a b/é?.jsonl"), 1 << 40, "", "", 1_700_000_000_000_000_000, 1),
    ObjectStamp(Address("s3", "other", "\udcff é.jsonl"), 3, 'W/"é"', "", 0, 2),
]


def packed(stamps: list[ObjectStamp]) -> ObjectRefs:
    found = ObjectsOfStore()
    for stamp in stamps:
        found.add(stamp.store, stamp.address, stamp.num_bytes, stamp.etag, stamp.version, stamp.mtime_ns)
    return found.packed()


def sent(refs: ObjectRefs) -> ObjectRefs:
    job = Job(files=refs, tokenize=None, max_row_bytes=1, block_bytes=1, slack_bytes=0)
    found = decode_job(encode(job)).files
    assert isinstance(found, ObjectRefs)
    return found


@pytest.mark.parametrize("way", [lambda refs: refs, sent, lambda refs: refs.taken(range(len(refs)))])
def test_each_object_is_what_it_is_by_itself(way):
    refs = way(packed(STAMPS))

    expected = [stamp.file for stamp in STAMPS]
    assert list(refs) == refs[:] == [refs[number] for number in range(-4, 0)] == expected
    assert list(refs.paths) == [file.path for file in expected]
    assert list(refs.sizes) == [file.num_bytes for file in expected]
    assert [ObjectStamp.of(file) for file in refs] == STAMPS
    with pytest.raises(IndexError):
        refs[4]


def test_parts_are_joined_in_their_order():
    parts = [packed(STAMPS[:1]), packed([]), packed(STAMPS[1:])]

    assert list(joined(parts)) == list(packed(STAMPS))
    assert list(joined([])) == []


@pytest.mark.parametrize("num_objects", [4, 1400])
def test_their_fingerprint_is_that_of_files(num_objects):
    stamps = [
        msgspec.structs.replace(stamp, address=stamp.address.with_key(f"{number}/{number}{stamp.address.key}"))
        for number in range(num_objects // 4)
        for stamp in STAMPS
    ]
    files = [stamp.file for stamp in stamps]

    expected = data_fingerprint(files, [file.digest for file in files])
    assert objects_fingerprint(packed(stamps)) == objects_fingerprint(sent(packed(stamps))) == expected


def test_the_fingerprint_of_many_objects_is_there_when_they_are_listed(monkeypatch):
    """A first state must not stop the trainer to digest a million objects."""
    blocks = opened(3000)
    for module in ("core.digest", "core.file_refs"):
        monkeypatch.setattr(f"asyncdata.{module}.short_digest", None)

    assert blocks.fingerprint()["num_files"] == 3000


class Listed:
    """A store of rows ``{}`` whose listing comes in no order; ``s3://N`` has N objects."""

    keys = staticmethod(lambda number: [f"{one * 7919 % number:06}.jsonl" for one in range(number)])

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._number = int(url.partition("//")[2])

    def pinned(self, key: str) -> str:
        return key

    def list(self, prefix: str) -> Iterator[ObjectStamp]:
        return (ObjectStamp(Address("s3", str(self._number), key), 3, '"e"') for key in self.keys(self._number))

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        return b"{}\n"[start:stop]

    def close(self) -> None:
        """Nothing is open."""


def opened(number: int) -> Any:
    source = JsonlSource(f"s3://{number}/*.jsonl", storage_options={"store": f"{__name__}:Listed"})
    return source.open(1024)


def test_objects_are_sorted_by_key_whatever_the_listing():
    assert [ref.path for ref in opened(100).refs] == [f"s3://100/{number:06}.jsonl" for number in range(100)]


def test_an_object_that_a_store_lists_twice_is_refused(monkeypatch):
    monkeypatch.setattr(Listed, "keys", staticmethod(lambda _: ["b.jsonl", "a.jsonl", "b.jsonl"]))

    with pytest.raises(ConfigError, match=r"^AD309 s3://3/b.jsonl"):
        opened(3)


def test_very_many_objects_are_opened_without_a_value_for_each(monkeypatch):
    made = []
    of_one = ObjectRefs._made  # noqa: SLF001 - it is counted
    monkeypatch.setattr(ObjectRefs, "_made", lambda self, number: made.append(number) or of_one(self, number))
    blocks = opened(3000)
    blocks.fingerprint()
    blocks.check_unchanged()

    assert blocks.num_blocks == 3000
    assert blocks.blocks([2999])[0].stop == 3
    assert len(made) < 70  # those of which the first bytes are read
