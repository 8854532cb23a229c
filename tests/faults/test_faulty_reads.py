"""Short and late reads change nothing. A failed read is named in the error, and a resumed run continues after it."""

import contextlib
import errno
import io
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from asyncdata import DataLoader, Shuffle
from asyncdata.errors import EndOfData, SourceError
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S
from tests.support.sources import KINDS, make_rows
from tests.support.tokenize_fns import row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=3, full=25)
NUM_ROWS = 300
EPOCHS = 2
SLOW_S = 0.0005
SHUFFLE = Shuffle(block_bytes=1024, window_blocks=8)
WAYS = {kind: (kind, {}) for kind in ("a JSONL file", "JSONL files", "a gzip file", "zstd files", "a JSON array")}
WAYS["a JSONL file, by its index"] = ("a JSONL file", {"shuffle": "full", "cache": {"folder": ""}})
"""Those whose reads go through Python; Parquet and Arrow files are read by their own libraries."""


class Reads:
    """Reads of the library in this process: ``short`` or ``slow`` ones, or one that fails.

    :param fail_at: the number of the read that raises ``error``, from 1.
    """

    def __init__(self, how: str = "", fail_at: int = 0, error: OSError | None = None) -> None:
        self.number = self.num_faults = 0
        self._how, self._fail_at, self._error = how, fail_at, error
        self._chance = random.Random(0)

    def read(self, num_bytes: int, read: Callable[[int], bytes]) -> bytes:
        """Read at most ``num_bytes``, as it goes."""
        self.number += 1
        if self.number == self._fail_at and self._error is not None:
            self.num_faults += 1
            raise self._error

        self.num_faults += bool(self._how) and num_bytes > 1
        if self._how == "slow":
            time.sleep(SLOW_S * self._chance.random())
        return read(self._chance.randrange(1, num_bytes) if self._how == "short" and num_bytes > 1 else num_bytes)


@contextlib.contextmanager
def faulty(how: str = "", **settings: Any) -> Iterator[Reads]:
    reads, pread = Reads(how, **settings), os.pread

    class FaultyFile(io.FileIO):
        def read(self, num_bytes: int | None = -1) -> bytes:
            assert num_bytes is not None
            return super().read(num_bytes) if num_bytes < 0 else reads.read(num_bytes, super().read)

    def faulty_pread(fd: int, num_bytes: int, offset: int) -> bytes:
        return reads.read(num_bytes, lambda number: pread(fd, number, offset))

    def faulty_open(fd: int, _mode: str, buffering: int, closefd: bool) -> FaultyFile:
        assert buffering == 0
        return FaultyFile(fd, closefd=closefd)

    with patch("os.pread", faulty_pread), patch("asyncdata.sources.text_stream.open", faulty_open, create=True):
        yield reads


@pytest.fixture(params=WAYS)
def way(request, tmp_path) -> tuple[Any, dict[str, Any]]:
    kind, knobs = WAYS[request.param]
    for module in KINDS[kind].needs:
        pytest.importorskip(module)
    return KINDS[kind].write(tmp_path, make_rows(NUM_ROWS)), knobs


def make(source: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "epochs": EPOCHS, "num_workers": 0, "timeout_s": NEVER_S}
    return DataLoader(source, **settings | knobs)


def rest_of(loader: DataLoader, found: list[tuple[Any, ...]]) -> None:
    """Append what comes until the end, or until an error; it comes out of here."""
    is_ended = False
    while not is_ended:
        try:
            samples = loader.get_next_batch(10)
        except EndOfData as end:
            samples, is_ended = end.samples, True
        found += [(sample.index, *sample.tokens.tolist()) for sample in samples]


def all_of(source: Any, **knobs: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with make(source, **knobs) as loader:
        rest_of(loader, found)
    return found


@pytest.mark.parametrize("how", ["short", "slow"])
def test_short_and_slow_reads_change_nothing(way, how):
    source, knobs = way
    expected = all_of(source, **knobs)
    assert len(expected) == NUM_ROWS * EPOCHS
    with faulty(how) as reads:
        assert all_of(source, **knobs) == expected

    assert reads.num_faults > 0
    record("IO", f"{how} reads", faults=reads.num_faults, lost=0, repeated=0)


@pytest.mark.parametrize("code", [errno.EIO, pytest.param(errno.ESTALE, marks=pytest.mark.slow)])
def test_a_read_that_fails_is_named_and_a_resume_goes_on_with_the_next_sample(way, code):
    source, knobs = way
    expected, error = all_of(source, **knobs), OSError(code, os.strerror(code))
    with faulty() as quiet:
        all_of(source, **knobs)
    places = sorted({1 + place * quiet.number // ROUNDS for place in range(ROUNDS)})
    paths = [source] if isinstance(source, str) else source
    num_failed = 0
    for place in places:
        found: list[tuple[Any, ...]] = []
        state, loader = None, None
        with faulty(fail_at=place, error=error) as reads:
            try:
                with make(source, **knobs) as loader:
                    try:
                        rest_of(loader, found)
                    finally:
                        state = json.dumps(loader.state_dict())
            except SourceError as raised:
                num_failed += 1
                assert os.strerror(code) in str(raised)
                if loader is not None:  # else it was to be looked at first
                    assert any(path in str(raised) for path in paths)
                    assert "at byte" in str(raised)
        assert reads.num_faults == 1
        assert found == expected[: len(found)], place
        if state is not None:
            with make(source, **knobs) as loader:
                loader.load_state_dict(json.loads(state))
                rest_of(loader, found)
            assert found == expected, place

    record("IO", "failed reads, and resumes", faults=len(places), lost=0, repeated=0, unnamed=0)
    say(f"{len(places)} reads failed with {errno.errorcode[code]}; {num_failed} were told; all resumed")
