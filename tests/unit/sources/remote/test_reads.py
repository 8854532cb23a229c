"""Reads of objects: wide, bounded, coalesced, pinned, and tried again."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from asyncdata import ConfigError, SourceChangedError, SourceError
from asyncdata.core.file_refs import ObjectsOfStore
from asyncdata.core.messages import Block, Job
from asyncdata.core.object_address import Address
from asyncdata.core.specs import ReadLimits, StoreSpec
from asyncdata.sources.remote.address import GivenAddress
from asyncdata.sources.remote.line_reader import RemoteLineReader
from asyncdata.sources.remote.reads import Reads, coalesced
from asyncdata.sources.remote.store import ObjectStamp, StoreError, store_spec
from tests.support.fake_store import FakeStore
from tests.support.stores import Answer, HttpHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = bytes(range(256)) * 400


def test_neighbours_are_one_request():
    assert len(coalesced([(n * 1000, n * 1000 + 1200) for n in range(100)])) == 1
    assert len(coalesced([(n << 20, (n << 20) + 1200) for n in range(100)])) == 100


STAMP = ObjectStamp(Address("s3", "bucket", "folder/key"), len(DATA), '"old"')


@pytest.fixture
def fake(monkeypatch) -> type[FakeStore]:
    monkeypatch.setattr(FakeStore, "answer", lambda start, stop: DATA[start:stop])
    for name in ("in_flight", "most", "most_bytes", "num_bytes"):
        monkeypatch.setattr(FakeStore, name, 0)
    monkeypatch.setattr("asyncdata.sources.remote.reads._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("asyncdata.sources.remote.reads._FIRST_WAIT_WHEN_ASKED_S", 0.0)
    return FakeStore


def reads(**limits: float) -> Reads:
    spec = StoreSpec("tests.support.fake_store:FakeStore", "", {}, ReadLimits(**limits))  # type: ignore[arg-type]
    return Reads([spec])


def test_many_requests_are_in_flight_and_no_more_than_the_limit(fake, monkeypatch):
    """The first eight wait for one another: they would wait for ever if fewer were in flight."""
    together = threading.Barrier(8)
    left = iter(range(8))

    def answer(start: int, stop: int) -> bytes:
        if next(left, None) is not None:
            together.wait(240)
        return DATA[start:stop]

    monkeypatch.setattr(fake, "answer", answer)
    wanted = [(STAMP, start, start + 10) for start in range(0, 100_000, 20_000)] * 8
    with closing(reads(max_reads=8)) as many:
        found = [many.start(many.fetch, *one) for one in wanted]
        assert [future.result() for future in found] == [DATA[start:stop] for _, start, stop in wanted]

    assert fake.most == 8


def test_no_more_bytes_are_in_flight_than_the_limit_and_a_longer_request_is_alone(fake):
    with closing(reads(max_bytes=1000)) as many:
        found = [many.start(many.fetch, STAMP, start, start + 400) for start in range(0, 40_000, 400)]
        found.append(many.start(many.fetch, STAMP, 0, 5000))
        assert sum(len(future.result()) for future in found) == 45_000

    assert fake.most_bytes == 5000
    with closing(reads(max_bytes=1000)) as many:
        fake.most_bytes = 0
        for future in [many.start(many.fetch, STAMP, start, start + 400) for start in range(0, 40_000, 400)]:
            future.result()
    assert 400 <= fake.most_bytes <= 800


def failing(times: int, error: StoreError) -> Callable[[int, int], bytes]:
    left = iter(range(times))

    def answer(start: int, stop: int) -> bytes:
        if next(left, None) is not None:
            raise error
        return DATA[start:stop]

    return answer


def test_failures_that_may_pass_are_tried_again_and_counted(fake, monkeypatch):
    monkeypatch.setattr(fake, "answer", failing(5, StoreError("transient", "status 503")))
    beats: list[int] = []
    with closing(reads()) as many:
        many.on_progress = lambda: beats.append(1)
        assert many.read([(STAMP, 10, 20)]) == [DATA[10:20]]

    assert (many.counts.num_reads, many.counts.num_retried) == (1, 5)
    assert len(beats) == 6


def test_after_the_deadline_the_error_names_bucket_key_range_request_and_tries(fake, monkeypatch):
    monkeypatch.setattr(fake, "answer", failing(9, StoreError("transient", "status 503 Slow Down", request_id="RQ-17")))
    with closing(reads(retry_timeout_s=0)) as many, pytest.raises(SourceError, match="^AD326 ") as caught:
        many.read([(STAMP, 10, 20)])

    for word in ("s3://bucket/folder/key", "bucket bucket", "key folder/key", "bytes 10-20", "RQ-17", "503 Slow Down"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (
            "denied",
            r"^AD324 .* may not be accessed with the present credentials: no; pass others by .*storage_options$",
        ),
        ("permanent", "^AD325 .* was refused by the store: no$"),
        ("missing", "^AD323 .* does not exist: no; check the address$"),
        ("transient", "^AD326 .* could not be accessed: no; the run resumes .* when the store is back$"),
    ],
)
def test_an_error_ends_with_the_way_out_and_fits_reads_and_writes(monkeypatch, kind, wanted):
    def refuse(self: FakeStore, key: str, data: bytes) -> None:
        raise StoreError(kind, "no")

    monkeypatch.setattr(FakeStore, "write", refuse, raising=False)
    with closing(reads(retry_timeout_s=0)) as many, pytest.raises(SourceError, match=wanted):
        many.write(0, STAMP.address, DATA)


@pytest.mark.parametrize(
    ("kind", "code"), [("denied", "AD324"), ("permanent", "AD325"), ("changed", "AD322"), ("missing", "AD322")]
)
def test_other_failures_are_not_tried_again(fake, monkeypatch, kind, code):
    monkeypatch.setattr(fake, "answer", failing(1, StoreError(kind, "no")))
    with closing(reads()) as many, pytest.raises(SourceError, match=f"^{code} "):
        many.read([(STAMP, 10, 20)])


def test_an_object_that_was_replaced_is_named_with_both_identities(fake, monkeypatch):
    monkeypatch.setattr(fake, "answer", failing(1, StoreError("changed", "412", request_id="RQ-18")))
    with closing(reads()) as many, pytest.raises(SourceChangedError, match="^AD322 ") as caught:
        many.read([(STAMP, 10, 20)])

    for word in (f'{len(DATA)} bytes, etag "old"', '7 bytes, etag "new"', "bytes 10-20", "RQ-18"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("kind", "now"), [("missing", "now it is gone"), ("denied", "now it is not known, .*403")])
def test_a_replaced_object_is_said_to_be_gone_only_if_the_store_says_so(fake, monkeypatch, kind, now):
    def head(self: FakeStore, key: str) -> ObjectStamp:
        raise StoreError(kind, "status 403")

    monkeypatch.setattr(fake, "answer", failing(1, StoreError("changed", "status 412")))
    monkeypatch.setattr(fake, "head", head)
    with closing(reads()) as many, pytest.raises(SourceChangedError, match=f"^AD322 .*{now}"):
        many.read([(STAMP, 10, 20)])


def test_a_reader_of_very_many_objects_holds_nothing_of_each(fake, monkeypatch):
    """It reads all of them in an epoch; those that it has read last are the files' own to keep."""
    monkeypatch.setattr(fake, "answer", lambda start, stop: b"{}\n"[start:stop])
    found = ObjectsOfStore()
    for number in range(3000):
        found.add(0, Address("s3", "bucket", f"{number}.jsonl"), 3, '"e"', "", 0)
    spec = StoreSpec("tests.support.fake_store:FakeStore", "", {}, ReadLimits())
    job = Job(files=found.packed(), tokenize=None, max_row_bytes=10, block_bytes=3, slack_bytes=0, stores=[spec])
    with closing(RemoteLineReader(job)) as reader:
        for number in range(3000):
            assert len(reader.read_block(Block(number, 0, 3), 3).lengths) == 1

        assert max(len(held) for held in vars(reader).values() if isinstance(held, dict)) < 10


def test_close_ends_a_wait_for_the_next_try(fake, monkeypatch):
    """It would last for minutes."""
    failed = threading.Event()

    def answer(start: int, stop: int) -> bytes:
        failed.set()
        raise StoreError("transient", "away", retry_after_s=600)

    monkeypatch.setattr(fake, "answer", answer)
    many = reads(retry_timeout_s=600)
    future = many.start(many.fetch, STAMP, 0, 10)
    assert failed.wait(240)
    many.close()

    with pytest.raises(SourceError, match="^AD326 "):
        future.result(60)


# Of a host of http, by obstore


@pytest.fixture
def host() -> Iterator[HttpHost]:
    found = HttpHost()
    yield found
    found.close()


def opened(host: HttpHost, **limits: float) -> tuple[Reads, ObjectStamp]:
    given_address = GivenAddress.parse(host.put("/folder/a b.bin", DATA))
    many = Reads([store_spec(given_address, limits)])
    return many, many.head(0, given_address.address)


def once(answer: Answer) -> Callable[[object], Answer | None]:
    left = iter([answer])
    return lambda _: next(left, None)


TRANSIENT = {
    **{str(status): Answer(status, b"busy") for status in (408, 429, 500, 502, 503, 504)},
    "cut": Answer(cut_to=50),
    "nothing": Answer(cut_to=0),
    "a wrong range": Answer(206, DATA[:100], {"content-range": f"bytes 0-99/{len(DATA)}"}),
    "a short body": Answer(206, DATA[1000:1050], {"content-range": f"bytes 1000-1049/{len(DATA)}"}),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_each_transient_fault_costs_one_more_try_and_no_byte(host, name):
    many, stamp = opened(host)
    with closing(many):
        host.answer = once(TRANSIENT[name])
        assert many.read([(stamp, 1000, 1100)]) == [DATA[1000:1100]]

    assert many.counts.num_retried == 1


@pytest.mark.parametrize("status", [400, 401, 403])
def test_each_refusal_is_an_error_at_once(host, status):
    many, stamp = opened(host)
    with closing(many):
        host.answer = once(Answer(status, b"no"))
        with pytest.raises(SourceError, match=f"^AD32[45] .*status {status}"):
            many.read([(stamp, 1000, 1100)])


def test_every_read_carries_the_etag(host):
    many, stamp = opened(host)
    with closing(many):
        many.read([(stamp, start, start + 10) for start in range(0, 100_000, 20_000)])

    assert {request.headers.get("if-match") for request in host.requests if request.method == "GET"} == {stamp.etag}


def test_an_answer_with_another_etag_is_refused_where_a_host_ignores_the_condition(host):
    many, stamp = opened(host)
    with closing(many):
        host.answer = lambda _: Answer(206, headers={"etag": '"other"'})
        with pytest.raises(SourceChangedError, match="^AD322 "):
            many.read([(stamp, 1000, 1100)])


def test_an_object_that_became_longer_or_was_deleted_is_another_one(host):
    many, stamp = opened(host)
    with closing(many):
        host.objects["/folder/a b.bin"] = DATA + b"more"
        with pytest.raises(SourceChangedError, match=f"^AD322 .* now it is {len(DATA) + 4} bytes"):
            many.read([(stamp, 1000, 1100)])
        del host.objects["/folder/a b.bin"]
        with pytest.raises(SourceChangedError, match="^AD322 .* now it is gone"):
            many.read([(stamp, 1000, 1100)])


def test_a_fork_of_a_process_that_has_read_refuses_to_read(host, monkeypatch):
    """It would wait for ever: obstore's threads are not there."""
    many, _ = opened(host)
    many.close()
    monkeypatch.setattr("asyncdata.sources.remote.obstore_store._first_user", [os.getpid() - 1])
    with pytest.raises(ConfigError, match="^AD321 .*fork.*spawn"):
        opened(host)
