"""A process that writes blocks may die at any of its calls to the system, at any byte: what others find is right."""

from __future__ import annotations

import os
import random
import tempfile
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core.object_address import Address
from asyncdata.sources.remote.block_cache import BlockCache
from asyncdata.sources.remote.store import ObjectStamp

pytestmark = pytest.mark.thorough

OBJECT = ObjectStamp(Address("s3", "bucket", "rows.jsonl"), 1 << 30, '"v1"')
MAX_BYTES = 160 << 10
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


def block(number: int) -> bytes:
    return random.Random(number).randbytes(3000 + number)


def check(cache: BlockCache, number: int) -> bool:
    data = cache.find(OBJECT, 4000 * number, 4000 * number + 3000 + number)
    assert data is None or data == block(number)
    return data is not None


def keep(cache: BlockCache, number: int) -> None:
    cache.keep(OBJECT, 4000 * number, 4000 * number + 3000 + number, block(number))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 300), st.integers(0, 3100)),
        min_size=1,
        max_size=5,
    )
)
def test_a_writer_that_dies_anywhere_leaves_only_whole_blocks_and_the_limit(lives):
    with tempfile.TemporaryDirectory() as folder:
        for numbers, last, num_bytes in lives:
            todo = deque(numbers)
            with Mortal(last, num_bytes):
                cache = BlockCache(folder, MAX_BYTES)
                try:
                    while todo:
                        keep(cache, todo.popleft())
                        check(cache, numbers[0])
                except Killed:
                    pass
            for number in range(61):
                check(BlockCache(folder, MAX_BYTES), number)
            sizes = [os.stat(os.path.join(top, name)).st_size for top, _, names in os.walk(folder) for name in names]
            assert sum(-(-size // 4096) * 4096 for size in sizes) <= MAX_BYTES + 4096  # and the tally

        survivor = BlockCache(folder, MAX_BYTES)
        keep(survivor, 7)
        assert check(survivor, 7)
