"""Real processors of transformers that take videos and need no download, and videos for them."""

import functools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.pictures import processor_of as processor_of_pictures
from tests.support.pictures import save_processor

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl")
TOKENS_PER_SECOND = 2
_MARKS = {"internvl": "<video>"}
_QWEN_MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@functools.cache
def processor_of(family: str, settings: str) -> Any:
    """The processor with pictures and videos.

    :param settings: of its video processor, as JSON.
    """
    import transformers

    pictures = processor_of_pictures(family)
    name = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "internvl": "InternVL"}[family]
    videos = getattr(transformers, f"{name}VideoProcessor")(**json.loads(settings))
    made = type(pictures).__mro__[1]
    own = {"image_seq_length": 16} if family == "internvl" else {}
    return made(image_processor=pictures.image_processor, tokenizer=pictures.tokenizer, video_processor=videos, **own)


def settings_of(family: str, rng: random.Random) -> dict[str, Any]:
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

    return found | {
        "fps": rng.choice([1, 2, 3.7]),
        "min_frames": rng.choice([2, 4, 5]),
        "max_frames": rng.choice([6, 16, 31, 768]),
    }


def save(folder: Path, family: str, settings: dict[str, Any] | None = None) -> str:
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
    own = json.loads(path.read_text())
    own["video_processor"] = json.loads(processor_of(family, json.dumps(settings)).video_processor.to_json_string())
    path.write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps({"vision_config": {"tokens_per_second": TOKENS_PER_SECOND}}))
    path = folder / "chat_template.jinja"
    mark = _MARKS.get(family, _QWEN_MARK)
    template = path.read_text()
    place = "{% else %}{{ part.text }}"
    assert place in template
    path.write_text(template.replace(place, "{% elif part.type == 'video' %}" + mark + place))
    return str(folder)


KINDS = (
    "a.mp4", "a.mov", "a.mkv", "a.avi", "a.ts", "a.webm", "fragments.mp4", "vfr.mp4", "vfr.mkv", "a.h264", "cut.mp4",
    "turned.mp4",
)  # fmt: skip
_CODECS = {"avi": "mpeg4", "mov": "mpeg4", "webm": "libvpx"}


def film(
    folder: Path,
    kind: str,
    *,
    num_frames: int = 24,
    size: tuple[int, int] = (96, 64),
    fps: Any = 8,
    keys: int = 12,
    turn: int = 0,
    seed: int = 0,
) -> str:
    """A video, each of whose frames is another; its kind is how its file is called.

    :param size: width and height, as the file has them.
    :param keys: frames from one key frame to the next.
    """
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
        found = [
            np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4) for frame in box.decode(stream)
        ]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2), rate


def metadata_of(frames: Any, rate: float) -> Any:
    """What a processor is told of frames."""
    from transformers.video_utils import VideoMetadata

    number, _, height, width = frames.shape
    return VideoMetadata(
        total_num_frames=number, fps=rate, height=height, width=width, frames_indices=np.arange(number)
    )
