"""Chats with a picture each: by the loader, by a plain loop in processes, and by torch's loader of workers."""

from __future__ import annotations

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
_TWO_WORKERS: dict[str, Any] = {"batch_size": _BATCH, "num_workers": 2, "persistent_workers": True}


def draw_inputs(folder: str, num_rows: int, width: int = 800, height: int = 600) -> dict[str, float]:
    """A file of chats, their pictures as JPEG, and a processor."""
    from tests.support.pictures import draw, save_processor

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_processor(place / "processor", _FAMILY, max_pixels=1 << 20)
    rows = []
    for number in range(num_rows):
        path = draw(place / f"{number}.jpg", width + number % 64, height, number)
        content = [{"type": "image", "image": path}, {"type": "text", "text": "what is it?"}]
        answer = {"role": "assistant", "content": "noise"}
        rows.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}) + "\n")
    (place / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    return {"rows": num_rows}


def _loader(folder: str, **knobs: Any) -> Any:
    from asyncdata import ChatTokenizeFn, DataLoader

    processor = f"{folder}/processor"
    fn = ChatTokenizeFn(processor, processor=processor)
    return DataLoader(f"{folder}/rows.jsonl", tokenize_fn=fn, num_workers=2, batch_size=_BATCH, **knobs)


def pictures(folder: str, num_rows: int, max_media_bytes: int, rows_per_s: float = 0.0) -> dict[str, float]:
    """Rows per second after the first; at a rate, the share of the time that the trainer waits; memory that is held."""
    with _loader(folder, limits={"max_media_bytes": max_media_bytes}) as made:
        batches = itertools.chain.from_iterable(itertools.repeat(made))
        for number in range(8):
            next(batches)
            first_s = first_s if number else seconds()  # noqa: F821 - of the first turn
        time.sleep(3.0 if rows_per_s else 0.0)  # what is loaded ahead is there in the middle of a run
        held, waited, sizes = [], 0.0, []
        began = due = time.perf_counter()
        for _ in range(num_rows // _BATCH):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            held.append(made.statistics().media_held_bytes)
            sizes.append(psutil.Process().memory_info().rss)
            due += _BATCH / rows_per_s if rows_per_s else 0.0
            time.sleep(max(0.0, due - time.perf_counter()))
        passed = time.perf_counter() - began
        del batch
    return {
        "rows_per_s": num_rows / passed,
        "waited_share": waited / passed,
        "first_batch_s": first_s,
        "held_over_limit": max(held) / max_media_bytes,
        "growth_mb": (max(sizes[len(sizes) // 2 :]) - max(sizes[: len(sizes) // 2])) / 1e6,
    }


def _processed(folder: str, paths: list[str], queue: Any) -> None:
    from PIL import Image, ImageOps

    from tests.support.pictures import processor_of

    processor = processor_of(_FAMILY, max_pixels=1 << 20)
    for number, path in enumerate([paths[0], *paths]):
        if number == 1:
            queue.put(time.perf_counter())
        with Image.open(path) as image:
            picture = ImageOps.exif_transpose(image).convert("RGB")
        processor(text=[_TEXT], images=[[picture]], return_tensors="np")
    queue.put(time.perf_counter())


def plain_loop(folder: str, num_rows: int) -> dict[str, float]:
    """The same pictures by Pillow and the processor, in two processes that deliver nothing."""
    paths = sorted(str(path) for path in Path(folder).glob("*.jpg"))
    paths = list(itertools.islice(itertools.cycle(paths), num_rows))
    queue: Any = multiprocessing.get_context("spawn").Queue()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_processed, args=(folder, paths[each::2], queue)) for each in range(2)]
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

        from tests.support.pictures import processor_of

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

    from tests.support.pictures import processor_of

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
