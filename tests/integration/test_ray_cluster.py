"""Workers on the nodes of a Ray cluster: the samples, their order, drops and errors are those of any other workers."""

import gzip
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader, Mix, Part, PromptTokenizeFn, RayExecutor, RowShuffle, Shuffle, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, EndOfData, PrefetchTimeoutError, SourceError
from tests.support import loaders
from tests.support.column_fns import columned
from tests.support.faults import until
from tests.support.loading import every_third_dropped, fails_on_13, hangs_on_13, id_and_text, ids, row_id, write_rows
from tests.support.ray_cluster import RayNodes, two_nodes
from tests.support.worker_fns import as_told, tells_who

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

NEVER_S = 120.0
REMOTE = RayExecutor(num_workers=2, num_cpus=0.5)
MIXED = RayExecutor(num_workers=1, num_cpus=0.5, local_workers=1)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with two_nodes() as found:
        yield found


@pytest.fixture(autouse=True)
def no_actor_is_left(nodes) -> Iterator[None]:
    """Actors are killed when a loader closes; a moment later their processes are gone."""
    yield
    assert nodes.actors_left() == []


def make(path: Any, executor: RayExecutor | None = None, tokenize_fn: Any = row_id, **knobs: Any) -> Any:
    workers: dict[str, Any] = {"num_workers": 0 if executor is None else None, "executor": executor}
    return loaders.make(path, tokenize_fn, **{"timeout_s": NEVER_S} | workers | knobs)


def delivered(loader: Any) -> tuple[list[Any], dict[str, int], Any]:
    """All samples, in order; what was left out, by reason; and what a snapshot counts."""
    found = []
    with loader, pytest.raises(EndOfData):
        while True:
            (sample,) = loader.get_next_batch(1)
            columns = {name: values.tolist() for name, values in sample.columns.items()}
            found.append((sample.tokens.tolist(), sample.prompt, sample.label, sample.metadata, columns))
    return found, dict(loader.statistics().dropped_total), loader.state_dict()["counters"]


def source_of(kind: str, folder: Path) -> Any:
    """300 rows or so."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        from tests.support.parquet_files import write

        return write(folder / "rows.parquet", 300)
    if kind == "mix":
        return Mix({name: Part(write_rows(folder / f"{name}.jsonl", 200), when_done="leave") for name in ("a", "b")})

    texts = {number: {"input": f"row {number} " * (number % 9), "metadata": {"n": number}} for number in range(300)}
    path = write_rows(folder / "rows.jsonl", 300, {**texts, 40: {"input": "x" * 30_000}})
    if kind == "stream":
        path = path.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress((folder / "rows.jsonl").read_bytes()))
    return path


@pytest.mark.parametrize(
    ("source", "knobs"),
    [
        pytest.param("file", {"tokenize_fn": every_third_dropped, "epochs": 2}, id="rows that are dropped"),
        pytest.param("file", {"tokenize_fn": fails_on_13, "epochs": 2, "bad_rows": "skip"}, id="bad rows"),
        pytest.param("file", {"tokenize_fn": id_and_text, "digest": "tokens"}, id="the digest of all tokens"),
        pytest.param("file", {"tokenize_fn": columned}, id="arrays beside the tokens"),
        pytest.param("file", {"shuffle": "full"}, id="permuted single rows"),
        pytest.param("file", {"shuffle": RowShuffle(method="none")}, id="single rows as they lie"),
        pytest.param("stream", {}, id="a stream, whose rows travel as bytes"),
        pytest.param("parquet", {"shuffle": Shuffle(block_bytes=4096, window_blocks=4)}, id="blocks of Parquet"),
        pytest.param("file", {"tokenize_fn": PromptTokenizeFn, "executor": MIXED}, id="prompts"),
        pytest.param("mix", {}, id="the parts of a mixture, which share the actors"),
    ],
)
def test_what_is_delivered_is_what_other_workers_give(tmp_path, small_tokenizer, source, knobs):
    knobs, data = {"epochs": 1, "executor": REMOTE, **knobs}, source_of(source, tmp_path)
    if knobs.get("tokenize_fn") is PromptTokenizeFn:
        knobs["tokenize_fn"] = PromptTokenizeFn(str(small_tokenizer), label_key="id", max_length=30)
    found = delivered(make(data, **knobs))
    assert found[0]
    assert found == delivered(make(data, **{**knobs, "executor": None}))


def test_planned_packs_and_the_words_of_a_bad_row_are_the_same(tmp_path):
    path, seen = write_rows(tmp_path / "rows.jsonl", 200), []
    packing = SoftPacking(max_length=16, across_epochs=False)
    planned = {"shuffle": "full", "packing": packing, "plan_packs": True, "batch_size": 2, "epochs": 1}
    for executor in (REMOTE, None):
        with make(path, executor, **planned) as loader:
            packs = [[[token for part in pack for token in part.tokens] for pack in batch] for batch in loader]
        found = []
        with make(path, executor, fails_on_13) as loader, pytest.raises(BadRowError) as caught:
            while True:
                found += ids(loader.get_next_batch(1))
        seen.append((packs, found, str(caught.value), caught.value.byte_offset, caught.value.excerpt))

    assert seen[0] == seen[1]


@pytest.mark.parametrize(("first", "then"), [(REMOTE, None), (None, REMOTE), (MIXED, REMOTE)])
def test_a_run_resumes_on_other_workers_with_the_next_sample(tmp_path, first, then):
    path = write_rows(tmp_path / "rows.jsonl", 300)
    with make(path) as loader:
        whole = ids(loader.get_next_batch(500))
    with make(path, first) as loader:
        before = ids(loader.get_next_batch(137))
        state = loader.state_dict()
    with make(path, then) as loader:
        loader.load_state_dict(state)
        after = ids(loader.get_next_batch(363))
    assert before + after == whole


@pytest.mark.parametrize(("function", "code"), [(as_told, "AD423"), (hangs_on_13, "AD422")])
def test_a_row_that_brings_actors_down_is_found_and_no_other_is_blamed(tmp_path, function, code):
    path = write_rows(tmp_path / "rows.jsonl", 40, {13: {"do": "die"}})
    knobs = {"epochs": 1, "bad_rows": "skip", "limits": {"row_timeout_s": 1.5}, "shuffle": False}
    found, dropped, _ = delivered(make(path, REMOTE, function, **knobs))
    assert [tokens[0] for tokens, *_ in found] == [number for number in range(40) if number != 13]
    assert dropped == {f"bad row {code}": 1}


def test_a_module_that_is_sent_along_is_found(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "sent_along.py").write_text("def row_id(row):\n    return [row['id']]\n")
    monkeypatch.syspath_prepend(tmp_path / "package")
    function = importlib.import_module("sent_along").row_id
    executor = RayExecutor(num_workers=1, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path / "package")}})
    with make(write_rows(tmp_path / "rows.jsonl", 10), executor, function) as loader:
        assert len(loader.get_next_batch(10)) == 10
    del sys.modules["sent_along"]


def test_a_folder_is_sent_only_by_the_process_that_connects(tmp_path):
    executor = RayExecutor(num_workers=1, runtime_env={"working_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^AD497 .*ray\.init\(runtime_env=") as caught:
        make(write_rows(tmp_path / "rows.jsonl", 10), executor)
    assert str(tmp_path) in str(caught.value)


def test_a_node_that_does_not_see_the_data_is_named_with_the_file(tmp_path, monkeypatch):
    """``/proc/self/cwd`` is another folder in each process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen.jsonl").write_bytes(b'{"id": 0}\n')
    path = "/proc/self/cwd/seen.jsonl"
    with make(path, RayExecutor(num_workers=1)) as loader, pytest.raises(SourceError) as caught:
        loader.get_next_batch(1)
    assert str(caught.value).startswith("AD492 node ") and path in str(caught.value)
    assert "cannot be read there" in str(caught.value)


@pytest.fixture
def group(nodes) -> Iterator[Any]:
    """A trainer's placement group: all CPUs of both nodes, in two bundles."""
    from ray.util import placement_group, remove_placement_group

    found = placement_group([{"CPU": 2}] * 2, strategy="SPREAD")
    assert found.wait(NEVER_S)
    yield found
    remove_placement_group(found)


NO_GROUP = RayExecutor(num_workers=8)
LARGE = RayExecutor(num_workers=1, num_cpus=64, resources={"spare": 1})


@pytest.mark.parametrize(
    ("executor", "told"),
    [
        (LARGE, "1 actors wanted, 0 started, 0 of 4 CPU, 0 of 0 spare free; each needs CPU 64, spare 1"),
        (NO_GROUP, "8 actors wanted, 0 started, 0 of 4 CPU free; each needs CPU 1"),
    ],
)
def test_actors_that_find_no_room_are_reported_in_seconds_with_what_they_lack(tmp_path, group, executor, told):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    with capture_logs() as events, make(path, executor) as loader:
        loader.start()
        until(lambda: "ray.worker_waits" in [event["event"] for event in events])
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(1, timeout_s=0.01)

        states = [worker.state for worker in loader.statistics().workers]
    assert states == ["starting"] * executor.num_workers
    reason = f"the Ray cluster has no room: {told} on one node"
    assert f"stage: start: {reason}\n" in str(caught.value)
    assert "try: room in the cluster (see `ray status`)" in str(caught.value)
    waits = [event for event in events if event["event"] == "ray.worker_waits"]
    assert (waits[0]["reason"], waits[0]["num_waiting"]) == (reason, executor.num_workers)


@pytest.mark.parametrize(
    "told",
    [
        {"num_workers": 2, "placement_group": True},
        {"num_workers": 2, "placement_group": True, "placement_group_bundle": 1},
        {"num_workers": 3, "num_cpus": 0},
    ],
    ids=["the trainer's group", "one bundle of it", "no CPU of their own"],
)
def test_a_trainer_that_has_all_cpus_shares_its_placement_group_or_its_actors_reserve_none(tmp_path, group, told):
    executor = RayExecutor(**told | {"placement_group": group if "placement_group" in told else None})
    path = write_rows(tmp_path / "rows.jsonl", 100)
    assert delivered(make(path, executor, epochs=1)) == delivered(make(path, epochs=1))


def test_a_full_placement_group_is_named_and_what_it_can_never_hold_is_refused(tmp_path, group):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    executor = RayExecutor(num_workers=3, placement_group=group, placement_group_bundle=0)
    with make(path, executor) as loader:
        loader.start()
        free = "3 actors wanted, 2 started, 0 of 2 CPU free; each needs CPU 1 on one node"
        told = f"the placement group has no room: {free}"
        until(lambda: [worker.lacks for worker in loader.statistics().workers].count(told) == 1)
        assert len(loader.get_next_batch(10)) == 10

    for more, words in (({"placement_group_bundle": 9}, "index 9 is invalid"), ({"num_cpus": 8}, "cannot fit into")):
        refused = RayExecutor(num_workers=1, placement_group=group, **more)
        with make(path, refused) as loader, pytest.raises(ConfigError, match=f"^AD497 .*{words}"):
            loader.get_next_batch(1)
    with pytest.raises(ConfigError, match=r"^AD497 .*placement_group_bundle=1.* of no placement group"):
        make(path, RayExecutor(placement_group_bundle=1))


def test_an_async_actor_with_a_running_loop_uses_every_loader(tmp_path, nodes):
    """As slime's RolloutManager holds it."""
    import ray

    path = str(write_rows(tmp_path / "rows.jsonl", 50))

    class Manager:
        async def both(self) -> tuple[list[int], list[int]]:
            with make(path, REMOTE) as loader:
                some = ids(loader.get_next_batch(20))
            async with make(path, REMOTE, face=AsyncDataLoader) as other:
                return some, ids(await other.get_next_batch(20))

    actor = ray.remote(Manager).options(num_cpus=0).remote()
    some, others = ray.get(actor.both.remote(), timeout=NEVER_S)
    ray.kill(actor)
    with make(path) as loader:
        assert some == others == ids(loader.get_next_batch(20))


def test_local_workers_come_first_and_actors_while_the_trainer_waits(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 400, {number: {"sleep_s": 0.004} for number in range(400)})
    with capture_logs() as events, make(path, MIXED, tells_who, epochs=None, buffer_size=64) as loader:
        assert loader.statistics().num_workers == 1
        while loader.statistics().num_workers == 1:
            loader.get_next_batch(16)
        while not any(worker.state != "starting" and worker.pid is None for worker in loader.statistics().workers):
            loader.get_next_batch(16)
    changed = [event for event in events if event["event"] == "autotune.changed"]
    assert (changed[0]["before"], changed[0]["after"]) == (1, 2)
