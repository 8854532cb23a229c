"""A run goes back to a snapshot and continues without some rows, and is killed at random instants around that."""

from __future__ import annotations

import random
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader
from tests.faults.support.streaming import SHUFFLE, Log, delivered, entry, num_lines, read_log, source_of
from tests.support.faults import Program, num_rounds
from tests.support.figures import record
from tests.support.loading import write_rows
from tests.support.tokenize_fns import id_and_text

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = {"files": num_rounds(quick=3, full=100), "mixture": num_rounds(quick=2, full=100)}
NUM_ROWS = (300, 20, 200)
EPOCHS = 2


@pytest.mark.parametrize("kind", ROUNDS)
def test_killed_around_an_exclusion_a_run_has_every_other_row_once_and_in_order(tmp_path, kind):
    chance, num_kills, num_chains = random.Random(f"2026 {kind}"), 0, 0
    while num_kills < ROUNDS[kind]:
        num_kills += _chain(tmp_path / str(num_chains), chance, kind, ROUNDS[kind] - num_kills)
        num_chains += 1
    record("R2", f"exclusion, {kind}", kills=num_kills, lost=0, repeated=0, out_of_order=0)


def _chain(folder: Any, chance: random.Random, kind: str, max_kills: int) -> int:
    """Processes that go on where the one before had last saved; all but the first are told which rows to leave out."""
    folder.mkdir()
    files = [
        write_rows(folder / f"{part}.jsonl", number, {i: {"id": part * 10_000 + i} for i in range(number)})
        for part, number in enumerate(NUM_ROWS)
    ]
    paths = list(map(str, files))
    with DataLoader(source_of(kind, paths), tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=0) as loader:
        bad = chance.sample(loader.peek(sum(NUM_ROWS)), chance.choice([1, 40]))
    with DataLoader(
        source_of(kind, paths), tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=0, epochs=EPOCHS
    ) as loader:
        whole = [entry(sample) for sample in loader.get_next_batch(EPOCHS * sum(NUM_ROWS))]
    rows = [
        {"path": sample.source.path, "byte_offset": sample.source.byte_offset, "source": sample.source_name}
        for sample in bad
        if sample.source is not None
    ]
    logs: list[Log] = []
    num_kills = 0
    for number in count():
        settings = {
            "paths": paths,
            "kind": kind,
            "log": str(folder / f"log.{number}"),
            "snapshot": str(folder / "snapshot"),
            "batch_size": chance.choice([3, 17]),
            "save_every": chance.randint(1, 4),
            "step_s": chance.choice([0, 0.001]),
            "knobs": {"epochs": EPOCHS, "num_workers": chance.choice([1, 2]), "buffer_size": chance.choice([5, 300])},
            "excluded": rows if number else [],
        }
        kill_after = chance.randint(1, 12 if number < 4 else 60)
        was_killed = _run(settings, kill_after if num_kills < max_kills and number < 6 else None, chance.random())
        found = read_log(folder / f"log.{number}")
        logs += [] if found is None else [found]
        num_kills += was_killed
        if not was_killed:
            break

    told_at = [found.resumed_at for found in logs[1:] if not found.was_told]
    first = max(told_at, default=len(whole))  # each of them began at the same snapshot, of the first process
    out = {entry(sample)[4] for sample in bad}
    expected = whole[:first] + [item for item in whole[first:] if item[4] not in out]
    entries = delivered(logs)
    assert [item[0] for item in entries] == list(range(len(expected)))
    if kind == "mixture":  # where one part has fewer rows, the others come sooner
        assert _by_part(entries) == _by_part(expected)
    else:
        assert [item[1:] for item in entries] == [item[1:] for item in expected]
    return num_kills


def _run(settings: dict[str, Any], kill_after: int | None, delay: float) -> bool:
    """A process; whether it was killed, once its log had more than so many lines."""
    log = Path(settings["log"])
    is_due = None if kill_after is None else lambda: num_lines(log) > kill_after
    with Program.of("streaming", settings) as program:
        return program.kill_when(is_due, lambda: time.sleep(delay * 0.02))


def _by_part(entries: list[list[int]]) -> list[list[list[int]]]:
    """What was delivered of each part, in order, without the places in D."""
    return [[item[4:] for item in entries if item[4] // 10_000 == part] for part in range(len(NUM_ROWS))]
