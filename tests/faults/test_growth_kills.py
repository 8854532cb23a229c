"""The trainer's process is killed at random instants while somebody appends to its data."""

from __future__ import annotations

import json
import os
import random
import time
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.support.streaming import SHUFFLE, delivered, num_lines, read_log
from tests.support.faults import Program, num_rounds
from tests.support.figures import record
from tests.support.loading import order_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = num_rounds(quick=4, full=100)
EPOCHS = 4
PART = 10_000
"""Row i of part p has the id ``p * PART + i``."""
MAX_PARTS, MAX_ROWS = 4, 2500


class Writer:
    """Appends rows, some of them in two pieces, and now and then begins a file that comes before all others."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._numbers: list[int] = []
        self._rest = b""
        folder.mkdir()
        self.begin()
        self.write(250)

    def begin(self) -> None:
        """Another file, which has a whole row from the start."""
        part = len(self._numbers)
        self._numbers.append(1)
        path = self._path(part)
        path.with_suffix(".new").write_text(json.dumps({"id": part * PART, "pad": ""}) + "\n", encoding="utf-8")
        path.with_suffix(".new").rename(path)

    def _path(self, part: int) -> Path:
        return self._folder / f"{'zyxw'[part]}.jsonl"

    def write(self, number: int, cut: int = 0) -> None:
        part = len(self._numbers) - 1
        first = self._numbers[part]
        rows = [{"id": part * PART + i, "pad": "x" * (i * 37 % 90)} for i in range(first, first + number)]
        data = self._rest + b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        out = os.open(self._path(part), os.O_WRONLY | os.O_APPEND)
        os.write(out, data[: len(data) - cut])
        os.close(out)
        self._numbers[part], self._rest = first + number, data[len(data) - cut :]

    def go_on(self) -> None:
        if not self._rest and len(self._numbers) < MAX_PARTS and self._chance.random() < 0.02:
            self.begin()
        if sum(self._numbers) < MAX_ROWS:
            self.write(self._chance.randint(1, 4), self._chance.choice([0, 1, 9]))

    def order(self, num_rows: dict[int, int], epoch: int, copies: Path) -> list[int]:
        """D of an epoch that has so many rows of each part, in the order of its files."""
        paths = []
        for part, number in num_rows.items():
            paths.append(copies / f"{part}.jsonl")
            paths[-1].write_bytes(b"".join(self._path(part).read_bytes().splitlines(keepends=True)[:number]))
        every = order_of(paths, epoch + 1, shuffle=SHUFFLE)
        return every[epoch * sum(num_rows.values()) :]


def test_killed_while_its_data_grow_a_run_has_each_epoch_whole_and_in_order(tmp_path):
    chance, num_kills = random.Random(2027), 0
    for number in count():
        if num_kills >= ROUNDS:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        num_kills += _chain(folder, chance, ROUNDS - num_kills)
    record("R2", "growing", kills=num_kills, lost=0, repeated=0, out_of_order=0)


def _chain(folder: Path, chance: random.Random, max_kills: int) -> int:
    """Processes that go on where the one before had last saved, while the data grow."""
    writer, logs, num_kills = Writer(folder / "data", chance), [], 0
    for number in count():
        log = folder / f"log.{number}"
        settings = {
            "paths": str(folder / "data"),
            "kind": "growing",
            "log": str(log),
            "snapshot": str(folder / "snapshot"),
            "batch_size": chance.choice([3, 17]),
            "save_every": chance.randint(1, 4),
            "step_s": chance.choice([0, 0.001]),
            "knobs": {"epochs": EPOCHS, "num_workers": chance.choice([1, 2]), "buffer_size": chance.choice([5, 300])},
        }
        is_last = num_kills >= max_kills
        was_killed = _run(settings, log, None if is_last else chance.randint(1, 60), writer)
        found = read_log(log)
        logs += [] if found is None else [found]
        num_kills += was_killed
        if not was_killed:
            break

    writer.write(0)
    before: dict[int, int] = {}
    epochs = groupby(delivered(logs), key=lambda item: item[1])
    for number, (epoch, items) in enumerate(epochs):
        assert epoch == number
        rows = [item[4] for item in items]
        found = {part: sum(row // PART == part for row in rows) for part in range(MAX_PARTS)}
        new = [part for part in reversed(found) if found[part] and part not in before]  # sorted by their names
        num_rows = {part: found[part] for part in [*before, *new]}
        assert all(num_rows[part] >= before[part] for part in before)
        assert rows == writer.order(num_rows, epoch, folder)
        before = num_rows
    assert number == EPOCHS - 1
    return num_kills


def _run(settings: dict[str, Any], log: Path, kill_after: int | None, writer: Writer) -> bool:
    """A process; whether it was killed, once its log had more than so many lines."""

    def is_due() -> bool:
        writer.go_on()
        return kill_after is not None and num_lines(log) > kill_after

    with Program.of("streaming", settings) as program:
        return program.kill_when(is_due, lambda: time.sleep(0.01))
