"""What XTuner's packing, samplers and collator deliver."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.media import PATCH, image_processor
from tests.support.peers.records import digest, module_of, recorded, xtuners_pictures, xtuners_preset
from tests.support.xtuner_fns import InternTiles, Numbered, chat_of, draw, qwen_tokenizer

FIELDS = "input_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k num_padding position_ids".split()


def stable_sorts() -> Any:
    """Lets numpy sort alike on every machine. XTuner takes the shortest of some samples in whatever order it gives."""
    argsort, patch = np.argsort, pytest.MonkeyPatch()
    patch.setattr(np, "argsort", lambda array, kind=None: argsort(array, kind="stable"))
    return patch


class Rows:
    """A data set as XTuner's packing takes one, of rows with these numbers of tokens."""

    def __init__(self, lengths: list[int], first: int) -> None:
        self.num_tokens = np.array(lengths)
        self.proxy_attn_flops = np.array([float(round(length / 128) ** 2) for length in lengths])
        self.first = first

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return Numbered()({"number": self.first + int(row), "tokens": int(self.num_tokens[row])})


def sets_of(lengths: list[list[int]]) -> list[Rows]:
    firsts = np.cumsum([0, *map(len, lengths)]).tolist()
    return [Rows(of_one, first) for of_one, first in zip(lengths, firsts, strict=False)]


class Pictured(Rows):
    """One that XTuner takes for a data set with pictures."""


class Mesh:
    """A mesh of ranks, seen from one of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.world_size


# Packs


def dataset_of(folder: Path, lengths: list[list[int]], settings: dict[str, Any]) -> Any:
    """XTuner's packs."""
    packing, sets = module_of("xtuner", "v1.datasets.packing"), sets_of(lengths)
    shared = {"global_pack": settings["join_datasets"], "seed": settings["seed"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_get_mmap_dir", lambda: folder)
        patch.setattr(packing, "tqdm", lambda items, **_: items)
        kind, shared["pack_max_length"] = settings["kind"], settings["max_length"]
        if kind in ("hard", "legacy"):
            return vars(packing)["HardPackDataset" if kind == "hard" else "_LegacySoftPackDataset"](sets, **shared)

        shared |= {"pack_extra_buffer_size": settings["lookahead"], "pack_chunk_size": settings["slice_samples"]}
        if kind == "expand_soft":
            return packing.ExpandSoftPackDataset(sets, pack_workers=1, **shared)

        patch.setattr(packing, "VLMJsonlDataset", Pictured)
        for one, of_one in zip(sets, kind, strict=True):
            one.__class__ = Pictured if of_one == "expand_soft" else Rows
        return packing.MLLMPretrainHybridPackDataset(sets, pack_workers=1, **shared)


def runs_of(tokens: list[int]) -> str:
    """Which tokens of which rows of :class:`Numbered`: ``3:0-5 7:2-9``."""
    found: list[list[int]] = []
    for token in tokens:
        if found and token == found[-1][1] + 1 and token % Numbered.EACH:
            found[-1][1] = token
        else:
            found.append([token, token])
    return " ".join(f"{a // Numbered.EACH}:{a % Numbered.EACH}-{b % Numbered.EACH + 1}" for a, b in found)


def _sorted_alike(folder: Path, lengths: list[list[int]], settings: dict[str, Any]) -> Any:
    patch = stable_sorts()
    try:
        return dataset_of(folder, lengths, settings)
    finally:
        patch.undo()


@recorded("xtuner_packs", "xtuner")
def _xtuner_packs(folder: Path, settings: dict[str, Any], lengths: list[list[int]]) -> Any:
    dataset = _sorted_alike(folder, lengths, settings)
    packs = [runs_of([token for item in dataset[n] for token in item["input_ids"]]) for n in range(len(dataset))]
    return {"packs": packs, "costs": [int(cost) for cost in dataset.longest]}


# The order of packs


def costs_of(num_packs: int) -> list[int]:
    rng = random.Random(num_packs)
    return [rng.randint(1, 300) for _ in range(num_packs)]


def share_of(order: Any, rank: int, world_size: int, batch: int, *, round_up: bool, consumed: int = 0) -> Any:
    """What XTuner's sampler gives one rank of ``order``, after all ranks together have had ``consumed`` packs."""
    num_batches = -(-len(order) // batch) if round_up else len(order) // batch
    return np.resize(order, num_batches * batch)[consumed + rank :: world_size]


@recorded("xtuner_order", "xtuner")
def _xtuner_order(folder: Path, num_packs: int, world_size: int, accumulation: int, round_up: bool) -> Any:
    """By rank and epoch: the first packs, and a digest of all; and the same from the middle of the epoch."""
    found, batch = [], world_size * accumulation
    packs = type("Packs", (), {"longest": costs_of(num_packs), "__len__": lambda self: num_packs})()
    sampler = module_of("xtuner", "v1.datasets.sampler").LengthGroupedSampler
    for rank in range(world_size):
        theirs = sampler(packs, batch, Mesh(rank, world_size), seed=7, round_up=round_up)
        for epoch in range(2):
            theirs.set_epoch(epoch)
            whole = list(theirs)
            theirs.step = len(theirs) * world_size // 2 // batch * batch
            found.append([whole[:4], digest(whole), digest(list(theirs))])
    return found


# Batches


def batch_of(items: list[Any]) -> list[Any]:
    """All fields of a batch, XTuner's or ours: each with its type and shape; long ones as a digest."""
    found = []
    for item in items:
        fields = {name: _attribute(item["seq_ctx"], name) for name in FIELDS}
        fields["shifted_labels"] = item["shifted_labels"]
        found.append({name: _field(value) for name, value in fields.items()})
    return found


def _field(value: Any) -> Any:
    if isinstance(value, int) or not value.shape:
        return int(value)

    flat = value.flatten().tolist()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), flat if len(flat) < 50 else digest(flat)]


def collated(packs: list[Any], settings: dict[str, Any]) -> list[Any]:
    collate = module_of("xtuner", "v1.datasets.collator").sft_llm_collator
    padding = {"pack_to_max_length": settings["pad_to_max_length"], "pad_chunk_size": settings["pad_chunk"]}
    return batch_of(collate(packs, settings["max_length"], settings["pad_id"], **padding))


@recorded("xtuner_batches", "xtuner")
def _xtuner_batches(folder: Path, settings: dict[str, Any], packs: list[Any]) -> Any:
    items = [[{"input_ids": ids, "labels": labels, "num_tokens": len(ids)} for ids, labels in pack] for pack in packs]
    return collated(items, settings)


# Batches with pictures


def pictures_function() -> Any:
    """XTuner's own function for Qwen3-VL."""
    module, longest = xtuners_pictures(), {"shortest_edge": 4096, "longest_edge": 1 << 24}
    videos = SimpleNamespace(size=longest, min_frames=4, max_frames=768, fps=2)
    module._PROCESSOR_CACHE["drawn"] = image_processor(PATCH), videos  # noqa: SLF001 - else it needs torchvision
    return module.Qwen3VLTokenizeFunction(qwen_tokenizer(), "drawn", "drawn", hash="drawn")


def media_of(items: list[Any]) -> list[Any]:
    """All fields of a batch with pictures; of the pixels the shape, and means of all, the first and the last row."""
    found = batch_of(items)
    for fields, item in zip(found, items, strict=True):
        media = (_attribute(item["seq_ctx"], name) for name in ("pixel_values", "image_grid_thw", "num_img_tokens"))
        pixels, grids, fields["num_img_tokens"] = media
        fields["image_grid_thw"] = None if grids is None else _field(grids)
        if pixels is not None:
            means = [round(float(some.mean()), 3) for some in (pixels, pixels[0], pixels[-1])]
            fields["pixel_values"] = [str(pixels.dtype), list(pixels.shape), means]
    return found


def _attribute(context: Any, name: str) -> Any:
    return context.get(name) if isinstance(context, dict) else getattr(context, name)


@recorded("xtuner_pictures", "xtuner")
def _xtuner_pictures(folder: Path, family: str, settings: dict[str, Any], packs: list[Any]) -> Any:
    if family == "qwen3_vl":
        for row in (row for pack in packs for row in pack):
            draw(folder, row)
        function = pictures_function()
        items = [[function(chat_of(row), media_root=str(folder)) for row in pack] for pack in packs]
    else:
        items = [[InternTiles()(row) for row in pack] for pack in packs]
    collate = getattr(module_of("xtuner", "v1.datasets.collator"), f"{family}_sft_collator")
    padding = {"pack_to_max_length": settings["pad_to_max_length"], "pad_chunk_size": settings["pad_chunk"]}
    return media_of(collate(items, settings["max_length"], settings["pad_id"], **padding))


# Epochs of ranks


@recorded("xtuner_epochs", "xtuner")
def _xtuner_epochs(folder: Path, settings: dict[str, Any], lengths: list[list[int]], **given: Any) -> Any:
    """By rank, two epochs of batches: the tokens of each pack, and a digest of all that the trainer gets."""
    dataset = _sorted_alike(folder, lengths, settings)
    samplers = module_of("xtuner", "v1.datasets.sampler")
    sampler = samplers.LengthGroupedSampler if given["grouped"] else samplers.ParallelSampler
    world_size, size = given["world_size"], given["batch_size"]
    found = []
    for rank in range(world_size):
        batch, mesh = world_size * size * given["accumulation"], Mesh(rank, world_size)
        theirs = sampler(dataset, batch, mesh, seed=settings["seed"], round_up=given["round_up"])
        batches = []
        for epoch in range(2):
            theirs.set_epoch(epoch)
            packs = [dataset[number] for number in theirs]
            batches += [packs[first : first + size] for first in range(0, len(packs), size)]
        settings_of_batch = {**settings, "pad_id": 0, "pad_to_max_length": True, "pad_chunk": 256}
        found.append([shown(collated(packs, settings_of_batch)) for packs in batches])
    return found


def preset_of(folder: Path, pieces: list[list[Any]], order: list[int], **settings: Any) -> dict[str, Any]:
    """The settings of packs that a folder names: for each pack the file, row, start and stop of its pieces."""
    rows = [[file, row, -1, -1, start, stop] for pack in pieces for file, row, start, stop in pack]
    paths = [str(folder / f"{number}.jsonl") for number in range(1 + max(row[0] for row in rows))]
    (folder / "paths.json").write_text(json.dumps(paths))
    np.save(folder / "samples.npy", np.array(rows))
    np.save(folder / "boundaries.npy", np.cumsum([0, *map(len, pieces)]))
    np.save(folder / "order.npy", np.array(order))
    return {"folder": str(folder), "order": str(folder / "order.npy"), **settings}


@recorded("xtuner_preset", "xtuner")
def _xtuner_preset(folder, lengths, preset, world_size, batch):
    """By rank, two epochs of the tokens of each pack, without padding."""
    given = preset_of(folder, **preset)
    sets = sets_of(lengths)
    for number, one in enumerate(sets):
        vars(one)["path"] = str(folder / f"{number}.jsonl")
    ways = f"{given['short']}", f"{given['long']}"
    packs = xtuners_preset().PresetPackDataset(sets, given["folder"], given["max_length"], *ways)
    kind, found = module_of("xtuner", "v1.datasets.preset_sampler").PresetSampler, []
    for rank in range(world_size):
        sampler = kind(packs, given["order"], batch, Mesh(rank, world_size))
        items = [packs[number] for _ in range(2) for number in sampler]
        kept = [[item for item in pack if any(item["input_ids"])] for pack in items]
        found.append([runs_of([token for item in pack for token in item["input_ids"]]) for pack in kept])
    return found


def shown(batch: list[Any]) -> list[Any]:
    """The tokens of each pack, and a digest of the batch."""
    packs = []
    for item in batch:
        ids = item["input_ids"][2]
        stop = len(ids) - item["num_padding"] if isinstance(ids, list) else 0
        packs.append(runs_of(ids[:stop]) if stop else ids)
    return [*packs, digest(batch)]
