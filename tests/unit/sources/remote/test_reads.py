"""Reads of objects, many at a time: neighbours in one request, bounded, tried again, and named when they fail."""

import errno
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncdata.core.files import locked
from asyncdata.errors import SourceChangedError, SourceError
from tests.support import parts
from tests.support.loading import NEVER_S
from tests.support.stores import FakeStore

DATA = bytes(range(256)) * 400
STAMP = parts.ObjectStamp(parts.Address("s3", "bucket", "folder/key"), len(DATA), '"old"')

ranges_of_an_object = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.integers(1, 1 << 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=40
)


@given(ranges_of_an_object)
@example([(n * 1000, n * 1000 + 1200) for n in range(100)])
@example([(n << 20, (n << 20) + 1200) for n in range(100)])
@example([(0, 10), (10 + (16 << 10), 20 + (16 << 10)), (21 + (32 << 10), 30 + (32 << 10))])
@example([(0, 4 << 20), (4 << 20, (4 << 20) + 1)])
def test_requests_cover_each_range_once_and_read_little_more(ranges):
    pieces = parts.coalesced(ranges)

    assert sorted(number for piece in pieces for number in piece.ranges) == list(range(len(ranges)))
    for piece in pieces:
        inside = sorted(ranges[number] for number in piece.ranges)
        assert (piece.start, piece.stop) == (inside[0][0], max(stop for _, stop in inside))
        assert piece.stop - piece.start <= 4 << 20
        ends = [max(stop for _, stop in inside[: n + 1]) for n in range(len(inside))]
        assert all(start - end <= 16 << 10 for end, (start, _) in zip(ends, inside[1:], strict=False))
    for piece, after in zip(pieces, pieces[1:], strict=False):
        first = min(ranges[number] for number in after.ranges)
        is_far = first[0] - piece.stop > 16 << 10
        assert is_far or max(piece.stop, first[1]) - piece.start > 4 << 20, "one request would do"


@pytest.fixture
def fake(monkeypatch) -> type[FakeStore]:
    monkeypatch.setattr(FakeStore, "answer", lambda start, stop: DATA[start:stop])
    for name in ("in_flight", "most", "most_bytes", "num_bytes"):
        monkeypatch.setattr(FakeStore, name, 0)
    parts.change(monkeypatch, first_wait_s=0.0)
    return FakeStore


def reads(**limits: float) -> parts.Reads:
    limited = parts.ReadLimits(**limits)  # type: ignore[arg-type]
    return parts.Reads([parts.StoreSpec("tests.support.stores:FakeStore", "", {}, limited)])


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
    for longer, most in (([], range(400, 801)), ([5000], [5000])):
        fake.most_bytes = 0
        ends = [(start, start + 400) for start in range(0, 40_000, 400)] + [(0, size) for size in longer]
        with closing(reads(max_bytes=1000)) as many:
            found = [many.start(many.fetch, STAMP, *one) for one in ends]
            assert [future.result() for future in found] == [DATA[start:stop] for start, stop in ends]
        assert fake.most_bytes in most


def test_a_store_that_asks_for_a_longer_wait_than_there_is_time_is_not_waited_for_so_long(fake, monkeypatch):
    """Its ``Retry-After`` may be an hour, and ``retry_timeout_s`` a minute."""
    later = parts.StoreError("transient", "status 429", retry_after_s=3600)
    monkeypatch.setattr(fake, "answer", Mock(side_effect=later))
    with closing(reads(retry_timeout_s=0.1)) as many, pytest.raises(SourceError, match="^AD326 .*: status 429"):
        many.read([(STAMP, 10, 20)])


def test_a_store_that_asks_for_a_wait_is_left_alone_for_so_long(fake, monkeypatch):
    waits, later = list[float](), parts.StoreError("transient", "status 429", retry_after_s=7)
    monkeypatch.setattr(fake, "answer", Mock(side_effect=[later, DATA[10:20]]))
    with closing(reads(retry_timeout_s=60)) as many:
        monkeypatch.setattr(many._is_closed, "wait", waits.append)  # noqa: SLF001 - where it waits
        assert many.read([(STAMP, 10, 20)]) == [DATA[10:20]]

    assert waits == [7]


def test_close_ends_a_wait_for_the_next_try(fake, monkeypatch):
    failed = threading.Event()

    def answer(start: int, stop: int) -> bytes:
        failed.set()
        raise parts.StoreError("transient", "away", retry_after_s=600)

    monkeypatch.setattr(fake, "answer", answer)
    many = reads(retry_timeout_s=600)
    future = many.start(many.fetch, STAMP, 0, 10)
    assert failed.wait(240)
    many.close()

    with pytest.raises(SourceError, match="^AD326 "):
        future.result(60)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("denied", "^AD324 .* may not be accessed with the present credentials: no; pass others by .*storage_options$"),
        ("permanent", "^AD325 .* was refused by the store: no$"),
        ("missing", "^AD323 .* does not exist: no; check the address$"),
        ("transient", "^AD326 .* could not be accessed: no; the run resumes .* when the store is back$"),
    ],
)
def test_an_error_ends_with_the_way_out_and_fits_reads_and_writes(fake, monkeypatch, kind, wanted):
    monkeypatch.setattr(FakeStore, "write", Mock(side_effect=parts.StoreError(kind, "no")), raising=False)
    with closing(reads(retry_timeout_s=0)) as many, pytest.raises(SourceError, match=wanted):
        many.write(0, STAMP.address, DATA)


@pytest.mark.parametrize(
    ("kind", "code"), [("denied", "AD324"), ("permanent", "AD325"), ("changed", "AD322"), ("missing", "AD322")]
)
def test_other_failures_are_not_tried_again(fake, monkeypatch, kind, code):
    failed = parts.StoreError(kind, "no", request_id="RQ-18")
    monkeypatch.setattr(fake, "answer", Mock(side_effect=[failed, DATA[10:20]]))
    with closing(reads()) as many, pytest.raises(SourceError, match=f"^{code} ") as caught:
        many.read([(STAMP, 10, 20)])

    assert "bytes 10-20" in str(caught.value)
    assert "RQ-18" in str(caught.value)
    if code == "AD322":
        assert isinstance(caught.value, SourceChangedError)
        assert f'at the start it was {len(DATA)} bytes, etag "old"; now it is 7 bytes, etag "new"' in str(caught.value)


@pytest.mark.parametrize(("kind", "now"), [("missing", "now it is gone"), ("denied", "now it is not known, .*403")])
def test_a_replaced_object_is_said_to_be_gone_only_if_the_store_says_so(fake, monkeypatch, kind, now):
    monkeypatch.setattr(fake, "answer", Mock(side_effect=parts.StoreError("changed", "status 412")))
    monkeypatch.setattr(fake, "head", Mock(side_effect=parts.StoreError(kind, "status 403")))
    with closing(reads()) as many, pytest.raises(SourceChangedError, match=f"^AD322 .*{now}"):
        many.read([(STAMP, 10, 20)])


# Blocks on the local disk: what is found is right, the limit holds, and faults cost only speed


MIB = 1 << 20
ADDRESS = parts.Address("s3", "bucket", "rows/part-0.jsonl")
OBJECT = parts.ObjectStamp(ADDRESS, 1 << 30, '"v1"')


def block(number: int) -> bytes:
    return random.Random(number).randbytes(5000)


def keep(cache: parts.BlockCache, *numbers: int) -> None:
    for number in numbers:
        cache.keep(OBJECT, number * 5000, (number + 1) * 5000, block(number))


def found(cache: parts.BlockCache, *numbers: int) -> list[int]:
    there = [number for number in numbers if find(cache, number) is not None]
    assert all(find(cache, number) == block(number) for number in there)
    return there


def find(cache: parts.BlockCache, number: int) -> bytes | None:
    return cache.find(OBJECT, number * 5000, (number + 1) * 5000)


def used_at(cache: parts.BlockCache, number: int, time_ns: int) -> None:
    """Not all systems tell files apart that were used within some milliseconds."""
    os.utime(cache._path(OBJECT, number * 5000, (number + 1) * 5000), ns=(0, time_ns))  # noqa: SLF001 - where it lies


def failures_of(cache: parts.BlockCache) -> list[int]:
    failures: list[int] = []
    cache.on_failure = lambda: failures.append(1)
    return failures


@pytest.fixture
def cache(tmp_path) -> parts.BlockCache:
    return parts.BlockCache(str(tmp_path), MIB)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*"))


def size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files(folder))


OTHERS = [parts.Address("s3", "another", ADDRESS.key), parts.Address("s3", "bucket", "rows/part-1.jsonl")]


@pytest.mark.parametrize(
    "changed",
    [{"etag": '"v2"'}, {"num_bytes": 1 << 20}, {"version": "version-7"}, *({"address": other} for other in OTHERS)],
)
def test_a_block_of_another_object_or_another_state_of_it_is_not_found(cache, changed):
    keep(cache, 0)

    assert cache.find(replace(OBJECT, **changed), 0, 5000) is None
    assert cache.find(OBJECT, 0, 4999) is None
    assert cache.find(OBJECT, 1, 5001) is None


def test_the_least_recently_used_blocks_are_removed_and_the_limit_holds(cache, tmp_path):
    for number in range(250):  # of 8 KiB each on the disk: twice the limit
        keep(cache, number)
        used_at(cache, number, 2 * number)
        if number >= 10:
            assert find(cache, 3) == block(3), number  # used all the time
            used_at(cache, 3, 2 * number + 1)
        if number % 10 == 0:
            assert size(tmp_path) <= MIB

    there = found(cache, *range(250))
    assert there[0] == 3
    assert there[1:] == list(range(there[1], 250))  # the youngest
    assert len(there) > 60


def test_a_block_that_is_too_large_for_the_limit_is_passed_over(cache, tmp_path):
    cache.keep(OBJECT, 0, MIB, bytes(MIB))

    assert (cache.find(OBJECT, 0, MIB), files(tmp_path)) == (None, [])


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"long" * 8])
def test_a_tally_that_is_damaged_or_gone_is_counted_anew(tmp_path, damage):
    keep(parts.BlockCache(str(tmp_path), MIB), *range(100))
    (tmp_path / "used").write_bytes(damage)
    cache = parts.BlockCache(str(tmp_path), MIB)
    keep(cache, *range(100, 300))

    assert found(cache, 299) == [299]
    assert size(tmp_path) <= MIB


def test_a_full_disk_costs_only_speed(cache, tmp_path, monkeypatch):
    failures, write = failures_of(cache), os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 100:
            return write(fd, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        keep(cache, 0, 1)
    assert (found(cache, 0, 1), files(tmp_path), failures) == ([], [], [1, 1])
    keep(cache, 0)
    assert found(cache, 0) == [0]


def test_a_folder_that_is_removed_or_no_folder_costs_only_speed(tmp_path):
    folder = tmp_path / "blocks"
    cache = parts.BlockCache(str(folder), MIB)
    keep(cache, 0)
    shutil.rmtree(folder)
    assert found(cache, 0) == []
    keep(cache, 0)
    assert found(cache, 0) == [0]
    shutil.rmtree(folder)
    folder.write_text("a file in its place")
    failures = failures_of(cache)
    keep(cache, *range(100))
    assert found(cache, 0) == []
    assert failures


def test_a_link_or_a_file_that_others_may_write_is_not_read(cache, tmp_path):
    keep(cache, 0, 1)
    one, other = files(tmp_path)
    one.rename(tmp_path / "elsewhere")
    one.symlink_to(tmp_path / "elsewhere")
    other.chmod(0o666)
    failures = failures_of(cache)

    assert (found(cache, 0, 1), failures) == ([], [1, 1])


def test_another_process_that_makes_room_is_not_waited_for(cache, tmp_path):
    """One part of the limit is taken meanwhile, and counted at the next time."""
    other = parts.BlockCache(str(tmp_path), MIB)
    keep(cache, 0)
    with locked(str(tmp_path / "used")) as is_locked:
        assert is_locked
        keep(other, 1, 2)
        assert found(cache, 0, 1, 2) == [0, 1]
    before = int.from_bytes((tmp_path / "used").read_bytes(), "little")
    keep(other, 3)
    assert found(cache, 3) == [3]
    assert int.from_bytes((tmp_path / "used").read_bytes(), "little") == before + 2 * 8192


def test_no_block_is_passed_over_while_another_thread_makes_room(cache, monkeypatch):
    makes_room, is_asked, reserve = threading.Event(), threading.Event(), cache._reserve  # noqa: SLF001

    def slowly(num_bytes: int) -> int:
        makes_room.set()
        assert is_asked.wait(NEVER_S)
        return reserve(num_bytes)

    monkeypatch.setattr(cache, "_reserve", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(keep, cache, 0)
        assert makes_room.wait(NEVER_S)
        second = threads.submit(keep, cache, 1)
        assert not second.done()
        is_asked.set()
        first.result(), second.result()
    assert found(cache, 0, 1) == [0, 1]
