"""The files of a run, merged: ranks, restarts, what was delivered twice, and what a kill leaves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ConfigError
from asyncdata.telemetry.reader import difference, read, read_start
from asyncdata.telemetry.records import Interval, Place, SourceCounts
from tests.support import telemetry_files
from tests.support.telemetry_files import start, write, write_run


def test_ranks_are_a_generation_and_a_restart_begins_the_next(tmp_path):
    write_run(tmp_path)

    run = read(tmp_path)

    assert [[(each.header.rank, each.header.number) for each in one] for one in run.generations] == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
    ]
    assert run.header.number == 1
    assert run.totals is not None
    assert run.totals.groups == 80 + 6 * 40


def test_what_was_delivered_again_after_a_crash_counts_once(tmp_path):
    write_run(tmp_path)

    run = read(tmp_path)

    first, second = run.stream
    assert first.counts_until == 80 * 4
    assert second.counts_until is None
    assert sum(step.groups for step in first.differences(only_counted=True)) == 80
    assert sum(step.groups for step in first.differences()) == 160
    assert sum(run.lengths().values()) == 80 + 240
    places = [sample.place for sample in run.samples()]
    assert places == sorted(set(places))


def test_a_last_line_that_a_kill_tore_is_left_out(tmp_path):
    write_run(tmp_path)

    torn, whole = read(tmp_path).generations[0][0], read(tmp_path).generations[1][0]

    assert (torn.end, torn.num_unread, len(torn.intervals)) == (None, 0, 5)
    assert whole.end is not None


@pytest.mark.thorough
@given(cut=st.integers(0, 5000))
def test_a_file_cut_anywhere_reads_as_its_whole_lines(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    path = folder / "rank-00000-0000.jsonl"
    data = path.read_bytes()[:cut]
    path.write_bytes(data)

    found = read_start(path)

    num_lines = data.count(b"\n")
    if num_lines == 0:
        assert found is None
    else:
        assert found is not None
        events = len(found.events) + len(found.bad_rows) + len(found.dropped_rows)
        assert 1 + len(found.intervals) + len(found.samples) + events == num_lines


def test_a_line_that_is_no_record_is_counted_and_passed_over(tmp_path):
    path = tmp_path / "rank-00000-0000.jsonl"
    write(path, [start()], torn=b'{"kind":"later"}\n\xff\x00\n' + b'{"kind":"end","at":1.0}\n')

    found = read_start(path)

    assert found is not None
    assert found.num_unread == 2
    assert found.end is not None


def test_a_folder_without_telemetry_is_named(tmp_path):
    (tmp_path / "rank-00000-0000.jsonl").write_bytes(b"")

    with pytest.raises(ConfigError, match=f"AD620 .*{tmp_path.name}"):
        read(tmp_path)


@pytest.mark.parametrize("line", [b"{}\n", b"no JSON\n", b'{"kind":"end","at":1.0}\n', b'{"kind":"run","version":2}\n'])
def test_a_file_of_another_kind_is_refused(tmp_path, line):
    (tmp_path / "rank-00000-0000.jsonl").write_bytes(line)

    with pytest.raises(ConfigError, match=r"AD621 .*rank-00000-0000\.jsonl"):
        read(tmp_path)


def test_a_file_of_a_later_version_is_refused(tmp_path):
    header = msgspec.structs.replace(start(), version=2)
    write(tmp_path / "rank-00000-0000.jsonl", [header])

    with pytest.raises(ConfigError, match="AD621 .*of version 2"):
        read(tmp_path)


def test_a_difference_has_what_was_added_and_the_state_at_the_end():
    common = {"place": Place(0, 0, 0)}
    before = Interval(at=1, elapsed_s=1, samples=5, dropped={"a": 2}, wait_s={"read": 0.5}, ready=7, **common)
    source = SourceCounts(samples=3, epoch=1, target=0.5, dropped={"a": 1})
    after = Interval(
        at=3, elapsed_s=3, samples=9, dropped={"a": 2, "b": 1}, ready=2, by_source={"x": source}, lost={}, **common
    )

    step = difference(before, after)

    assert (step.samples, step.dropped, step.ready, step.elapsed_s, step.at) == (4, {"b": 1}, 2, 2, 3)
    assert step.by_source == {"x": source}


def test_a_stream_that_begins_again_in_the_middle_of_a_run_counts_once(tmp_path):
    """As after ``load_state_dict``: 100 samples, then from 40 on again to 90."""
    at = [(0, True), (50, False), (100, False), (40, True), (90, False)]
    intervals = [
        Interval(
            at=number, elapsed_s=number, place=Place(0, 0, count), samples=count, begins=begins, lengths={8: total}
        )
        for number, ((count, begins), total) in enumerate(zip(at, (0, 50, 100, 100, 150), strict=True))
    ]
    write(tmp_path / "rank-00000-0000.jsonl", [start(), *intervals])

    (found,) = read(tmp_path).starts

    assert [step.samples for step in found.differences()] == [50, 50, 50]
    assert [step.samples for step in found.differences(only_counted=True)] == [50]


@pytest.mark.thorough
@given(
    resumes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    most=st.integers(1, 6),
    ranks=st.integers(1, 3),
)
def test_any_chain_of_crashes_gives_the_samples_of_the_stream_with_the_smallest_keys(
    tmp_path_factory, resumes, most, ranks
):
    """Each start resumes somewhere before its predecessor's end; every rank records all samples."""
    folder = tmp_path_factory.mktemp("run")
    end = 0
    for number, (back, length) in enumerate(resumes):
        first = max(0, end - back)
        end = first + length
        for rank in range(ranks):
            header = msgspec.structs.replace(start(rank, number, first), max_samples=most)
            records = [telemetry_files.sample(at) for at in range(first, end)]
            last = telemetry_files.interval(rank, number, 1, end, end - first)
            write(folder / f"rank-{rank:05}-{number:04}.jsonl", [header, *records, last])

    found = read(folder).samples()

    stream = [telemetry_files.sample(at) for at in range(end)]
    wanted = []
    for source in ("math", "code"):
        of_source = [sample for sample in stream if sample.source == source]
        wanted += sorted(of_source, key=lambda sample: sample.key)[:most]
    assert found == sorted(wanted, key=lambda sample: sample.place)
