"""Checkpoints of the data source: their files, who can read them, and what is refused or left out.

What it restores is held by ``test_slime_rollouts_model``, and what slime reads of it by ``test_slime_source``.
"""

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from structlog.testing import capture_logs

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError
from tests.support import slime_source
from tests.support.parts import change, describe_file
from tests.support.slime_source import InMemory, checkpoint_at, labels, numbers, source_of, source_over, write_prompts

LEGACY, STREAM = ({"asyncdata_order": order, "rollout_shuffle": True} for order in ("legacy", "stream"))
ONE_ORDER = pytest.mark.parametrize("order", [LEGACY, pytest.param(STREAM, marks=pytest.mark.thorough)], ids=str)
SLIMES: dict[str, Any] = {"sample_offset": 0, "epoch_id": 0, "sample_group_index": 0, "sample_index": 0, "metadata": {}}
"""What slime's own file has."""


def save_as_slime(given, rollout_id, state):
    torch = pytest.importorskip("torch")
    path = checkpoint_at(given["save"], rollout_id).with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def refused(source, rollout_id, message="AD602", error=SnapshotError):
    with pytest.raises(error, match=message):
        source.load(rollout_id)


def left_out(events):
    return [event for event in events if event["event"] == "snapshot.rows_left_out"]


def test_what_is_loaded_and_saved_again_is_the_same_and_can_be_looked_at_like_any_snapshot(prompts, given):
    with source_of(prompts, **given) as source:
        back = source.get_samples(5)[:2]
        back[0][0].tokens = [1, 2, 3]
        source.add_samples(back)
        source.save(3)
        source.load(3)
        source.save(4)
    one, other = (snapshots.load(checkpoint_at(given["save"], number)) for number in (3, 4))
    assert snapshots.to_state_dict(one) | {"canaries": []} == snapshots.to_state_dict(other) | {"canaries": []}
    found = describe_file(checkpoint_at(given["save"], 3))
    assert (found["num_buffered_groups"], found["num_buffered_samples"], found["num_buffered_tokens"]) == (2, 4, 3)
    assert found["epoch"] == 0


def test_the_last_files_of_a_rollout_are_kept_and_are_their_owners_alone(prompts, given):
    pytest.importorskip("torch")
    before = os.umask(0)
    try:
        with source_of(prompts, **given) as source:
            for _ in range(4):
                source.save(0)
    finally:
        os.umask(before)

    folder = checkpoint_at(given["save"], 0).parent
    ends = ("asyncdata", "asyncdata.1", "asyncdata.2", "pt")
    assert sorted(path.name for path in folder.iterdir()) == [f"global_dataset_state_dict_0.{end}" for end in ends]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_nothing_to_save_to_is_an_error_and_nothing_to_load_from_is_none(prompts):
    with source_of(prompts) as source:
        with pytest.raises(ConfigError, match="--save"):
            source.save(0)
        source.load(0)
        assert source.sample_offset == 0


def test_a_checkpoint_that_is_not_there_is_a_warning_or_an_error_but_not_before_the_first_rollout(prompts, given):
    with capture_logs() as events, source_of(prompts, **given) as source:
        for rollout_id in (-1, None, 3):
            source.load(rollout_id)
    (event,) = [event for event in events if event["event"].startswith("checkpoint.")]  # the row index has events, too
    assert (event["event"], event["rollout_id"], event["log_level"]) == ("checkpoint.missing", 3, "warning")
    with source_of(prompts, asyncdata_strict_load=True, **given) as source:
        source.load(-1)
        refused(source, 3, "AD602 there is no checkpoint of rollout 3")


class AnyState(snapshots.Snapshot, frozen=True, kw_only=True):
    """A snapshot with anything in the place of slime's state."""

    slime: Any


def test_a_file_that_is_no_checkpoint_of_ours_is_refused_though_slimes_own_is_there(prompts, given):
    path = checkpoint_at(given["save"], 0)
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(1))
        source.save(0)
        base = snapshots.load(path)
        path.write_bytes(path.read_bytes()[:-1])
        refused(source, 0, "AD602 .*cut off")
        snapshots.save(path, base)
        refused(source, 0, "AD602 .*of a loader")
        path.with_suffix(".pt").unlink(missing_ok=True)
        good = {"rollout_id": 0, "samples_per_group": 2, "numbering": {}, "kind": "loader"}
        for state, buffer in ((3, []), ({**good, "kind": "other"}, []), (good, [[{"status": "unheard of"}, {}]])):
            snapshots.save(path, AnyState(**msgspec.structs.asdict(base) | {"buffer": buffer}, slime=state))
            refused(source, 0)
        assert source.get_buffer_length() == 1


def test_what_cannot_be_written_is_an_error_that_names_it(prompts, given):
    pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        checkpoint_at(given["save"], 0).with_suffix(".pt").mkdir(parents=True)
        with pytest.raises(SnapshotError, match=r"AD601 .*\.pt was not written"):
            source.save(0)
        source.update_metadata({"fine": 1, "lock": object()})
        with pytest.raises(SnapshotError, match=r"AD601 metadata\['lock'\]"):
            source.save(1)


def test_without_torch_our_own_file_is_written_and_an_event_says_what_is_missing(prompts, given, monkeypatch):
    change(monkeypatch, torch_is_there=lambda: False)
    path = checkpoint_at(given["save"], 0)
    with capture_logs() as events, source_of(prompts, **given) as source:
        source.get_samples(3)
        source.save(0)
        assert "checkpoint.without_torch" in [event["event"] for event in events]
        source.load(0)
        assert source.sample_offset == 3
        path.rename(path.with_suffix(".pt"))  # it was not there
        refused(source, 0, "AD602 .*without torch")


def test_what_a_later_rollout_changes_inside_of_the_metadata_is_not_in_an_earlier_ones_checkpoint(prompts, given):
    with source_of(prompts, **given) as source:
        source.update_metadata({"seen": {"prompts": [0]}})
        slime_source.set_rollout_id(0)
        source.get_samples(1)
        slime_source.set_rollout_id(1)
        source.get_samples(1)
        source.get_metadata()["seen"]["prompts"].append(1)
        source.save(0)
        source.load(0)
        assert source.get_metadata() == source.metadata == {"seen": {"prompts": [0]}}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rollout_seed": 43}, "seed"),
        pytest.param({"rollout_shuffle": True}, "order", marks=pytest.mark.thorough),
        pytest.param({"asyncdata_order": "stream"}, "order", marks=pytest.mark.thorough),
        ({"label_key": None}, "tokenize_fn"),
    ],
)
def test_other_settings_are_refused_by_name_unless_they_are_allowed(prompts, given, changed, name):
    given["rollout_shuffle"] = "rollout_shuffle" not in changed
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:1])
        source.save(0)
    with source_of(prompts, **{**given, **changed}) as source:
        refused(source, 0, f"AD603(?s:.*){name}", SnapshotMismatchError)
        assert (source.sample_offset, source.buffer) == (0, [])
    with source_of(prompts, **{**given, **changed, "asyncdata_allow_changed": name}) as source:
        source.load(0)
        stays = name == "tokenize_fn"
        assert (source.epoch_id, source.sample_offset) == ((0, 5) if stays else (1, 0))
        assert (len(source.buffer), source.sample_group_index) == (1, 5)
        source.get_samples(3)
        assert source.sample_offset == (7 if stays else 2)


def test_groups_of_another_size_are_refused_or_dropped_and_counted(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:2])
        source.save(0)
        source.get_samples(2)
        source.save(1)
    other = {**given, "n_samples_per_prompt": 4}
    with source_of(prompts, **other) as source:
        refused(source, 0, "another n_samples_per_prompt: saved 2, present 4", SnapshotMismatchError)
        source.load(1)  # there is nothing that would not fit
        assert numbers(source.get_samples(1)) == [(5, [10, 11, 12, 13])]
    with source_of(prompts, **other, asyncdata_allow_changed=["n_samples_per_prompt"]) as source:
        source.load(0)
        assert source.buffer == []
        assert source.statistics()["asyncdata_dropped_groups_n_samples_per_prompt_total"] == 2


def test_a_source_without_prompts_keeps_its_numbers_and_its_buffer_and_refuses_a_place_in_prompts(prompts, given):
    with source_of(None, **given) as source:
        source.add_samples(source.get_samples(3)[:1])
        source.save(0)
        source.load(0)
        assert numbers(source.get_samples(2)) == [(0, [0, 1]), (3, [6, 7])]
    with source_of(prompts, **given) as source:
        source.save(1)
        refused(source, 0, "AD603 .*saved none, present loader", SnapshotMismatchError)


@ONE_ORDER
@pytest.mark.parametrize("taken", [10, 100])
def test_other_data_is_refused_or_if_allowed_the_rows_left_out_are_counted(given, tmp_path, order, taken):
    given |= order
    with source_of(write_prompts(tmp_path / "p.jsonl", 100), **given) as source:
        source.get_samples(taken)
        source.save(0)
    other = write_prompts(tmp_path / "p.jsonl", 120)
    with source_of(other, **given) as source:
        refused(source, 0, "AD603(?s:.*)data", SnapshotMismatchError)
    with capture_logs() as events, source_of(other, **given, asyncdata_allow_changed=["data"]) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset, source.sample_group_index) == (1, 0, taken)
        source.get_samples(1)
        assert (source.epoch_id, source.sample_offset) == (1, 1)

    found = [(event["num_delivered"], event["num_left_out"], event["changed"]) for event in left_out(events)]
    assert found == ([(10, 90, ["data"])] if taken == 10 else []), "at an epoch's end nothing is left out"
    assert {(event["log_level"], event["epoch"]) for event in left_out(events)} <= {("warning", 0)}


@ONE_ORDER
def test_a_renamed_file_continues_at_its_place_and_other_rows_are_refused(prompts, given, tmp_path, order):
    given |= order
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(4)[:1])
        source.save(0)
        expected = source.get_samples(13)
    renamed = prompts.rename(tmp_path / "renamed.jsonl")

    with source_of(renamed, **given) as source:
        refused(source, 0, "same_rows", SnapshotMismatchError)
    with capture_logs() as events, source_of(renamed, **given, asyncdata_same_rows=True) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset) == (0, 4)
        found = source.get_samples(13)
        assert (labels(found), numbers(found)) == (labels(expected), numbers(expected))
        source.save(1)
        source.load(1)
    assert left_out(events) == []

    other = write_prompts(tmp_path / "other.jsonl", 11)
    with source_of(other, **given, **{"asyncdata_same_rows": True, "asyncdata_allow_changed": ["data"]}) as source:
        refused(source, 0, r"AD603 same_rows=True.*(?s:.*)other\.jsonl", SnapshotMismatchError)


@pytest.mark.parametrize(("taken", "expected"), [(5, [(5, 95)]), (100, []), (0, [])])
def test_a_dataset_in_memory_is_known_by_its_length(given, taken, expected):
    with source_over(InMemory(100), **given) as source:
        source.get_samples(taken)
        source.save(0)
        going_on = labels(source.get_samples(2))
    with source_over(InMemory(100), **given) as source:
        source.load(0)
        assert labels(source.get_samples(2)) == going_on
    with source_over(InMemory(50), **given) as source:
        refused(source, 0, "another data: saved 100 rows, present 50 rows", SnapshotMismatchError)
    with capture_logs() as events, source_over(InMemory(50), asyncdata_allow_changed="data", **given) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset) == ((1, 0) if taken else (0, 0))
    assert [(event["num_delivered"], event["num_left_out"]) for event in left_out(events)] == expected


def test_a_folder_in_which_slime_has_gone_on_is_refused_until_one_of_the_two_is_removed(prompts, given):
    with source_of(prompts, **given) as source:
        source.get_samples(5)
        source.save(5)
        source.save(5)
        source.load(5)
        save_as_slime(given, 5, {**SLIMES, "sample_offset": 2, "sample_group_index": 2})
        refused(source, 5, "AD603 .*Remove the file that you do not want", SnapshotMismatchError)
        checkpoint_at(given["save"], 5).rename(checkpoint_at(given["save"], 6))
        source.load(5)
        assert source.sample_offset == 2
        source.load(6)
        assert source.sample_offset == 5


def test_killed_between_its_two_files_a_checkpoint_is_whole(prompts, given, monkeypatch):
    pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        source.get_samples(5)
        source.save(5)
        source.get_samples(1)
        for place in ("asyncdata.integrations.slime.torch_data.write", "asyncdata.checkpoint.snapshot.save"):
            with monkeypatch.context() as patch:
                patch.setattr(place, lambda *args, **kwargs: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    source.save(5)
        source.load(5)
        assert source.sample_offset == 6


@pytest.mark.parametrize(
    ("place", "order", "name", "message"),
    [
        (11, "legacy", "data", "AD603 .*11 rows or more, present 10 rows"),
        (3, "stream", "order", "AD603 .*order.*slime's"),
    ],
)
def test_slimes_place_that_means_nothing_is_refused_or_left_for_an_epoch(prompts, given, place, order, name, message):
    save_as_slime(given, 5, {**SLIMES, "sample_offset": place})
    with source_of(prompts, asyncdata_order=order, **given) as source:
        refused(source, 5, message, SnapshotMismatchError)
    allowed = {"asyncdata_order": order, "asyncdata_allow_changed": [name]}
    with capture_logs() as events, source_of(prompts, **allowed, **given) as source:
        source.load(5)
        assert (source.epoch_id, source.sample_offset) == (1, 0)
        source.get_samples(1)
        assert (source.epoch_id, source.sample_offset) == (1, 1)
    (event,) = left_out(events)
    assert (event["changed"], event["num_delivered"], event["num_left_out"]) == ([name], place, None)


class Sneaky(NamedTuple):
    """Would write a file if it were unpickled."""

    path: Path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_but_plain_data_of_slimes_layout_is_read_from_slimes_file(prompts, given, tmp_path):
    with source_of(prompts, **given) as source:
        save_as_slime(given, 5, {**SLIMES, "metadata": {"x": Sneaky(tmp_path / "ran")}})
        refused(source, 5, "AD602 .*only plain data")
        assert not (tmp_path / "ran").exists()
        for state in ([1], {**SLIMES, "epoch_id": -1}, {**SLIMES, "metadata": 3}, {"hf_adapter_state": {}}):
            save_as_slime(given, 5, state)
            refused(source, 5)
        checkpoint_at(given["save"], 5).with_suffix(".pt").write_bytes(b"nonsense")
        refused(source, 5)
