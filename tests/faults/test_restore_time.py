"""Restoring far after the start takes no longer than near it, and a snapshot hardly stops the trainer."""

import json
import statistics
import time

import pytest

from asyncdata import DataLoader, Shuffle
from tests.faults.support.streaming import entry
from tests.support.figures import record
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import in_batches

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

NUM_ROWS = 200_000
FAR = 10_000_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("far") / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}, "pad": "{"x" * 40}"}}\n' for number in range(NUM_ROWS)))
    return path


def open_loader(path, **knobs):
    shuffle = Shuffle(block_bytes=16 << 10, window_blocks=32)
    return DataLoader(path, tokenize_fn=in_batches, shuffle=shuffle, num_workers=1, timeout_s=NEVER_S, **knobs)


def test_a_restore_at_ten_million_reads_one_window(path):
    """The state is that of a run of fifty epochs: made by setting the epoch, and stepping into the middle of it."""
    epoch = FAR // NUM_ROWS
    with open_loader(path) as loader:
        loader.set_epoch(epoch)
        loader.get_next_batch(NUM_ROWS // 2)
        state = json.dumps(loader.state_dict())
        expected = [entry(sample)[1:] for sample in loader.get_next_batch(100)]
    assert expected[0][0] == epoch

    took = []
    for _ in range(3):
        with open_loader(path) as loader:
            began = time.monotonic()
            loader.load_state_dict(json.loads(state))
            found = loader.get_next_batch(100)
            took.append(time.monotonic() - began)
        assert [entry(sample)[1:] for sample in found] == expected

    record("R12", "restore to the first batch", position=FAR + NUM_ROWS // 2, restore_s=statistics.median(took))


def test_a_snapshot_hardly_stops_the_trainer(path):
    pauses = []
    with open_loader(path, n_samples_per_prompt=8) as loader:
        loader.state_dict()  # the files' fingerprints are made once
        for _ in range(50):
            loader.get_samples(64)
            began = time.monotonic()
            loader.state_dict()
            pauses.append(1000 * (time.monotonic() - began))

    record("R12", "state_dict()", pause_ms=statistics.median(pauses))
