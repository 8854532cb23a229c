"""Checkpoints of the data source: what is in them, who can read them, what is refused."""

from __future__ import annotations

import copy
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import ConfigError, SnapshotError, SnapshotMismatchError
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.integrations.slime import torch_checkpoint
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import labels, no_rollout, numbers, set_rollout_id, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 10)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


@pytest.fixture
def given(folder: str) -> dict[str, Any]:
    """Saved and loaded in one place, shuffled, two samples a group."""
    return {"save": folder, "load": folder, "rollout_shuffle": True, "n_samples_per_prompt": 2}


def own(folder: str, rollout_id: Any) -> Path:
    return Path(folder, "rollout", f"global_dataset_state_dict_{rollout_id}.asyncdata")


def slimes(folder: str, rollout_id: Any) -> Path:
    return own(folder, rollout_id).with_suffix(".pt")


def partly(groups: list[list[Any]], text: str) -> list[list[Any]]:
    """As a rollout leaves groups that it did not finish."""
    for group in groups:
        for sample in group:
            sample.response += text
            sample.tokens += [1, 2, 3]
            sample.rollout_log_probs = [-0.5, -1e-9]
            sample.status = type(sample.status).ABORTED
            sample.metadata["start_rollout_id"] = 3
            sample.spec_info.spec_verify_ct += 5
            sample.rollout_routed_experts = np.arange(6, dtype=np.int16).reshape(2, 3)
    return groups


def same(one: Any, other: Any) -> bool:
    """Field by field; arrays have no truth value."""
    first, second = vars(one), vars(other)
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name])
        if isinstance(first[name], np.ndarray)
        else first[name] == second[name]
        for name in first
    )


@pytest.mark.parametrize("order", ["legacy", "stream"])
def test_a_run_continues_with_the_buffer_and_the_next_prompt(prompts, given, order):
    given["asyncdata_order"] = order
    with source_of(prompts, **given) as source:
        back = partly(source.get_samples(13)[2:5], "so far")
        source.add_samples(back)
        source.update_metadata({"a": [1, 2], 7: "seven"})
        source.save(4)
        expected = copy.deepcopy(source.get_samples(20))
        counts = (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index)
    with source_of(prompts, **given) as source:
        source.load(4)
        assert (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index) == (1, 3, 13, 26)
        assert source.metadata == {"a": [1, 2], 7: "seven"}

        found = source.get_samples(20)

        assert numbers(found) == numbers(expected)
        pairs = zip(found, expected, strict=True)
        assert all(same(*samples) for groups in pairs for samples in zip(*groups, strict=True))
        assert (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index) == counts


@pytest.mark.thorough
@pytest.mark.parametrize("taken", [0, 9, 10, 11, 20])
def test_an_epochs_end_is_no_special_place(prompts, given, taken):
    with source_of(prompts, **given) as source:
        source.get_samples(taken)
        source.save(0)
        place = source.epoch_id, source.sample_offset
        expected = labels(source.get_samples(12))
    with source_of(prompts, **given) as source:
        source.load(0)

        assert (source.epoch_id, source.sample_offset) == place
        assert labels(source.get_samples(12)) == expected


def test_what_is_loaded_and_saved_at_once_is_the_same(prompts, given, folder):
    with source_of(prompts, **given) as source:
        source.add_samples(partly(source.get_samples(5)[:2], "x"))
        source.save(3)
        source.load(3)
        source.save(4)

    one, other = snapshots.load(own(folder, 3)), snapshots.load(own(folder, 4))
    assert snapshots.to_state_dict(one) | {"canaries": []} == snapshots.to_state_dict(other) | {"canaries": []}


def test_the_snapshot_can_be_looked_at_like_any_other(prompts, given, folder):
    with source_of(prompts, **given) as source:
        source.add_samples(partly(source.get_samples(5)[:2], "x"))
        source.save(3)

    found = snapshots.describe_file(own(folder, 3))
    assert (found["num_buffered_groups"], found["num_buffered_samples"], found["num_buffered_tokens"]) == (2, 4, 12)
    assert found["epoch"] == 0


def test_a_group_is_saved_as_it_was_given_back(prompts, given):
    with source_of(prompts, **given) as source:
        back = partly(source.get_samples(1), "given back")
        source.add_samples(back)
        source.save(0)
        back[0][0].response = "changed since"
        source.load(0)

        assert source.buffer[0][0].response == "given back"


# A rollout that has begun before the one before it is saved


def test_a_rollout_that_has_begun_too_early_is_rolled_back(prompts, given):
    with source_of(prompts, **given) as source:
        set_rollout_id(0)
        groups = source.get_samples(4)
        source.add_samples(partly(groups[:1], "of 0"))
        source.update_metadata({"0": "done"})
        set_rollout_id(1)
        of_1 = source.get_samples(4)
        expected = labels(of_1), numbers(of_1)
        source.add_samples(partly([of_1[0], of_1[3]], "of 1"))
        source.update_metadata({"1": "done"})
        source.save(0)
        source.save(0)
        assert source.get_buffer_length() == 2
        set_rollout_id(None)
        source.load(0)

        assert [group[0].response for group in source.buffer] == ["of 0"]
        assert source.metadata == {"0": "done"}
        again = source.get_samples(4)
        assert (labels(again), numbers(again)) == expected


def test_what_comes_back_late_is_in_the_snapshot_of_the_rollout_it_belongs_to(prompts, given):
    with source_of(prompts, **given) as source:
        set_rollout_id(0)
        groups = source.get_samples(4)
        set_rollout_id(1)
        source.get_samples(1)
        source.add_samples(partly(groups[2:3], "late"))
        assert source.get_samples(1) == groups[2:3]
        source.add_samples(partly(groups[2:3], ", and more"))
        source.save(0)
        source.load(0)

        assert labels(source.buffer) == labels(groups[2:3])
        assert source.buffer[0][0].response == "late"
        assert source.sample_group_index == 4


def test_an_older_rollout_than_was_saved_is_refused(prompts, given):
    with source_of(prompts, **given) as source:
        for rollout_id in range(3):
            set_rollout_id(rollout_id)
            source.get_samples(1)
        source.save(2)
        with pytest.raises(SnapshotError, match="AD601 rollout 0 cannot be saved any more"):
            source.save(0)


def test_before_any_rollout_there_is_something_to_save(prompts, given):
    with source_of(prompts, **given) as source:
        source.save(0)
        expected = labels(source.get_samples(5))
        source.load(0)

        assert labels(source.get_samples(5)) == expected


# Files


def test_the_last_files_of_a_rollout_are_kept(prompts, given, folder):
    pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        for _ in range(4):
            source.get_samples(1)
            source.save(0)

    names = sorted(path.name for path in own(folder, 0).parent.iterdir())
    assert names == [f"global_dataset_state_dict_0.{end}" for end in ("asyncdata", "asyncdata.1", "asyncdata.2", "pt")]


def test_a_checkpoint_is_its_owners_alone(prompts, given, folder):
    before = os.umask(0)
    try:
        with source_of(prompts, **given) as source:
            source.get_samples(2)
            source.save(0)
    finally:
        os.umask(before)

    assert stat.S_IMODE(Path(folder, "rollout").stat().st_mode) == 0o700
    files = list(Path(folder, "rollout").iterdir())
    assert own(folder, 0) in files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_nothing_to_save_to_is_an_error_and_nothing_to_load_from_is_none(prompts, given):
    with source_of(prompts, **{**given, "save": None, "load": None}) as source:
        with pytest.raises(ConfigError, match="--save"):
            source.save(0)

        source.load(0)
        assert source.sample_offset == 0


def test_a_checkpoint_that_is_not_there_is_a_warning_or_an_error_but_not_before_the_first_rollout(prompts, given):
    with capture_logs() as events, source_of(prompts, **given) as source:
        source.load(-1)
        source.load(None)
        assert [event["event"] for event in events] == []
        source.load(3)
        assert [(event["event"], event["rollout_id"], event["log_level"]) for event in events] == [
            ("checkpoint.missing", 3, "warning")
        ]
    with source_of(prompts, asyncdata_strict_load=True, **given) as source:
        source.load(-1)
        with pytest.raises(SnapshotError, match="AD602 there is no checkpoint of rollout 3"):
            source.load(3)


def test_a_damaged_snapshot_is_refused_though_slimes_own_is_there(prompts, given, folder):
    with source_of(prompts, **given) as source:
        source.save(0)
        path = own(folder, 0)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(SnapshotError, match="AD602 .*cut off"):
            source.load(0)


def test_the_snapshot_of_a_loader_is_refused(prompts, given, folder):
    with source_of(prompts, **given) as source:
        source.save(0)
        snapshots.save(own(folder, 0), snapshots.load(own(folder, 0)))
        with pytest.raises(SnapshotError, match="AD602 .*of a loader"):
            source.load(0)


def test_a_record_that_is_none_and_a_state_that_is_none_are_refused(prompts, given, folder):
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(1))
        source.save(0)
        path = own(folder, 0)
        slimes(folder, 0).unlink(missing_ok=True)
        base = snapshots.load(path)
        good = {"rollout_id": 0, "samples_per_group": 2, "numbering": {}, "kind": "loader"}
        for state, buffer in ((3, []), ({**good, "kind": "other"}, []), (good, [[{"status": "unheard of"}, {}]])):
            fields = msgspec.structs.asdict(base) | {"buffer": buffer}
            snapshots.save(path, AnyState(**fields, slime=state))
            with pytest.raises(SnapshotError, match="AD602"):
                source.load(0)
        assert source.get_buffer_length() == 1


class AnyState(snapshots.Snapshot, frozen=True, kw_only=True):
    """A snapshot with anything in the place of slime's state."""

    slime: Any


def test_a_file_that_cannot_be_written_is_an_error(prompts, given, folder):
    pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        slimes(folder, 0).mkdir(parents=True)
        with pytest.raises(SnapshotError, match=r"AD601 .*\.pt was not written"):
            source.save(0)


def test_metadata_that_no_file_can_hold_is_an_error_that_names_it(prompts, given):
    with source_of(prompts, **given) as source:
        source.update_metadata({"fine": 1, "lock": object()})
        with pytest.raises(SnapshotError, match=r"AD601 metadata\['lock'\]"):
            source.save(0)


def test_without_torch_our_own_file_is_written_and_an_event_says_what_is_missing(prompts, given, folder, monkeypatch):
    monkeypatch.setattr(torch_checkpoint, "is_available", lambda: False)
    with capture_logs() as events, source_of(prompts, **given) as source:
        source.get_samples(3)
        source.save(0)
        assert "checkpoint.without_torch" in [event["event"] for event in events]
        assert not slimes(folder, 0).exists()
        source.load(0)
        assert source.sample_offset == 3
        own(folder, 0).rename(slimes(folder, 0))
        with pytest.raises(SnapshotError, match="AD602 .*without torch"):
            source.load(0)


# What does not fit


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rollout_seed": 43}, "seed"),
        ({"rollout_shuffle": False}, "order"),
        ({"asyncdata_order": "stream"}, "order"),
        ({"label_key": None}, "tokenize_fn"),
    ],
)
def test_other_settings_are_refused_by_name_unless_they_are_allowed(prompts, given, changed, name):
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:1])
        source.save(0)
    with source_of(prompts, **{**given, **changed}) as source:
        with pytest.raises(SnapshotMismatchError, match=f"AD603(?s:.*){name}"):
            source.load(0)

        assert (source.sample_offset, source.buffer) == (0, [])
    with source_of(prompts, **{**given, **changed, "asyncdata_allow_changed": name}) as source:
        source.load(0)
        assert len(source.buffer) == 1
        assert (source.epoch_id, source.sample_offset) == ((0, 5) if name == "tokenize_fn" else (1, 0))
        assert source.sample_group_index == 5
        source.get_samples(3)
        assert source.sample_offset == (7 if name == "tokenize_fn" else 2)


def test_other_data_is_refused(prompts, given, tmp_path):
    with source_of(prompts, **given) as source:
        source.get_samples(5)
        source.save(0)
    other = write_prompts(tmp_path / "prompts.jsonl", 11)
    with source_of(other, **given) as source:
        with pytest.raises(SnapshotMismatchError, match="AD603(?s:.*)data"):
            source.load(0)


def test_groups_of_another_size_are_refused_or_dropped_and_counted(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:2])
        source.save(0)
        source.get_samples(2)
        source.save(1)
    other = {**given, "n_samples_per_prompt": 4}
    with source_of(prompts, **other) as source:
        with pytest.raises(
            SnapshotMismatchError, match="n_samples_per_prompt: saved 2, present 4|n_samples_per_prompt"
        ):
            source.load(0)

        source.load(1)  # there is nothing that would not fit
        assert numbers(source.get_samples(1)) == [(5, [10, 11, 12, 13])]
    with source_of(prompts, **other, asyncdata_allow_changed=["n_samples_per_prompt"]) as source:
        source.load(0)
        assert source.buffer == []
        assert source.statistics()["asyncdata_dropped_groups_n_samples_per_prompt_total"] == 2


def test_a_place_in_another_kind_of_dataset_means_nothing(prompts, given):
    with source_of(prompts, **given) as source:
        source.save(0)
    with source_of(None, **given) as source:
        with pytest.raises(SnapshotMismatchError, match="AD603 .*saved loader, present none"):
            source.load(0)


def test_a_source_without_prompts_keeps_its_numbers_and_its_buffer(given):
    with source_of(None, **given) as source:
        source.add_samples(source.get_samples(3)[:1])
        source.save(0)
    with source_of(None, **given) as source:
        source.load(0)

        assert numbers(source.get_samples(2)) == [(0, [0, 1]), (3, [6, 7])]


def test_a_dataset_in_memory_is_known_by_its_length(given):
    class Dataset:
        def __init__(self, number):
            self.samples = [SlimeSample(label=i) for i in range(number)]

        def __len__(self):
            return len(self.samples)

        def shuffle(self, epoch_id):
            pass

    hook = {"asyncdata_dataset": "tests.support.slime_source.dataset_of_args"}
    with source_of("-", dataset=Dataset(3), **hook, **given) as source:
        source.get_samples(5)
        source.save(0)
    with source_of("-", dataset=Dataset(3), **hook, **given) as source:
        source.load(0)
        assert labels(source.get_samples(2)) == [2, 0]
    with source_of("-", dataset=Dataset(4), **hook, **given) as source:
        with pytest.raises(SnapshotMismatchError, match="another data: saved 3 rows, present 4 rows"):
            source.load(0)


# slime's own file


def slimes_state(**numbers: int) -> dict[str, Any]:
    return {"sample_offset": 0, "epoch_id": 0, "sample_group_index": 0, "sample_index": 0, "metadata": {}, **numbers}


def test_slimes_own_file_has_its_five_keys_and_is_plain(prompts, given, folder):
    torch = pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        source.get_samples(13)
        source.update_metadata({"a": [1]})
        source.save(0)

    assert torch.load(slimes(folder, 0)) == {
        "sample_offset": 3,
        "epoch_id": 1,
        "sample_group_index": 13,
        "sample_index": 26,
        "metadata": {"a": [1]},
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("epoch", "offset"), [(0, 0), (0, 4), (0, 10), (2, 10), (3, 1)])
def test_a_run_that_slime_has_begun_continues(prompts, given, folder, epoch, offset):
    torch = pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        expected = labels(source.get_samples(60))[epoch * 10 + offset :][:15]
    slimes(folder, 5).parent.mkdir(parents=True)
    state = slimes_state(sample_offset=offset, epoch_id=epoch, sample_group_index=70, sample_index=140)
    torch.save({**state, "metadata": {"plugin": 1}}, slimes(folder, 5))
    with source_of(prompts, **given) as source:
        source.load(5)
        assert (source.epoch_id, source.sample_offset, source.metadata) == (epoch, offset, {"plugin": 1})

        found = source.get_samples(15)

        assert labels(found) == expected
        assert numbers(found)[0] == (70, [140, 141])


def test_a_folder_in_which_slime_has_gone_on_is_refused_until_one_of_the_two_is_removed(prompts, given, folder):
    torch = pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        source.get_samples(5)
        source.save(5)
        source.save(5)
        source.load(5)
        torch.save(slimes_state(sample_offset=2, sample_group_index=2), slimes(folder, 5))
        with pytest.raises(SnapshotMismatchError, match="AD603 .*Remove the file that you do not want"):
            source.load(5)

        own(folder, 5).rename(own(folder, 6))
        source.load(5)
        assert source.sample_offset == 2
        source.load(6)
        assert source.sample_offset == 5


def test_killed_between_its_two_files_a_checkpoint_is_whole(prompts, given, folder, monkeypatch):
    pytest.importorskip("torch")
    with source_of(prompts, **given) as source:
        source.get_samples(5)
        source.save(5)
        source.get_samples(1)

        def killed(*args, **kwargs):
            raise KeyboardInterrupt

        for place in ("asyncdata.integrations.slime.torch_checkpoint.write", "asyncdata.checkpoint.snapshot.save"):
            with monkeypatch.context() as patch:
                patch.setattr(place, killed)
                with pytest.raises(KeyboardInterrupt):
                    source.save(5)
        source.load(5)
        assert source.sample_offset == 6


def test_slimes_file_of_more_rows_than_there_are_is_refused(prompts, given, folder):
    torch = pytest.importorskip("torch")
    slimes(folder, 5).parent.mkdir(parents=True)
    torch.save(slimes_state(sample_offset=11), slimes(folder, 5))
    with source_of(prompts, **given) as source:
        with pytest.raises(SnapshotMismatchError, match="AD603 .*11 rows or more, present 10 rows"):
            source.load(5)
    with source_of(prompts, asyncdata_allow_changed="data", **given) as source:
        source.load(5)
        assert (source.epoch_id, source.sample_offset) == (1, 0)


def test_slimes_file_in_our_order_is_refused(prompts, given, folder):
    torch = pytest.importorskip("torch")
    slimes(folder, 5).parent.mkdir(parents=True)
    torch.save(slimes_state(sample_offset=3), slimes(folder, 5))
    with source_of(prompts, asyncdata_order="stream", **given) as source:
        with pytest.raises(SnapshotMismatchError, match="AD603 .*order.*slime's"):
            source.load(5)
    with source_of(prompts, asyncdata_order="stream", asyncdata_allow_changed=["order"], **given) as source:
        source.load(5)
        assert (source.epoch_id, source.sample_offset) == (1, 0)
        source.get_samples(1)
        assert (source.epoch_id, source.sample_offset) == (1, 1)


class Sneaky:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_but_plain_data_is_read_from_slimes_file(prompts, given, folder, tmp_path):
    torch = pytest.importorskip("torch")
    slimes(folder, 5).parent.mkdir(parents=True)
    with source_of(prompts, **given) as source:
        torch.save({**slimes_state(), "metadata": {"x": Sneaky(tmp_path / "ran")}}, slimes(folder, 5))
        with pytest.raises(SnapshotError, match="AD602 .*only plain data"):
            source.load(5)

        assert not (tmp_path / "ran").exists()
        for state in ([1], slimes_state(epoch_id=-1), {**slimes_state(), "metadata": 3}, {"hf_adapter_state": {}}):
            torch.save(state, slimes(folder, 5))
            with pytest.raises(SnapshotError, match="AD602"):
                source.load(5)
        slimes(folder, 5).write_bytes(b"nonsense")
        with pytest.raises(SnapshotError, match="AD602"):
            source.load(5)
