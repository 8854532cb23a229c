"""Planned packs: known before a row is read, and what goes wrong is named; and the place of batches in a state."""

import contextlib
import gzip
import itertools
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from asyncdata import HardPacking, LengthGrouping, Mix, Part, RowShuffle, Shuffle, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, NoSamplesError, PrefetchTimeoutError
from asyncdata.xtuner import XTunerPacking
from tests.support import column_fns
from tests.support.column_fns import NumberedMedia
from tests.support.faults import until
from tests.support.loaders import make as make_loader
from tests.support.loading import NEVER_S, kills, logged, numbered, row_id, tokens_of, with_one_more, write_rows
from tests.support.parts import change
from tests.support.ranks import Batch, Ranks, Step, make, stream

Knobs = dict[str, Any]
NUM_ROWS = 150
MAX_LENGTH = 24
SOFT = SoftPacking(max_length=MAX_LENGTH)
XTUNER = {"packing": XTunerPacking(max_length=MAX_LENGTH, seed=5)}
PLANS: dict[str, Knobs] = {
    "xtuner": XTUNER,
    "cut": {
        "packing": XTunerPacking(max_length=MAX_LENGTH, seed=5, kind="hard"),
        "length_grouping": LengthGrouping(method="xtuner"),
    },
    "soft": {"packing": SOFT, "length_grouping": LengthGrouping(window=4), "plan_packs": True, "shuffle": "full"},
    "rows": {"shuffle": RowShuffle(only_kept=True)},
}
planned = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def rows_of(num_rows: int = NUM_ROWS, first: int = 0) -> list[Knobs]:
    """Each 17th has no token, and is dropped."""
    return [{"id": number, "n": number * 7 % 17} for number in range(first, first + num_rows)]


KEPT = [tokens_of(row) for row in rows_of() if row["n"]]


@pytest.fixture
def path(jsonl_file):
    return jsonl_file(rows_of())


@pytest.fixture
def knobs(tmp_path) -> Knobs:
    """The index is made once."""
    return {"tokenize_fn": numbered, "cache": {"folder": str(tmp_path / "cache")}, "shuffle": True, "seed": 3}


def packs_of(batches: Iterable[Batch]) -> list[list[list[int]]]:
    return [pack for batch in batches for pack in batch.packs]


def dealt(steps: Iterable[Step]) -> list[list[list[int]]]:
    """The packs of all ranks, in the order of delivery."""
    return [pack for step in steps for batch in step.batches if batch for pack in batch.packs]


def epoch_of(path: Any, **knobs: Any) -> list[list[list[int]]]:
    with make(path, epochs=1, **knobs) as loader:
        return packs_of(loader)


@pytest.mark.parametrize("kind", ["expand_soft", "hard"])
def test_xtuners_packs_are_those_of_every_epoch_and_each_file_is_a_data_set(knobs, jsonl_file, kind):
    files = [jsonl_file(rows_of(size, first), f"{first}.jsonl") for first, size in ((0, 60), (60, 90))]
    packing = XTunerPacking(max_length=MAX_LENGTH, seed=5, kind=kind, join_datasets=False)
    with make(list(map(str, files)), packing=packing, **knobs) as loader:
        epochs = [packs_of(loader) for _ in range(2)]
        num_samples = loader.statistics().samples_total
    lengths = [np.array([row["n"] for row in rows_of(*some) if row["n"]]) for some in ((60, 0), (90, 60))]
    theirs = packing.plan(lengths)
    packs = [theirs.pack(number) for number in range(theirs.num_packs)]
    assert [sorted(packs) for packs in epochs] == [sorted([KEPT[r][a:b] for r, a, b in pack] for pack in packs)] * 2
    assert epochs[0] != epochs[1]
    assert num_samples == 2 * sum(map(len, packs))


@pytest.mark.parametrize("shuffle", ["full", RowShuffle(), RowShuffle(only_kept=True)], ids=str)
def test_rows_without_a_sample_are_not_planned_whatever_the_shuffle_says(path, knobs, shuffle):
    found = epoch_of(path, packing=SOFT, plan_packs=True, **{**knobs, "shuffle": shuffle})
    assert sorted(itertools.chain(*found)) == KEPT
    assert found == epoch_of(path, packing=SOFT, plan_packs=True, **{**knobs, "shuffle": "full"})


def test_some_of_the_rows_are_planned_as_a_slice(path, knobs):
    found = epoch_of(path, **XTUNER, **{**knobs, "shuffle": RowShuffle(method="none", first=10, stop=50)})
    assert sorted(itertools.chain(*found)) == [tokens_of(row) for row in rows_of()[10:50] if row["n"]]


@pytest.mark.thorough
@planned
def test_windows_join_without_a_seam_for_every_rank(path, knobs, plan, monkeypatch):
    settings = {**knobs, **plan, "epochs": 2, "round_up": False}
    with Ranks(path, 2, **settings) as ranks:
        whole = list(ranks.steps())
    change(monkeypatch, rows_per_window=40)
    with Ranks(path, 2, **settings) as ranks:
        parted = list(ranks.steps())
    assert [step.batches for step in parted] == [step.batches for step in whole]


def test_an_epoch_that_was_begun_goes_on_in_its_order_with_other_ranks(path, knobs):
    settings = {**knobs, **PLANS["soft"], "round_up": False}
    with Ranks(path, 4, **settings, epochs=1) as ranks:
        begun = list(ranks.steps())
    with Ranks(path, 2, gradient_accumulation=3, **settings, epochs=2) as ranks:
        steps = list(ranks.steps())
        other, following = dealt(steps[: ranks.ends[0]]), dealt(steps[ranks.ends[0] :])

    state = begun[3].state
    for _ in range(2):  # and a snapshot of the second run says so too
        with Ranks(path, 2, state, gradient_accumulation=3, **settings, epochs=2) as ranks:
            steps = list(ranks.steps())
            rest = dealt(steps[: ranks.ends[0]])
            assert rest == dealt(begun)[-len(rest) :]
            assert dealt(steps[ranks.ends[0] :]) == following
        state = steps[1].state
    assert dealt(begun) != other
    assert sorted(map(str, dealt(begun))) == sorted(map(str, other))


@pytest.mark.parametrize(("plan", "num_workers"), [("xtuner", 2), ("soft", 0), ("rows", 0)])
def test_a_second_run_counts_no_row_again_and_looks_at_no_dropped_one(jsonl_file, tmp_path, knobs, plan, num_workers):
    log = tmp_path / "calls"
    path = jsonl_file([{**row, "log": str(log)} for row in rows_of()])
    settings = {**knobs, **PLANS[plan], "tokenize_fn": logged, "num_workers": num_workers}
    found, calls = [], []
    for _ in range(3):
        log.write_text("")
        found.append(epoch_of(path, **settings))
        calls.append(Counter(map(int, log.read_text().split())))

    kept = {row["id"] for row in rows_of() if row["n"]}
    assert set(calls[0]) == set(range(NUM_ROWS))
    assert all(calls[0][row] >= 2 for row in kept), "counted, and tokenized for its pack"
    for again in calls[1:]:
        again.pop(0, None)  # of no token, and the data's canary: it may be looked at again
        assert again == dict.fromkeys(kept, 1)
    assert found[1] == found[2] == found[0]


@planned
def test_a_rank_tokenizes_its_own_rows_and_no_others_once_the_index_is_made(path, knobs, plan):
    counted: list[int] = []

    def counts(row: Knobs) -> Any:
        counted.append(row["id"])
        return numbered(row)

    counts.version = 1
    settings = {**knobs, **plan, "tokenize_fn": counts}
    epoch_of(path, **settings)
    for rank in range(3):
        counted.clear()
        ranks, canary = {"rank": rank, "world_size": 3, "round_up": False}, 0  # the data's first row
        with make(path, ranks=ranks, epochs=1, **settings) as loader:
            own = [document[0] // 1000 for pack in packs_of(loader) for document in pack]
            tokenized = loader.statistics().tokenized_rows_total
        # Of what fills no batch of all ranks, all have all.
        assert set(own) <= set(counted)
        assert len(counted) <= len(own) + 1 + 2 * MAX_LENGTH < NUM_ROWS
        assert tokenized == len(counted) - (canary in counted)


def test_a_function_without_a_version_can_be_planned_and_is_not_kept(path, knobs, tmp_path):
    assert epoch_of(path, **XTUNER, **{**knobs, "tokenize_fn": lambda row: tokens_of(row) or None})
    assert not list((tmp_path / "cache").rglob("*.index"))


def test_a_copy_that_was_gone_is_found_again_by_the_run_after_the_next(knobs, tmp_path):
    """What takes the place of a part of no use in the index file is not read as another part after it."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of()), path, row_group_size=20)
    copies = []
    for _ in range(3):
        with make(path, **XTUNER, **knobs, epochs=1) as loader:
            assert sorted(itertools.chain(*packs_of(loader))) == KEPT
            assert loader.num_rows() == len(KEPT)
        copies.append(sorted((tmp_path / "cache" / "index").glob("*.rows/*.rows")))
        copies[-1][0].unlink()
    assert copies[1] == copies[2] == copies[0]


@pytest.mark.parametrize(
    ("function", "num_workers", "code"),
    [(with_one_more, 0, "AD424"), pytest.param(kills, 1, "AD423", marks=pytest.mark.thorough)],
)
def test_a_row_that_is_no_more_what_was_counted_stops_or_is_left_out_by_the_rank_whose_it_is(
    knobs, jsonl_file, tmp_path, function, num_workers, code
):
    rows = rows_of()
    rows[50]["gate"] = str(tmp_path / "gate")  # which does something else once this file is there
    path = jsonl_file(rows, "gated.jsonl")
    settings = {**knobs, **XTUNER, "tokenize_fn": function}
    whole = epoch_of(path, **settings)
    (tmp_path / "gate").touch()

    found, bad, messages = set(), [], []
    for rank in range(2):
        ranks = {"rank": rank, "world_size": 2}
        with make(path, bad_rows="skip", num_workers=num_workers, ranks=ranks, epochs=1, **settings) as loader:
            found |= {tuple(document) for pack in packs_of(loader) for document in pack if document}
            bad += [name for name in loader.statistics().dropped_total if "bad" in name]
        try:
            epoch_of(path, num_workers=num_workers, ranks={**ranks, "round_up": False}, **settings)
        except BadRowError as error:
            messages.append(str(error))
    assert found == {tuple(document) for pack in whole for document in pack if document[0] // 1000 != 50}
    assert bad == [f"bad row {code}"]
    (message,) = messages
    assert code in message
    if code == "AD424":
        assert "has 11 tokens, and had 10 when" in message
        assert "does not do the same each time" in message


BY_EPOCH = {"plan_packs": True, "shuffle": "full"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"packing": HardPacking(max_length=100_000), **BY_EPOCH}, ConfigError, r"AD453 all 141 samples .* \d+ tokens"),
        ({"packing": SoftPacking(max_length=10, overlong="error"), **BY_EPOCH}, ConfigError, "AD450 sample"),
        ({"packing": SOFT, "plan_packs": True}, ConfigError, 'AD453 .*shuffle=True is not: use shuffle="full"'),
        ({**XTUNER, "shuffle": RowShuffle(method="slime")}, ConfigError, "AD453 XTunerPacking has an order of rows of"),
        ({**XTUNER, "shuffle": False}, ConfigError, "AD453 XTunerPacking has an order of rows of its own"),
        ({"plan_packs": True}, ConfigError, "it needs a packing or a length_grouping"),
    ],
)
def test_what_cannot_be_planned_says_what_can(path, knobs, settings, error, message):
    with pytest.raises(error, match=message):
        epoch_of(path, **{**knobs, **settings})


def test_data_without_a_sample_and_a_stream_say_what_became_of_rows_and_can_be_planned(knobs, jsonl_file, tmp_path):
    with pytest.raises(NoSamplesError, match="AD401 1 rows read, 0 kept: 1 by empty"):
        epoch_of(jsonl_file([{"id": 1, "n": 0}]), **XTUNER, **knobs)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "n": 1}\n'))
    with pytest.raises(ConfigError, match="AD453 .*rows.jsonl.gz can only be read from front to back.*SoftPacking"):
        epoch_of(tmp_path / "rows.jsonl.gz", **XTUNER, **knobs)


@pytest.mark.parametrize(("most", "num_rows"), [(30, "[3-9][0-9]"), (145, r"\d+")], ids=["rows", "pieces"])
def test_more_rows_than_can_be_planned_are_refused_as_soon_as_they_are_found(path, knobs, monkeypatch, most, num_rows):
    """Of 150 rows 141 have tokens, and the packs cut more of them than are left."""
    change(monkeypatch, bytes_of_an_index_block=64, most_pieces_of_a_plan=most)
    with pytest.raises(ConfigError, match=rf"^AD453 {num_rows} rows or pieces of rows are more than the {most} that"):
        epoch_of(path, **{**knobs, **BY_EPOCH, "packing": HardPacking(max_length=MAX_LENGTH), "num_workers": 0})


SIZES = {"code": 97, "math": 61, "chat": 23}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
OLD, NEW = {"code": 5, "math": 3, "chat": 2}, {"code": 1, "math": 2, "chat": 7}
PACKINGS = {
    "hard": {"packing": HardPacking(max_length=16)},
    "across": {"packing": HardPacking(max_length=16, across_epochs=True)},
    "soft": {"packing": SoftPacking(max_length=16, window_samples=12, window_tokens=1)},
    "grouped": {"packing": SoftPacking(max_length=16, window_samples=12), "length_grouping": LengthGrouping(window=4)},
    "samples": {"length_grouping": LengthGrouping(window=8)},
}
NUM_BATCHES = 5


def text(row):
    """Up to seven tokens, all of which tell the row; some rows have none."""
    return [row["id"]] * (row["id"] % 8)


@pytest.fixture
def data(tmp_path):
    for name, number in SIZES.items():
        write_rows(tmp_path / f"{name}.jsonl", number)
        column_fns.write_rows(tmp_path / f"{name}.media.jsonl", num_rows=number)
    return tmp_path


def mix_of(data, weights, ending=".jsonl"):
    parts = {name: Part(data / f"{name}{ending}", weight=weight) for name, weight in weights.items()}
    return Mix(parts, quota=10, on_mix_change="apply")


def pieces_of(batch):
    """What a batch has of each sample: part, part's epoch, row, and the tokens from where."""
    documents = [piece for item in batch for piece in (item if isinstance(item, list) else [item])]
    samples = [(getattr(one, "sample", one), getattr(one, "start", 0), len(one.tokens)) for one in documents]
    return [(s.source_name, s.source_epoch, int(s.tokens[0]), start, number) for s, start, number in samples]


def batches(mix, rank=0, number=NUM_BATCHES, state=None, ahead=lambda loader: None, **settings):
    """The batches of one rank, and the state after each."""
    found, states = [], []
    settings = {"tokenize_fn": text, "shuffle": SHUFFLE, "batch_size": 2, **settings}
    with make_loader(mix, ranks={"rank": rank, "world_size": 2}, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(stream(loader), number):
            found.append(pieces_of(batch))
            ahead(loader)
            states.append(loader.state_dict())
    return found, states


@pytest.mark.parametrize("kind", PACKINGS)
def test_new_weights_begin_at_the_same_sample_whatever_each_rank_has_read_ahead(data, kind):
    settings = PACKINGS[kind]
    old, new = mix_of(data, OLD), mix_of(data, NEW)

    def continued(rank, buffer_size, **other):
        _, states = batches(old, rank, buffer_size=buffer_size, **settings, **other)
        return batches(new, rank, 8, states[-1], **settings)[0]

    wanted = [continued(rank, None) for rank in range(2)]
    assert [continued(0, None), continued(1, 20)] == wanted
    assert [continued(0, 6), continued(1, 200)] == wanted
    pieces = [piece for found in wanted for batch in found for piece in batch]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize("kind", PACKINGS)
def test_where_a_restart_reads_follows_from_the_batches_alone(data, kind):
    mix, places = mix_of(data, OLD), []
    for buffer_size in (None, 1):
        _, states = batches(mix, buffer_size=buffer_size, **PACKINGS[kind])
        places.append([state["position"] for state in states])
    assert places[0] == places[1]


def test_the_end_of_an_epoch_is_passed_with_the_batch_after_it_however_many_samples_were_asked_for(tmp_path):
    """An epoch is one batch. New weights decide where it ends, so it has not ended yet."""
    parts = {name: write_rows(tmp_path / f"{name}.jsonl", 2) for name in ("code", "math")}
    mix = Mix({name: Part(path, when_done="leave", max_epochs=1) for name, path in parts.items()})
    knobs = {"tokenize_fn": row_id, "packing": HardPacking(max_length=1), "shuffle": False}
    places = []
    for buffer_size in (None, 1):
        _, states = batches(mix, number=3, buffer_size=buffer_size, **knobs)
        places.append([(state["position"], state["mixture"]["schedule"]) for state in states])
    assert places[0] == places[1]


@pytest.mark.parametrize(("kind", "workers"), [("soft", 0), ("samples", 2)])
def test_media_that_are_loaded_ahead_move_no_place(data, kind, workers):
    settings = {**PACKINGS[kind], "tokenize_fn": NumberedMedia()}
    old, new = mix_of(data, OLD, ".media.jsonl"), mix_of(data, NEW, ".media.jsonl")

    def is_read_ahead(loader):
        until(lambda: loader.statistics().ready_samples >= 100)

    def continued(rank, buffer_size, ahead=lambda loader: None):
        _, states = batches(old, rank, buffer_size=buffer_size, ahead=ahead, num_workers=workers, **settings)
        return batches(new, rank, 8, states[-1], **settings)[0]

    wanted = [continued(rank, 4) for rank in range(2)]
    assert [continued(0, 4), continued(1, 200, is_read_ahead)] == wanted


@pytest.mark.parametrize("number", [3, 4])
def test_a_state_after_a_smaller_batch_of_samples_that_came_again_goes_on_with_the_schedule(data, number):
    """Packs that waited for the rest of a batch fill smaller ones after a restart, without a new sample."""
    settings = {"packing": HardPacking(max_length=16), "length_grouping": LengthGrouping(window=8)}
    mix = mix_of(data, OLD)
    _, states = batches(mix, number=number, batch_size=2, **settings)
    wanted, states = batches(mix, number=12, state=states[-1], batch_size=1, **settings)
    assert batches(mix, number=11, state=states[0], batch_size=1, **settings)[0] == wanted[1:]


def test_a_batch_that_was_waited_for_in_vain_moves_no_place(data):
    """Some of its samples were packed when the time was over."""
    is_open = threading.Event()
    is_open.set()

    def gated(row):
        is_open.wait(NEVER_S)
        return text(row)

    def place(loader):
        return {name: part for name, part in loader.state_dict().items() if name in {"mixture", "packing", "position"}}

    packing = HardPacking(max_length=64)
    with make_loader(mix_of(data, OLD), gated, packing=packing, batch_size=1, buffer_size=4, timeout_s=0.05) as loader:
        num_batches = 0
        while num_batches < 3:
            with contextlib.suppress(PrefetchTimeoutError):
                num_batches += bool(next(iter(loader)))
        is_open.clear()
        before, position = place(loader), loader.position()
        while loader.position() == position:
            with pytest.raises(PrefetchTimeoutError):
                next(iter(loader))
        assert place(loader) == before
        is_open.set()
