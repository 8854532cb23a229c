"""A trainer that is going to be killed: it streams, logs what it was given, and saves its state now and then.

Run with ``python -m tests.faults.support.streaming SETTINGS``. The log begins with the number of samples that the
snapshot it resumed from names. Then it has one line a batch: for each sample its place in D, its id, and a checksum of
its tokens.
"""

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

from asyncdata import ChatTokenizeFn, DataLoader, IterableSource, Mix, Part, Sample, Shuffle, SoftPacking
from asyncdata.errors import EndOfData
from tests.support.column_fns import NumberedMedia
from tests.support.loading import id_and_text
from tests.support.media import draw, film, save_processor, save_sound_processor, save_video_processor, write_sound

SHUFFLE = Shuffle(block_bytes=1024, window_blocks=8)
_ZERO = 15
"""The token of the digit 0 of the processors in :mod:`tests.support.media`, which have one a byte."""

PACKS = {"packs of videos": False, "planned packs of videos": True}
"""The kinds of data that are delivered in packs, and whether these are planned."""
NUM_PACKS = 16
"""Of them so many are delivered: nearly two epochs."""


def entry(sample: Sample | list[Any]) -> list[int]:
    """What a sample is, or a pack: the entries of its documents, in a row."""
    if isinstance(sample, list):
        return [number for document in sample for number in entry(document.sample)]

    place = sample.position
    return [
        sample.index,
        place.epoch,
        place.window,
        place.row,
        _id_of(sample),
        zlib.crc32(b"".join(array.tobytes() for array in (sample.tokens, *sample.columns.values()))),
    ]


def _id_of(sample: Sample) -> int:
    """The id of its row, which a chat with pictures or sounds begins with, after its role, a token a digit."""
    if sample.columns.keys().isdisjoint(("image_grid_thw", "input_features")):
        return int(sample.tokens[0])

    is_digit = (sample.tokens >= _ZERO) & (sample.tokens < _ZERO + 10)
    return int("".join(str(digit) for digit in sample.tokens[is_digit] - _ZERO))


def with_media(path: Path, kind: str) -> Path:
    """The rows as chats with one or two pictures, sounds or videos, which lie beside the file with a processor."""
    folder = path.parent
    if kind == "pictures":
        key, save, family = "image", save_processor, "qwen3_vl"
        names = ("0.png", "1.jpg", "2.webp", "3.png")
        media = [draw(folder / name, 60 + 40 * at, 50 + 30 * at, at) for at, name in enumerate(names)]
    elif kind == "sounds":
        key, save, family = "audio", save_sound_processor, "gemma4"
        names = ("0.wav", "1.mp3", "2.ogg", "3.flac")
        media = [write_sound(folder / name, 0.2 + at / 5, 8_000, seed=at) for at, name in enumerate(names)]
    else:  # no digit is written of these
        key, save, family = "video", save_video_processor, "qwen2_5_vl"
        names = ("a.mp4", "a.mkv", "a.avi", "vfr.mp4")
        media = [film(folder, name, num_frames=8 + 6 * at, size=(64, 48), seed=at) for at, name in enumerate(names)]
    if not (folder / "processor").exists():
        save(folder / "processor", family)
    rows = []
    for number in (json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()):
        named = [media[number % 4], media[number % 3]][: 1 + number % 2]
        asks = {"role": "user", "content": f"{number}" + f"<{key}>" * len(named)}
        messages = [asks, {"role": "assistant", "content": "yes"}]
        rows.append(json.dumps({"messages": messages, f"{key}s": named}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


def pictured(folder: Path) -> ChatTokenizeFn:
    """What makes samples of :func:`with_media`."""
    processor = str(folder / "processor")
    return ChatTokenizeFn(processor, processor=processor)


def examples(paths: list[str], _epoch: int) -> Iterator[dict[str, Any]]:
    for path in paths:
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def source_of(kind: str, paths: list[str]) -> Any:
    """The files, as they are, or as what makes examples of them."""
    if kind == "iterable":
        return IterableSource(partial(examples, paths), version=1)

    if kind == "hf stream":
        import datasets

        from asyncdata import HuggingFaceSource

        return HuggingFaceSource(datasets.load_dataset("json", data_files=paths, split="train", streaming=True))

    if kind == "mixture":  # an epoch of it has every row of every part once
        parts = zip("abc", paths, (5, 1, 3), strict=True)
        return Mix({name: Part(path, weight=weight, when_done="leave") for name, path, weight in parts}, quota=10)

    return paths


def _function_of(kind: str, paths: list[str]) -> Any:
    if kind.endswith(("pictures", "sounds", "videos")):
        return pictured(Path(paths[0]).parent)

    return NumberedMedia() if kind == "media" else id_and_text


def stream(paths, log, snapshot, batch_size, save_every, step_s, knobs, kind="files"):
    """To the end of the data, or until somebody ends us."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    source, function = source_of(kind, paths), _function_of(kind, paths)
    knobs = {"shuffle": SHUFFLE, **knobs}
    if kind in PACKS:
        knobs |= {"shuffle": "full", "packing": SoftPacking(max_length=200), "plan_packs": PACKS[kind]}
        knobs |= {"batch_size": 1, "epochs": None, "cache": {"folder": ""}}
    with DataLoader(source, tokenize_fn=function, timeout_s=240, **knobs) as loader:
        if os.path.exists(snapshot):
            loader.restore(snapshot)
        now = loader.statistics()
        _write(out, now.packs_total if kind in PACKS else now.samples_total)
        left = NUM_PACKS - now.packs_total if kind in PACKS else None
        for number, batch in enumerate(_batches(loader, batch_size, left), 1):
            _write(out, [entry(each) for each in batch])
            if number % save_every == 0:
                loader.save(snapshot)
            time.sleep(step_s)


def _batches(loader: DataLoader, size: int, num_packs: int | None) -> Iterator[list[Any]]:
    """So many packs, a batch each; or samples to the end of the data."""
    if num_packs is not None:
        yield from islice(chain.from_iterable(repeat(loader)), num_packs)
        return

    try:
        while True:
            yield loader.get_next_batch(size)
    except EndOfData as end:
        yield end.samples


class Log(NamedTuple):
    """What one process was given."""

    resumed_at: int
    entries: list[list[int]]


def read_log(path: Path) -> Log | None:
    """None if it was killed before it began. A line that the kill has cut in two does not count."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    if not lines:
        return None

    return Log(json.loads(lines[0]), [item for line in lines[1:] for item in json.loads(line)])


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def delivered(logs: list[Log]) -> list[list[int]]:
    """Each log as far as the next process resumed, end to end."""
    entries: list[list[int]] = []
    for log in logs:
        assert log.resumed_at <= len(entries), "the snapshot names samples that were not delivered"
        del entries[log.resumed_at :]
        entries += log.entries
    return entries


def _write(out: int, value: Any) -> None:
    os.write(out, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    stream(**json.loads(sys.argv[1]))
