"""The trainer's process is killed at random instants; what it had, and what its successors get, is D."""

from __future__ import annotations

import gzip
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.support.streaming import Log, delivered, num_lines, read_log
from tests.support.faults import Program, num_rounds, say, until
from tests.support.figures import record
from tests.support.loading import write_rows
from tests.support.streams import frames, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = {
    "files": num_rounds(quick=3, full=90),
    "mixture": num_rounds(quick=2, full=100),
    **dict.fromkeys(("gzip", "zstd", "array", "iterable", "hf stream"), num_rounds(quick=1, full=4)),
}
"""Of each kind of data, how many processes are killed."""
NUM_ROWS = (700, 30, 450)
EPOCHS = 2


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def coded(path: Path, kind: str) -> Path:
    """The file as it is read: compressed, an array, or as it is."""
    data = path.read_bytes()
    if kind == "gzip":
        return write(path.with_suffix(".jsonl.gz"), gzip.compress(data))

    if kind == "zstd":
        return write(path.with_suffix(".jsonl.zst"), frames([data[: len(data) // 2], data[len(data) // 2 :]]))

    return write(path.with_suffix(".json"), b"[" + b",".join(data.splitlines()) + b"]") if kind == "array" else path


def special_ids(part: int, num: int) -> dict[int, dict[str, int]]:
    """No two rows of all files are alike."""
    return {i: {"id": part * 10_000 + i} for i in range(num)}


class Chain:
    """Processes that go on, one after another, where the one before had last saved."""

    def __init__(self, folder: Path, chance: random.Random, kind: str = "files") -> None:
        folder.mkdir()
        self.folder = folder
        self.kind = kind
        self.logs: list[Log] = []
        self._chance = chance
        self._paths = [
            str(coded(write_rows(folder / f"{part}.jsonl", num, special_ids(part, num)), kind))
            for part, num in enumerate(NUM_ROWS)
        ]

    def settings(self, log: Path, **knobs: Any) -> dict[str, Any]:
        chance = self._chance
        return {
            "paths": self._paths,
            "kind": self.kind,
            "log": str(log),
            "snapshot": str(self.folder / "snapshot"),
            "batch_size": chance.choice([1, 3, 8, 17] if self.kind == "files" else [8, 17]),  # each save takes its time
            "save_every": chance.randint(1, 5),
            "step_s": chance.choice([0, 0.0005, 0.002]),
            "knobs": {
                "epochs": EPOCHS,
                "num_workers": chance.choice([1, 2, 3]),
                "buffer_size": chance.choice([1, 40, 1000]),
                "dp_size": chance.choice([1, 8]),
                **knobs,
            },
        }

    def run(self, number: int, *, may_kill: bool) -> bool:
        """One more process; whether it was killed before the end."""
        log = self.folder / f"log.{number}"
        kill_after = self._chance.choice([0, 1, self._chance.randint(2, 150)])
        with Program.of("streaming", self.settings(log)) as program:
            if may_kill:
                until(lambda: num_lines(log) > kill_after or program.has_ended)
                spin(self._chance.random() * (0.3 if kill_after == 0 else 0.02))
                was_killed = not program.has_ended
                program.kill()
            else:
                was_killed = False
            if not was_killed:
                status, said = program.end()
                assert status == 0, said
            program.assert_gone()
        found = read_log(log)
        if found is not None:
            self.logs.append(found)
        return was_killed


def uninterrupted(chain: Chain) -> list[list[int]]:
    log = chain.folder / "log.all"
    settings = chain.settings(log, num_workers=0) | {"snapshot": str(chain.folder / "none"), "save_every": 10**9}
    with Program.of("streaming", settings) as program:
        status, said = program.end()
    assert status == 0, said
    found = read_log(log)
    assert found is not None
    return found.entries


def kill_and_resume(folder: Path, kind: str, rounds: int) -> str:
    """Chains of processes until so many were killed; what became of them."""
    began = time.monotonic()
    chance = random.Random(f"2024 {kind}")
    source = sorted(part * 10_000 + i for part, num in enumerate(NUM_ROWS) for i in range(num))
    num_kills = num_processes = num_chains = num_served = 0
    lost = repeated = reordered = 0
    while num_kills < rounds:
        chain = Chain(folder / f"chain {num_chains}", chance, kind)
        expected = uninterrupted(chain)
        for epoch in range(EPOCHS):
            assert sorted(item[4] for item in expected if item[1] == epoch) == source
        is_running = True
        while is_running:
            is_running = chain.run(num_processes, may_kill=num_kills < rounds)
            num_kills += is_running
            num_processes += 1
        num_chains += 1
        found = delivered(chain.logs)
        num_served += sum(len(log.entries) for log in chain.logs)
        places, wanted = [tuple(item) for item in found], [tuple(item) for item in expected]
        lost += len(set(wanted) - set(places))
        repeated += len(places) - len(set(places))
        reordered += places != wanted
        assert found == expected
        assert [sorted(item[4] for item in found if item[1] == epoch) for epoch in range(EPOCHS)] == [source] * EPOCHS

    record("R2", kind, kills=num_kills, lost=lost, repeated=repeated, out_of_order=reordered)
    return (
        f"SIGKILL and resume, {kind}: {num_kills} kills of {num_processes} processes in {num_chains} runs of "
        f"{len(source) * EPOCHS} samples; {num_served} served, of which the last snapshots kept "
        f"{num_chains * len(source) * EPOCHS}; {lost} lost, {repeated} repeated, {reordered} runs reordered; "
        f"0 processes left; {time.monotonic() - began:.0f} s"
    )


@pytest.mark.parametrize("kind", ROUNDS)
def test_killed_at_random_instants_nothing_is_lost_repeated_or_reordered(tmp_path, kind):
    for module in {"zstd": ["zstandard"], "hf stream": ["datasets"]}.get(kind, []):
        pytest.importorskip(module)
    say(kill_and_resume(tmp_path, kind, ROUNDS[kind]))
