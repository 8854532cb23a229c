"""Chats with sounds: the plan, which reads headers only, has the tokens of the processor itself."""

import base64
import json
import random
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import asyncdata as ad
from asyncdata.errors import BadRowError, ConfigError, WorkerError
from tests.support import media
from tests.support.media import ANSWER, asks, loaded, loader_of, sound_processor_of, write_sound, written
from tests.support.media import SOUND_FAMILIES as FAMILIES
from tests.support.parts import main

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
pytest.importorskip("transformers")

RATE = 16_000
HEAVY = ("input_features", "feature_attention_mask", "input_features_mask")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A processor of each family."""
    folder = tmp_path_factory.mktemp("processors")
    return {family: media.save_sound_processor(folder / family, family) for family in FAMILIES}


@pytest.fixture
def sound(tmp_path):
    return write_sound(tmp_path / "sound.wav")


def audio(value, key="audio"):
    return {"type": "audio", key: value}


def drawn_rows(tmp_path, number):
    """Chats with sounds of random lengths, rates and kinds of files, at random places."""
    rng = random.Random(3)
    for row in range(number):
        parts = [{"type": "text", "text": f"row {row}"}]
        for each in range(rng.randint(0, 2)):
            seconds = rng.uniform(0.1, 1 if each else 29)
            end, rate = rng.choice(["wav", "flac", "ogg", "mp3"]), rng.choice([8_000, 11_025, 16_000, 22_050, 44_100])
            path = write_sound(tmp_path / f"{row}-{each}.{end}", seconds, rate, rng.choice([1, 2]), each)
            parts.insert(rng.randint(0, len(parts)), audio(path))
        yield asks(*parts)


@pytest.mark.parametrize(
    "number", [6, pytest.param(20, marks=pytest.mark.thorough), pytest.param(500, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_tokens_and_features_of_the_processor(tmp_path, folders, family, number):
    from transformers.audio_utils import load_audio

    rows, processor = list(drawn_rows(tmp_path, number)), sound_processor_of(family)
    num_sounds = 0
    for row, sample in zip(rows, loaded(tmp_path, folders[family], *rows), strict=True):
        paths = [part["audio"] for part in row["messages"][0]["content"] if part["type"] == "audio"]
        waves = [load_audio(path, RATE, backend="soundfile") for path in paths]
        text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        settings = {"return_tensors": "np", "add_special_tokens": False, "sampling_rate": RATE}
        found = processor(text=[text], audio=waves or None, **settings)
        assert sample.tokens.tolist() == found["input_ids"][0].tolist()
        for name in {"mm_token_type_ids", "token_type_ids"} & {*found}:
            assert np.array_equal(sample.columns[name], found[name][0])

        num_sounds += len(waves)
        batch = ad.PaddedCollator(keys="transformers")([sample])
        for name in {*HEAVY} & {*found}:
            values = batch[name]
            assert values.dtype == found[name].dtype
            if family == "gemma3n" and len(waves) > 1:  # its frames at the end depend on the sounds beside it
                alone = [processor(text=[processor.audio_token], audio=[one], **settings)[name][0] for one in waves]
                frames = sample.columns["num_audio_frames"]
                assert np.array_equal(sample.columns[name], np.concatenate(alone))
                assert np.array_equal(values[0][: frames[0]], alone[0])
            else:
                assert np.array_equal(values, found[name])
    assert num_sounds


def test_a_sound_may_be_named_in_all_ways_that_people_have(tmp_path, folders, sound):
    import soundfile

    text = base64.b64encode(Path(sound).read_bytes()).decode()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.write(sound, "in/a.wav")
    samples, rate = soundfile.read(sound, dtype="float32")
    numbers = {"array": samples.tolist(), "sampling_rate": rate, "path": None}
    turns = [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "yes"}]
    rows = [
        asks(audio(sound)),
        asks(audio(sound, "path")),
        asks(audio(f"file://{sound}", "url")),
        asks(audio(f"{tmp_path}/a.zip/in/a.wav")),
        asks({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}}),
        asks({"type": "audio", "audio_url": sound}),
        asks({"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}),
        asks(audio({"bytes": text, "path": None})),
        asks(audio(numbers)),
        asks({"type": "audio"}) | {"audios": [text]},
        asks({"type": "audio"}) | {"audio": numbers},
        asks({"type": "text", "text": "<audio>"}) | {"audios": [{"path": sound, "bytes": None}]},
        {"messages": [{"role": "user", "content": "<audio>"}, ANSWER], "audios": sound},
    ]
    found = loaded(tmp_path, folders["gemma4"], *rows)
    found += loaded(tmp_path, folders["gemma4"], {"conversations": turns, "audio": sound})
    for sample in found:
        assert sample.tokens.tolist() == found[0].tokens.tolist()
        assert np.array_equal(sample.columns["input_features"], found[0].columns["input_features"])

    examples = [asks({"type": "audio"}) | {"audio": {"array": samples, "sampling_rate": rate}}]
    fn = ad.ChatTokenizeFn(folders["gemma4"], processor=ad.Processor())
    with ad.DataLoader(ad.IterableSource(lambda _: examples), tokenize_fn=fn, num_workers=0, epochs=1) as loader:
        (sample,) = loader.get_next_batch(1)
    assert np.array_equal(sample.columns["input_features"], found[0].columns["input_features"])


def test_a_setting_of_sounds_is_in_the_fingerprint_if_it_is_no_default(folders):
    folder, settings = (
        folders["gemma4"],
        [{}, {"long_sounds": "refuse"}, {"long_sounds": "cut"}, {"audios_key": "voices"}],
    )
    made = [ad.ChatTokenizeFn(folder, processor=ad.Processor(**each)) for each in settings]
    digests = [each.settings_digest() for each in made]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def streamed(tmp_path, sound):
    """A FLAC file as a program writes it that does not know its length: 0 samples in its header."""
    path = write_sound(tmp_path / "streamed.flac")
    data = bytearray(Path(path).read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    Path(path).write_bytes(data)
    return asks(audio(path))


def cut(end):
    def row(tmp_path, sound):
        data = Path(write_sound(tmp_path / f"whole.{end}", 3.0)).read_bytes()
        (tmp_path / f"cut.{end}").write_bytes(data[: len(data) // 2])
        return asks(audio(str(tmp_path / f"cut.{end}")))

    return row


def holding(name, data):
    def row(tmp_path, sound):
        (tmp_path / name).write_bytes(data)
        return asks(audio(str(tmp_path / name)))

    return row


M4A = b"\0\0\0\x20ftypM4A \0\0\0\0" + bytes(200)
BAD = {
    "no such file": (lambda *_: asks(audio("/no/such.wav")), "AD457.*sound 1 of the chat ./no/such.wav.*NotFound"),
    "no sound": (holding("a.wav", b"RIFF no"), "AD457.*a.wav. cannot be read"),
    "nothing": (holding("a.mp3", b""), "AD457.*a.mp3. cannot be read"),
    "m4a": (holding("a.m4a", M4A), "AD457.*a.m4a. cannot be read.*convert others, such as M4A"),
    "a stream": (streamed, "AD457.*streamed.flac. has no length"),
    "wav": (cut("wav"), "AD457.*cut.wav. is cut: it has .* bytes"),
    "aiff": (cut("aiff"), "AD457.*cut.aiff. is cut: it has .* bytes"),
    "flac": (cut("flac"), "AD457.*cut.flac. cannot be read"),
    "mp3": (cut("mp3"), "AD457.*cut.mp3. is cut: it has .* samples of 48,000"),
    "no samples": (lambda path, _: asks(audio(write_sound(path / "a.wav", 0))), "AD457.*a.wav. has no samples"),
    "two channels": (
        lambda *_: asks(audio({"array": [[0, 1], [1, 0]], "sampling_rate": 8000})),
        "AD457.*the samples of one channel, .*shape .2, 2.",
    ),
    "no rate": (lambda *_: asks(audio({"array": [0.5, 0]})), "AD457.*'sampling_rate' an integer.*None"),
    "long": (
        lambda path, _: asks(audio(write_sound(path / "long.flac", 31, 8_000))),
        "AD457.*long.flac. has 31.0 s, and the processor uses 30 s.*long_sounds=.cut",
    ),
    "many samples": (
        lambda tmp_path, _: asks(audio(write_sound(tmp_path / "a.wav", channels=8))),
        "AD457.*128,000 samples; max_samples=100,000",
        {"max_samples": 100_000},
    ),
    "many bytes": (
        lambda _, sound: asks(audio({"bytes": base64.b64encode(Path(sound).read_bytes()).decode()})),
        "AD457.*more than max_bytes=50",
        {"max_bytes": 50},
    ),
    "remote": (lambda *_: asks(audio("https://host/a.wav")), "AD457.*'host' is not in allowed"),
    "no place": (lambda _, sound: asks() | {"audios": [sound]}, "AD114.*1 sounds, .*places for 0"),
    "no sound for a place": (
        lambda *_: asks("<audio>?") | {"voice": "a"},
        "AD114.*audios_key='voices'",
        {"audios_key": "voices"},
    ),
    "a sound of a turn": (
        lambda _, sound: {"messages": [{"role": "user", "content": "?", "audio": sound}, ANSWER]},
        "AD130.*a turn .*'audio' beside its content",
    ),
    "a picture": (lambda *_: asks({"type": "image", "image": "a.png"}), "AD130.*'image', which is not supported"),
    "an unread column": (
        lambda _, sound: asks() | {"audio": sound},
        "AD130 .*'audio', which is not read: Processor.audios_key='voices'. names",
        {"audios_key": "voices"},
    ),
    "two columns": (
        lambda _, sound: asks(audio("")) | {"audio": sound, "audios": [sound]},
        "AD115.*'audios' and under 'audio'; ignore_keys=",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_whose_sounds_cannot_be_had_is_bad(tmp_path, folders, sound, name):
    row, message, *settings = BAD[name]
    with pytest.raises(BadRowError, match=message):
        loaded(tmp_path, folders["qwen2_audio"], row(tmp_path, sound), **dict(*settings))


def test_a_wav_file_that_was_streamed_and_is_whole_is_read(tmp_path, folders, sound):
    data = bytearray(Path(sound).read_bytes())
    at = data.index(b"data") + 4
    data[4:8] = data[at : at + 4] = b"\xff" * 4
    (tmp_path / "streamed.wav").write_bytes(data)
    one, other = loaded(tmp_path, folders["gemma4"], asks(audio(sound)), asks(audio(str(tmp_path / "streamed.wav"))))
    assert np.array_equal(one.columns["input_features"], other.columns["input_features"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", ["wav", "mp3"])
def test_a_sound_that_is_longer_than_the_processor_uses_may_be_cut_and_is_counted(tmp_path, folders, family, end):
    from transformers.audio_utils import load_audio

    path = write_sound(tmp_path / f"long.{end}", 65 if family == "qwen2_5_omni" else 33, 11_025)
    rows, processor = [asks(audio(path)), asks(audio(write_sound(tmp_path / "short.wav")))], sound_processor_of(family)
    with loader_of(tmp_path, folders[family], *rows, long_sounds="cut") as loader:
        sample, _ = loader.get_next_batch(2)
        assert loader.statistics().noted_total == {"sound_cut": 1}

    text = processor.tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    wave = load_audio(path, RATE, backend="soundfile")
    wanted = processor(text=[text], audio=[wave], return_tensors="np", sampling_rate=RATE)
    assert sample.tokens.tolist() == wanted["input_ids"][0].tolist()
    batch = ad.PaddedCollator(keys="transformers")([sample])
    for name in {*HEAVY} & {*wanted}:
        assert np.array_equal(batch[name], wanted[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_features_count_whole_with_their_padding(tmp_path, folders, family):
    row = asks(audio(write_sound(tmp_path / "a.wav", 0.2)), audio(write_sound(tmp_path / "b.wav", 1.5)))
    with loader_of(tmp_path, folders[family], row) as loader:
        (sample,) = loader.get_next_batch(1)
        num_bytes = sum(sample.columns[name].nbytes for name in HEAVY if name in sample.columns)
        assert loader.statistics().media_bytes_total == num_bytes
    num_decoded = 3 * 4 * round((0.2 + 1.5) * RATE)  # of one channel, of the mean, at the rate
    assert sample.columns.media.num_media == num_bytes + num_decoded, "what is reserved has them, too"
    if family.startswith("qwen"):
        assert num_bytes == 2 * (3000 if family == "qwen2_audio" else 6000) * (128 * 4 + 4)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni", "gemma4"])
def test_a_pack_has_the_sounds_of_its_documents_as_the_model_takes_them(tmp_path, folders, family):
    rows = [asks(audio(write_sound(tmp_path / f"{each}.wav", 0.3 + each, seed=each))) for each in range(2)]
    samples = loaded(tmp_path, folders[family], *rows, asks("no sound"))
    packed, padded = (ad.PackedCollator, [samples], [samples[2:]]), (ad.PaddedCollator, samples, samples[2:])
    for collator, batch, text in (packed, padded):
        found = collator(keys="transformers")(batch)
        assert "num_audio_frames" not in found
        whole = [ad.PaddedCollator(keys="transformers")([sample]) for sample in samples[:2]]
        for name in {*HEAVY} & {*found}:
            longest = whole[1][name].shape[1]
            assert found[name].shape[:2] == (2, longest)
            for values, one in zip(found[name], whole, strict=True):
                assert np.array_equal(values[: one[name].shape[1]], one[name][0])
                assert not values[one[name].shape[1] :].any()
        assert (found["position_ids"].ndim == 3) == (family == "qwen2_5_omni")
        assert not any(name in collator(keys="transformers")(text) for name in HEAVY)

    of_rows = ad.PaddedCollator(keys="verl")(samples)["multi_modal_inputs"]
    assert [len(inputs) for inputs in of_rows] == [2, 2, 0]
    assert of_rows[0]["input_features"].shape == whole[0]["input_features"].shape


def test_prompts_say_their_sounds(tmp_path, folders, sound):
    rows = written(tmp_path, [{"input": [{"role": "user", "content": "<audio>?"}], "audios": [sound]}])
    folder = folders["qwen2_audio"]
    fn = ad.PromptTokenizeFn(folder, processor=folder, apply_chat_template=True)
    with ad.DataLoader(rows, tokenize_fn=fn, num_workers=0, epochs=1) as loader:
        (sample,) = loader.get_next_batch(1)
    assert sample.extra == {"audios": [sound]}
    assert sample.prompt.count("<|AUDIO|>") == 1
    assert sample.columns["input_features"].shape == (1, 128, 3000)


def spoil_header(rng, data):
    """Other numbers of channels, samples and their rate, which may be a bomb."""
    at = rng.randrange(4, 60)
    data[at : at + 4] = rng.choice([struct.pack("<I", rng.randrange(1 << 32)), bytes(4), b"\xff" * 4])


def test_damaged_sounds_are_bad_rows(tmp_path, folders):
    rng, rows, number = random.Random(4), [], 50
    ends = ("wav", "flac", "ogg", "mp3", "aiff")
    whole = [Path(write_sound(tmp_path / f"a.{end}", 0.3)).read_bytes() for end in ends]
    for each in range(number):
        (tmp_path / f"{each}").write_bytes(media.damaged(rng, whole[each % len(whole)], spoil_header))
        rows.append(asks(f"{each}", audio(str(tmp_path / f"{each}"))))
    knobs = {"num_workers": 2, "batch_size": 8, "bad_rows": ad.BadRows(policy="skip", max=None)}
    media.assert_only_some_are_bad(
        loader_of(tmp_path, folders["gemma4"], *rows, knobs=knobs, long_sounds="cut"), number
    )


def test_a_page_of_inspected_rows_names_sounds(tmp_path, folders, sound):
    path = str(written(tmp_path, [asks(audio(sound))]))
    command = ["inspect", path, "--tokenizer", folders["gemma4"], "--kind", "chat"]
    page = tmp_path / "page.html"
    assert main([*command, "--set", f"processor={folders['gemma4']}", "--html", str(page)]) == 0
    assert f"{sound}, 25 tokens".encode() in page.read_bytes()


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_where_a_package_is_missing_the_error_names_the_extra(tmp_path, folders, sound, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WorkerError, match=rf"AD426 .*sounds need soundfile and soxr .*{package}.*\[audio\]"):
        loaded(tmp_path, folders["gemma4"], asks(audio(sound)))


def test_settings_that_no_plan_can_follow_are_refused(tmp_path, folders):
    folder = tmp_path / "processor"
    shutil.copytree(folders["qwen2_audio"], folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dither": 0.1}))
    with pytest.raises(ConfigError, match="AD457 dither=0.1 makes other features of a sound each time"):
        loader_of(tmp_path, str(folder), asks())
