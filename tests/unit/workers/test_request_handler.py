"""A handler answers every request: it scans blocks into a slot, tokenizes rows, and returns failures as values."""

from __future__ import annotations

import os
import random
import threading
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import numpy as np
import pytest

from asyncdata import ConfigError, JsonlSource, RowShuffle, SoftPacking
from asyncdata.batching.planned.plan import Plan, PlannedOrder
from asyncdata.core.messages import (
    Block,
    Failed,
    Index,
    Indexed,
    Job,
    Overflow,
    Packed,
    Permute,
    Permuted,
    Scan,
    Scanned,
    Tokenize,
    Tokenized,
)
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers import request_handler as handlers
from asyncdata.workers.base import error_of
from asyncdata.workers.request_handler import Handler
from tests.support.tokenize_fns import characters, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from asyncdata.tokenization.base import BatchTokenizer
    from asyncdata.tokenization.column_writer import ColumnWriter

BLOCK_BYTES = 64
SLACK_BYTES = 32
STRIDE = 1 + BLOCK_BYTES + SLACK_BYTES
MAX_ROW_BYTES = 300
NUM_SLOTS = 2


class Bench:
    """Handlers over some files, with slots of plain memory."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.progress: list[int] = []
        self.slots = [bytearray(b"?" * 64 * STRIDE) for _ in range(NUM_SLOTS)]

    def open(self, paths: Sequence[Path], tokenizer: BatchTokenizer | None = None, **more: Any) -> Handler:
        self.files = JsonlSource([str(path) for path in paths]).open(BLOCK_BYTES)
        job = Job(
            files=self.files.files,
            tokenize=None,
            max_row_bytes=MAX_ROW_BYTES,
            block_bytes=BLOCK_BYTES,
            slack_bytes=SLACK_BYTES,
            **more,
        )
        slots = [memoryview(slot) for slot in self.slots]
        self.handlers.append(Handler(job, slots, tokenizer or FunctionTokenizer(row_id), self.progress.append))
        return self.handlers[-1]

    def scan(self, handler: Handler, slot: int = 0, base: int = 0) -> tuple[list[int], list[int], list[int]]:
        """The counts, starts and lengths that a scan of every block returns."""
        reply = handler(Scan(slot, base, self.files.blocks(range(self.files.num_blocks))))
        assert isinstance(reply, Scanned), reply
        counts, offsets = ints(reply.counts), ints(reply.offsets)
        found = self.files.blocks(range(self.files.num_blocks))
        blocks = [block for block, count in zip(found, counts, strict=True) for _ in range(count)]
        self.places = [(block.file_id, block.start + offset) for block, offset in zip(blocks, offsets, strict=True)]
        return counts, ints(reply.starts), ints(reply.lengths)

    def rows(self, starts: list[int], lengths: list[int], slot: int = 0) -> Tokenize:
        """The request for these rows, as the trainer's process makes it."""
        overflow = [
            Overflow(row, *self.places[row])
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if start < 0 <= length
        ]
        return Tokenize(slot, array("i", starts).tobytes(), array("i", lengths).tobytes(), overflow)

    def index(self, handler: Handler, check: str, **more: Any) -> Indexed:
        """The row index of every block."""
        reply = handler(Index(self.files.blocks(range(self.files.num_blocks)), check, **more))
        assert isinstance(reply, Indexed), reply
        return reply


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for handler in bench.handlers:
        handler.close()


def ints(data: bytes, kind: str = "i") -> list[int]:
    return array(kind, data).tolist()


def tokens_of(reply: Any) -> list[list[int]]:
    """The tokens of each sample."""
    assert isinstance(reply, Tokenized), reply
    tokens, ends = ints(reply.tokens), ints(reply.token_ends, "I")
    return [tokens[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


class Reluctant:
    """Accepts rows, and raises for a chosen one."""

    def __init__(self, refused: bytes, error: BaseException) -> None:
        self.refused = refused
        self.error = error
        self.calls: list[int] = []

    def __call__(self, rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
        self.calls.append(len(rows))
        for row, raw in enumerate(rows):
            if bytes(raw) == self.refused:
                raise self.error
            if bytes(raw) == b"drop":
                out.drop(row, "as told")
            else:
                out.keep(row, list(raw))


# Scanning.


def test_a_scan_copies_every_block_into_the_slot_and_finds_its_rows(bench, jsonl_file):
    rows = [{"id": number, "pad": "x" * (number * 7 % 10)} for number in range(20)]
    path = jsonl_file(rows)
    counts, starts, lengths = bench.scan(bench.open([path]))
    lines = path.read_bytes().splitlines()

    found = [bytes(bench.slots[0][start : start + length]) for start, length in zip(starts, lengths, strict=True)]

    assert found == lines
    assert sum(counts) == len(lines)
    assert len(counts) == -(-path.stat().st_size // BLOCK_BYTES)
    assert [start // STRIDE for start in starts] == [block for block, count in enumerate(counts) for _ in range(count)]


def test_a_scan_may_begin_anywhere_in_any_slot_and_writes_nothing_else(bench, jsonl_file):
    handler = bench.open([jsonl_file([{"id": 1}])])

    assert bench.scan(handler, slot=1, base=5 * STRIDE) == ([1], [5 * STRIDE + 1], [9])
    assert bytes(bench.slots[1][5 * STRIDE :][:12]) == b'\n{"id": 1}\n?'
    assert set(bench.slots[1][: 5 * STRIDE]) == set(bench.slots[0]) == {ord("?")}


def test_blocks_of_many_files_are_scanned_in_the_requests_order(bench, jsonl_file):
    paths = [jsonl_file([{"id": number}], f"{number}.jsonl") for number in range(3)]
    handler = bench.open(paths)
    reply = handler(Scan(0, 0, [Block(2, 0, 10), Block(0, 0, 10), Block(1, 0, 10)]))
    starts, lengths = ints(reply.starts), ints(reply.lengths)

    assert tokens_of(handler(bench.rows(starts, lengths))) == [[2], [0], [1]]


# Tokenizing.


def test_rows_come_in_the_order_of_the_request_not_of_the_file(bench, jsonl_file):
    handler = bench.open([jsonl_file([{"id": number} for number in range(5)])])
    _, starts, lengths = bench.scan(handler)

    reply = handler(bench.rows(starts[::-1], lengths[::-1]))

    assert tokens_of(reply) == [[4], [3], [2], [1], [0]]
    assert reply.kept == b""
    assert reply.errors == []
    assert reply.busy_s > 0


@pytest.mark.parametrize(("cpu_s", "passed_s", "work_s"), [(3.0, 3.5, 3.0), (0.5, 40.0, 10.0), (0.0, 0.0, 0.0)])
def test_busy_time_is_cpu_time_or_a_quarter_of_the_wall_time(bench, jsonl_file, monkeypatch, cpu_s, passed_s, work_s):
    """Other load on the machine does not count."""
    clock = SimpleNamespace(now_s=100.0, cpu_s=7.0)
    stopped = SimpleNamespace(perf_counter=lambda: clock.now_s, thread_time=lambda: clock.cpu_s)
    monkeypatch.setattr(handlers, "time", stopped)

    def works(row):
        clock.now_s, clock.cpu_s = clock.now_s + passed_s, clock.cpu_s + cpu_s
        return [1]

    handler = bench.open([jsonl_file([{"id": 1}])], FunctionTokenizer(works))
    _, starts, lengths = bench.scan(handler)

    assert handler(bench.rows(starts, lengths)).busy_s == work_s


def test_progress_uses_the_row_numbers_of_the_request(bench, jsonl_file):
    rows = [{"id": 0, "pad": "x" * MAX_ROW_BYTES}, {"id": 1}, {"id": 2}]
    handler = bench.open([jsonl_file(rows)])
    _, starts, lengths = bench.scan(handler)
    handler(bench.rows(starts, lengths))

    assert bench.progress == [1, 2]


# Rows that another rank tokenizes.


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_another_rank_tokenizes_are_skipped(bench, jsonl_file, fails):
    texts = [b"one", b"two", b"x" * (MAX_ROW_BYTES + 1), b"bad", b"y" * (MAX_ROW_BYTES + 1), b"six"]
    tokenizer = Reluctant(b"bad" if fails else b"none", ValueError("oh"))
    handler = bench.open([jsonl_file(texts)], tokenizer)
    _, starts, lengths = bench.scan(handler)
    expected = array("i", [3, -4, -8, 3, 3, 3]).tobytes()

    reply = handler(msgspec.structs.replace(bench.rows(starts, lengths), expected=expected))

    assert [bytes(tokens) for tokens in tokens_of(reply)] == ([b"one", b"six"] if fails else [b"one", b"bad", b"six"])
    assert ints(reply.kept) == ([0, 5] if fails else [0, 3, 5])
    assert [(error.row, error.code) for error in reply.errors] == [(3, "AD421")] * fails + [(4, "AD108")]
    assert reply.expected == expected
    assert bench.progress == ([0, 3, 5] if fails else [])


# Sums.


def test_token_sums_are_the_crc_of_each_samples_tokens_if_requested(bench, jsonl_file):
    path = jsonl_file([{"prompt": text} for text in ("one", "", "three")])
    tokenizer = FunctionTokenizer(characters)
    plain, summing = bench.open([path], tokenizer), bench.open([path], tokenizer, with_token_sums=True)
    _, starts, lengths = bench.scan(plain)
    without, reply = (handler(bench.rows(starts, lengths)) for handler in (plain, summing))

    assert without.token_sums == b""
    assert tokens_of(reply) == tokens_of(without)
    assert ints(reply.token_sums, "I") == [crc32(np.array(tokens, "<i4").tobytes()) for tokens in tokens_of(reply)]


# The row index.

MIXED = [
    b'{"id": 0}',
    b"no object",
    b"",
    b'{"id": 1, "pad": "' + b"x" * MAX_ROW_BYTES + b'"}',
    b'{"id": 2, "pad": "' + b"y" * 150 + b'"}',  # longer than a block and what is read beyond it
    b"[3]",
    b'{"id": 3}',
]


def offsets_of(lines: list[bytes]) -> list[int]:
    """Where each line that is not blank begins in the file."""
    begins = np.cumsum([0, *(len(line) + 1 for line in lines)]).tolist()
    return [begin for begin, line in zip(begins, lines, strict=False) if line]


def begins_in_file(bench: Bench, found: Indexed) -> list[int]:
    blocks = bench.files.blocks(range(bench.files.num_blocks))
    starts = [block.start for block, count in zip(blocks, ints(found.counts), strict=True) for _ in range(count)]
    return [start + offset for start, offset in zip(starts, ints(found.offsets), strict=True)]


def test_an_index_locates_the_rows_and_checks_what_it_is_told_to_without_the_users_function(bench, jsonl_file):
    handler = bench.open([jsonl_file(MIXED)])
    found, checked = bench.index(handler, "none"), bench.index(handler, "json")

    assert begins_in_file(bench, found) == offsets_of(MIXED)
    assert ints(found.lengths) == [len(line) if len(line) <= MAX_ROW_BYTES else -1 for line in MIXED if line]
    assert (found.marks, found.num_tokens, found.errors, found.num_blank) == (b"", b"", [], 1)
    assert list(checked.marks) == [0, 2, 2, 0, 2, 0]
    assert [(error.row, error.code) for error in checked.errors] == [(1, "AD101"), (2, "AD108"), (4, "AD113")]
    assert checked.num_tokens == b""
    assert bench.progress == [], "no user function ran"


def test_an_index_of_samples_counts_their_tokens_and_gives_the_reason_of_each_bad_row(bench, jsonl_file):
    texts = [b"one", b"drop", b"bad", b"x" * (MAX_ROW_BYTES + 1), b"y" * 150, b"drop", b"two!", b"lost"]
    handler = bench.open([jsonl_file(texts)], Reluctant(b"bad", ValueError("oh")))
    found = bench.index(handler, "samples", lost=[7])

    assert ints(found.num_tokens) == [3, 0, 0, 0, 150, 0, 4, 0]
    assert list(found.marks) == [0, 1, 1, 2, 0, 1, 0, 1]
    assert found.drops == {"as told": 2}
    assert [(error.row, error.code) for error in found.errors] == [(2, "AD421"), (3, "AD108")]
    assert 7 not in bench.progress, "it brought down a worker before"


@pytest.mark.parametrize("check", ["none", "json", "samples"])
def test_offsets_of_copied_rows_refer_to_the_copy(bench, jsonl_file, tmp_path, check):
    handler = bench.open([jsonl_file(MIXED)])
    copy = tmp_path / "copy.rows"
    found = bench.index(handler, check, spool=str(copy))
    kept = [b"" if len(line) > MAX_ROW_BYTES else line for line in MIXED if line]

    data, offsets = copy.read_bytes(), ints(found.offsets)
    assert [data[offset : offset + len(line)] for offset, line in zip(offsets, kept, strict=True)] == kept
    assert offsets == np.cumsum([0, *(len(line) + 4 for line in kept[:-1])]).tolist(), "a checksum after each"
    assert ints(found.lengths) == [len(line) or -1 for line in kept]


def test_permute_shuffles_as_pythons_generator_does(bench, jsonl_file):
    rows = list(range(50))
    random.Random(7).shuffle(rows)

    assert ints(bench.open([jsonl_file([{"id": 1}])])(Permute(50, 7)).rows, "I") == rows


# Plans.


def test_a_plan_of_packs_is_made_and_an_impossible_one_is_a_config_error(bench, jsonl_file):
    handler = bench.open([jsonl_file([{"id": 1}])])
    order = PlannedOrder(Plan(packing=SoftPacking(max_length=8, across_epochs=False)), RowShuffle(method="none"), 0)

    packed, failed = (
        handler(order.request_packs(np.array(lengths, np.int32), np.array([len(lengths)]), 0))
        for lengths in ([5, 3, 4], [5, 9])
    )

    assert isinstance(packed, Packed)
    assert ints(packed.rows) == [0, 1, 2]
    assert isinstance(failed, Failed)
    assert failed.kind == "ConfigError"
    assert failed.message.startswith("AD450 sample 1 has 9 tokens")
    assert isinstance(error_of(failed), ConfigError)


def test_slow_library_code_reports_progress_by_a_heartbeat(bench, jsonl_file, monkeypatch):
    handler = bench.open([jsonl_file([{"id": 1}])])
    is_going_on = threading.Event()

    def progress(row: int) -> None:
        bench.progress.append(row)
        if len(bench.progress) == 3:
            is_going_on.set()

    def permute_slowly(request: Permute) -> Permuted:
        assert is_going_on.wait(240)
        return Permuted(b"")

    monkeypatch.setattr(handler, "_progress", progress)
    monkeypatch.setattr("asyncdata.workers.request_handler._BEAT_S", 0.001)
    monkeypatch.setattr("asyncdata.workers.request_handler.permute", permute_slowly)

    assert handler(Permute(3, 0)) == Permuted(b"")
    assert bench.progress[:3] == [-2, -1, -2], "no row in particular"


# A tokenizer that raises.


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(3), BaseException("a panic in Rust")], ids=repr)
def test_a_tokenizer_that_raises_for_one_row_loses_only_that_row(bench, jsonl_file, error):
    tokenizer = Reluctant(b"bad", error)
    handler = bench.open([jsonl_file([b"one", b"drop", b"bad", b"x" * (MAX_ROW_BYTES + 1), b"two"])], tokenizer)
    _, starts, lengths = bench.scan(handler)

    reply = handler(bench.rows(starts, lengths))

    assert [bytes(tokens) for tokens in tokens_of(reply)] == [b"one", b"two"]
    assert ints(reply.kept) == [0, 4]
    assert {reason: ints(rows) for reason, rows in reply.drops.items()} == {"as told": [1]}
    assert [(found.row, found.code) for found in reply.errors] == [(2, "AD421"), (3, "AD108")]
    assert reply.errors[0].reason == f"the tokenizer raised {error!r}"
    assert reply.errors[0].excerpt == "bad"
    assert type(error).__name__ in reply.errors[0].traceback
    assert tokenizer.calls == [4, 1, 1, 1, 1]
    assert bench.progress == [0, 1, 2, 4]


# Files.


def test_a_file_that_has_shrunk_fails_its_overflowing_rows_too(bench, jsonl_file):
    path = jsonl_file([{"id": 1, "pad": "x" * 200}])
    handler = bench.open([path])
    _, starts, lengths = bench.scan(handler)
    os.truncate(path, 100)

    assert handler(bench.rows(starts, lengths)).kind == "SourceChangedError"


def test_an_invalid_request_is_answered_with_the_traceback(bench, jsonl_file):
    handler = bench.open([jsonl_file([{"id": 1}])])

    for request in (Scan(9, 0, [Block(0, 0, 10)]), Scan(0, 0, [Block(7, 0, 10)]), Scan(0, 1 << 40, [Block(0, 0, 10)])):
        reply = handler(request)

        assert (type(reply), reply.kind) == (Failed, "WorkerError")
        assert "Traceback" in reply.traceback


def open_files(folder: Path) -> list[str]:
    """The open files of this process in ``folder``."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/")]


def test_no_more_than_64_files_are_open_however_many_there_are(bench, jsonl_file, tmp_path):
    handler = bench.open([jsonl_file([{"id": number}], f"{number:03}.jsonl") for number in range(100)])
    blocks: Callable[[range], list[Block]] = lambda ids: [Block(number, 0, 10) for number in ids]  # noqa: E731

    for first in (0, 50, 0):
        reply = handler(Scan(0, 0, blocks(range(first, first + 50))))
        starts, lengths = ints(reply.starts), ints(reply.lengths)
        assert [tokens for (tokens,) in tokens_of(handler(Tokenize(0, reply.starts, reply.lengths)))] == [
            *range(first, first + 50)
        ]
        assert len(starts) == len(lengths) == 50
        assert len(open_files(tmp_path)) <= 64


def test_files_are_opened_when_they_are_needed_and_closed_at_the_end(bench, jsonl_file, tmp_path):
    handler = bench.open([jsonl_file([{"id": 1}])])

    handler(Tokenize(0, b"", b""))
    assert open_files(tmp_path) == []
    bench.scan(handler)
    assert open_files(tmp_path)
    handler.close()
    handler.close()
    assert open_files(tmp_path) == []
