"""slime's data source: groups that are given back, and what plugins do with them."""

from __future__ import annotations

import copy
import json
import sys
import types
from typing import Any

import pytest

from asyncdata import BadRowError, ConfigError, FilterError, InvalidGroupError
from asyncdata.integrations.slime import AsyncDataSource, BadGroupError
from asyncdata.integrations.slime import media as slime_media
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import (
    labels,
    no_rollout,
    numbers,
    source_of,
    write_prompts,
)

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


def groups_like(source: AsyncDataSource, number: int) -> list[list[Any]]:
    groups = source.get_samples(number)
    for group in groups:
        for sample in group:
            sample.response = f"answer to {sample.index}"
    return groups


# The buffer


def test_groups_given_back_come_first_and_are_the_very_objects(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        back = groups_like(source, 3)[1:]
        source.add_samples(back)
        assert source.get_buffer_length() == 2
        assert source.buffer == back

        groups = source.get_samples(4)

        assert [group is before for group, before in zip(groups, back, strict=False)] == [True, True]
        assert numbers(groups) == [(1, [2, 3]), (2, [4, 5]), (3, [6, 7]), (4, [8, 9])]
        assert source.get_buffer_length() == 0


def test_giving_back_nothing_does_nothing(prompts):
    with source_of(prompts) as source:
        source.add_samples([])
        source.add_samples(None)

        assert source.buffer == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda groups: tuple(groups), "takes a list of groups, got tuple"),
        (lambda groups: [*groups, "group"], "group 2 must be a list of samples, got str"),
        (lambda groups: [*groups, groups[0][:1]], "group 2 has 1 samples, and n_samples_per_prompt is 2"),
        (lambda groups: [*groups, groups[1]], "group 2 is in the buffer already"),
        (lambda groups: [*groups, [object(), object()]], "AD432 group 2"),
    ],
)
def test_a_group_that_cannot_be_kept_is_refused_and_none_is_added(prompts, spoil, message):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        groups = groups_like(source, 2)
        for kind in (AssertionError, ValueError, InvalidGroupError, BadGroupError):
            with pytest.raises(kind, match=message):
                source.add_samples(spoil(groups))

        assert source.buffer == []
        assert labels(source.get_samples(1)) == ["2"]


def test_what_no_snapshot_can_hold_is_refused_by_name(prompts):
    with source_of(prompts) as source:
        (group,) = source.get_samples(1)
        group[0].multimodal_inputs = {"images": [object()]}
        with pytest.raises(BadGroupError, match=r"AD432 group 0: .*multimodal_inputs.*images"):
            source.add_samples([group])


def test_a_group_may_be_made_of_lists_of_samples(prompts, tmp_path):
    with source_of(prompts, n_samples_per_prompt=2, save=str(tmp_path), load=str(tmp_path)) as source:
        ((one, two),) = source.get_samples(1)
        fan_out = [[one, copy.deepcopy(one)], [two]]
        source.add_samples([fan_out])
        source.save(0)
        assert source.get_samples(1) == [fan_out]
        source.load(0)

        assert source.get_samples(1) == [fan_out]


@pytest.mark.parametrize(
    ("name", "served", "left"),
    [
        ("newest_first", "43", "012"),
        ("keeps_everything", "01", "234"),
        ("returns_too_many", "12", "340"),
        ("copies_lists", "01", "234"),
        ("drops_the_oldest", "15", "234"),
        ("turns_round", "56", "43210"),
        ("asks_the_source", "01", "234"),
    ],
)
def test_any_filter_that_slime_takes_will_do(prompts, name, served, left):
    box: list[AsyncDataSource] = []
    with source_of(prompts, buffer_filter_path=f"tests.support.slime_source.{name}", source=box) as source:
        box.append(source)
        back = source.get_samples(5)
        buffer = source.buffer
        source.add_samples(back)

        assert labels(source.get_samples(2)) == list(served)
        assert labels(source.buffer) == list(left)
        assert source.buffer is buffer
        by_label = {group[0].label: group for group in back}
        assert all(group is by_label[group[0].label] for group in source.buffer)
        assert source.statistics()["asyncdata_dropped_groups_total"] == (name == "drops_the_oldest")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("makes_groups", "AD430 .*makes_groups.* no group of the buffer"),
        ("returns_twice", "AD430 .*returns_twice.* returned a group twice"),
        ("returns_nothing", "AD430 .*returned NoneType"),
        ("spoils_and_raises", "AD431 .*spoils_and_raises.* raised KeyError"),
    ],
)
def test_a_filter_that_fails_is_an_error_and_takes_nothing(prompts, name, message):
    with source_of(prompts, buffer_filter_path=f"tests.support.slime_source.{name}") as source:
        back = source.get_samples(5)
        source.add_samples(back)
        for _ in range(2):
            with pytest.raises(FilterError, match=message):
                source.get_samples(2)

            assert source.buffer == back
        assert source.sample_offset == 5


def test_a_filter_is_not_called_for_an_empty_buffer(prompts):
    with source_of(prompts, buffer_filter_path="tests.support.slime_source.spoils_and_raises") as source:
        assert labels(source.get_samples(2)) == ["0", "1"]


def test_plugins_may_change_the_buffer_themselves(prompts):
    with source_of(prompts) as source:
        groups = source.get_samples(3)
        source.buffer.append(groups[2])
        source.buffer.insert(0, groups[1])
        assert labels(source.get_samples(1)) == ["1"]
        source.buffer.clear()
        assert labels(source.get_samples(1)) == ["3"]
        source.buffer = [groups[0]]
        assert labels(source.get_samples(2)) == ["0", "4"]


def test_what_plugins_put_there_that_is_no_group_is_an_error_at_every_call(prompts):
    with source_of(prompts) as source:
        source.buffer.append("group")
        for call in (lambda: source.get_samples(1), lambda: source.add_samples([[SlimeSample()]])):
            with pytest.raises(BadGroupError, match=r"AD432 buffer\[0\] must be a list of samples, got str"):
                call()


def test_what_fails_in_the_stream_leaves_everything_as_it_was(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 6, {4: b'{"input": "no label"}'})
    with source_of(path, asyncdata_bad_rows="raise") as source:
        back = source.get_samples(2)
        source.add_samples(back)
        for _ in range(2):
            with pytest.raises(BadRowError, match="AD110"):
                source.get_samples(5)

            assert source.buffer == back
            assert (source.sample_offset, source.sample_index) == (2, 2)
        assert labels(source.get_samples(4)) == ["0", "1", "2", "3"]


def test_a_row_whose_media_fail_comes_again(tmp_path):
    path = tmp_path / "media.jsonl"
    path.write_text(json.dumps({"input": "<image> what?", "image": ["a.png"], "label": "0"}) + "\n")
    given = {"multimodal_keys": {"image": "image"}, "asyncdata_processor": "tests.support.slime_source.process_media"}
    with source_of(path, n_samples_per_prompt=2, broken=["yes"], **given) as source:
        with pytest.raises(RuntimeError, match="no such picture"):
            source.get_samples(1)

        source.args.broken.clear()
        (group,) = source.get_samples(1)
        assert numbers([group]) == [(0, [0, 1])]
        assert [sample.multimodal_inputs for sample in group] == [{"images": ["picture a.png"]}] * 2
        assert group[0].multimodal_inputs is not group[1].multimodal_inputs


def media_rows(path):
    rows = [
        {"input": "<image> and <image>", "image": ["a.png", {"type": "image", "image": "b.png", "max_pixels": 4}]},
        {"input": "nothing to see"},
    ]
    path.write_text("".join(json.dumps({"label": str(i), **row}) + "\n" for i, row in enumerate(rows)))
    return path


def test_what_is_made_of_media_is_not_saved_but_made_again(tmp_path):
    path = media_rows(tmp_path / "media.jsonl")
    given = {
        "multimodal_keys": {"image": "image"},
        "asyncdata_processor": "tests.support.slime_source.process_media_to_objects",
        "save": str(tmp_path),
        "load": str(tmp_path),
    }
    with source_of(path, **given) as source:
        groups = source.get_samples(2)
        assert groups[1][0].multimodal_inputs is None
        source.add_samples(groups)
        source.save(0)
        source.load(0)

        (seen,), (unseen,) = source.get_samples(2)
        assert seen is not groups[0][0]
        names = [picture.name for picture in seen.multimodal_inputs["images"]]
        assert names == [picture.name for picture in groups[0][0].multimodal_inputs["images"]]
        assert names == ["a.png", str({"type": "image", "image": "b.png", "max_pixels": 4})]
        assert unseen.multimodal_inputs is None


def test_without_a_function_for_media_slimes_own_is_called(tmp_path, monkeypatch):
    chats = []

    def process_vision_info(messages, processor):
        chats.append((messages, processor))
        return {"images": ["seen"], "videos": None}

    slimes = types.SimpleNamespace(process_vision_info=process_vision_info, load_processor=lambda name: f"of {name}")
    monkeypatch.setitem(sys.modules, "slime.utils.processing_utils", slimes)
    slime_media._processor.cache_clear()  # noqa: SLF001
    given = {"multimodal_keys": {"image": "image"}, "hf_checkpoint": "model"}
    with source_of(media_rows(tmp_path / "media.jsonl"), **given) as source:
        ((sample,),) = source.get_samples(1)

        assert sample.multimodal_inputs == {"images": ["seen"], "videos": None}
        rich = {"type": "image", "image": "b.png", "max_pixels": 4}
        assert chats == [([{"role": "user", "content": [{"type": "image", "image": "a.png"}, rich]}], "of model")]
    slimes.load_processor = lambda name: None
    slime_media._processor.cache_clear()  # noqa: SLF001
    with source_of(tmp_path / "media.jsonl", **given) as source:
        with pytest.raises(ConfigError, match="asyncdata_processor"):
            source.get_samples(1)
