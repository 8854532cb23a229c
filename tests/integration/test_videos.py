"""Chats with videos: plan and load have what the whole processor makes of all frames, and decode only what it uses."""

import base64
import json
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncdata import BadRows, ChatTokenizeFn, DataLoader, Processor, PromptTokenizeFn
from asyncdata.errors import BadRowError, ConfigError
from tests.support import media
from tests.support.media import ANSWER, asks, draw, film, loaded, loader_of, written
from tests.support.media import VIDEO_FAMILIES as FAMILIES
from tests.support.media import VIDEO_KINDS as KINDS
from tests.support.media import save_video_processor as save
from tests.support.media import video_processor_of as processor_of

pytest.importorskip("av", reason="needs PyAV")
pytest.importorskip("torchvision", reason="needs torchvision: the video processors of transformers do")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A processor of each family."""
    folder = tmp_path_factory.mktemp("processors")
    return {family: save(folder / family, family) for family in FAMILIES}


def video(value, key="video", **more):
    return {"type": "video", key: value, **more}


def check_row(processor, template, row, sample):
    """Compare a sample with what the processor makes of all frames of the row."""
    parts = row["messages"][0]["content"]
    found = [media.frames_of(part["video"]) for part in parts if part["type"] == "video"]
    images = [part["image"] for part in parts if part["type"] == "image"]
    text = processor.tokenizer.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
    try:
        whole = processor(
            text=[text],
            images=[images] if images else None,
            videos=[frames for frames, _ in found],
            video_metadata=[media.metadata_of(*each) for each in found],
            return_tensors="pt",
            add_special_tokens=False,
        )
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError):
        assert sample is None
        return

    assert sample is not None
    assert sample.tokens.tolist() == whole.pop("input_ids")[0].tolist()
    del whole["attention_mask"]
    for name, wanted in whole.items():
        values = np.asarray(wanted[0] if name == "mm_token_type_ids" else wanted)
        assert np.array_equal(sample.columns[name], values.astype(sample.columns[name].dtype)), name
    types = sample.columns.get("mm_token_type_ids")
    trained = sample.labels != -100
    assert trained.any()
    if types is not None:
        assert not (trained & (types > 0)).any()
        assert sample.columns["mrope"].tolist() == positions(processor, sample)


def positions(processor, sample):
    """As the model counts them."""
    import torch
    from transformers import Qwen2_5_VLModel, Qwen3VLModel

    model = Qwen3VLModel if type(processor).__name__ == "Qwen3VLProcessor" else Qwen2_5_VLModel
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=media.TOKENS_PER_SECOND)
    own = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    own.get_vision_position_ids = partial(model.get_vision_position_ids, own)
    found = {name: torch.from_numpy(array.copy()) for name, array in sample.columns.items()}
    given = {name: found[name] for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if name in found}
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    types = found["mm_token_type_ids"][None]
    return model.get_rope_index(own, tokens, mm_token_type_ids=types, **given)[0][:, 0].T.tolist()


def check_rows(tmp_path, family, number, seed):
    """Rows of random media, with random settings of the processor."""
    rng, rows = random.Random(seed), []
    settings = media.video_settings_of(family, rng)
    for row in range(number):
        parts = [{"type": "text", "text": f"row {row}"}]
        for each in range(1 if family == "internvl" else rng.randint(1, 2)):
            path = film(
                tmp_path,
                KINDS[rng.randrange(len(KINDS))],
                num_frames=rng.randint(3, 60),
                size=(rng.randint(24, 180), rng.randint(24, 180)),
                fps=rng.choice(["8", "25", "30000/1001", "60", "25/2"]),
                keys=rng.choice([5, 12, 250]),
                seed=1000 * seed + 10 * row + each,
            )
            parts.insert(rng.randint(0, len(parts)), video(path))
        if rng.random() < 0.3:
            path = draw(tmp_path / f"{row}.png", rng.randint(30, 200), rng.randint(30, 200), row)
            parts.insert(rng.randint(0, len(parts)), {"type": "image", "image": path})
        rows.append(asks(*parts) | {"metadata": {"row": row}})
    folder = save(tmp_path / family, family, dict(settings))
    with loader_of(tmp_path, folder, *rows, knobs={"bad_rows": "skip", "batch_size": 1}) as loader:
        samples = {sample.metadata["row"]: sample for batch in loader for sample in batch}
    processor = processor_of(family, json.dumps(settings))
    template = (tmp_path / family / "chat_template.jinja").read_text()
    for row in rows:
        check_row(processor, template, row, samples.get(row["metadata"]["row"]))
    return len(samples)


OF_SEEDS = [
    (4, 1),
    *(pytest.param(11, seed, marks=pytest.mark.thorough) for seed in range(2, 6)),
    *(pytest.param(11, seed, marks=[pytest.mark.thorough, pytest.mark.slow]) for seed in range(6, 48)),
]
"""How many rows, and of which seed."""


@pytest.mark.parametrize(("number", "seed"), OF_SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_many_kinds_of_videos_are_what_the_processor_makes_of_all_frames(tmp_path, family, number, seed):
    assert check_rows(tmp_path, family, number, seed) or seed > 1


def test_a_video_may_be_named_in_all_ways_that_people_have(tmp_path, folders):
    path = film(tmp_path, "a.mp4", num_frames=9, size=(64, 48))
    text = base64.b64encode(Path(path).read_bytes()).decode()
    of_xtuner = {"url": path, "image_wh": [64, 48], "origin_video_length": 9, "origin_fps": 8.0}
    user, turns = {"role": "user", "content": "<video>?"}, [{"from": "human", "value": "<video>?"}]
    ways = [(path, "video"), (path, "path"), (f"file://{path}", "url"), (of_xtuner, "video_url")]
    ways.append(({"bytes": text, "path": None}, "video"))
    rows = [
        *(asks(video(value, key), {"type": "text", "text": "?"}) for value, key in ways),
        {"messages": [user, ANSWER], "videos": [path]},
        {"messages": [user, ANSWER], "video": path},
        {"messages": [user, ANSWER], "videos": {"bytes": text, "path": "a.mp4"}, "images": []},
    ]
    samples = loaded(tmp_path, folders["qwen3_vl"], *rows)
    chats = {"conversations": [*turns, {"from": "gpt", "value": "yes"}], "video": [path]}
    for sample in [*samples, *loaded(tmp_path, folders["qwen3_vl"], chats)]:
        assert sample.tokens.tolist() == samples[0].tokens.tolist()
        assert np.array_equal(sample.columns["pixel_values_videos"], samples[0].columns["pixel_values_videos"])
    (sample,) = loaded(tmp_path, folders["qwen3_vl"], {"messages": [user, ANSWER], "videos": []})
    assert not len(sample.columns["video_grid_thw"]), "then it is text"


def test_frames_may_be_pictures_of_a_list_or_a_folder_and_all_are_taken(tmp_path, folders):
    (tmp_path / "frames").mkdir()
    paths = [draw(tmp_path / "frames" / f"{number}.png", 64, 48, number) for number in (2, 10, 1, 9, 100)]
    paths.sort(key=lambda path: int(Path(path).stem))
    listed = asks(video(paths, sample_fps=4))
    rows = [listed, asks(video(str(tmp_path / "frames"), processed_fps=4)), asks(video(paths))]
    timed, in_folder, slower = loaded(tmp_path, folders["qwen3_vl"], *rows)
    assert timed.columns["video_grid_thw"].tolist()[0][0] == 3
    assert np.array_equal(timed.columns["pixel_values_videos"], in_folder.columns["pixel_values_videos"])
    assert timed.tokens.tolist() == in_folder.tokens.tolist()
    text = processor_of("qwen3_vl", "{}").tokenizer.decode
    assert "<0.1 seconds>" in text(timed.tokens)
    assert "<0.2 seconds>" in text(slower.tokens), "two frames a second"


def test_frames_may_say_their_times_as_xtuner_has_them(tmp_path, folders):
    paths = [draw(tmp_path / f"{number}.png", 64, 48, number) for number in range(5)]
    at = [0.5, 1, 4, 6.5, 60]
    of_xtuner = {"url": paths, "image_wh": [64, 48], "processed_fps": 4, "frames_timestamp": at}
    rows = [asks(video(of_xtuner, "video_url")), asks(video(paths, frames_timestamp=at)), asks(video(paths))]
    *timed, plain = loaded(tmp_path, folders["qwen3_vl"], *rows)
    said = processor_of("qwen3_vl", "{}").tokenizer.decode
    for sample in timed:
        assert re.findall(r"<([0-9.]+) seconds>", said(sample.tokens)) == ["0.8", "5.2", "60.0"], "means of two"
        assert np.array_equal(sample.columns["pixel_values_videos"], plain.columns["pixel_values_videos"])
    for family, wrong, message in [
        ("qwen3_vl", at[1:], "need a number for each of 5"),
        ("qwen3_vl", [*at[1:], "1"], "need a number for each of 5"),
        ("qwen2_5_vl", at, "its model takes no times of frames: leave it out"),
    ]:
        with pytest.raises(BadRowError, match=f"AD457.*video 1 of the chat has 'frames_timestamp', .*{message}"):
            loaded(tmp_path, folders[family], asks(video(paths, frames_timestamp=wrong)))


def test_settings_of_the_video_processor_may_be_the_users(tmp_path, folders):
    row = asks(video(film(tmp_path, "a.mkv")))
    for family, settings, grid in [
        ("qwen2_5_vl", {"do_sample_frames": False}, 12),
        ("qwen3_vl", {"num_frames": 6, "fps": None}, 3),
    ]:
        (sample,) = loaded(tmp_path, folders[family], row, video=settings)
        assert sample.columns["video_grid_thw"][0, 0] == grid
    (sample,) = loaded(tmp_path, folders["internvl"], row, video={"num_frames": 3}, dtype="bfloat16")
    assert len(sample.columns["pixel_values"]) == 3
    with pytest.raises(ConfigError, match=r"AD457 Processor\(video=...\) has frames_per_second, which Qwen3VL"):
        loaded(tmp_path, folders["qwen3_vl"], row, video={"frames_per_second": 1})


def test_what_a_plan_of_videos_depends_on_is_part_of_the_function(tmp_path, folders):
    folder = folders["qwen2_5_vl"]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    digests = {ChatTokenizeFn(folder, processor=str(where)).settings_digest() for where in (folder, copy)}
    digests.add(ChatTokenizeFn(folder, processor=Processor(folder=str(copy), video={"fps": 1})).settings_digest())
    (copy / "config.json").write_text(json.dumps({"vision_config": {"tokens_per_second": 25}}))
    digests.add(ChatTokenizeFn(folder, processor=str(copy)).settings_digest())
    assert len(digests) == 3
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"AD457 there is no config.json in .*tokens_per_second"):
        ChatTokenizeFn(folder, processor=str(copy)).settings_digest()


def playlist(tmp_path):
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:5,\n{film(tmp_path, 'a.mp4')}\n#EXT-X-ENDLIST\n")
    return (tmp_path / "list.mp4", "cannot be read")


def broken(kind, start, stop):
    """Zeros in place of the bytes between these parts of a video; nothing, if they are up to its end."""

    def made(tmp_path):
        path = Path(film(tmp_path, kind, seed=3))
        data = path.read_bytes()
        first, last = int(start * len(data)), int(stop * len(data))
        path.write_bytes(data[:first] + bytes(last - first) * (stop < 1) + data[last:])
        return path, "(cannot be read|has no frame [0-9]+|has a frame [0-9]+ that is damaged)"

    return made


def of_two_sizes(tmp_path):
    return [draw(tmp_path / f"{side}.png", side, 60) for side in (60, 80)], "frames of several sizes"


def one_frame_too_many(tmp_path):
    return film(tmp_path, "a.mp4", num_frames=382, size=(32, 32), fps="24000/1001"), "asks for frame 382 of 382"


BAD = {
    "no such file": lambda _: ("/no/such.mp4", "No such file"),
    "text": lambda tmp_path: (tmp_path / "rows.jsonl", "cannot be read"),
    "a playlist": playlist,
    "cut mp4": broken("a.mp4", 0.6, 1),
    "cut avi": broken("a.avi", 0.5, 1),
    "damaged avi": broken("a.avi", 0.7, 0.75),
    "frames of two sizes": of_two_sizes,
    "a folder without pictures": lambda tmp_path: (tmp_path, "a folder without pictures"),
    "one frame too many": one_frame_too_many,
}


@pytest.mark.parametrize("name", BAD)
def test_a_video_that_cannot_be_had_makes_a_bad_row(tmp_path, folders, name):
    (tmp_path / "rows.jsonl").write_text("rows\n")
    value, reason = BAD[name](tmp_path)
    with pytest.raises(BadRowError, match=f"AD457.*rows.jsonl:1 .*video 1 of the chat.*{reason}"):
        loaded(tmp_path, folders["qwen2_5_vl"], asks(video(value if isinstance(value, list) else str(value))))


def test_what_is_not_read_of_a_video_is_refused_by_name(tmp_path, folders):
    path = film(tmp_path, "a.mp4")
    for row, settings, message in [
        (asks(video(path, fps=2)), {}, "AD457.*'fps', which is not read"),
        (asks(video({"url": path, "frames_timestamp": [0.1]}, "video_url")), {}, "AD457.*'frames_timestamp', .*only"),
        (asks(video(path)), {"max_frames": 2}, "AD457.*6 frames to load, more than max_frames=2"),
        (asks(video(path)), {"max_pixels": 1000}, "AD457.*96 x 64 pixels"),
        (asks({"type": "text", "text": "<video>"}) | {"videos": [path, path]}, {}, "AD114.*2 videos.*places for 1"),
        (asks({"type": "audio", "audio": path}), {}, "AD130.*sound 1 of the chat.*two phases"),
    ]:
        with pytest.raises(BadRowError, match=message):
            loaded(tmp_path, folders["qwen3_vl"], row, **settings)


def test_without_pyav_the_extra_is_named(tmp_path, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"AD457 videos need PyAV .*\[video\]"):
        loaded(tmp_path, folders["qwen3_vl"], asks(video(film_without_av(tmp_path))))


def film_without_av(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"some")
    return str(tmp_path / "a.mp4")


def damaged(data, rng):
    data = bytearray(data)
    how = rng.randrange(4)
    if how == 0:
        return data[: rng.randrange(len(data))]

    if how == 1:
        return data[:60] + rng.randbytes(rng.randrange(4000))

    for _ in range(rng.choice([4, 40, 400])):
        data[rng.randrange(len(data) if how == 2 else min(len(data), 400))] = rng.randrange(256)
    return data


def test_damaged_videos_are_bad_rows_that_name_them(tmp_path, folders):
    rng, rows = random.Random(3), []
    whole = [Path(film(tmp_path, kind, seed=seed)).read_bytes() for seed, kind in enumerate(KINDS)]
    for number in range(50):
        which = rng.randrange(len(KINDS))
        path = tmp_path / f"{number}.{KINDS[which].rpartition('.')[2]}"
        path.write_bytes(damaged(whole[which], rng))
        rows.append(asks(video(str(path))) | {"metadata": {"path": str(path)}})
    policy = BadRows(policy="quarantine", path=str(tmp_path / "bad.jsonl"))
    knobs = {"num_workers": 1, "batch_size": 1, "bad_rows": policy}
    with loader_of(tmp_path, folders["qwen3_vl"], *rows, knobs=knobs) as loader:
        kept = {sample.metadata["path"] for batch in loader for sample in batch}
    bad = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert len(kept) + len(bad) == 50
    assert len(bad) > 20
    paths = {row["metadata"]["path"] for row in rows} - kept
    assert {path for path in paths for each in bad if path in each["reason"]} == paths
    assert {each["code"] for each in bad} == {"AD457"}


def test_prompts_have_videos_for_the_trainer_and_for_the_engine(tmp_path, folders):
    path = film(tmp_path, "a.mp4")
    picture = draw(tmp_path / "a.png", 90, 60)
    rows = written(tmp_path, [{"input": "<video> or <image>?", "videos": [path], "image": picture}])
    fn = PromptTokenizeFn(folders["qwen3_vl"], processor=Processor(), apply_chat_template=True)
    knobs = {"num_workers": 1, "shuffle": False, "epochs": 1, "n_samples_per_prompt": 2}
    with DataLoader(rows, tokenize_fn=fn, **knobs) as loader:
        ((first, second),) = loader.get_samples(1)
    assert first.extra == {"videos": [path], "images": [picture]}
    assert first.columns["pixel_values_videos"] is second.columns["pixel_values_videos"]
    num_bytes = sum(first.columns[name].nbytes for name in ("pixel_values", "pixel_values_videos"))
    frames = 2 * first.columns["video_grid_thw"][0, 0] * 96 * 64 * 3
    assert first.columns.media.num_media == num_bytes + 2 * frames, "what is reserved has the frames, twice"
    assert len(first.columns["pixel_values"]) == first.columns["image_grid_thw"].prod()


def test_a_page_of_inspected_rows_shows_a_frame_of_a_video(tmp_path, folders):
    row = json.dumps(asks(video(film(tmp_path, "turned.mp4")))).encode()
    fn = ChatTokenizeFn(folders["internvl"], processor=Processor())
    ((caption, address),) = fn.open().thumbnails(row)
    assert "4 of 24 frames, 64 x 96 pixels, 64 tokens" in caption
    assert address.startswith("data:image/jpeg;base64,")
