"""Ranks of a node tokenize each row once, and each gets what it gets without that."""

from __future__ import annotations

import errno
import gzip
import importlib
import os
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, IterableSource, Limits, Mix, Part, PrefetchTimeoutError, Ranks, Statistics
from asyncdata.prefetch.node_share import folder as folders
from asyncdata.prefetch.node_share.folder import NodeFolder
from asyncdata.prefetch.node_share.sharing import Sharing
from tests.support.faults import until
from tests.support.loading import write_rows
from tests.support.other_users import give_away
from tests.support.ranks import WAYS, lengths, make, numbered, settled, stream, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_TOKENS = 8000


class Calls:
    """A tokenize function that counts how often it has seen each row.

    :ivar gate: rows that are in none of ``held`` pass it at once.
    """

    def __init__(self, function: Callable[..., Any] = numbered, held: int | None = None) -> None:
        self.seen: Counter[int] = Counter()
        self.gate, self.is_held = threading.Event(), threading.Event()
        self._held = held
        self._function = function

        def counted(row: dict[str, Any]) -> Any:
            self.seen[row["id"]] += 1
            if row["id"] == self._held:
                self.is_held.set()
                self.gate.wait()
            return self._function(row)

        counted.version = 1  # type: ignore[attr-defined]
        self.function = counted


class Run(NamedTuple):
    """What ranks in lock step got.

    :ivar batches: for each step the content of each rank's batch; None if it has none.
    """

    batches: list[list[bytes | None]]
    statistics: list[Statistics]
    states: list[dict[str, Any]]


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Memory of a node for this test alone. Its path is short, as a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="ad-") as root:
        monkeypatch.setattr(folders, "SHARED_MEMORY", root)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        yield root
        assert os.listdir(root) == []


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", lengths(NUM_TOKENS, 40))


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def open_ranks(
    stack: ExitStack, path: Any, function: Any, world_size: int, share: Any, **knobs: Any
) -> list[DataLoader]:
    def ranks(rank: int) -> Ranks:
        return Ranks(rank=rank, world_size=world_size, share_node=share)

    return [
        stack.enter_context(make(path, function, **{"epochs": 1, **knobs, "ranks": ranks(rank)}))
        for rank in range(world_size)
    ]


def run(path: Any, function: Any, world_size: int = 2, share: Any = True, **knobs: Any) -> Run:
    batches = []
    with ExitStack() as stack:
        loaders = open_ranks(stack, path, function, world_size, share, **knobs)
        loops = [stream(loader) for loader in loaders]
        while any(step := [next(loop, None) for loop in loops]):
            batches.append([None if batch is None else batch.content for batch in step])
        statistics = [loader.statistics() for loader in loaders]
        states = [settled(loader.state_dict()) for loader in loaders]
    return Run(batches, statistics, states)


def check_once(calls: Calls, path: Path, found: Run, epochs: int = 1) -> None:
    """Each row was tokenized once in each epoch; and the canaries at every start, of which there are eight at most."""
    ranks, expected = len(found.statistics), epochs * num_rows(path)
    assert sum(one.tokenized_rows_total for one in found.statistics) == expected
    assert [one.tokenized_rows_total + one.shared_rows_total for one in found.statistics] == [expected] * ranks
    assert [(one.unshared_rows_total, one.awaited_rows) for one in found.statistics] == [(0, 0)] * ranks
    every = Counter(dict.fromkeys(range(num_rows(path)), epochs))
    assert not every - calls.seen
    assert (calls.seen - every).total() <= 8 * ranks


@pytest.mark.parametrize(
    ("world_size", "knobs"),
    [
        *((2, WAYS[name]) for name in WAYS if "planned" not in name),
        (4, {**WAYS["soft"], "epochs": 2}),
        (4, {"epochs": 2}),
        (2, {"shuffle": False}),
        (2, {"shuffle": "full", "cache": {"folder": ""}}),
        (2, {"event_loop": "trio"}),
        (2, {"event_loop": "uvloop"}),
        (2, {"digest": "tokens"}),
        (2, {"is_compressed": True}),
    ],
    ids=str,
)
def test_ranks_tokenize_each_row_of_each_epoch_once_and_get_the_same_batches(
    rows: Path, world_size: int, knobs: dict[str, Any]
) -> None:
    knobs, path = dict(knobs), rows
    pytest.importorskip(knobs.get("event_loop", "asyncio"), reason="the event loop is not installed")
    if knobs.pop("is_compressed", False):
        path = rows.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress(rows.read_bytes()))
    alone, shared = Calls(), Calls()

    expected = run(path, alone.function, world_size, share=False, **knobs)
    found = run(path, shared.function, world_size, **knobs)

    assert found.batches == expected.batches
    assert found.states == expected.states
    check_once(shared, rows, found, knobs.get("epochs", 1))
    assert min(alone.seen.values()) >= world_size, "this test would find rows that are tokenized twice"


def some_rows_are_no_samples(row: dict[str, Any]) -> Any:
    if row["id"] % 7 == 3:
        return "not good enough"

    if row["id"] % 50 == 13:
        raise KeyError("thirteen")

    return numbered(row)


@pytest.mark.parametrize("way", ["soft", "not packed"])
def test_drops_and_bad_rows_are_counted_on_every_rank_as_without_sharing(rows: Path, way: str) -> None:
    shared = Calls(some_rows_are_no_samples)
    knobs = {**WAYS[way], "bad_rows": "skip"}

    expected = run(rows, Calls(some_rows_are_no_samples).function, share=False, **knobs)
    found = run(rows, shared.function, **knobs)

    assert found.batches == expected.batches
    assert [one.dropped_total for one in found.statistics] == [one.dropped_total for one in expected.statistics]
    assert found.statistics[0].bad_rows_total == expected.statistics[0].bad_rows_total > 0
    assert sum(one.tokenized_rows_total for one in found.statistics) == num_rows(rows)
    assert not shared.seen - Counter(dict.fromkeys(range(num_rows(rows)), 1 + 2))


# Ranks that come, go and stand still.


def test_a_rank_that_resumes_alone_shares_again_when_it_has_caught_up(rows: Path) -> None:
    calls = Calls()
    expected = run(rows, Calls().function, share=False, epochs=3)
    with ExitStack() as stack:
        first, second = open_ranks(stack, rows, calls.function, 2, share=True, epochs=3, buffer_size=32)
        loops = [stream(first), stream(second)]
        found = [[next(loop).content for loop in loops] for _ in range(30)]
        state = second.state_dict()
        second.close()
        ranks = Ranks(rank=1, world_size=2, share_node=True)
        again = stack.enter_context(make(rows, calls.function, epochs=3, buffer_size=32, ranks=ranks))
        again.load_state_dict(state)
        loops[1] = stream(again)
        while any(step := [next(loop, None) for loop in loops]):
            found.append([None if batch is None else batch.content for batch in step])
        shared = again.statistics().shared_rows_total

    assert found == expected.batches
    assert shared > 0
    read_ahead = 3 * 2 * 32
    assert calls.seen.total() <= 3 * num_rows(rows) + read_ahead + 3 * 8


def test_all_ranks_resume_from_a_state_and_share(rows: Path) -> None:
    expected = run(rows, Calls().function, share=False)
    with ExitStack() as stack:
        loaders = open_ranks(stack, rows, Calls().function, 2, share=True)
        loops = [iter(loader) for loader in loaders]
        for _ in range(10):
            state = [next(loop) for loop in loops] and loaders[0].state_dict()

    with ExitStack() as stack:
        loaders = open_ranks(stack, rows, Calls().function, 2, share=True)
        for loader in loaders:
            loader.load_state_dict(state)
        loops = [iter(loader) for loader in loaders]
        rest = []
        while any(step := [next(loop, None) for loop in loops]):
            rest.append([None if batch is None else batch.content for batch in step])
        shared = [one.statistics().shared_rows_total for one in loaders]

    assert rest == expected.batches[10:]
    assert sum(shared) >= len(rest), "each row was needed twice"


def test_a_rank_that_does_not_answer_is_not_waited_for(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, and never publishes: as if it were stopped by SIGSTOP."""
    expected = run(rows, Calls().function, share=False)
    answered = Sharing.answered
    silent: list[Sharing] = []

    def maybe_answered(self: Sharing, claim: str, reply: Any) -> None:
        if self not in silent:
            answered(self, claim, reply)

    monkeypatch.setattr(Sharing, "answered", maybe_answered)
    with ExitStack() as stack:
        knobs = {"epochs": 1, "limits": Limits(row_timeout_s=0.2)}
        second = stack.enter_context(make(rows, Calls().function, ranks=of_rank(1), **knobs))
        silent.append(second._engine._sharing)  # noqa: SLF001
        next(iter(second))
        first = stack.enter_context(make(rows, Calls().function, ranks=of_rank(0), **knobs))
        found = [batch.content for batch in stream(first)]

    assert found == [step[0] for step in expected.batches if step[0] is not None]


@pytest.mark.parametrize("closes", [True, False])
def test_the_claims_of_a_rank_that_closes_are_taken_over_and_a_timeout_says_that_it_is_waited_for(
    rows: Path, closes: bool
) -> None:
    expected = run(rows, Calls().function, share=False)
    stuck, timeout_s = Calls(held=first_of_d(rows)), 240 if closes else 0.5
    with ExitStack() as stack:
        stack.callback(stuck.gate.set)
        second = stack.enter_context(make(rows, stuck.function, epochs=1, ranks=of_rank(1)))
        second.start()
        assert stuck.is_held.wait(240)
        first = stack.enter_context(make(rows, Calls().function, epochs=1, ranks=of_rank(0), timeout_s=timeout_s))
        first.start()
        until(lambda: first.statistics().awaited_rows > 0)

        if not closes:
            until(lambda: "another rank of this node has not tokenized" in timeout_of(first))
            return

        second.close()
        found = [batch.content for batch in stream(first)]

    assert found == [step[0] for step in expected.batches if step[0] is not None]


def timeout_of(loader: DataLoader) -> str:
    """What a call says that gets nothing in time."""
    with pytest.raises(PrefetchTimeoutError) as caught:
        next(iter(loader))
    return str(caught.value)


def first_of_d(rows: Path) -> int:
    """The row that comes first, of which a loader's first chunk begins."""
    with make(rows, numbered, epochs=1) as loader:
        return next(iter(loader)).tokens[0] // 1000


def of_rank(rank: int) -> Ranks:
    return Ranks(rank=rank, world_size=2, share_node=True)


# Where it cannot be shared.


@pytest.mark.parametrize("max_ready_bytes", [2000, None], ids=["too little memory", "none"])
def test_where_memory_is_full_rows_are_tokenized_again_and_without_any_sharing_ends_with_one_warning(
    rows: Path, monkeypatch: pytest.MonkeyPatch, max_ready_bytes: int | None
) -> None:
    expected = run(rows, Calls().function, share=False)
    publish = NodeFolder.publish
    published: list[str] = []

    def until_full(self: NodeFolder, name: str, pieces: Any) -> int:
        if max_ready_bytes is None and len(published) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.own)

        published.append(name)
        return publish(self, name, pieces)

    monkeypatch.setattr(NodeFolder, "publish", until_full)
    limits = Limits() if max_ready_bytes is None else Limits(max_ready_bytes=max_ready_bytes)
    with capture_logs() as events:
        found = run(rows, Calls().function, limits=limits)

    assert found.batches == expected.batches
    reasons = [event["reason"] for event in events if event["event"] == "ranks.not_shared"]
    assert len(reasons) == (2 if max_ready_bytes is None else 0), "one of each rank"
    assert all("No space left on device" in reason for reason in reasons)
    for one in found.statistics:
        assert (one.unshared_rows_total > 0) == (max_ready_bytes is None)
        assert one.tokenized_rows_total + one.shared_rows_total == num_rows(rows)


def test_a_folder_of_another_user_is_not_used(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: set[str] = set()
    join = NodeFolder._join  # noqa: SLF001
    monkeypatch.setattr(NodeFolder, "_join", lambda self: joined.add(self.path) or join(self))
    expected = run(rows, Calls().function)
    (path,) = joined
    os.mkdir(path)
    with monkeypatch.context() as patch, capture_logs() as events:
        give_away(path, patch)
        found = run(rows, Calls().function)
    left = os.listdir(path)
    os.rmdir(path)

    assert found.batches == expected.batches
    reasons = [event["reason"] for event in events if event["event"] == "ranks.not_shared"]
    assert len(reasons) == 2
    assert all("belongs to another user" in reason for reason in reasons)
    assert [one.unshared_rows_total for one in found.statistics] == [num_rows(rows)] * 2
    assert left == []


def test_a_rank_that_is_alone_on_its_node_does_not_fill_the_memory(rows: Path, node: str) -> None:
    calls = Calls()
    with make(rows, calls.function, epochs=1, ranks=of_rank(0), limits=Limits(max_ready_bytes=4000)) as loader:
        found = [batch.content for batch in stream(loader)]
        left = sum(path.stat().st_size for path in Path(node).rglob("m-*/*") if path.is_file())
        statistics = loader.statistics()

    assert len(found) == -(-num_rows(rows) // 2)
    assert left <= 4000
    assert statistics.unshared_rows_total == 0


# When it is done.


@pytest.mark.parametrize(
    ("share", "local", "is_shared"),
    [(None, "2", True), (None, None, False), (None, "1", False), (None, "many", False), (False, "2", False)]
    + [(True, None, True), (2, None, True), (1, "2", False), (2, "1", True)],
)
def test_ranks_share_where_it_is_known_that_they_are_on_one_node(
    rows: Path, monkeypatch: pytest.MonkeyPatch, share: Any, local: str | None, is_shared: bool
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    calls = Calls()
    with capture_logs() as events:
        found = run(rows, calls.function, share=share)

    assert (sum(one.shared_rows_total for one in found.statistics) > 0) == is_shared
    warnings = [event for event in events if event["event"] == "loader.every_rank_tokenizes"]
    assert len(warnings) == (0 if is_shared else 2)
    assert all("share_node=True" in event["remedy"] for event in warnings)


def test_loaders_that_all_want_every_row_share_on_request(rows: Path) -> None:
    """As under accelerate, which itself shares out what a loader gives, so that each has ``Ranks()``."""
    calls = Calls()
    with ExitStack() as stack:
        ranks = Ranks(share_node=2)
        loaders = [stack.enter_context(make(rows, calls.function, epochs=1, ranks=ranks)) for _ in range(2)]
        steps = list(zip(*map(stream, loaders), strict=True))
        statistics = [loader.statistics() for loader in loaders]

    assert all(one.content == other.content for one, other in steps)
    check_once(calls, rows, Run([], statistics, []))


@pytest.mark.parametrize(
    "ranks", [Ranks(rank=1, world_size=2), Ranks(rank=1, world_size=2, share_node=True), Ranks(share_node=2)]
)
def test_a_mixture_is_not_shared_and_the_warning_names_what_helps(
    rows: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """Under torchrun, and on request."""
    mix = Mix({name: Part(rows, when_done="leave") for name in ("one", "two")})
    alone = msgspec.structs.replace(ranks, share_node=False)
    with make(mix, epochs=1, ranks=alone) as loader:
        expected = [entry.content for entry in stream(loader)]

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with capture_logs() as events, make(mix, epochs=1, ranks=ranks) as loader:
        assert [entry.content for entry in stream(loader)] == expected

    (warning,) = [event for event in events if event["event"] == "loader.every_rank_tokenizes"]
    assert warning["remedy"].startswith("one Cache(tokens=...) for all ranks")


def test_a_lone_loader_does_not_share_because_there_are_other_processes(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with capture_logs() as events, make(rows, epochs=1) as loader:
        assert next(iter(loader)).tokens
        assert loader._engine._sharing is None  # noqa: SLF001

    assert not [event for event in events if event["event"] == "loader.every_rank_tokenizes"]


def test_examples_of_which_only_a_name_is_known_are_shared_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def examples(epoch: int) -> Iterator[dict[str, Any]]:
        return ({"id": number, "n": 3} for number in range(300))

    expected = run(IterableSource(examples), Calls().function, share=None)
    assert [one.shared_rows_total for one in expected.statistics] == [0, 0]

    found = run(IterableSource(examples), Calls().function, share=True)
    assert found.batches == expected.batches
    assert sum(one.tokenized_rows_total for one in found.statistics) == 300


def function_in(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Any:
    """A tokenize function of a file that may be edited."""
    text = "def tokenize(row):\n    return [row['id']]\n\n\ntokenize.version = 1\n"
    (folder / "edited_fn.py").write_text(text + more)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("edited_fn").tokenize


def test_a_function_without_a_version_is_not_shared_and_the_warning_names_what_helps(rows: Path) -> None:
    with capture_logs() as events:
        found = run(rows, numbered)

    assert sum(one.shared_rows_total for one in found.statistics) == 0
    remedies = [event["remedy"] for event in events if event["event"] == "loader.every_rank_tokenizes"]
    assert len(remedies) == 2
    assert all("tokenize.version = 1" in remedy for remedy in remedies)


def test_runs_that_differ_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data, another seed, another version of the function, another run of the launcher."""
    path = write_rows(tmp_path / "a.jsonl", 64)
    other = write_rows(tmp_path / "b.jsonl", 65)
    fn = {"tokenize_fn": Calls(lambda row: [row["id"]]).function}
    newer = Calls(lambda row: [row["id"]]).function
    newer.version = 2  # type: ignore[attr-defined]
    folders_seen = set()

    def folder_of(path: Path, **knobs: Any) -> str:
        with make(path, **{**fn, **knobs}, ranks=of_rank(0)) as loader:
            next(iter(loader))
            return str(loader._engine._sharing._folder.path)  # noqa: SLF001

    folders_seen.add(folder_of(path))
    assert folder_of(path, batch_size=2, num_workers=0) in folders_seen
    folders_seen |= {folder_of(other), folder_of(path, seed=1), folder_of(path, tokenize_fn=newer)}
    fn = {"tokenize_fn": function_in(tmp_path, monkeypatch)}
    folders_seen.add(folder_of(path))
    function_in(tmp_path, monkeypatch, more="# edited, and not given another version\n")
    folders_seen.add(folder_of(path))
    monkeypatch.setenv("MASTER_PORT", "29501")
    folders_seen.add(folder_of(path))

    assert len(folders_seen) == 7
