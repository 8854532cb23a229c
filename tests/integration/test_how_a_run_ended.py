"""Reports of runs: how a run ended, counts that all readers agree on, and rows that are dropped in mass."""

import asyncio
import base64
import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader, BadRows, DataLoader, Mix, Part, RowShuffle, SoftPacking, Telemetry
from asyncdata.errors import BadRowError, EndOfData, PrefetchTimeoutError
from asyncdata.telemetry.reader import read
from tests.support.loaders import gated, make, state_after
from tests.support.loading import NEVER_S, drops_marked, fails_on_13, line_of, row_id, waits_for_a_file, write_rows
from tests.support.pages import read_page
from tests.support.parts import change, main
from tests.support.ranks import make as numbered_rows
from tests.support.ranks import write
from tests.support.sources import jsonl
from tests.support.telemetry_files import page_of

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


@pytest.mark.parametrize("run", [ends_well, is_cancelled, has_timeouts, goes_on_after_an_error])
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
    path.write_bytes(jsonl(rows))

    def fails(row):
        raise ValueError(f"what is {row}?")

    for number, (function, raised) in enumerate([(fails, BadRowError), (row_id, KeyError)]):
        knobs = {"shuffle": False, "telemetry": folder / str(number), "bad_rows": {"excerpts": False}}
        with pytest.raises(raised), make(path, function, **knobs) as loader:
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


NUM_ROWS = 60


def drops_and_fails(row):
    if row["id"] == 20:
        raise ValueError("no good")

    return "too long" if row["id"] % 3 == 0 else [row["id"]] * (1 + row["id"] % 5)


class Counts(NamedTuple):
    """What a reader says of a run; None: it does not tell."""

    samples: int | None
    tokens: int | None
    dropped: dict[str, int] | None
    sources: dict[str, int]


class Delivered(NamedTuple):
    """A run that is over. ``folder`` has its telemetry in ``run``."""

    folder: Path
    loader: DataLoader
    counts: Counts


@pytest.fixture(scope="module", params=[0, 1], ids=["in a thread", "by a worker"])
def delivered(request, tmp_path_factory):
    """Two epochs of a mixture, of which some rows are dropped and some are bad."""
    folder = tmp_path_factory.mktemp("run")
    paths = {name: write_rows(folder / f"{name}.jsonl", NUM_ROWS) for name in ("math", "code")}
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    telemetry = Telemetry(folder=str(folder / "run"))
    knobs = {"batch_size": 7, "epochs": 1, "bad_rows": BadRows(policy="skip"), "num_workers": request.param}

    with pytest.MonkeyPatch.context() as patch:
        change(patch, close_of_telemetry_s=NEVER_S)  # as for each test: the last records are there
        with make(mix, drops_and_fails, telemetry=telemetry, **knobs) as loader:
            samples = [sample for batch in loader for sample in batch]
    sources = Counter(sample.source_name for sample in samples)
    dropped = {"too long": 2 * NUM_ROWS // 3, "bad row AD421": 2}
    counts = Counts(len(samples), sum(len(one.tokens) for one in samples), dropped, dict(sources))
    return Delivered(folder, loader, counts)


def by_statistics(run):
    now = run.loader.statistics()
    return Counts(now.samples_total, now.tokens_total, now.dropped_total, samples_of(now.by_source))


def samples_of(parts):
    return {name: part.samples for name, part in parts.items()}


def by_telemetry(run):
    totals = read(run.folder / "run").totals
    return Counts(totals.samples, totals.tokens, totals.dropped, samples_of(totals.by_source))


def by_page(run):
    tables = page_of_run(run).tables
    dropped = {row[0]: int(row[1]) for row in tables["dropped-table"][1:]}
    sources = {row[0]: int(row[3].replace(",", "")) for row in tables["mix-table"][1:]}
    samples = sum(int(row[1].replace(",", "")) for row in tables["lengths-chart-data"][1:])
    return Counts(samples, None, dropped, sources)


def page_of_run(run):
    return read_page(page_of(run.folder / "run", run.folder / "page.html"))


READERS = [by_statistics, by_telemetry, by_page]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_of_a_run_has_its_counts(delivered, reader):
    found = reader(delivered)
    assert found == delivered.counts._replace(tokens=found.tokens and delivered.counts.tokens)


def test_the_page_finds_dropped_and_bad_rows_by_their_reason_and_their_text(delivered):
    shown = page_of_run(delivered).data
    dropped = [one for one in shown if "dropped: too long" in one["states"]]
    lines = {line for name in ("math", "code") for line in (delivered.folder / f"{name}.jsonl").read_text().split("\n")}
    assert len(dropped) == 2 * 16
    assert {one["texts"][0][1][0][0] for one in dropped} <= lines
    assert [one["place"] for one in shown if one["state"] == "bad"].count(f"{delivered.folder}/math.jsonl:21") == 1


def test_the_page_may_load_nothing_and_run_its_own_program_alone_and_its_controls_have_names(delivered):
    page = page_of(delivered.folder / "run", delivered.folder / "page.html")
    found = read_page(page)
    (program,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    (rule,) = (values["content"] for _, values in found.tags if values.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(program).digest()).decode()
    assert rule.split("; ")[0] == "default-src 'none'"
    assert f"; script-src 'sha256-{digest}'; " in rule
    labels = re.findall(rb"<label[^>]*>\s*\w[^<]*(?:<kbd>.</kbd>\s*)?<(?:input|select)", page)
    assert len(labels) == sum(tag in {"input", "select"} for tag, _ in found.tags) > 5
    assert not re.search(rb"<(button|a)[^>]*>\s*</", page)
    shown = [values for _, values in found.tags if values.get("role") in {"img", "region", "group"}]
    assert all(values.get("aria-label") or values.get("aria-labelledby") for values in shown)


NUM_DROPPED = 150


@pytest.fixture
def good(tmp_path):
    return written(tmp_path / "good.jsonl", lambda _: False)


@pytest.fixture
def dropped(tmp_path):
    return written(tmp_path / "dropped.jsonl", lambda _: True)


def written(path, is_dropped, num_rows=NUM_DROPPED):
    path.write_text("".join(json.dumps({"id": row, "is_dropped": is_dropped(row)}) + "\n" for row in range(num_rows)))
    return path


def warnings_of(source, function=drops_marked, **knobs):
    with capture_logs() as events, make(source, function, epochs=1, batch_size=10, **knobs) as loader:
        assert sum(map(len, loader)) > 0
    return [event for event in events if event["event"] == "rows.dropped"]


WAYS = {
    "windows": {},
    "in the order of the files": {"shuffle": False},
    "one window after the other": {"shuffle": {"block_bytes": 512, "window_blocks": 2}},
    "all rows shuffled": {"shuffle": "full"},
    "left out by the index": {"shuffle": RowShuffle(only_kept=True)},
    "planned packs": {"shuffle": "full", "packing": SoftPacking(max_length=8), "plan_packs": True},
    "workers": {"num_workers": 1},
}


@pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
def test_a_file_of_which_all_rows_are_dropped_is_named_with_a_row_and_its_line(good, dropped, knobs):
    (warning,) = warnings_of([str(good), str(dropped)], **knobs)
    assert (warning["path"], warning["reason"]) == (str(dropped), "marked")
    assert 20 <= warning["num_dropped"] == warning["num_rows"] <= NUM_DROPPED
    path, line, _ = warning["example"].replace(" ", ":").split(":", 2)
    assert path == str(dropped)
    assert json.loads(dropped.read_text().splitlines()[int(line) - 1])["is_dropped"]


@pytest.mark.parametrize("knobs", [{}, {"shuffle": "full", "plan_packs": True}], ids=["online", "planned"])
def test_what_a_packing_drops_in_mass_is_told_once(tmp_path, knobs):
    path = write(tmp_path / "rows.jsonl", [20, 70] * 60)
    packing = {"packing": SoftPacking(max_length=64), "cache": {"folder": ""}, **knobs}
    with capture_logs() as events, numbered_rows(path, epochs=2, **packing) as loader:
        assert len([list(loader), list(loader)]) == 2
    (event,) = [event for event in events if event["event"] == "rows.dropped"]
    assert (event["reason"], 20 <= event["num_dropped"] <= event["num_rows"]) == ("overlong", True)


def test_files_that_are_too_small_are_told_together(tmp_path):
    for number in range(40):
        written(tmp_path / f"part-{number}.jsonl", lambda row: row % 2 == 0, num_rows=4)
    (warning,) = warnings_of(tmp_path)
    assert "path" not in warning
    assert warning["num_dropped"] >= 20
    assert str(tmp_path) in warning["example"]


def test_a_part_of_a_mixture_is_named(good, dropped):
    mix = Mix({"one": Part(good, when_done="leave"), "two": Part([str(good), str(dropped)], when_done="leave")})
    (warning,) = warnings_of(mix)
    assert (warning["source"], warning["path"]) == ("two", str(dropped))


def test_bad_rows_that_are_skipped_are_told_like_other_drops(good, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n" * NUM_DROPPED)
    (warning,) = warnings_of([str(good), str(empty)], bad_rows=BadRows(policy="skip", max=None))
    assert (warning["path"], warning["reason"]) == (str(empty), "bad row AD421")


@pytest.mark.thorough
def test_parquet_files_are_named_with_the_number_of_a_row(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("good", "dropped"):
        rows = [{"id": row, "is_dropped": name == "dropped"} for row in range(NUM_DROPPED)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    (warning,) = warnings_of(tmp_path)
    assert warning["path"] == str(tmp_path / "dropped.parquet")
    assert warning["example"].startswith(f"{warning['path']} (row ")


@pytest.mark.thorough
def test_inspect_and_the_report_say_it(good, dropped, tmp_path, capsys):
    paths, page = [str(good), str(dropped)], tmp_path / "page.html"
    assert main(["inspect", *paths, "--tokenize-fn", "tests.support.loading:drops_marked", "--num", "0"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dropped in mass")]
    assert f"150 of 150 rows of {dropped}: marked, such as {dropped}:" in line
    warnings_of(paths, telemetry=tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    top = read_page(page.read_bytes()).text.partition("Samples delivered")[0]
    for told in ("of the rows were dropped: marked.", "150 of 300 rows (50.0 %)", f"of {dropped}, such as {dropped}:"):
        assert told in top
