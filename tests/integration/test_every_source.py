"""What holds for every source, and of streams: one order, exact resume, bad rows at their turn, changes named."""

import gzip
import json
import random
import re
import threading
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import structlog

from asyncdata import JsonlSource, ParquetSource, RowFn, RowShuffle
from asyncdata.errors import BadRowError, EndOfData, SnapshotMismatchError, SourceChangedError, SourceError
from tests.support import loaders
from tests.support.faults import until
from tests.support.loaders import make, resumed
from tests.support.loading import NEVER_S, SHUFFLE, fails_on_13, id_and_text, ids, write
from tests.support.parts import change
from tests.support.sources import KINDS, ListStream, frames, jsonl, make_rows, rows_of, stream_order_of, windows_of

NUM_ROWS = 203
SHUFFLES: dict[str, Any] = {"in windows": SHUFFLE, "as they lie": False, "all rows": "full"}
QUICK = ("JSONL files", "Parquet, tiny row groups", "a gzip file", "a JSON array", "an iterable", "an object by http")
LISTED = {"JSONL files": JsonlSource, "Parquet files": ParquetSource, "zstd files": JsonlSource}
"""Of which a file may be listed again."""


class Written(NamedTuple):
    """A source with its rows: its kind, where it is, and what a loader is given."""

    kind: Any
    folder: Path
    source: Any

    def rewrite(self, rows: list[dict[str, Any]]) -> Any:
        return self.kind.write(self.folder, rows)


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in KINDS])
def written(request, tmp_path) -> Written:
    return written_as(request.param, tmp_path)


def written_as(name: str, folder: Path) -> Written:
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)
    return Written(kind, folder, kind.write(folder, make_rows(NUM_ROWS)))


@pytest.fixture
def shuffle(request) -> Any:
    return SHUFFLES[request.param]


each_way = pytest.mark.parametrize(
    ("written", "shuffle"),
    [
        pytest.param(name, shuffle, marks=() if name in QUICK else pytest.mark.thorough)
        for number, name in enumerate(KINDS)
        for shuffle in (SHUFFLES if name in QUICK else (list(SHUFFLES)[number % 2 * 2], "as they lie"))
        if shuffle != "all rows" or not KINDS[name].is_stream
    ],
    indirect=True,
)
"""Each of the quick kinds in each order; of the others in two or, of a stream, in one."""


make_any = partial(make, cache={"folder": ""})
state_after = partial(loaders.state_after, cache={"folder": ""})
resumed_any = partial(resumed, cache={"folder": ""})


def first(source: Any, number: int, **knobs: Any) -> list[int]:
    with make_any(source, **knobs) as loader:
        return ids(loader.get_next_batch(number))


@each_way
def test_every_epoch_has_every_row_once_and_another_seed_is_another_order(written, shuffle):
    seen = first(written.source, 3 * NUM_ROWS, shuffle=shuffle)
    epochs = [seen[number * NUM_ROWS : (number + 1) * NUM_ROWS] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 3
    if shuffle is False:
        assert epochs == [list(range(NUM_ROWS))] * 3
    else:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert first(written.source, NUM_ROWS, shuffle=shuffle, seed=1) != epochs[0]


def test_a_row_is_the_row_that_was_written(written):
    """Whole: those that found no room in their window, too."""
    rows = make_rows(NUM_ROWS)
    with make_any(written.source, id_and_text) as loader:
        samples = loader.get_next_batch(NUM_ROWS)
    assert [sample.tokens.tolist() for sample in samples] == [[n, *map(ord, rows[n]["pad"])] for n in ids(samples)]


@pytest.mark.thorough
@each_way
def test_the_order_is_the_same_for_any_workers_and_buffer(written, shuffle):
    expected = first(written.source, 2 * NUM_ROWS, shuffle=shuffle, buffer_size=1000)
    for num_workers, buffer_size in [(0, 1), (1, 1000) if shuffle is False else (2, 16)]:
        settings = {"num_workers": num_workers, "buffer_size": buffer_size, "shuffle": shuffle}
        assert first(written.source, 2 * NUM_ROWS, **settings) == expected, settings


@pytest.mark.parametrize("name", LISTED)
def test_a_file_that_is_listed_twice_comes_twice_an_epoch_and_resumes(tmp_path, name):
    written = written_as(name, tmp_path)
    source = LISTED[name]([*written.source, written.source[0]], allow_repeats=True)
    expected = first(source, 2 * (NUM_ROWS + NUM_ROWS // 3))
    wanted = Counter([*range(NUM_ROWS), *range(NUM_ROWS // 3)])
    assert Counter(expected[: wanted.total()]) == Counter(expected[wanted.total() :]) == wanted
    state = state_after(source, 150)
    assert resumed_any(source, state, 50) == expected[150:200]
    with make_any(written.source) as loader, pytest.raises(SnapshotMismatchError, match="data: 4 -> 3 files"):
        loader.load_state_dict(state)


@each_way
def test_resumed_at_any_point_it_is_the_uninterrupted_run(written, shuffle):
    expected = first(written.source, 3 * NUM_ROWS, shuffle=shuffle)
    for number in random.Random(5).sample(range(2 * NUM_ROWS), 2):
        state = state_after(written.source, number + 1, shuffle=shuffle)
        assert resumed_any(written.source, state, 40, shuffle=shuffle) == expected[number + 1 : number + 41]


def test_the_same_rows_written_again_are_the_same_data(written):
    expected, state = first(written.source, 100), state_after(written.source, 50)
    assert resumed_any(written.rewrite(make_rows(NUM_ROWS)), state, 50) == expected[50:]


@pytest.mark.parametrize("is_index_known", [True, False])
@pytest.mark.parametrize("shuffle", ["full", RowShuffle(method="slime"), RowShuffle(method="none"), True], ids=str)
def test_a_row_that_has_brought_down_its_workers_is_left_out_in_every_later_epoch(tmp_path, shuffle, is_index_known):
    """It is in the snapshot's journal, and no kind of window sends it again."""
    path, knobs = KINDS["a JSONL file"].write(tmp_path, make_rows(40)), {"shuffle": shuffle}
    with make_any(path, **knobs) as loader:
        state = loader.state_dict()
        every = ids(loader.get_next_batch(120))
    with open(path, "rb") as file:
        offset = sum(map(len, file.readlines()[:11]))
    state = {**json.loads(json.dumps(state)), "journal": [[0, offset]]}
    expected = [row for row in every if row != 11]

    with make_any(path, **knobs) as loader:
        if is_index_known:
            loader.get_next_batch(1)
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(117)) == expected
        loader.load_state_dict(state)
        loader.get_next_batch(1)
        loader.set_epoch(2)  # whose window is ready at once, as the index is complete by then
        assert ids(loader.get_next_batch(39)) == expected[78:]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_bad_row_is_named_by_its_place_at_its_turn_or_skipped_and_counted(written, num_workers, tmp_path):
    place = written.kind.place(written.source, 13, NUM_ROWS)
    knobs = {"shuffle": False, "num_workers": num_workers}

    with make_any(written.source, fails_on_13, **knobs) as loader:
        assert ids(loader.get_next_batch(13)) == list(range(13))
        with pytest.raises(BadRowError, match="^AD421 ") as caught:
            loader.get_next_batch(1)
    error = caught.value
    assert error.path.startswith(place.path)
    assert (error.line, error.row_number) == (place.line, place.row_number)
    assert '"id"' in error.excerpt.replace("\\", "")
    with make_any(written.source, fails_on_13, bad_rows="skip", **knobs) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == [row for row in range(NUM_ROWS) if row != 13]
        assert loader.statistics().bad_rows_total == 1


@pytest.mark.parametrize(
    "rows",
    [make_rows(NUM_ROWS, "y"), make_rows(NUM_ROWS - 1), make_rows(NUM_ROWS)[::-1]],
    ids=["other", "fewer", "turned"],
)
def test_a_state_of_other_data_is_refused(written, rows):
    if not written.kind.is_content_known:
        pytest.skip("nothing tells its rows from others before they are read")
    state = state_after(written.source, 50)
    with make_any(written.rewrite(rows)) as loader, pytest.raises(SnapshotMismatchError, match="data: ") as caught:
        loader.load_state_dict(state)
    assert "data" in caught.value.differences


def test_data_that_is_replaced_while_it_is_read_stops_the_stream(written):
    if not written.kind.is_in_files:
        pytest.skip("it cannot be changed from outside")
    with make_any(written.source, buffer_size=1) as loader:
        loader.state_dict()  # with a fingerprint of the content
        loader.get_next_batch(1)
        written.rewrite(make_rows(NUM_ROWS, "y"))
        with pytest.raises(SourceChangedError, match=f"^{written.kind.changed} "):
            while True:
                loader.get_next_batch(1)


def test_a_source_without_rows_is_an_error(written, tmp_path_factory):
    empty = written.kind.write(tmp_path_factory.mktemp("empty"), [])
    # AD125: datasets cannot load what it has saved. AD401: that a stream has no rows is known when it has been read
    with pytest.raises(SourceError, match="^AD(201|202|401|125) "), make_any(empty) as loader:
        loader.get_next_batch(1)


NUM_LINES = 400
ROWS = [{"id": number, "pad": "x" * (number * 37 % 90)} for number in range(NUM_LINES)]
LINES = jsonl(ROWS).splitlines()


def expected_ids(num_epochs: int) -> list[int]:
    return stream_order_of(list(map(len, LINES)), SHUFFLE, 42, num_epochs)


def windows_before(number: int) -> list[list[int]]:
    return windows_of(list(map(len, LINES)), SHUFFLE.block_bytes * SHUFFLE.window_blocks)[:number]


class Watched(msgspec.Struct, frozen=True):
    """A source whose stream a test keeps hold of."""

    stream: Any

    def open(self, block_bytes: int) -> Any:
        return self.stream


def test_a_restart_reads_its_window_and_not_what_comes_before():
    state = loaders.state_after(Watched(ListStream(LINES, at_once=5)), 300)
    again = ListStream(LINES, at_once=5)

    assert resumed(Watched(again), state, 1, buffer_size=1) == expected_ids(1)[300:301]

    *others, (epoch, at) = again.reads
    assert others in ([], [(0, None)])  # reading from the start may have begun before the state was loaded
    first = windows_before(state["position"][1] + 1)[-1][0]
    assert epoch == 0
    assert first - 5 < at["row"] <= first
    until(lambda: again.num_open == 0)  # by its thread, if that was reading when the loader was closed


def test_requests_that_are_not_acknowledged_are_served_again_from_their_own_window():
    stream = ListStream(LINES, at_once=5)
    with make(Watched(stream), commit="on_ack") as loader:
        batches = [loader.get_next_batch(60) for _ in range(6)]
        loader.ack([sample for batch in batches[:2] for sample in batch])
        state = loader.state_dict()
    again = ListStream(LINES, at_once=5)

    assert resumed(Watched(again), state, 240, commit="on_ack") == expected_ids(1)[120:360]
    reads = [at for epoch, at in again.reads if epoch == 0]  # the next epoch may be read ahead
    assert reads.count(None) <= 1  # reading from the start may have begun before the state was loaded
    (at,) = filter(None, reads)
    assert at["row"] > 0


def test_an_error_that_passes_costs_no_row(tmp_path):
    """A network's, say: shuffled, the window that it interrupts is delivered whole after the restart."""
    fault = ConnectionError("reset by peer")
    with make(Watched(ListStream(LINES, fault=fault, fault_at=250))) as loader:
        found: list[int] = []
        with pytest.raises(SourceError, match="^AD304 cannot read list: reset by peer"):
            while True:
                found += ids(loader.get_next_batch(1))
        state = loader.state_dict()

    assert found + resumed(Watched(ListStream(LINES)), state, NUM_LINES - len(found)) == expected_ids(1)


@pytest.mark.thorough
@pytest.mark.parametrize("blanks", [b"\n", b" \r\n", b"\n" * 99_999 + b"{}\n"], ids=["newlines", "spaces", "some rows"])
@pytest.mark.parametrize("coding", ["gz", "zst"])
def test_a_few_bytes_that_decode_to_very_many_blank_lines_take_little_memory(tmp_path, coding, blanks):
    text = blanks * (30_000_000 // len(blanks))
    rows = b'{"id": 1}\n' + text + b'{"id": 2}\n'
    path = write(tmp_path / f"rows.jsonl.{coding}", gzip.compress(rows) if coding == "gz" else frames([rows]))
    with make(str(path), RowFn(), epochs=1) as loader:
        tracemalloc.start()
        try:
            rows = [sample.extra for batch in iter(lambda: taken(loader), []) for sample in batch]
            assert tracemalloc.get_traced_memory()[1] < 50e6
        finally:
            tracemalloc.stop()
        assert [row["id"] for row in rows if row] == [1, 2]
        assert loader.statistics().blank_lines_total == text.count(b"\n") - (len(rows) - 2)


def taken(loader):
    try:
        return loader.get_next_batch(100)
    except EndOfData as end:
        return end.samples


def test_a_window_that_zstd_has_to_hold_and_is_too_large_is_named(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    large = zstandard.ZstdCompressionParameters.from_level(1, window_log=30, enable_ldm=True)  # zstd --long=30
    coder = zstandard.ZstdCompressor(compression_params=large).compressobj()
    path = write(tmp_path / "rows.jsonl.zst", coder.compress(jsonl(ROWS)) + coder.flush())
    with pytest.raises(SourceError, match="AD122 .* byte 0 needs more than 128 MiB .* without --long"):
        make(str(path), epochs=1)


def test_rows_are_made_no_further_ahead_than_two_windows():
    stream = ListStream(LINES, at_once=1)
    with make(Watched(stream), buffer_size=1) as loader:
        loader.get_next_batch(1)
        assert stream.num_given <= sum(map(len, windows_before(3)))


class Forgetful(ListStream):
    """It begins at another row than its state says, as datasets that lose rows in their state do."""

    def read(self, order: Any, epoch: int, state: Any, check: Any) -> Any:
        return super().read(order, epoch, {"row": state["row"] + 1} if state else None, check)


@pytest.mark.parametrize(
    "kind", [Forgetful, partial(ListStream, has_states=False), ListStream], ids=["forgetful", "stateless", "no state"]
)
def test_a_source_that_cannot_resume_at_its_row_is_read_from_the_start_and_that_is_logged(kind):
    state = loaders.state_after(Watched(kind(LINES)), 250)
    if kind is ListStream:
        del state["stream"]
        state["canaries"] = ["of", "another", "source"]  # which are not waited for
    with structlog.testing.capture_logs() as logs, make(Watched(kind(LINES))) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(150)) == expected_ids(1)[250:]
    (replayed,) = [log["num_rows"] for log in logs if log["event"] == "stream.replayed"]
    # reading from the start may have begun before the state was loaded
    assert 0 < replayed <= sum(map(len, windows_before(state["position"][1])))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), r"AD129 the source raised KeyError('x') in window"),
        (SystemExit(3), "AD129 the source raised SystemExit(3) in window"),
        (FileNotFoundError(2, "No such file", "a.gz"), "AD304 cannot read a.gz: No such file"),
        (SourceChangedError("AD302 shrank"), "AD302 shrank"),
    ],
    ids=repr,
)
def test_whatever_a_source_raises_is_the_users_error(error, message):
    with make(Watched(ListStream(LINES, fault=error, fault_at=100))) as loader:
        with pytest.raises(SourceError, match=f"^{re.escape(message)}") as caught:
            loader.get_next_batch(NUM_LINES)
    assert error in (caught.value, caught.value.__cause__)


def test_data_that_has_changed_is_not_read_again():
    class Changed(ListStream):
        def check_unchanged(self) -> None:
            raise SourceChangedError("AD303 edited")

    stream = Changed(LINES)
    with make(Watched(stream)) as loader:
        loader.get_next_batch(NUM_LINES)
        with pytest.raises(SourceChangedError, match="AD303 edited"):
            loader.get_next_batch(1)
    assert [epoch for epoch, _ in stream.reads] == [0]


def test_a_source_whose_end_fails_is_not_the_end_of_the_run():
    class Unclosable(ListStream):
        def read(self, *args: Any) -> Any:
            try:
                yield from super().read(*args)
            finally:
                raise OSError("cannot let go")

    with structlog.testing.capture_logs() as logs, make(Watched(Unclosable(LINES))) as loader:
        loader.get_next_batch(10)
        loader.set_epoch(1)
        assert ids(loader.get_next_batch(10)) == expected_ids(2)[NUM_LINES : NUM_LINES + 10]
    closed = {log["reason"] for log in logs if log["event"] == "stream.close_failed"}
    assert closed == {"OSError('cannot let go')"}


def test_the_state_of_an_earlier_window_is_better_than_none():
    state = loaders.state_after(Watched(ListStream(LINES)), 200)
    again, window = ListStream(LINES), state["position"][1] + 2
    first = len(sum(windows_before(window), []))
    found = resumed(Watched(again), {**state, "position": [0, window, 0]}, 1, buffer_size=1)
    assert found == expected_ids(1)[first : first + 1]
    assert any(at for epoch, at in again.reads if epoch == 0)


class Gate:
    """Holds a source back where it makes this row for the first time, until it is opened; all rows that it made."""

    def __init__(self, stream: ListStream, row: int) -> None:
        self.row, self.rows = row, list[int]()
        self.has_come, self.is_open = threading.Event(), threading.Event()
        stream.on_row = self.made

    def made(self, row: int) -> None:
        self.rows.append(row)
        if row == self.row:
            self.has_come.set()
            assert self.is_open.wait(NEVER_S)


def test_restarts_while_a_row_is_made_change_no_row_and_every_pass_is_closed():
    stream = ListStream(LINES, at_once=1)
    gate = Gate(stream, windows_before(2)[1][5])
    with make(Watched(stream), buffer_size=1) as loader:
        state = loader.state_dict()
        loader.get_next_batch(1)
        assert gate.has_come.wait(NEVER_S)
        for _ in range(5):  # more often than there are slots
            loader.load_state_dict(state)
        gate.is_open.set()
        assert ids(loader.get_next_batch(NUM_LINES)) == expected_ids(1)
    until(lambda: stream.num_open == 0)


class Endless(ListStream):
    """After row 200 no row comes any more, and no end."""

    num_idle = 0

    def read(self, *args: Any) -> Any:
        for rows in super().read(*args):
            yield rows
            while rows.numbers[-1] >= 200:
                self.num_idle += 1
                yield rows_of([], 201, self.max_row_bytes, None)


@pytest.mark.parametrize("end", ["restart", "close"])
def test_rows_before_a_state_are_read_no_further_once_they_are_not_needed(end):
    """There may be millions of them."""
    with make(Watched(ListStream(LINES, has_states=False))) as loader:
        start = loader.state_dict()
        loader.get_next_batch(350)
        state = loader.state_dict()
    stream = Endless(LINES, at_once=1, has_states=False)

    with make(Watched(stream), buffer_size=1) as loader:
        loader.load_state_dict(state)
        until(lambda: stream.num_idle > 0)
        if end == "restart":
            loader.load_state_dict(start)
            assert ids(loader.get_next_batch(10)) == expected_ids(1)[:10]
    until(lambda: stream.num_open == 0)


def test_windows_of_very_short_rows_end_by_their_number(monkeypatch):
    change(monkeypatch, most_rows_of_a_stream_window=3)
    with make(Watched(ListStream([b'{"id": %d}' % row for row in range(5)])), shuffle=False) as loader:
        places = [(sample.position.window, sample.position.row) for sample in loader.get_next_batch(5)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
