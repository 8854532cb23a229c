"""For which part of a mixture calls waited, and how long: only while there was a call."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from asyncdata import DataLoader, Mix
from asyncdata.delivery import coordinator
from asyncdata.prefetch import mixture_producer
from tests.support.faults import until
from tests.support.tokenize_fns import waits_for_a_file

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Clock:
    """In place of the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def waited_for(engine: Any) -> str:
    """The file of the rows that the next sample waits for; empty if they are not in flight."""
    entry = engine._oldest_in_flight()  # noqa: SLF001 - the same
    return entry.location().path if entry is not None and entry.location is not None else ""


def test_a_part_is_waited_for_from_the_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(), tmp_path / "gate"
    for module in (coordinator, mixture_producer):
        monkeypatch.setattr(module, "time", clock)
    for name in ("free", "gated"):
        rows: list[dict[str, Any]] = [{"id": number} for number in range(20)]
        rows[0] |= {"gate": str(gate)} if name == "gated" else {}  # one row: another worker is free
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = Mix({name: tmp_path / f"{name}.jsonl" for name in ("free", "gated")}, quota=2)

    with (
        DataLoader(mix, tokenize_fn=waits_for_a_file, shuffle=False, num_workers=2) as loader,
        ThreadPoolExecutor(1) as trainer,
    ):
        engine = loader._engine  # noqa: SLF001 - no statistics say that the next sample is missing
        loader.start()
        until(lambda: "gated" in waited_for(engine))
        clock.now = 200.0
        batch = trainer.submit(loader.get_next_batch, 40)
        until(lambda: engine.coordinator.channel.demand)
        clock.now = 230.0
        gate.touch()
        assert len(batch.result()) == 40
        waits = {name: part.wait for name, part in loader.statistics().by_source.items()}

    assert waits == {"free": 0.0, "gated": 30.0}
