"""Tokenize functions for rows with pictures, by real processors of transformers that need no download.

A row has ``text`` with a mark for each picture, and ``pictures``, paths of files.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from asyncdata import Column

__all__ = ("FAMILIES", "PATCH", "gemma3", "image_processor", "mrope", "processor_of", "qwen3_vl")

_MERGE = 2
PATCH = 16
_QWEN = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_QWEN |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_GEMMA = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}


def _tokenizer(marks: dict[str, str]) -> Any:
    """A token for each byte, and one for each mark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<eos>", *marks.values()])
    named = {f"{name}_token": mark for name, mark in marks.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=named
    )


@functools.cache
def processor_of(family: str) -> Any:
    """The processor, made once in each process."""
    import transformers

    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        return transformers.Gemma3Processor(image_processor=images, tokenizer=_tokenizer(_GEMMA), image_seq_length=16)

    class WithoutVideos(transformers.Qwen3VLProcessor):  # video processors need torchvision
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return WithoutVideos(image_processor=image_processor(PATCH), tokenizer=_tokenizer(_QWEN), video_processor=None)


def image_processor(patch: int) -> Any:
    """That of Qwen's models, with pictures of 4 to 64 tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = _MERGE * patch
    return Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2})


def _processed(family: str, row: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    pictures = [Image.open(path).convert("RGB") for path in row["pictures"]]
    found = processor_of(family)(text=[row["text"]], images=[pictures] if pictures else None, return_tensors="np")
    return {name: value if name in ("pixel_values", "image_grid_thw") else value[0] for name, value in found.items()}


def mrope(types: Any, grids: Any) -> Any:
    """Positions of tokens in time, height and width, as Qwen's models count them: int64 of shape (num_tokens, 3)."""
    places, found, next_grid = 0, list[Any](), iter(grids)
    stops = [*(np.flatnonzero(np.diff(types)) + 1), len(types)]
    for start, stop in zip([0, *stops], stops, strict=False):
        if not types[start]:
            found.append(np.repeat(np.arange(places, places + stop - start)[:, None], 3, 1))
            places += stop - start
        else:
            times, height, width = next(next_grid) // [1, _MERGE, _MERGE]
            grid = np.stack(np.meshgrid(*map(np.arange, (times, height, width)), indexing="ij"), -1).reshape(-1, 3)
            found.append(grid + places)
            places += max(height, width)
    return np.concatenate(found)


def qwen3_vl(row: dict[str, Any]) -> dict[str, Any]:
    found = _processed("qwen3_vl", row)
    types = found["mm_token_type_ids"]
    nothing = {"pixel_values": [], "image_grid_thw": []}
    positions = mrope(types, found.get("image_grid_thw", []))
    return nothing | {name: found[name] for name in nothing if name in found} | {
        "input_ids": found["input_ids"], "labels": found["input_ids"], "mm_token_type_ids": types, "mrope": positions,
        "id": row["id"],
    }  # fmt: skip


qwen3_vl.columns = (  # type: ignore[attr-defined]
    Column("pixel_values", "float32", "item", (3 * 2 * PATCH**2,)),
    Column("image_grid_thw", "int64", "item", (3,)),
    Column("mm_token_type_ids", "int64"),
    Column("mrope", "int64", shape=(3,)),
)


def gemma3(row: dict[str, Any]) -> dict[str, Any]:
    found = _processed("gemma3", row)
    ids, types = found["input_ids"], found["token_type_ids"]
    return {
        "input_ids": ids,
        "labels": ids,
        "token_type_ids": types,
        "pixel_values": found.get("pixel_values", []),
        "id": row["id"],
    }


gemma3.columns = (  # type: ignore[attr-defined]
    Column("pixel_values", "float32", "item", (3, 56, 56)),
    Column("token_type_ids", "int64"),
)

FAMILIES = {"qwen3_vl": (qwen3_vl, "<|vision_start|><|image_pad|><|vision_end|>"), "gemma3": (gemma3, _GEMMA["boi"])}
"""A family: its function, and the mark for a picture."""
