"""How a run ended stands first in its report: the error that ended it, wherever that was raised, and at which row."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from asyncdata import AsyncDataLoader, BadRows
from asyncdata.errors import BadRowError, EndOfData, PrefetchTimeoutError
from asyncdata.telemetry.reader import read
from tests.support.html_page import read_page
from tests.support.loaders import gated, make, state_after
from tests.support.loading import line_of, write_rows
from tests.support.report_pages import page_of
from tests.support.tokenize_fns import fails_on_13, row_id, waits_for_a_file

BAD_ROW = "An error ended the run. BadRowError: AD421 "


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", 60)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def page_about(folder):
    return read_page(page_of(folder, folder.with_suffix(".html")))


def how_it_ended(folder):
    return page_about(folder).tables["starts-table"][-1][-1]


def take_all(loader):
    while True:
        loader.get_next_batch(1)


def left_by_its_error(path, folder):
    with suppress(BadRowError), make(path, fails_on_13, telemetry=folder) as loader:
        take_all(loader)


def in_a_loop(path, folder):
    with suppress(BadRowError), make(path, fails_on_13, telemetry=folder, batch_size=4) as loader:
        list(loader)


def caught_by_the_trainer(path, folder):
    with make(path, fails_on_13, telemetry=folder) as loader, suppress(BadRowError):
        take_all(loader)


def closed_by_hand(path, folder):
    loader = make(path, fails_on_13, telemetry=folder)
    with suppress(BadRowError):
        take_all(loader)
    loader.close()


def awaited_in_a_task(path, folder):
    async def main():
        async with AsyncDataLoader(path, tokenize_fn=fails_on_13, num_workers=0, telemetry=folder) as loader:
            async with asyncio.TaskGroup() as group:
                group.create_task(loader.get_next_batch(60))

    with suppress(ExceptionGroup):
        asyncio.run(main())


RUNS = [left_by_its_error, in_a_loop, caught_by_the_trainer, closed_by_hand, awaited_in_a_task]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_run_that_a_bad_row_ended_says_so_first_and_at_which_row(path, folder, run):
    run(path, folder)
    line, offset = line_of(path, 13)
    overview = page_about(folder).shown("overview").split("\n")
    assert overview[1] == "Error"
    assert overview[2].startswith(f"{BAD_ROW}{path}:{line} (byte {offset}): ")
    assert "data is not what limits this run" not in "\n".join(overview)
    assert "BadRowError: AD421" in how_it_ended(folder)


def trains_to_nan(path, folder):
    with make(path, telemetry=folder) as loader:
        loader.get_next_batch(5)
        raise ZeroDivisionError("loss is NaN")


def trains_to_nan_awaited(path, folder):
    async def main():
        async with AsyncDataLoader(path, tokenize_fn=row_id, num_workers=0, telemetry=folder) as loader:
            await loader.get_next_batch(5)
            raise ZeroDivisionError("loss is NaN")

    asyncio.run(main())


ENDS = [(trains_to_nan, "at the end of its `with`"), (trains_to_nan_awaited, "by aclose()")]


@pytest.mark.parametrize(("train", "how"), ENDS, ids=["with", "async with"])
def test_an_error_of_the_trainer_that_leaves_the_with_is_named(path, folder, train, how):
    with pytest.raises(ZeroDivisionError):
        train(path, folder)
    error = "ZeroDivisionError: loss is NaN"
    assert page_about(folder).shown("overview").startswith(f"Overview\nError\nAn error ended the run. {error}\n")
    assert how_it_ended(folder) == f"the loader was closed {how}: {error}"


def ends_well(path, folder):
    with suppress(EndOfData), make(path, epochs=1, telemetry=folder) as loader:
        take_all(loader)


def is_cancelled(path, folder):
    async def rollouts():
        async with AsyncDataLoader(path, tokenize_fn=row_id, num_workers=0, telemetry=folder) as loader:
            await loader.get_next_batch(5)
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    with suppress(asyncio.CancelledError):
        asyncio.run(rollouts())


def has_timeouts(path, folder):
    path, gate = gated(folder.parent, 0)
    with make(path, waits_for_a_file, shuffle=False, telemetry=folder) as loader:
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1, timeout_s=0.01)
        gate.touch()


def goes_on_after_an_error(path, folder):
    groups = [[None]]
    with make(path, telemetry=folder, collate_fn=lambda samples: groups[len(samples) > 4], batch_size=5) as loader:
        with pytest.raises(IndexError):
            next(iter(loader))
        loader.get_next_batch(5)


@pytest.mark.parametrize(
    "run", [ends_well, is_cancelled, has_timeouts, goes_on_after_an_error], ids=lambda run: run.__name__
)
def test_no_error_is_told_of_a_run_that_does_well(path, folder, run):
    run(path, folder)
    assert "An error ended the run" not in page_about(folder).text
    (start,) = read(folder).starts
    assert start.end is not None and (start.end.error, "closed" in start.end.reason) == ("", True)


def test_of_several_ranks_the_first_that_failed_is_told(path, folder):
    def loader_of(rank, function):
        ranks = {"rank": rank, "world_size": 3}
        return make(path, function, telemetry=folder, ranks=ranks, batch_size=4, epochs=1).__enter__()

    loaders = [loader_of(rank, function) for rank, function in enumerate([row_id, fails_on_13, fails_on_13])]
    for loader in reversed(loaders):
        with suppress(BadRowError), loader:
            list(loader)
    overview = page_about(folder).shown("overview")
    assert "An error ended the run, first on rank 2. BadRowError: AD421 " in overview


def test_the_error_has_no_text_of_rows_that_are_not_shown(path, folder):
    rows = [{"input": "SECRET", "id": number} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fails(row):
        raise ValueError(f"what is {row}?")

    for shuffle, raised in enumerate((BadRowError, KeyError)):
        with (
            pytest.raises(raised),
            make(
                path,
                fails if raised is BadRowError else row_id,
                shuffle=False,
                telemetry=folder / str(shuffle),
                bad_rows=BadRows(excerpts=False),
            ) as loader,
        ):
            loader.get_next_batch(3)
            raise KeyError("SECRET")
    ends = [read(folder / name).starts[0].end.error for name in "01"]
    assert ends == [f"BadRowError: AD421 {path}:1 (byte 0)", "KeyError"]
    assert not any(b"SECRET" in file.read_bytes() for file in folder.glob("*/*.jsonl"))


def test_a_run_that_is_restored_inside_its_with_has_its_place_in_the_table_of_starts(path, folder):
    state = state_after(path, 20)
    with make(path, telemetry=folder) as loader:
        loader.load_state_dict(state)
        position = loader.position()
        loader.get_next_batch(10)
    row = page_about(folder).tables["starts-table"][-1]
    assert row[3:5] == [f"{position.epoch}:{position.window}:{position.row}", "20"]
