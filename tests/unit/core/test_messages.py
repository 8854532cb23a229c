"""Frames between the trainer's process and a worker."""

from __future__ import annotations

import msgspec
import pytest

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
REPLIES = [
    Ready(123),
    Scanned(b"\x01\x00\x00\x00", b"1234", b"5678", b"9abc", 9),
    Tokenized(
        tokens=b"1234",
        token_ends=b"\x01\x00\x00\x00",
        kept=b"",
        columns={"label": Column(b'"\xc3\xbc"', b"\x04\x00\x00\x00")},
        drops={"too long": b"\x02\x00\x00\x00"},
        errors=[RowError(1, "AD101", "why", "excerpt", "trace"), RowError(2, "AD102", "why")],
        busy_s=0.25,
    ),
    Failed("SourceError", "message", "traceback"),
    Failed("ConfigError", "message", row=3, excerpt="text", place=Overflow(3, 1, 2**50)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_a_request_arrives_as_it_was_sent(request_):
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_a_reply_arrives_as_it_was_sent(reply):
    assert decode_reply(encode(reply)) == reply


def test_a_job_arrives_as_it_was_sent():
    assert decode_job(encode(JOB)) == JOB


def test_a_frame_says_how_long_it_is_and_whose():
    message = Ready(7)
    whole = frame(2**63, message)
    length, request_id = HEADER.unpack_from(whole)

    assert (length, request_id) == (len(whole) - HEADER.size, 2**63)
    assert decode_reply(whole[HEADER.size :]) == message


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_the_pieces_of_a_frame_are_the_frame_end_to_end(reply):
    whole = memoryview(b"".join(pieces(2**63, reply)))
    length, request_id = HEADER.unpack_from(whole)

    assert (length, request_id) == (len(whole) - HEADER.size, 2**63)
    assert decode_reply(whole[HEADER.size :]) == reply


def test_the_samples_of_a_reply_are_sent_from_where_they_lie():
    tokens, values = bytes(100_000), bytes(70_000)
    reply = msgspec.structs.replace(REPLIES[2], tokens=tokens, columns={"prompt_text": Column(values, b"")})

    sent = pieces(1, reply)

    assert {id(tokens), id(values)} <= set(map(id, sent))
    assert sum(len(piece) for piece in sent if piece is not tokens and piece is not values) < 500


def test_a_stride_is_the_byte_before_a_block_the_block_and_the_over_read():
    assert JOB.stride == 1 + 32 + 16


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_a_request_is_no_reply(request_):
    with pytest.raises(msgspec.ValidationError):
        decode_reply(encode(request_))


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(REPLIES[1])[:-1], encode(7), encode(["Scan", 1])])
def test_a_damaged_body_is_refused(body):
    with pytest.raises(msgspec.DecodeError):
        decode_request(body)


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        REQUESTS[0].slot = 5
