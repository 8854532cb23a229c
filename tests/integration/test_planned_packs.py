"""Planned packs, and ranks that tokenize only their own share, at the level of D: all ranks together read all of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import (
    BadRowError,
    ConfigError,
    DataLoader,
    HardPacking,
    LengthGrouping,
    NoSamplesError,
    Ranks,
    RowShuffle,
    SoftPacking,
    XTunerPacking,
)
from asyncdata.batching.planned.plan import Plan
from asyncdata.core.messages import Indexed
from asyncdata.order.rank_share import Share
from asyncdata.prefetch.row_index.index_file import IndexFile
from tests.support.planned_fns import kills, numbered, tokens_of, with_one_more
from tests.support.reading import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncdata import Sample
    from asyncdata.batching.planned.plan import PlannedEpoch

NUM_ROWS = 150
MAX_LENGTH = 24

XTUNER = Plan(packing=XTunerPacking(max_length=MAX_LENGTH, seed=5))
CUT = Plan(packing=XTunerPacking(max_length=MAX_LENGTH, seed=5, kind="hard"), grouping=LengthGrouping(method="xtuner"))
SOFT = Plan(packing=SoftPacking(max_length=MAX_LENGTH, across_epochs=False), grouping=LengthGrouping(window=4))
KEPT = RowShuffle(only_kept=True)

DataOf = dict[str, Any]


def rows_of(num_rows: int = NUM_ROWS, first: int = 0) -> list[DataOf]:
    return [{"id": number, "n": number * 7 % 17} for number in range(first, first + num_rows)]


@pytest.fixture
def path(jsonl_file) -> Path:
    return jsonl_file(rows_of())


@pytest.fixture
def reader(path, tmp_path) -> Callable[..., Reader]:
    """Makes a rank's reader; the index is made once."""

    def make(plan: Plan | None = None, *, function: Any = numbered, **knobs: Any) -> Reader:
        knobs = {"cache": {"folder": str(tmp_path / "cache")}, "buffer_size": 40, "seed": 3, **knobs}
        if plan is None or isinstance(plan.packing, SoftPacking | HardPacking):
            knobs.setdefault("shuffle", KEPT)
        return Reader(knobs.pop("path", path), function, plan=plan, **knobs)

    return make


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def together(ranks: list[list[Sample]]) -> list[list[int]]:
    """What the ranks have of each place in D. But for the end of an epoch, one of them has tokens there."""
    found = []
    for samples in zip(*map(tokens, ranks), strict=True):
        some, *others = [some for some in samples if some]
        assert others in ([], [some] * (len(ranks) - 1))
        found.append(some)
    return found


def owned_by(rank: int, world_size: int, units: Sequence[int], num_units: int) -> list[bool]:
    """Whose the rows of these units are; a last batch that not all ranks have a unit of is everybody's."""
    num_dealt = num_units // world_size * world_size
    return [unit % world_size == rank or unit >= num_dealt for unit in units]


def is_own(samples: list[Sample]) -> list[bool]:
    return [len(sample.tokens) > 0 for sample in samples]


def wanted_of(epoch: PlannedEpoch) -> list[list[int]]:
    """The rows of all packs, whole."""
    rows = [row for row in rows_of() if row["n"]]
    return [tokens_of(rows[row]) for row in epoch.pieces(0, epoch.num_rows).rows.tolist()]


# Plans.


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [XTUNER, CUT, SOFT], ids=["xtuner", "cut", "soft"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_d_is_the_rows_of_the_packs_in_the_order_of_delivery(reader, plan, num_workers):
    with reader(plan, num_workers=num_workers) as data:
        epochs = [(data.epoch(number), data.windows.plan(number)) for number in range(3)]
        counters = data.coordinator.ledger.counters

    for samples, planned in epochs:
        assert tokens(samples) == wanted_of(planned)
    assert len({json.dumps(tokens(samples)) for samples, _ in epochs}) == 3, "each epoch has its own order"
    num_samples = sum(planned.num_rows for _, planned in epochs)
    assert [sample.index for samples, _ in epochs for sample in samples] == list(range(num_samples))
    assert counters.num_samples == num_samples
    assert counters.num_tokens == sum(len(some) for samples, _ in epochs for some in tokens(samples))


def test_rows_without_a_sample_are_not_planned_whatever_the_shuffle_says(reader):
    found = []
    for shuffle in ("full", RowShuffle(), KEPT):
        with reader(SOFT, shuffle=shuffle) as data:
            found.append(tokens(data.epoch(0)))

    assert found[0] == found[1] == found[2]
    assert all(found[0])


def test_xtuners_packs_are_those_of_every_epoch_and_each_file_is_a_data_set(reader, jsonl_file):
    files = [jsonl_file(rows_of(size, first), f"{first}.jsonl") for first, size in ((0, 60), (60, 90))]
    plan = Plan(packing=XTunerPacking(max_length=MAX_LENGTH, seed=5, join_datasets=False))
    with reader(plan, path=files) as data:
        packs = [packs_of(data.epoch(number), data.windows.plan(number)) for number in range(2)]

    lengths = [np.array([row["n"] for row in rows_of(*some) if row["n"]]) for some in ((60, 0), (90, 60))]
    theirs = plan.packing.plan(lengths)
    kept = [row for row in rows_of() if row["n"]]
    wanted = sorted([tokens_of(kept[row]) for row, _, _ in theirs.pack(number)] for number in range(theirs.num_packs))
    assert sorted(packs[0]) == sorted(packs[1]) == wanted
    assert packs[0] != packs[1]


def packs_of(samples: list[Sample], epoch: PlannedEpoch) -> list[list[list[int]]]:
    offsets = epoch.offsets.tolist()
    return [tokens(samples[first:stop]) for first, stop in pairwise(offsets)]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [XTUNER, CUT, SOFT], ids=["xtuner", "cut", "soft"])
def test_a_restart_at_any_row_goes_on_as_the_first_run_did(reader, plan):
    with reader(plan) as data:
        whole = [tokens(data.epoch(number)) for number in range(2)]
        last = tokens(data.take(9))

    for row in range(0, len(whole[1]) + 1, 11):
        with reader(plan, at=(1, row), buffer_size=7) as data:
            assert tokens(data.epoch(1)) == whole[1][row:]
            assert tokens(data.take(9)) == last


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [None, XTUNER, CUT], ids=["rows", "xtuner", "cut"])
def test_windows_join_without_a_seam_for_every_rank(reader, plan, monkeypatch):
    with reader(plan) as data:
        whole = [data.epoch(0), data.epoch(1)]

    for module in (
        "asyncdata.order.order",
        "asyncdata.prefetch.windows.indexed_windows",
        "asyncdata.order.rank_share",
        "tests.support.reading",
    ):
        monkeypatch.setattr(f"{module}.ROWS_PER_WINDOW", 40)
    ranks = []
    for rank in range(2):
        with reader(plan, share=Share(rank=rank, world_size=2), at=(0, 70)) as data:
            ranks.append([data.epoch(0), data.epoch(1)])
            assert data.place == (2, 0)
    assert together([some[0] for some in ranks]) == tokens(whole[0][70:])
    assert together([some[1] for some in ranks]) == tokens(whole[1])


# Shares.


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("plan", [None, XTUNER, CUT, SOFT], ids=["rows", "xtuner", "cut", "soft"])
def test_all_ranks_together_have_d_and_agree_on_every_place(reader, plan, world_size):
    with reader(plan) as data:
        whole = [data.epoch(0), data.epoch(1)]
        counters = data.coordinator.ledger.counters
        planned = [data.windows.plan(epoch) for epoch in range(2)]

    ranks = []
    for rank in range(world_size):
        with reader(plan, share=Share(rank=rank, world_size=world_size)) as data:
            ranks.append([data.epoch(0), data.epoch(1)])
            assert data.coordinator.ledger.counters == counters, "the same in every rank"

    for epoch, samples in enumerate(whole):
        assert together([some[epoch] for some in ranks]) == tokens(samples)
        for some in ranks:
            places = [(sample.position, sample.index, sample.group_index) for sample in some[epoch]]
            assert places == [(sample.position, sample.index, sample.group_index) for sample in samples]
            assert [sample.source for sample in some[epoch]] == [sample.source for sample in samples]
        units = range(len(samples)) if plan is None else planned[epoch].packs_at(0, len(samples)).tolist()
        for rank, some in enumerate(ranks):
            assert is_own(some[epoch]) == owned_by(rank, world_size, units, units[-1] + 1)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [None, XTUNER, CUT], ids=["rows", "xtuner", "cut"])
@pytest.mark.parametrize(("row", "before", "after"), [(1, 2, 3), (37, 3, 2), (64, 8, 1), (100, 1, 8)])
def test_a_restart_with_other_ranks_misses_nothing_and_repeats_nothing(reader, plan, row, before, after):
    with reader(plan) as data:
        whole = [data.epoch(0), data.epoch(1)]

    first, rest, following = [], [], []
    for rank in range(before):
        with reader(plan, share=Share(rank=rank, world_size=before)) as data:
            first.append(data.take(row))
            place = data.place
    for rank in range(after):
        with reader(plan, share=Share(rank=rank, world_size=after), at=place) as data:
            rest.append(data.epoch(0))
            following.append(data.epoch(1))

    assert together(first) + together(rest) == tokens(whole[0])
    assert together(following) == tokens(whole[1])
    if plan is None:
        for parts, why in ((rest, "from where the run continues"), (following, "and from every later epoch's start")):
            places = range(len(parts[0]))
            owned = [owned_by(rank, after, places, len(places)) for rank in range(after)]
            assert [is_own(some) for some in parts] == owned, why


class Counting:
    """Counts how often each row is tokenized."""

    version = 1

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, row: DataOf) -> Any:
        self.ids.append(row["id"])
        return numbered(row)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [None, XTUNER, CUT], ids=["rows", "xtuner", "cut"])
def test_a_rank_tokenizes_its_own_rows_and_no_others_once_the_index_is_made(reader, plan):
    with reader(plan, function=Counting(), epochs=1) as data:
        data.epoch(0)

    for rank in range(3):
        function = Counting()
        with reader(plan, function=function, share=Share(rank=rank, world_size=3), epochs=1) as data:
            own = [some[0] // 1000 for some in tokens(data.epoch(0)) if some]
        canary = 0  # the data's first row
        assert sorted(function.ids) == sorted([*own, canary])


# What goes wrong.


@pytest.fixture
def gated(jsonl_file, tmp_path) -> tuple[Path, Path]:
    """Rows, of which row 50 does something else once the second file is there."""
    gate = tmp_path / "gate"
    rows = rows_of()
    rows[50]["gate"] = str(gate)
    return jsonl_file(rows, "gated.jsonl"), gate


@pytest.mark.parametrize("plan", [None, XTUNER], ids=["rows", "xtuner"])
def test_a_row_that_has_other_tokens_than_were_counted_is_bad(reader, gated, plan):
    path, gate = gated
    with reader(plan, path=path, function=with_one_more, epochs=1) as data:
        whole = data.epoch(0)
    gate.touch()
    place = [some[0] // 1000 for some in tokens(whole)].index(50)

    ranks = []
    for rank in range(2):
        share = Share(rank=rank, world_size=2)
        with reader(plan, path=path, function=with_one_more, share=share, bad_rows="skip", epochs=1) as data:
            ranks.append(data.epoch(0))
            bad_rows = [(error.code, error.line) for error in data.bad_rows]
            counters = data.coordinator.ledger.counters
        is_there = [sample.index for sample in ranks[-1]] == list(range(len(whole)))
        assert is_there, "places stay what they are"
        assert bad_rows == [("AD424", 51)] * counters.num_bad_rows
    assert [bool(some[place].tokens.size) for some in ranks] == [False, False]
    left = [[sample for number, sample in enumerate(some) if number != place] for some in ranks]
    assert together(left) == tokens([sample for number, sample in enumerate(whole) if number != place])

    messages = []
    for rank in range(2):
        with reader(plan, path=path, function=with_one_more, share=Share(rank=rank, world_size=2), epochs=1) as data:
            try:
                data.epoch(0)
            except BadRowError as error:
                messages.append(str(error))
    assert len(messages) == 1, "the rank whose row it is stops"
    assert "AD424" in messages[0]
    assert "has 11 tokens, and had 10 when" in messages[0]
    assert "does not do the same each time" in messages[0]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [None, XTUNER], ids=["rows", "xtuner"])
def test_a_row_that_kills_workers_is_left_out_by_the_rank_whose_it_is(reader, gated, plan):
    path, gate = gated
    with reader(plan, path=path, function=kills, epochs=1) as data:
        whole = data.epoch(0)
    gate.touch()

    found: dict[Any, list[int]] = {}
    codes = []
    for rank in range(2):
        knobs: DataOf = {"share": Share(rank=rank, world_size=2), "bad_rows": "skip", "num_workers": 1, "epochs": 1}
        with reader(plan, path=path, function=kills, **knobs) as data:
            samples = data.epoch(0)
            codes += [(error.code, error.line) for error in data.bad_rows]
        for sample in samples:
            if len(sample.tokens):
                assert found.setdefault(sample.position, sample.tokens.tolist()) == sample.tokens.tolist()

    assert codes == [("AD423", 51)]
    wanted = {sample.position: sample.tokens.tolist() for sample in whole}
    assert found == {place: some for place, some in wanted.items() if some[0] // 1000 != 50}


# How packs are dealt.


def test_an_epoch_that_was_begun_goes_on_in_its_order_with_other_ranks(reader):
    begun = Plan(**{**fields(SOFT), "world_size": 4})
    now = Plan(**{**fields(SOFT), "world_size": 2, "accumulation": 3})
    with reader(begun) as data:
        whole = tokens(data.epoch(0))
    with reader(now) as data:
        other = [tokens(data.epoch(0)), tokens(data.epoch(1))]
        assert other[0] != whole
    with reader(begun) as data:
        first = tokens(data.take(20))
        place, dealt = data.place, data.windows.dealt_at(data.coordinator.ledger.position)

    assert dealt == (4, 1)
    with reader(now, at=place, dealt=tuple(dealt)) as data:
        assert first + tokens(data.take(20)) == whole[:40]
        assert data.windows.dealt_at(data.coordinator.ledger.position) == (4, 1), "a snapshot of this run says so too"
        data.epoch(0)
        assert data.windows.dealt_at(data.coordinator.ledger.position) is None, "nothing of it is begun"
        assert tokens(data.epoch(1)) == other[1]


def fields(plan: Plan) -> DataOf:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def test_packs_that_are_not_grouped_depend_on_no_rank(reader):
    with reader(XTUNER) as data:
        data.take(20)
        assert data.windows.dealt_at(data.coordinator.ledger.position) is None


# The index.


def test_an_index_without_tokens_is_made_anew(reader, tmp_path):
    function = Counting()
    with reader(XTUNER, function=function, epochs=1) as data:
        wanted = tokens(data.epoch(0))
    (file,) = (tmp_path / "cache" / "index").glob("*.index")
    kept = IndexFile(str(file.parent), file.stem)
    parts = list(kept.parts())
    kept.close()
    assert sum(len(part.num_tokens) for part in parts) == 4 * NUM_ROWS
    file.unlink()
    old = IndexFile(str(file.parent), file.stem)
    for part in parts:
        old.append(Indexed(part.counts, part.offsets, part.lengths, part.marks, part.num_blank, part.drops))
    old.close()

    for num_made in (NUM_ROWS, 0):
        function.ids.clear()
        with reader(XTUNER, function=function, epochs=1) as data:
            assert tokens(data.epoch(0)) == wanted
        assert len(function.ids) == num_made + len(wanted) + 1, "and then kept"


def test_a_copy_that_was_gone_is_found_again_by_the_run_after_the_next(tmp_path):
    """What takes the place of a part of no use in the index file is not read as another part after it."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of()), path, row_group_size=20)
    for _ in range(3):
        with Reader(path, numbered, plan=XTUNER, cache={"folder": str(tmp_path / "cache")}, epochs=1) as data:
            data.epoch(0)
            assert data.reading.index is not None
            assert data.reading.index.num_found == NUM_ROWS
        for copy in list((tmp_path / "cache" / "index").glob("*.rows/*.rows"))[:1]:
            copy.unlink()


def test_a_function_without_a_version_can_be_planned_and_is_not_kept(reader, tmp_path):
    with reader(XTUNER, function=lambda row: tokens_of(row) or None) as data:
        assert data.epoch(0)

    assert not list((tmp_path / "cache").rglob("*.index"))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_rows_that_other_ranks_tokenize_do_not_count_as_tokenized(path, tmp_path, num_workers):
    packing = XTunerPacking(max_length=MAX_LENGTH, seed=5)
    settings = {"num_workers": num_workers, "batch_size": 1, "epochs": 1, "cache": {"folder": str(tmp_path / "cache")}}
    counts = []
    for rank in range(2):
        ranks = Ranks(rank=rank, world_size=2, round_up=False)
        with DataLoader(path, tokenize_fn=numbered, packing=packing, ranks=ranks, **settings) as loader:
            own = sum(len(pack) for batch in loader for pack in batch)
            counts.append((loader.statistics().tokenized_rows_total, own))

    assert [tokenized for tokenized, _ in counts] == [own for _, own in counts]
    assert all(0 < own < NUM_ROWS // 2 + MAX_LENGTH for _, own in counts)


# What cannot be planned.


def test_rows_that_do_not_fill_a_pack_are_an_error_that_says_so(reader):
    plan = Plan(packing=HardPacking(max_length=100_000, across_epochs=False))
    with reader(plan) as data, pytest.raises(ConfigError, match=r"AD453 all 141 samples together have \d+ tokens"):
        data.epoch(0)


def test_data_without_a_sample_says_what_became_of_its_rows(reader, jsonl_file):
    path = jsonl_file([{"id": 1, "n": 0}])
    with (
        reader(XTUNER, path=path) as data,
        pytest.raises(NoSamplesError, match="AD401 1 rows read, 0 kept: 1 by empty"),
    ):
        data.epoch(0)


def test_a_row_longer_than_a_pack_is_an_error_at_its_epoch(reader):
    plan = Plan(packing=SoftPacking(max_length=10, across_epochs=False))
    with reader(plan) as data, pytest.raises(ConfigError, match="AD450 sample"):
        data.epoch(0)


@pytest.mark.parametrize(
    ("plan", "knobs", "message"),
    [
        (SOFT, {"shuffle": True}, 'AD453 .*shuffle=True is not: use shuffle="full"'),
        (XTUNER, {"shuffle": RowShuffle(method="slime")}, "AD453 XTunerPacking has an order of rows of its own"),
        (XTUNER, {"shuffle": False}, "AD453 XTunerPacking has an order of rows of its own"),
        (None, {"share": Share(rank=0, world_size=2), "shuffle": "full"}, "AD453 a rank can leave rows to others only"),
        (None, {"share": Share(rank=0, world_size=2), "shuffle": True}, "AD453 a rank can leave rows to others only"),
    ],
)
def test_what_does_not_go_together_says_what_does(reader, plan, knobs, message):
    with pytest.raises(ConfigError, match=message):
        reader(plan, **knobs)


def test_a_stream_cannot_be_planned(reader, tmp_path):
    import gzip

    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "n": 1}\n'))

    with pytest.raises(ConfigError, match="AD453 .*rows.jsonl.gz can only be read from front to back.*SoftPacking"):
        reader(XTUNER, path=path)


def test_some_of_the_rows_are_planned_as_a_slice(reader):
    with reader(XTUNER, shuffle=RowShuffle(method="none", first=10, stop=50)) as data:
        found = {some[0] // 1000 for some in tokens(data.epoch(0))}

    assert found == {row["id"] for row in rows_of()[10:50] if row["n"]}
