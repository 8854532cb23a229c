"""Reads that fail, files that change, stores that fail in every way: what is delivered is D, to its end or to an error.

An error names what failed and where; nothing of another content is ever delivered in its name.
"""

import contextlib
import errno
import io
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from asyncdata import Cache, DataLoader, HuggingFaceSource, JsonlSource
from asyncdata.errors import EndOfData, SourceError
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.examples import each_value
from tests.support.faults import num_rounds, record
from tests.support.loaders import make
from tests.support.loading import NEVER_S, id_and_text, row_id
from tests.support.servers import SPOILED, STATUSES, FaultProxy, Faults, HttpServer, Request, Response, ranged
from tests.support.sources import KINDS, frames, jsonl, make_rows, members

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]


READ_ROUNDS = num_rounds(quick=3, full=25)
READ_ROWS = 300
EPOCHS = 2
SLOW_S = 0.0005
READ_WAYS = {kind: (kind, {}) for kind in ("a JSONL file", "JSONL files", "a gzip file", "zstd files", "a JSON array")}
READ_WAYS["a JSONL file, by its index"] = ("a JSONL file", {"shuffle": "full", "cache": {"folder": ""}})
"""Those whose reads go through Python; Parquet and Arrow files are read by their own libraries."""


class Reads:
    """Reads of the library in this process: ``short`` or ``slow`` ones, or one that fails, counted from 1."""

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
            return super().read(num_bytes) if num_bytes < 0 else reads.read(num_bytes, super().read)

    def faulty_pread(fd: int, num_bytes: int, offset: int) -> bytes:
        return reads.read(num_bytes, lambda number: pread(fd, number, offset))

    def faulty_open(fd: int, _mode: str, buffering: int, closefd: bool) -> FaultyFile:
        assert buffering == 0
        return FaultyFile(fd, closefd=closefd)

    with patch("os.pread", faulty_pread), patch("asyncdata.sources.text_stream.open", faulty_open, create=True):
        yield reads


@pytest.fixture(params=READ_WAYS)
def way(request, tmp_path) -> tuple[Any, dict[str, Any]]:
    kind, knobs = READ_WAYS[request.param]
    for module in KINDS[kind].needs:
        pytest.importorskip(module)
    return KINDS[kind].write(tmp_path, make_rows(READ_ROWS)), knobs


def opened(source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    return make(source, tokenize_fn, **{"shuffle": SHUFFLE, "epochs": EPOCHS} | knobs)


def take(loader: DataLoader, found: list[Any], stop: int = 1 << 62) -> None:
    """Append what comes until ``stop`` are there, until the end, or until an error, which comes out of here."""
    while len(found) < stop:
        try:
            samples = loader.get_next_batch(10)
        except EndOfData as end:
            samples, stop = end.samples, 0
        found += [(sample.index, *sample.tokens.tolist()) for sample in samples]


def all_of(source: Any, **knobs: Any) -> list[Any]:
    found: list[Any] = []
    with opened(source, **knobs) as loader:
        take(loader, found)
    return found


@pytest.mark.parametrize("how", ["short", "slow"])
def test_short_and_slow_reads_change_nothing(way, how):
    source, knobs = way
    expected = all_of(source, **knobs)
    assert len(expected) == READ_ROWS * EPOCHS
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
    places = sorted({1 + place * quiet.number // READ_ROUNDS for place in range(READ_ROUNDS)})
    paths = [source] if isinstance(source, str) else source
    for place in places:
        found, state, loader = [], None, None
        with faulty(fail_at=place, error=error) as reads:
            try:
                with opened(source, **knobs) as loader:
                    try:
                        take(loader, found)
                    finally:
                        state = json.dumps(loader.state_dict())
            except SourceError as raised:
                assert os.strerror(code) in str(raised)
                if loader is not None:  # else it was to be looked at first
                    assert any(path in str(raised) for path in paths)
                    assert "at byte" in str(raised)
        assert reads.num_faults == 1
        assert found == expected[: len(found)], place
        if state is not None:
            with opened(source, **knobs) as loader:
                loader.load_state_dict(json.loads(state))
                take(loader, found)
            assert found == expected, place

    record("IO", "failed reads, and resumes", faults=len(places), lost=0, repeated=0, unnamed=0)


CHANGE_ROUNDS = num_rounds(quick=1, full=10)
CODES = ("AD302", "AD303", "AD304", "AD121", "AD122", "AD120", "AD128")
FIRST, OTHER = 100_000, 500_000
"""The ids of the rows at the start, and of other rows, which take as many bytes."""


def lines(ids: range) -> bytes:
    return jsonl({"id": number, "pad": "x" * (30 + number % 50)} for number in ids)


def zipped(ids: range) -> bytes:
    """Stored and not compressed, so that other rows of these lengths take as many bytes."""
    return members((lines(ids[start : start + 500]) for start in range(0, len(ids), 500)), level=0)


def parquet(ids: range) -> bytes:
    """Without what follows from the values: another file of the same size has the same footer."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = pa.BufferOutputStream()
    layout = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"id": list(ids)}), out, row_group_size=100, **layout)
    return bytes(out.getvalue())


def arrow(ids: range) -> bytes:
    """The file of a dataset as ``save_to_disk`` writes it."""
    pa = pytest.importorskip("pyarrow")
    table, out = pa.table({"id": list(ids)}), pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


class Way(NamedTuple):
    """A file of rows: its name, how it is made, how many rows fill several reads, and the knobs of its loader."""

    name: str
    make: Callable[[range], bytes]
    num_rows: int
    knobs: dict[str, Any] = {}

    def loader(self, path: Path, **knobs: Any) -> DataLoader:
        is_arrow = self.make is arrow
        source: Any = HuggingFaceSource("arrow", data_files=str(path), split="train") if is_arrow else str(path)
        return opened(source, **self.knobs | knobs)


FILES = {
    "JSONL": Way("rows.jsonl", lines, 1500),
    "JSONL, by its index": Way("rows.jsonl", lines, 1500, {"shuffle": "full", "cache": {"folder": ""}}),
    "Parquet": Way("rows.parquet", parquet, 2000),
    "a dataset": Way("rows.arrow", arrow, 2000),
    "gzip": Way("rows.jsonl.gz", zipped, 6000),
    "zstd": Way("rows.jsonl.zst", lambda ids: frames([lines(ids)]), 6000),
    "a JSON array": Way("rows.json", lambda ids: json.dumps([{"id": number} for number in ids]).encode(), 20_000),
}


def write_over(path: Path, data: bytes, *, keeps_time: bool = False) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").replace(path)


def append(path: Path, _: bytes) -> None:
    with path.open("ab") as file:
        file.write(b'{"id": 10000}\n' * 100)


# How a file is changed, given other rows that take as many bytes, and whether its rows are still those of the start.
CHANGES: dict[str, tuple[Callable[[Path, bytes], Any], bool]] = {
    "its mode": (lambda path, _: path.chmod(0o640), True),
    "another link": (lambda path, _: path.with_name("link").hardlink_to(path), True),
    "its time": (lambda path, _: os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9)), True),
    "grown": (append, True),
    "edited": (write_over, False),
    "edited, at the same time": (lambda path, other: write_over(path, other, keeps_time=True), False),
    "replaced": (replace, False),
    "cut": (lambda path, _: os.truncate(path, path.stat().st_size // 3), False),
    "deleted": (lambda path, _: path.unlink(), False),
}


def under_change(path: Path, way: Way, change: str, chance: random.Random, num_workers: int) -> None:
    path.parent.mkdir()
    changed, keeps_rows = CHANGES[change]
    path.write_bytes(way.make(range(FIRST, FIRST + way.num_rows)))
    expected, found, is_whole = [], [], True
    with way.loader(path) as loader:
        take(loader, expected)
    with way.loader(path, num_workers=num_workers, buffer_size=chance.choice([1, 50])) as loader:
        if chance.random() < 0.5:
            loader.state_dict()  # with the fingerprint of the content
        take(loader, found, chance.choice([40, way.num_rows // 2, way.num_rows]))
        changed(path, way.make(range(OTHER, OTHER + way.num_rows)))
        try:
            take(loader, found)
        except SourceError as error:
            assert str(path) in str(error), error
            assert str(error).startswith(CODES), error
            is_whole = False
    assert found == expected[: len(found)], change
    assert is_whole or not keeps_rows or way.make is not lines  # others may only say that they have changed
    assert len(found) == len(expected) or not is_whole


@pytest.mark.parametrize(("way", "change", "num_workers"), each_value(list(FILES), list(CHANGES), [0, 2]))
def test_what_is_delivered_is_what_was_there_at_the_start(tmp_path, way, change, num_workers):
    if way == "zstd":
        pytest.importorskip("zstandard")
    chance = random.Random(f"{way} {change} {num_workers}")
    paths = [tmp_path / str(number) / FILES[way].name for number in range(CHANGE_ROUNDS)]
    for path in paths:
        under_change(path, FILES[way], change, chance, num_workers)
    record("IO", f"{way} {change}", faults=CHANGE_ROUNDS, lost=0, repeated=0, unnamed=0)


ENDS_WITH = {"403": ("AD324",), "404": ("AD322", "AD323"), "412": ("AD322",), "etag": ("AD322",), "whole": ("AD325",)}
"""The faults that another try cannot mend, and the errors of each: AD323 for an object that was not there at the start.

All others are tried again, unseen.
"""
ANSWERS = (*map(str, STATUSES), *SPOILED)
FAULTS = num_rounds(quick=4, full=40)  # of each kind, and of each way
NUM_ROWS = 500
SECRET = "token=abcdef0123456789"


class Run(NamedTuple):
    """What was delivered, the errors on the way, and how many workers were killed."""

    entries: list[list[int]]
    errors: list[str]
    kills: int


@pytest.fixture
def origin(path) -> Iterator[str]:
    def answer(request: Request) -> Response:
        return ranged(request, data, "v1") if request.path == "/rows.jsonl" else Response(404, {})

    pytest.importorskip("obstore")
    data = path.read_bytes()
    with HttpServer(answer) as server:
        yield server.url


def stream(proxy: FaultProxy, num_faults: int, num_workers: int, chance: random.Random, **knobs: Any) -> Run:
    """Deliver until the proxy has made so many faults; after an error, resume in a new loader."""
    source = JsonlSource(f"{proxy.url}/rows.jsonl?{SECRET}", storage_options={"retry_timeout_s": NEVER_S})
    found, errors, kills, state = [], [], 0, ""
    while proxy.num_faults < num_faults:
        try:
            loader = opened(source, id_and_text, num_workers=num_workers, epochs=None, **knobs)
        except SourceError as error:  # its first bytes are looked at
            errors.append(str(error))
            continue

        with loader:
            if state:
                loader.load_state_dict(json.loads(state))
            try:
                while proxy.num_faults < num_faults:
                    found += [entry(sample) for sample in loader.get_next_batch(chance.choice([1, 7, 32]))]
                    kills += _killed(loader, chance)
            except SourceError as error:
                errors.append(str(error))
            state = json.dumps(loader.state_dict())
    return Run(found, errors, kills)


def _killed(loader: DataLoader, chance: random.Random) -> bool:
    alive = [worker.pid for worker in loader.statistics().workers if worker.pid and worker.state in {"idle", "busy"}]
    if not alive or chance.random() > 0.03:
        return False

    with suppress(ProcessLookupError):
        os.kill(chance.choice(alive), signal.SIGKILL)
    return True


def is_named(error: str, kind: str) -> bool:
    has_code = error.startswith(ENDS_WITH.get(kind, ()))
    return has_code and "/rows.jsonl" in error and "bytes " in error and SECRET not in error


@pytest.mark.parametrize(("kind", "num_workers"), each_value(ANSWERS, [0, 2]))
def test_what_is_delivered_is_d_whatever_the_store_answers(path, origin, kind, num_workers):
    chance = random.Random(f"{kind} {num_workers}")
    share = 0.1 if kind in ENDS_WITH else 0.4
    with FaultProxy(origin, Faults((kind,), share=share, seed=chance.randrange(1 << 30))) as proxy:
        run = stream(proxy, FAULTS, num_workers, chance)
        faults = proxy.num_faults
    with opened(str(path), id_and_text, epochs=None) as loader:
        expected = [entry(sample) for sample in loader.get_next_batch(max(1, len(run.entries)))][: len(run.entries)]
    places = [tuple(item[1:4]) for item in run.entries]
    lost = len({tuple(item[1:4]) for item in expected} - set(places))
    repeated = len(places) - len(set(places))
    unnamed = sum(not is_named(error, kind) for error in run.errors)
    record("STORE", kind, faults=faults, kills=run.kills, lost=lost, repeated=repeated, unnamed=unnamed)

    assert run.entries == expected
    assert unnamed == 0, run.errors
    if num_workers == 0 or kind not in ENDS_WITH:  # the answer that a killed worker had is asked for again
        assert bool(run.errors) == (kind in ENDS_WITH), run.errors


def test_workers_that_are_killed_while_they_keep_blocks_leave_only_whole_ones(path, origin, tmp_path):
    """Two loaders share the blocks, whose limit is less than the data: what one keeps, the other removes."""
    cache = Cache(folder=str(tmp_path), remote_max_bytes=64 << 10)
    with FaultProxy(origin, Faults(("503", "cut"), share=0.3, seed=11)) as proxy, ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda seed: stream(proxy, 4 * FAULTS, 2, random.Random(seed), cache=cache), range(2)))
        faults = proxy.num_faults
    with opened(str(path), id_and_text, epochs=None) as loader:
        expected = [entry(sample) for sample in loader.get_next_batch(max(len(run.entries) for run in runs))]
    kills = sum(run.kills for run in runs)
    record("STORE", "blocks on the disk", faults=faults, kills=kills, lost=0, repeated=0, unnamed=0)

    assert [run.entries for run in runs] == [expected[: len(run.entries)] for run in runs]
    assert [run.errors for run in runs] == [[], []]
    assert sum(-(-file.stat().st_size // 4096) * 4096 for file in tmp_path.glob("blocks/*/*")) <= 64 << 10
