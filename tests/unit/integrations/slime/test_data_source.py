"""The data source as drivers and plugins use it: what calls return and refuse, what is counted, logged and settable.

What rollouts take, give back and find again is held by ``test_slime_rollouts_model``.
"""

import contextlib
import inspect
import os
import random
import shutil
import stat
from abc import ABC, abstractmethod
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import errors
from asyncdata.integrations.slime import AsyncDataSource, BadGroupError, ReadOnlyDataSource, ReadOnlyError
from tests.support import slime_source
from tests.support.loading import write
from tests.support.parts import change
from tests.support.peers.records import stand_ins
from tests.support.slime_source import InMemory, SlimeSample, args_for, labels, numbers, source_of, source_over

NUM_ROWS = 10
SHUFFLED = "7328569401", "8156973240", "4502937186"
"""The first epochs in slime's order, with its seed of 42."""


def framework(package):
    """The modules of one that runs us: a version that does not tell the rollout."""
    kind = type("Sample", (SlimeSample,), {"__module__": f"{package}.utils.types"})
    return {package: {}, f"{package}.utils": {}, f"{package}.utils.types": {"Sample": kind}}


def test_hardly_any_argument_is_needed_and_without_a_dataset_prompts_are_empty_and_numbered(given, tmp_path):
    given["rollout_global_dataset"] = False
    few = SimpleNamespace(rollout_global_dataset=False, buffer_filter_path=None, n_samples_per_prompt=2)
    assert tuple(inspect.signature(AsyncDataSource.__init__).parameters)[:2] == ("self", "args"), "slime looks at them"
    for args in (few, args_for("p.jsonl", **given)):
        source = AsyncDataSource(args)
        groups = source.get_samples(3)
        assert groups == [[SlimeSample(group_index=g, index=2 * g + i) for i in range(2)] for g in range(3)]
        source.save(0)
        source.load(0)
        assert (source.dataset, len(source), source.sample_index) == (None, 0, 6)
    assert not (tmp_path / "run").exists(), "nothing is saved"


def test_where_nothing_is_encoded_no_tokenizer_is_asked_for(prompts, monkeypatch):
    monkeypatch.delenv("ASYNCDATA_PROVE", raising=False)
    change(monkeypatch, version_of_a_backend=lambda backend: "1")
    for tokenizer in (None, "/no/such/folder"):
        with source_of(prompts, hf_checkpoint=tokenizer) as source:
            assert labels(source.get_samples(1)) == ["0"]


def test_the_tokenizer_is_beside_the_dumped_details_or_the_start_says_why_not(prompts, small_tokenizer, tmp_path):
    folder = tmp_path / "details"
    model = shutil.copytree(small_tokenizer, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"weights")

    before = os.umask(0)
    try:
        for _ in range(2):  # into a folder that has it already, too
            with source_of(prompts, hf_checkpoint=str(model), dump_details=str(folder)):
                copied = {file.name: file.read_bytes() for file in (folder / "tokenizer").iterdir()}
    finally:
        os.umask(before)

    assert copied == {file.name: file.read_bytes() for file in small_tokenizer.iterdir()}
    assert stat.S_IMODE((folder / "tokenizer").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (folder / "tokenizer").iterdir()} == {0o600}
    with pytest.raises(errors.ConfigError, match="--dump-details"):
        AsyncDataSource(args_for(prompts, hf_checkpoint=str(model), dump_details=str(prompts)))


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_a_source_is_an_instance_of_the_frameworks_own_class_where_there_is_one(prompts, package):
    base = type("DataSource", (ABC,), {"get_samples": abstractmethod(lambda self, num_samples: None)})
    modules = framework(package)
    kind = modules[f"{package}.utils.types"]["Sample"]
    with stand_ins(modules), source_of(prompts) as source:
        assert [type(sample) for sample in source.get_samples(1)[0]] == [kind]
    modules |= {f"{package}.rollout": {}, f"{package}.rollout.data_source": {"DataSource": base}}
    with stand_ins(modules), source_of(prompts) as source:
        assert isinstance(source, base)
        assert isinstance(ReadOnlyDataSource(args_for(None)), base)
        assert not isinstance(3, base)


@pytest.mark.parametrize("number", [-1, 1.5, "2", None])
def test_numbers_of_groups_and_rollouts_are_whole_ones_and_none_are_no_groups(prompts, number):
    with source_of(prompts) as source:
        with pytest.raises(ValueError, match="AD440 num_samples"):
            source.get_samples(number)
        with pytest.raises(errors.ConfigError, match="AD440 rollout_id"):
            source.begin_rollout(number)
        assert (source.get_samples(0), source.sample_offset) == ([], 0)


def test_an_empty_dataset_is_an_error_at_every_call_and_a_missing_one_at_the_start(tmp_path):
    path = write(tmp_path / "blank.jsonl", b"\n\n")
    for order in ("legacy", "stream"):
        with source_of(path, asyncdata_order=order) as source:
            for _ in range(2):
                with pytest.raises((errors.NoSamplesError, errors.SourceError)):
                    source.get_samples(1)
    with pytest.raises(errors.SourceError, match="AD304"):
        AsyncDataSource(args_for(tmp_path / "none.jsonl"))


def test_what_fails_in_the_stream_leaves_everything_as_it_was(tmp_path):
    path = slime_source.write_prompts(tmp_path / "p.jsonl", 6, {4: b'{"input": "no label"}'})
    with source_of(path, asyncdata_bad_rows="raise") as source:
        back = source.get_samples(2)
        source.add_samples(back)
        for _ in range(2):
            with pytest.raises(errors.BadRowError, match="AD110"):
                source.get_samples(5)
            assert (source.buffer, source.sample_offset, source.sample_index) == (back, 2, 2)
        assert labels(source.get_samples(4)) == ["0", "1", "2", "3"]


def test_calls_from_many_threads_get_every_prompt_once_and_each_snapshot_is_of_a_moment_between(prompts, given):
    given["n_samples_per_prompt"] = 1
    with source_of(prompts, asyncdata_order="stream", **given) as source:
        found: list[Any] = []

        def work():
            for number in range(10):
                groups = source.get_samples(3)
                source.add_samples(groups[:1])
                found.extend(groups[1:] + source.get_samples(number % 2))

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(work) for _ in range(4)]
            for rollout_id in range(5):
                source.save(rollout_id)
        assert [each.result() for each in done] == [None] * 4
        everything = found + list(source.buffer)
        assert sorted(group[0].group_index for group in everything) == list(range(source.sample_group_index))
        for rollout_id in range(5):
            source.load(rollout_id)
            kept = [group[0].group_index for group in source.buffer]
            assert len(set(kept)) == len(kept)
            assert max(kept, default=-1) < source.sample_group_index


def test_statistics_are_flat_numbers_no_call_is_logged_and_the_number_of_ranks_is_a_hint_for_the_read_ahead(prompts):
    with capture_logs() as events, source_of(prompts, n_samples_per_prompt=2) as source:
        for dp_size in (4, 4, 2):
            source.set_train_parallel_config({"dp_size": dp_size, "cp_size": 1})
            assert source.statistics()["asyncdata_capacity_samples"] == dp_size * 4000
        with pytest.raises(errors.ConfigError, match="dp_size"):
            source.set_train_parallel_config({"dp_size": -1})
        for _ in range(50):
            source.add_samples(source.get_samples(3))
        found = source.statistics()
    assert (found["asyncdata_groups_total"], found["asyncdata_samples_total"]) == (3, 6)
    assert found["asyncdata_buffered_groups"] == 3
    assert all(isinstance(value, int | float) for value in found.values())
    assert len(events) < 10
    with pytest.raises(errors.LoaderClosedError, match="AD502"):
        source.get_samples(9)
    source.close()


def test_another_dataset_may_be_put_in_the_place_of_ours(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        source.get_samples(1)
        source.dataset = InMemory(3)

        assert (len(source), numbers(source.get_samples(1))) == (3, [(1, [2, 3])])
        source.dataset = source.dataset
        assert labels(source.get_samples(5)) == ["2", "0", "1", "2", "0"]
        source.dataset = None
        assert labels(source.get_samples(1)) == [None]
        with pytest.raises(errors.ConfigError, match="neither"):
            source.dataset = 3
    with source_of(prompts, rollout_shuffle=True) as one, source_of(None, rollout_shuffle=True) as other:
        other.dataset = one.dataset
        assert labels(other.get_samples(12)) == list(SHUFFLED[0] + SHUFFLED[1][:2])


def test_a_dataset_of_samples_is_shuffled_epoch_by_epoch_and_one_that_gives_too_few_is_an_error():
    dataset = InMemory(3)
    with source_over(dataset, rollout_shuffle=True) as source:
        assert labels(source.get_samples(8)) == list("01201201")
        assert (source.epoch_id, source.sample_offset, dataset.epochs) == (2, 2, [0, 1, 2])
        dataset.samples = []
        with pytest.raises(errors.NoSamplesError, match="AD401"):
            source.get_samples(1)
    with source_over(SimpleNamespace(get_next_batch=lambda number: [SlimeSample()])) as source:
        for _ in range(2):
            with pytest.raises(errors.NoSamplesError, match=r"get_next_batch\(2\) gave 1 samples"):
                source.get_samples(2)


@pytest.mark.parametrize("order", ["legacy", "stream"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", None, NUM_ROWS + 1])
def test_a_place_that_is_not_there_is_refused_and_changes_nothing(prompts, order, value):
    with source_of(prompts, asyncdata_order=order) as source:
        source.get_samples(2)
        with pytest.raises(errors.ConfigError, match="sample_offset"):
            source.sample_offset = value
        assert (source.sample_offset, labels(source.get_samples(1))) == (2, ["2"])


def test_the_place_may_be_set_whatever_the_dataset_and_numbers_go_on_from_what_is_set(prompts):
    with source_of(prompts, asyncdata_dataset="asyncdata.integrations.hf_adapter.AsyncDatasetAdapter") as source:
        source.sample_offset = 3
        assert labels(source.get_samples(2)) == ["3", "4"]
    with source_over(InMemory(5)) as source:
        source.sample_offset = 3
        assert labels(source.get_samples(2)) == ["3", "4"]
        with pytest.raises(errors.ConfigError, match="sample_offset"):
            source.sample_offset = 6
    with source_of(None, n_samples_per_prompt=2) as source:
        source.sample_offset, source.sample_group_index, source.sample_index = 3, 100, 7
        assert source.sample_offset == 3
        assert numbers(source.get_samples(2)) == [(100, [7, 8]), (101, [9, 10])]


def test_the_datasets_samples_are_those_of_the_present_epoch_by_number(prompts):
    random.seed(5)
    before = random.getstate()
    first, second, third = map(list, SHUFFLED)
    with source_of(prompts, rollout_shuffle=True, n_samples_per_prompt=3) as source:
        dataset = source.dataset
        assert (len(source), len(dataset), len(dataset.samples)) == (NUM_ROWS,) * 3
        assert [dataset[number].label for number in (3, 0, -1, 3)] == [first[number] for number in (3, 0, -1, 3)]
        for wanted in (slice(5, 9), slice(None, 3), slice(-2, None), slice(8, 2, -3), slice(4, 4), slice(None)):
            assert labels([[sample] for sample in dataset.samples[wanted]]) == first[wanted]
        delivered = labels(source.get_samples(NUM_ROWS))
        assert (delivered, dataset.samples[0].label) == (first, first[0]), "the next epoch has not begun"
        assert labels(source.get_samples(1)) == second[:1]
        assert [sample.label for sample in dataset.samples] == second
        dataset.shuffle(2)  # as slime's dataset does it
        assert [sample.label for sample in dataset.samples] == third
        assert labels(source.get_samples(1)) == second[1:2]
        fresh = dataset[0]
        assert fresh == SlimeSample(prompt="prompt 8", label="8", metadata={"row": 8, "tags": ["a", "b"]}), "no numbers"
        assert dataset[0].metadata is not fresh.metadata
        for number, error in ((NUM_ROWS, IndexError), (-NUM_ROWS - 1, IndexError), ("3", TypeError)):
            with pytest.raises(error):
                dataset[number]
    assert random.getstate() == before, "the global generator is left alone"


def test_rows_without_a_sample_are_errors_by_their_number_and_passed_over_in_slices_of_any_length(tmp_path):
    path = slime_source.write_prompts(tmp_path / "p.jsonl", 6, {2: b'{"input": "no label"}', 5: b'{"label": 1}'})
    with source_of(path) as source:
        for number in (2, 5):
            with pytest.raises(errors.NoSamplesError, match=f"AD401 prompt {number} of epoch 0"):
                source.dataset[number]
        assert source.dataset[3].label == "3"
        assert [sample.label for sample in source.dataset.samples] == ["0", "1", "3", "4"]
        assert [sample.label for sample in source.dataset.samples[1:4]] == ["1", "3"]
    with source_of(slime_source.write_prompts(tmp_path / "p.jsonl", 700)) as source:
        assert [sample.label for sample in source.dataset.samples] == [str(n) for n in range(700)]
        assert [sample.label for sample in source.dataset.samples[10:690]] == [str(n) for n in range(10, 690)]


def test_in_the_stream_order_there_are_no_numbers_and_no_length(prompts):
    with source_of(prompts, asyncdata_order="stream") as source:
        for look in (lambda: source.dataset[0], lambda: len(source)):
            with pytest.raises(TypeError, match="--num-rollout"):
                look()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (tuple, "takes a list of groups, got tuple"),
        (lambda groups: [*groups, "group"], "group 2 must be a list of samples, got str"),
        (lambda groups: [*groups, groups[0][:1]], "group 2 has 1 samples, and n_samples_per_prompt is 2"),
        (lambda groups: [*groups, groups[1]], "group 2 is in the buffer already"),
        (lambda groups: [*groups, [object(), object()]], "AD432 group 2"),
    ],
)
def test_a_group_that_cannot_be_kept_is_refused_and_none_is_added(prompts, spoil, message):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        groups = source.get_samples(2)
        for kind in (AssertionError, ValueError, errors.InvalidGroupError, BadGroupError):
            with pytest.raises(kind, match=message):
                source.add_samples(spoil(groups))
        for nothing in ([], None):
            source.add_samples(nothing)
        assert (source.buffer, labels(source.get_samples(1))) == ([], ["2"])


@pytest.mark.parametrize("name", ["copies_lists", "asks_the_source"])
def test_a_filter_may_copy_the_groups_or_ask_the_source(prompts, name):
    box = []
    with source_of(prompts, buffer_filter_path=f"tests.support.slime_source.{name}", source=box) as source:
        box.append(source)
        back, buffer = source.get_samples(5), source.buffer
        source.add_samples(back)
        assert [*map(id, source.get_samples(2)), *map(id, source.buffer)] == [*map(id, back)]
        assert source.buffer is buffer
        source.buffer_filter = slime_source.newest_first
        assert labels(source.get_samples(2)) == ["4", "3"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("makes_groups", "AD430", "no group of the buffer"), ("returns_twice", "AD430", "returned a group twice"),
        ("returns_nothing", "AD430", "returned NoneType"),
        ("spoils_and_raises", "AD431", "raised KeyError.*; no group was taken"),
    ],
)  # fmt: skip
def test_a_filter_that_fails_is_an_error_and_takes_nothing(prompts, name, code, message):
    with source_of(prompts, buffer_filter_path=f"tests.support.slime_source.{name}") as source:
        back = source.get_samples(5)
        source.add_samples(back)
        for _ in range(2):
            with pytest.raises(errors.FilterError, match=f"{code} .*{name}.* {message}"):
                source.get_samples(2)
            assert source.buffer == back
        assert source.sample_offset == 5


def test_what_plugins_put_into_the_buffer_is_served_or_if_it_is_no_group_an_error_at_every_call(prompts):
    with source_of(prompts) as source:
        source.buffer = source.get_samples(1)
        assert labels(source.get_samples(2)) == ["0", "1"]
        source.buffer.append("group")
        for call in (lambda: source.get_samples(1), lambda: source.add_samples([[SlimeSample()]])):
            with pytest.raises(BadGroupError, match=r"AD432 buffer\[0\] must be a list of samples, got str"):
                call()


def read_only(path, **given):
    return contextlib.closing(ReadOnlyDataSource(args_for(path, **given)))


def test_the_read_only_source_serves_what_the_other_serves_and_takes_nothing_back(prompts):
    given = {"rollout_shuffle": True, "n_samples_per_prompt": 2}
    with source_of(prompts, **given) as other, read_only(prompts, **given) as source:
        groups = source.get_samples(25)
        assert groups == other.get_samples(25)
        assert source.get_samples(0) == []
        for nothing in (None, []):
            source.add_samples(nothing)
        for kind in (ReadOnlyError, RuntimeError, errors.InvalidGroupError):  # one of them is slime's
            with pytest.raises(kind, match="AD432 a ReadOnlyDataSource takes no groups back"):
                source.add_samples(groups[:1])
        assert not hasattr(source, "buffer")
        assert (source.get_buffer_length(), source.statistics()["asyncdata_buffered_groups"]) == (None, 0)


def test_the_read_only_source_continues_from_both_kinds_of_checkpoint(prompts, given):
    with read_only(prompts, **given) as source:
        slime_source.set_rollout_id(0)
        source.get_samples(7)
        slime_source.set_rollout_id(1)
        source.get_samples(3)
        source.update_metadata({"late": 1})
        source.save(0)
    for opened in (read_only, source_of):
        with opened(prompts, **given) as source:
            source.load(0)
            assert (source.sample_offset, source.get_metadata()) == (7, {})
            assert labels(source.get_samples(3)) == ["7", "8", "9"]
            source.sample_offset = 7
            source.save(0)


def test_the_read_only_source_refuses_a_checkpoint_with_groups_in_the_buffer_or_counts_them(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:2])
        source.save(0)
    with read_only(prompts, **given) as source:
        with pytest.raises(errors.SnapshotMismatchError, match=r"AD603 .*another buffer: saved 2 groups, present none"):
            source.load(0)
        assert source.sample_offset == 0
    with read_only(prompts, **given, asyncdata_allow_changed=["buffer"]) as source:
        source.load(0)
        assert (source.sample_offset, source.statistics()["asyncdata_dropped_groups_read_only_total"]) == (5, 2)


def test_of_a_mixture_each_sample_names_its_part_and_a_checkpoint_continues_every_part(given, tmp_path):
    for name in ("math", "code"):
        slime_source.write_prompts(tmp_path / f"{name}.jsonl", 40)
    mix = 'quota = 4\n[parts]\nmath = {source = "math.jsonl", weight = 3}\ncode = "code.jsonl"\n'
    given["asyncdata_mix"] = write(tmp_path / "mix.toml", mix.encode())

    def parts(groups):
        return [[(sample.metadata["source_name"], sample.label, sample.index) for sample in group] for group in groups]

    with source_of(None, **given) as source:
        slime_source.set_rollout_id(0)
        found = parts(source.get_samples(8))
        source.save(0)
        rest = parts(source.get_samples(40))
    assert Counter(name for group in found for name, _, _ in group) == {"math": 12, "code": 4}
    with source_of(None, **given) as source:
        source.load(0)
        groups = source.get_samples(40)
        assert parts(groups) == rest
        assert all(sample.metadata["tags"] == ["a", "b"] for group in groups for sample in group), "as in the row"
        with pytest.raises(errors.ConfigError, match="AD471 a mixture cannot go to another place"):
            source.sample_offset = 3
    with pytest.raises(errors.ConfigError, match="AD471 asyncdata_order: legacy"):
        AsyncDataSource(args_for(None, **given, asyncdata_order="legacy"))


TOLD = {"fully_async": True, "custom_async_data_buffer_path": "asyncdata.integrations.slime.AsyncDataBuffer"}


@pytest.mark.parametrize("package", ["slime", "miles"])
@pytest.mark.parametrize(
    ("more", "effect"),
    [
        ({}, "a restart of train_async.py skips the rollout that had begun before the checkpoint was written"),
        ({"fully_async": True}, f"--custom-async-data-buffer-path {TOLD['custom_async_data_buffer_path']} keeps them"),
        *((more, None) for more in (TOLD, {"colocate": True}, {"save": None}, {"rollout_global_dataset": False})),
        ({"told": True}, None),  # nothing is generated yet, but it will be told
    ],
    ids=str,
)
def test_a_driver_that_tells_no_rollout_is_warned_of_once_if_it_matters(prompts, given, package, more, effect):
    given |= more
    if "told" in given:
        slime_source.set_rollout_id(None)
    with capture_logs() as events, source_of(prompts, **given):  # no framework runs it
        with stand_ins(framework(package)), source_of(prompts, **given) as source:
            source.get_samples(2)
            if given["save"]:
                source.save(0)
    found = [event for event in events if event["event"] == "rollout.not_told"]
    assert [(event["log_level"], event["package"]) for event in found] == [("warning", package)] * (effect is not None)
    assert all((effect or "") in event["effect"] for event in found)


def test_what_a_rollout_function_tells_goes_before_the_driver(prompts, given):
    slime_source.set_rollout_id(7)
    with source_of(prompts, **given) as source:
        for rollout_id in (0, 1):
            source.begin_rollout(rollout_id)
            source.get_samples(4)
        source.save(0)
        source.load(0)
        assert source.sample_offset == 4
