"""A fault in any callback of the service ends every call that waits, and every later one, with an error."""

import itertools
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest

from asyncdata import Cache, DataLoader, IterableSource, Mix, Outcomes, Part, PassRate, RowShuffle, SoftPacking
from asyncdata.errors import AsyncDataError
from tests.support.column_fns import two_phases
from tests.support.loading import NEVER_S, SHUFFLE, row_id, write_rows
from tests.support.parts import change, resolve_path

READ_AHEAD = "asyncdata.read_ahead"
REPLY_TO_THE_INDEX = f"{READ_AHEAD}.indexer:Indexer._take"
FULL = {"shuffle": "full", "cache": Cache(folder="")}
SLIME = FULL | {"shuffle": RowShuffle(method="slime")}
SOLVED = Outcomes(policy=PassRate(drop_above=0.9))
PLANNED = FULL | {"packing": SoftPacking(max_length=16), "plan_packs": True}


class Way(NamedTuple):
    """How a loader is made that has the callback called, and at which of its calls it fails."""

    knobs: dict[str, Any] = {}
    source: str = "rows"
    at: tuple[int, ...] = (1,)


CALLBACKS: dict[str, Way] = {
    "asyncdata.loader.autotune:Tuner.look": Way({"num_workers": None, "limits": {"max_workers": 2}}, at=(1, 9)),
    "asyncdata.loader.service:Service._begin": Way(),
    "asyncdata.workers.changes:Look.again": Way(at=(1, 4, 9)),
    f"{READ_AHEAD}.source:Canaries._tokenized": Way(),
    "asyncdata.loader.loader_media:LoaderMedia._ask": Way({"tokenize_fn": two_phases}, at=(1, 9)),
    "asyncdata.delivery.merger:PartQueue.room": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.mixture:MixtureReadAhead.is_awaited": Way({"outcomes": SOLVED}, source="mix"),
    f"{READ_AHEAD}.mixture:MixtureReadAhead._note": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.mixture:MixtureReadAhead._ask_due": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.source:ReadAhead._on_tokenized": Way(at=(1, 4)),
    f"{READ_AHEAD}.source:ReadAhead._send_next": Way(at=(1, 4, 9)),
    REPLY_TO_THE_INDEX: Way(FULL),
    f"{READ_AHEAD}.windows:BlockWindows._scan": Way(at=(1, 3)),
    f"{READ_AHEAD}.indexed_windows:IndexedWindows.more": Way(FULL),
    f"{READ_AHEAD}.indexed_windows:IndexedWindows._permutation": Way(SLIME),
    f"{READ_AHEAD}.indexed_windows:PlannedRows._packs_of": Way(PLANNED, at=(1, 2)),
    f"{READ_AHEAD}.stream_windows:StreamWindows._read": Way(source="stream"),
}


pytestmark = [pytest.mark.thorough, pytest.mark.faults]

NUM_ROWS = 300
MANY = 400
"""Batches of eight in which any callback has been called."""


def numbers():
    yield from ({"id": number} for number in range(NUM_ROWS))


class Fault:
    """Raises at call ``number`` of a method, once; then it ``has_come``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str, number: int) -> None:
        self.has_come = False
        calls = itertools.count(1)
        owner, _, name = path.rpartition(".")
        method = getattr(resolve_path(owner), name)

        def fail(*args: Any, **others: Any) -> Any:
            if next(calls) == number:
                self.has_come = True
                raise RuntimeError("injected")

            return method(*args, **others)

        monkeypatch.setattr(resolve_path(owner), name, fail)


def outcomes(*calls) -> list[str]:
    """How calls end that are made at the same time; a call that never ends fails the test."""
    found = [""] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except AsyncDataError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER_S)
    assert not any(thread.is_alive() for thread in threads), "a call still waits"
    return found


def versioned(row: dict[str, Any]) -> dict[str, Any]:
    return row_id(row)


versioned.version = 1  # type: ignore[attr-defined]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens the loader of a way, in this process."""
    rows = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    sources = {"rows": rows, "mix": Mix({"one": Part(rows), "two": Part(rows, weight=2)})}
    with ExitStack() as stack:

        def open_loaders(way: Way, num_workers: int = 0) -> DataLoader:
            source = sources.get(way.source) or IterableSource(numbers)
            knobs = {"shuffle": SHUFFLE, "buffer_size": 50, "timeout_s": NEVER_S, "batch_size": 8}
            knobs |= {"tokenize_fn": versioned, "num_workers": num_workers} | way.knobs
            return stack.enter_context(DataLoader(source, **knobs))

        yield open_loaders


def drain(loader: DataLoader) -> None:
    """Take batches until there is an error, or there were :data:`MANY`."""
    for _ in itertools.islice(itertools.chain.from_iterable(loader for _ in itertools.count()), MANY):
        pass


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "at"), [(path, at) for path, way in CALLBACKS.items() for at in way.at])
def test_a_fault_in_a_callback_ends_every_call(path, at, num_workers, opened, monkeypatch):
    way = CALLBACKS[path]
    fault = Fault(monkeypatch, path, at)
    loader = opened(way, num_workers)
    before = loader.state_dict()

    found = outcomes(partial(drain, loader), partial(drain, loader))
    assert fault.has_come
    assert all("injected" in text for text in found), found
    assert "injected" in outcomes(lambda: next(iter(loader)))[0]
    loader.load_state_dict(before)
    assert "injected" in outcomes(lambda: next(iter(loader)))[0], "also after a restart"


def test_a_call_that_waits_for_the_number_of_rows_ends_too(opened, monkeypatch):
    fault = Fault(monkeypatch, REPLY_TO_THE_INDEX, 1)
    loader = opened(Way(FULL))

    found = outcomes(loader.num_rows, loader.num_rows, lambda: loader.seek(0, 3))
    assert fault.has_come
    assert all("injected" in text for text in found), found


def test_a_call_that_waits_for_the_number_of_rows_ends_with_the_loader(opened, monkeypatch):
    has_come = threading.Event()
    change(monkeypatch, index_reply=lambda *_: has_come.set())  # the index is never complete
    loader = opened(Way(FULL))

    def close() -> None:
        has_come.wait(NEVER_S)
        loader.close()

    number, _ = outcomes(loader.num_rows, close)
    assert "closed" in number
