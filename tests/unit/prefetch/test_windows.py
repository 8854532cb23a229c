"""Windows and chunks: where rows lie in a slot, how many go together, and the planned epochs that windows are of."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncdata as ad
from asyncdata.batching.packers import SinglePacking
from asyncdata.batching.planned import PlannedOrder, answer
from asyncdata.batching.rules import PackRules
from asyncdata.core.messages import NO_SLOT, Block, Failed, Indexed, Job, Overflow, Scanned
from asyncdata.prefetch.producer import ChunkPacer
from asyncdata.prefetch.row_index.row_index import Places, RowIndex
from asyncdata.prefetch.windows.block_windows import BlockWindow
from asyncdata.prefetch.windows.indexed_windows import IndexedWindow
from asyncdata.prefetch.windows.planned_epochs import PlannedRows
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers.base import Crashed
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def window_of(files: FileBlocks, arrange: Any = np.arange) -> BlockWindow:
    return BlockWindow(files, files.blocks(range(files.num_blocks)), 0, STRIDE, arrange)


@pytest.fixture
def read(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., tuple[BlockWindow, Worker, FileBlocks]]]:
    """A function that reads a window of these lines, of one file or several, by a worker."""
    with ExitStack() as stack:

        def read(
            *files: list[bytes], order: Any = None, arrange: Any = np.arange
        ) -> tuple[BlockWindow, Worker, FileBlocks]:
            paths = [str(jsonl_file(lines, f"{number}.jsonl")) for number, lines in enumerate(files)]
            opened = ad.JsonlSource(paths, max_row_bytes=100).open(BLOCK_BYTES)
            worker, window = Worker(opened), window_of(opened, arrange)
            stack.callback(worker.handler.close)
            scans = list(window.scans())
            for number in order or range(len(scans)):
                assert not window.is_ready
                window.add(number, worker.handler(scans[number]))
            assert window.is_ready
            return window, worker, opened

        yield read


@pytest.fixture
def two_files(read: Any) -> Any:
    """Lines of two files, backwards."""
    return read(LINES[:30], [b"", *LINES[30:], b"\r"], arrange=lambda num_rows: np.arange(num_rows)[::-1])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_window_is_read_by_requests_of_64_blocks_in_any_order_of_replies(read, order):
    lines = [b'{"n":"%023d"}' % number for number in range(130)]
    window, worker, files = read(lines, order=order)
    scans = list(window_of(files).scans())

    assert worker.rows(window.request(0, 130)) == lines
    assert [len(scan.blocks) for scan in scans] == [64, 64, 2]
    assert [scan.base for scan in scans] == [0, 64 * STRIDE, 128 * STRIDE]
    assert [block.start for scan in scans for block in scan.blocks] == list(range(0, 130 * 32, 32))


def test_every_row_has_its_place_and_comes_as_the_order_arranges_it(two_files):
    window, worker, files = two_files
    texts = [Path(file.path).read_bytes() for file in files.files]

    assert (window.num_rows, window.num_blank) == (40, 2)
    assert [window.key(row)[0] for row in range(40)] == [1] * 10 + [0] * 30
    assert (window.key(39), window.key(9)) == ((0, 0), (1, 1))
    for row, (file, start) in enumerate(map(window.key, range(40))):
        assert window.location(row) == ad.SourceLocation(files.files[file].path, start, len(BACKWARDS[row]))
        assert texts[file][start:].startswith(BACKWARDS[row] + b"\n")
    for first, stop in ((0, 40), (17, 23), (39, 40), (5, 5)):
        rows = worker.rows(window.request(first, stop))
        assert all(row in (None, line) for row, line in zip(rows, BACKWARDS[first:stop], strict=True))
    whole = [row for row, found in enumerate(worker.rows(window.request(0, 40))) if found is not None]
    assert worker.rows(window.request_of(np.array(whole[::-1]))) == [BACKWARDS[row] for row in whole[::-1]]


def test_a_row_longer_than_the_over_read_is_named_with_its_place(two_files):
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
def test_a_row_is_complete_in_the_slot_or_is_read_again(read, num_beyond, is_overflow):
    row = b"x" * (BLOCK_BYTES + SLACK_BYTES + num_beyond)
    window, worker, _ = read([row, b"y" * 60])

    assert worker.rows(window.request(0, 1)) == [None if is_overflow else row]


def test_a_row_that_is_too_long_has_no_bytes(read):
    window, _, files = read([b"1", b"x" * 101, b"2"])
    request = window.request(0, 3)

    assert array("i", request.lengths).tolist() == [1, -1, 1]
    assert request.overflow == []
    assert window.location(1) == ad.SourceLocation(files.files[0].path, 2, -1)


def test_rows_are_found_by_their_places(two_files):
    window, _, _ = two_files
    rows = [0, 7, 31, 39]

    assert window.find({window.key(row) for row in rows}) == rows
    assert window.find({(0, 1), (1, 0), (7, 0), (0, 10**9)}) == [], "no row begins there"
    assert window.find(frozenset()) == []


def test_a_window_without_rows_is_ready_too(jsonl_file):
    window = window_of(ad.JsonlSource(str(jsonl_file([b"", b" ", b"\t"]))).open(BLOCK_BYTES))

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


def test_rows_are_read_from_their_places_but_for_those_that_are_too_long_or_another_ranks():
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


def test_the_first_chunks_are_small_and_each_may_be_twice_as_large():
    assert learn(ChunkPacer(MANY, num_workers=2), 0.0, 7) == [32, 64, 128, 256, 512, 1024, 1024, 1024]


@pytest.mark.parametrize(("row_s", "num_rows"), [(0.0001, 500), (0.001, 50), (0.01, 5), (0.05, 1), (10.0, 1)])
def test_a_chunk_grows_or_shrinks_to_fifty_milliseconds_of_work(row_s, num_rows):
    assert abs(learn(ChunkPacer(MANY, num_workers=2), row_s, 20)[-1] - num_rows) <= 1


def test_one_slow_chunk_does_not_decide_and_an_empty_one_teaches_nothing():
    pacer = ChunkPacer(MANY, num_workers=2)
    pacer.learn(0, 5.0)
    assert pacer.num_rows == 32
    for row_s in [*[0.0005] * 10, 0.001]:
        pacer.learn(100, 100 * row_s)

    assert pacer.num_rows == int(0.05 / (0.8 * 0.0005 + 0.2 * 0.001))


@pytest.mark.parametrize(
    ("capacity", "num_workers", "num_rows"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 4), (64, 2, 16), (64, 8, 4), (1000, 1, 500), (MANY, 2, 1024)],
)
def test_every_worker_can_have_two_chunks_of_the_channel_also_of_another_size(capacity, num_workers, num_rows):
    pacer = ChunkPacer(capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == num_rows

    pacer.resize(capacity, 4 * num_workers)
    assert pacer.num_rows == max(1, min(capacity // (8 * num_workers), 1024))
    pacer.resize(4 * capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == max(1, min(2 * capacity // num_workers, 1024))


# Planned epochs: they are planned when they are needed, once, even if the workers that plan them die

XTUNER = PackRules(packing=ad.xtuner.XTunerPacking(max_length=10, seed=0), world_size=2)
SINGLE = PackRules(packing=SinglePacking(), grouping=ad.LengthGrouping(), world_size=2)
KEYED = ad.RowShuffle(only_kept=True)


def index_of(lengths: list[int]) -> RowIndex:
    pieces = SimpleNamespace(num_blocks=1, are_arrays=(), blocks=lambda ids: [Block(0, 0, 1000) for _ in ids])
    index = RowIndex(pieces, KEYED)  # type: ignore[arg-type]
    numbers, counted = (array("i", some).tobytes() for some in (range(len(lengths)), lengths))
    index.append(Indexed(array("i", [len(lengths)]).tobytes(), numbers, numbers, b"", 0, num_tokens=counted))
    index.complete()
    return index


class Bench:
    """Planned rows, and an executor of theirs that answers when it is told to."""

    def __init__(self, plan: PackRules = XTUNER, num_rows: int = 41, shuffle: ad.RowShuffle = KEYED) -> None:
        self.asked: list[tuple[Any, Callable[[Any], object]]] = []
        self.kinds: list[str] = []
        self.index = index_of([1 + row % 7 for row in range(num_rows)])
        self.found: list[None] = []
        self.restart_point = ad.Position()
        order, executor = PlannedOrder(plan, shuffle, 3), SimpleNamespace(submit=self._submit)
        on_found = partial(self.found.append, None)
        self.rows = PlannedRows(order, self.index, executor, on_found, lambda: self.restart_point)  # type: ignore[arg-type]
        self.rows.restart(ad.Position())

    def _submit(self, request: Any, on_reply: Callable[[Any], object]) -> None:
        self.asked.append((request, on_reply))
        self.kinds.append(type(request).__name__)

    def answer(self, reply: Any = None) -> None:
        request, on_reply = self.asked.pop(0)
        on_reply(answer(request) if reply is None else reply)

    def planned(self, epoch: int) -> Any:
        """As the windows do: asked for again whenever there is something new."""
        while (found := self.rows.epoch(epoch)) is None and self.asked and self.index.fault is None:
            self.answer()
        return found


def test_packs_are_made_before_their_order_and_each_is_asked_for_once():
    bench = Bench()

    for number, kinds in enumerate((["PackRows"], ["PackRows", "OrderPacks"])):
        assert [bench.rows.epoch(0) for _ in range(3)] == [None] * 3
        assert (bench.kinds, len(bench.found)) == (kinds, number)
        bench.answer()

    assert len(bench.found) == 2
    assert bench.rows.epoch(0) is bench.rows.find(0) is not None
    assert bench.asked == []


@pytest.mark.parametrize(
    ("plan", "shuffle", "kinds"),
    [
        (XTUNER, KEYED, ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
        (SINGLE, KEYED, ["PackRows", "OrderPacks"] * 3),
        (SINGLE, ad.RowShuffle(method="none", only_kept=True), ["PackRows", "OrderPacks", "OrderPacks", "OrderPacks"]),
    ],
    ids=["xtuner", "keyed", "unshuffled"],
)
def test_packs_that_are_the_same_in_every_epoch_are_made_once(plan, shuffle, kinds):
    bench = Bench(plan, shuffle=shuffle)

    orders = [bench.planned(epoch).pieces(0, 20).rows.tolist() for epoch in range(3)]

    assert bench.kinds == kinds
    assert len({str(order) for order in orders}) == 3


def test_plans_are_kept_from_the_epoch_before_the_one_that_is_delivered_on():
    bench = Bench()
    for epoch in range(6):
        bench.restart_point = ad.Position(max(0, epoch - 2))
        bench.planned(epoch)

    assert [bench.rows.find(epoch) is not None for epoch in range(7)] == [False, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Crashed("AD423", "killed"), ad.errors.WorkerError),
        (Failed("ConfigError", "AD450 too long"), ad.errors.ConfigError),
    ],
)
def test_a_plan_that_fails_or_kills_every_worker_is_an_error(reply, kind):
    bench = Bench()
    bench.rows.epoch(0)
    bench.answer(reply)

    assert (bench.asked, len(bench.found)) == ([], 1)
    assert isinstance(bench.index.fault, kind)


def test_requests_for_plans_are_repeated_after_a_restart():
    bench = Bench()
    bench.rows.epoch(0)
    bench.asked.clear()  # the replies are no longer wanted
    bench.rows.restart(ad.Position())

    assert bench.planned(0) is not None
    assert bench.kinds == ["PackRows", "PackRows", "OrderPacks"]

    bench.rows.restart(ad.Position(1))
    assert bench.planned(1) is not None
    assert bench.kinds[3:] == ["OrderPacks"], "packs do not change"


def test_a_rounded_epoch_that_is_resumed_with_other_ranks_has_whole_batches():
    bench = Bench()
    whole = bench.planned(0)
    num_packs = whole.packs.num_packs
    assert whole.num_packs == num_packs + num_packs % 2

    for pack in range(num_packs):
        bench.rows.restart(ad.Position(0, 0, int(whole.offsets[pack])))
        found = bench.planned(0)
        assert (found.num_packs - pack) % 2 == 0
        assert found.order.tolist()[:num_packs] == whole.order.tolist()[:num_packs]
        assert found.num_packs == whole.num_packs or pack % 2


@pytest.mark.parametrize("num_rows", range(41, 45))
def test_a_restart_among_packs_that_are_repeated_ends_where_the_epoch_does(num_rows):
    bench = Bench(
        PackRules(packing=ad.xtuner.XTunerPacking(max_length=10, seed=0), world_size=2, accumulation=20), num_rows
    )
    whole = bench.planned(0)
    assert whole.num_packs == 40 > whole.packs.num_packs

    for pack in range(0, 40, 2):
        bench.rows.restart(ad.Position(0, 0, int(whole.offsets[pack])))
        assert bench.planned(0).offsets.tolist() == whole.offsets.tolist()
