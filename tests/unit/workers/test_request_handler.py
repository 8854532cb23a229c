"""What a handler of requests measures and tells while it works; what it answers, loaders show (see integration)."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from asyncdata import DataLoader, JsonlSource
from tests.support.faults import until
from tests.support.inner import change
from tests.support.loading import ids
from tests.support.parts import FunctionTokenizer, Handler, Job, Permute, Permuted, Scan, no_op
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make(jsonl_file) -> Callable[..., Handler]:
    """A handler of a file of some lines, with one slot of plain memory; ``make.scan`` asks it for all samples."""

    def make(tokenizer=None, lines=({"id": 1},), progress=no_op) -> Handler:
        tokenizer = tokenizer or FunctionTokenizer(row_id)
        files = JsonlSource(str(jsonl_file(lines))).open(256)
        job = Job(files=files.files, tokenize=None, max_row_bytes=64, block_bytes=256, slack_bytes=32)
        make.scan = Scan(0, 0, files.blocks([0]), with_samples=True)
        return Handler(job, [memoryview(bytearray(1 + 256 + 32))], tokenizer, progress)

    return make


def test_slow_library_code_reports_progress_by_a_heartbeat(make, monkeypatch):
    beats, is_going_on = list[int](), threading.Event()

    def progress(row: int) -> None:
        beats.append(row)
        if len(beats) == 3:
            is_going_on.set()

    def permute_slowly(request: Permute) -> Permuted:
        assert is_going_on.wait(240)
        return Permuted(b"")

    change(monkeypatch, beat_s=0.001)
    change(monkeypatch, permute=permute_slowly)

    assert make(progress=progress)(Permute(3, 0)) == Permuted(b"")
    assert beats[:3] == [-2, -1, -2], "no row in particular"


def num_open(folder) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith(f"{folder}/") for link in links)


def test_no_more_than_64_files_are_open_however_many_there_are_and_none_when_it_is_closed(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:02}.jsonl").write_text(f'{{"id": {number}}}\n')
    loader = DataLoader(str(tmp_path / "*.jsonl"), tokenize_fn=row_id, num_workers=0, shuffle=False)
    assert num_open(tmp_path) == 0
    with loader:
        assert ids(loader.get_next_batch(100)) == list(range(100))
        assert 0 < num_open(tmp_path) <= 64
    until(lambda: num_open(tmp_path) == 0)
