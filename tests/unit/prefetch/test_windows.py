"""Windows and chunks: where rows lie in a slot, how many go together, and the planned epochs that windows are of."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import (
    ConfigError,
    JsonlSource,
    LengthGrouping,
    Position,
    RowShuffle,
    SourceLocation,
    WorkerError,
    XTunerPacking,
)
from asyncdata.batching.packers.unpacked import SinglePacking
from asyncdata.batching.planned.plan import Plan, PlannedOrder
from asyncdata.batching.planned.worker import answer
from asyncdata.core.messages import NO_SLOT, Block, Failed, Indexed, Job, Overflow, Scanned
from asyncdata.prefetch.chunk_size import ChunkPacer
from asyncdata.prefetch.row_index.row_index import Places, RowIndex
from asyncdata.prefetch.windows.base import ChunkOrigin
from asyncdata.prefetch.windows.block_window import Window
from asyncdata.prefetch.windows.indexed_windows import IndexedWindow
from asyncdata.prefetch.windows.planned_epochs import PlannedRows
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers.base import MAX_LOSSES, Crashed
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from asyncdata.sources.base import FileBlocks


BLOCK_BYTES, SLACK_BYTES = 32, 8


STRIDE = 1 + BLOCK_BYTES + SLACK_BYTES


LINES = [b'{"id": %d, "pad": "%s"}' % (number, b"x" * (number * 7 % 50)) for number in range(40)]


BACKWARDS = LINES[::-1]


class Worker:
    """Scans into a slot, and reads rows out of it."""

    def __init__(self, files: FileBlocks) -> None:
        self.slot = bytearray(files.num_blocks * STRIDE)
        job = Job(files=files.files, tokenize=None, max_row_bytes=100, block_bytes=BLOCK_BYTES, slack_bytes=SLACK_BYTES)
        self.handler = Handler(job, [memoryview(self.slot)], FunctionTokenizer(lambda row: [row["id"]]))

    def rows(self, request: Any) -> list[bytes | None]:
        """The rows that a request means; None for one that is not wholly in the slot."""
        starts, lengths = array("i", request.starts), array("i", request.lengths)
        rows: list[bytes | None] = [bytes(self.slot[s : s + n]) for s, n in zip(starts, lengths, strict=True)]
        for item in request.overflow:
            rows[item.row] = None
        return rows


def backwards(num_rows: int) -> Any:
    return np.arange(num_rows)[::-1]


def window_of(files: FileBlocks, arrange: Any = np.arange) -> Window:
    return Window(files, files.blocks(range(files.num_blocks)), 0, STRIDE, arrange)


@pytest.fixture
def read(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., tuple[Window, Worker, FileBlocks]]]:
    """A function that reads a window of these lines, of one file or several, by a worker."""
    workers = []

    def read(*files: list[bytes], order: Any = None, arrange: Any = np.arange) -> tuple[Window, Worker, FileBlocks]:
        paths = [str(jsonl_file(lines, f"{number}.jsonl")) for number, lines in enumerate(files)]
        opened = JsonlSource(paths, max_row_bytes=100).open(BLOCK_BYTES)
        worker, window = Worker(opened), window_of(opened, arrange)
        workers.append(worker)
        scans = list(window.scans())
        for number in range(len(scans)) if order is None else order:
            assert not window.is_ready
            window.add(number, worker.handler(scans[number]))
        assert window.is_ready
        return window, worker, opened

    yield read
    for worker in workers:
        worker.handler.close()


@pytest.fixture
def two_files(read: Any) -> Any:
    """Lines of two files, backwards."""
    return read(LINES[:30], [b"", *LINES[30:], b"\r"], arrange=backwards)


def content(location: SourceLocation) -> bytes:
    with open(location.path, "rb") as file:
        file.seek(location.byte_offset)
        return file.read(location.num_bytes)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_window_is_read_by_requests_of_64_blocks_in_any_order_of_replies(read: Any, order: list[int]) -> None:
    lines = [b"%031d" % number for number in range(130)]
    window, worker, files = read(lines, order=order)
    scans = list(window_of(files).scans())

    assert worker.rows(window.request(0, 130)) == lines
    assert [len(scan.blocks) for scan in scans] == [64, 64, 2]
    assert [scan.base for scan in scans] == [0, 64 * STRIDE, 128 * STRIDE]
    assert [block.start for scan in scans for block in scan.blocks] == list(range(0, 130 * 32, 32))


def test_every_row_has_its_place_and_comes_as_the_order_arranges_it(two_files: Any) -> None:
    window, worker, _ = two_files

    assert (window.num_rows, window.num_blank) == (40, 2)
    assert [window.key(row)[0] for row in range(40)] == [1] * 10 + [0] * 30
    assert (window.key(39), window.key(9)) == ((0, 0), (1, 1))
    assert [content(window.location(row)) for row in range(40)] == BACKWARDS
    origin = ChunkOrigin(window, 10)
    assert (origin.location(5), origin.key(5)) == (window.location(15), window.key(15))
    for first, stop in ((0, 40), (17, 23), (39, 40), (5, 5)):
        rows = worker.rows(window.request(first, stop))
        assert all(row in (None, line) for row, line in zip(rows, BACKWARDS[first:stop], strict=True))
    whole = [row for row, found in enumerate(worker.rows(window.request(0, 40))) if found is not None]
    assert worker.rows(window.request_of(np.array(whole[::-1]))) == [BACKWARDS[row] for row in whole[::-1]]


def test_a_row_longer_than_the_over_read_is_named_with_its_place(two_files: Any) -> None:
    """Whatever lies after it in the slot is another block's."""
    window, worker, _ = two_files

    request = window.request(0, 40)

    beyond = {item.row: (item.file_id, item.offset) for item in request.overflow}
    assert beyond == {row: window.key(row) for row in beyond}
    assert {row for row, found in enumerate(worker.rows(request)) if found is None} == set(beyond)
    most = BLOCK_BYTES + SLACK_BYTES
    assert set(beyond) == {row for row in range(40) if window.key(row)[1] % BLOCK_BYTES + len(BACKWARDS[row]) > most}
    assert 0 < len(beyond) < 40


@pytest.mark.parametrize(("num_beyond", "is_overflow"), [(0, False), (1, True)])
def test_a_row_is_complete_in_the_slot_or_is_read_again(read: Any, num_beyond: int, is_overflow: bool) -> None:
    row = b"x" * (BLOCK_BYTES + SLACK_BYTES + num_beyond)
    window, worker, _ = read([row, b"y" * 60])

    assert worker.rows(window.request(0, 1)) == [None if is_overflow else row]


def test_a_row_that_is_too_long_has_no_bytes(read: Any) -> None:
    window, _, files = read([b"1", b"x" * 101, b"2"])
    request = window.request(0, 3)

    assert array("i", request.lengths).tolist() == [1, -1, 1]
    assert request.overflow == []
    assert window.location(1) == SourceLocation(files.files[0].path, 2, -1)


def test_rows_are_found_by_their_places(two_files: Any) -> None:
    window, _, _ = two_files
    rows = [0, 7, 31, 39]

    assert window.find({window.key(row) for row in rows}) == rows
    assert window.find({(0, 1), (1, 0), (7, 0), (0, 10**9)}) == [], "no row begins there"
    assert window.find(frozenset()) == []


def test_a_window_without_rows_is_ready_too(jsonl_file: Callable[..., Path]) -> None:
    window = window_of(JsonlSource(str(jsonl_file([b"", b" ", b"\t"]))).open(BLOCK_BYTES))

    assert window.add(0, Scanned(array("i", [0]).tobytes(), b"", b"", b"", 3))

    assert (window.num_rows, window.num_blank, window.is_ready, window.fault) == (0, 3, True, None)
    assert window.find({(0, 0)}) == []


def rows_of_file_3(lengths: list[int], expected: list[int] | None = None) -> IndexedWindow:
    """Rows a hundred bytes from one another."""
    nothing: Any = None
    numbers = np.arange(len(lengths))
    places = Places(np.full(len(lengths), 3), 100 * numbers, np.array(lengths, np.int32), numbers)
    made = IndexedWindow(nothing, nothing)
    made.fill(places, None if expected is None else np.array(expected, np.int32), is_last=True)
    return made


def test_rows_are_read_from_their_places_but_for_those_that_are_too_long_or_another_ranks() -> None:
    request = rows_of_file_3([5, 6, -1, 8]).request(1, 4)
    shared = rows_of_file_3([5, 6, -1, 8, 9], [1, -1, 7, -4, 0]).request(1, 5)

    assert request.slot == NO_SLOT
    assert array("i", request.lengths).tolist() == [6, -1, 8]
    assert request.overflow == [Overflow(0, 3, 100), Overflow(2, 3, 300)]
    assert request.expected == b""
    assert array("i", shared.expected).tolist() == [-1, 7, -4, 0]
    assert array("i", shared.lengths).tolist() == [6, -1, 8, 9]
    assert shared.overflow == [Overflow(3, 3, 400)]


# Chunks: how many rows go together


MANY = 1 << 20


def learn(pacer: ChunkPacer, row_s: float, number: int) -> list[int]:
    """The sizes of so many chunks, of rows that take so long."""
    sizes = []
    for _ in range(number):
        sizes.append(pacer.num_rows)
        pacer.learn(pacer.num_rows, pacer.num_rows * row_s)
    return [*sizes, pacer.num_rows]


def test_the_first_chunks_are_small_and_each_may_be_twice_as_large() -> None:
    assert learn(ChunkPacer(MANY, num_workers=2), 0.0, 7) == [32, 64, 128, 256, 512, 1024, 1024, 1024]


@pytest.mark.parametrize(("row_s", "num_rows"), [(0.0001, 500), (0.001, 50), (0.01, 5), (0.05, 1), (10.0, 1)])
def test_a_chunk_grows_or_shrinks_to_fifty_milliseconds_of_work(row_s: float, num_rows: int) -> None:
    assert abs(learn(ChunkPacer(MANY, num_workers=2), row_s, 20)[-1] - num_rows) <= 1


def test_one_slow_chunk_does_not_decide_and_an_empty_one_teaches_nothing() -> None:
    pacer = ChunkPacer(MANY, num_workers=2)
    pacer.learn(0, 5.0)
    assert pacer.num_rows == 32
    for _ in range(10):
        pacer.learn(100, 100 * 0.0005)

    pacer.learn(100, 100 * 0.001)

    assert pacer.num_rows == int(0.05 / (0.8 * 0.0005 + 0.2 * 0.001))


@pytest.mark.parametrize(
    ("capacity", "num_workers", "num_rows"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 4), (64, 2, 16), (64, 8, 4), (1000, 1, 500), (MANY, 2, 1024)],
)
def test_every_worker_can_have_two_chunks_of_the_channel_also_of_another_size(
    capacity: int, num_workers: int, num_rows: int
) -> None:
    pacer = ChunkPacer(capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == num_rows

    pacer.resize(capacity, 4 * num_workers)
    assert pacer.num_rows == max(1, min(capacity // (8 * num_workers), 1024))
    pacer.resize(4 * capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == max(1, min(2 * capacity // num_workers, 1024))


# Planned epochs: they are planned when they are needed, once, even if the workers that plan them die


XTUNER = Plan(packing=XTunerPacking(max_length=10, seed=0), world_size=2)


SINGLE = Plan(packing=SinglePacking(), grouping=LengthGrouping(), world_size=2)


KEYED = RowShuffle(only_kept=True)


class OneBlock:
    num_blocks = 1
    are_arrays = ()

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        return [Block(0, 0, 1000) for _ in ids]


def index_of(lengths: list[int]) -> RowIndex:
    index = RowIndex(OneBlock(), KEYED)  # type: ignore[arg-type]
    numbers = array("i", range(len(lengths))).tobytes()
    counted = array("i", lengths).tobytes()
    index.append(Indexed(array("i", [len(lengths)]).tobytes(), numbers, numbers, b"", 0, num_tokens=counted))
    index.complete()
    return index


class Slow:
    """An executor that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Callable[[Any], object]]] = []
        self.kinds: list[str] = []

    def submit(self, request: Any, on_reply: Callable[[Any], object], max_losses: int = MAX_LOSSES) -> None:
        self.asked.append((request, on_reply))
        self.kinds.append(type(request).__name__)

    def answer(self, reply: Any = None) -> None:
        request, on_reply = self.asked.pop(0)
        on_reply(answer(request) if reply is None else reply)


class Bench:
    def __init__(self, plan: Plan = XTUNER, lengths: list[int] | None = None, shuffle: RowShuffle = KEYED) -> None:
        self.executor = Slow()
        self.index = index_of([1 + row % 7 for row in range(41)] if lengths is None else lengths)
        self.num_found = 0
        order = PlannedOrder(plan, shuffle, 3)
        self.restart_point = Position()
        self.rows = PlannedRows(
            order,
            self.index,
            self.executor,  # type: ignore[arg-type]
            self._found,
            lambda: self.restart_point,
        )
        self.rows.restart(Position())

    def _found(self) -> None:
        self.num_found += 1

    def planned(self, epoch: int) -> Any:
        """As the windows do: asked for again whenever there is something new."""
        while (found := self.rows.epoch(epoch)) is None and self.executor.asked and self.index.fault is None:
            self.executor.answer()
        return found


def test_packs_are_made_before_their_order_and_each_is_asked_for_once() -> None:
    bench = Bench()

    assert [bench.rows.epoch(0) for _ in range(3)] == [None] * 3
    assert bench.executor.kinds == ["PackRows"]
    bench.executor.answer()
    assert bench.num_found == 1
    assert [bench.rows.epoch(0) for _ in range(3)] == [None] * 3
    assert bench.executor.kinds == ["PackRows", "OrderPacks"]
    bench.executor.answer()

    assert bench.num_found == 2
    assert bench.rows.epoch(0) is bench.rows.find(0)
    assert bench.rows.find(0) is not None
    assert bench.executor.asked == []


@pytest.mark.parametrize(
    ("plan", "shuffle", "kinds"),
    [
        (XTUNER, KEYED, ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
        (SINGLE, KEYED, ["PackRows", "OrderPacks"] * 3),
        (SINGLE, RowShuffle(method="none", only_kept=True), ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
    ],
    ids=["xtuner", "keyed", "unshuffled"],
)
def test_packs_that_are_the_same_in_every_epoch_are_made_once(plan: Plan, shuffle: RowShuffle, kinds: Any) -> None:
    bench = Bench(plan, shuffle=shuffle)

    orders = [bench.planned(epoch).pieces(0, 20).rows.tolist() for epoch in range(3)]

    assert bench.executor.kinds == kinds
    assert len({str(order) for order in orders}) == 3


def test_plans_are_kept_from_the_epoch_before_the_one_that_is_delivered_on() -> None:
    bench = Bench()
    for epoch in range(6):
        bench.restart_point = Position(max(0, epoch - 2))
        bench.planned(epoch)

    assert [bench.rows.find(epoch) is not None for epoch in range(7)] == [False, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(Crashed("AD423", "killed"), WorkerError), (Failed("ConfigError", "AD450 too long"), ConfigError)],
)
def test_a_plan_that_fails_or_kills_every_worker_is_an_error(reply: Any, kind: type[Exception]) -> None:
    bench = Bench()
    bench.rows.epoch(0)
    bench.executor.answer(reply)

    assert bench.executor.asked == []
    assert bench.num_found == 1
    assert isinstance(bench.index.fault, kind)


def test_requests_for_plans_are_repeated_after_a_restart() -> None:
    bench = Bench()
    bench.rows.epoch(0)
    bench.executor.asked.clear()  # the replies are no longer wanted
    bench.rows.restart(Position())

    assert bench.planned(0) is not None
    assert bench.executor.kinds == ["PackRows", "PackRows", "OrderPacks"]

    bench.rows.restart(Position(1))
    assert bench.planned(1) is not None
    assert bench.executor.kinds[3:] == ["OrderPacks"], "packs do not change"


def test_a_rounded_epoch_that_is_resumed_with_other_ranks_has_whole_batches() -> None:
    bench = Bench()
    whole = bench.planned(0)
    num_packs = whole.packs.num_packs
    assert whole.num_packs == num_packs + num_packs % 2

    for pack in range(num_packs):
        bench.rows.restart(Position(0, 0, int(whole.offsets[pack])))
        found = bench.planned(0)
        assert (found.num_packs - pack) % 2 == 0
        assert found.order.tolist()[:num_packs] == whole.order.tolist()[:num_packs]
        assert found.num_packs == whole.num_packs or pack % 2


@pytest.mark.parametrize("num_rows", range(41, 45))
def test_a_restart_among_packs_that_are_repeated_ends_where_the_epoch_does(num_rows: int) -> None:
    plan = Plan(packing=XTunerPacking(max_length=10, seed=0), world_size=2, accumulation=20)
    bench = Bench(plan, [1 + row % 7 for row in range(num_rows)])
    whole = bench.planned(0)
    assert whole.num_packs == 40 > whole.packs.num_packs

    for pack in range(0, 40, 2):
        bench.rows.restart(Position(0, 0, int(whole.offsets[pack])))
        assert bench.planned(0).offsets.tolist() == whole.offsets.tolist()
