"""Telemetry: files, their records and the run that they are together; calls and waits, and what workers used."""

import os
import re
import typing
from collections import Counter
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.errors import ConfigError
from asyncdata.telemetry import recorder, records
from asyncdata.telemetry.reader import difference, read, read_start
from asyncdata.telemetry.records import decode, encode
from tests.support import parts, telemetry_files
from tests.support.examples import in_ci
from tests.support.telemetry_files import start, write, write_run

KINDS = (*typing.get_args(records.Record), parts.SourceCounts)
FIRST = "rank-00000-0000.jsonl"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_record_is_explained_where_it_is_declared(kind):
    words = set(re.findall(r"\w+", kind.__doc__))
    assert [name for name in kind.__struct_fields__ if name not in words] == []


def test_a_run_reads_as_it_was_written(tmp_path):
    write_run(tmp_path)
    lines = [line for path in tmp_path.iterdir() for line in path.read_bytes().split(b"\n")[:-1]]
    assert [encode(decode(line)) for line in lines] == lines
    assert {type(decode(line)) for line in lines} == set(KINDS) - {parts.SourceCounts}


def test_a_reader_ignores_fields_that_it_does_not_know_and_refuses_a_record_without_its_place():
    line = b'{"kind":"interval","at":1.0,"elapsed_s":2.0,"place":[0,1,2],"later":3}'
    assert decode(line) == parts.Interval(at=1.0, elapsed_s=2.0, place=parts.Place(0, 1, 2))
    with pytest.raises(msgspec.ValidationError, match="place"):
        decode(b'{"kind":"interval","at":1.0,"elapsed_s":2.0}')


def test_ranks_are_a_generation_a_restart_begins_the_next_and_what_was_delivered_again_counts_once(tmp_path):
    write_run(tmp_path)
    run = read(tmp_path)
    ranks = [[(each.header.rank, each.header.number) for each in one] for one in run.generations]
    assert ranks == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert (run.header.number, run.totals.groups) == (1, 80 + 6 * 40)
    first, second = run.stream
    assert (first.counts_until, second.counts_until) == (80 * 4, None)
    assert sum(step.groups for step in first.differences(only_counted=True)) == 80
    assert (sum(step.groups for step in first.differences()), sum(run.lengths().values())) == (160, 80 + 240)
    assert (first.end, first.num_unread, len(first.intervals)) == (None, 0, 5), "a kill tore its last line"
    assert second.end is not None


def test_a_start_counts_until_the_earliest_place_from_which_any_later_one_went_on(tmp_path):
    for number, (first, end) in enumerate([(0, 160), (80, 120), (40, 60)]):
        moments = [telemetry_files.interval(0, number, at, groups, 0) for at, groups in enumerate((first, end))]
        write(tmp_path / f"rank-00000-{number:04}.jsonl", [start(0, number, first), *moments])
    assert [each.counts_until for each in read(tmp_path).starts] == [40 * 4, 40 * 4, None]


@in_ci(max_examples=25)
@given(cut=st.integers(0, 5000))
def test_a_file_cut_anywhere_reads_as_its_whole_lines(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    data = (folder / FIRST).read_bytes()[:cut]
    (folder / FIRST).write_bytes(data)

    found = read_start(folder / FIRST)

    lists = ("intervals", "samples", "events", "bad_rows", "dropped_rows")
    assert (found is not None) + sum(len(getattr(found, name, ())) for name in lists) == data.count(b"\n")


@pytest.mark.parametrize(
    ("torn", "has_end", "num_unread"),
    [
        (b'{"kind":"end","at":1.0}', False, 0),  # without its line break it is no record, even if it could be one
        (b'{"kind":"later"}\n\xff\x00\n{"kind":"end","at":1.0}\n', True, 2),
    ],
)
def test_a_line_that_is_no_record_is_counted_and_passed_over(tmp_path, torn, has_end, num_unread):
    write(tmp_path / FIRST, [start()], torn=torn)
    found = read_start(tmp_path / FIRST)
    assert (found.end is not None, found.num_unread) == (has_end, num_unread)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "AD620 "),
        (encode(msgspec.structs.replace(start(), version=2)) + b"\n", rf"AD621 .*{FIRST} .*of version 2"),
        *((line, f"AD621 .*{FIRST} ") for line in (b"{}\n", b"no JSON\n", b'{"\xff":1}\n', b'{"kind":"end","at":1}\n')),
    ],
)
def test_a_file_that_is_no_telemetry_is_refused_by_name(tmp_path, data, message):
    (tmp_path / FIRST).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_a_difference_has_what_was_added_and_the_state_at_the_end():
    place, source = parts.Place(0, 0, 0), parts.SourceCounts(samples=3, epoch=1, target=0.5, dropped={"a": 1})
    before = parts.Interval(at=1, elapsed_s=1, place=place, samples=5, dropped={"a": 2}, wait_s={"read": 0.5}, ready=7)
    after = {"samples": 9, "dropped": {"a": 2, "b": 1}, "ready": 2, "by_source": {"x": source}}
    step = difference(before, parts.Interval(at=3, elapsed_s=3, place=place, lost={}, **after))
    assert (step.samples, step.dropped, step.ready, step.elapsed_s, step.at) == (4, {"b": 1}, 2, 2, 3)
    assert step.by_source == {"x": source}


@in_ci(max_examples=25)
@given(
    resumes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    most=st.integers(1, 6),
    ranks=st.integers(1, 3),
)
def test_any_chain_of_crashes_gives_the_samples_with_the_smallest_keys(tmp_path_factory, resumes, most, ranks):
    """Each start resumes somewhere before its predecessor's end; every rank records all samples."""
    folder, end = tmp_path_factory.mktemp("run"), 0
    for number, (back, length) in enumerate(resumes):
        first = max(0, end - back)
        end = first + length
        found = [telemetry_files.sample(at) for at in range(first, end)]
        for rank in range(ranks):
            header = msgspec.structs.replace(start(rank, number, first), max_samples=most)
            last = telemetry_files.interval(rank, number, 1, end, end - first)
            write(folder / f"rank-{rank:05}-{number:04}.jsonl", [header, *found, last])

    stream = sorted(map(telemetry_files.sample, range(end)), key=lambda sample: sample.key)
    of_each = [[sample for sample in stream if sample.source == source][:most] for source in ("math", "code")]
    assert read(folder).samples() == sorted(sum(of_each, []), key=lambda sample: sample.place)


def test_each_start_of_a_rank_has_a_file_of_its_own_and_no_link_is_followed(tmp_path):
    (tmp_path / FIRST).symlink_to(tmp_path / "elsewhere")
    for rank in (0, 3, 0):
        assert parts.RecordFile(str(tmp_path), rank, 1 << 20).write(b"line\n") == ""
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {FIRST, "rank-00000-0001.jsonl", "rank-00000-0002.jsonl", "rank-00003-0000.jsonl"}


def test_intervals_become_twice_as_long_each_time_half_of_the_room_is_used(tmp_path):
    file = parts.RecordFile(str(tmp_path), 0, 1 << 16)
    line, seen = b"x" * 99 + b"\n", []
    while file.write(line) == "":
        if file.thinning not in seen:
            seen.append(file.thinning)
    assert seen == [1, 2, 4, 8, 16]
    assert (file.write(line), file.write(line, is_last=True)) == ("size", "")


def test_a_forked_child_writes_nothing(tmp_path):
    file = parts.RecordFile(str(tmp_path), 0, 1 << 20)
    file.write(b"parent\n")
    pid = os.fork()
    if not pid:
        os._exit(0 if file.write(b"child\n") == "disk" else 1)
    assert (os.waitpid(pid, 0)[1], (tmp_path / FIRST).read_bytes()) == (0, b"parent\n")


rooms = st.just(1 << 20) | st.integers(0, 400)


@in_ci(max_examples=25)
@given(steps=st.lists(st.tuples(rooms, st.integers(0, 900), st.booleans()), min_size=30))
def test_a_disk_that_is_full_at_times_leaves_whole_lines(tmp_path_factory, steps):
    """Whatever the lines, and however much room there is for each: the file has what was said to be written."""
    folder, written, write = tmp_path_factory.mktemp("run"), b"", os.write

    def limited(room, fd, data):
        if not room:
            raise OSError(28, "No space left on device")

        return write(fd, data[:room])

    file = parts.RecordFile(str(folder), 0, 1 << 13)
    with pytest.MonkeyPatch.context() as patch:
        for room, size, is_detail in steps:
            patch.setattr(recorder.os, "write", partial(limited, room))
            line = b"x" * size + b"\n"
            written += b"" if file.write(line, is_detail=is_detail) else line
            assert (folder / FIRST).read_bytes() == written
    file.close()
    assert len(written) <= 1 << 13


class Watched:
    """The times of calls, with a clock, what is missing at each look, and how the workers shared the CPUs."""

    def __init__(self):
        self.now, self.stage, self.cpus = 0.0, "start", parts.CpuShare(0.0, 0.0)
        self.times = parts.CallTimes(lambda: self.now, lambda: self.stage, lambda: self.cpus)

    def look(self, now, stage="", cpus=None):
        """Settle at a moment, since which a stage is missing."""
        self.now, self.stage, self.cpus = now, stage or self.stage, cpus or self.cpus
        self.times.settle()

    def call(self, now, waited_s=0.0):
        self.now = now
        self.times.called()
        if waited_s:
            self.times.wait_begins(now, now, "read")
            self.times.wait_ends(now, now + waited_s)

    def call_and_wait(self, name, now, stage):
        self.call(now)
        self.times.wait_begins(name, now, stage)


@pytest.fixture
def waiting():
    """A first call waits since 0."""
    watched = Watched()
    watched.call_and_wait("first", 0.0, "start")
    return watched


def test_the_time_between_calls_is_the_trainers_without_the_waits():
    watched = Watched()
    for at, waited_s in ((0.0, 3.0), (4.0, 0.0), (5.5, 0.25), (6.0, 0.0)):
        watched.call(at, waited_s)
    watched.look(6.0)
    times = watched.times
    assert (times.num_calls, times.num_waits, times.wait_s) == (4, 2, {"read": 3.25})
    assert times.step_s == pytest.approx(1.0 + 1.5 + 0.25)
    assert times.totals()["step_ms"] == {215: 1, 861: 1, 1448: 1}
    assert times.totals()["wait_ms"] == {215: 1}  # the first is start-up


def test_calls_of_several_threads_never_make_a_negative_time():
    watched = Watched()
    for at, waited_s in ((0.0, 0.0), (0.0, 5.0), (1.0, 0.0)):
        watched.call(at, waited_s)
    watched.look(1.0)
    assert watched.times.step_s == 0.0


def test_what_does_not_fit_in_the_queue_is_counted(monkeypatch):
    parts.change(monkeypatch, most_moments=3)
    times = parts.CallTimes()
    for _ in range(5):
        times.called()
    times.wait_begins("first", 0.0, "read")
    times.wait_ends("first", 1.0)
    times.settle()
    times.called()
    times.settle()
    assert (times.num_calls, times.num_waits, times.num_lost) == (4, 0, 3)


def test_a_wait_is_split_by_what_is_missing_and_the_first_ones_is_start_up_and_no_time_of_the_trainer(waiting):
    for now, stage in ((1.0, "tokenize"), (2.0, "tokenize"), (4.0, "read")):
        waiting.look(now, stage)
    waiting.times.wait_ends("first", 4.5)
    waiting.call_and_wait("second", 7.0, "tokenize")
    waiting.look(8.0, "tokenize")
    assert waiting.times.first_s == {"start": 1.0, "tokenize": 3.0, "read": 0.5}
    assert (waiting.times.wait_s, waiting.times.step_s) == ({"start": 1.0, "tokenize": 4.0, "read": 0.5}, 2.5)


def test_time_in_which_the_workers_had_no_cpu_is_named(waiting):
    waiting.look(4.0, cpus=parts.CpuShare(0.75, 3.0))
    assert waiting.times.wait_s == {"start": 1.0, "cpu": 3.0}
    waiting.look(8.0, cpus=parts.CpuShare(0.75, 0.5))  # the workers slept most of the time
    assert waiting.times.wait_s == waiting.times.first_s == {"start": 4.5, "cpu": 3.5}


def watch_of(times):
    """Of workers with these times, by their pids."""

    def statistics():
        return SimpleNamespace(workers=[SimpleNamespace(pid=pid) for pid in (None, *times)])

    return parts.CpuWatch(SimpleNamespace(statistics=statistics), times.__getitem__)


def test_only_what_is_new_counts_and_the_longest_wait_is_told():
    times = {1: (1.0, 0.0), 2: (1.0, 5.0)}
    watch = watch_of(times)
    assert (watch.share(), watch.share()) == (pytest.approx((5 / 7, 5.0)), (0.0, 0.0))
    times[1], times[2], times[3] = (2.0, 1.0), (1.5, 5.5), (0.0, 0.0)
    assert watch.share() == pytest.approx((0.5, 1.0))
    assert watch_of({1: (1.0, 0.0)}).share() == (0.0, 0.0), "it ran at once"


@pytest.mark.parametrize(
    ("text", "expected"), [("1500000000 250000000 7\n", (1.5, 0.25)), ("", (0.0, 0.0)), (None, (0.0, 0.0))]
)
def test_the_systems_counters_are_read_where_they_are(tmp_path, text, expected):
    (tmp_path / "proc/12").mkdir(parents=True)
    if text is not None:
        (tmp_path / "proc/12/schedstat").write_text(text)
    assert parts.cpu_times(12, tmp_path) == expected


SIZE = 1 << 16  # numbers below it are looked up, others are searched

around = st.sampled_from([*parts.EDGES, SIZE]).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2))


@in_ci(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 300) | around, max_size=20), max_size=5))
def test_each_number_is_in_the_bucket_with_the_largest_edge_not_above_it_one_by_one_or_together(lists):
    together, single = parts.Histogram(), parts.Histogram()
    for numbers in lists:
        together.add_many(np.array(numbers, np.int64))
        single.add(numbers)
    buckets = Counter(max(edge for edge in parts.EDGES if edge <= number) for numbers in lists for number in numbers)
    assert together.counts() == single.counts() == dict(sorted(buckets.items()))
