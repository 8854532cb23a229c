"""Two runs that saw the same stream have one digest, however they ran; `asyncdata verify` says so, or what differs."""

import json
import zlib
from itertools import islice

import msgspec
import pytest

from asyncdata import DataLoader, HardPacking, LengthGrouping, Position, Ranks, RowShuffle, SoftPacking
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.verifying import compare
from asyncdata.xtuner import XTunerPacking
from tests.support.loading import SHUFFLE, write_rows
from tests.support.model_order import GOLDEN, MASK, mixed
from tests.support.parts import main
from tests.support.tokenize_fns import every_third_dropped, id_and_text, in_batches, row_id

NUM_ROWS = 100
NUM_SAMPLES = 156  # into the second epoch
SOFT = SoftPacking(max_length=128, across_epochs=False)


def make(path, tokenize_fn=id_and_text, **knobs):
    base = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240, "digest": "tokens"}
    return DataLoader(str(path), tokenize_fn=tokenize_fn, **base | knobs)


@pytest.fixture
def wanted(path):
    """The digest of a run of 156 samples."""
    with make(path) as loader:
        return expected(loader.get_next_batch(NUM_SAMPLES))


def digest(loader):
    return json.loads(json.dumps(loader.state_dict()))["counters"]["digest"]


def expected(samples):
    """The digest of samples, in the simplest words: one after the other, in Python's own numbers."""
    positions = order = tokens = 0
    for sample in samples:
        epoch, window, row = msgspec.structs.astuple(sample.position)
        place = mixed(mixed(mixed(epoch + 1) + window & MASK) + row * GOLDEN & MASK)
        positions += place
        order += positions
        tokens += (place | 1) * (len(sample.tokens) * GOLDEN + zlib.crc32(sample.tokens.astype("<i4").tobytes()))
    sums = {"positions": positions & MASK, "order": order & MASK, "tokens": tokens & MASK}
    return {"of": "tokens", "num_samples": len(samples), **sums}


@pytest.mark.parametrize("tokenize_fn", [id_and_text, every_third_dropped])
def test_a_digest_is_of_what_was_delivered_and_not_of_what_is_read_ahead_or_dropped(path, tokenize_fn):
    with make(path, tokenize_fn, buffer_size=50) as loader:
        samples = []
        for size in (1, 5, 30, 64, 7):
            samples += loader.get_next_batch(size)
            assert digest(loader) == expected(samples) == digest(loader)


@pytest.mark.parametrize("num_batches", [1, 5])
def test_a_run_that_packs_goes_on_with_its_digest_from_its_first_window_of_packs(path, num_batches):
    knobs = {"packing": HardPacking(max_length=48), "batch_size": 2}
    with make(path, **knobs) as loader:
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        next(batches)
        wanted = digest(loader)
    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        assert digest(loader) == wanted
    assert wanted["of"] == "tokens"


def test_a_delivery_that_its_caller_never_had_is_not_in_the_digest(path):
    def interrupted(_):
        raise KeyboardInterrupt

    with make(path, batch_size=8, collate_fn=interrupted) as loader:
        loader.get_next_batch(8)
        before = digest(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert digest(loader) == before


def test_what_is_not_acknowledged_is_not_in_the_digest_and_a_group_given_back_is_there_once(path, wanted):
    with make(path, commit="on_ack", n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(40)
        loader.add_samples(groups[5:7])
        loader.ack(groups[:5])
        assert digest(loader) == expected([])
        loader.ack(groups)
        assert digest(loader)["num_samples"] == 40
        again = loader.get_samples(2)
        assert [group[0].group_index for group in again] == [5, 6]
        loader.get_samples(NUM_SAMPLES - 40)
        loader.ack()
        assert digest(loader) == wanted


def test_each_of_many_ranks_has_the_digest_of_all_their_samples(path):
    with make(path) as loader:
        wanted = expected(loader.get_next_batch(NUM_ROWS))
    for rank in (0, 1):
        with make(path, ranks=Ranks(world_size=2, rank=rank), batch_size=5) as loader:
            assert len([sample for batch in loader for sample in batch]) == 50
            assert digest(loader) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("packing", "shuffle"),
    [(SOFT, RowShuffle()), (XTunerPacking(max_length=128, seed=5), True)],
    ids=["soft", "xtuner"],
)
def test_ranks_that_tokenize_only_their_own_share_have_one_digest(path, packing, shuffle):
    found = []
    knobs = {"packing": packing, "shuffle": shuffle, "plan_packs": True, "digest": "positions"}
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        ranks = {"world_size": world_size, "rank": rank}
        with make(path, ranks=ranks, batch_size=2 // world_size, **knobs) as loader:
            assert len(list(islice(loader, 5))) == 5
            found.append(digest(loader))
    assert found[0] == found[1] == found[2]
    assert found[0]["num_samples"] > 0


def test_tokens_that_were_not_hashed_from_the_beginning_are_unknown_for_ever(path):
    with make(path, digest="positions") as loader:
        loader.get_next_batch(5)
        state = loader.state_dict()
    with make(path) as loader:
        loader.load_state_dict(state)
        loader.get_next_batch(5)
        assert (digest(loader)["num_samples"], digest(loader)["tokens"]) == (10, None)


def test_tokens_that_another_rank_has_cannot_be_hashed(path):
    with pytest.raises(ConfigError, match='digest="tokens" needs every rank'):
        make(path, packing=SOFT, shuffle=RowShuffle(), plan_packs=True, batch_size=1)


def test_where_packs_are_made_as_samples_come_the_digest_is_of_the_order_before_the_snapshots_position(path):
    with make(path) as loader:
        samples = loader.get_next_batch(3 * NUM_ROWS)
    packs = {"packing": SoftPacking(max_length=256), "length_grouping": LengthGrouping(window=4)}
    with make(path, batch_size=1, **packs) as loader:
        for _ in islice(loader, 30):
            state = loader.state_dict()
            before = [sample for sample in samples if sample.position < Position(*state["position"])]
            assert state["counters"]["digest"] == expected(before)


@pytest.fixture
def saved(path, tmp_path):
    """A function that saves the snapshot of a run that took so many samples."""
    names = (tmp_path / f"{number}.snapshot" for number in range(10))

    def save(num_samples=50, tokenize_fn=id_and_text, source=path, **knobs):
        name = next(names)
        with make(source, tokenize_fn, **knobs) as loader:
            loader.get_next_batch(num_samples)
            loader.save(name)
        return name

    return save


@pytest.fixture
def verify(capsys):
    """A function that compares two runs by their snapshots: the verdict, the reasons, and the names of what differs."""

    def said(*snapshots):
        status = main(["verify", "--json", *map(str, snapshots)])
        found = json.loads(capsys.readouterr().out)
        assert status == {"same": 0, "different": 3, "undecided": 4}[found["verdict"]]
        return found

    def compared(first, second):
        found, other_way = said(first, second), said(second, first)
        assert found["verdict"] == other_way["verdict"]
        assert found["num_ahead"] == -other_way["num_ahead"]
        return found["verdict"], "; ".join(found["reasons"]), set(found["changes"])

    return compared


OTHER_SEED = "their positions are of other orders: seed differ"
ORDER = {"order.enabled", "order.block_bytes", "order.window_blocks"}
FEW = {"num_samples": 20, "tokenize_fn": row_id, "digest": "positions"}
PAIRS = [
    pytest.param({}, {"buffer_size": 7}, "same", "token for token", set(), id="other knobs"),
    pytest.param({}, {"seed": 43}, "different", OTHER_SEED, {"seed"}, id="another seed"),
    pytest.param(
        {},
        {"shuffle": False},
        "different",
        "their positions are of other orders: order differ",
        ORDER,
        id="another order",
    ),
    pytest.param(
        {}, {"tokenize_fn": row_id}, "different", "they saw other tokens", {"tokenize_fn"}, id="another function"
    ),
    pytest.param({}, {"digest": "positions"}, "same", "their tokens were not hashed alike", set(), id="one unhashed"),
    pytest.param(
        {}, {"tokenize_fn": every_third_dropped}, "different", "they saw other positions", {"tokenize_fn"}, id="a drop"
    ),
    pytest.param({}, {"num_samples": 61}, "undecided", "all settings and fingerprints agree", set(), id="one is ahead"),
    pytest.param({}, {"num_samples": 61, "seed": 1}, "undecided", OTHER_SEED, {"seed"}, id="ahead, of another order"),
    pytest.param(
        {},
        {"num_samples": 61, "tokenize_fn": in_batches},
        "undecided",
        "let the first run deliver 11 samples more",
        {"tokenize_fn"},
        id="ahead, of other tokens",
    ),
    pytest.param(FEW, FEW | {"seed": 1}, "undecided", OTHER_SEED, {"seed"}, id="the same positions of another order"),
    pytest.param(
        {"shuffle": False}, {"shuffle": False, "seed": 1}, "same", "token for token", {"seed"}, id="whatever the seed"
    ),
]


@pytest.mark.parametrize(("first", "second", "verdict", "reason", "changes"), PAIRS)
def test_two_runs_are_compared_and_what_differs_is_named(saved, verify, first, second, verdict, reason, changes):
    found, reasons, differing = verify(saved(**first), saved(**second))
    assert (found, differing) == (verdict, changes)
    assert reason in reasons
    assert ("so both follow one order" in reasons) == (reason == "all settings and fingerprints agree")


def test_data_of_other_content_is_another_stream(saved, verify, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS)
    other.write_text(other.read_text().replace("xx", "xy"))
    verdict, reasons, changes = verify(saved(), saved(source=other))
    assert (verdict, changes) == ("different", {"data"})
    assert "they saw other tokens; their positions are of other orders: data differ" in reasons
    verdict, reasons, changes = verify(saved(digest="positions"), saved(source=other, digest="positions"))
    assert (verdict, changes) == ("undecided", {"data"})
    assert "which rows these were was not hashed" in reasons


@pytest.mark.parametrize("change", [lambda digest: None, lambda digest: {**digest, "first": 7}])
def test_a_snapshot_without_a_digest_of_the_whole_run_is_refused(path, saved, change):
    """Development builds wrote such ones."""
    found = snapshots.load(saved())
    old = msgspec.structs.replace(found, counters={**found.counters, "digest": change(found.counters["digest"])})
    with pytest.raises(SnapshotError, match="AD602 this snapshot has no digest of the whole run: a development build"):
        compare(old, found)
    with make(path) as loader, pytest.raises(SnapshotError, match="AD602 this snapshot has no digest of the whole run"):
        loader.load_state_dict(snapshots.to_state_dict(old))


def test_a_digest_that_is_none_is_refused(saved):
    found = snapshots.load(saved(5))
    crafted = msgspec.structs.replace(found, counters={"digest": {"num_samples": "many"}})
    with pytest.raises(SnapshotError, match="AD602 the digest"):
        compare(crafted, found)
