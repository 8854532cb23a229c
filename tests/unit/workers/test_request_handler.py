"""A handler answers every request: it scans blocks into a slot, tokenizes rows, and returns failures as values."""

from __future__ import annotations

import os
import random
import threading
from array import array
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest

from asyncdata import JsonlSource, RowShuffle, SoftPacking
from asyncdata.batching.planned import PlannedOrder
from asyncdata.batching.rules import PackRules
from asyncdata.core.messages import Block, Failed, Index, Job, Overflow, Packed, Permute, Permuted, Scan, Tokenize
from asyncdata.errors import ConfigError
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers import request_handler as handlers
from asyncdata.workers.base import error_of
from asyncdata.workers.request_handler import Handler
from tests.support.tokenize_fns import characters, row_id

BLOCK_BYTES = 64
SLACK_BYTES = 32
STRIDE = 1 + BLOCK_BYTES + SLACK_BYTES
MAX_ROW_BYTES = 300
TOO_LONG = b"x" * (MAX_ROW_BYTES + 1)
ONE = [{"id": 1}]


class Bench:
    """Handlers over files of lines, with two slots of plain memory."""

    def __init__(self, jsonl_file) -> None:
        self.handlers: list[Handler] = []
        self.progress: list[int] = []
        self.note = self.progress.append
        self.slots = [bytearray(b"?" * 64 * STRIDE) for _ in range(2)]
        self._write = jsonl_file

    def open(self, lines: Any, tokenizer: Any = None, *, num_files: int = 1, **more: Any) -> Handler:
        """A handler of one file, or of several with as many lines each."""
        size = len(lines) // num_files
        self.paths = [self._write(lines[i * size :][:size], f"{i:03}.jsonl") for i in range(num_files)]
        self.files = JsonlSource([str(path) for path in self.paths]).open(BLOCK_BYTES)
        sizes = {"max_row_bytes": MAX_ROW_BYTES, "block_bytes": BLOCK_BYTES, "slack_bytes": SLACK_BYTES}
        job = Job(files=self.files.files, tokenize=None, **sizes, **more)
        slots = [memoryview(slot) for slot in self.slots]
        self.handlers.append(Handler(job, slots, tokenizer or FunctionTokenizer(row_id), lambda row: self.note(row)))
        return self.handlers[-1]

    @property
    def blocks(self) -> list[Block]:
        return self.files.blocks(range(self.files.num_blocks))

    def scan(self, handler: Handler, slot: int = 0, base: int = 0) -> tuple[list[int], list[int], list[int]]:
        """The counts, starts and lengths that a scan of every block returns."""
        reply = handler(Scan(slot, base, self.blocks))
        counts, offsets = ints(reply.counts), ints(reply.offsets)
        blocks = [block for block, count in zip(self.blocks, counts, strict=True) for _ in range(count)]
        self.places = [(block.file_id, block.start + offset) for block, offset in zip(blocks, offsets, strict=True)]
        return counts, ints(reply.starts), ints(reply.lengths)

    def request(self, starts: list[int], lengths: list[int], **more: Any) -> Tokenize:
        """The request for these rows of slot 0, as the trainer's process makes it."""
        rows = enumerate(zip(starts, lengths, strict=True))
        overflow = [Overflow(row, *self.places[row]) for row, (start, length) in rows if start < 0 <= length]
        request = Tokenize(0, array("i", starts).tobytes(), array("i", lengths).tobytes(), overflow)
        return msgspec.structs.replace(request, **more)

    def tokenized(self, handler: Handler, step: int = 1, **more: Any) -> Any:
        _, starts, lengths = self.scan(handler)
        return handler(self.request(starts[::step], lengths[::step], **more))


@pytest.fixture
def bench(jsonl_file):
    bench = Bench(jsonl_file)
    yield bench
    for handler in bench.handlers:
        handler.close()


def ints(data: bytes, kind: str = "i") -> list[int]:
    return array(kind, data).tolist()


def tokens_of(reply) -> list[list[int]]:
    tokens, ends = ints(reply.tokens), ints(reply.token_ends, "I")
    return [tokens[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def errors_of(reply) -> list[tuple[int, str]]:
    return [(error.row, error.code) for error in reply.errors]


class Reluctant:
    """Accepts rows, and raises for a chosen one."""

    def __init__(self, refused: bytes, error: BaseException) -> None:
        self.refused = refused
        self.error = error
        self.calls: list[int] = []

    def __call__(self, rows: Any, out: Any) -> None:
        self.calls.append(len(rows))
        for row, raw in enumerate(rows):
            if bytes(raw) == self.refused:
                raise self.error
            if bytes(raw) == b"drop":
                out.drop(row, "as told")
            else:
                out.keep(row, list(raw))


# Scanning.


def test_a_scan_copies_every_block_into_the_slot_and_finds_its_rows(bench):
    counts, starts, lengths = bench.scan(bench.open([{"id": i, "pad": "x" * (i * 7 % 10)} for i in range(20)]))
    found = [bytes(bench.slots[0][start : start + length]) for start, length in zip(starts, lengths, strict=True)]

    assert found == bench.paths[0].read_bytes().splitlines()
    assert sum(counts) == 20
    assert len(counts) == -(-bench.paths[0].stat().st_size // BLOCK_BYTES)
    assert [start // STRIDE for start in starts] == [block for block, count in enumerate(counts) for _ in range(count)]


def test_a_scan_may_begin_anywhere_in_any_slot_and_writes_nothing_else(bench):
    assert bench.scan(bench.open(ONE), slot=1, base=5 * STRIDE) == ([1], [5 * STRIDE + 1], [9])
    assert bytes(bench.slots[1][5 * STRIDE :][:12]) == b'\n{"id": 1}\n?'
    assert set(bench.slots[1][: 5 * STRIDE]) == set(bench.slots[0]) == {ord("?")}


def test_blocks_of_many_files_are_scanned_in_the_requests_order(bench):
    handler = bench.open([{"id": number} for number in range(3)], num_files=3)
    reply = handler(Scan(0, 0, [Block(2, 0, 10), Block(0, 0, 10), Block(1, 0, 10)]))

    assert tokens_of(handler(bench.request(ints(reply.starts), ints(reply.lengths)))) == [[2], [0], [1]]


# Tokenizing.


def test_rows_come_in_the_order_of_the_request_not_of_the_file(bench):
    reply = bench.tokenized(bench.open([{"id": number} for number in range(5)]), step=-1)

    assert tokens_of(reply) == [[4], [3], [2], [1], [0]]
    assert reply.kept == b""
    assert reply.errors == []
    assert reply.busy_s > 0


@pytest.mark.parametrize(("cpu_s", "passed_s", "work_s"), [(3.0, 3.5, 3.0), (0.5, 40.0, 10.0), (0.0, 0.0, 0.0)])
def test_busy_time_is_cpu_time_or_a_quarter_of_the_wall_time(bench, monkeypatch, cpu_s, passed_s, work_s):
    """Other load on the machine does not count."""
    clock = SimpleNamespace(now_s=100.0, cpu_s=7.0)
    stopped = SimpleNamespace(perf_counter=lambda: clock.now_s, thread_time=lambda: clock.cpu_s)
    monkeypatch.setattr(handlers, "time", stopped)

    def works(row):
        clock.now_s, clock.cpu_s = clock.now_s + passed_s, clock.cpu_s + cpu_s
        return [1]

    assert bench.tokenized(bench.open(ONE, FunctionTokenizer(works))).busy_s == work_s


def test_progress_uses_the_row_numbers_of_the_request(bench):
    bench.tokenized(bench.open([{"id": 0, "pad": "x" * MAX_ROW_BYTES}, {"id": 1}, {"id": 2}]))

    assert bench.progress == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_another_rank_tokenizes_are_skipped(bench, fails):
    tokenizer = Reluctant(b"bad" if fails else b"none", ValueError("oh"))
    expected = array("i", [3, -4, -8, 3, 3, 3]).tobytes()
    handler = bench.open([b"one", b"two", TOO_LONG, b"bad", TOO_LONG, b"six"], tokenizer)
    reply = bench.tokenized(handler, expected=expected)

    assert [bytes(tokens) for tokens in tokens_of(reply)] == ([b"one", b"six"] if fails else [b"one", b"bad", b"six"])
    assert ints(reply.kept) == ([0, 5] if fails else [0, 3, 5])
    assert errors_of(reply) == [(3, "AD421")] * fails + [(4, "AD108")]
    assert reply.expected == expected
    assert bench.progress == ([0, 3, 5] if fails else [])


def test_token_sums_are_the_crc_of_each_samples_tokens_if_requested(bench):
    lines, tokenizer = [{"prompt": text} for text in ("one", "", "three")], FunctionTokenizer(characters)
    without = bench.tokenized(bench.open(lines, tokenizer))
    reply = bench.tokenized(bench.open(lines, tokenizer, with_token_sums=True))

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


def test_an_index_locates_the_rows_and_checks_what_it_is_told_to_without_the_users_function(bench):
    handler = bench.open(MIXED)
    found, checked = handler(Index(bench.blocks, "none")), handler(Index(bench.blocks, "json"))
    begins = np.cumsum([0, *(len(line) + 1 for line in MIXED)]).tolist()
    blocks = [block.start for block, count in zip(bench.blocks, ints(found.counts), strict=True) for _ in range(count)]

    assert [start + offset for start, offset in zip(blocks, ints(found.offsets), strict=True)] == [
        begin for begin, line in zip(begins, MIXED, strict=False) if line
    ]
    assert ints(found.lengths) == [len(line) if len(line) <= MAX_ROW_BYTES else -1 for line in MIXED if line]
    assert (found.marks, found.num_tokens, found.errors, found.num_blank) == (b"", b"", [], 1)
    assert list(checked.marks) == [0, 2, 2, 0, 2, 0]
    assert errors_of(checked) == [(1, "AD101"), (2, "AD108"), (4, "AD113")]
    assert checked.num_tokens == b""
    assert bench.progress == [], "no user function ran"


def test_an_index_of_samples_counts_their_tokens_and_gives_the_reason_of_each_bad_row(bench):
    texts = [b"one", b"drop", b"bad", TOO_LONG, b"y" * 150, b"drop", b"two!", b"lost"]
    handler = bench.open(texts, Reluctant(b"bad", ValueError("oh")))
    found = handler(Index(bench.blocks, "samples", lost=[7]))

    assert ints(found.num_tokens) == [3, 0, 0, 0, 150, 0, 4, 0]
    assert list(found.marks) == [0, 1, 1, 2, 0, 1, 0, 1]
    assert found.drops == {"as told": 2}
    assert errors_of(found) == [(2, "AD421"), (3, "AD108")]
    assert 7 not in bench.progress, "it brought down a worker before"


@pytest.mark.parametrize("check", ["none", "json", "samples"])
def test_offsets_of_copied_rows_refer_to_the_copy(bench, tmp_path, check):
    handler, copy = bench.open(MIXED), tmp_path / "copy.rows"
    found = handler(Index(bench.blocks, check, spool=str(copy)))
    kept = [b"" if len(line) > MAX_ROW_BYTES else line for line in MIXED if line]

    data, offsets = copy.read_bytes(), ints(found.offsets)
    assert [data[offset : offset + len(line)] for offset, line in zip(offsets, kept, strict=True)] == kept
    assert offsets == np.cumsum([0, *(len(line) + 4 for line in kept[:-1])]).tolist(), "a checksum after each"
    assert ints(found.lengths) == [len(line) or -1 for line in kept]


# Orders and plans.


def test_permute_shuffles_as_pythons_generator_does(bench):
    rows = list(range(50))
    random.Random(7).shuffle(rows)

    assert ints(bench.open(ONE)(Permute(50, 7)).rows, "I") == rows


def test_a_plan_of_packs_is_made_and_an_impossible_one_is_a_config_error(bench):
    handler = bench.open(ONE)
    order = PlannedOrder(
        PackRules(packing=SoftPacking(max_length=8, across_epochs=False)), RowShuffle(method="none"), 0
    )
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


def test_slow_library_code_reports_progress_by_a_heartbeat(bench, monkeypatch):
    handler, is_going_on = bench.open(ONE), threading.Event()

    def progress(row: int) -> None:
        bench.progress.append(row)
        if len(bench.progress) == 3:
            is_going_on.set()

    def permute_slowly(request: Permute) -> Permuted:
        assert is_going_on.wait(240)
        return Permuted(b"")

    bench.note = progress
    monkeypatch.setattr(handlers, "_BEAT_S", 0.001)
    monkeypatch.setattr(handlers, "permute", permute_slowly)

    assert handler(Permute(3, 0)) == Permuted(b"")
    assert bench.progress[:3] == [-2, -1, -2], "no row in particular"


# What fails.


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(3), BaseException("a panic in Rust")], ids=repr)
def test_a_tokenizer_that_raises_for_one_row_loses_only_that_row(bench, error):
    tokenizer = Reluctant(b"bad", error)
    reply = bench.tokenized(bench.open([b"one", b"drop", b"bad", TOO_LONG, b"two"], tokenizer))

    assert [bytes(tokens) for tokens in tokens_of(reply)] == [b"one", b"two"]
    assert ints(reply.kept) == [0, 4]
    assert {reason: ints(rows) for reason, rows in reply.drops.items()} == {"as told": [1]}
    assert errors_of(reply) == [(2, "AD421"), (3, "AD108")]
    assert reply.errors[0].reason == f"the tokenizer raised {error!r}"
    assert reply.errors[0].excerpt == "bad"
    assert type(error).__name__ in reply.errors[0].traceback
    assert tokenizer.calls == [4, 1, 1, 1, 1]
    assert bench.progress == [0, 1, 2, 4]


def test_a_file_that_has_shrunk_fails_its_overflowing_rows_too(bench):
    handler = bench.open([{"id": 1, "pad": "x" * 200}])
    _, starts, lengths = bench.scan(handler)
    os.truncate(bench.paths[0], 100)

    assert handler(bench.request(starts, lengths)).kind == "SourceChangedError"


@pytest.mark.parametrize("place", [(9, 0, 0), (0, 0, 7), (0, 1 << 40, 0)], ids=["slot", "file", "base"])
def test_an_invalid_request_is_answered_with_the_traceback(bench, place):
    slot, base, file_id = place
    reply = bench.open(ONE)(Scan(slot, base, [Block(file_id, 0, 10)]))

    assert (type(reply), reply.kind) == (Failed, "WorkerError")
    assert "Traceback" in reply.traceback


# Files.


def num_open(folder) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/") for link in links)


def test_no_more_than_64_files_are_open_however_many_there_are(bench, tmp_path):
    handler = bench.open([{"id": number} for number in range(100)], num_files=100)
    for first in (0, 50, 0):
        reply = handler(Scan(0, 0, [Block(number, 0, 10) for number in range(first, first + 50)]))
        found = tokens_of(handler(Tokenize(0, reply.starts, reply.lengths)))
        assert found == [[number] for number in range(first, first + 50)]
        assert 0 < num_open(tmp_path) <= 64


def test_files_are_opened_when_they_are_needed_and_closed_at_the_end(bench, tmp_path):
    handler = bench.open(ONE)
    handler(Tokenize(0, b"", b""))
    assert num_open(tmp_path) == 0
    bench.scan(handler)
    assert num_open(tmp_path) == 1
    handler.close()
    handler.close()
    assert num_open(tmp_path) == 0
