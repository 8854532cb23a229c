"""The trainer's process is killed at random instants; what it had, and what its successors get, is D."""

import gzip
import random
import time
from typing import Any

import pytest

from tests.faults.support.streaming import PACKS, Log, delivered, num_lines, read_log, with_media
from tests.support.faults import Program, num_rounds
from tests.support.figures import record
from tests.support.loading import write_rows
from tests.support.streams import frames, write

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

OF_VIDEOS = ("videos", *PACKS)
ROUNDS = {
    "files": num_rounds(quick=3, full=90),
    "mixture": num_rounds(quick=2, full=100),
    "media": num_rounds(quick=2, full=100),
    "pictures": num_rounds(quick=2, full=60),
    "sounds": num_rounds(quick=2, full=60),
    **dict.fromkeys(OF_VIDEOS, num_rounds(quick=1, full=30)),
    **dict.fromkeys(("gzip", "zstd", "array", "iterable", "hf stream"), num_rounds(quick=1, full=4)),
}
"""Of each kind of data, how many processes are killed."""
NUM_ROWS = (700, 30, 450)
PICTURED_ROWS = (70, 3, 45)
"""Fewer: to decode pictures takes its time."""
FILMED_ROWS = (20, 3, 12)
EPOCHS = 2
OF_FILES = ("pictures", "sounds", *OF_VIDEOS)
"""The kinds whose media lie in files."""
MEDIA_BYTES = {"media": [1, 500, 10_000], **dict.fromkeys(OF_FILES, [1, 500_000, 10_000_000])}
"""The limit of what is loaded ahead: a sample, some of them, or all."""
MODULES = {"zstd": ["zstandard"], "hf stream": ["datasets"], "pictures": ["transformers", "PIL"]}
MODULES |= {"sounds": ["transformers", "soundfile", "soxr"]}
MODULES |= dict.fromkeys(OF_VIDEOS, ["transformers", "av", "torchvision"])
SIZES = {"files": [1, 3, 8, 17], **dict.fromkeys(OF_FILES, [1, 3, 8])}


def ids_of(kind: str) -> list[list[int]]:
    """No two rows of all files are alike."""
    numbers = FILMED_ROWS if kind in OF_VIDEOS else PICTURED_ROWS if kind in OF_FILES else NUM_ROWS
    return [[part * 10_000 + i for i in range(num)] for part, num in enumerate(numbers)]


def coded(path, kind: str):
    if kind in OF_FILES:
        return with_media(path, kind)

    data = path.read_bytes()
    if kind == "gzip":
        return write(path.with_suffix(".jsonl.gz"), gzip.compress(data))

    if kind == "zstd":
        return write(path.with_suffix(".jsonl.zst"), frames([data[: len(data) // 2], data[len(data) // 2 :]]))

    return write(path.with_suffix(".json"), b"[" + b",".join(data.splitlines()) + b"]") if kind == "array" else path


class Chain:
    """Processes that go on, one after another, where the one before had last saved."""

    def __init__(self, folder, chance: random.Random, kind: str) -> None:
        folder.mkdir()
        self.logs: list[Log] = []
        self._folder, self._kind, self._chance = folder, kind, chance
        self._paths = [
            str(
                coded(
                    write_rows(folder / f"{part}.jsonl", len(ids), {i: {"id": id_} for i, id_ in enumerate(ids)}), kind
                )
            )
            for part, ids in enumerate(ids_of(kind))
        ]

    def settings(self, log, **knobs: Any) -> dict[str, Any]:
        chance = self._chance
        most = 2 if self._kind in OF_VIDEOS else 3  # each of which imports torch
        settings = {"num_workers": chance.randint(1, most), "buffer_size": chance.choice([1, 40, 1000])}
        if self._kind in MEDIA_BYTES:
            settings["limits"] = {"max_media_bytes": chance.choice(MEDIA_BYTES[self._kind])}
        return {
            "paths": self._paths,
            "kind": self._kind,
            "log": str(log),
            "snapshot": str(self._folder / "snapshot"),
            # Each save takes its time.
            "batch_size": chance.choice(SIZES.get(self._kind, [8, 17])),
            "save_every": chance.randint(1, 5),
            "step_s": chance.choice([0, 0.0005, 0.002]),
            "knobs": {"epochs": EPOCHS, "dp_size": chance.choice([1, 8]), **settings, **knobs},
        }

    def uninterrupted(self) -> list[list[int]]:
        """What a process gets that is not killed, and has no workers, or one that imports torch."""
        log = self._folder / "log.all"
        settings = self.settings(log, num_workers=int(self._kind in OF_VIDEOS))
        settings |= {"snapshot": str(self._folder / "none"), "save_every": 10**9}
        with Program.of("streaming", settings) as program:
            program.said()
        found = read_log(log)
        assert found is not None
        return found.entries

    def run(self, number: int, *, may_kill: bool) -> bool:
        """One more process; whether it was killed before the end."""
        log = self._folder / f"log.{number}"
        kill_after = self._chance.choice([0, 1, self._chance.randint(2, 12 if self._kind in PACKS else 150)])
        with Program.of("streaming", self.settings(log)) as program:
            was_killed = program.kill_when(
                (lambda: num_lines(log) > kill_after) if may_kill else None,
                lambda: time.sleep(self._chance.random() * (0.3 if kill_after == 0 else 0.02)),
            )
        found = read_log(log)
        self.logs += [] if found is None else [found]
        return was_killed


@pytest.mark.parametrize("kind", ROUNDS)
def test_killed_at_random_instants_nothing_is_lost_repeated_or_reordered(tmp_path, kind):
    for module in MODULES.get(kind, []):
        pytest.importorskip(module)
    chance, num_kills, num_processes = random.Random(f"2024 {kind}"), 0, 0
    while num_kills < ROUNDS[kind]:
        chain, is_running = Chain(tmp_path / f"chain {num_processes}", chance, kind), True
        expected = chain.uninterrupted()
        while is_running:
            is_running = chain.run(num_processes, may_kill=num_kills < ROUNDS[kind])
            num_kills += is_running
            num_processes += 1
        found = delivered(chain.logs)
        assert found == expected
        for epoch in range(EPOCHS if kind not in PACKS else 0):
            assert sorted(item[4] for item in found if item[1] == epoch) == sum(ids_of(kind), [])

    record("R2", kind, kills=num_kills, lost=0, repeated=0, out_of_order=0)
