"""The statistics, flat, printed and in a timeout's words; and what a call waits for, shown by a thread of its own."""

import builtins
import gc
import io
import logging
import os
import queue
import re
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdata import DataLoader, Mix, RowFn, SourceStatistics, Statistics
from asyncdata.errors import ConfigError
from asyncdata.loader import wait_progress
from asyncdata.loader.statistics import lacking
from tests.support.loading import NEVER_S
from tests.support.parts import WaitProgress, WorkerState, change, explain_timeout, measurements, progress_of, way_of
from tests.support.release import ROOT

IDLE, STARTING = WorkerState(state="idle"), WorkerState(state="starting")
BUSY = WorkerState(state="busy", pid=7, busy_s=12.34, num_rows_done=3)
REASON = 'it has "quotes", a \\ and\na line'


def statistics(**values: object) -> Statistics:
    """All zero, but for what is given."""
    zeros = dict.fromkeys(Statistics.__struct_fields__, 0) | {"dropped_total": {}, "by_source": {}, "workers": [IDLE]}
    return Statistics(**(zeros | values))


def part_of(number: int) -> SourceStatistics:
    return SourceStatistics(samples=number, tokens=10 * number, epoch=1, dropped={"max_length": 2}, wait=0.5)


def distinct(**changes: Any) -> Statistics:
    numbers = {name: number for number, name in enumerate(Statistics.__struct_fields__)}
    fields = numbers | {
        "dropped_total": {"max_length": 7, REASON: 2}, "noted_total": {"straddling_token": 3}, "excluded_rows": {},
        "unpacked_samples_total": {}, "unpacked_tokens_total": {"tail": 11}, "data_wait_seconds_total": 1.5,
        "by_source": {name: part_of(number) for number, name in enumerate(("math.easy", "code"), 70)},
        "workers": [WorkerState(state="busy", pid=1, busy_s=0.5), WorkerState(state="idle", pid=2)],
    }  # fmt: skip
    return Statistics(**fields | changes)


def test_flat_statistics_are_numbers_with_names_for_prometheus():
    dropped, noted = {"bad row AD101": 2, "too-long": 1}, {"question_lost": 2, "other": 1}
    now = statistics(samples_total=7, dropped_total=dropped, noted_total=noted, workers=[IDLE, BUSY, BUSY])
    flat = now.to_dict()
    assert all(name.startswith("asyncdata_") and name.replace("_", "").isalnum() for name in flat)
    assert all(isinstance(value, int | float) for value in flat.values())
    assert {name: value for name, value in flat.items() if value} == {
        "asyncdata_samples_total": 7, "asyncdata_dropped_total": 3, "asyncdata_dropped_bad_row_ad101_total": 2,
        "asyncdata_dropped_too_long_total": 1, "asyncdata_noted_total": 3, "asyncdata_noted_question_lost_total": 2,
        "asyncdata_noted_other_total": 1, "asyncdata_workers": 3, "asyncdata_workers_busy": 2,
    }  # fmt: skip
    assert not [name for name in flat if "source" in name], "there are no parts without a mixture"
    assert distinct().to_dict()["asyncdata_source_math_easy_samples_total"] == 70


def test_every_number_is_in_the_text_and_the_parser_of_prometheus_reads_it():
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    now = distinct()

    families = {family.name: family for family in parser.text_string_to_metric_families(now.to_prometheus())}

    samples = [sample for family in families.values() for sample in family.samples]
    found = {(sample.name, tuple(sample.labels.items())): sample.value for sample in samples}
    measured = {(f"asyncdata_{one.field}", (one.label,) if one.label else ()): one.value for one in measurements(now)}
    assert found == measured
    assert found["asyncdata_dropped_total", (("reason", REASON),)] == 2
    assert found["asyncdata_workers", (("state", "starting"),)] == 0
    assert found["asyncdata_source_samples_total", (("source", "math.easy"),)] == 70
    assert found["asyncdata_source_tokens_total", (("source", "code"),)] == 710
    kinds = {"source_epoch": "gauge", "samples": "counter", "ready_samples": "gauge"}
    assert {name: families[f"asyncdata_{name}"].type for name in kinds} == kinds
    assert families["asyncdata_waits"].documentation == "calls that had to wait for data."


def test_every_field_is_measured_and_explained_and_labels_of_the_caller_are_on_every_number():
    now = distinct(excluded_rows={"a": 1}, unpacked_samples_total={"a": 1})
    fields = set(Statistics.__struct_fields__) - {"by_source"} | set(part_of(1).to_dict("source"))
    lines = now.to_prometheus({"rank": "3", "run": 'a"b'}).splitlines()
    helps = [line for line in lines if line.startswith("# HELP")]
    assert {one.field for one in measurements(now)} == fields
    assert len(helps) == len(fields)
    assert all(len(line.split()) > 3 for line in helps)
    assert all('rank="3",run="a\\"b"' in line for line in lines if line[0] != "#")
    assert 'asyncdata_dropped_total{rank="3",run="a\\"b",reason="max_length"} 7' in lines


@pytest.mark.parametrize("name", ["", "0rank", "run-id", "__run", "größe", "reason", "source", "a b", "rank\n"])
def test_a_label_that_no_scraper_takes_or_that_the_numbers_have_is_refused(name):
    with pytest.raises(ConfigError, match="labels cannot be named"):
        distinct().to_prometheus({"rank": "0", name: "1"})


def test_opentelemetry_reads_the_numbers_of_a_loader_and_its_parts_until_it_is_gone(tmp_path):
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from asyncdata.integrations.opentelemetry import observe

    for name in ("math", "code"):
        (tmp_path / f"{name}.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    mix = Mix({name: str(tmp_path / f"{name}.jsonl") for name in ("math", "code")}, quota=2)

    def numbers() -> dict[Any, Any]:
        data = reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        found = [(one, point) for scope in scopes for one in scope.metrics for point in one.data.data_points]
        return {(m.name, *sorted(p.attributes.items())): (p.value, m.unit) for m, p in found}

    knobs: Any = {"tokenize_fn": lambda row: [row["n"]] if row["n"] % 2 else None, "num_workers": 0, "buffer_size": 4}
    with DataLoader(mix, **knobs) as loader:
        observe(loader, provider.get_meter("test"), {"rank": "1"})
        loader.get_next_batch(4)
        found, rank = numbers(), ("rank", "1")
        assert found["asyncdata.samples", rank] == (4, "{sample}")
        assert found["asyncdata.ready_bytes", rank][1] == "By"
        assert found["asyncdata.data_wait_seconds", rank][1] == "s"
        dropped = loader.statistics().dropped_total["tokenize_fn"]
        assert found["asyncdata.dropped", rank, ("reason", "tokenize_fn")] == (dropped, "")
        for name in ("math", "code"):
            assert found["asyncdata.source_samples", rank, ("source", name)] == (2, "{sample}")
    del loader
    gc.collect()

    assert numbers() == {}
    provider.shutdown()


# Dashboards: the programs of their page run, and log numbers only. The packages are stood in for.


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_program_of_the_page_logs_a_number_for_each_statistic(name, tmp_path, monkeypatch):
    page = (ROOT / "docs/how-to/look-at-a-run.md").read_text(encoding="utf-8")
    (program,) = re.findall(rf"^## {name}\n\n```py\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    logged: list[dict[str, Any]] = []
    package = SimpleNamespace(log=lambda values, **_: logged.append(values), init=lambda project: package)
    monkeypatch.setitem(sys.modules, name, package)

    with DataLoader(path, tokenize_fn=RowFn(), num_workers=0, batch_size=5) as loader:
        exec(program, {"loader": loader, "train": lambda batch: len(batch) / 2})  # noqa: S102

    assert [(values["loss"], values["data/samples"]) for values in logged] == [(2.5, 5), (2.5, 10)]
    assert [key for key, value in logged[-1].items() if not isinstance(value, int | float | None)] == []
    assert program.count("\n") <= 7


def tokens(row: dict[str, Any]) -> list[int]:
    return [row["n"], 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a<b>.jsonl", "c.jsonl", "d.jsonl?X-Amz-Signature=5EC3E7"):
        (tmp_path / name).write_text('{"n": 1}\n{"n": 2}\n')
    return tmp_path


def test_a_loader_names_its_source_and_its_position(folder):
    with DataLoader(f"{folder}/*.jsonl", tokenize_fn=tokens, num_workers=0, buffer_size=8) as loader:
        loader.get_next_batch(3)

        assert re.fullmatch(
            rf"<DataLoader source: {re.escape(str(folder))}/a<b>.jsonl and 1 more files, size: 0.0 MB, "
            r"position: 0:0:3, delivered: 3 samples, 6 tokens, dropped: 0 rows, ready: \d+ of 8 samples, "
            r"waited: [\d.]+ s in \d+ calls, workers: 1>",
            repr(loader),
        )
        pid = os.fork()
        if pid == 0:
            os._exit(0 if "the process that forked this one" in repr(loader) else 1)
        assert os.waitpid(pid, 0)[1] == 0

    assert repr(loader).endswith("closed: the loader was closed at the end of its `with`>")


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [("a<b>.jsonl", "a&lt;b&gt;.jsonl", "<b>"), ("d.jsonl?X-Amz-Signature=5EC3E7", "d.jsonl", "5EC3E7")],
)
def test_a_notebook_shows_a_table_and_no_markup_of_a_name_nor_what_gives_access_to_a_store(folder, name, shown, hidden):
    with DataLoader(str(folder / name), tokenize_fn=tokens, num_workers=0) as loader:
        table = loader._repr_html_()
        assert "5EC3E7" not in repr(loader)
    assert "<caption>DataLoader</caption>" in table
    assert shown in table
    assert hidden not in table


def test_a_loader_whose_constructor_failed_can_be_printed(folder):
    loader = DataLoader.__new__(DataLoader)
    with pytest.raises(ConfigError):
        loader.__init__(str(folder / "c.jsonl"), tokenize_fn=tokens, num_workers=-1)
    assert repr(loader) == "<DataLoader closed: the loader's constructor failed>"


INDEXING = statistics(workers=[BUSY], indexed_rows=70_000)


@pytest.mark.parametrize(
    ("now", "settings", "expected"),
    [
        (statistics(workers=[]), {}, "start: the workers are not there yet"),
        (statistics(workers=[STARTING, STARTING]), {}, "start: the workers are loading"),
        (statistics(workers=[STARTING, WorkerState(state="starting", lacks="no CPU")]), {}, "start: no CPU$"),
        (statistics(workers=[BUSY], in_flight_rows=1), {"is_started": False}, "start: "),
        (statistics(workers=[IDLE, BUSY], in_flight_rows=3), {}, r"tokenize: .* one hangs \(busy for 12.3 s\)"),
        (statistics(workers=[IDLE, BUSY]), {}, "read: a window is being read"),
        (statistics(dropped_total={"a": 3}, groups_total=2), {}, "filter: most rows are dropped"),
        (statistics(dropped_total={"a": 2}, groups_total=2), {}, "read: nothing is under way"),
        (INDEXING, {"is_indexing": True}, "index: the row index is being made, 70000 rows are found so far$"),
    ],
)
def test_the_stage_that_starves_is_named(now, settings, expected):
    lack = lacking(now, **{"is_started": True, "is_indexing": False, **settings})
    message, facts = explain_timeout(2.0, 5, now, None, lack)[:2]
    assert re.match(expected, facts["stage"])
    assert "oldest row" not in message
    assert "try: a longer timeout_s" in message or "is_indexing" not in settings
    assert ("please report it" in message) == ("nothing is under way" in facts["stage"])
    assert ("workers: none" in message) == (not now.workers)


class Shown:
    def __init__(self) -> None:
        self.said = queue.SimpleQueue[str]()

    def show(self, text: str, waited_s: float) -> None:
        self.said.put(text)

    def end(self) -> None:
        self.said.put("end")

    def next(self, unlike: str = "") -> str:
        while (text := self.said.get(timeout=NEVER_S)) == unlike:
            pass
        return text


def test_a_short_wait_is_not_shown_and_one_that_lasts_is_with_its_end():
    shown = Shown()
    progress = WaitProgress("bar", 0.0, lambda _: shown)

    with progress.waiting(lambda: "the row index"):
        assert shown.next() == "the row index"
    assert shown.next(unlike="the row index") == "end"
    with progress.waiting(lambda: "the next window"):
        assert shown.next() == "the next window"
    progress.close()

    assert shown.next(unlike="the next window") == "end"

    before, shown = set(threading.enumerate()), Shown()
    with progress_of("none", 0).waiting(lambda: "nothing"):
        assert set(threading.enumerate()) <= before
    progress = WaitProgress("bar", NEVER_S, lambda _: shown)
    for _ in range(100):
        with progress.waiting(lambda: "nothing"):
            pass
    progress.close()

    assert shown.said.empty()


def test_a_display_that_fails_is_a_warning_and_the_wait_lasts(caplog, monkeypatch):
    change(monkeypatch, patience_with_a_display_s=NEVER_S)  # of close(), for the thread that warns

    class Broken(Shown):
        def show(self, text: str, waited_s: float) -> None:
            self.said.put(text)
            raise OSError("no terminal")

    shown = Broken()
    progress = WaitProgress("bar", 0.0, lambda _: shown)
    with progress.waiting(lambda: "the row index"):
        assert shown.next() == "the row index"
    progress.close()
    assert [record.event for record in caplog.records] == ["progress.failed"]


def show(display: wait_progress.Display, *waited_s: float) -> None:
    for seconds in waited_s:
        display.show("the row index", seconds)
    display.end()


def test_without_rich_there_are_lines_and_events_come_each_time_the_wait_has_doubled(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for way in ("bar", "lines"):
        show(wait_progress._display(way), 2.0, 3.0)  # noqa: SLF001
    assert sys.stderr.getvalue() == 2 * "asyncdata: the row index (2 s)\n"
    caplog.set_level(logging.INFO)
    show(wait_progress._display("log"), 2.0, 3.0, 4.0, 5.0, 8.0, 15.9, 16.0)  # noqa: SLF001
    assert [record.fields["waited_s"] for record in caplog.records] == [2.0, 4.0, 8.0, 16.0]


Terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})


def test_with_rich_there_is_a_bar_that_disappears_and_leaves_what_the_program_prints_where_it_goes(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", Terminal())
    display = wait_progress._display("bar")  # noqa: SLF001
    display.show("[the] row index", 2.0)
    print("a result")  # noqa: T201 - another thread does, while a call waits
    display.end()
    assert "asyncdata: [the] row index" in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\x1b[2K")
    assert sys.stdout.getvalue() == "a result\n"
    assert "a result" not in sys.stderr.getvalue()


def test_a_notebook_whose_packages_are_not_there_breaks_nothing(monkeypatch):
    pytest.importorskip("rich")
    ipython = types.ModuleType("IPython")
    shell = type("ZMQInteractiveShell", (), {})()  # the name by which a notebook is known
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert way_of("auto", 0) != "bar"  # a module that is only half imported
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)  # by this rich knows a notebook
    assert way_of("auto", 0) == "bar"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    show(wait_progress._display("bar"), 2.0)  # noqa: SLF001
    assert sys.stderr.getvalue() == "asyncdata: the row index (2 s)\n"


@pytest.mark.parametrize(
    ("progress", "rank", "is_terminal", "is_logged", "way"),
    [
        ("auto", 0, True, False, "bar"), ("auto", 1, True, False, "none"), ("auto", 0, False, False, "none"),
        ("auto", 0, False, True, "log"), ("bar", 3, False, False, "bar"), ("lines", 0, True, False, "lines"),
        ("none", 0, True, False, "none"),
    ],
)  # fmt: skip
def test_a_bar_is_shown_on_the_first_rank_in_a_terminal_and_events_where_someone_reads_them(
    monkeypatch, caplog, progress, rank, is_terminal, is_logged, way
):
    caplog.set_level(logging.INFO if is_logged else logging.WARNING)
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
    assert way_of(progress, rank) == way


def test_the_oldest_of_several_waits_is_shown_on_one_display_and_it_ends_with_the_last():
    shown, displays = Shown(), []
    progress = WaitProgress("bar", 0.0, lambda way: displays.append(way) or shown)
    for first, second in (("a", "b"), ("c", "d")):
        older, newer = progress.waiting(lambda text=first: text), progress.waiting(lambda text=second: text)
        older.__enter__()
        newer.__enter__()
        with progress.waiting(lambda: "the youngest"):
            assert shown.next() == first
        older.__exit__(None, None, None)
        assert shown.next(unlike=first) == second
        newer.__exit__(None, None, None)
        assert shown.next(unlike=second) == "end"
    progress.close()

    assert displays == ["bar", "bar"]
