"""Blocks on the local disk: what is found is always right, the limit holds, and faults of the disk cost only speed."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core.file_lock import locked
from asyncdata.core.object_address import Address
from asyncdata.sources.remote.block_cache import BlockCache
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
ADDRESS = Address("s3", "bucket", "rows/part-0.jsonl")
OBJECT = ObjectStamp(ADDRESS, 1 << 30, '"v1"')


def block(number: int, num_bytes: int = 5000) -> bytes:
    return random.Random(number).randbytes(num_bytes)


def keep(cache: BlockCache, *numbers: int) -> None:
    for number in numbers:
        cache.keep(OBJECT, number * 5000, (number + 1) * 5000, block(number))


def found(cache: BlockCache, *numbers: int) -> list[int]:
    """Those that are there."""
    there = [number for number in numbers if find(cache, number) is not None]
    assert all(find(cache, number) == block(number) for number in there)
    return there


def find(cache: BlockCache, number: int) -> bytes | None:
    return cache.find(OBJECT, number * 5000, (number + 1) * 5000)


def used_at(cache: BlockCache, number: int, time_ns: int) -> None:
    """Not all systems tell files apart that were used within some milliseconds."""
    os.utime(cache._path(OBJECT, number * 5000, (number + 1) * 5000), ns=(0, time_ns))  # noqa: SLF001 - where it lies


def failures_of(cache: BlockCache) -> list[int]:
    """A 1 for each failure from now on."""
    failures: list[int] = []
    cache.on_failure = lambda: failures.append(1)
    return failures


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*"))


def size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files(folder))


def test_a_block_that_was_kept_is_found_also_by_another_process(tmp_path):
    one, other = BlockCache(str(tmp_path / "blocks"), MIB), BlockCache(str(tmp_path / "blocks"), MIB)
    assert found(one, 1, 2) == []
    keep(one, 1, 2)

    assert found(other, 1, 2, 3) == [1, 2]


@pytest.mark.parametrize(
    "other",
    [
        ObjectStamp(ADDRESS, 1 << 30, '"v2"'),
        ObjectStamp(ADDRESS, 1 << 20, '"v1"'),
        ObjectStamp(ADDRESS, 1 << 30, '"v1"', "version-7"),
        ObjectStamp(Address("s3", "another", ADDRESS.key), 1 << 30, '"v1"'),
        ObjectStamp(Address("s3", "bucket", "rows/part-1.jsonl"), 1 << 30, '"v1"'),
    ],
)
def test_a_block_of_another_object_or_another_state_of_it_is_not_found(tmp_path, other):
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, 0)

    assert cache.find(other, 0, 5000) is None
    assert cache.find(OBJECT, 0, 4999) is None
    assert cache.find(OBJECT, 1, 5001) is None


@pytest.mark.parametrize("how", ["cut", "longer", "one bit", "of another block", "empty"])
def test_a_damaged_block_is_never_given_and_is_kept_anew(tmp_path, how):
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, 0)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    keep(cache, 1)
    (another,) = {*files(tmp_path)} - {path}
    spoiled = {
        "cut": data[:-1],
        "longer": data + b"x",
        "one bit": bytes([data[0] ^ 1]) + data[1:],
        "of another block": another.read_bytes(),
        "empty": b"",
    }
    path.write_bytes(spoiled[how])
    failures = failures_of(cache)

    assert find(cache, 0) is None
    assert failures == [1]
    keep(cache, 0)
    assert find(cache, 0) == block(0)


def test_the_least_recently_used_blocks_are_removed_and_the_limit_holds(tmp_path):
    cache = BlockCache(str(tmp_path), MIB)
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


@pytest.mark.thorough
def test_many_processes_stay_below_the_limit_together(tmp_path):
    caches = [BlockCache(str(tmp_path), 4 * MIB) for _ in range(64)]
    for number in range(700):
        keep(caches[number % 64], number)
        if number % 50 == 0:
            assert size(tmp_path) <= 4 * MIB

    assert size(tmp_path) <= 4 * MIB
    assert len(found(caches[0], *range(700))) > 250


def test_a_block_that_is_too_large_for_the_limit_is_passed_over(tmp_path):
    cache = BlockCache(str(tmp_path), MIB)
    cache.keep(OBJECT, 0, MIB, bytes(MIB))

    assert cache.find(OBJECT, 0, MIB) is None
    assert files(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [b"", b"x", b"\xff" * 8, b"\0" * 8, b"long" * 8])
def test_a_tally_that_is_damaged_or_gone_is_counted_anew(tmp_path, damage):
    keep(BlockCache(str(tmp_path), MIB), *range(100))
    (tmp_path / "used").write_bytes(damage)
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, *range(100, 300))

    assert found(cache, 299) == [299]
    if damage != b"\0" * 8:  # one that says too little is right again when the limit is reached
        assert size(tmp_path) <= MIB
    assert size(tmp_path) <= 2 * MIB


def test_a_full_disk_costs_only_speed(tmp_path, monkeypatch):
    cache = BlockCache(str(tmp_path), MIB)
    failures = failures_of(cache)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 100:
            return write(fd, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        keep(cache, 0, 1)
    assert found(cache, 0, 1) == []
    assert files(tmp_path) == []
    assert failures == [1, 1]
    keep(cache, 0)
    assert found(cache, 0) == [0]


def test_a_folder_that_is_removed_or_no_folder_costs_only_speed(tmp_path):
    folder = tmp_path / "blocks"
    cache = BlockCache(str(folder), MIB)
    keep(cache, 0)
    shutil.rmtree(folder)
    assert found(cache, 0) == []
    keep(cache, 0)
    assert found(cache, 0) == [0]
    shutil.rmtree(folder)
    folder.write_text("a file in its place")
    assert found(cache, 0) == []
    failures = failures_of(cache)
    keep(cache, *range(100))
    assert failures


def test_a_link_or_a_file_that_others_may_write_is_not_read(tmp_path):
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, 0, 1)
    one, other = files(tmp_path)
    one.rename(tmp_path / "elsewhere")
    one.symlink_to(tmp_path / "elsewhere")
    other.chmod(0o666)
    failures = failures_of(cache)

    assert found(cache, 0, 1) == []
    assert failures == [1, 1]


def test_another_process_that_makes_room_is_not_waited_for(tmp_path):
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, 0)
    with locked(str(tmp_path / "used")) as is_locked:
        assert is_locked
        keep(BlockCache(str(tmp_path), MIB), 1)
        assert found(cache, 0, 1) == [0]


def test_names_and_files_have_no_address_in_them(tmp_path):
    cache = BlockCache(str(tmp_path), MIB)
    keep(cache, 0)

    text = " ".join(map(str, files(tmp_path))) + files(tmp_path)[0].read_bytes().decode("latin-1")
    assert not any(word in text for word in ("bucket", "part-0", "v1"))
    assert files(tmp_path)[0].stat().st_mode & 0o777 == 0o600


# A writer that dies at any of its calls to the system, at any byte


CALLS = ("open", "write", "pwrite", "close", "replace", "makedirs", "unlink", "utime")


class Killed(BaseException):
    """The process has died: nothing of it runs any more."""


class Mortal:
    """Makes the calls of :data:`CALLS` until the ``last`` one, of which a write may write a part; then all fail."""

    def __init__(self, last: int, num_bytes: int) -> None:
        self.left, self._num_bytes = last, num_bytes
        self._calls = {name: getattr(os, name) for name in CALLS}
        self._open: set[int] = set()

    def __enter__(self) -> Mortal:
        for name in CALLS:
            setattr(os, name, lambda *args, _name=name, **kwargs: self._call(_name, *args, **kwargs))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(os, name, call)
        for fd in self._open:  # the system closes them, and so frees locks
            with suppress(OSError):  # a file object has closed it
                os.close(fd)

    def _call(self, name: str, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise Killed

        if self.left == 0 and name in {"write", "pwrite"}:
            self._calls["write" if name == "write" else "pwrite"](args[0], bytes(args[1])[: self._num_bytes], *args[2:])
            raise Killed

        result = self._calls[name](*args, **kwargs)
        if name == "open":
            self._open.add(result)
        elif name == "close":
            self._open.discard(args[0])
        return result


@pytest.mark.thorough
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 300), st.integers(0, 6000)),
        min_size=1,
        max_size=5,
    )
)
def test_a_writer_that_dies_anywhere_leaves_only_whole_blocks_and_the_limit(tmp_path_factory, lives):
    folder, max_bytes = tmp_path_factory.mktemp("blocks"), 160 << 10
    for numbers, last, num_bytes in lives:
        todo = deque(numbers)
        with Mortal(last, num_bytes), suppress(Killed):
            cache = BlockCache(str(folder), max_bytes)
            while todo:
                keep(cache, todo.popleft())
                found(cache, numbers[0])
        found(BlockCache(str(folder), max_bytes), *range(61))  # each is right, if it is there
        assert size(folder) <= max_bytes + 4096  # and the tally

    survivor = BlockCache(str(folder), max_bytes)
    keep(survivor, 7)
    assert found(survivor, 7) == [7]
