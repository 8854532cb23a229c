"""One order, whatever runs it: workers, with or without shared memory, ranks, read-ahead, batches, event loops."""

import hashlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from structlog.testing import capture_logs

from asyncdata import Mix, Outcomes, Part, PassRate, Shuffle
from asyncdata.errors import BadRowError, EndOfData
from asyncdata.loader import autotune as tuners
from tests.support import loaders
from tests.support.examples import each_value
from tests.support.faults import record
from tests.support.loaders import FACES
from tests.support.loading import every_third_dropped, fails_on_13, id_and_text, ids, order_of, write_rows
from tests.support.parts import Crashed, InlineExecutor, Promise, Scan, change, real

NUM_ROWS = 500
NUM_EPOCHS = 2

# A change of one of these changes the order of every run that exists.
ORDER = "952f6f5fb7a7ba0bc0870cd8ecf4ee77dca589cccafe233ca4069c977043f3db"
ORDER_OF_ANOTHER_SEED = "884bc11b79828e47f6525cbf522c5c3e04cf6f9ba4b4972a3938d9d1daade096"
ORDER_OF_FILES = "60e5acd40bfb4b9e481bfe15269c6a0f48e1234127ac9c502ddd341317f291fe"
NAMES = ("num_workers", "dp_size", "buffer_size", "batch_size", "event_loop")
KINDS = ((0, 1, 2, 4), (1, 2, 8), (1, 64, 4096), (1, 7, 64), ("asyncio", "uvloop", "trio"))
ALL = [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*KINDS)]
SOME = ALL[::47]  # every value is there


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("one_order") / "rows.jsonl", NUM_ROWS)


def digest(numbers: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, numbers)).encode()).hexdigest()


def run(path: Path, **knobs: Any) -> list[int]:
    """Two epochs by two loops. Batches end with an epoch, so that the sizes of all of them come into play."""
    with loaders.make(path, epochs=NUM_EPOCHS, **knobs) as loader:
        return [number for _ in range(NUM_EPOCHS) for batch in loader for number in ids(batch)]


def test_the_order_is_the_one_that_was_pinned(path):
    assert digest(order_of(path, NUM_EPOCHS)) == ORDER
    assert digest(order_of(path, NUM_EPOCHS, seed=-1)) == ORDER_OF_ANOTHER_SEED


@pytest.mark.thorough
@pytest.mark.parametrize("knobs", SOME, ids=str)
def test_some_of_all_ways_to_run_it_give_that_order(path, knobs):
    assert digest(run(path, **knobs)) == ORDER


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_ways_to_run_it_give_that_order(path):
    """324 runs of two epochs each."""
    digests = [digest(run(path, **knobs)) for knobs in ALL]
    record("R3", "a file", settings=len(ALL), other_digests=len(set(digests) - {ORDER}))
    assert set(digests) == {ORDER}


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_mixed_and_give_one_order_too(tmp_path, num_workers):
    """Three files, one of them without a final newline, one with rows longer than a block."""
    rows = write_rows(tmp_path / "all.jsonl", NUM_ROWS, {i: {"pad": "y" * 3000} for i in range(200, 300, 9)})
    lines = rows.read_bytes().splitlines()
    rows.unlink()
    for name, part in (("a", lines[:150]), ("b", lines[150:310]), ("c", lines[310:])):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(part) + (b"\n" if name != "b" else b""))
    shuffle = Shuffle(block_bytes=700, window_blocks=50)
    found = run(tmp_path, num_workers=num_workers, buffer_size=100, batch_size=50, shuffle=shuffle)
    assert found == order_of(sorted(tmp_path.iterdir()), NUM_EPOCHS, shuffle=shuffle)
    assert digest(found) == ORDER_OF_FILES


class Eager(tuners.Tuner):
    """It adds a worker at every change that chance picks, as long as it may."""

    chance = random.Random(3)

    def look(self) -> bool | None:
        return self._add() if self.chance.random() < 0.2 else None


@pytest.fixture
def senseless(monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, tuner=Eager)


@pytest.mark.thorough
@pytest.mark.usefixtures("senseless")
@pytest.mark.parametrize(("face", "backend"), each_value(FACES, ["asyncio", "trio", "uvloop"]))
def test_whatever_is_decided_at_any_moment_the_order_is_the_same(path, face, backend):
    knobs = {"event_loop": backend, "limits": {"max_workers": 3}, "num_workers": None, "epochs": 2, "batch_size": 7}
    with capture_logs(), face(path, **knobs) as loader:
        found = [number for _ in range(2) for batch in loader for number in ids(batch)]
        num_workers = loader.statistics().num_workers
    assert found == order_of(path, 2)
    assert num_workers == 3


@pytest.mark.thorough
def test_what_is_given_is_not_tuned(path, monkeypatch):
    change(monkeypatch, tuner=None)
    with loaders.make(path, num_workers=1, buffer_size=20) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == order_of(path)
        now = loader.statistics()
    assert (now.num_workers, now.capacity_samples) == (1, 20)


def slow(row: dict[str, Any]) -> list[int]:
    time.sleep(0.005)
    return [row["id"]]


@pytest.mark.thorough
def test_a_trainer_that_waits_for_workers_gets_more_of_them(path):
    """The work is a pause here, so that as many can do it at once as there are, whatever the machine."""
    knobs = {"num_workers": None, "limits": {"max_workers": 4}}
    with capture_logs() as logs, loaders.make(path, f"{__name__}:slow", **knobs) as loader:
        assert loader.statistics().num_workers == 1
        found = []
        while loader.statistics().num_workers < 4:
            found += ids(loader.get_next_batch(10))
        now = loader.statistics()

    assert now.num_workers == 4
    assert found == order_of(path, 1 + len(found) // NUM_ROWS)[: len(found)]
    changes = [log for log in logs if log["event"] == "autotune.changed"]
    assert changes[0]["before"] == 1
    assert changes[-1]["after"] == 4


FEW_ROWS = 200
WIDE = Shuffle(block_bytes=1024, window_blocks=16)
"""Several scans for each window."""


def with_samples() -> AbstractContextManager[Any]:
    """Inside it, an executor is asked for samples with its scans."""
    return patch.object(InlineExecutor, "answers_with_samples", new=True)


@pytest.fixture
def crashing(monkeypatch) -> Iterator[list[Scan]]:
    """The second scan of each window that asks for samples brings its workers down. Yields such scans."""
    submit, crashed = real("submit"), list[Scan]()

    def crash(self: InlineExecutor, request: Any, max_losses: int = 10) -> Promise[Any]:
        if isinstance(request, Scan) and request.with_samples and request.base:
            crashed.append(request)
            assert max_losses == 2
            died, asked = Promise[Any](), msgspec.structs.replace(request, with_samples=False)
            submit(self, asked).then(lambda _: died.keep(Crashed("AD423", "its worker died")))
            return died

        return submit(self, request, max_losses)

    change(monkeypatch, submit=crash)
    return crashed


make_wide = partial(loaders.make, shuffle=WIDE)


def delivered(source: Any, tokenize_fn: Any = id_and_text, **knobs: Any) -> dict[str, Any]:
    """All samples, and all that is counted."""
    found = []
    with make_wide(source, tokenize_fn, **{"epochs": 2} | knobs) as loader, pytest.raises(EndOfData):
        while True:
            (sample,) = loader.get_next_batch(1)
            found.append((sample.tokens.tolist(), sample.label, sample.prompt, sample.position))
    now, state = loader.statistics(), loader.state_dict()
    return {"samples": found, "dropped": now.dropped_total, "notes": now.noted_total, "counters": state["counters"]}


@pytest.fixture
def odd_rows(tmp_path) -> Path:
    """With rows that are longer than a block, blank lines, and rows that are no JSON."""
    path = write_rows(tmp_path / "rows.jsonl", FEW_ROWS, {40: {"text": "x" * 30_000}, 90: {"text": "y" * 5000}})
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:60], b"", b"{", b'"text"', *lines[60:]]) + b"\n")
    return path


@pytest.mark.parametrize(
    ("function", "digest", "is_down"),
    [
        (id_and_text, "tokens", False),
        (every_third_dropped, "tokens", True),
        (fails_on_13, "positions", False),
        (fails_on_13, "positions", True),
    ],
)
def test_samples_drops_and_errors_are_the_same(odd_rows, request, function, digest, is_down):
    crashed = request.getfixturevalue("crashing") if is_down else None
    knobs = {"bad_rows": "skip", "digest": digest}
    expected = delivered(odd_rows, function, **knobs)
    with with_samples():
        assert delivered(odd_rows, function, **knobs) == expected
    assert not is_down or crashed


def test_a_bad_row_is_raised_at_its_turn_with_the_same_words(tmp_path):
    path, seen = write_rows(tmp_path / "rows.jsonl", FEW_ROWS), []

    def look() -> None:
        found = []
        with make_wide(path, fails_on_13) as loader, pytest.raises(BadRowError) as caught:
            while True:
                found += ids(loader.get_next_batch(1))
        seen.append((found, str(caught.value), caught.value.traceback))

    look()
    with with_samples():
        look()
    assert seen[0] == seen[1]


def test_the_order_is_d_also_of_a_run_that_resumes(tmp_path, crashing):
    path = write_rows(tmp_path / "rows.jsonl", FEW_ROWS)
    with make_wide(path) as loader:
        found = ids(loader.get_next_batch(77))
        state = loader.state_dict()
    with with_samples(), make_wide(path) as loader:
        loader.load_state_dict(state)
        found += ids(loader.get_next_batch(2 * FEW_ROWS))
    assert found == order_of(path, 3, shuffle=WIDE)[: len(found)]
    assert crashing


@pytest.mark.parametrize("is_down", [False, True])
def test_rows_that_an_epoch_excludes_are_left_out_and_counted_once(tmp_path, request, is_down):
    if is_down:
        request.getfixturevalue("crashing")
    path = write_rows(tmp_path / "rows.jsonl", FEW_ROWS)
    outcomes = Outcomes(policy=PassRate(drop_above=0.5))

    def look() -> tuple[list[int], dict[str, int]]:
        with make_wide(path, outcomes=outcomes, batch_size=50) as loader:
            found = []
            for _ in range(2):
                for batch in loader:
                    loader.report(batch, [float(number % 2) for number in ids(batch)])
                    found += ids(batch)
            return found, loader.statistics().dropped_total

    expected = look()
    assert expected[1] == {"excluded": FEW_ROWS // 2}
    with with_samples():
        assert look() == expected


def test_the_parts_of_a_mixture_give_the_same_and_rows_count_as_tokenized(tmp_path):
    mix = Mix({name: Part(write_rows(tmp_path / f"{name}.jsonl", 90), when_done="leave") for name in ("a", "b")})
    expected = delivered(mix)
    with with_samples():
        assert delivered(mix) == expected
        with make_wide(tmp_path / "a.jsonl", epochs=1, batch_size=90) as loader:
            assert [len(batch) for batch in loader] == [90]
            assert loader.statistics().tokenized_rows_total == 90
