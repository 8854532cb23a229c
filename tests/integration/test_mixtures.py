"""A loader over a mixture: one order D, each part's own order in it, exact resume, and weights that change."""

import gzip
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdata import BadRows, IterableSource, JsonArraySource, Mix, Part, Shuffle, SoftPacking, errors
from tests.support import loaders
from tests.support.faults import until
from tests.support.loaders import is_wanted, path_waited_for, rows_of_parts
from tests.support.loading import all_dropped, every_third_dropped, fails_on_13, id_and_text, row_id, waits_for_a_file
from tests.support.parts import Scan, change, real
from tests.support.sources import jsonl, write

SIZES = {"code": 61, "math": 97, "chat": 23}
WEIGHTS = {"code": 3, "math": 5, "chat": 2}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)


@pytest.fixture
def data(tmp_path):
    for name, number in SIZES.items():
        rows = [{"id": n, "pad": name * (n % 4), "prompt": name[: n % 5]} for n in range(number)]
        write(tmp_path / f"{name}.jsonl", jsonl(rows))
    return tmp_path


def mix_of(data, weights=WEIGHTS, part=None, **settings):
    paths = {name: data / f"{name.partition('2')[0]}.jsonl" for name in weights}
    parts = {name: Part(paths[name], weight=weight, **(part or {})) for name, weight in weights.items()}
    return Mix(parts, **{"quota": 10, **settings})


make = partial(loaders.make, tokenize_fn=id_and_text, shuffle=SHUFFLE)


def entries(samples):
    return [(sample.source_name, int(sample.tokens[0])) for sample in samples]


def delivered(mix, number, sizes=(32,), **knobs):
    found: list[Any] = []
    with make(mix, **knobs) as loader:
        while len(found) < number:
            found += entries(loader.get_next_batch(min(sizes[len(found) % len(sizes)], number - len(found))))
    return found


def own(found, name):
    return [row for part, row in found if part == name]


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def state_after(mix, number, **knobs):
    with make(mix, **knobs) as loader:
        loader.get_next_batch(number)
        return saved(loader)


def restored(mix, state, number, **knobs):
    with make(mix, **knobs) as loader:
        loader.load_state_dict(state)
        return entries(loader.get_next_batch(number))


def many(tmp_path, by="rows", number=300):
    for part in range(number):
        write(tmp_path / f"{part:03}.jsonl", jsonl([{"id": part, "pad": "x"}] * 4))
    return Mix({f"{part:03}": tmp_path / f"{part:03}.jsonl" for part in range(number)}, by=by)


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_before_the_first_samples_are_there_only_their_parts_are_read(tmp_path, monkeypatch, by):
    read, submit = set(), real("submit")

    def noting(executor, request, *args):
        read.add(request.part)
        return submit(executor, request, *args)

    change(monkeypatch, submit=noting)
    with make(many(tmp_path, by), buffer_size=8) as loader:
        first = entries(loader.get_next_batch(8))
        of_first = set(read)  # until 32 samples are merged, those of the next 32
        first += entries(loader.get_next_batch(56))
        loader.get_next_batch(1000)

    assert {row for _, row in first[:8]} <= of_first <= {row for _, row in first}
    assert len(read) == 300


def test_an_event_asks_only_the_parts_that_it_concerns(tmp_path, monkeypatch):
    """A reply of a worker once asked all parts: 300 of them, for each of the samples."""
    ask, asked = real("part_is_asked"), Counter()
    change(monkeypatch, part_is_asked=lambda self: (asked.update("p"), ask(self))[1])
    with make(many(tmp_path), buffer_size=64) as loader:
        loader.get_next_batch(300)
        num_rows = loader.statistics().tokenized_rows_total
    assert asked["p"] < 20 * num_rows


def test_other_parts_and_their_weights_move_no_row_of_a_part_and_their_listing_moves_none_at_all(data):
    found = delivered(mix_of(data), 400)
    others = delivered(mix_of(data, {"math": 1, "code2": 7, "chat2": 1, "chat": 4}, quota=7), 400)
    for name in ("math", "chat"):
        first, second = own(found, name), own(others, name)
        shorter = min(len(first), len(second))
        assert shorter > 20
        assert first[:shorter] == second[:shorter]
    assert delivered(mix_of(data, dict(reversed(WEIGHTS.items()))), 200) == found[:200]


PINNED = {
    "rows": (14764328533165183789, 6741893682265901430, 17983502666747437308),
    "tokens": (14764328533165183789, 6741893682265901430, 13707682156922592257),
}


@pytest.mark.parametrize("by", PINNED)
def test_the_order_is_pinned(data, by):
    """A run that was saved continues with it, on any machine and after any update."""
    digest = state_after(mix_of(data, by=by), 300, digest="tokens")["counters"]["digest"]
    assert (digest["positions"], digest["order"], digest["tokens"]) == PINNED[by]


def test_dropped_and_bad_rows_do_not_bend_the_mixture(data):
    parts = {
        "code": Part(data / "code.jsonl", weight=1, tokenize_fn=every_third_dropped),
        "math": Part(data / "math.jsonl", weight=1, tokenize_fn=fails_on_13, bad_rows="skip"),
        "chat": Part(data / "chat.jsonl", weight=2, tokenize_fn=row_id),
    }
    with make(Mix(parts, quota=4), tokenize_fn=None) as loader:
        found = entries(loader.get_next_batch(400))
        statistics = loader.statistics().by_source

    for first in range(0, 400, 4):
        assert Counter(part for part, _ in found[first : first + 4]) == {"code": 1, "math": 1, "chat": 2}
    assert not [row for row in own(found, "code") if row % 3 == 0]
    assert 13 not in own(found, "math")
    assert statistics["code"].dropped.keys() == {"tokenize_fn"}
    assert (statistics["math"].dropped, statistics["chat"].dropped) == ({"bad row AD421": 1}, {})
    assert {name: part.samples for name, part in statistics.items()} == {"code": 100, "math": 100, "chat": 200}


def test_nested_mixtures_have_dotted_names_and_shares_of_their_share_and_the_temperature_makes_weights_of_sizes(data):
    inner = mix_of(data, {"code": 1, "chat": 3}, quota=4)
    outer = Mix({"math": Part(data / "math.jsonl", weight=2), "rest": Part(inner, weight=2)}, quota=4)
    parts = {name: data / f"{name}.jsonl" for name in SIZES}
    by_size = Counter(part for part, _ in delivered(Mix(parts, temperature=1), 1000))
    sizes = {name: path.stat().st_size for name, path in parts.items()}
    assert all(abs(by_size[name] - 1000 * size / sum(sizes.values())) < 1 for name, size in sizes.items())
    assert Counter(part for part, _ in delivered(outer, 160)) == {"math": 80, "rest.code": 20, "rest.chat": 60}


def test_parts_may_be_of_any_format(tmp_path):
    datasets, rows = pytest.importorskip("datasets"), [{"id": number} for number in range(60)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    array, iterable = JsonArraySource(str(tmp_path / "rows.json")), IterableSource(lambda _: rows, version=1)
    parts = {"array": array, "dataset": dataset, "iterable": iterable, "parquet": tmp_path / "rows.parquet"}
    mix, knobs = Mix(parts, quota=4), {"tokenize_fn": row_id, "shuffle": False}
    found = delivered(mix, 300, **knobs)
    assert {name: own(found, name) for name in parts} == dict.fromkeys(parts, [*range(60), *range(15)])
    assert restored(mix, state_after(mix, 130, **knobs), 170, **knobs) == found[130:]


def test_a_part_without_a_sample_is_named(data):
    (data / "none.jsonl").write_text("")
    dropped = mix_of(data)
    dropped.parts["chat"].tokenize_fn = all_dropped
    with make(dropped) as loader, pytest.raises(errors.NoSamplesError, match="AD407 part 'chat' .* 23 rows.* 0 kept"):
        loader.get_next_batch(100)
    with pytest.raises((errors.NoSamplesError, errors.SourceError), match="part 'none'"):
        with make(mix_of(data, {"math": 1, "none": 1})) as loader:
            loader.get_next_batch(100)


def test_each_part_counts_its_bad_rows_for_itself_and_stops_where_it_says_so(data):
    skips = {"tokenize_fn": fails_on_13, "bad_rows": BadRows(policy="skip", max=1)}
    with make(mix_of(data, part=skips)) as loader:
        loader.get_next_batch(100)
        with pytest.raises(errors.TooManyBadRowsError, match=r"BadRows\(max=1\).*chat.jsonl:14 "):
            loader.get_next_batch(300)
    raises = mix_of(data, part={**skips, "bad_rows": "skip"})
    raises.parts["math"].bad_rows = "raise"
    with make(raises) as loader, pytest.raises(errors.BadRowError, match=r"AD421 .*math.jsonl:14 "):
        loader.get_next_batch(400)


PLANNED = {"packing": SoftPacking(max_length=40), "batch_size": 2, "plan_packs": True, "shuffle": "full"}


@pytest.mark.parametrize(
    ("knobs", "ask", "message"),
    [
        ({"epochs": 1}, None, r"AD470 epochs=1, but no epoch of this mixture ends"),
        (PLANNED, None, "AD471 the packs of a mixture cannot be planned"),
        ({}, lambda loader: loader.set_epoch(0) or loader.set_epoch(3), r"AD471 set_epoch\(3\)"),
        ({"shuffle": "full"}, lambda loader: loader.num_rows(), "AD471 a mixture has no row index"),
        ({"shuffle": "full"}, lambda loader: loader.seek(0, 3), "AD471 a mixture has no row index"),
    ],
)
def test_what_a_mixture_cannot_do_is_refused(data, knobs, ask, message):
    with pytest.raises(errors.ConfigError, match=message), make(mix_of(data), **knobs) as loader:
        ask(loader)


def mix_of_kinds(data):
    """One part is read from front to back, one row by row, one by blocks."""
    zipped = data / "math.jsonl.gz"
    zipped.write_bytes(gzip.compress((data / "math.jsonl").read_bytes()))
    parts = {"zipped": Part(zipped, weight=2), "blocks": data / "chat.jsonl"}
    return Mix({**parts, "full": Part(data / "code.jsonl", shuffle="full")}, quota=4)


def mix_in_mix(data, **settings):
    rest = mix_of(data, {"code": 1, "chat": 2})
    return Mix({"math": Part(data / "math.jsonl"), "rest": Part(rest)}, quota=3, **settings)


@pytest.mark.parametrize("made", [mix_of_kinds, mix_in_mix, lambda data: mix_in_mix(data, by="tokens")])
def test_it_is_one_order_at_any_buffers_and_batches_and_from_any_state(data, made):
    mix, cuts, states = made(data), [1, 2, 38, 61, 75, 120, 201], []
    whole = delivered(mix, 261, (7, 1, 33), dp_size=7)
    with make(mix) as loader:
        for position in range(1, 202):
            assert entries(loader.get_next_batch(1)) == whole[position - 1 : position]
            states += [saved(loader)] if position in cuts else []
    for cut, state in zip(cuts, states, strict=True):
        assert restored(mix, state, 60, buffer_size=cut) == whole[cut : cut + 60]


def test_the_state_has_no_more_than_a_few_numbers_for_each_part(data):
    early, late = (len(json.dumps(state_after(mix_of(data), number)["mixture"])) for number in (10, 2010))
    assert late < early + 200


@pytest.mark.parametrize("is_stage", [False, True])
def test_weights_that_changed_are_named_by_their_shares(data, is_stage):
    """1:5:4 and 2:2:12 are 1:1:6 by the smallest whole numbers, as if docs had the same."""

    def mix(weights):
        parts = {name: data / f"{path}.jsonl" for name, path in zip(weights, ("chat", "code", "math"), strict=True)}
        if is_stage:
            return Mix(parts, quota=10, stages={100: weights})
        return Mix({name: Part(path, weight=weights[name]) for name, path in parts.items()}, quota=10)

    state = state_after(mix({"docs": 1, "math": 5, "chat": 4}), 17)
    with make(mix({"docs": 2, "math": 10, "chat": 8})) as loader:
        loader.load_state_dict(state)
    with make(mix({"docs": 2, "math": 2, "chat": 12})) as loader:
        with pytest.raises(errors.SnapshotMismatchError) as refused:
            loader.load_state_dict(state)

    at = " from 100 on" if is_stage else ""
    weights = {"chat": (0.4, 0.75), "docs": (0.1, 0.125), "math": (0.5, 0.125)}
    assert refused.value.differences == {f"mixture.{name}.weight{at}": each for name, each in weights.items()}
    assert f"docs.weight{at}: saved 10 %, present 12.5 %" in str(refused.value)


def test_a_part_whose_file_changed_and_the_state_of_a_single_source_are_refused_and_named(data):
    state = state_after(mix_of(data), 17)
    with make(data / "math.jsonl") as loader:
        of_one = loader.state_dict()
        with pytest.raises(errors.SnapshotMismatchError):
            loader.load_state_dict(state)
    write(data / "code.jsonl", jsonl([{"id": 1, "pad": ""}] * 50))
    with make(mix_of(data)) as loader:
        with pytest.raises(errors.SnapshotMismatchError, match=r"part 'code' of the mixture: .*data"):
            loader.load_state_dict(state)
        with pytest.raises(errors.SnapshotMismatchError, match="taken of a single source"):
            loader.load_state_dict(of_one)


def test_new_parts_begin_at_their_start_and_parked_ones_continue(data):
    two, other = (mix_of(data, {"math": 1, name: 1}, on_mix_change="apply") for name in ("code", "chat"))
    found, state = [], None
    for mix in (two, other, two):
        with make(mix) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += entries(loader.get_next_batch(30))
            state = saved(loader)
    for name, number in (("math", 45), ("code", 30), ("chat", 15)):
        assert own(found, name) == own(delivered(mix_of(data, {name: 1}), number), name)


def test_a_part_without_weight_is_not_read(data):
    mix = mix_of(data, {"math": 1, "code": 0, "chat": 1}, stages={0: None, 10_000: {"code": 1}})
    mix.parts["code"].tokenize_fn = fails_on_13
    with make(mix, buffer_size=100) as loader:
        loader.get_next_batch(500)
        rows = rows_of_parts(loader)
        assert rows["code"] == 0
        assert rows["math"] > 0
        assert loader.statistics().by_source["code"].samples == 0


def test_until_the_first_batch_each_part_reads_one_window_and_then_its_canaries(data, monkeypatch):
    scans: Counter[int] = Counter()
    submit = real("submit")

    def counted(executor, request, *args):
        scans[request.part] += isinstance(request, Scan)
        return submit(executor, request, *args)

    change(monkeypatch, submit=counted)
    with make(mix_of(data), shuffle=Shuffle(block_bytes=1024, window_blocks=1), buffer_size=16) as loader:
        until(lambda: loader.statistics().ready_samples >= 8)
        assert scans == {0: 1, 1: 1, 2: 1}

        loader.get_next_batch(68)
        until(lambda: loader.state_dict()["canaries"])
        assert {digest.partition("\n")[0] for digest in loader.state_dict()["canaries"]} == set(WEIGHTS)


def waits(loader):
    return {name: part.wait for name, part in loader.statistics().by_source.items()}


def test_a_part_is_waited_for_from_the_call_on(tmp_path, monkeypatch):
    """For which part calls waited, and how long: only while there was a call."""
    now, gate = [100.0], tmp_path / "gate"
    change(monkeypatch, clock_of_waits=SimpleNamespace(monotonic=lambda: now[0]))
    for name in ("free", "gated"):
        first = {"id": 0, "gate": str(gate)} if name == "gated" else {"id": 0}  # one row: another worker is free
        write(tmp_path / f"{name}.jsonl", jsonl([first, *({"id": number} for number in range(1, 20))]))
    mix = Mix({name: tmp_path / f"{name}.jsonl" for name in ("free", "gated")}, quota=2)

    knobs = {"tokenize_fn": waits_for_a_file, "shuffle": False, "num_workers": 2}
    with make(mix, **knobs) as loader, ThreadPoolExecutor(1) as trainer:
        loader.start()
        until(lambda: "gated" in path_waited_for(loader))
        now[0] = 200.0
        batch = trainer.submit(loader.get_next_batch, 40)
        until(lambda: is_wanted(loader))
        until(lambda: now.append(now.pop() + 1) or waits(loader)["gated"])  # of this call, not the 100 s before
        before = waits(loader)["gated"]
        now[0] += 30.0
        gate.touch()
        assert len(batch.result()) == 40
        assert waits(loader) == {"free": 0.0, "gated": before + 30.0}

    assert before <= now[0] - 230.0


# Weights that change at a restart while samples wait to be packed

FIRST = {"text": 3, "code": 2, "math": 1, "chat": 1}


def nested(data, weights, by="rows"):
    """A mixture in a mixture, so that the change is one of both."""
    inner = mix_of(data, {name: weights[name] for name in ("math", "chat")}, quota=5)
    parts = {"text": Part(inner, weight=weights["text"]), "code": Part(data / "code.jsonl", weight=weights["code"])}
    return Mix(parts, by=by, quota=10, on_mix_change="apply")


def packs_of(batch):
    return [[document.tokens.tolist() for document in pack] for pack in batch]


def batches_of(mix, state, number, **knobs):
    """The packs of the first batches after a restart, and the state before the first of them and after the last."""
    with make(mix, batch_size=2, collate_fn=packs_of, **knobs) as loader:
        if state is not None:
            loader.load_state_dict(state)
        before, batches = saved(loader), iter(loader)
        return [pack for _ in range(number) for pack in next(batches)], before, saved(loader)


def test_a_part_that_is_gone_while_its_samples_wait_is_refused(data):
    packing = SoftPacking(max_length=160)
    _, _, state = batches_of(nested(data, FIRST), None, 1, packing=packing)
    rest = Mix({"code": data / "code.jsonl"}, on_mix_change="apply")
    with pytest.raises(errors.SnapshotMismatchError, match=r"AD603.*'text\.\w+'.*wait to be packed"):
        batches_of(rest, state, 1, packing=packing)
