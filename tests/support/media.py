"""Real processors of transformers that need no download; pictures, sounds and videos for them; and loaders of those."""

import functools
import json
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata import ChatTokenizeFn, DataLoader, Processor

_MERGE = 2
PATCH = 16
_QWEN = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_QWEN |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_INTERN = {"start_image": "<img>", "context_image": "<IMG_CONTEXT>", "end_image": "</img>", "video": "<video>"}
_GEMMA = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}


def of_bytes(marks: Iterable[str], ids: dict[str, int] | None = None, **named: Any) -> Any:
    """A tokenizer with a token for each byte, and one for each mark, some of which have these ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters | (ids or {}), merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([*marks])
    return PreTrainedTokenizerFast(tokenizer_object=core, **named)


def tokenizer_of(marks: dict[str, str]) -> Any:
    """With a name for each mark."""
    named = {f"{name}_token": mark for name, mark in marks.items()}
    ends = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return of_bytes([*ends.values(), *marks.values()], **ends, extra_special_tokens=named)


@functools.cache
def processor_of(family: str, max_pixels: int | None = None) -> Any:
    """The processor, made once in each process; ``max_pixels`` of pictures for Qwen, None: few, for tests to be
    fast."""
    import transformers

    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        return transformers.Gemma3Processor(image_processor=images, tokenizer=tokenizer_of(_GEMMA), image_seq_length=16)

    if family == "internvl":
        size = {"height": 28, "width": 28}
        images = transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)
        made, tokenizer, settings = transformers.InternVLProcessor, tokenizer_of(_INTERN), {"image_seq_length": 16}
    else:
        images = image_processor(PATCH if family == "qwen3_vl" else 14, max_pixels)
        made = transformers.Qwen3VLProcessor if family == "qwen3_vl" else transformers.Qwen2_5_VLProcessor
        tokenizer, settings = tokenizer_of(_QWEN), {}

    return without_torchvision(made)(image_processor=images, tokenizer=tokenizer, video_processor=None, **settings)


def without_torchvision(made: Any) -> Any:
    """The processor's class, of which a part that needs torchvision may be None."""

    class Without(made):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Without


def image_processor(patch: int, max_pixels: int | None = None) -> Any:
    """That of Qwen's models, with pictures of 4 to 64 tokens."""
    from transformers import Qwen2VLImageProcessorPil

    side = _MERGE * patch
    size = {"shortest_edge": 4 * side**2, "longest_edge": max_pixels or 64 * side**2}
    return Qwen2VLImageProcessorPil(patch_size=patch, size=size)


_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'KIND' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_template(kind: str, mark: str) -> str:
    """One that writes a mark for each part of this kind."""
    return _TEMPLATE.replace("KIND", kind).replace("MARK", mark)


_MARKS = {"gemma3": _GEMMA["boi"], "internvl": _INTERN["context_image"]}
_CLASSES = {"gemma3": "Gemma3Processor", "internvl": "InternVLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


def save_processor(folder: Path, family: str, max_pixels: int | None = None) -> str:
    """A folder as a model has it: tokenizer, chat template and processor."""
    processor = processor_of(family) if max_pixels is None else processor_of(family, max_pixels)
    mark = _MARKS.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    processor.tokenizer.chat_template = chat_template("image", mark)
    processor.tokenizer.save_pretrained(folder)
    settings = json.loads(processor.image_processor.to_json_string())
    own = {"processor_class": _CLASSES.get(family, "Qwen2_5_VLProcessor"), "image_processor": settings}
    own |= {"image_seq_length": 16} if family in _MARKS else {}
    (folder / "processor_config.json").write_text(json.dumps(own))
    return str(folder)


def draw(path: Path, width: int, height: int, seed: int = 0, turn: int = 1) -> str:
    """A picture of random pixels."""
    from PIL import Image

    exif = Image.Exif()
    exif[274] = turn
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    return str(path)


SOUND_FAMILIES = ("qwen2_audio", "qwen2_5_omni", "gemma3n", "gemma4")
OMNI_S = 60
"""Seconds to which features of Omni are padded here: the 300 of its files take half a second for each sound."""

_SOUND_CLASSES = {"qwen2_audio": "Qwen2AudioProcessor", "qwen2_5_omni": "Qwen2_5OmniProcessor"}
_SOUND_CLASSES |= {"gemma3n": "Gemma3nProcessor", "gemma4": "Gemma4Processor"}
_QWEN_AUDIO = {"audio": "<|AUDIO|>", "audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}
_OMNI = _QWEN_AUDIO | {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "vision_bos": "<|vision_bos|>"}
_OMNI |= {"vision_eos": "<|vision_eos|>"}
_GEMMA_AUDIO = {"audio": "<audio_soft_token>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
_GEMMA_AUDIO |= {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
_SOUND_MARKS = {"qwen2_audio": _QWEN_AUDIO, "qwen2_5_omni": _OMNI, "gemma3n": _GEMMA_AUDIO, "gemma4": _GEMMA_AUDIO}


@functools.cache
def sound_processor_of(family: str) -> Any:
    """The whole processor, made once in each process."""
    import transformers

    made = getattr(transformers, _SOUND_CLASSES[family])
    tokenizer, mark = tokenizer_of(_SOUND_MARKS[family]), _SOUND_MARKS[family]["audio"]
    written = mark if family.startswith("gemma") else f"{_QWEN_AUDIO['audio_bos']}{mark}{_QWEN_AUDIO['audio_eos']}"
    tokenizer.chat_template = chat_template("audio", written)
    if family == "qwen2_audio":
        return made(feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128), tokenizer=tokenizer)

    made = without_torchvision(made)
    if family == "gemma3n":
        extractor = transformers.Gemma3nAudioFeatureExtractor()
        return made(feature_extractor=extractor, image_processor=None, tokenizer=tokenizer)

    if family == "gemma4":
        extractor = transformers.Gemma4AudioFeatureExtractor()
    else:
        extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=OMNI_S)
    return made(feature_extractor=extractor, image_processor=None, video_processor=None, tokenizer=tokenizer)


def save_sound_processor(folder: Path, family: str) -> str:
    """A folder as a model has it: tokenizer, chat template and processor."""
    # A new one: a call of a processor leaves settings in its tokenizer, which would be saved.
    processor = sound_processor_of.__wrapped__(family)
    processor.tokenizer.save_pretrained(folder)
    extractor = json.loads(processor.feature_extractor.to_json_string())
    is_gemma = family.startswith("gemma")  # as their files are
    own = {"processor_class": _SOUND_CLASSES[family]} | ({"feature_extractor": extractor} if is_gemma else extractor)
    (folder / f"{'' if is_gemma else 'pre'}processor_config.json").write_text(json.dumps(own))
    return str(folder)


def write_sound(path, seconds=1.0, rate=16_000, channels=1, seed=0, **settings):
    """A sound of noise, as the end of its name says."""
    import soundfile

    noise = np.random.default_rng(seed).standard_normal((round(seconds * rate), channels)).astype(np.float32) / 10
    with soundfile.SoundFile(path, "w", rate, channels, **settings) as file:
        for start in range(0, len(noise), rate):  # libsndfile ends the process if it is given minutes of Ogg at once
            file.write(noise[start : start + rate])
    return str(path)


VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl")
TOKENS_PER_SECOND = 2


@functools.cache
def video_processor_of(family: str, settings: str) -> Any:
    """The processor with pictures and videos; the settings of its video processor are JSON."""
    import transformers

    pictures = processor_of(family)
    name = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "internvl": "InternVL"}[family]
    videos = getattr(transformers, f"{name}VideoProcessor")(**json.loads(settings))
    made = type(pictures).__mro__[1]
    own = {"image_seq_length": 16} if family == "internvl" else {}
    return made(image_processor=pictures.image_processor, tokenizer=pictures.tokenizer, video_processor=videos, **own)


def video_settings_of(family: str, rng: random.Random) -> dict[str, Any]:
    """Settings of a video processor, drawn; its videos are small."""
    found: dict[str, Any] = {"do_sample_frames": rng.random() < 0.7}
    if family == "internvl":
        found |= {"size": {"height": 28, "width": 28}, "initial_shift": rng.choice([True, False])}
        return found | ({"num_frames": rng.randint(1, 12)} if rng.random() < 0.6 else {"fps": rng.choice([1, 2, 3.7])})

    patch = 14 if family == "qwen2_5_vl" else 16
    least = rng.choice([4, 16]) * (2 * patch) ** 2
    found |= {"patch_size": patch, "size": {"shortest_edge": least, "longest_edge": rng.choice([2, 8, 40]) * least}}
    found["cap_pixels_per_frame"] = rng.choice([True, False])
    if rng.random() < 0.3:
        return found | {"num_frames": rng.randint(4, 30), "fps": None}

    most = {"min_frames": [2, 4, 5], "max_frames": [6, 16, 31, 768]}
    return found | {name: rng.choice(values) for name, values in ({"fps": [1, 2, 3.7]} | most).items()}


def save_video_processor(folder: Path, family: str, settings: dict[str, Any] | None = None) -> str:
    """A folder as a model has it."""
    settings = settings or {"do_sample_frames": True, **({"num_frames": 4} if family == "internvl" else {"fps": 2})}
    if family == "internvl":
        settings = {"size": {"height": 28, "width": 28}} | settings
    elif "size" not in settings:
        patch = 14 if family == "qwen2_5_vl" else 16
        side = (2 * patch) ** 2
        settings |= {"patch_size": patch, "size": {"shortest_edge": 4 * side, "longest_edge": 64 * side}}
    save_processor(folder, family)
    path = folder / "processor_config.json"
    made = video_processor_of(family, json.dumps(settings)).video_processor
    path.write_text(json.dumps({**json.loads(path.read_text()), "video_processor": json.loads(made.to_json_string())}))
    (folder / "config.json").write_text(json.dumps({"vision_config": {"tokens_per_second": TOKENS_PER_SECOND}}))
    path = folder / "chat_template.jinja"
    mark = "<video>" if family == "internvl" else "<|vision_start|><|video_pad|><|vision_end|>"
    template, place = path.read_text(), "{% else %}{{ part.text }}"
    assert place in template
    path.write_text(template.replace(place, "{% elif part.type == 'video' %}" + mark + place))
    return str(folder)


VIDEO_KINDS = (
    "a.mp4", "a.mov", "a.mkv", "a.avi", "a.ts", "a.webm", "fragments.mp4", "vfr.mp4", "vfr.mkv", "a.h264", "cut.mp4",
    "turned.mp4",
)  # fmt: skip
_CODECS = {"avi": "mpeg4", "mov": "mpeg4", "webm": "libvpx"}


def film(folder, kind, *, num_frames=24, size=(96, 64), fps=8, keys=12, turn=0, seed=0):
    """A video, each of whose frames is another, with so many of them from one key frame to the next; its kind is how
    its file is called."""
    import av

    name, _, ending = kind.rpartition(".")
    path, codec, fps = folder / f"{seed}-{kind}", _CODECS.get(ending, "libx264"), Fraction(fps)
    options = {"movflags": "frag_keyframe+empty_moov"} if name == "fragments" else {}
    turn = turn or 90 * (name == "turned")
    rng, clock, is_even = random.Random(seed), 0, name != "vfr"
    base = 1 / fps if is_even else Fraction(1, 90_000)
    with av.open(str(path), "w", options=options) as box:
        stream = box.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv444p" if codec == "libx264" else "yuv420p"
        stream.codec_context.time_base = base
        if codec == "libx264":
            stream.options = {"preset": "ultrafast" if seed % 2 else "veryfast", "g": str(keys)}
        if turn:
            stream.set_display_rotation(turn)
        for number in range(num_frames):
            pixels = np.full((size[1], size[0], 3), (number * 7 % 256, number * 13 % 256, 90), np.uint8)
            pixels[: size[1] // 3, : size[0] // 2] = rng.randbytes(1)[0]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = clock, base
            clock += 1 if is_even else rng.randint(1500, 9000)
            for packet in stream.encode(frame):
                box.mux(packet)
        for packet in stream.encode():
            box.mux(packet)
    return _cut(path, num_frames) if name == "cut" else str(path)


def _cut(path: Path, num_frames: int) -> str:
    """The same packets, of which the first third is before the beginning: an edit list hides it."""
    import av

    found = str(path.with_name(f"edited-{path.name}"))
    with av.open(str(path)) as whole, av.open(found, "w") as box:
        (stream,) = whole.streams.video
        written = box.add_stream_from_template(stream)
        back = round(num_frames / 3 / (stream.average_rate * stream.time_base))
        for packet in whole.demux(stream):
            if packet.size:
                packet.pts, packet.dts, packet.stream = packet.pts - back, packet.dts - back, written
                box.mux(packet)
    return found


def frames_of(path: str) -> tuple[Any, float]:
    """All frames of a video as they are shown, uint8 of shape (frames, 3, height, width), and its rate."""
    import av
    import torch

    with av.open(path) as box:
        (stream,) = box.streams.video
        rate = float(stream.average_rate or stream.guessed_rate)
        frames = [(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4) for frame in box.decode(stream)]
    found = [np.rot90(pixels, turns) for pixels, turns in frames]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2), rate


def metadata_of(frames: Any, rate: float) -> Any:
    """What a processor is told of frames."""
    from transformers.video_utils import VideoMetadata

    number, _, height, width = frames.shape
    size = {"height": height, "width": width}
    return VideoMetadata(total_num_frames=number, fps=rate, frames_indices=np.arange(number), **size)


ANSWER = {"role": "assistant", "content": "yes"}


def asks(*parts: Any) -> dict[str, Any]:
    """A row whose user says these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def written(folder: Path, rows: Iterable[Any]) -> Path:
    """A file of these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def loader_of(folder: Path, name: str, *rows: Any, knobs: Any = None, fn: Any = None, **settings: Any) -> DataLoader:
    """Of these rows in their order, by a function with these settings ``fn``, a tokenizer and its processor."""
    tokenize_fn = ChatTokenizeFn(name, processor=Processor(**settings), **(fn or {}))
    knobs = {"num_workers": 0, "shuffle": False, "epochs": 1} | (knobs or {})
    return DataLoader(written(folder, rows), tokenize_fn=tokenize_fn, **knobs)


def loaded(folder: Path, name: str, *rows: Any, **settings: Any) -> Any:
    """The samples of these rows."""
    with loader_of(folder, name, *rows, **settings) as loader:
        return loader.get_next_batch(len(rows))


def damaged(rng: random.Random, medium: bytes, spoil_header: Callable[[random.Random, bytearray], None]) -> bytes:
    """A picture or a sound, cut, with other bytes, with another header, or of another type."""
    data = bytearray(medium)
    kind = rng.randrange(4)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(rng.randint(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        spoil_header(rng, data)
    else:
        data[: rng.randint(4, 64)] = rng.randbytes(64)
    return bytes(data)


def assert_only_some_are_bad(loader: DataLoader, number: int) -> None:
    """Of so many rows, each is a sample or bad as its medium is, and no worker is lost."""
    with loader:
        num_samples = sum(len(batch) for batch in loader)
        now = loader.statistics()
    assert set(now.dropped_total) == {"bad row AD457"}
    assert num_samples + now.bad_rows_total == number
    assert now.worker_restarts_total == 0
    assert 0 < num_samples < number
