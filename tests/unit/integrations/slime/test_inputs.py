"""What rollouts do to ``multimodal_inputs`` is in a checkpoint; what the row's media make is made again."""

from __future__ import annotations

import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import SnapshotError
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.integrations.slime import BadGroupError
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import Picture, labels, source_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOOK = "tests.support.slime_source.process_media_to_objects"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A row with two pictures, and one with none."""
    path = tmp_path / "media.jsonl"
    lines = [{"input": "<image> and <image>", "image": ["a.png", "b.png"]}, {"input": "nothing to see"}]
    path.write_text("".join(json.dumps({"label": str(i), **row}) + "\n" for i, row in enumerate(lines)))
    return path


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Pictures are objects that no snapshot can hold."""
    folder = str(tmp_path / "run")
    return {"multimodal_keys": {"image": "image"}, "asyncdata_processor": HOOK, "save": folder, "load": folder}


def named(value: Any) -> Any:
    """Pictures by their names, arrays as lists."""
    if isinstance(value, dict):
        return {key: named(item) for key, item in value.items()}

    if isinstance(value, list | tuple):
        return type(value)(map(named, value))

    if isinstance(value, Picture):
        return f"<{value.name}>"

    return value.tolist() if isinstance(value, np.ndarray) else value


def append_array(sample: Any) -> None:
    sample.multimodal_inputs["images"].append(np.arange(3))


def extend_as_geo3k_does(sample: Any) -> None:
    sample.multimodal_inputs["images"].extend([np.arange(3), np.arange(4)])
    sample.multimodal_inputs["videos"] = None


def swap(sample: Any) -> None:
    sample.multimodal_inputs["images"].reverse()


def drop_one(sample: Any) -> None:
    del sample.multimodal_inputs["images"][0]


def show_twice(sample: Any) -> None:
    sample.multimodal_inputs = {"images": (*sample.multimodal_inputs["images"], sample.multimodal_inputs["images"][0])}


def take_away(sample: Any) -> None:
    sample.multimodal_inputs = None


def replace_all(sample: Any) -> None:
    sample.multimodal_inputs = {"audios": [np.zeros(300_000)], "__made__": ["images", 0], "more": {"__made__": None}}


CHANGES = [append_array, extend_as_geo3k_does, swap, drop_one, show_twice, take_away, replace_all]


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", [lambda sample: sample, copy.deepcopy, copy.copy])
def test_what_a_rollout_did_to_its_inputs_is_there_after_a_restart(
    rows: Path, given: dict[str, Any], change: Callable[[Any], None], how: Callable[[Any], Any]
) -> None:
    with source_of(rows, n_samples_per_prompt=2, **given) as source:
        ((one, other),) = source.get_samples(1)
        one = how(one)
        change(one)
        source.add_samples([[one, other]])
        source.save(0)
        for number in (1, 2):  # once more, from what was restored
            source.load(number - 1)
            source.save(number)

        ((found, untouched),) = source.get_samples(1)
        assert named(found.multimodal_inputs) == named(one.multimodal_inputs)
        assert named(untouched.multimodal_inputs) == {"images": ["<a.png>", "<b.png>"]}


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
def test_it_can_be_changed_again_after_a_restart(
    rows: Path, given: dict[str, Any], change: Callable[[Any], None]
) -> None:
    with source_of(rows, **given) as source:
        source.add_samples(source.get_samples(1))
        source.save(0)
    with source_of(rows, **given) as source:
        source.load(0)
        ((one,),) = source.get_samples(1)
        change(one)
        source.add_samples([[one]])
        source.save(1)
        source.load(1)

        assert named(source.buffer[0][0].multimodal_inputs) == named(one.multimodal_inputs)


def test_what_no_checkpoint_can_hold_is_refused_when_it_is_given_back(rows: Path, given: dict[str, Any]) -> None:
    with source_of(rows, **given) as source:
        groups = source.get_samples(2)
        groups[0][0].multimodal_inputs["images"].append(Picture("of the rollout"))
        with pytest.raises(BadGroupError, match=r"AD432 group 0: \$\.multimodal_inputs\.images\[2\] is a .*Picture"):
            source.add_samples(groups)

        assert source.buffer == []


def test_inputs_that_nothing_was_done_to_take_no_room(rows: Path, given: dict[str, Any]) -> None:
    with source_of(rows, **given) as source:
        source.add_samples(source.get_samples(2))
        source.save(0)
        _, fields = snapshots.load_fields(f"{given['save']}/rollout/global_dataset_state_dict_0.asyncdata")

    (seen,), (unseen,) = fields["buffer"]
    assert (seen["asyncdata_media"], seen["multimodal_inputs"]) == ({"images": ["a.png", "b.png"]}, None)
    assert unseen["multimodal_inputs"] is None
    assert not {name for name in seen if "made" in name or "__" in name}


def test_a_row_whose_media_have_become_fewer_is_an_error(rows: Path, given: dict[str, Any]) -> None:
    with source_of(rows, **given) as source:
        ((one,),) = source.get_samples(1)
        one.multimodal_inputs["images"].append(np.arange(3))
        source.add_samples([[one]])
        source.save(0)
    with source_of(rows, **{**given, "asyncdata_processor": f"{__name__}.makes_one"}) as source:
        with pytest.raises(SnapshotError, match="AD602 a group in the snapshot's buffer cannot be read: IndexError"):
            source.load(0)


def makes_one(args: Any, media: dict[str, list[Any]]) -> Any:
    """Of all pictures the first."""
    return {"images": [Picture(media["images"][0])]}


def test_samples_of_which_no_row_is_known_keep_all_they_have(rows: Path, given: dict[str, Any]) -> None:
    with source_of(rows, **given) as source:
        made = SlimeSample(label="own", multimodal_inputs={"images": [np.arange(2)]})
        copied = SlimeSample(label="copied", multimodal_inputs={"images": [np.arange(3)]})
        copied.asyncdata_media = {"images": ["a.png"]}
        source.add_samples([[made], [copied]])
        source.save(0)
        source.load(0)

        assert labels(source.buffer) == ["own", "copied"]
        assert [named(group[0].multimodal_inputs["images"]) for group in source.buffer] == [[[0, 1]], [[0, 1, 2]]]


def test_samples_can_be_sent_to_other_processes(rows: Path, given: dict[str, Any]) -> None:
    with source_of(rows, **given) as source:
        ((one,),) = source.get_samples(1)
        back = pickle.loads(pickle.dumps(one))  # noqa: S301
        back.multimodal_inputs["images"].append(np.arange(3))
        source.add_samples([[back]])
        source.save(0)
        source.load(0)

        assert named(source.buffer[0][0].multimodal_inputs) == {"images": ["<a.png>", "<b.png>", [0, 1, 2]]}


def pictures() -> list[Any]:
    """Of several kinds, each with pixels that differ."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(12 * 7 * 4, dtype=np.uint8).reshape(12, 7, 4)
    rgba = image.fromarray(pixels)
    large = image.fromarray(np.arange(900 * 700 * 3, dtype=np.uint8).reshape(900, 700, 3))
    large.info |= {"dpi": (72, 72), "transparency": 3, "cannot be kept": object()}
    others = [rgba.convert(mode) for mode in ("RGB", "L", "1", "P", "F", "I", "CMYK", "LA")]
    return [rgba, large, *others]


def test_pictures_of_a_rollout_come_back_pixel_by_pixel(rows: Path, given: dict[str, Any]) -> None:
    added = pictures()
    with source_of(rows, n_samples_per_prompt=2, **given) as source:
        (group,) = source.get_samples(1)
        group[0].multimodal_inputs["images"].extend(added)
        group[1].metadata["shown"] = {"__image__": added[0]}
        source.add_samples([group])
        expected = [(image.mode, image.size, image.getpalette(), image.tobytes()) for image in added]
        added[1].paste(0, (0, 0, 100, 100))  # later changes do not count
        source.save(0)
        source.load(0)

        ((one, other),) = source.buffer
        found = one.multimodal_inputs["images"]
        assert named(found[:2]) == ["<a.png>", "<b.png>"]
        assert [(image.mode, image.size, image.getpalette(), image.tobytes()) for image in found[2:]] == expected
        assert found[3].info == {"dpi": (72, 72), "transparency": 3}
        assert other.metadata["shown"]["__image__"].tobytes() == added[0].tobytes()


def test_without_pillow_a_picture_cannot_be_restored_and_is_named(
    rows: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with source_of(rows, **given) as source:
        ((one,),) = source.get_samples(1)
        one.metadata["shown"] = pictures()[0]
        source.add_samples([[one]])
        source.save(0)
        monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
        with pytest.raises(SnapshotError, match="AD602 .*Pillow is not installed"):
            source.load(0)
