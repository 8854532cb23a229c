"""Ranks that share the row index have the same batches for fewer rows, and what goes wrong is named."""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncdata
from asyncdata import HardPacking, Mix, Part, RowShuffle, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, LoaderClosedError, WorkerError
from asyncdata.xtuner import XTunerPacking
from tests.benchmarks.probes.remote import MadeUpStore
from tests.support.examples import each_value
from tests.support.faults import until
from tests.support.loading import numbered
from tests.support.parts import change
from tests.support.ranks import Calls, Meeting, make

Knobs = dict[str, Any]

NUM_ROWS = 240
PLANS: dict[str, Knobs] = {
    "xtuner": {"packing": XTunerPacking(max_length=24, seed=5), "shuffle": True},
    "soft": {"packing": SoftPacking(max_length=24), "plan_packs": True, "shuffle": "full"},
    "hard": {"packing": HardPacking(max_length=24), "plan_packs": True, "shuffle": "full"},
    "rows": {"shuffle": RowShuffle(only_kept=True), "bad_rows": "raise"},
    "every row": {"shuffle": "full"},
    "some rows": {"shuffle": RowShuffle(method="none", first=10, stop=120)},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few rows fill dozens of blocks."""
    change(monkeypatch, bytes_of_an_index_block=256)


@pytest.fixture
def path(jsonl_file):
    """Each 17th row has no token, and is dropped."""
    return jsonl_file([{"id": number, "n": number * 7 % 17} for number in range(NUM_ROWS)])


@contextmanager
def loaders_of(
    path: Any, world_size: int, meeting: Meeting | None, knobs: Any = None, ranks: Any = None, **settings: Any
) -> Iterator[list[Any]]:
    """A loader of each rank. ``knobs``: by rank. A list of paths has one for each, too."""
    with ExitStack() as stack:
        loaders = []
        for rank in range(world_size):
            exchange = meeting and meeting.of(rank)
            of_rank = {"rank": rank, "world_size": world_size, "exchange": exchange, **(ranks or {})}
            own = {"cache": {"folder": ""}, "tokenize_fn": numbered, **settings, **(knobs[rank] if knobs else {})}
            source = path[rank] if isinstance(path, list) else path
            loaders.append(stack.enter_context(make(source, ranks=of_rank, **own)))
        if meeting is not None:
            stack.callback(meeting.end)
        yield loaders


def epochs_of(loaders: list[Any]) -> list[Any]:
    """The batches of one epoch of each rank."""
    return [list(batches) for batches in zip(*itertools.zip_longest(*loaders), strict=True)]


def epoch_of_all(path: Any, world_size: int, meeting: Meeting | None, knobs: Any = None, **settings: Any) -> list[Any]:
    with loaders_of(path, world_size, meeting, knobs, **{"seed": 3, "epochs": 1} | settings) as loaders:
        return epochs_of(loaders)


@pytest.mark.parametrize(("plan", "world_size"), each_value(PLANS, [2, 3, 5]))
def test_the_batches_are_those_without_an_exchange(path, plan, world_size):
    alone = epoch_of_all(path, world_size, None, **plan)
    assert epoch_of_all(path, world_size, Meeting(world_size), **plan) == alone


@pytest.fixture
def table(tmp_path):
    """The same rows in the row groups of a table, whose rows are copied out."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": number, "n": number * 7 % 17} for number in range(NUM_ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=8)
    return str(tmp_path / "rows.parquet")


@pytest.mark.parametrize(("plan", "world_size"), [("soft", 2), ("rows", 3)])
def test_each_rank_copies_the_rows_that_others_looked_at(table, tmp_path, plan, world_size):
    expected = epoch_of_all(table, world_size, None, **PLANS[plan])
    calls = Calls(numbered)
    found = epoch_of_all(table, world_size, Meeting(world_size), tokenize_fn=calls, **PLANS[plan])
    assert found == expected
    assert sum(calls.of_row.values()) < 2.5 * NUM_ROWS


def test_ranks_that_are_given_what_is_stored_copy_the_rows_themselves(table, tmp_path):
    folders = [{"cache": {"folder": str(tmp_path / str(rank))}} for rank in range(3)]
    expected = epoch_of_all(table, 3, None, **PLANS["soft"])
    shared, calls = folders[:1] * 3, Calls(numbered)
    assert epoch_of_all(table, 3, Meeting(3), shared, tokenize_fn=Calls(numbered), **PLANS["soft"]) == expected
    assert epoch_of_all(table, 3, Meeting(3), folders, tokenize_fn=calls, **PLANS["soft"]) == expected
    assert sum(calls.of_row.values()) < 1.5 * NUM_ROWS
    copies = [sorted((tmp_path / str(rank) / "index").glob("*.rows/*")) for rank in range(3)]
    assert copies[0]
    assert [[one.read_bytes() for one in found] for found in copies] == [[one.read_bytes() for one in copies[0]]] * 3


@pytest.mark.parametrize("plan", ["soft", "rows"])
def test_from_a_store_each_rank_fetches_its_own_rows(plan):
    address, options = "s3://400/rows.jsonl", {"store": "tests.benchmarks.probes.remote:MadeUpStore"}
    source = asyncdata.JsonlSource(address, storage_options=options)
    knobs = {**PLANS[plan], "tokenize_fn": lambda row: [row["id"]] * (1 + row["n"] % 20)}
    fetched = []
    batches = []
    for meeting in (None, Meeting(4)):
        before = MadeUpStore.num_bytes
        batches.append(epoch_of_all(source, 4, meeting, **knobs))
        fetched.append(MadeUpStore.num_bytes - before)
    assert batches[1] == batches[0]
    assert fetched[1] < 0.8 * fetched[0]


@pytest.mark.parametrize("plan", ["xtuner", "soft", "rows"])
def test_each_row_is_counted_by_one_rank_and_tokenized_by_its_own(path, plan):
    calls = Calls(numbered)
    epoch_of_all(path, 4, Meeting(4), tokenize_fn=calls, ranks={"round_up": False}, **PLANS[plan])
    twice = sum(number == 2 for row, number in calls.of_row.items() if row * 7 % 17)
    assert twice >= 0.9 * NUM_ROWS * 16 / 17  # but for those of packs at the end, which are every rank's
    assert sum(calls.of_row.values()) < 2.3 * NUM_ROWS  # the canaries are every rank's, too


def test_what_one_rank_has_stored_is_given_to_the_others(path, tmp_path):
    first, calls = Calls(numbered), Calls(numbered)
    folders = [{"cache": {"folder": str(tmp_path / str(rank))}} for rank in range(3)]
    alone = epoch_of_all(path, 1, None, folders, tokenize_fn=first, **PLANS["soft"])
    assert len(alone[0]) > 3
    expected = epoch_of_all(path, 3, None, **PLANS["soft"])
    assert epoch_of_all(path, 3, Meeting(3), folders, tokenize_fn=calls, **PLANS["soft"]) == expected
    again = Calls(numbered)
    assert epoch_of_all(path, 3, Meeting(3), folders, tokenize_fn=again, **PLANS["soft"]) == expected
    assert sum(calls.of_row.values()) < 1.3 * NUM_ROWS
    assert again.of_row == calls.of_row


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_what_is_stored_in_part_is_completed(path, tmp_path, num_bytes):
    folders = [{"cache": {"folder": str(tmp_path / str(rank))}} for rank in range(2)]
    expected = epoch_of_all(path, 2, Meeting(2), folders, **PLANS["hard"])
    (file,) = (tmp_path / "1" / "index").glob("*.index")
    whole = file.read_bytes()
    assert len(whole) > 480
    for rank in range(2):
        (one,) = (tmp_path / str(rank) / "index").glob("*.index")
        one.write_bytes(whole[: (rank + 1) * num_bytes])
    assert epoch_of_all(path, 2, Meeting(2), folders, **PLANS["hard"]) == expected
    assert epoch_of_all(path, 2, None, folders, **PLANS["hard"]) == expected


def test_ranks_with_one_folder_have_its_rows_in_one_file_from_the_first_start_on(path, tmp_path):
    def num_mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum(line.startswith(str(tmp_path), line.find("/")) and ".places" in line for line in maps)

    with loaders_of(path, 3, Meeting(3), cache={"folder": str(tmp_path)}, **PLANS["hard"]) as loaders:
        batches = list(map(iter, loaders))
        for one in batches:
            next(one)
        while num_mapped() < 3:  # one rank writes; the others look again whenever they fill a window
            for one in batches:
                next(one)


def test_a_rank_that_is_closed_early_leaves_the_index_for_others_to_write(path, tmp_path):
    meeting, cache = Meeting(2), {"folder": str(tmp_path)}
    ranks = asyncdata.Ranks(rank=0, world_size=2, exchange=meeting.of(0))
    with make(path, numbered, cache=cache, ranks=ranks, **{**PLANS["hard"], "timeout_s": 0.1}) as loader:
        with pytest.raises(asyncdata.errors.PrefetchTimeoutError):
            next(iter(loader))
    epoch_of_all(path, 1, None, [{"cache": cache}], **PLANS["hard"])
    (rows,) = (tmp_path / "index").glob("*.places")
    assert rows.stat().st_size == 12 * NUM_ROWS
    meeting.end()


def failures_of(path: Any, num_ranks: int) -> list[BaseException]:
    """The error with which each rank's first batch ends."""
    with loaders_of(path, num_ranks, Meeting(num_ranks), ranks={"exchange_timeout_s": 60}, **PLANS["soft"]) as loaders:
        errors = []
        for loader in loaders:
            with pytest.raises(asyncdata.errors.AsyncDataError) as caught:
                next(iter(loader))
            errors.append(caught.value)
    return errors


def test_ranks_with_other_data_are_named(path, jsonl_file):
    other = jsonl_file([{"id": 0, "n": 3}], "other.jsonl")
    errors = failures_of([path, other, path], 3)
    assert all(isinstance(error, ConfigError) and "AD487" in str(error) for error in errors)
    assert "rank 1 counts other rows than rank 0" in str(errors[0])


def test_a_bad_row_ends_all_ranks_with_the_same_error(jsonl_file):
    rows = [json.dumps({"id": number, "n": 3}) for number in range(NUM_ROWS)]
    rows[200] = "{"
    path = jsonl_file([{"id": 0, "n": 1}], "bad.jsonl")
    Path(path).write_text("\n".join(rows) + "\n")
    errors = failures_of(path, 2)
    assert all(isinstance(error, BadRowError) and ":201" in str(error) for error in errors)


def test_a_rank_that_is_closed_is_named_by_the_others(path):
    gate = threading.Event()

    def waits(row: Knobs) -> Any:
        gate.wait()
        return numbered(row)

    with loaders_of(path, 3, Meeting(3), tokenize_fn=waits, **PLANS["soft"]) as loaders:
        threading.Thread(target=loaders[2].close).start()
        gate.set()
        for loader in loaders[:2]:
            with pytest.raises(WorkerError, match=r"AD486 rank 2 takes no part .* closed"):
                next(iter(loader))


def test_a_rank_that_closes_before_it_hears_of_the_last_round_calls_no_rank_that_is_through(jsonl_file):
    path = jsonl_file([{"id": number, "n": 3} for number in range(5)])  # one round
    meeting, sent, close = Meeting(2), list[bytes](), threading.Event()

    def hears_late(data: bytes) -> list[bytes]:
        sent.append(data)
        answers = meeting.of(1)(data)
        if len(sent) == 2:
            close.wait()
            until(lambda: sum(thread.name == "asyncdata-service" for thread in threading.enumerate()) == num_before)
        return answers

    knobs = PLANS["soft"] | {"cache": {"folder": ""}, "tokenize_fn": numbered}
    num_before = sum(thread.name == "asyncdata-service" for thread in threading.enumerate())
    late = make(path, ranks=asyncdata.Ranks(rank=1, world_size=2, exchange=hears_late), **knobs)
    waiting = threading.Thread(target=lambda: pytest.raises(LoaderClosedError, next, iter(late)))
    waiting.start()
    with make(path, ranks=asyncdata.Ranks(rank=0, world_size=2, exchange=meeting.of(0)), **knobs) as loader:
        next(iter(loader))
    close.set()
    late.close()
    waiting.join()

    assert len(sent) == 2
    meeting.end()


def first_batch(path: Any, exchange: Any, **settings: Any) -> Any:
    """Of one of two ranks, which have this exchange."""
    ranks = asyncdata.Ranks(rank=0, world_size=2, exchange=exchange, **settings)
    with make(path, numbered, ranks=ranks, **{**PLANS["soft"], "timeout_s": 60}) as loader:
        return next(iter(loader))


@pytest.mark.parametrize("raised", [ConnectionResetError("peer"), SystemExit("peer")], ids=["error", "exit"])
def test_an_exchange_that_fails_is_an_error(path, raised):
    def broken(_: bytes) -> list[bytes]:
        raise raised

    with pytest.raises(WorkerError, match=r"AD486 .*peer.* Restart all of them"):
        first_batch(path, broken)


def test_a_rank_that_never_comes_is_an_error_in_time_and_close_does_not_wait(path):
    never = threading.Event()

    def hangs(_: bytes) -> list[bytes]:
        never.wait()
        raise ConnectionResetError

    with pytest.raises(WorkerError, match=r"AD486 .*did not take"):
        first_batch(path, hangs, exchange_timeout_s=0.05)
    never.set()


@pytest.mark.parametrize(
    "answer",
    [[b""], [b"", b""], None, [b"\xc0"] * 2, [np.zeros(9, np.uint8)] * 2],
    ids=["too few", "empty", "none", "other", "arrays"],
)
def test_an_exchange_that_returns_something_else_is_an_error(path, answer):
    with pytest.raises(ConfigError, match="AD487"):
        first_batch(path, lambda _: answer)


def test_a_fault_where_answers_are_taken_in_ends_the_run(path, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    change(monkeypatch, reply_of_a_shared_index=fails)
    errors = failures_of(path, 2)
    assert all("AD486" in str(error) and "injected" in str(error) for error in errors)


def test_settings_for_which_nothing_can_be_shared_are_refused(path):
    ranks = asyncdata.Ranks(rank=0, world_size=2, exchange=Meeting(2).of(0))
    with pytest.raises(ConfigError, match=r"AD487 .*mixture"):
        make(Mix({"a": Part(path), "b": Part(path)}), ranks=ranks, shuffle="full")
    with pytest.raises(ConfigError, match=r"exchange is a function"):
        asyncdata.Ranks(rank=0, world_size=2, exchange="gloo")


def test_a_restore_while_rows_are_counted_goes_on_with_the_round(path):
    expected = epoch_of_all(path, 2, None, **PLANS["soft"])
    gate = threading.Event()

    def waits(row: Knobs) -> Any:
        if row["id"] == 100:
            gate.wait()
        return numbered(row)

    with loaders_of(path, 2, Meeting(2), tokenize_fn=waits, seed=3, epochs=1, **PLANS["soft"]) as loaders:
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.load_state_dict(state)
        gate.set()
        assert epochs_of(loaders) == expected
