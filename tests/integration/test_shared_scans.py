"""Ranks that divide what they read have the same batches for fewer rows, whatever becomes of the other ranks."""

import gzip
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from pkgutil import resolve_name
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import JsonlSource, Mix, Part, Shuffle
from asyncdata.errors import BadRowError, ConfigError, WorkerError
from tests.support import column_fns
from tests.support.examples import each_value
from tests.support.faults import until
from tests.support.loading import NEVER_S, ids, kills_on_13, row_id, write_rows
from tests.support.parts import change
from tests.support.ranks import WAYS, Calls, Meeting, Ranks, lengths, make, stream, write

NUM_TOKENS = 6000
ONLINE = {name: way for name, way in WAYS.items() if not way.get("plan_packs")}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl", lengths(NUM_TOKENS, 40))


def meeting_of(world_size):
    meeting = Meeting(world_size)
    return [meeting.of(rank) for rank in range(world_size)]


@pytest.mark.parametrize(("way", "world_size", "at_start"), each_value(ONLINE, [2, 3], [1, 16]))
def test_batches_and_states_are_those_without_an_exchange(path, way, world_size, at_start, monkeypatch):
    change(monkeypatch, ranks_at_start=at_start)
    with Ranks(path, world_size, batch_size=2, epochs=2, **way) as alone:
        expected = list(alone.steps())
    calls = Calls()
    shared = {"exchanges": meeting_of(world_size), "tokenize_fn": calls, "batch_size": 2, "epochs": 2}
    with Ranks(path, world_size, **shared, **way) as ranks:
        found = list(ranks.steps())
    assert [step.batches for step in found] == [step.batches for step in expected]
    num_rows = len(calls.of_row)
    canaries_and_first = 0 if at_start == 1 else (world_size - 1) * num_rows // 4
    assert sum(calls.of_row.values()) <= 2 * num_rows + canaries_and_first + world_size * 40


def test_parts_of_a_mixture_are_divided(tmp_path):
    sizes = [("a", 3000), ("b", 1500), ("c", 400)]
    parts = {n: write(tmp_path / f"{n}.jsonl", lengths(size, 30, seed)) for seed, (n, size) in enumerate(sizes)}
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(parts["c"].read_bytes()))
    mix = Mix({"a": Part(parts["a"], weight=2), "b": parts["b"], "c": JsonlSource(str(tmp_path / "c.jsonl.gz"))})
    calls, calls_alone = Calls(), Calls()
    with Ranks(mix, 2, batch_size=3, tokenize_fn=calls_alone) as alone:
        expected = list(alone.steps(120))

    with Ranks(mix, 2, batch_size=3, exchanges=meeting_of(2), tokenize_fn=calls) as ranks:
        found = list(ranks.steps(120))

    assert [step.batches for step in found] == [step.batches for step in expected]
    of_blocks, alone_of_blocks = (sum(n for row, n in each.of_row.items() if row > 40) for each in (calls, calls_alone))
    assert of_blocks < 0.8 * alone_of_blocks, "and those of the stream, which has fewer rows, are not divided"


@pytest.fixture
def divided(monkeypatch):
    """All windows are, also the first."""
    change(monkeypatch, ranks_at_start=1)


def batches_of(rank, path, number, exchange=None, **settings):
    """The first batches of one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "exchange": exchange}
    with make(path, ranks=ranks, batch_size=2, **settings) as loader:
        return list(islice(stream(loader), number))


def at_the_same_time(*functions):
    """What each returns, in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result() for future in [threads.submit(function) for function in functions]]


def reasons(logs):
    return [log["reason"] for log in logs if log["event"] == "scans.not_shared"]


@pytest.mark.usefixtures("divided")
def test_a_rank_goes_on_alone_after_another_has_left(path):
    expected, exchanges = batches_of(0, path, 200), meeting_of(2)
    with capture_logs() as logs:
        found, few = at_the_same_time(
            partial(batches_of, 0, path, 200, exchanges[0]), partial(batches_of, 1, path, 3, exchanges[1])
        )
    assert found == expected
    assert few == batches_of(1, path, 3)
    told = [(log["event"], log["log_level"]) for log in logs if log["event"].startswith("scans.")]
    assert told == [("scans.rank_closed", "info")], "no alarm at the end of a run"


@pytest.mark.usefixtures("divided")
def test_a_rank_that_restarts_later_has_all_that_another_has_read_ahead_of_small_windows(tmp_path):
    few = write(tmp_path / "few.jsonl", [3] * 4)  # an epoch has one window, which the first rank reads
    with capture_logs() as logs, Ranks(few, 2, exchanges=meeting_of(2), buffer_size=32) as ranks:
        state, expected = ranks.state(), [step.batches for step in ranks.steps(20)]
        for loader in ranks.loaders:
            loader.load_state_dict(state)
            until(lambda loader=loader: loader.statistics().ready_samples >= 32 or loader is ranks.loaders[1])
        assert [step.batches for step in ranks.steps(20)] == expected
    assert not reasons(logs)


def test_a_rank_that_ends_before_there_was_anything_to_divide_has_left_for_the_others(tmp_path):
    sent: list[bytes] = []
    one_window = write(tmp_path / "few.jsonl", lengths(100, 40))
    found = batches_of(0, one_window, 1, lambda data: sent.append(data) or [data, b""], epochs=1)
    assert len(found) == 1
    assert sent == [b""]


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("call", [0, 1, 5])
def test_ranks_go_on_alone_after_the_exchange_has_failed(path, call):
    expected, meeting, lock = [batches_of(rank, path, 150) for rank in range(2)], Meeting(2), threading.Lock()

    def failing(rank):
        share, calls = meeting.of(rank), iter(range(10**6))

        def exchange(data):
            with lock:
                if next(calls) == call:
                    meeting.end()
            return share(data)

        return exchange

    with capture_logs() as logs:
        found = at_the_same_time(*(partial(batches_of, rank, path, 150, failing(rank)) for rank in range(2)))

    assert found == expected
    assert all(reason.startswith("AD486 the other ranks cannot be reached") for reason in reasons(logs))
    assert all(reason.endswith(": this rank makes all of them itself until the next start") for reason in reasons(logs))
    assert len(reasons(logs)) == 2


@pytest.mark.usefixtures("divided")
def test_a_rank_that_waits_too_long_makes_the_scans_itself(path, monkeypatch):
    change(monkeypatch, patience_with_ranks_s=0.05, end_of_calls_s=0.05)
    gate = threading.Event()

    def hangs(data):
        gate.wait()
        raise OSError("closed")

    with capture_logs() as logs:
        found = batches_of(0, path, 150, hangs)
    gate.set()
    assert found == batches_of(0, path, 150)
    assert set(reasons(logs)) == {"no answer in 0.05 s"}


@pytest.mark.usefixtures("divided")
def test_a_rank_that_does_not_read_is_waited_for_once_and_asked_again_when_it_reads(path, monkeypatch):
    change(monkeypatch, patience_with_ranks_s=0.2)
    expected, calls = [batches_of(rank, path, 150) for rank in range(2)], Calls()
    settings = {"tokenize_fn": calls, "batch_size": 2, "buffer_size": 20}
    with capture_logs() as logs, Ranks(path, 2, exchanges=meeting_of(2), **settings) as ranks:
        found = [[] for _ in ranks.loaders]
        for rank, loader in enumerate(ranks.loaders):  # the second evaluates while the first reads
            found[rank] += islice(stream(loader), 150)
            if rank == 0:
                alone = reasons(logs)
        while True:  # both read
            before = sum(calls.of_row.values())
            assert all(len(list(loader)) for loader in ranks.loaders)
            if sum(calls.of_row.values()) - before < 1.5 * len(calls.of_row):
                break

    assert found == expected
    assert alone == ["no answer in 0.2 s"]


@pytest.mark.usefixtures("divided")
def test_an_exchange_of_arrays_is_an_error_and_of_one_that_exits_nothing_is_shared(path):
    def exits(_: bytes) -> Any:
        raise SystemExit("peer")

    with pytest.raises(ConfigError, match="AD487 .* they are of the type ndarray"):
        batches_of(0, path, 150, lambda data: [np.frombuffer(data, np.uint8)] * 2, timeout_s=60)
    with capture_logs() as logs:
        assert batches_of(0, path, 150, exits, timeout_s=60) == batches_of(0, path, 150)
    (reason,) = reasons(logs)
    assert reason.startswith("AD486 the other ranks cannot be reached: SystemExit")


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(
    "other", [{"source": "other"}, {"seed": 8}, {"tokenize_fn": row_id}], ids=["data", "seed", "fn"]
)
def test_ranks_with_other_data_or_settings_are_told(path, tmp_path, other):
    write(tmp_path / "other.jsonl", lengths(NUM_TOKENS, 40, 1))
    exchanges = meeting_of(2)

    def told(rank, source="rows", **settings):
        with pytest.raises(ConfigError, match=r"AD487 rank \d reads other rows than rank \d: its data"):
            batches_of(rank, tmp_path / f"{source}.jsonl", 10**6, exchanges[rank], **settings)

    at_the_same_time(partial(told, 0), partial(told, 1, **other))


@pytest.mark.usefixtures("divided")
def test_each_rank_counts_the_rows_that_it_has_tokenized(path):
    with Ranks(path, 2, exchanges=meeting_of(2), epochs=1) as ranks:
        for _ in ranks.steps():
            pass
        counted = [loader.statistics().tokenized_rows_total for loader in ranks.loaders]
    assert sum(counted) == len(path.read_text().splitlines())
    assert min(counted) > 0.2 * sum(counted)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_row_is_that_of_every_rank(path, policy):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:70], "{", *lines[70:]]) + "\n")
    exchanges, settings = meeting_of(2), {"bad_rows": policy}

    def run(rank, exchange=None):
        try:
            return batches_of(rank, path, 250, exchange, **settings)
        except BadRowError as error:
            return str(error)

    found = at_the_same_time(*(partial(run, rank, exchanges[rank]) for rank in range(2)))
    assert found == [run(0), run(1)]
    assert ("rows.jsonl:71" in str(found[0])) == (policy == "raise")


@pytest.mark.usefixtures("divided")
def test_a_row_that_kills_workers_is_found_by_every_rank(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 60)
    settings = {"tokenize_fn": kills_on_13, "collate_fn": ids, "num_workers": 1, "bad_rows": "skip", "epochs": 1}
    exchanges = meeting_of(2)
    found = at_the_same_time(*(partial(batches_of, rank, path, 15, exchanges[rank], **settings) for rank in range(2)))
    delivered = [row for batches in found for batch in batches for row in batch]
    assert {*range(60)} - {*delivered} == {13}


def test_what_cannot_be_divided_is_refused(path, tmp_path):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    ranks = {"rank": 0, "world_size": 2, "exchange": Meeting(2).of(0)}
    with pytest.raises(ConfigError, match="AD487 .*from front to back have none"):
        make(packed, ranks=ranks)


@pytest.mark.usefixtures("divided")
def test_scans_that_were_awaited_before_another_epoch_are_not_made(path):
    calls, has_left, num_rows = Calls(), threading.Event(), len(path.read_text().splitlines())

    def leaves_late(data):
        has_left.wait(NEVER_S)
        return [data, b""]

    ranks = {"rank": 0, "world_size": 2, "exchange": leaves_late}
    with make(path, calls, ranks=ranks, shuffle=Shuffle(block_bytes=512, window_blocks=10_000), epochs=2) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            until(lambda: sum(of > epoch for of in calls.of_row.values()) > num_rows // 3)  # noqa: B023
        has_left.set()
        assert len(list(loader)) == -(-num_rows // 2)
    assert min(calls.of_row.values()) == 1


@pytest.mark.usefixtures("divided")
def test_what_another_rank_sent_and_cannot_be_read_ends_the_calls(path):
    exchanges = meeting_of(2)

    def damaged(data):
        own, other = exchanges[0](data)
        identity, replies = msgspec.msgpack.decode(other)
        return [own, msgspec.msgpack.encode((identity, [(key, b"?") for key, _ in replies]))]

    def told():
        with pytest.raises(WorkerError, match="service failed with"):
            batches_of(0, path, 150, damaged, timeout_s=60)

    _, found = at_the_same_time(told, partial(batches_of, 1, path, 150, exchanges[1]))
    assert found == batches_of(1, path, 150)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("method", ["BlockWindow.add", "SharedScans._take", "SharedScans._look"])
def test_a_fault_of_ours_ends_the_calls_or_the_sharing(path, method, monkeypatch):
    expected, exchanges = [batches_of(rank, path, 150) for rank in range(2)], meeting_of(2)
    module = "windows" if method.startswith("Block") else "ranks"
    owner = resolve_name(f"asyncdata.read_ahead.{module}:{method.partition('.')[0]}")
    name, calls = method.partition(".")[2], count()
    plain = getattr(owner, name)

    def faulty(*args, **others):
        if next(calls) == 3:
            raise RuntimeError("injected")
        return plain(*args, **others)

    monkeypatch.setattr(owner, name, faulty)

    def run(rank):
        try:
            return batches_of(rank, path, 150, exchanges[rank])
        except WorkerError as error:
            return str(error)

    found = at_the_same_time(partial(run, 0), partial(run, 1))
    for rank in range(2):
        assert found[rank] == expected[rank] or "injected" in found[rank]


EXCHANGE = """
import random, sys
import torch.distributed as dist
from asyncdata.integrations.torch import exchange
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
share = exchange(timeout_s=60)

def sent(call, rank):
    chance = random.Random(call * 100 + rank)
    near = chance.choice([0, 503, 504, 505, 70_000])
    sizes = 0, chance.randrange(600), 0 if rank else 3_000_000, 100_000 + rank, near
    return chance.randbytes(sizes[call % len(sizes)])

for call in range(40):
    assert share(sent(call, rank)) == [sent(call, other) for other in range(3)], call
print("whole")
"""


@pytest.mark.thorough
def test_an_exchange_over_gloo_returns_what_each_rank_sent_short_or_long(tmp_path):
    pytest.importorskip("torch")
    command, settings = [sys.executable, "-W", "error", "-c", EXCHANGE], {"stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **settings) for rank in range(3)]
    assert [rank.communicate(timeout=240)[0].strip() for rank in ranks] == ["whole"] * 3


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_rank_loads_the_media_of_its_own_samples(tmp_path, num_workers):
    path = column_fns.write_rows(tmp_path / "rows.jsonl")
    settings = {"tokenize_fn": column_fns.NumberedMedia(), "num_workers": num_workers, "collate_fn": checked}
    alone, exchanges = [batches_of(rank, path, 14, **settings) for rank in range(2)], meeting_of(2)
    found = at_the_same_time(*(partial(batches_of, rank, path, 14, exchanges[rank], **settings) for rank in range(2)))
    assert found == alone
    assert any(rows for batches in found for rows in batches)


def checked(samples):
    return [(int(one.tokens[0]), one.columns["pixels"].tolist()) for one in samples if "pixels" in one.columns]
