"""A rank is killed before, during or after an exchange, and the run goes on with another number of ranks."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader
from tests.faults.support.sharing import WAYS
from tests.support.faults import Program, num_rounds, until
from tests.support.figures import record
from tests.support.planned_fns import numbered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(1200)]

ROUNDS = num_rounds(quick=6, full=100)
NUM_ROWS = 240
MAX_RANKS = 3
ROWS = [{"id": number, "n": number * 7 % 17} for number in range(NUM_ROWS)]


class Hub:
    """Hands what each rank sends to all ranks. If one is gone, the others are told so, by the end of their link.

    :param fatal: the number of a call, how many of its answers are sent, and what is done then.
    """

    def __init__(self, world_size: int, fatal: tuple[int, int, Any] | None) -> None:
        self._world_size, self._fatal = world_size, fatal
        self._listener = Listener()
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        links: list[Connection] = []
        try:
            links.extend(self._listener.accept() for _ in range(self._world_size))
            links.sort(key=lambda link: link.recv())
            for call in count():
                sent = [link.recv_bytes() for link in links]
                answers = [(link, data) for link in links for data in sent]
                for number, (link, data) in enumerate(answers):
                    if self._fatal is not None and self._fatal[:2] == (call, number):
                        self._fatal[2]()
                    link.send_bytes(data)
        except (EOFError, OSError):
            pass
        finally:
            for link in links:
                link.close()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *error: object) -> None:
        while self._thread.is_alive():
            with suppress(OSError):
                Client(self.address).close()  # ends an accept() that still waits, as for a rank that could not start
            self._thread.join(0.01)
        self._listener.close()


@pytest.mark.parametrize("way", WAYS)
def test_killed_in_an_exchange_all_packs_come_once_and_in_order(tmp_path, jsonl_file, way):
    parquet_files = pytest.importorskip("tests.support.parquet_files", exc_type=ImportError)
    columns = {name: [row[name] for row in ROWS] for name in ("id", "n")}
    table = parquet_files.write(tmp_path / "rows.parquet", columns=columns, group_rows=8)
    paths = [str(jsonl_file(ROWS)), *([str(table)] if way != "scans" else [])]  # a table has other blocks
    with DataLoader(paths[0], tokenize_fn=numbered, num_workers=0, cache={"folder": ""}, **WAYS[way]) as loader:
        order = [[int(token) for document in pack for token in document.tokens] for (pack,) in loader]
    assert len(order) > 50

    chance, num_kills, num_calls = random.Random(31), 0, 0
    for number in count():
        if num_kills >= ROUNDS:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        packs, kills, in_calls = _run_until_whole(way, chance.choice(paths), folder, chance, order.index)
        assert packs == order
        num_kills, num_calls = num_kills + kills, num_calls + in_calls
    record(
        "R2", f"ranks that share {way}", kills=num_kills, in_an_exchange=num_calls, lost=0, repeated=0, out_of_order=0
    )


def _run_until_whole(
    way: str, path: str, folder: Path, chance: random.Random, place: Callable[[Any], int]
) -> tuple[list[Any], int, int]:
    """Runs of random numbers of ranks, each from where all ranks of the one before were; the last is not disturbed.

    :param place: of a pack in the order.
    :returns: the packs of all ranks, in their order; kills, and how many of them in an exchange.
    """
    packs: list[Any] = []
    state, num_kills, num_in_calls = None, 0, 0
    for number in count():
        is_last = num_kills == 3
        world_size = chance.randint(2, MAX_RANKS)
        steps, was_in_call = _run(way, path, folder / str(number), world_size, state, chance, is_last=is_last)
        num_done = min(map(len, steps))
        for step in zip(*(one[:num_done] for one in steps), strict=True):
            places = {place(tokens): tokens for tokens, _ in step}  # the last batch is filled up with packs of its own
            packs += [places[number] for number in sorted(places)]
        if num_done:
            state = chance.choice(steps)[num_done - 1][1]
        if is_last:
            return packs, num_kills, num_in_calls
        num_kills, num_in_calls = num_kills + 1, num_in_calls + was_in_call


def _run(
    way: str, path: str, folder: Path, world_size: int, state: Any, chance: random.Random, *, is_last: bool
) -> tuple[list[list[Any]], bool]:
    """What each rank has delivered until one was killed, and whether that was in an exchange."""
    folder.mkdir()
    victim, programs, killed = chance.randrange(world_size), [], threading.Event()

    def kill() -> None:
        until(lambda: len(programs) == world_size)
        programs[victim].kill()
        killed.set()

    call, answer = chance.randint(0, 5), chance.randrange(world_size**2)
    logs = [folder / f"log.{rank}" for rank in range(world_size)]
    shared = {"way": way, "path": path, "world_size": world_size, "state": state, "num_workers": chance.choice([0, 1])}
    with Hub(world_size, None if is_last else (call, answer, kill)) as hub, ExitStack() as stack:
        for rank, log in enumerate(logs):
            cache = chance.choice(["", str(folder.parent / f"cache.{rank}")])
            own = {"rank": rank, "log": str(log), "hub": hub.address, "cache": cache}
            programs.append(stack.enter_context(Program.of("sharing_rank", {**shared, **own})))
        if not is_last:
            # A run that has the index after fewer calls: it is killed while it delivers.
            until(lambda: killed.is_set() or _num_lines(logs[victim]) > answer or programs[victim].has_ended)
            if not killed.is_set():
                time.sleep(chance.random() * 0.01)
                programs[victim].kill()
        for rank, program in enumerate(programs):
            if is_last or rank != victim:
                assert program.said() in ("",) if is_last else ("", "AD486")
            program.assert_gone()
    return [_steps(log) for log in logs], killed.is_set()


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _steps(path: Path) -> list[Any]:
    """The lines that are whole."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
