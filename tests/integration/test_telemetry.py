"""``telemetry="folder"``: what is recorded is what was delivered, and nothing that happens to it reaches the run."""

import ctypes
import errno
import gzip
import json
import os
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from asyncdata import ChatTokenizeFn, Mix, Outcomes, Part, PassRate, Position, PromptTokenizeFn, SoftPacking, Telemetry
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import LoaderClosedError, PrefetchTimeoutError
from asyncdata.loader import service
from asyncdata.telemetry import recorder
from asyncdata.telemetry.reader import read
from tests.support import parts
from tests.support.executors import chunk_of
from tests.support.faults import until
from tests.support.loaders import make, state_after
from tests.support.loading import every_third_dropped, fails_on_13, kills_on_13, write_rows
from tests.support.parts import EDGES, MAX_OF_REASON, Place, TokenizerName, change, get_logger, keys_of, line_number
from tests.support.ranks import settled

NUM_ROWS = 200
CLOSE_TIMEOUT_S = recorder._CLOSE_TIMEOUT_S  # noqa: SLF001 - as it is; each test makes it longer
AT_ONCE: dict[str, Any] = {"interval_s": 0.001}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs/a"


def place_of(sample):
    at = sample.position
    return Place(at.epoch, at.window, at.row)


def smallest(samples, most):
    """The places of the samples with the smallest keys."""
    keys = {place_of(sample): int(keys_of(sample.position, np.zeros(1, np.int64))[0]) for sample in samples}
    return sorted(sorted(keys, key=keys.__getitem__)[:most])


def histogram(samples):
    """How many samples are in each bucket of lengths."""
    return Counter(max(edge for edge in EDGES if edge <= len(sample.tokens)) for sample in samples)


def events_of(folder):
    return [event.name for start in read(folder).starts for event in start.events]


def run_of(source, folder, function=every_third_dropped, **knobs):
    """The telemetry of an epoch."""
    with make(source, function, epochs=1, batch_size=10, **{"telemetry": folder, **knobs}) as loader:
        assert sum(map(len, loader)) > 0
    return read(folder)


def parts_of(tmp_path, *names, num_rows=100):
    return {name: write_rows(tmp_path / f"{name}.jsonl", num_rows) for name in names}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_is_recorded_as_it_was_delivered(path, folder, num_workers):
    with make(path, num_workers=num_workers, telemetry=Telemetry(folder=str(folder), samples=8)) as loader:
        samples = [sample for _ in range(30) for sample in loader.get_next_batch(5)]
        statistics = loader.statistics()

    run = read(folder)
    (start,) = run.starts
    totals = run.totals
    assert (totals.samples, totals.tokens, totals.calls) == (150, statistics.tokens_total, 30)
    assert totals.waits == statistics.waits_total
    assert sum(totals.wait_s.values()) == pytest.approx(statistics.data_wait_seconds_total)
    assert [sample.place for sample in run.samples()] == smallest(samples, 8)
    assert run.lengths() == histogram(samples)
    assert start.end is not None and "with" in start.end.reason
    assert start.intervals[0].begins
    assert statistics.telemetry_lost_total == {}


def test_a_sample_is_recorded_with_its_tokens_its_place_and_its_line(jsonl_file, folder):
    rows = [{"input": f"How many are {n}? \N{GRINNING FACE}", "label": str(n), "metadata": {"n": n}} for n in range(20)]
    function = PromptTokenizeFn(tokenizer=tokenizer_folder(), label_key="label")
    with make(jsonl_file(rows), function, epochs=1, batch_size=5, telemetry=folder) as loader:
        samples = {place_of(sample): sample for batch in loader for sample in batch}

    recorded = read(folder).samples()
    assert len(recorded) == 20
    assert read(folder).header.tokenizers == {"": TokenizerName(tokenizer_folder())}
    for record in recorded:
        sample = samples[record.place]
        assert (record.ids, record.num_tokens) == (sample.tokens.tolist(), len(sample.tokens))
        assert (record.path, record.byte_offset) == (sample.source.path, sample.source.byte_offset)
        assert record.text == sample.prompt
        assert (json.loads(record.label), json.loads(record.metadata)) == (sample.label, sample.metadata)
        assert not record.is_cut


def test_a_run_that_resumes_is_recorded_as_one(path, folder):
    telemetry = Telemetry(folder=str(folder), samples=8)
    state = state_after(path, 60, telemetry=telemetry)
    with make(path, telemetry=telemetry) as loader:
        loader.load_state_dict(state)
        loader.get_next_batch(50)
    with make(path) as loader:
        samples = loader.get_next_batch(110)
    run = read(folder)
    assert [start.origin[0] for start in run.starts] == [0, 60]
    assert run.totals.samples == 110
    assert [sample.place for sample in run.samples()] == smallest(samples, 8)


def test_a_state_that_is_loaded_in_the_middle_counts_what_it_repeats_once(path, folder):
    with make(path, telemetry=folder) as loader:
        loader.get_next_batch(40)
        state = loader.state_dict()
        loader.get_next_batch(60)
        loader.load_state_dict(state)
        loader.get_next_batch(20)
    (start,) = read(folder).starts
    assert read(folder).totals.samples == 60
    assert sum(step.samples for step in start.differences()) == 120
    assert sum(step.samples for step in start.differences(only_counted=True)) == 20


@pytest.mark.parametrize("more", [{}, {"plan_packs": True, "shuffle": "full"}, {"ranks": {"rank": 1, "world_size": 2}}])
def test_packs_are_recorded_with_their_fill_and_documents_as_they_were_delivered(path, folder, more):
    telemetry = Telemetry(folder=str(folder), interval_s=0.001)
    with make(path, packing=SoftPacking(max_length=128), batch_size=2, epochs=1, telemetry=telemetry, **more) as loader:
        packs = [pack for batch in loader for pack in batch]

    run = read(folder)
    assert (run.header.pack_length, run.header.packing["kind"]) == (128, "SoftPacking")
    last = run.starts[0].intervals[-1]
    fill = [100 * sum(len(document.tokens) for document in pack) // 128 for pack in packs]
    assert last.pack_fill == Counter(percent // 5 * 5 for percent in fill)
    assert last.pack_documents == Counter(max(edge for edge in EDGES if edge <= len(pack)) for pack in packs)
    delivered = [[(place_of(d.sample), d.sample.source.path, len(d.tokens)) for d in pack[:64]] for pack in packs]
    shown = [moment.pack for moment in run.starts[0].intervals if moment.pack]
    at = [delivered.index([(one.place, one.path, one.num_tokens) for one in pack]) for pack in shown]
    assert at == sorted(set(at))
    assert at


def test_the_parts_of_a_mixture_are_recorded_with_their_targets(tmp_path, folder):
    weights = {"a": 3, "b": 1}
    parts = {name: Part(path, weight=weights[name]) for name, path in parts_of(tmp_path, "a", "b").items()}

    with make(Mix(parts, quota=4), telemetry=Telemetry(folder=str(folder), samples=8)) as loader:
        samples = loader.get_next_batch(40)

    run = read(folder)
    found = {name: (part.samples, part.target) for name, part in run.totals.by_source.items()}
    assert found == {"a": (30, 0.75), "b": (10, 0.25)}
    assert run.header.sources == ["a", "b"]
    for name in ("a", "b"):
        places = [sample.place for sample in run.samples() if sample.source == name]
        assert places == smallest([sample for sample in samples if sample.source_name == name], 4)
    assert run.lengths() == histogram(samples)


def test_groups_given_back_and_scores_are_counted(path, folder):
    outcomes = Outcomes(policy=PassRate(drop_above=0.9))
    with make(path, n_samples_per_prompt=2, outcomes=outcomes, telemetry=folder) as loader:
        groups = loader.get_samples(10)
        loader.report(groups, [[1.0, 1.0] if number < 3 else [0.0, 1.0] for number in range(10)])
        for group, versions in zip(groups, [(5, 6), (2, 7)], strict=False):
            for sample, version in zip(group, versions, strict=True):
                sample.extra["policy_version"] = version
        loader.add_samples(groups[:2])
        groups[2][0].extra["policy_version"] = "of the base model"  # counts for nothing, and is no fault
        loader.add_samples(groups[2:3])
        assert loader.statistics().telemetry_lost_total == {}
    totals = read(folder).totals
    assert (totals.returned, totals.staleness, totals.version_lags) == (3, {7: 1, 8: 2}, {2: 1, 5: 1})
    assert (totals.group_sizes, totals.degenerate) == ({2: 10}, 3)


@pytest.mark.parametrize("shuffle", [True, False])
def test_bad_rows_are_recorded_with_their_part(tmp_path, folder, shuffle):
    paths = parts_of(tmp_path, "one", "two", num_rows=20)
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    (start,) = run_of(mix, folder, fails_on_13, bad_rows="skip", shuffle=shuffle).starts
    found = {(bad.source, bad.path, line_number(bad.path, bad.byte_offset), bad.code) for bad in start.bad_rows}
    assert found == {(name, str(path), 14, "AD421") for name, path in paths.items()}
    assert all("thirteen" in bad.reason for bad in start.bad_rows)
    assert "row.bad" in [event.name for event in start.events]


@pytest.mark.parametrize(("function", "num_workers"), [(fails_on_13, 0), (fails_on_13, 1), (kills_on_13, 1)])
def test_two_loaders_of_a_process_record_their_own_events_only(path, tmp_path, function, num_workers):
    knobs: dict[str, Any] = {"bad_rows": "skip", "num_workers": num_workers, "buffer_size": 1000}  # not tuned
    with (
        make(path, function, telemetry=tmp_path / "train", **knobs) as train,
        make(path, telemetry=tmp_path / "eval", **knobs) as evaluation,
    ):
        for _ in range(NUM_ROWS // 10):  # their deliveries alternate in one thread
            assert len(train.get_next_batch(10)) == len(evaluation.get_next_batch(10))
        with pytest.raises(PrefetchTimeoutError):
            train.get_next_batch(1_000_000, timeout_s=0)
        evaluation.load_state_dict(evaluation.state_dict())
        get_logger("test").warning("of.no_loader")

    lost = {"worker.lost"} if function is kills_on_13 else set()
    assert set(events_of(tmp_path / "train")) == {"row.bad", "loader.timeout", "of.no_loader"} | lost
    assert events_of(tmp_path / "eval") == ["snapshot.restored", "of.no_loader"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropped_rows_are_recorded_with_reason_place_and_bytes(tmp_path, folder, num_workers):
    paths = parts_of(tmp_path, "a", "b")
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    run = run_of(mix, folder, num_workers=num_workers)
    rows = run.dropped_rows()
    assert len({(row.source, row.byte_offset) for row in rows}) == len(rows) == 2 * MAX_OF_REASON
    assert {row.reason for row in rows} == set(run.totals.dropped)
    for row in rows:
        assert row.path == str(paths[row.source])
        lies_at = slice(row.byte_offset, row.byte_offset + row.num_bytes)
        assert json.loads(paths[row.source].read_bytes()[lies_at])["id"] % 3 == 0


def test_a_dropped_row_of_a_compressed_file_is_recorded_by_its_number(path, folder):
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    rows = run_of(packed, folder).dropped_rows()
    assert len(rows) == MAX_OF_REASON
    assert all(row.row_number % 3 == 0 for row in rows)


def test_truncated_samples_are_recorded_beside_those_of_the_whole_run(jsonl_file, tmp_path, folder):
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x " * n}] for n in range(100)]
    path = jsonl_file([{"messages": chat} for chat in chats])
    function = ChatTokenizeFn(tokenizer_folder(), max_length=90, overlong="truncate_right")
    run = run_of(path, folder, function)
    few = run_of(path, tmp_path / "few", function, telemetry=Telemetry(folder=str(tmp_path / "few"), samples=2))
    truncated = [one for one in run.samples() if "truncated" in one.notes]
    num_noted = run.totals.noted["truncated"]
    assert min(MAX_OF_REASON, num_noted) <= len(truncated) <= num_noted
    assert {one.num_tokens for one in truncated} == {90}
    kept = sorted(few.samples(), key=lambda one: one.key)[:2]
    assert {one.place for one in kept} <= {one.place for one in run.samples()}


@pytest.mark.parametrize("is_alike", [True, False], ids=["the same", "one each"])
def test_of_a_run_that_drops_most_of_its_rows_few_are_recorded(is_alike):
    watch, num_windows, num_rows = parts.ChunkWatch(8, lambda _: True), 100, 100
    found, rules = [], parts.DeliveryRules(capacity=1000, max_ready_bytes=1 << 20)
    for window in range(num_windows):
        reasons = ["too long" if is_alike else f"too long: {window} {row}" for row in range(num_rows)]
        watch.see(parts.Channel(rules), chunk_of(*reasons, first=Position(0, window, 0)))
        found += watch.dropped_rows()
    if not is_alike:
        assert 0 < len(found) <= 20 * num_windows, "a reason for each row is not kept for each"
        return

    smallest_keys = sorted(row.key for row in found)[:MAX_OF_REASON]
    most = 2 * MAX_OF_REASON * (1 + np.log(num_windows * num_rows / MAX_OF_REASON))
    assert MAX_OF_REASON <= len(found) <= most
    assert max(smallest_keys) < 2**53 * 3 * MAX_OF_REASON / (num_windows * num_rows), "of all rows, not the first ones"


def test_a_recorder_without_samples_records_no_dropped_rows(path, folder):
    run = run_of(path, folder, telemetry={"folder": str(folder), "samples": 0})
    assert (run.samples(), run.dropped_rows()) == ([], [])
    assert run.totals.dropped


@pytest.mark.parametrize("hidden", [("a", "b"), ("a",)], ids=["of no row", "of one part's"])
def test_no_text_of_a_row_is_recorded_where_rows_are_not_shown(tmp_path, folder, hidden):
    parts = {}
    for name in ("a", "b"):
        texts = [f"SECRET_{name} {n}" + " and so on" * (0 if n % 3 else 100) for n in range(50)]
        lines = [json.dumps({"input": text, "label": f"SECRET_{name}"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, f'{{"input": "SECRET_{name}", \n']))
        bad_rows = {"policy": "skip", "excerpts": name not in hidden}
        parts[name] = Part(tmp_path / f"{name}.jsonl", bad_rows=bad_rows, when_done="leave")
    function = PromptTokenizeFn(tokenizer=tokenizer_folder(), label_key="label", max_length=50)
    run = run_of(Mix(parts), folder, function, bad_rows={"policy": "skip", "excerpts": len(hidden) < 2})

    (file,) = folder.iterdir()
    data = file.read_bytes()
    assert [name for name in parts if f"SECRET_{name}".encode() in data] == [n for n in parts if n not in hidden]
    assert (b'"ids"' in data) == (len(hidden) < 2)
    assert not run.header.shows_rows
    assert (len(run.samples()), len(run.starts[0].bad_rows)) == (2 * 32, 2)
    assert len(run.dropped_rows()) == 2 * MAX_OF_REASON
    assert {row.source for row in run.dropped_rows() if row.num_bytes < 0} == set(hidden), "no page reads these rows"


def deliver(path, folder, **settings):
    """Deliver two epochs; return what was not recorded."""
    telemetry = Telemetry(folder=str(folder), **AT_ONCE, **settings)
    with make(path, epochs=2, batch_size=10, telemetry=telemetry) as loader:
        assert sum(len(batch) for _ in range(2) for batch in loader) == 2 * NUM_ROWS
    return loader.statistics().telemetry_lost_total


@pytest.fixture
def writes(monkeypatch, folder):
    """A function that has another one called in place of ``os.write`` for files of the folder."""
    write = os.write

    def replaced_by(other):
        def by_place(fd, data):
            is_ours = os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
            return other(fd, data, write) if is_ours else write(fd, data)

        monkeypatch.setattr(recorder.os, "write", by_place)

    return replaced_by


def num_warnings(caplog):
    return [getattr(record, "event", "") for record in caplog.records].count("telemetry.lost")


def test_a_folder_that_cannot_be_made_is_a_warning_and_a_number(path, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert deliver(path, tmp_path / "file/runs")["disk"] > 0
    assert num_warnings(caplog) == 1


def test_a_full_disk_is_a_warning_and_a_number_and_leaves_whole_lines(path, folder, writes, caplog):
    """It is full after a thousand bytes, and again after each that is freed."""
    room = [1000]

    def full(fd, data, write):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

        written: int = write(fd, data[: room[0]])
        room[0] -= written
        return written

    writes(full)

    assert deliver(path, folder)["disk"] > 0
    assert num_warnings(caplog) == 1
    (start,) = read(folder).starts
    assert start.num_unread == 0


def telemetry_thread():
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "asyncdata-telemetry")
    return thread


@pytest.mark.parametrize("fault", ["the folder is removed", "the recorder dies"])
def test_a_fault_in_the_middle_of_a_run_is_a_number(path, folder, caplog, fault):
    telemetry = Telemetry(folder=str(folder), **AT_ONCE)
    with make(path, epochs=1, batch_size=10, telemetry=telemetry) as loader:
        loop = iter(loader)
        next(loop)
        until(lambda: list(folder.glob("*")))
        if fault == "the folder is removed":
            next(folder.iterdir()).unlink()
            folder.rmdir()
        else:
            thread = telemetry_thread()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            thread.join()
        assert sum(map(len, loop)) == NUM_ROWS - 10

    lost = loader.statistics().telemetry_lost_total
    assert lost == {"disk": lost["disk"]} if fault == "the folder is removed" else {"error": 1}
    assert num_warnings(caplog) == 1


def test_a_fault_in_a_hook_is_a_number(path, folder, monkeypatch):
    change(monkeypatch, mix_of_a_watch=lambda *_: 1 / 0)
    assert deliver(path, folder)["error"] > 0


def test_close_does_not_wait_for_a_disk_that_hangs_longer_than_its_docstring_says(path, folder, monkeypatch, writes):
    change(monkeypatch, close_of_telemetry_s=0.01)
    is_hanging, may_go_on = threading.Event(), threading.Event()

    def hang(fd, data, write):
        is_hanging.set()
        may_go_on.wait()
        return int(write(fd, data))

    writes(hang)
    loader = make(path, telemetry=Telemetry(folder=str(folder), **AT_ONCE))
    said = loader.close.__doc__
    assert f"{CLOSE_TIMEOUT_S:g} seconds" in said
    assert f"{service._CLOSE_TIMEOUT_S:g} seconds" in said  # noqa: SLF001 - said there
    try:
        loader.get_next_batch(10)
        is_hanging.wait()
        thread = telemetry_thread()
        loader.close()
        assert thread.is_alive()
        with pytest.raises(LoaderClosedError):
            loader.get_next_batch(10)
    finally:
        may_go_on.set()
    thread.join()


def test_a_limit_of_bytes_is_kept_and_what_is_over_it_is_counted(path, folder):
    with make(path, batch_size=10, telemetry=Telemetry(folder=str(folder), max_bytes=1 << 16, samples=1000)) as loader:
        assert [sum(map(len, loader)) for _ in range(4)] == [NUM_ROWS] * 4
    (file,) = folder.iterdir()
    (start,) = read(folder).starts
    assert file.stat().st_size <= 1 << 16
    assert loader.statistics().telemetry_lost_total["size"] > 0
    assert start.end is not None
    assert start.intervals[-1].samples == 4 * NUM_ROWS


def test_the_first_record_is_written_at_once(path, folder, monkeypatch):
    for name in ("_TICK_S", "_FIRST_TICK_S"):
        monkeypatch.setattr(recorder, name, 3600.0)
    with make(path, telemetry=Telemetry(folder=str(folder), interval_s=3600.0)) as loader:
        loader.get_next_batch(5)
        until(lambda: any(file.stat().st_size for file in folder.glob("*.jsonl")))  # a file without a record is none
        until(lambda: read(folder).starts[0].intervals)


def test_a_loader_that_never_starts_writes_nothing(path, folder):
    make(path, telemetry=folder).close()
    assert not folder.exists()


def test_the_order_and_the_state_are_the_same_with_and_without_it(path, folder):
    with make(path) as plain, make(path, telemetry=folder) as recorded:
        for _ in range(3):
            places, others = (list(map(place_of, one.get_next_batch(50))) for one in (plain, recorded))
            assert places == others
        assert settled(plain.state_dict()) == settled(recorded.state_dict())
