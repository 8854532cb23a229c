"""Two runs that saw the same stream have one digest, however they ran; `asyncdata verify` says so, or what differs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    Cache,
    ConfigError,
    DataLoader,
    LengthGrouping,
    Ranks,
    RowShuffle,
    SnapshotError,
    SoftPacking,
    XTunerPacking,
)
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.compare_runs import Verdict, compare
from asyncdata.checkpoint.snapshot import Snapshot, from_state_dict
from asyncdata.cli.main import main
from tests.support import digests_fn
from tests.support.combinations import each_value
from tests.support.digests import Seen, digest_of
from tests.support.loading import SHUFFLE, write_rows
from tests.support.tokenize_fns import every_third_dropped, id_and_text, in_batches, row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import Sample
    from asyncdata.delivery.stream_digest import StreamDigest

NUM_ROWS = 100
NUM_SAMPLES = 156  # into the second epoch


def make(path: Path | str, tokenize_fn: Any = id_and_text, **knobs: Any) -> DataLoader:
    base = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240, "digest": "tokens"}
    return DataLoader(str(path), tokenize_fn=tokenize_fn, **base | knobs)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def seen(samples: list[Sample]) -> list[Seen]:
    return [Seen((p.epoch, p.window, p.row), s.tokens.tolist()) for s in samples if (p := s.position) is not None]


def digest(loader: DataLoader) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))["counters"]["digest"]
    return found


def as_dict(wanted: StreamDigest) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in wanted.__struct_fields__}


def in_pieces(path: Path, sizes: list[int], **knobs: Any) -> dict[str, Any]:
    """The digest after batches of these sizes, taken by one run."""
    with make(path, **knobs) as loader:
        for size in sizes:
            loader.get_next_batch(size)
        return digest(loader)


@pytest.fixture
def wanted(path) -> dict[str, Any]:
    with make(path) as loader:
        return as_dict(digest_of(seen(loader.get_next_batch(NUM_SAMPLES)), "tokens"))


KNOBS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"buffer_size": 3},
    {"buffer_size": 7, "dp_size": 2},
    {"commit": "on_ack"},
    {"limits": {"max_ready_bytes": 1}},
    {"event_loop": "trio"},
]


@pytest.mark.thorough
@pytest.mark.parametrize(("knobs", "size"), each_value(KNOBS, [1, 4, 52, 156]))
def test_the_digest_depends_on_no_knob_and_no_batch_size(path, wanted, knobs, size):
    with make(path, **knobs) as loader:
        for _ in range(NUM_SAMPLES // size):
            loader.get_next_batch(size)
            loader.ack()

        assert digest(loader) == wanted


def test_a_digest_is_of_what_was_delivered_and_not_of_what_is_read_ahead(path):
    with make(path, buffer_size=50) as loader:
        samples: list[Sample] = []
        for size in (1, 5, 30, 64, 7):
            samples += loader.get_next_batch(size)
            assert digest(loader) == as_dict(digest_of(seen(samples), "tokens"))
            assert digest(loader) == digest(loader)


@pytest.mark.thorough
def test_a_run_that_is_restored_at_any_sample_goes_on_with_its_digest(path, wanted):
    for stop in (0, 1, 31, 99, 100, 101, 155):
        with make(path) as loader:
            if stop:
                loader.get_next_batch(stop)
            state = json.loads(json.dumps(loader.state_dict()))
        with make(path, num_workers=2 if stop == 31 else 0, buffer_size=9) as loader:
            loader.load_state_dict(state)
            assert digest(loader) == state["counters"]["digest"]
            loader.get_next_batch(NUM_SAMPLES - stop)
            assert digest(loader) == wanted


def test_rows_that_yield_no_sample_leave_no_trace_but_their_place(path):
    with make(path, every_third_dropped) as loader:
        samples = loader.get_next_batch(70)
        assert digest(loader) == as_dict(digest_of(seen(samples), "tokens"))


def test_a_delivery_that_its_caller_never_had_is_not_in_the_digest(path):
    def interrupted(_: Any) -> None:
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
        assert digest(loader) == as_dict(digest_of(seen([]), "tokens"))
        loader.ack(groups)
        assert digest(loader)["num_samples"] == 40
        again = loader.get_samples(2)
        assert [group[0].group_index for group in again] == [5, 6]
        loader.get_samples(NUM_SAMPLES - 40)
        loader.ack()
        assert digest(loader) == wanted


def test_a_restart_that_serves_again_what_was_not_acknowledged_counts_it_once(path, wanted):
    with make(path, commit="on_ack") as loader:
        batches = [loader.get_next_batch(10) for _ in range(6)]
        loader.ack(batches[0] + batches[1][::2] + batches[4])
        state = loader.state_dict()
    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        loader.get_next_batch(5 + 10 + 10 + 10)
        loader.get_next_batch(NUM_SAMPLES - 60)
        loader.ack()
        assert digest(loader) == wanted


def test_samples_from_the_token_cache_have_the_digest_of_those_just_made(path, wanted, tmp_path):
    pytest.importorskip("xxhash")
    versioned = "tests.support.digests_fn:cached"
    digests = [
        in_pieces(path, [30, 120], tokenize_fn=versioned, cache=Cache(tokens=str(tmp_path / "kept"))) for _ in range(2)
    ]

    assert digests[0] == digests[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_many_ranks_has_the_digest_of_all_their_samples(path, rank):
    with make(path, ranks=Ranks(world_size=2, rank=rank), batch_size=5) as loader:
        assert len([sample for batch in loader for sample in batch]) == 50
        found = digest(loader)
    with make(path) as loader:
        assert found == as_dict(digest_of(seen(loader.get_next_batch(NUM_ROWS)), "tokens"))


SOFT = SoftPacking(max_length=128, across_epochs=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("packing", "shuffle"),
    [(SOFT, RowShuffle()), (XTunerPacking(max_length=128, seed=5), True)],
    ids=["soft", "xtuner"],
)
def test_ranks_that_tokenize_only_their_own_share_have_one_digest(path, packing, shuffle):
    found = []
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        knobs = {
            "ranks": {"world_size": world_size, "rank": rank},
            "batch_size": 2 // world_size,
            "digest": "positions",
        }
        with make(path, packing=packing, shuffle=shuffle, plan_packs=True, **knobs) as loader:
            loop = iter(loader)
            for _ in range(5):
                next(loop)
            found.append(digest(loader))

    assert found[0] == found[1] == found[2]
    assert found[0]["num_samples"] > 0


def test_tokens_that_another_rank_has_cannot_be_hashed(path):
    with pytest.raises(ConfigError, match='digest="tokens" needs every rank'):
        make(path, packing=SOFT, shuffle=RowShuffle(), plan_packs=True, batch_size=1)


def test_where_packs_are_made_as_samples_come_the_digest_is_of_the_order_before_the_snapshots_position(path):
    knobs: dict[str, Any] = {"packing": SoftPacking(max_length=256), "length_grouping": LengthGrouping(window=4)}
    with make(path) as loader:
        samples = loader.get_next_batch(3 * NUM_ROWS)
    with make(path, batch_size=1, **knobs) as loader:
        for _ in zip(range(30), loader, strict=False):
            state = from_state_dict(loader.state_dict())
            before = [sample for sample in samples if sample.position < snapshots_position(state)]
            assert state.counters["digest"] == as_dict(digest_of(seen(before), "tokens"))


def snapshots_position(state: Snapshot) -> Any:
    from asyncdata import Position

    return Position(*state.position)


# Two runs


@pytest.fixture
def saved(path, tmp_path) -> Callable[..., Path]:
    """A function that saves the snapshot of a run that took so many samples."""
    names = (tmp_path / f"{number}.snapshot" for number in range(10))

    def save(num_samples: int, tokenize_fn: Any = id_and_text, source: Path = path, **knobs: Any) -> Path:
        name = next(names)
        with make(source, tokenize_fn, **knobs) as loader:
            if num_samples:
                loader.get_next_batch(num_samples)
            loader.save(name)
        return name

    return save


def verdict_of(first: Path, second: Path) -> tuple[Verdict, str, set[str]]:
    found = compare(snapshots.load(first), snapshots.load(second))
    mirrored = compare(snapshots.load(second), snapshots.load(first))
    assert (found.verdict, found.num_ahead) == (mirrored.verdict, -mirrored.num_ahead)
    return found.verdict, "; ".join(found.reasons), set(found.changes)


@pytest.mark.thorough
def test_two_runs_of_other_knobs_saw_the_same_stream(saved):
    verdict, reasons, changes = verdict_of(saved(50), saved(50, num_workers=2, buffer_size=7))

    assert (verdict, changes) == (Verdict.SAME, set())
    assert "token for token" in reasons


@pytest.mark.parametrize(
    ("change", "named", "reason"),
    [
        ({"seed": 43}, {"seed"}, "their positions are of other orders: seed differ"),
        ({"shuffle": False}, {"order.enabled"}, "their positions are of other orders: order differ"),
        ({"tokenize_fn": row_id}, {"tokenize_fn"}, "they saw other tokens"),
    ],
    ids=["seed", "order", "tokenize_fn"],
)
def test_runs_of_other_settings_saw_other_streams_and_what_differs_is_named(saved, change, named, reason):
    verdict, reasons, changes = verdict_of(saved(50), saved(50, **change))

    assert verdict is Verdict.DIFFERENT
    assert reason in reasons
    assert named <= changes


@pytest.mark.thorough
def test_a_function_that_changes_and_does_not_say_so_is_found_by_the_digest_alone(saved, monkeypatch):
    before = saved(50, digests_fn.unsteady), saved(50, digests_fn.unsteady, digest="positions")
    monkeypatch.setattr(digests_fn, "last", 8)
    after = saved(50, digests_fn.unsteady), saved(50, digests_fn.unsteady, digest="positions")

    reason = "at the same positions, in the same order, they saw other tokens"
    assert verdict_of(before[0], after[0]) == (Verdict.DIFFERENT, reason, set())
    verdict, reasons, _ = verdict_of(before[1], after[1])
    assert verdict is Verdict.SAME
    assert "which tokens was not hashed" in reasons


def test_data_of_other_content_is_another_stream(saved, path, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS)
    text = other.read_text().replace("xx", "xy")
    other.write_text(text)

    verdict, reasons, changes = verdict_of(saved(50), saved(50, source=other))
    assert (verdict, changes) == (Verdict.DIFFERENT, {"data"})
    assert "they saw other tokens; their positions are of other orders: data differ" in reasons
    verdict, reasons, changes = verdict_of(saved(50, digest="positions"), saved(50, source=other, digest="positions"))
    assert (verdict, changes) == (Verdict.UNDECIDED, {"data"})
    assert "which rows these were was not hashed" in reasons


def test_runs_whose_tokens_are_hashed_otherwise_are_compared_by_their_positions(saved):
    verdict, reasons, _ = verdict_of(saved(50), saved(50, digest="positions"))

    assert verdict is Verdict.SAME
    assert "their tokens were not hashed alike" in reasons


def test_a_row_that_was_passed_over_in_one_run_alone_makes_another_stream(saved):
    verdict, reasons, _ = verdict_of(saved(50), saved(50, every_third_dropped))

    assert verdict is Verdict.DIFFERENT
    assert "they saw other positions" in reasons


def test_a_run_that_is_ahead_is_told_by_how_much_and_what_would_decide(saved):
    first, second = saved(50), saved(61)

    found = compare(snapshots.load(first), snapshots.load(second))

    assert (found.verdict, found.num_ahead, found.num_samples) == (Verdict.UNDECIDED, 11, (50, 61))
    assert "let the first run deliver 11 samples more" in " ".join(found.reasons)
    assert "all settings and fingerprints agree" in " ".join(found.reasons)


def test_where_one_is_ahead_it_is_told_that_they_follow_other_orders(saved):
    verdict, reasons, changes = verdict_of(saved(50), saved(61, seed=1))

    assert (verdict, changes) == (Verdict.UNDECIDED, {"seed"})
    assert "their positions are of other orders: seed differ" in reasons
    assert "so both follow one order" not in reasons


def test_the_same_positions_of_another_order_are_not_taken_for_the_same_rows(saved):
    verdict, reasons, _ = verdict_of(
        saved(20, row_id, digest="positions"), saved(20, row_id, digest="positions", seed=1)
    )

    assert verdict is Verdict.UNDECIDED
    assert "their positions are of other orders: seed differ" in reasons


def test_the_same_tokens_in_the_same_order_are_the_same_stream_whatever_the_seed(saved):
    verdict, _, changes = verdict_of(saved(20, shuffle=False), saved(20, shuffle=False, seed=1))

    assert (verdict, changes) == (Verdict.SAME, {"seed"})


def test_runs_of_other_tokens_are_undecided_where_one_is_ahead(saved):
    verdict, reasons, _ = verdict_of(saved(50), saved(61, in_batches))

    assert verdict is Verdict.UNDECIDED
    assert "so both follow one order" not in reasons


def test_a_snapshot_without_a_digest_says_so(saved, tmp_path):
    old = without_digest(snapshots.load(saved(50)))
    snapshots.save(tmp_path / "old", old)

    verdict, reasons, _ = verdict_of(tmp_path / "old", tmp_path / "old")

    assert verdict is Verdict.UNDECIDED
    assert "the first and second snapshot has no digest" in reasons


def without_digest(saved: Snapshot) -> Snapshot:
    import msgspec

    counters = {name: value for name, value in saved.counters.items() if name != "digest"}
    return msgspec.structs.replace(saved, counters=counters)


def test_a_run_that_goes_on_from_a_snapshot_without_a_digest_has_one_of_the_rest(path, saved, tmp_path):
    snapshots.save(tmp_path / "old", without_digest(snapshots.load(saved(50))))
    with make(path) as loader:
        loader.restore(tmp_path / "old")
        rest = loader.get_next_batch(20)
        found = digest(loader)
        loader.save(tmp_path / "new")

    assert found == as_dict(digest_of(seen(rest), "tokens")) | {"first": 50}
    verdict, reasons, _ = verdict_of(tmp_path / "new", saved(70))
    assert verdict is Verdict.UNDECIDED
    assert "begin at samples" in reasons


def test_a_digest_that_is_none_is_refused(saved):
    import msgspec

    found = snapshots.load(saved(5))
    crafted = msgspec.structs.replace(found, counters={"digest": {"num_samples": "many"}})

    with pytest.raises(SnapshotError, match="AD602 the digest"):
        compare(crafted, found)


# The command


@pytest.mark.parametrize(
    ("second", "status", "verdict"), [(50, 0, "same"), (61, 4, "undecided"), (None, 3, "different")]
)
def test_the_exit_status_is_the_verdict(saved, capsys, second, status, verdict):
    paths = [str(saved(50)), str(saved(second) if second else saved(50, seed=2))]

    assert main(["verify", *paths]) == status
    text = capsys.readouterr().out
    assert text.startswith(f"verdict  {verdict}\n")
    assert "50 samples of the stream; " in text
    assert main(["verify", "--json", *paths]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == verdict
    assert found["num_ahead"] == (11 if second == 61 else 0)


def test_a_snapshot_that_cannot_be_read_is_an_error_and_no_verdict(saved, tmp_path, capsys):
    assert main(["verify", str(saved(3)), str(tmp_path / "none")]) == 1
    assert "AD602" in capsys.readouterr().err
