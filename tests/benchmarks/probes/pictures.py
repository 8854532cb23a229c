"""Chats with a picture or a video each: by the loader, by a plain loop in processes, by torch's loader of workers."""

import itertools
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.clock import seconds

_FAMILY, _BATCH = "qwen3_vl", 4
_TEXT = "<|vision_start|><|image_pad|><|vision_end|>what is it?"
_OF_VIDEOS = {"do_sample_frames": True, "fps": 2, "cap_pixels_per_frame": False}
_OF_VIDEOS |= {"size": {"shortest_edge": 1 << 16, "longest_edge": 20 << 18}}
_TWO_WORKERS: dict[str, Any] = {"batch_size": _BATCH, "num_workers": 2, "persistent_workers": True}


def draw_inputs(folder: str, num_rows: int, width: int = 800, height: int = 600) -> dict[str, float]:
    """A file of chats, their pictures as JPEG, and a processor."""
    from tests.support.media import draw, save_processor

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_processor(place / "processor", _FAMILY, max_pixels=1 << 20)
    paths = [draw(place / f"{number}.jpg", width + number % 64, height, number) for number in range(num_rows)]
    return _written(place, [{"type": "image", "image": path} for path in paths])


def film_inputs(folder: str, num_rows: int) -> dict[str, float]:
    """The same with videos of 640 x 360, of ten seconds, of which the processor takes 20 frames."""
    from tests.support.media import film
    from tests.support.media import save_video_processor as save

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save(place / "processor", _FAMILY, dict(_OF_VIDEOS))
    about: dict[str, Any] = {"num_frames": 300, "size": (640, 360), "fps": 30, "keys": 30}
    paths = [film(place, "a.mp4", seed=number, **about) for number in range(num_rows)]
    return _written(place, [{"type": "video", "video": path} for path in paths])


def _written(place: Path, media: list[dict[str, str]]) -> dict[str, float]:
    rows = []
    for medium in media:
        asks = {"role": "user", "content": [medium, {"type": "text", "text": "what is it?"}]}
        rows.append(json.dumps({"messages": [asks, {"role": "assistant", "content": "noise"}]}) + "\n")
    (place / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    return {"rows": len(rows)}


def _loader(folder: str, **knobs: Any) -> Any:
    from asyncdata import ChatTokenizeFn, DataLoader

    processor = f"{folder}/processor"
    fn = ChatTokenizeFn(processor, processor=processor)
    return DataLoader(f"{folder}/rows.jsonl", tokenize_fn=fn, num_workers=2, batch_size=_BATCH, **knobs)


def pictures(folder, num_rows, max_media_bytes, num_warm_rows, rows_per_s=0.0):
    """Rows per second, once the plans are far ahead; at a rate, the share of the time that a trainer waits; memory."""
    with _loader(folder, limits={"max_media_bytes": max_media_bytes}) as made:
        batches = itertools.chain.from_iterable(itertools.repeat(made))
        for number in range(num_warm_rows // _BATCH):
            next(batches)
            first_s = first_s if number else seconds()  # noqa: F821 - of the first turn
        time.sleep(3.0 if rows_per_s else 0.0)  # what is loaded ahead is there in the middle of a run
        held, waited, sizes, of_workers = [], 0.0, [], []
        began = due = time.perf_counter()
        for _ in range(num_rows // _BATCH):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            held.append(made.statistics().media_held_bytes)
            sizes.append(psutil.Process().memory_info().rss)
            of_workers.append(sum(one.memory_info().rss for one in psutil.Process().children(recursive=True)))
            due += _BATCH / rows_per_s if rows_per_s else 0.0
            time.sleep(max(0.0, due - time.perf_counter()))
        passed = time.perf_counter() - began
        del batch
    return {
        "rows_per_s": num_rows / passed,
        "waited_share": waited / passed,
        "first_batch_s": first_s,
        "held_over_limit": max(held) / max_media_bytes,
        "growth_mb": _growth(sizes),
        "workers_growth_mb": _growth(of_workers),
    }


def _growth(sizes: list[int]) -> float:
    """Of the second half over the first, in MB."""
    return (max(sizes[len(sizes) // 2 :]) - max(sizes[: len(sizes) // 2])) / 1e6


def _process_picture(path: str) -> None:
    from PIL import Image, ImageOps

    from tests.support.media import processor_of

    with Image.open(path) as image:
        picture = ImageOps.exif_transpose(image).convert("RGB")
    processor_of(_FAMILY, max_pixels=1 << 20)(text=[_TEXT], images=[[picture]], return_tensors="np")


def _process_video(path: str) -> None:
    """Only the frames that the processor samples become arrays."""
    import av
    import numpy as np
    import torch

    from tests.support.media import metadata_of
    from tests.support.media import video_processor_of as processor_of

    processor = processor_of(_FAMILY, json.dumps(_OF_VIDEOS))
    torch.set_num_threads(1)  # as workers have it
    with av.open(path) as box:
        (stream,) = box.streams.video
        stream.codec_context.thread_count = 1
        shape = (stream.frames, 3, stream.height, stream.width)
        about = metadata_of(torch.empty(shape, dtype=torch.uint8, device="meta"), float(stream.average_rate))
        about.frames_indices = processor.video_processor.sample_frames(about)
        wanted = {*about.frames_indices.tolist()}
        frames = [frame.to_ndarray(format="rgb24") for at, frame in enumerate(box.decode(stream)) if at in wanted]
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    text = [_TEXT.replace("image", "video")]
    processor(text=text, videos=[video], video_metadata=[about], do_sample_frames=False, return_tensors="pt")


def _processed(paths: list[str], queue: Any) -> None:
    process = _process_video if paths[0].endswith(".mp4") else _process_picture
    for number, path in enumerate([paths[0], *paths]):
        if number == 1:
            queue.put(time.perf_counter())
        process(path)
    queue.put(time.perf_counter())


def plain_loop(folder: str, num_rows: int) -> dict[str, float]:
    """The same media by Pillow or PyAV, and the processor, in two processes that deliver nothing."""
    paths = sorted(str(path) for path in Path(folder).iterdir() if path.suffix in (".jpg", ".mp4"))
    paths = list(itertools.islice(itertools.cycle(paths), num_rows))
    queue: Any = multiprocessing.get_context("spawn").Queue()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_processed, args=(paths[each::2], queue)) for each in range(2)]
    for worker in workers:
        worker.start()
    times = sorted(queue.get() for _ in range(4))
    for worker in workers:
        worker.join()
    return {"rows_per_s": num_rows / (times[-1] - times[0])}


class _Rows:
    """Rows for torch's loader: each is processed where it is asked for."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(str(path) for path in Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Any:
        from PIL import Image

        from tests.support.media import processor_of

        image = Image.open(self._paths[number]).convert("RGB")
        return processor_of(_FAMILY, max_pixels=1 << 20)(text=[_TEXT], images=[[image]], return_tensors="pt")


def torch_loader(folder: str, num_rows: int) -> dict[str, float]:
    """Rows per second of torch's DataLoader with two workers, and its first batch."""
    import torch

    return _through(torch.utils.data.DataLoader(_Rows(folder), collate_fn=list, **_TWO_WORKERS), num_rows)


def trl_loader(folder: str, num_rows: int) -> dict[str, float]:
    """The same of rows of `datasets`, with TRL's collator in the workers."""
    import datasets
    import torch
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from tests.support.media import processor_of

    paths = sorted(str(path) for path in Path(folder).glob("*.jpg"))
    rows = datasets.Dataset.from_dict({"images": [[path] for path in paths], "text": [_TEXT] * len(paths)})
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    collate = DataCollatorForVisionLanguageModeling(processor_of(_FAMILY, max_pixels=1 << 20))
    return _through(torch.utils.data.DataLoader(rows, collate_fn=collate, **_TWO_WORKERS), num_rows)


def _through(made: Any, num_rows: int) -> dict[str, float]:
    batches = itertools.chain.from_iterable(itertools.repeat(made))
    next(batches)
    first_s = seconds()
    for _ in range(7):
        next(batches)
    began = time.perf_counter()
    for _ in range(num_rows // _BATCH):
        next(batches)
    return {"rows_per_s": num_rows / (time.perf_counter() - began), "first_batch_s": first_s}
