"""A loader over a mixture: one order D, each part's own order in it, exact resume, and weights that change."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata import (
    BadRowError,
    BadRows,
    ConfigError,
    DataLoader,
    HardPacking,
    Mix,
    NoSamplesError,
    Part,
    Ranks,
    Shuffle,
    SnapshotMismatchError,
    SoftPacking,
    SourceError,
    TooManyBadRowsError,
)
from asyncdata.core.messages import Scan
from asyncdata.workers.inline import InlineExecutor
from tests.support.faults import until
from tests.support.tokenize_fns import (
    all_dropped,
    every_third_dropped,
    fails_on_13,
    id_and_text,
    row_id,
    waits_for_a_file,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncdata import Sample

SIZES = {"code": 61, "math": 97, "chat": 23}
WEIGHTS = {"code": 3, "math": 5, "chat": 2}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)

Entry = tuple[str | None, int]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, number in SIZES.items():
        rows = [{"id": n, "pad": name * (n % 4), "prompt": name[: n % 5]} for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mix_of(data: Path, weights: dict[str, float] = WEIGHTS, part: dict[str, Any] | None = None, **settings: Any) -> Mix:
    parts = {
        name: Part(data / f"{name.partition('2')[0]}.jsonl", weight=weight, **(part or {}))
        for name, weight in weights.items()
    }
    return Mix(parts, **{"quota": 10, **settings})


def make(mix: Mix, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": id_and_text, "num_workers": 0, "shuffle": SHUFFLE, "timeout_s": 240}
    return DataLoader(mix, **settings | knobs)


def entries(samples: Sequence[Sample]) -> list[Entry]:
    return [(sample.source_name, int(sample.tokens[0])) for sample in samples]


def delivered(mix: Mix, number: int, sizes: Sequence[int] = (32,), **knobs: Any) -> list[Entry]:
    found: list[Entry] = []
    with make(mix, **knobs) as loader:
        while len(found) < number:
            found += entries(loader.get_next_batch(min(sizes[len(found) % len(sizes)], number - len(found))))
    return found


def own(found: list[Entry], name: str) -> list[int]:
    return [row for part, row in found if part == name]


# One order


def test_other_parts_and_their_weights_move_no_row_of_a_part(data: Path) -> None:
    found = delivered(mix_of(data), 400)
    others = delivered(mix_of(data, {"math": 1, "code2": 7, "chat2": 1, "chat": 4}, quota=7), 400)

    for name in ("math", "chat"):
        first, second = own(found, name), own(others, name)
        shorter = min(len(first), len(second))
        assert shorter > 20
        assert first[:shorter] == second[:shorter]


def test_how_parts_are_listed_makes_no_difference(data: Path) -> None:
    backwards = dict(reversed(WEIGHTS.items()))

    assert delivered(mix_of(data), 200) == delivered(mix_of(data, backwards), 200)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize(
    "knobs",
    [{"num_workers": 1}, {"num_workers": 2}, {"buffer_size": 1}, {"dp_size": 7}, {"buffer_size": 5, "num_workers": 2}],
)
def test_it_is_one_order_at_any_workers_buffers_and_batches(data: Path, by: str, knobs: dict[str, Any]) -> None:
    mix = mix_of(data, by=by)

    assert delivered(mix, 400, (7, 1, 33), **knobs) == delivered(mix, 400)


def test_the_order_is_pinned(data: Path) -> None:
    """A run that was saved continues with it, on any machine and after any update."""
    with make(mix_of(data), digest="tokens") as loader:
        loader.get_next_batch(300)
        digest = loader.state_dict()["counters"]["digest"]

    assert (digest["positions"], digest["order"], digest["tokens"]) == PINNED


PINNED = (14764328533165183789, 6741893682265901430, 17983502666747437308)


def test_dropped_and_bad_rows_do_not_bend_the_mixture(data: Path) -> None:
    parts = {
        "code": Part(data / "code.jsonl", weight=1, tokenize_fn=every_third_dropped),
        "math": Part(data / "math.jsonl", weight=1, tokenize_fn=fails_on_13, bad_rows="skip"),
        "chat": Part(data / "chat.jsonl", weight=2, tokenize_fn=row_id),
    }
    with make(Mix(parts, quota=4), tokenize_fn=None) as loader:
        found = entries(loader.get_next_batch(400))
        statistics = loader.statistics()

    for first in range(0, 400, 4):
        assert Counter(part for part, _ in found[first : first + 4]) == {"code": 1, "math": 1, "chat": 2}
    assert not [row for row in own(found, "code") if row % 3 == 0]
    assert 13 not in own(found, "math")
    assert statistics.by_source["code"].dropped.keys() == {"tokenize_fn"}
    assert statistics.by_source["math"].dropped == {"bad row AD421": 1}
    assert statistics.by_source["chat"].dropped == {}
    assert {name: part.samples for name, part in statistics.by_source.items()} == {
        "code": 100,
        "math": 100,
        "chat": 200,
    }


def test_the_temperature_makes_weights_of_the_sizes(data: Path) -> None:
    parts = {name: data / f"{name}.jsonl" for name in SIZES}
    sizes = {name: path.stat().st_size for name, path in parts.items()}
    found = Counter(part for part, _ in delivered(Mix(parts, temperature=1), 1000))
    flat = Counter(part for part, _ in delivered(Mix(parts, temperature=1e9), 1000))

    for name, size in sizes.items():
        assert abs(found[name] - 1000 * size / sum(sizes.values())) < 1
        assert abs(flat[name] - 1000 / 3) < 1


def test_nested_mixtures_have_dotted_names_and_shares_of_their_share(data: Path) -> None:
    inner = mix_of(data, {"code": 1, "chat": 3}, quota=4)
    outer = Mix({"math": Part(data / "math.jsonl", weight=2), "rest": Part(inner, weight=2)}, quota=4)

    found = Counter(part for part, _ in delivered(outer, 160))

    assert found == {"math": 80, "rest.code": 20, "rest.chat": 60}


# Ends


def test_a_part_that_stops_ends_the_epoch(data: Path) -> None:
    mix = mix_of(data, {"chat": 1, "math": 1})
    mix.parts["chat"].when_done = "stop"
    with make(mix, batch_size=8, epochs=2, collate_fn=entries) as loader:
        first = [entry for batch in loader for entry in batch]
        second = [entry for batch in loader for entry in batch]

    assert len(own(first, "chat")) == len(own(second, "chat")) == 23
    assert sorted(own(first, "chat")) == sorted(own(second, "chat")) == list(range(23))
    assert 22 <= len(own(first, "math")) <= 25
    assert not set(own(first, "math")) & set(own(second, "math")), "it continues within its own epoch"


def test_max_epochs_bound_how_often_a_part_repeats_in_every_epoch_of_the_mixture(data: Path) -> None:
    mix = mix_of(data, {"chat": 3, "math": 1}, part={"when_done": "leave"})
    mix.parts["chat"].when_done, mix.parts["chat"].max_epochs = "repeat", 2
    with make(mix, epochs=2, batch_size=8, collate_fn=entries) as loader:
        epochs = [Counter(part for batch in loader for part, _ in batch) for _ in range(2)]

    assert epochs == [{"chat": 46, "math": 97}] * 2


def test_an_end_that_can_never_come_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"AD470 epochs=1, but no epoch of this mixture ends"):
        make(mix_of(data), epochs=1)


def test_a_part_all_of_whose_rows_are_dropped_is_named(data: Path) -> None:
    mix = mix_of(data)
    mix.parts["chat"].tokenize_fn = all_dropped
    with (
        make(mix) as loader,
        pytest.raises(NoSamplesError, match=r"AD407 part 'chat' .* 23 rows were read, and 0 kept"),
    ):
        loader.get_next_batch(100)


def test_an_empty_part_is_named(data: Path) -> None:
    (data / "none.jsonl").write_text("")
    parts = {"math": data / "math.jsonl", "none": data / "none.jsonl"}

    with pytest.raises((NoSamplesError, SourceError), match="part 'none'"), make(Mix(parts)) as loader:
        loader.get_next_batch(100)


def test_a_bad_row_stops_where_its_part_says_so(data: Path) -> None:
    mix = mix_of(data, part={"tokenize_fn": fails_on_13, "bad_rows": "skip"})
    mix.parts["math"].bad_rows = "raise"
    with make(mix) as loader, pytest.raises(BadRowError, match=r"AD421 .*math.jsonl:14 "):
        loader.get_next_batch(400)


def test_each_part_counts_its_bad_rows_for_itself(data: Path) -> None:
    mix = mix_of(data, part={"tokenize_fn": fails_on_13, "bad_rows": BadRows(policy="skip", max=1)})
    with make(mix) as loader:
        loader.get_next_batch(100)
        with pytest.raises(TooManyBadRowsError, match=r"BadRows\(max=1\).*chat.jsonl:14 "):
            loader.get_next_batch(300)


# State


def restored(mix: Mix, state: dict[str, Any], number: int, **knobs: Any) -> list[Entry]:
    with make(mix, **knobs) as loader:
        loader.load_state_dict(state)
        return entries(loader.get_next_batch(number))


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_restart_at_every_single_position(data: Path, by: str) -> None:
    nested = Mix(
        {"math": Part(data / "math.jsonl"), "rest": Part(mix_of(data, {"code": 1, "chat": 2}))}, by=by, quota=3
    )
    whole = delivered(nested, 130)
    with make(nested) as loader:
        states = [loader.get_next_batch(1) and loader.state_dict() for _ in range(120)]

    for cut, state in enumerate(states, 1):
        assert restored(nested, state, 10) == whole[cut : cut + 10]


def test_the_state_has_no_more_than_a_few_numbers_for_each_part(data: Path) -> None:
    with make(mix_of(data)) as loader:
        loader.get_next_batch(10)
        early = len(json.dumps(loader.state_dict()["mixture"]))
        loader.get_next_batch(2000)
        late = len(json.dumps(loader.state_dict()["mixture"]))

    assert late < early + 200


@pytest.mark.thorough
def test_unacknowledged_groups_come_again_and_the_rest_follows(data: Path) -> None:
    mix = mix_of(data)
    whole = delivered(mix, 90)
    with make(mix, commit="on_ack") as loader:
        first = loader.get_next_batch(20)
        second = loader.get_next_batch(20)
        third = loader.get_next_batch(20)
        loader.ack(first)
        loader.ack(second[5:])
        loader.ack(third)
        state = loader.state_dict()

    assert restored(mix, state, 35, commit="on_ack") == [*whole[20:25], *whole[60:90]]


def test_weights_that_changed_are_refused_and_named(data: Path) -> None:
    with make(mix_of(data)) as loader:
        loader.get_next_batch(17)
        state = loader.state_dict()

    with make(mix_of(data, {**WEIGHTS, "math": 9})) as loader, pytest.raises(SnapshotMismatchError) as refused:
        loader.load_state_dict(state)

    assert "math.weight: saved 5, present 9" in str(refused.value)
    assert refused.value.differences["mixture.math.weight"] == (5, 9)


def test_a_part_whose_file_changed_is_refused_and_named(data: Path) -> None:
    with make(mix_of(data)) as loader:
        loader.get_next_batch(17)
        state = loader.state_dict()
    (data / "code.jsonl").write_text('{"id": 1, "pad": ""}\n' * 50)

    with (
        make(mix_of(data)) as loader,
        pytest.raises(SnapshotMismatchError, match=r"part 'code' of the mixture: .*data"),
    ):
        loader.load_state_dict(state)


def test_new_parts_begin_at_their_start_and_parked_ones_continue(data: Path) -> None:
    two = mix_of(data, {"math": 1, "code": 1}, on_mix_change="apply")
    other = mix_of(data, {"math": 1, "chat": 1}, on_mix_change="apply")
    with make(two) as loader:
        first = entries(loader.get_next_batch(30))
        state = loader.state_dict()
    with make(other) as loader:
        loader.load_state_dict(state)
        second = entries(loader.get_next_batch(30))
        state = loader.state_dict()
    third = restored(two, json.loads(json.dumps(state)), 30)

    found = first + second + third
    for name, number in (("math", 45), ("code", 30), ("chat", 15)):
        assert own(found, name) == own(delivered(mix_of(data, {name: 1}), number), name)


def test_a_single_source_and_a_mixture_refuse_each_others_snapshots(data: Path) -> None:
    with make(mix_of(data)) as loader:
        of_mixture = loader.state_dict()
    single = {"tokenize_fn": id_and_text, "num_workers": 0, "shuffle": SHUFFLE}
    with DataLoader(data / "math.jsonl", **single) as loader:
        of_one = loader.state_dict()
        with pytest.raises(SnapshotMismatchError):
            loader.load_state_dict(of_mixture)
    with make(mix_of(data)) as loader, pytest.raises(SnapshotMismatchError, match="taken of a single source"):
        loader.load_state_dict(of_one)


# With other features


def test_every_rank_has_its_part_of_the_same_order(data: Path) -> None:
    mix = mix_of(data)
    whole = delivered(mix, 96)
    shares = []
    for rank in range(2):
        with make(mix, batch_size=4, ranks=Ranks(rank=rank, world_size=2), collate_fn=entries) as loader:
            batches = iter(loader)
            shares.append([next(batches) for _ in range(12)])

    steps = [sorted([*one, *other], key=str) for one, other in zip(*shares, strict=True)]
    assert steps == [sorted(whole[first : first + 8], key=str) for first in range(0, 96, 8)]


@pytest.mark.thorough
def test_packs_are_the_same_after_a_restart_at_every_step(data: Path) -> None:
    def packs(batch: list[Any]) -> list[list[int]]:
        return [[int(document.tokens[0]) for document in pack] for pack in batch]

    knobs: dict[str, Any] = {"packing": SoftPacking(max_length=40), "batch_size": 2, "collate_fn": packs}
    mix = mix_of(data)
    states, whole = [], []
    with make(mix, **knobs) as loader:
        batches = iter(loader)
        for _ in range(20):
            states.append(loader.state_dict())
            whole.append(next(batches))
    for step in range(0, 18, 3):
        with make(mix, **knobs) as loader:
            loader.load_state_dict(json.loads(json.dumps(states[step])))
            batches = iter(loader)
            assert [next(batches) for _ in range(2)] == whole[step : step + 2]


def test_planned_packs_are_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="AD471 the packs of a mixture cannot be planned"):
        make(mix_of(data), packing=SoftPacking(max_length=40), batch_size=2, plan_packs=True, shuffle="full")


@pytest.mark.thorough
def test_the_token_cache_changes_nothing(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    id_and_text.version = 1
    try:
        cache = {"tokens": str(tmp_path / "tokens")}
        found = [delivered(mix_of(data), 600, num_workers=1, cache=cache) for _ in range(2)]
        with make(mix_of(data), num_workers=1, cache=cache) as loader:
            again = entries(loader.get_next_batch(600))
            assert loader.statistics().cached_rows_total > 0
    finally:
        del id_and_text.version

    assert found[0] == found[1] == again == delivered(mix_of(data), 600)


def test_other_epochs_cannot_be_set(data: Path) -> None:
    with make(mix_of(data)) as loader:
        loader.set_epoch(0)
        with pytest.raises(ConfigError, match=r"AD471 set_epoch\(3\)"):
            loader.set_epoch(3)


def test_how_many_rows_there_are_is_not_known(data: Path) -> None:
    with make(mix_of(data), shuffle="full") as loader:
        for ask in (loader.num_rows, lambda: loader.seek(0, 3)):
            with pytest.raises(ConfigError, match="AD471 a mixture has no row index"):
                ask()


def test_samples_given_back_keep_the_name_of_their_part(data: Path) -> None:
    mix = mix_of(data)
    with make(mix) as loader:
        sample = loader.get_next_batch(1)[0]
        loader.add_samples([[sample]])
        state = loader.state_dict()

    assert restored(mix, state, 1) == entries([sample])


def test_the_statistics_are_flat_numbers(data: Path) -> None:
    with make(mix_of(data)) as loader:
        loader.get_next_batch(20)
        flat = loader.statistics().to_dict()

    assert flat["asyncdata_source_math_samples_total"] == 10
    assert all(isinstance(value, int | float) for value in flat.values())
    assert msgspec.json.encode(flat)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_of_different_kinds_are_resumed_each_in_its_own_way(data: Path, tmp_path: Path, num_workers: int) -> None:
    """One is read from front to back, one row by row, one by blocks."""
    zipped = tmp_path / "math.jsonl.gz"
    zipped.write_bytes(gzip.compress((data / "math.jsonl").read_bytes()))
    parts = {
        "zipped": Part(zipped, weight=2),
        "full": Part(data / "code.jsonl", shuffle="full"),
        "blocks": Part(data / "chat.jsonl"),
    }
    whole = delivered(Mix(parts, quota=4), 300, num_workers=num_workers)

    for cut in (1, 38, 120, 201):
        with make(Mix(parts, quota=4), num_workers=num_workers) as loader:
            loader.get_next_batch(cut)
            state = json.loads(json.dumps(loader.state_dict()))
        assert restored(Mix(parts, quota=4), state, 60, num_workers=num_workers) == whole[cut : cut + 60]


def test_a_part_without_weight_is_not_read(data: Path) -> None:
    mix = mix_of(data, {"math": 1, "code": 0, "chat": 1}, stages={0: None, 10_000: {"code": 1}})
    mix.parts["code"].tokenize_fn = fails_on_13
    with make(mix, buffer_size=100) as loader:
        loader.get_next_batch(500)
        rows = {part.name: part.producer.pacer.total_rows for part in loader._engine._producer._parts}  # noqa: SLF001

        assert rows["code"] == 0
        assert rows["math"] > 0
        assert loader.statistics().by_source["code"].samples == 0


def test_until_the_first_batch_each_part_reads_one_window_and_then_its_canaries(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: Counter[int] = Counter()
    submit = InlineExecutor.submit

    def counted(executor: InlineExecutor, request: Any, *args: Any) -> None:
        scans[request.part] += isinstance(request.request, Scan)
        submit(executor, request, *args)

    monkeypatch.setattr(InlineExecutor, "submit", counted)
    shuffle = Shuffle(block_bytes=1024, window_blocks=1)
    with make(mix_of(data), shuffle=shuffle, buffer_size=16) as loader:
        until(lambda: loader.statistics().ready_samples >= 8)
        assert scans == {0: 1, 1: 1, 2: 1}

        loader.get_next_batch(68)
        until(lambda: loader.state_dict()["canaries"])
        assert {digest.partition("\n")[0] for digest in loader.state_dict()["canaries"]} == set(WEIGHTS)


# For which part calls waited, and how long: only while there was a call


class Clock:
    """In place of the module ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def waited_for(engine: Any) -> str:
    """The file of the rows that the next sample waits for; empty if they are not in flight."""
    entry = engine._oldest_in_flight()  # noqa: SLF001 - the same
    return entry.location().path if entry is not None and entry.location is not None else ""


def test_a_part_is_waited_for_from_the_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = Clock(), tmp_path / "gate"
    for module in ("delivery.coordinator", "prefetch.mixture_producer"):
        monkeypatch.setattr(f"asyncdata.{module}.time", clock)
    for name in ("free", "gated"):
        rows: list[dict[str, Any]] = [{"id": number} for number in range(20)]
        rows[0] |= {"gate": str(gate)} if name == "gated" else {}  # one row: another worker is free
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = Mix({name: tmp_path / f"{name}.jsonl" for name in ("free", "gated")}, quota=2)

    with (
        DataLoader(mix, tokenize_fn=waits_for_a_file, shuffle=False, num_workers=2) as loader,
        ThreadPoolExecutor(1) as trainer,
    ):
        engine = loader._engine  # noqa: SLF001 - no statistics say that the next sample is missing
        loader.start()
        until(lambda: "gated" in waited_for(engine))
        clock.now = 200.0
        batch = trainer.submit(loader.get_next_batch, 40)
        until(lambda: engine.coordinator.channel.demand)
        clock.now = 230.0
        gate.touch()
        assert len(batch.result()) == 40
        waits = {name: part.wait for name, part in loader.statistics().by_source.items()}

    assert waits == {"free": 0.0, "gated": 30.0}


# Weights that change at a restart while samples wait to be packed


def nested(data: Path, by: Any, **weights: int) -> Mix:
    """A mixture in a mixture, so that the change is one of both."""
    inner = Mix({name: Part(data / f"{name}.jsonl", weight=weights[name]) for name in ("math", "chat")}, quota=5)
    parts = {"text": Part(inner, weight=weights["text"]), "code": Part(data / "code.jsonl", weight=weights["code"])}
    return Mix(parts, by=by, quota=10, on_mix_change="apply")


FIRST = {"text": 3, "code": 2, "math": 1, "chat": 1}
SECOND = {"text": 1, "code": 4, "math": 0, "chat": 1}
THIRD = {"text": 1, "code": 1, "math": 3, "chat": 1}


def packs_of(batch: list[Any]) -> list[list[list[int]]]:
    return [[document.tokens.tolist() for document in pack] for pack in batch]


def packed_alone(packing: Any, samples: list[Any]) -> list[list[list[int]]]:
    """The packs of these samples, by a packer that has seen all of them at once."""
    packs = packing.open().extend([len(sample.tokens) for sample in samples], range(len(samples)))
    return [[samples[number].tokens[start:stop].tolist() for number, start, stop in pack] for pack in packs]


def saved(loader: DataLoader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def chosen(data: Path, by: str, changes: list[tuple[int, dict[str, int]]], number: int) -> list[Any]:
    """The first samples, where the weights change at these positions: without packs, so that nothing is read again."""
    samples: list[Any] = []
    state = None
    for (_, weights), stop in zip(changes, [*(start for start, _ in changes[1:]), number], strict=True):
        with make(nested(data, by, **weights)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            if stop > len(samples):
                samples += loader.get_next_batch(stop - len(samples))
            state = saved(loader)
    return samples


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize(
    "packing", [SoftPacking(max_length=60, window_samples=20), HardPacking(max_length=60)], ids=["soft", "hard"]
)
def test_open_packs_stay_what_they_were_and_the_new_weights_hold_from_there_on(data: Path, by: str, packing: Any):
    knobs: dict[str, Any] = {"packing": packing, "batch_size": 2, "collate_fn": packs_of}
    states, whole = [], []
    with make(nested(data, by, **FIRST), **knobs) as loader:
        batches = iter(loader)
        for _ in range(14):
            states.append(saved(loader))
            whole.append(next(batches))

    for step in range(0, 14, 3):
        first_change = states[step]["mixture"]["at"]
        with make(nested(data, by, **SECOND), **knobs) as loader:
            loader.load_state_dict(states[step])
            again = saved(loader)  # nothing was taken yet: the change is still to come
            found = next(iter(loader))
            later = saved(loader)
        wanted = packed_alone(packing, chosen(data, by, [(0, FIRST), (first_change, SECOND)], first_change + 150))
        num_gone = sum(map(len, whole[:step]))
        assert found == wanted[num_gone : num_gone + 2]
        with make(nested(data, by, **SECOND), **knobs) as loader:
            loader.load_state_dict(again)
            batches = iter(loader)
            assert [next(batches), next(batches)] == [wanted[num_gone : num_gone + 2], wanted[num_gone + 2 :][:2]]

        for state, before in ((again, num_gone), (later, num_gone + 2)):
            second_change = max(first_change, state["mixture"]["at"])
            changes = [(0, FIRST), (first_change, SECOND), (second_change, THIRD)]
            with make(nested(data, by, **THIRD), **knobs) as loader:
                loader.load_state_dict(state)
                batches = iter(loader)
                found = [*next(batches), *next(batches)]
            wanted_then = packed_alone(packing, chosen(data, by, changes, second_change + 150))
            assert found == wanted_then[before : before + 4]


def test_a_part_that_is_gone_while_its_samples_wait_is_refused(data: Path) -> None:
    knobs: dict[str, Any] = {"packing": SoftPacking(max_length=160), "batch_size": 2, "collate_fn": packs_of}
    with make(nested(data, "rows", **FIRST), **knobs) as loader:
        next(iter(loader))
        state = saved(loader)
    rest = Mix({"code": data / "code.jsonl"}, on_mix_change="apply")
    with (
        make(rest, **knobs) as loader,
        pytest.raises(SnapshotMismatchError, match=r"AD603.*'text\.chat'.*wait to be packed"),
    ):
        loader.load_state_dict(state)
    state["mixture"]["at"] = None
    with (
        make(nested(data, "rows", **SECOND), **knobs) as loader,
        pytest.raises(SnapshotMismatchError, match=r"AD603.*wait to be packed.*earlier version"),
    ):
        loader.load_state_dict(state)
