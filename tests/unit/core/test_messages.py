"""Frames between the trainer's process and a worker, and the files in them: the same values on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata import ConfigError, JsonlSource
from asyncdata.core.file_refs import ObjectRefs, ObjectsOfStore, joined
from asyncdata.core.framing import HEADER, frame, pieces
from asyncdata.core.messages import (
    Block,
    Column,
    Failed,
    FileRef,
    Job,
    Overflow,
    Ready,
    RowError,
    Scan,
    Scanned,
    Tokenize,
    Tokenized,
    TokenizeSpec,
    decode_job,
    decode_reply,
    decode_request,
    encode,
)
from asyncdata.core.object_address import Address
from asyncdata.sources.fingerprint import data_fingerprint, objects_fingerprint
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = Job(
    files=[FileRef("/data/\udcff.jsonl".encode("utf-8", "backslashreplace").decode(), 2**50)],
    tokenize=TokenizeSpec("package.module:Class", {"a": [1, None, "x"]}),
    max_row_bytes=64,
    block_bytes=32,
    slack_bytes=16,
)
REQUESTS = [
    Scan(1, 2**40, [Block(0, 0, 10), Block(3, 2**50, 2**50 + 10)]),
    Scan(0, 0, []),
    Tokenize(2, b"\x01\x00\x00\x00", b"\xff\xff\xff\xff"),
    Tokenize(0, b"", b"", [Overflow(3, 1, 2**50)]),
]
TOKENIZED = Tokenized(
    tokens=b"1234",
    token_ends=b"\x01\x00\x00\x00",
    kept=b"",
    columns={"label": Column(b'"\xc3\xbc"', b"\x04\x00\x00\x00")},
    drops={"too long": b"\x02\x00\x00\x00"},
    errors=[RowError(1, "AD101", "why", "excerpt", "trace"), RowError(2, "AD102", "why")],
    busy_s=0.25,
)
REPLIES = [
    Ready(123),
    Scanned(b"\x01\x00\x00\x00", b"1234", b"5678", b"9abc", 9),
    TOKENIZED,
    Failed("SourceError", "message", "traceback"),
    Failed("ConfigError", "message", row=3, excerpt="text", place=Overflow(3, 1, 2**50)),
]


def test_a_message_arrives_as_it_was_sent_and_cannot_be_changed():
    assert decode_job(encode(JOB)) == JOB
    for request in REQUESTS:
        assert decode_request(encode(request)) == request
        with pytest.raises(msgspec.ValidationError):
            decode_reply(encode(request))
        with pytest.raises(AttributeError):
            request.slot = 5
    for reply in REPLIES:
        assert decode_reply(encode(reply)) == reply


@pytest.mark.parametrize("framed", [frame, lambda *message: b"".join(pieces(*message))], ids=["whole", "in pieces"])
def test_a_frame_says_how_long_it_is_and_whose(framed):
    for reply in REPLIES:
        whole = bytes(framed(2**63, reply))
        length, request_id = HEADER.unpack_from(whole)

        assert (length, request_id) == (len(whole) - HEADER.size, 2**63)
        assert decode_reply(whole[HEADER.size :]) == reply


def test_the_samples_of_a_reply_are_sent_from_where_they_lie():
    tokens, values = bytes(100_000), bytes(70_000)
    reply = msgspec.structs.replace(TOKENIZED, tokens=tokens, columns={"prompt_text": Column(values, b"")})

    sent = pieces(1, reply)

    assert {id(tokens), id(values)} <= set(map(id, sent))
    assert sum(len(piece) for piece in sent if piece is not tokens and piece is not values) < 500


def test_a_stride_is_the_byte_before_a_block_the_block_and_the_over_read():
    assert JOB.stride == 1 + 32 + 16


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(REPLIES[1])[:-1], encode(7), encode(["Scan", 1])])
def test_a_damaged_body_is_refused(body):
    with pytest.raises(msgspec.DecodeError):
        decode_request(body)


# Objects of a store, in columns

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


WAYS = {
    "as they were packed": lambda refs: refs,
    "sent": sent,
    "taken": lambda refs: refs.taken(range(len(refs))),
    "joined": lambda refs: joined([refs.taken(range(1)), packed([]), refs.taken(range(1, len(refs)))]),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_object_is_what_it_is_by_itself(way):
    refs = way(packed(STAMPS))

    expected = [stamp.file for stamp in STAMPS]
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
    files = [stamp.file for stamp in stamps]

    expected = data_fingerprint(files, [file.digest for file in files])
    assert objects_fingerprint(packed(stamps)) == objects_fingerprint(sent(packed(stamps))) == expected


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


def test_objects_are_sorted_by_key_whatever_the_listing_and_none_is_listed_twice(monkeypatch):
    assert [ref.path for ref in opened(100).refs] == [f"s3://100/{number:06}.jsonl" for number in range(100)]

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


def test_the_fingerprint_of_many_objects_is_there_when_they_are_listed(monkeypatch):
    """A first state must not stop the trainer to digest a million objects."""
    blocks = opened(3000)
    for module in ("core.digest", "core.file_refs"):
        monkeypatch.setattr(f"asyncdata.{module}.short_digest", None)

    assert blocks.fingerprint()["num_files"] == 3000
