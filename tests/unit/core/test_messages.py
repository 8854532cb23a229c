"""Frames between the trainer's process and a worker, and the files in them: the same values on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata import JsonlSource
from asyncdata.core.identity import digest, joined
from asyncdata.core.messages import encode, pieces
from tests.support.inner import change, real
from tests.support.parts import (
    Address,
    Column,
    FileRef,
    Job,
    ObjectRefs,
    ObjectsOfStore,
    ObjectStamp,
    Pin,
    RowError,
    Tokenized,
    data_fingerprint,
    decode_job,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZED = Tokenized(
    tokens=b"1234", token_ends=b"\x01\x00\x00\x00", kept=b"",
    columns={"label": Column(b'"\xc3\xbc"', b"\x04\x00\x00\x00")}, drops={"too long": b"\x02\x00\x00\x00"},
    errors=[RowError(1, "AD101", "why", "excerpt", "trace"), RowError(2, "AD102", "why")], busy_s=0.25,
)  # fmt: skip


def test_the_samples_of_a_reply_are_sent_from_where_they_lie():
    tokens, values = bytes(100_000), bytes(70_000)
    reply = msgspec.structs.replace(TOKENIZED, tokens=tokens, columns={"prompt_text": Column(values, b"")})

    sent = pieces(1, reply)

    assert {id(tokens), id(values)} <= set(map(id, sent))
    assert sum(len(piece) for piece in sent if piece is not tokens and piece is not values) < 500


STAMPS = [
    ObjectStamp(Address("s3", "bucket", "data/a.jsonl"), 10, '"etag"', "v1", 7),
    ObjectStamp(Address("s3", "bucket", "b"), 0, "", "v2", 0),
    ObjectStamp(Address("http", "host:80", "a b/é?.jsonl"), 1 << 40, "", "", 1_700_000_000_000_000_000, 1),
    ObjectStamp(Address("s3", "other", "\udcff é.jsonl"), 3, 'W/"é"', "", 0, 2),
]


def file_of(stamp: ObjectStamp) -> FileRef:
    """The object for workers. In its digest, the version and the time count only where there is no etag."""
    sign = stamp.etag or stamp.version or str(stamp.mtime_ns)
    pin = Pin(stamp.store, stamp.address, stamp.etag, stamp.version)
    return FileRef(stamp.path, stamp.num_bytes, 0, stamp.mtime_ns, 0, digest(str(stamp.num_bytes), sign), pin)


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


WAYS = {
    "as they were packed": lambda refs: refs,
    "sent": sent,
    "taken": lambda refs: refs.taken(range(len(refs))),
    "joined": lambda refs: joined([refs.taken(range(1)), packed([]), refs.taken(range(1, len(refs)))]),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_object_is_what_it_is_by_itself(way):
    refs = way(packed(STAMPS))

    expected = list(map(file_of, STAMPS))
    assert list(refs) == refs[:] == [refs[number] for number in range(-4, 0)] == expected
    assert list(refs.paths) == [file.path for file in expected]
    assert list(refs.sizes) == [file.num_bytes for file in expected]
    assert [ObjectStamp.of(file) for file in refs] == STAMPS
    assert list(joined([])) == []
    with pytest.raises(IndexError):
        refs[4]


@pytest.mark.parametrize("num_objects", [4, 1400])
def test_their_fingerprint_is_that_of_files(num_objects):
    stamps = [
        msgspec.structs.replace(stamp, address=stamp.address.with_key(f"{number}/{number}{stamp.address.key}"))
        for number in range(num_objects // 4)
        for stamp in STAMPS
    ]
    files = list(map(file_of, stamps))

    expected = data_fingerprint(files)
    assert data_fingerprint(packed(stamps)) == data_fingerprint(sent(packed(stamps))) == expected


class Listed:
    """A store of rows ``{}``; ``s3://N`` has N objects."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._number = int(url.partition("//")[2])

    def pinned(self, key: str) -> str:
        return key

    def list(self, prefix: str) -> Iterator[ObjectStamp]:
        keys = (f"{one:06}.jsonl" for one in range(self._number))
        return (ObjectStamp(Address("s3", str(self._number), key), 3, '"e"') for key in keys)

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        return b"{}\n"[start:stop]

    def close(self) -> None:
        """Nothing is open."""


def opened(number: int) -> Any:
    return JsonlSource(f"s3://{number}/*.jsonl", storage_options={"store": f"{__name__}:Listed"}).open(1024)


def test_very_many_objects_are_opened_without_a_value_for_each_and_digested_when_they_are_listed(monkeypatch):
    """A first state must not stop the trainer to digest a million objects."""
    made = []
    of_one = real("object_of_many")
    change(monkeypatch, object_of_many=lambda self, number: made.append(number) or of_one(self, number))

    blocks = opened(3000)
    with monkeypatch.context() as patch:
        patch.setattr("asyncdata.core.identity.short_digest", None)
        assert blocks.fingerprint()["num_files"] == 3000
    blocks.check_unchanged()

    assert blocks.num_blocks == 3000
    assert blocks.blocks([2999])[0].stop == 3
    assert len(made) < 70  # those of which the first bytes are read
