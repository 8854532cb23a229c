"""Each public coroutine is cancelled at each of its awaits: nothing is lost or repeated, no task left, none hangs."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdata import AsyncDataLoader, Cache, DataLoader, LoaderClosedError, SoftPacking
from tests.faults.support.cancelling import MOMENTS, WAYS, Ended, cancelled_at, num_tasks
from tests.support.faults import num_rounds, say, until
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

pytest.importorskip("trio")
pytest.importorskip("uvloop")

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=4, full=40)
"""Cancelled calls at each point, moment and way."""
POINTS = (0, 1, 2, 5)
NUM_ROWS = 400
EPOCHS = 2


def ids(samples: list[Any]) -> list[Any]:
    """Which samples they are; of packs, of groups and of samples."""
    return [ids(item) if isinstance(item, list) else (int(item.tokens[0]), len(item.tokens)) for item in samples]


KNOBS: dict[str, dict[str, Any]] = {
    "get_next_batch": {},
    "get_samples": {"n_samples_per_prompt": 2},
    "async for": {"batch_size": 30, "collate_fn": ids},
    "async for, packed": {
        "batch_size": 3,
        "collate_fn": ids,
        "packing": SoftPacking(max_length=256, window_samples=16, across_epochs=True),
    },
    "async for, planned": {
        "batch_size": 3,
        "collate_fn": ids,
        "shuffle": "full",
        "cache": {"folder": ""},
        "plan_packs": True,
        "packing": SoftPacking(max_length=256, window_samples=16, across_epochs=False),
    },
}


class Gate:
    """A tokenize function that gets on only while somebody waits, so that nearly every call has to."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __call__(self, row: dict[str, Any]) -> list[int]:
        assert self.is_open.wait(NEVER_S), "no call waits, and the loader was not closed"
        return id_and_text(row)


class Caller:
    """Asks one loader in one way."""

    def __init__(self, loader: Any, what: str) -> None:
        self._loader = loader
        self._what = what
        self._loop: Any = None

    def call(self) -> Coroutine[Any, Any, Any]:
        """The call; it wants more than is read ahead."""
        if self._what == "get_next_batch":
            return self._loader.get_next_batch(60)

        if self._what == "get_samples":
            return self._loader.get_samples(30)

        if self._loop is None:
            self._loop = aiter(self._loader)
        return self._next(self._loop)

    async def _next(self, loop: Any) -> Any:
        try:
            return await loop.__anext__()
        except StopAsyncIteration:
            return None

    def take(self, result: Any) -> list[Any]:
        """What came of a call, as it is compared."""
        if not self._what.startswith("async for"):
            return ids(result)

        if result is None:
            self._loop = None
        return [result]


def make(face: type[Any], path: Path, what: str, **knobs: Any) -> Any:
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "buffer_size": 20, "timeout_s": NEVER_S, "epochs": None}
    return face(path, **settings | {"num_workers": 0} | knobs | KNOBS[what])


def expected(path: Path, what: str, number: int) -> list[Any]:
    """The first ``number`` things from a loader without cancelled calls, by the sync interface."""
    found: list[Any] = []
    with make(DataLoader, path, what) as loader:
        while len(found) < number:
            if what == "get_next_batch":
                found += ids(loader.get_next_batch(60))
            elif what == "get_samples":
                found += ids(loader.get_samples(30))
            else:
                found += [*loader, None]
    return found[:number]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", KNOBS)
def test_cancelled_at_any_await_a_call_has_consumed_nothing(tmp_path, what, way):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)

    async def main() -> tuple[list[Any], int, int]:
        found: list[Any] = []
        gate, num_cut = Gate(), 0
        async with make(AsyncDataLoader, path, what, tokenize_fn=gate) as loader:
            caller, before = Caller(loader, what), num_tasks(way)
            for point, moment in itertools.product(POINTS, MOMENTS):
                for _ in range(ROUNDS):
                    ended = await cancelled_at(point, moment, way, caller.call(), gate.is_open.set)
                    gate.is_open.clear()
                    num_cut += ended.was_cut
                    found += [] if ended.was_cut else caller.take(ended.result)
            leaked = num_tasks(way) - before
            gate.is_open.set()
            found += caller.take(await caller.call())
        return found, num_cut, leaked

    backend, options = WAYS[way]
    found, num_cut, leaked = anyio.run(main, backend=backend, backend_options=options)
    wanted = expected(path, what, len(found))
    assert found == wanted
    assert leaked == 0
    assert num_cut >= ROUNDS // 2, "hardly any call was cancelled: this tests nothing"
    record("R8", f"{what}, {way}", cancels=num_cut, lost=0, repeated=0, leaked_tasks=leaked, hangs=0)
    say(f"{what}, cancelled by {way}: {num_cut} times, and {len(found)} delivered are D")


async def cut_everywhere(way: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> int:
    """Cancel a fresh call at each of its awaits, one after the other; how often it was."""
    num_cut = 0
    for moment in MOMENTS:
        for point in itertools.count():
            ended: Ended = await cancelled_at(point, moment, way, call())
            num_cut += ended.was_cut
            if ended.is_over:
                break
    return num_cut


@pytest.mark.parametrize("way", WAYS)
def test_cancelled_at_any_await_of_the_close_it_is_closed_all_the_same(tmp_path, way):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)

    async def open_and_close(how: str) -> None:
        loader = make(AsyncDataLoader, path, "get_next_batch")
        try:
            if how == "aclose":
                loader.start()
                await loader.aclose()
            else:
                async with loader:
                    pass
        finally:
            with pytest.raises(LoaderClosedError, match="AD502"):
                loader.start()

    async def main() -> int:
        before = num_tasks(way)
        num_cut = sum([await cut_everywhere(way, lambda how=how: open_and_close(how)) for how in ("aclose", "with")])
        assert num_tasks(way) == before
        return num_cut

    backend, options = WAYS[way]
    num_cut = anyio.run(main, backend=backend, backend_options=options)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "asyncdata-service"])
    record("R8", f"aclose, {way}", cancels=num_cut, leaked_tasks=0, hangs=0)


@pytest.mark.parametrize("way", WAYS)
def test_cancelled_at_any_await_of_num_rows_the_rows_are_counted_all_the_same(tmp_path, way):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)

    async def main() -> int:
        num_cut = 0
        for moment in MOMENTS:
            for point in itertools.count():
                async with make(
                    AsyncDataLoader, path, "get_next_batch", shuffle="full", cache=Cache(folder="")
                ) as loader:
                    ended = await cancelled_at(point, moment, way, loader.num_rows())
                    num_cut += ended.was_cut
                    assert await loader.num_rows() == NUM_ROWS
                    assert len(await loader.get_next_batch(NUM_ROWS)) == NUM_ROWS
                if ended.is_over:
                    break
        return num_cut

    backend, options = WAYS[way]
    num_cut = anyio.run(main, backend=backend, backend_options=options)
    assert num_cut > 0
    record("R8", f"num_rows, {way}", cancels=num_cut, lost=0, repeated=0, hangs=0)
