"""The data source for slime, call by call; without slime, in this process."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import stat
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import ConfigError, LoaderClosedError, NoSamplesError, PrefetchTimeoutError, SourceError
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import (
    GatedRows,
    args_for,
    labels,
    no_rollout,
    numbers,
    set_rollout_id,
    source_of,
)

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


# What is there at all


def test_the_first_parameters_are_those_that_slime_looks_at():
    assert tuple(inspect.signature(AsyncDataSource.__init__).parameters)[:2] == ("self", "args")


def test_hardly_any_argument_is_needed():
    class Args:
        rollout_global_dataset = False
        buffer_filter_path = None
        n_samples_per_prompt = 2

    source = AsyncDataSource(Args())

    assert numbers(source.get_samples(2)) == [(0, [0, 1]), (1, [2, 3])]


def test_where_nothing_is_encoded_no_tokenizer_is_asked_for(prompts, monkeypatch):
    monkeypatch.delenv("ASYNCDATA_PROVE", raising=False)
    monkeypatch.setattr("asyncdata.loader.background_proof.version_of", lambda backend: "1")
    for tokenizer in (None, "/no/such/folder"):
        with source_of(prompts, hf_checkpoint=tokenizer) as source:
            assert labels(source.get_samples(1)) == ["0"]


def test_without_a_dataset_prompts_are_empty_and_numbered():
    for given in ({"rollout_global_dataset": False, "prompt_data": "p.jsonl"}, {"prompt_data": None}):
        source = AsyncDataSource(args_for(None, n_samples_per_prompt=2, **given))
        groups = source.get_samples(3)

        assert source.dataset is None
        assert len(source) == 0
        assert groups == [[SlimeSample(group_index=g, index=2 * g + i) for i in range(2)] for g in range(3)]


def test_without_a_global_dataset_nothing_is_saved_or_loaded(tmp_path):
    given = {"rollout_global_dataset": False, "save": str(tmp_path / "out"), "load": str(tmp_path / "out")}
    with source_of(None, **given) as source:
        source.get_samples(3)
        source.save(0)
        source.load(0)

        assert not (tmp_path / "out").exists()
        assert source.sample_index == 3


def test_the_tokenizer_is_beside_the_dumped_details(prompts, small_tokenizer, tmp_path):
    folder = tmp_path / "details"
    (tmp_path / "model").mkdir()
    for file in small_tokenizer.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")

    before = os.umask(0)
    try:
        for _ in range(2):  # into a folder that has it already, too
            with source_of(prompts, hf_checkpoint=str(tmp_path / "model"), dump_details=str(folder)):
                copied = {file.name: file.read_bytes() for file in (folder / "tokenizer").iterdir()}
    finally:
        os.umask(before)

    assert copied == {file.name: file.read_bytes() for file in small_tokenizer.iterdir()}
    assert stat.S_IMODE((folder / "tokenizer").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (folder / "tokenizer").iterdir()} == {0o600}


def test_details_that_cannot_be_dumped_are_said_at_the_start(prompts, small_tokenizer, tmp_path):
    (tmp_path / "file").write_text("")

    args = args_for(prompts, hf_checkpoint=str(small_tokenizer), dump_details=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="--dump-details"):
        AsyncDataSource(args)


# Groups of the stream


@pytest.mark.parametrize("order", ["legacy", "stream"])
def test_a_request_is_filled_exactly_over_as_many_epochs_as_it_takes(prompts, order):
    with source_of(prompts, asyncdata_order=order) as source:
        groups = source.get_samples(35)

        assert labels(groups) == [str(i % 10) for i in range(35)]
        assert (source.epoch_id, source.sample_offset) == (3, 5)


def test_none_are_no_groups_and_change_nothing(prompts):
    with source_of(prompts) as source:
        set_rollout_id(3)

        assert source.get_samples(0) == []
        assert labels(source.get_samples(1)) == ["0"]


@pytest.mark.parametrize("number", [-1, -3, 1.5, "2", None])
def test_a_number_of_groups_is_a_whole_one(prompts, number):
    with source_of(prompts) as source:
        with pytest.raises(ValueError, match="AD440"):
            source.get_samples(number)

        assert source.sample_offset == 0


def test_a_fresh_sample_has_what_the_row_has_and_nothing_else(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        (group,) = source.get_samples(1)

        for number, sample in enumerate(group):
            assert sample == SlimeSample(
                group_index=0, index=number, prompt="prompt 0", label="0", metadata={"row": 0, "tags": ["a", "b"]}
            )


def test_fresh_samples_share_nothing_that_can_be_changed(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        (group,) = source.get_samples(1)
        group[0].metadata["tags"].append("mine")
        group[0].tokens.append(7)
        group[0].weight_versions.append("v1")

        assert group[1].metadata["tags"] == ["a", "b"]
        assert (group[1].tokens, group[1].weight_versions) == ([], [])
        assert source.get_samples(10)[-1][0].metadata["tags"] == ["a", "b"]


def test_tokens_are_there_if_asked_for(prompts, small_tokenizer):
    with source_of(prompts, hf_checkpoint=str(small_tokenizer), asyncdata_pretokenize=True) as source:
        (group,) = source.get_samples(1)

        assert group[0].tokens
        assert all(type(token) is int for token in group[0].tokens)


def test_the_global_generator_is_left_alone(prompts):
    random.seed(5)
    before = random.getstate()
    with source_of(prompts, rollout_shuffle=True) as source:
        source.get_samples(25)

    assert random.getstate() == before


def test_the_golden_order_of_slime(prompts):
    with source_of(prompts, rollout_shuffle=True) as source:
        assert labels(source.get_samples(30)) == list("7328569401" + "8156973240" + "4502937186")


def test_the_length_is_that_of_an_epoch(prompts):
    with source_of(f"{prompts}@[2:-1]", rollout_shuffle=True) as source:
        assert len(source) == len(source.dataset) == 7
        source.add_samples(source.get_samples(3))
        assert len(source) == 7


def test_the_stream_order_has_no_length_and_says_what_to_do(prompts):
    with source_of(prompts, asyncdata_order="stream") as source:
        with pytest.raises(TypeError, match="--num-rollout"):
            len(source)


# Failures


def test_an_empty_dataset_is_an_error_and_never_an_empty_list(tmp_path):
    path = tmp_path / "blank.jsonl"
    path.write_text("\n\n")
    for order in ("legacy", "stream"):
        with source_of(path, asyncdata_order=order) as source:
            for _ in range(2):
                with pytest.raises((NoSamplesError, SourceError)):
                    source.get_samples(1)


def test_a_file_that_is_not_there_is_an_error_at_the_start(tmp_path):
    with pytest.raises(SourceError, match="AD304"):
        AsyncDataSource(args_for(tmp_path / "none.jsonl"))


def test_a_dataset_that_gives_too_few_is_an_error_and_not_a_short_batch():
    class Short:
        def get_next_batch(self, num_samples):
            return [SlimeSample()]

    given = {"asyncdata_dataset": "tests.support.slime_source.dataset_of_args", "dataset": Short()}
    with source_of("unused", **given) as source:
        for _ in range(2):
            with pytest.raises(NoSamplesError, match=r"get_next_batch\(2\) gave 1 samples"):
                source.get_samples(2)


def test_a_timeout_is_an_error_at_every_call_and_consumes_nothing(prompts, monkeypatch):
    gate = GatedRows()
    monkeypatch.setattr("asyncdata.integrations.slime.config._tokenize_fn", lambda args, options: gate)
    with source_of(prompts, asyncdata_timeout_s=0.05) as source:
        back = [[SlimeSample(label="back")]]
        source.add_samples(back)
        for _ in range(2):
            with pytest.raises(PrefetchTimeoutError, match="AD510"):
                source.get_samples(3)

            assert (source.sample_offset, source.buffer) == (0, back)
        gate.opened.set()
        while source.sample_offset == 0:
            with contextlib.suppress(PrefetchTimeoutError):
                assert labels(source.get_samples(3)) == ["back", 0, 1]


def test_closed_it_says_so(prompts):
    source = AsyncDataSource(args_for(prompts))
    source.close()
    source.close()
    with pytest.raises(LoaderClosedError, match="AD502"):
        source.get_samples(1)


@pytest.mark.thorough
def test_left_alone_it_closes_itself(prompts):
    source = AsyncDataSource(args_for(prompts))
    source.get_samples(1)
    del source
    gc.collect()


# What else drivers call


def test_what_a_later_rollout_does_to_metadata_is_not_in_an_earlier_ones_checkpoint(prompts, tmp_path):
    given = {"save": str(tmp_path), "load": str(tmp_path)}
    with source_of(prompts, **given) as source:
        source.update_metadata({"seen": {"prompts": [0]}})
        set_rollout_id(0)
        source.get_samples(1)
        set_rollout_id(1)
        source.get_samples(1)
        source.get_metadata()["seen"]["prompts"].append(1)
        source.save(0)

    with source_of(prompts, **given) as source:
        source.load(0)
        assert source.get_metadata() == {"seen": {"prompts": [0]}}


def test_metadata_is_kept_for_plugins(prompts):
    with source_of(prompts) as source:
        source.update_metadata({"3": ["a"]})
        source.update_metadata({"4": ["b"]})

        assert source.get_metadata() == {"3": ["a"], "4": ["b"]}
        assert source.get_metadata() is source.metadata


def test_the_number_of_ranks_may_be_told_at_any_time_and_changes_no_order(prompts):
    with source_of(prompts, rollout_shuffle=True) as plain:
        expected = labels(plain.get_samples(30))
    with source_of(prompts, rollout_shuffle=True) as source:
        found = []
        for dp_size in (1, 4, 4, 2):
            found += labels(source.get_samples(7))
            source.set_train_parallel_config({"dp_size": dp_size, "cp_size": 1})
        assert found + labels(source.get_samples(2)) == expected
        assert source.statistics()["asyncdata_capacity_samples"] == 2 * 1000
        with pytest.raises(ConfigError, match="dp_size"):
            source.set_train_parallel_config({"dp_size": -1})


def test_another_dataset_may_be_put_in_its_place(prompts):
    class Dataset:
        def __init__(self):
            self.samples = [SlimeSample(prompt=str(i), label=str(i)) for i in range(3)]

        def __len__(self):
            return len(self.samples)

    with source_of(prompts, n_samples_per_prompt=2) as source:
        source.get_samples(1)
        source.dataset = Dataset()

        assert len(source) == 3
        assert numbers(source.get_samples(1)) == [(1, [2, 3])]
        source.dataset = source.dataset
        assert labels(source.get_samples(5)) == ["2", "0", "1", "2", "0"]
        source.dataset = None
        assert labels(source.get_samples(1)) == [None]
        with pytest.raises(ConfigError, match="neither"):
            source.dataset = 3


def test_a_dataset_of_samples_is_shuffled_epoch_by_epoch():
    class Dataset:
        def __init__(self):
            self.samples = [SlimeSample(label=i) for i in range(3)]
            self.epochs = []

        def __len__(self):
            return 3

        def shuffle(self, epoch_id):
            self.epochs.append(epoch_id)

    dataset = Dataset()
    given = {"asyncdata_dataset": "tests.support.slime_source.dataset_of_args", "dataset": dataset}
    with source_of("unused", rollout_shuffle=True, **given) as source:
        assert labels(source.get_samples(8)) == [0, 1, 2, 0, 1, 2, 0, 1]
        assert (source.epoch_id, source.sample_offset) == (2, 2)
        assert dataset.epochs == [0, 1, 2]
        dataset.samples = []
        dataset.__class__.__len__ = lambda self: 0
        with pytest.raises(NoSamplesError, match="AD401"):
            source.get_samples(1)


def test_calls_from_many_threads_get_every_prompt_once(prompts):
    with source_of(prompts, asyncdata_order="stream") as source:
        found: list[Any] = []

        def work():
            for number in range(10):
                groups = source.get_samples(3)
                source.add_samples(groups[:1])
                found.extend(groups[1:] + source.get_samples(number % 2))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        everything = found + list(source.buffer)

        assert sorted(group[0].group_index for group in everything) == list(range(source.sample_group_index))


def test_statistics_are_flat_numbers(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        source.add_samples(source.get_samples(3))
        found = source.statistics()

        assert (found["asyncdata_groups_total"], found["asyncdata_samples_total"]) == (3, 6)
        assert found["asyncdata_buffered_groups"] == 3
        assert all(isinstance(value, int | float) for value in found.values())


def test_no_event_is_logged_for_each_call(prompts):
    with capture_logs() as events, source_of(prompts) as source:
        for _ in range(50):
            source.add_samples(source.get_samples(2))

    assert len(events) < 10
