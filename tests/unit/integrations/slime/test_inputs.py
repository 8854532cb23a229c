"""What rollouts do to ``multimodal_inputs`` is in a checkpoint; what the row's media make is made again."""

import collections
import contextlib
import copy
import gzip
import itertools
import json
import os
import pickle
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import BadRowError, ConfigError, SnapshotError
from asyncdata.integrations.slime import BadGroupError
from tests.support.slime_source import Picture, SlimeSample, checkpoint_at, labels, numbers, runs_in_miles, source_of

HOOKS = "tests.support.slime_source"
RICH = {"type": "image", "image": "c.png", "max_pixels": 4}


@pytest.fixture
def rows(jsonl_file):
    """A row with two pictures, one with none, and one whose picture is a part of its message."""
    rows = [{"input": "<image> and <image>", "image": ["a.png", "b.png"]}, {"input": "nothing to see"}]
    rows.append({"input": "<image>", "image": [RICH]})
    return jsonl_file([{"label": str(number), **row} for number, row in enumerate(rows)], "media.jsonl")


@pytest.fixture
def given(given):
    """Pictures are objects that no snapshot can hold."""
    media = {"multimodal_keys": {"image": "image"}, "asyncdata_processor": f"{HOOKS}.process_media_to_objects"}
    return {**given, "n_samples_per_prompt": 1, **media}


def named(value):
    """Pictures by their names, arrays as lists."""
    match value:
        case dict():
            return {key: named(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(named, value))
        case Picture():
            return f"<{value.name}>"
    return value.tolist() if isinstance(value, np.ndarray) else value


def images_of(sample):
    return sample.multimodal_inputs["images"]


OTHERS = {"audios": [np.zeros(300_000)], "__made__": ["images", 0], "more": {"__made__": None}}
CHANGES = {
    "an array more": lambda sample: images_of(sample).append(np.arange(3)),
    "arrays more, as geo3k has it": lambda sample: sample.multimodal_inputs.update(
        images=[*images_of(sample), np.arange(3), np.arange(4)], videos=None
    ),
    "another order": lambda sample: images_of(sample).reverse(),
    "one fewer": lambda sample: images_of(sample).pop(0),
    "one twice": lambda one: vars(one).update(multimodal_inputs={"images": (*images_of(one), *images_of(one)[:1])}),
    "none": lambda sample: vars(sample).update(multimodal_inputs=None),
    "others": lambda sample: vars(sample).update(multimodal_inputs=OTHERS),
}


@pytest.mark.parametrize("how", [copy.copy, pytest.param(copy.deepcopy, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_rollout_did_to_its_inputs_is_there_after_a_restart(rows, given, change, how):
    with source_of(rows, **{**given, "n_samples_per_prompt": 2}) as source:
        ((one, other),) = source.get_samples(1)
        source.add_samples([[how(one), other]])
        source.save(0)
        source.load(0)
        ((one, other),) = source.get_samples(1)
        change(one)
        source.add_samples([[one, other]])
        source.save(1)
        for number in (2, 3):  # once more, from what was restored
            source.load(number - 1)
            source.save(number)

        ((found, untouched),) = source.get_samples(1)
        assert named(found.multimodal_inputs) == named(one.multimodal_inputs)
        assert named(untouched.multimodal_inputs) == {"images": ["<a.png>", "<b.png>"]}


def test_what_no_checkpoint_can_hold_is_refused_when_it_is_given_back(rows, given):
    with source_of(rows, **given) as source:
        groups = source.get_samples(2)
        groups[0][0].multimodal_inputs["images"].append(Picture("of the rollout"))
        with pytest.raises(BadGroupError, match=r"AD432 group 0: \$\.multimodal_inputs\.images\[2\] is a .*Picture"):
            source.add_samples(groups)
        assert source.buffer == []


def test_inputs_that_nothing_was_done_to_take_no_room_and_are_made_again(rows, given):
    with source_of(rows, **given) as source:
        groups = source.get_samples(3)
        source.add_samples(groups)
        source.save(0)
        source.load(0)
        (seen,), (unseen,), (rich,) = source.get_samples(3)
    assert seen is not groups[0][0]
    assert named(seen.multimodal_inputs) == {"images": ["<a.png>", "<b.png>"]}
    assert unseen.multimodal_inputs is None
    assert named(rich.multimodal_inputs) == {"images": [f"<{RICH}>"]}

    _, fields = snapshots.load_fields(checkpoint_at(given["save"], 0))
    (seen,), (unseen,), _ = fields["buffer"]
    assert (seen["asyncdata_media"], seen["multimodal_inputs"]) == ({"images": ["a.png", "b.png"]}, None)
    assert unseen["multimodal_inputs"] is None
    assert not {name for name in seen if "made" in name or "__" in name}


def test_media_of_a_row_that_have_become_fewer_or_that_no_framework_makes_are_refused_by_name(rows, given):
    with source_of(rows, **given) as source:
        ((one,),) = source.get_samples(1)
        one.multimodal_inputs["images"].append(np.arange(3))
        source.add_samples([[one]])
        source.save(0)
    with source_of(rows, **{**given, "asyncdata_processor": f"{__name__}.makes_one"}) as source:
        with pytest.raises(SnapshotError, match="AD602 a group in the snapshot's buffer cannot be read: IndexError"):
            source.load(0)
    with source_of(rows, multimodal_keys={"image": "image"}, hf_checkpoint="x") as source:
        with pytest.raises(ConfigError, match="asyncdata_processor"):
            source.get_samples(1)


def makes_one(args, media):
    """Of all pictures the first, which cannot be sent by a worker."""
    return {"images": [Picture(media["images"][0])]}


def test_samples_of_which_no_row_is_known_or_that_come_from_another_process_keep_all_they_have(rows, given):
    with source_of(rows, **given) as source:
        ((one,),) = source.get_samples(1)
        sent = pickle.loads(pickle.dumps(one))  # noqa: S301
        sent.multimodal_inputs["images"].append(np.arange(3))
        made = SlimeSample(label="own", multimodal_inputs={"images": [np.arange(2)]})
        copied = SlimeSample(label="copied", multimodal_inputs={"images": [np.arange(3)]})
        copied.asyncdata_media = {"images": ["a.png"]}
        source.add_samples([[sent], [made], [copied]])
        source.save(0)
        source.load(0)

        assert labels(source.buffer) == ["0", "own", "copied"]
        found = [named(group[0].multimodal_inputs["images"]) for group in source.buffer]
        assert found == [["<a.png>", "<b.png>", [0, 1, 2]], [[0, 1]], [[0, 1, 2]]]


def pictures():
    """Of several kinds, each with pixels that differ."""
    image = pytest.importorskip("PIL.Image")
    rgba = image.fromarray(np.arange(12 * 7 * 4, dtype=np.uint8).reshape(12, 7, 4))
    large = image.fromarray(np.arange(900 * 700 * 3, dtype=np.uint8).reshape(900, 700, 3))
    large.info |= {"dpi": (72, 72), "transparency": 3, "cannot be kept": object()}
    return [rgba, large, *(rgba.convert(mode) for mode in ("RGB", "L", "1", "P", "F", "I", "CMYK", "LA"))]


def test_pictures_of_a_rollout_come_back_pixel_by_pixel_or_if_pillow_is_missing_are_named(rows, given, monkeypatch):
    added = pictures()
    with source_of(rows, **{**given, "n_samples_per_prompt": 2}) as source:
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

        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        with pytest.raises(SnapshotError, match="AD602 .*Pillow is not installed"):
            source.load(0)


def decode(args, media):
    """Pictures that are opened, and not decoded, as slime leaves them; notes who did it."""
    assert args.lock is None or args.lock.acquire(blocking=False)
    with open(args.log, "a") as log:
        log.write(f"{os.getpid()} {media['images'][0]}\n")
    return {"images": [pytest.importorskip("PIL.Image").open(path) for path in media["images"]], "sizes": np.arange(5)}


@pytest.fixture
def pixels(tmp_path):
    image = pytest.importorskip("PIL.Image")
    found = {}
    for number, mode in enumerate(("RGB", "L", "P", "RGBA", "RGB", "L")):
        made = image.fromarray(np.full((20, 30, 3), number * 40, np.uint8)).convert(mode)
        made.save(path := str(tmp_path / f"{number}.png"))
        found[path] = (mode, (30, 20), made.convert("RGB").tobytes())
    return found


@pytest.fixture
def opened(pixels, jsonl_file, tmp_path, given):
    """A function that opens a source of the pictures with two workers."""
    path = jsonl_file([{"input": "<image>", "image": [name], "label": name} for name in pixels], "pictures.jsonl")
    (tmp_path / "log").touch()
    ours = {"asyncdata_processor": f"{__name__}.decode", "asyncdata_num_workers": 2, "n_samples_per_prompt": 4}
    ours |= {"log": str(tmp_path / "log"), "lock": None}
    return lambda data=path, **changed: source_of(data, **given | ours | changed)


def shown(sample):
    (image,) = images_of(sample)
    return image.mode, image.size, image.convert("RGB").tobytes()


def decoded_here(tmp_path):
    done = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert done
    return [path for process, path in done if process == str(os.getpid())]


@pytest.mark.parametrize("is_zipped", [False, True])
def test_workers_decode_each_picture_once_for_its_group_and_the_caller_none(opened, pixels, tmp_path, is_zipped):
    zipped = {"data": str(tmp_path / "pictures.jsonl.gz"), "asyncdata_order": "stream"}
    with gzip.open(zipped["data"], "wt") as file:
        file.writelines(json.dumps({"input": "<image>", "image": [name], "label": name}) + "\n" for name in pixels)
    with opened(**zipped if is_zipped else {}) as source:
        groups = source.get_samples(6)
    assert [shown(group[0]) for group in groups] == list(pixels.values())
    for group in groups:
        first = group[0].multimodal_inputs
        assert np.array_equal(first["sizes"], np.arange(5))
        for one in group[1:]:
            assert one.multimodal_inputs is not first
            assert images_of(one) is not first["images"]
            assert images_of(one)[0] is first["images"][0]
            assert one.multimodal_inputs["sizes"] is first["sizes"]
    assert decoded_here(tmp_path) == []


def test_a_run_that_is_resumed_has_the_next_pictures_and_the_buffers_again(opened, pixels, tmp_path):
    with opened() as source:
        groups = source.get_samples(3)
        source.add_samples(groups[1:2])
        (back,) = source.get_samples(1)
        assert back is groups[1]
        assert shown(back[0]) == list(pixels.values())[1]
        source.add_samples([back])
        source.save(0)
        assert len(checkpoint_at(source.args.save, 0).read_bytes()) < 20_000
        assert decoded_here(tmp_path) == []
    (tmp_path / "log").write_text("")
    with opened(load=source.args.save) as source:
        source.load(0)
        groups = source.get_samples(4)
    expected = list(pixels.values())
    assert [shown(group[-1]) for group in groups] == [expected[1], *expected[3:]]
    assert decoded_here(tmp_path) == [list(pixels)[1]], "once for the four samples of the buffer's group"


def test_a_damaged_picture_is_a_bad_row_and_its_group_is_not_delivered(opened, pixels):
    path = list(pixels)[2]
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:-30])
    with opened() as source:
        groups = source.get_samples(5)
        assert [group[0].label for group in groups] == [name for name in pixels if name != path]
        assert numbers(groups)[2] == (2, [8, 9, 10, 11])
    with opened(asyncdata_bad_rows="raise") as source, pytest.raises(BadRowError, match="AD457.*pictures.jsonl:3"):
        source.get_samples(5)


@pytest.mark.parametrize("fault", ["inputs", "args"])
def test_what_workers_cannot_send_is_made_by_the_caller(opened, pixels, tmp_path, fault):
    makes_one = {"asyncdata_processor": f"{__name__}.makes_one"}
    with opened(**makes_one if fault == "inputs" else {"lock": threading.Semaphore(9)}) as source:
        groups = source.get_samples(2)
    if fault == "inputs":
        assert [images_of(group[3])[0].name for group in groups] == list(pixels)[:2]
    else:
        assert [shown(group[3]) for group in groups] == list(pixels.values())[:2]
        assert decoded_here(tmp_path) == list(pixels)[:2]


def test_a_row_whose_media_fail_when_the_caller_makes_them_comes_again(rows):
    media = {"multimodal_keys": {"image": "image"}, "asyncdata_processor": f"{HOOKS}.process_media"}
    broken = collections.deque(["yes"])  # no worker has it
    with source_of(rows, n_samples_per_prompt=2, broken=broken, rollout_shuffle=False, **media) as source:
        with pytest.raises(RuntimeError, match="no such picture"):
            source.get_samples(1)
        source.args.broken.clear()
        (group,) = source.get_samples(1)
    assert numbers([group]) == [(0, [0, 1])]
    assert [sample.multimodal_inputs for sample in group] == [{"images": ["picture a.png", "picture b.png"]}] * 2
    assert group[0].multimodal_inputs is not group[1].multimodal_inputs


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_without_a_function_for_media_that_of_the_framework_is_called(rows, tmp_path, monkeypatch, package):
    chats, seen = [], {"images": ["seen"], "videos": None}
    module = types.SimpleNamespace(load_processor=lambda name: f"of {name}")
    module.process_vision_info = lambda messages, processor: chats.append((messages, processor)) or dict(seen)
    monkeypatch.setitem(sys.modules, f"{package}.utils.processing_utils", module)
    name = f"{package} {tmp_path}"

    def samples(checkpoint):
        inside = runs_in_miles() if package == "miles" else contextlib.nullcontext()
        with inside, source_of(rows, multimodal_keys={"image": "image"}, hf_checkpoint=checkpoint) as source:
            return [sample for (sample,) in source.get_samples(3)]

    assert [sample.multimodal_inputs for sample in samples(name)] == [seen, None, seen]
    parts = [{"type": "image", "image": name} for name in ("a.png", "b.png")]
    if package == "slime":  # an object of slime's rows is a part of a message
        expected = [[{"role": "user", "content": parts}], [{"role": "user", "content": [RICH]}]]
        # More are made ahead.
        assert chats == [(one, f"of {name}") for one in itertools.islice(itertools.cycle(expected), max(2, len(chats)))]
    module.load_processor = lambda name: None
    with pytest.raises(ConfigError, match="asyncdata_processor"):
        samples(f"none of {tmp_path}")
