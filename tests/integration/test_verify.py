"""Runs and their digests; and a snapshot that meets other data: what is left out is said, and the same rows go on."""

import json
import zlib
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from asyncdata import HardPacking, IterableSource, JsonlSource, LengthGrouping, RowShuffle, Shuffle, SoftPacking
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError
from asyncdata.verifying import compare
from asyncdata.xtuner import XTunerPacking
from tests.support import loaders
from tests.support.loaders import make as make_loader
from tests.support.loading import every_third_dropped, id_and_text, ids, in_batches, row_id, write_rows
from tests.support.model_order import GOLDEN, MASK, mixed
from tests.support.parts import main

NUM_ROWS = 100
NUM_SAMPLES = 156  # into the second epoch
SOFT = SoftPacking(max_length=128, across_epochs=False)


def make(path, tokenize_fn=id_and_text, **knobs):
    return make_loader(path, tokenize_fn, **{"digest": "tokens"} | knobs)


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
        with make(path, ranks={"world_size": 2, "rank": rank}, batch_size=5) as loader:
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
            position = type(samples[0].position)(*state["position"])
            before = [sample for sample in samples if sample.position < position]
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


OTHER_SEED, OTHER_ORDER = (f"their positions are of other orders: {what} differ" for what in ("seed", "order"))
ORDER = {"order.enabled", "order.block_bytes", "order.window_blocks"}
FEW = {"num_samples": 20, "tokenize_fn": row_id, "digest": "positions"}
AHEAD = {"num_samples": 61, "tokenize_fn": in_batches}
PAIRS = [
    pytest.param({}, {"buffer_size": 7}, "same", "token for token", set(), id="other knobs"),
    pytest.param({}, {"seed": 43}, "different", OTHER_SEED, {"seed"}, id="another seed"),
    pytest.param({}, {"shuffle": False}, "different", OTHER_ORDER, ORDER, id="another order"),
    pytest.param({}, {"tokenize_fn": row_id}, "different", "they saw other tokens", {"tokenize_fn"}, id="a function"),
    pytest.param({}, {"digest": "positions"}, "same", "their tokens were not hashed alike", set(), id="one unhashed"),
    pytest.param(
        {}, {"tokenize_fn": every_third_dropped}, "different", "they saw other positions", {"tokenize_fn"}, id="a drop"
    ),
    pytest.param({}, {"num_samples": 61}, "undecided", "all settings and fingerprints agree", set(), id="one is ahead"),
    pytest.param({}, {"num_samples": 61, "seed": 1}, "undecided", OTHER_SEED, {"seed"}, id="ahead, of another order"),
    pytest.param(
        {}, AHEAD, "undecided", "let the first run deliver 11 samples more", {"tokenize_fn"}, id="ahead, other tokens"
    ),
    pytest.param(FEW, FEW | {"seed": 1}, "undecided", OTHER_SEED, {"seed"}, id="the same positions of another order"),
    pytest.param({"shuffle": False}, {"shuffle": False, "seed": 1}, "same", "token for token", {"seed"}, id="any seed"),
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


ONE_WINDOW = Shuffle()
MANY_WINDOWS = Shuffle(block_bytes=300, window_blocks=3)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "other.jsonl", 120)


opened = partial(make_loader, shuffle=True)
state_after = partial(loaders.state_after, shuffle=True)


def left_out(source: Any, state: dict[str, Any], allowed: str = "data", **knobs: Any) -> list[dict[str, Any]]:
    with capture_logs() as events, opened(source, **knobs) as loader:
        loader.load_state_dict(state, allow_changed={allowed})
        assert loader.epoch == 1
    return [event for event in events if event["event"] == "snapshot.rows_left_out"]


@pytest.mark.parametrize("shuffle", [ONE_WINDOW, "full", False, RowShuffle(method="slime", only_kept=True)], ids=str)
def test_other_data_or_another_seed_in_the_middle_of_an_epoch_warns_with_the_number_left_out(path, other, shuffle):
    state = state_after(path, 10, shuffle=shuffle)
    expected = {"event": "snapshot.rows_left_out", "log_level": "warning", "epoch": 0}
    expected |= {"num_delivered": 10, "num_left_out": 90}
    assert left_out(other, state, shuffle=shuffle) == [expected | {"changed": ["data"]}]
    if shuffle is not False:
        assert left_out(path, state, "seed", shuffle=shuffle, seed=7) == [expected | {"changed": ["seed"]}]


@pytest.mark.parametrize("number", [1, 50, 99])
def test_with_many_windows_the_number_is_of_the_right_size(path, other, number):
    # A loader knows only the sizes of the windows that it read last. With a large buffer, the current one is older.
    state = state_after(path, number, shuffle=MANY_WINDOWS, buffer_size=8)
    (event,) = left_out(other, state, shuffle=MANY_WINDOWS, buffer_size=8)
    assert event["num_delivered"] == number
    assert abs(event["num_left_out"] - (NUM_ROWS - number)) <= 30  # windows of equal bytes have about as many rows


def test_what_is_left_out_is_known_after_a_resume_that_delivered_nothing_and_unknown_to_an_older_version(path, other):
    state = state_after(path, 10)
    with opened(path) as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()
    assert again == {**state, "canaries": again["canaries"]}
    assert [event["num_left_out"] for event in left_out(other, again)] == [90]
    del state["rows_left"]
    assert [event["num_left_out"] for event in left_out(other, state)] == [None]


@pytest.mark.parametrize(("number", "epoch"), [(2 * NUM_ROWS, 2), (2 * NUM_ROWS + 1, 3)])
def test_with_other_data_no_epoch_comes_again_for_a_group_that_was_out(path, other, number, epoch):
    with opened(path, commit="on_ack", n_samples_per_prompt=1) as loader:
        loader.ack(loader.get_samples(number)[1:])
        state = loader.state_dict()
    with capture_logs() as events, opened(other, commit="on_ack") as loader:
        loader.load_state_dict(state, allow_changed={"data"})
        assert loader.epoch == epoch
    (event,) = [event for event in events if event["event"] == "snapshot.rows_left_out"]
    assert (event["epoch"], event["num_delivered"], event["num_left_out"]) == (2, None, None)


def test_rows_that_gave_no_sample_and_an_epoch_that_had_not_begun_are_not_left_out(path, other):
    knobs: dict[str, Any] = {"tokenize_fn": every_third_dropped, "shuffle": False}
    (event,) = left_out(other, state_after(path, 20, **knobs), **knobs)
    assert event["num_delivered"] == 20
    assert NUM_ROWS - event["num_left_out"] in {29, 30, 31}  # a dropped row may lie between two samples
    state = state_after(path, NUM_ROWS)
    with opened(other) as loader:
        order = loader.state_dict()["order"]
    assert left_out(other, {**state, "order": order}) == []


def test_packs_are_counted_as_such_and_their_rows_are_not_known(path, other):
    knobs: dict[str, Any] = {"packing": HardPacking(max_length=4), "batch_size": 1}
    with opened(path, **knobs) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    (event,) = left_out(other, state, **knobs)
    assert (event["epoch"], event["num_delivered"], event["num_left_out"]) == (0, 5, None)


def test_the_refusal_of_a_renamed_file_names_the_way_to_stay_and_other_changes_are_refused(path, other, tmp_path):
    state = state_after(path, 10)
    first, second = other.read_bytes()[:1000], other.read_bytes()[1000:]
    (tmp_path / "1.jsonl").write_bytes(first)
    (tmp_path / "2.jsonl").write_bytes(second)
    both = state_after(JsonlSource([tmp_path / "1.jsonl", tmp_path / "2.jsonl"]), 10)
    renamed = path.rename(tmp_path / "renamed.jsonl")
    with opened(other) as loader, pytest.raises(SnapshotMismatchError) as of_others:
        loader.load_state_dict(state)
    with opened(renamed) as loader, pytest.raises(SnapshotMismatchError, match="same_rows=True") as of_renamed:
        loader.load_state_dict(state)
    with opened(renamed, seed=7) as loader, pytest.raises(SnapshotMismatchError) as of_seed:
        loader.load_state_dict(state, same_rows=True)
    with opened(other) as loader, pytest.raises(SnapshotMismatchError, match="2 -> 1 files"):  # put together
        loader.load_state_dict(both, same_rows=True)
    renamed.write_bytes(renamed.read_bytes().replace(b'"id": 55', b'"id": 99'))
    with opened(renamed) as loader, pytest.raises(SnapshotMismatchError, match="other content"):
        loader.load_state_dict(state, same_rows=True)

    assert "same_rows" not in str(of_others.value)
    assert "renamed.jsonl is new" in str(of_renamed.value)
    assert set(of_seed.value.differences) == {"seed"}


def test_files_under_new_names_are_the_same_rows_only_in_the_same_order(tmp_path):
    first, second = write_rows(tmp_path / "a.jsonl", 30), write_rows(tmp_path / "b.jsonl", 40)
    state = state_after(JsonlSource([first, second]), 10, shuffle=False)
    first, second = first.rename(tmp_path / "2.jsonl"), second.rename(tmp_path / "1.jsonl")
    with opened(JsonlSource([second, first]), shuffle=False) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"file 1"):
            loader.load_state_dict(state, same_rows=True)
    with opened(JsonlSource([first, second]), shuffle=False) as loader:
        loader.load_state_dict(state, same_rows=True)
        assert ids(loader.get_next_batch(3)) == [10, 11, 12]


@pytest.mark.parametrize("new", ["renamed.jsonl", "moved/rows.jsonl"])
def test_groups_that_were_given_back_or_out_are_of_the_rows_of_the_files_as_they_are_now(path, tmp_path, new):
    settings = {"outcomes": {"policy": {"drop_above": 0.9}}, "commit": "on_ack"}
    with opened(path, **settings) as loader:
        loader.add_samples(loader.get_samples(4))
        loader.get_samples(1)
        state = loader.state_dict()
    (tmp_path / new).parent.mkdir(exist_ok=True)
    path = path.rename(tmp_path / new)
    for _ in range(2):  # also of groups that nothing has asked for since
        with opened(path, **settings) as loader:
            loader.load_state_dict(state, same_rows=True)
            state = loader.state_dict()
    with opened(path, **settings) as loader:
        loader.load_state_dict(state)
        first, second = loader.get_samples(2)
        assert loader.report([first, second], [1.0, 1.0]) == 2
        assert {sample.source.path for sample in (*first, *second)} == {str(path)}
        assert loader.exclude({"path": str(path), "byte_offset": sample.source.byte_offset} for sample in second) == 1
        loader.add_samples([second])
        assert loader.statistics().dropped_groups_total == {"excluded": 1}


def rows(epoch: int) -> Any:
    return ({"id": number} for number in range(50))


def other_rows(epoch: int) -> Any:
    return rows(epoch)


def test_data_that_is_not_known_by_its_content_cannot_be_said_to_be_the_same():
    state = state_after(IterableSource(rows), 10)
    with opened(IterableSource(other_rows)) as loader:
        with pytest.raises(SnapshotMismatchError, match="not known by its content"):
            loader.load_state_dict(state, same_rows=True)


def test_the_command_line_takes_it(path, tmp_path, capsys):
    def run(source: Path, *options: str) -> int:
        fn = "tests.support.loading:row_id"
        snapshot = str(tmp_path / "run.snapshot")
        return main(["run", str(source), "--tokenize-fn", fn, "--batch-size", "10", "--num-workers", "0",
                     "--snapshot", snapshot, "--progress", "none", *options])  # fmt: skip

    assert run(path, "--num-batches", "3") == 0
    renamed = path.rename(tmp_path / "renamed.jsonl")
    assert run(renamed, "--num-batches", "5", "--resume") != 0
    assert "--same-rows" in capsys.readouterr().err
    assert run(renamed, "--num-batches", "5", "--resume", "--same-rows") == 0
    assert snapshots.load(tmp_path / "run.snapshot").counters["epoch_groups"] == 50
