"""Chats with pictures: the plan, which reads headers only, has the tokens and sizes of the processor itself."""

import base64
import io
import json
import random
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncdata import BadRows, ChatTokenizeFn, DataLoader, IterableSource, ParquetSource, Processor, PromptTokenizeFn
from asyncdata.errors import BadRowError, ConfigError, WorkerError
from asyncdata.telemetry.reader import read
from tests.support import media
from tests.support.media import ANSWER, asks, draw, loaded, loader_of, processor_of, save_processor, written
from tests.support.pages import read_page
from tests.support.parts import main

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

FAMILIES = ["qwen3_vl", "qwen2_5_vl", "gemma3", "internvl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A processor of each family."""
    folder = tmp_path_factory.mktemp("processors")
    return {family: save_processor(folder / family, family) for family in FAMILIES}


@pytest.fixture
def picture(tmp_path):
    return draw(tmp_path / "picture.png", 90, 60)


def image(value, key="image"):
    return {"type": "image", key: value}


def drawn_rows(tmp_path, number):
    """Chats with pictures of random sizes, turned in all ways, at random places."""
    rng = random.Random(3)
    for row in range(number):
        parts = [{"type": "text", "text": f"row {row}"}]
        for each in range(rng.randint(0, 3)):
            size = rng.randint(30, 300), rng.randint(30, 300)
            name = f"{row}-{each}.{rng.choice(['jpg', 'png', 'webp'])}"
            path = draw(tmp_path / name, *size, each, rng.choice([1, 3, 6, 8]))
            parts.insert(rng.randint(0, len(parts)), image(path))
        yield asks(*parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_has_the_tokens_and_grids_of_the_processor(tmp_path, folders, family):
    rows = list(drawn_rows(tmp_path, 30))
    processor = processor_of(family)
    for row, sample in zip(rows, loaded(tmp_path, folders[family], *rows), strict=True):
        paths = [part["image"] for part in row["messages"][0]["content"] if part["type"] == "image"]
        text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        found = processor(text=[text], images=[paths] if paths else None, return_tensors="np", add_special_tokens=False)
        assert sample.tokens.tolist() == found.pop("input_ids")[0].tolist()
        del found["attention_mask"]
        for name, wanted in found.items():
            values = wanted[0] if name in ("mm_token_type_ids", "token_type_ids") else wanted
            assert np.array_equal(sample.columns[name], values)


def test_a_picture_may_be_named_in_all_ways_that_people_have(tmp_path, folders, picture):
    text, wrapped = (code(Path(picture).read_bytes()).decode() for code in (base64.b64encode, base64.encodebytes))
    rows = [
        asks(image(picture)),
        asks(image(picture, "path")),
        asks(image(f"file://{picture}", "url")),
        asks({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}),
        asks({"type": "image_url", "image_url": picture}),
        asks(image({"bytes": text, "path": None})),
        asks(image(text, "base64")),
        asks(image(wrapped, "base64")),
        asks(image(f"data:image/png;base64,{wrapped}", "url")),
        asks({"type": "image"}) | {"images": [text]},
        asks({"type": "image"}) | {"image": wrapped},
        asks(image({"type": "base64", "media_type": "image/png", "data": text}, "source")),
        asks(image({"type": "url", "url": picture}, "source") | {"cache_control": {"type": "ephemeral"}}),
        asks({"type": "image"}) | {"images": [picture]},
        asks({"type": "text", "text": "<image>"}) | {"images": [{"path": picture, "bytes": None}]},
        {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": picture},
    ]
    samples = loaded(tmp_path, folders["qwen3_vl"], *rows)
    for sample in samples:
        assert sample.tokens.tolist() == samples[0].tokens.tolist()
        assert np.array_equal(sample.columns["pixel_values"], samples[0].columns["pixel_values"])


def test_pictures_beside_a_chat_are_read_in_each_dialect(tmp_path, folders, picture):
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]
    user = {"role": "user", "content": "<image>?"}
    rows = [
        {"messages": [user, ANSWER], "images": [picture]},
        {"messages": [user, ANSWER], "image": picture},
        {"conversations": turns, "image": picture},
        {"conversations": turns, "images": [picture], "image": ""},
        {"instruction": "<image>?", "input": "", "output": "yes", "image": {"bytes": None, "path": picture}},
        {"prompt": [user], "completion": [ANSWER], "images": [picture]},
        {"question": "<image>?", "answer": "yes", "images": [picture], "image": None},
    ]
    (wanted,) = loaded(tmp_path, folders["qwen3_vl"], rows[0])
    for row in rows[1:]:
        (sample,) = loaded(tmp_path, folders["qwen3_vl"], row)
        assert sample.tokens.tolist() == wanted.tokens.tolist()
        assert sample.labels.tolist() == wanted.labels.tolist()
        assert np.array_equal(sample.columns["pixel_values"], wanted.columns["pixel_values"])


def test_a_place_that_is_said_is_text_where_it_means_no_picture_and_is_counted(tmp_path, folders, picture):
    says, row = {"role": "assistant", "content": "an <image>"}, {"images": [picture]}
    rows = [
        ({"messages": [{"role": "user", "content": "<image>?"}, says]} | row, 1, 1),
        ({"messages": [{"role": "user", "content": "<image>?"}, says], "images": [picture] * 2}, 2, 0),
        ({"messages": [{"role": "user", "content": "?"}, says]}, 0, 1),
        ({"messages": [{"role": "user", "content": "<image>?"}, says], "images": []}, 0, 1),
        (asks(image(picture), "<image>?"), 1, 1),
    ]
    for row, num_pictures, num_noted in rows:
        with loader_of(tmp_path, folders["qwen3_vl"], row) as loader:
            (sample,) = loader.get_next_batch(1)
            assert loader.statistics().noted_total == ({"picture_place_is_text": 1} if num_noted else {})
        assert len(sample.columns["image_grid_thw"]) == num_pictures
        tokens = sample.tokens.tolist()
        said = processor_of("qwen3_vl").tokenizer.encode("<image>")
        found = [at for at in range(len(tokens)) if tokens[at : at + len(said)] == said]
        assert bool(found) == bool(num_noted)
        assert all(sample.labels[at] != -100 for at in found[-1:] if says in row["messages"])


def test_pictures_of_texts_without_places_come_before_the_first_text_of_the_user_and_are_counted(tmp_path, folders):
    paths = [draw(tmp_path / f"{number}.png", 60 + 60 * number, 60, number) for number in range(2)]
    system, again = {"role": "system", "content": "be brief"}, {"role": "user", "content": "sure?"}
    row = {"messages": [system, {"role": "user", "content": "what?"}, ANSWER, again, ANSWER], "images": paths}
    parts = [*map(image, paths), {"type": "text", "text": "what?"}]
    in_parts = {"messages": [system, {"role": "user", "content": parts}, *row["messages"][2:]]}
    (wanted,) = loaded(tmp_path, folders["qwen3_vl"], in_parts)
    with loader_of(tmp_path, folders["qwen3_vl"], row) as loader:
        (sample,) = loader.get_next_batch(1)
        assert loader.statistics().noted_total == {"picture_placed_first": 1}
    assert sample.tokens.tolist() == wanted.tokens.tolist()
    assert sample.labels.tolist() == wanted.labels.tolist()
    assert np.array_equal(sample.columns["pixel_values"], wanted.columns["pixel_values"])


def test_pictures_lie_in_parquet_as_bytes(tmp_path, folders, picture):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "<image>?"}, ANSWER]
    data = Path(picture).read_bytes()
    struct_of, fn = {"bytes": data, "path": "a.png"}, ChatTokenizeFn(folders["gemma3"], processor=folders["gemma3"])
    for column in ({"images": [struct_of]}, {"image": struct_of}, {"images": [data]}, {"image": data}):
        parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages, **column}]), tmp_path / "rows.parquet")
        with DataLoader(ParquetSource(tmp_path / "rows.parquet"), tokenize_fn=fn, num_workers=0) as loader:
            assert loader.get_next_batch(1)[0].columns["pixel_values"].shape == (1, 3, 56, 56)


@pytest.mark.parametrize(("mode", "turn"), [("RGB", 1), ("CMYK", 6), ("P", 6), ("I;16", 1)])
def test_an_iterable_may_give_pictures_of_pillow(tmp_path, folders, mode, turn):
    opened = Image.open(draw(tmp_path / "picture.png", 90, 60, turn=turn))
    exif = opened.getexif()
    drawn = opened.convert("L").convert(mode) if mode == "I;16" else opened.convert(mode)
    drawn.getexif().update(exif)
    drawn.save(tmp_path / "same.tiff", exif=exif)
    rows = [{"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": [drawn]}, asks(image(drawn))]
    fn = ChatTokenizeFn(folders["qwen3_vl"], processor=Processor())
    (wanted,) = loaded(tmp_path, folders["qwen3_vl"], asks(image(str(tmp_path / "same.tiff"))))
    with DataLoader(IterableSource(lambda _: rows), tokenize_fn=fn, num_workers=0, epochs=1) as loader:
        for sample in loader.get_next_batch(2):
            for name in ("image_grid_thw", "pixel_values"):
                assert np.array_equal(sample.columns[name], wanted.columns[name])


def cut(tmp_path, picture):
    data = Path(picture).read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    return asks(image(str(tmp_path / "cut.png")))


BAD = {
    "no such file": (lambda *_: asks(image("/no/such.png")), "AD457.*picture 1 of the chat ./no/such.png.*NotFound"),
    "no picture": (lambda tmp_path, _: asks(image(str(tmp_path / "rows.jsonl"))), "AD457.*cannot be read"),
    "cut": (cut, "AD457.*cut.png.*cannot be read"),
    "many pixels": (lambda _, picture: asks(image(picture)), "AD457.*90 x 60 pixels; max_pixels", {"max_pixels": 5000}),
    "many bytes": (lambda _, picture: asks(image(picture)), "AD457.*more than max_bytes=50", {"max_bytes": 50}),
    "too long": (lambda _, picture: asks(image(picture)), "AD457.*90 x 60, more than 1 to 1", {"max_aspect": 1}),
    "many": (lambda _, picture: asks(image(picture), image(picture)), "AD457.*2 pictures, more", {"max_pictures": 1}),
    "remote": (
        lambda *_: asks(image("https://host/a.png", "url")),
        "AD457.*remote .https://host/a.png.*'host' is not in allowed",
    ),
    "outside": (lambda _, picture: asks(image(picture)), "AD457.*outside of media_root='/usr'", {"media_root": "/usr"}),
    "no base64": (lambda *_: asks(image("data:image/png;base64,?", "url")), "AD457.*base64"),
    "no place": (lambda _, picture: asks() | {"images": [picture]}, "AD114.*1 pictures, .*places for 0"),
    "no picture for a place": (lambda *_: asks({"type": "image"}), "AD114.*0 pictures, .*places for 1; .*images_key"),
    "no picture for a text": (lambda *_: asks("<image>?") | {"pictures": ["a.png"]}, "AD114.*places for 1;.*_key="),
    "a picture of a turn": (
        lambda _, picture: {"messages": [{"role": "user", "content": "?", "images": [picture]}, ANSWER]},
        "AD130.*a turn .*'images' beside its content",
    ),
    "a picture of a turn of ShareGPT": (
        lambda _, picture: {"conversations": [{"from": "human", "value": "?", "image": picture}]},
        "AD130.*a turn .*'image' beside its content",
    ),
    "a text in its part": (lambda _, picture: asks(image(picture) | {"text": "?"}), "AD130.*a 'text' beside it"),
    "an answer too many": (
        lambda _, picture: {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "<image> <image>"}],
            "images": [picture] * 2,
        },
        "AD114.*2 pictures, .*places for 1, and 2 in answers",
    ),
    "nobody asks": (
        lambda _, picture: {"messages": [{"role": "system", "content": "?"}, ANSWER], "images": [picture]},
        "AD114.*1 pictures, .*places for 0",
    ),
    "a result of Anthropic": (
        lambda _, picture: asks({"type": "tool_result", "tool_use_id": "a", "content": [image(picture)]}),
        "AD131.*a turn of its own, of the role 'tool', whose content may have text and media",
    ),
    "a mark": (
        lambda _, picture: asks(image(picture), {"type": "text", "text": "<|image_pad|>"}),
        "AD114.*2 times for 1 pictures",
    ),
    "a video": (lambda *_: asks({"type": "video", "video": "a.mp4"}), "AD130.*two phases.*videos"),
    "a sound": (lambda *_: asks({"type": "audio", "audio": "a.wav"}), "AD130.*two phases.*sounds"),
    "a store": (lambda *_: asks(image("s3://bucket/a.png")), "AD457.*s3://bucket/a.png.*allowed_hosts.*mount"),
    "a file of a host": (lambda *_: asks(image("file://host/a.png")), "AD457.*file://host/a.png.*without a host"),
    "a column of videos": (lambda *_: asks() | {"videos": ["a.mp4"]}, "AD130.*'videos', which is not read.*phases"),
    "an unread column": (
        lambda _, picture: asks() | {"image": picture},
        "AD130 .*'image', which is not read: Processor.images_key='pictures'. names",
        {"images_key": "pictures"},
    ),
    "two columns": (
        lambda _, picture: asks({"type": "image"}) | {"image": picture, "images": [picture]},
        "AD115.*'images' and under 'image'; ignore_keys=",
    ),
    "a file of Anthropic": (lambda *_: asks(image({"file_id": "a"}, "source")), "AD457.*object of 'file_id'; need"),
    "base64 of no picture": (lambda *_: asks(image("Zm9v" * 400)), "AD457.*bytes of the row. cannot be read"),
    "a size of its own": (
        lambda _, picture: asks(image(picture) | {"max_pixels": 50176}),
        "AD457.*'max_pixels', which is not read",
    ),
    "a number": (lambda *_: asks(image(7)), "AD457.*must be a path"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_whose_pictures_cannot_be_had_is_bad(tmp_path, folders, picture, name):
    row, message, *settings = BAD[name]
    with pytest.raises(BadRowError, match=message):
        loaded(tmp_path, folders["qwen3_vl"], row(tmp_path, picture), **dict(*settings))


@pytest.fixture
def archives(tmp_path, picture):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.write(picture, "in/a.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("./in/b.png", "in/a.png"):
            tar.add(picture, name)
    return tmp_path


def test_a_picture_may_be_a_member_of_a_zip_or_tar_file(archives, folders, picture):
    (archives / "folder.zip").mkdir()
    shutil.copy(picture, archives / "folder.zip" / "a.png")
    named = [f"{archives}/a.zip/in/a.png", f"{archives}/a.tar/in/a.png", f"{archives}/a.tar/in/b.png"]
    named += [f"zip://in/a.png::{archives}/a.zip", f"tar://./in/a.png::file://{archives}/a.tar"]
    rows = [asks(image(name)) for name in [picture, f"{archives}/folder.zip/a.png", *named]]
    samples = loaded(archives, folders["qwen3_vl"], *rows, knobs={"num_workers": 1})
    (member,) = loaded(archives, folders["qwen3_vl"], asks(image("in/a.png")), media_root=f"{archives}/a.zip")
    (inside,) = loaded(archives, folders["qwen3_vl"], asks(image("picture.png")), media_root=str(archives))
    for sample in [*samples, member, inside]:
        assert np.array_equal(sample.columns["pixel_values"], samples[0].columns["pixel_values"])


def test_an_archive_that_changes_is_read_again(archives, folders, picture):
    row = asks(image(f"{archives}/a.zip/in/a.png"))
    (before,) = loaded(archives, folders["qwen3_vl"], row)
    with zipfile.ZipFile(archives / "a.zip", "w") as zipped:
        zipped.write(draw(archives / "other.png", 200, 60), "in/a.png")
    (after,) = loaded(archives, folders["qwen3_vl"], row)
    assert after.columns["image_grid_thw"].tolist() != before.columns["image_grid_thw"].tolist()


BAD_MEMBERS = {
    "no member": ("a.zip/b.png", {}, "AD457.*a.zip has no member 'b.png'"),
    "a folder": ("a.tar/in", {}, "AD457.*a.tar has no member 'in'"),
    "many bytes": ("a.zip/in/a.png", {"max_bytes": 50}, "AD457.*more than max_bytes=50"),
    "no archive": ("a.png.zip/a.png", {}, "AD457.*File is not a zip file"),
    "outside": ("a.zip/../a.zip/in/a.png", {"media_root": "{}/a.tar"}, "AD457.*outside of media_root"),
    "compressed": ("a.tar.gz/in/a.png", {}, "AD457.*NotADirectory"),
}


@pytest.mark.parametrize("name", BAD_MEMBERS)
def test_a_member_that_cannot_be_had_makes_a_bad_row(archives, folders, picture, name):
    shutil.copy(picture, archives / "a.png.zip")
    shutil.copy(archives / "a.tar", archives / "a.tar.gz")
    path, settings, message = BAD_MEMBERS[name]
    settings = {key: value.format(archives) if key == "media_root" else value for key, value in settings.items()}
    with pytest.raises(BadRowError, match=message):
        loaded(archives, folders["qwen3_vl"], asks(image(f"{archives}/{path}")), **settings)


def test_a_turn_of_a_tool_may_have_pictures(tmp_path, folders, picture):
    result = {"role": "tool", "content": [{"type": "text", "text": "so"}, image(picture)]}
    row = {"messages": [{"role": "user", "content": "what?"}, ANSWER, result, ANSWER]}
    (sample,) = loaded(tmp_path, folders["qwen3_vl"], row)
    assert len(sample.columns["pixel_values"]) == sample.columns["image_grid_thw"].prod() > 0


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_tokens_of_pictures_are_never_trained(tmp_path, folders, picture, train_on):
    answer = {"role": "assistant", "content": [image(picture), {"type": "text", "text": "so"}]}
    row = {"messages": [{"role": "user", "content": "?"}, answer]}
    (sample,) = loaded(tmp_path, folders["qwen3_vl"], row, fn={"train_on": train_on})
    is_picture = sample.columns["mm_token_type_ids"] == 1
    assert is_picture.any()
    assert (sample.labels[is_picture] == -100).all()
    assert (sample.labels[~is_picture] != -100).sum() > 2


def test_a_sample_with_pictures_is_dropped_and_not_cut(tmp_path, folders, picture):
    fn = {"max_length": 12, "overlong": "truncate_right", "train_on": "all"}
    rows = [asks(image(picture)), asks({"type": "text", "text": "a longer text than twelve"})]
    rows = [{"messages": row["messages"][::-1]} for row in rows]
    with loader_of(tmp_path, folders["qwen3_vl"], *rows, fn=fn) as loader:
        (sample,) = loader.get_next_batch(1)
        assert loader.statistics().dropped_total == {"max_length": 1}
    assert len(sample.tokens) == len(sample.columns["mrope"]) == 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pixels_may_be_of_half_the_bytes(tmp_path, folders, picture, dtype):
    (whole,) = loaded(tmp_path, folders["gemma3"], asks(image(picture)))
    (half,) = loaded(tmp_path, folders["gemma3"], asks(image(picture)), dtype=dtype)
    pixels = half.columns["pixel_values"]
    if dtype == "bfloat16":
        pixels = (pixels.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(pixels.astype(np.float32), whole.columns["pixel_values"], atol=2**-8)


def test_a_changed_processor_is_another_function_and_a_moved_one_is_the_same(tmp_path, folders):
    fn = ChatTokenizeFn(folders["gemma3"], processor=folders["gemma3"])
    shutil.copytree(folders["gemma3"], tmp_path / "moved")
    moved = msgspec.structs.replace(fn, processor=Processor(folder=str(tmp_path / "moved"), media_root="/data"))
    assert moved.fingerprints() == fn.fingerprints()
    settings = json.loads((tmp_path / "moved" / "processor_config.json").read_text())
    settings["image_processor"]["size"] = {"height": 28, "width": 28}
    (tmp_path / "moved" / "processor_config.json").write_text(json.dumps(settings))
    assert moved.fingerprints()["tokenize_fn"] != fn.fingerprints()["tokenize_fn"]


def test_what_cannot_be_planned_is_refused(tmp_path, folders):
    with pytest.raises(ConfigError, match="leaves them out"):
        ChatTokenizeFn(folders["gemma3"], processor=folders["gemma3"], media="leave_out")
    with pytest.raises(ConfigError, match="apply_chat_template=True"):
        PromptTokenizeFn(folders["gemma3"], processor=folders["gemma3"])
    with pytest.raises(ConfigError, match="processor is the folder"):
        PromptTokenizeFn(folders["gemma3"], processor=7, apply_chat_template=True)
    with pytest.raises(ConfigError, match="AD457 there is neither"):
        _ = ChatTokenizeFn(folders["gemma3"], processor=str(tmp_path)).columns
    for own, message in [
        ({"processor_class": "Idefics3Processor"}, "AD457.*Idefics3Processor, whose tokens"),
        ({"processor_class": "Gemma3Processor", "image_processor": {"do_pan_and_scan": True}}, "AD457 do_pan_and_scan"),
    ]:
        (tmp_path / "processor_config.json").write_text(json.dumps(own))
        with pytest.raises(ConfigError, match=message):
            _ = ChatTokenizeFn(folders["gemma3"], processor=str(tmp_path)).columns


def test_transformers_without_processors_for_pillow_is_refused_with_a_way_out(tmp_path, folders, picture, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.4.0")
    with pytest.raises(WorkerError, match=r"version 5.4.0 is installed\): pip install 'transformers>=5.24' pillow"):
        loaded(tmp_path, folders["qwen3_vl"], asks(image(picture)))


@pytest.mark.parametrize("workers", [0, 1])
def test_prompts_have_pictures_for_the_trainer_and_for_the_engine(tmp_path, folders, picture, workers):
    text = base64.b64encode(Path(picture).read_bytes()).decode()
    rows = [{"input": "<image> what?", "images": [picture], "label": 1}]
    rows.append({"input": [{"role": "user", "content": [image({"bytes": text})]}], "label": 2})
    rows.append({"input": "none", "label": 3})
    settings = {"processor": Processor(max_pictures=2), "apply_chat_template": True, "label_key": "label"}
    fn = PromptTokenizeFn(folders["qwen3_vl"], **settings)
    knobs = {"num_workers": workers, "shuffle": False, "epochs": 1, "n_samples_per_prompt": 2}
    with DataLoader(written(tmp_path, rows), tokenize_fn=fn, **knobs) as loader:
        groups = loader.get_samples(3)
    processor = processor_of("qwen3_vl")
    for row, group in zip(rows, groups, strict=True):
        pictured = [[Image.open(picture)]] if row["label"] < 3 else None
        found = processor(text=[group[0].prompt], images=pictured, return_tensors="np", add_special_tokens=False)
        assert group[1].tokens.tolist() == found["input_ids"][0].tolist()
        assert group[0].prompt.endswith("<|assistant|>")
        if pictured:
            assert np.array_equal(group[1].columns["pixel_values"], found["pixel_values"])
    assert [group[0].extra for group in groups] == [{"images": [picture]}, {"images": [{"bytes": text}]}, {}]


def test_the_report_says_what_was_loaded_of_pictures_and_what_failed(tmp_path, folders, picture):
    (tmp_path / "cut.png").write_bytes(Path(picture).read_bytes()[:-60])
    rows = [asks(image(path)) for path in [picture] * 3 + [str(tmp_path / "cut.png")]]
    knobs = {"num_workers": 1, "batch_size": 3, "bad_rows": "skip", "telemetry": tmp_path / "run"}
    with loader_of(tmp_path, folders["qwen3_vl"], *rows, knobs=knobs) as loader:
        assert [len(batch) for batch in loader] == [3]
        num_bytes = loader.statistics().media_bytes_total
    last = read(tmp_path / "run").starts[0].intervals[-1]
    assert (last.media_loaded, last.media_failed, last.media_bytes) == (3, 1, num_bytes)
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    overview = read_page((tmp_path / "page.html").read_bytes()).shown("overview")
    assert re.search(r"Samples with media loaded\W+3\W[^;]+; 1 failed", overview), overview


def spoil_header(rng, data):
    """A size that may be a bomb, with the checksum that belongs to it."""
    if data[:4] != b"\x89PNG":
        data[16:24] = rng.randbytes(8)
        return

    data[16:24] = struct.pack(">II", rng.choice([1, 30_000, 1 << 30]), rng.randint(1, 60_000))
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))


@pytest.mark.filterwarnings("ignore")
def test_damaged_pictures_are_bad_rows(tmp_path, folders):
    rng, rows, number = random.Random(4), [], 60
    names = ("a.png", "a.jpg", "a.webp")
    pictures = [Path(draw(tmp_path / name, 40, 56, each)).read_bytes() for each, name in enumerate(names)]
    for each in range(number):
        text = base64.b64encode(media.damaged(rng, pictures[each % 3], spoil_header)).decode()
        rows.append(asks({"type": "text", "text": str(each)}, image(text, "base64")))
    knobs = {"num_workers": 2, "batch_size": 8, "bad_rows": BadRows(policy="skip", max=None)}
    media.assert_only_some_are_bad(loader_of(tmp_path, folders["qwen3_vl"], *rows, knobs=knobs), number)


def test_a_page_of_inspected_rows_shows_small_copies_of_their_pictures(tmp_path, folders, capsys):
    for number in range(14):
        draw(tmp_path / f"{number}.png", 300, 200, seed=number)
    turned_one = draw(tmp_path / "turned.jpg", 90, 60, turn=6)
    cut = tmp_path / "cut.png"
    cut.write_bytes((tmp_path / "1.png").read_bytes()[:2000])  # its header is whole
    shown = [[image(str(tmp_path / "0.png"))], [image(turned_one)], [image(str(cut))]]
    shown += [[image(str(tmp_path / f"{number}.png")) for number in range(14)], [{"type": "text", "text": "no"}]]
    path, page = written(tmp_path, [asks(*parts) for parts in shown]), tmp_path / "page.html"

    command = ["inspect", str(path), "--tokenizer", str(folders["qwen3_vl"]), "--html", str(page), "--no-shuffle"]
    assert main([*command, "--kind", "chat", "--set", f"processor={folders['qwen3_vl']}"]) == 0

    found = read_page(page.read_bytes())
    first, second, damaged, many, none = [sample.get("pictures") for sample in found.data]
    tokens = [sample["tokens"] for sample in found.data]
    assert tokens[-1] < tokens[0]
    (caption, address) = first[0]
    assert caption.startswith(f"{tmp_path / '0.png'}, 300 x 200 pixels, grid 1 x ")
    small = Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/jpeg;base64,"))))
    assert small.format == "JPEG"
    assert max(small.size) == 160
    assert "60 x 90 pixels" in second[0][0], "as it is turned"
    assert "AD457" in damaged[0][0]
    assert damaged[0][1] == ""
    assert [bool(address) for _, address in many] == [True] * 12 + [False]
    assert many[-1][0] == "2 more pictures"
    assert none is None
    assert b"img-src data:;" in page.read_bytes()
    rows = [row.columns["mm_token_type_ids"] for row in loaded(tmp_path, folders["qwen3_vl"], asks(*shown[0]))]
    assert caption.endswith(f", {int((rows[0] == 1).sum()):,} tokens")


@pytest.mark.parametrize("is_given_back", [False, True])
def test_a_picture_with_as_many_patches_and_another_grid_than_planned_is_noticed(tmp_path, folders, is_given_back):
    pictures = [draw(tmp_path / f"{number}.png", 300, 200, seed=number) for number in range(2)]
    rows, knobs = [asks(image(each)) for each in pictures], {"limits": {"max_media_bytes": 1}}
    with loader_of(tmp_path, folders["qwen3_vl"], *rows, knobs=knobs) as loader:
        first = loader.get_next_batch(1)
        if is_given_back:
            loader.add_samples([first])
        number = 0 if is_given_back else 1
        draw(Path(pictures[number]), 200, 300, seed=number)
        with pytest.raises(BadRowError, match=f"AD424.*rows.jsonl:{number + 1} .*another image_grid_thw"):
            loader.get_next_batch(1)
