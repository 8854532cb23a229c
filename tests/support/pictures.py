"""Real processors of transformers that need no download, and pictures for them."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ("PATCH", "chat_template", "draw", "image_processor", "of_bytes", "processor_of", "save_processor")
__all__ += ("tokenizer_of",)

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
    """The processor, made once in each process.

    :param max_pixels: of pictures for Qwen; None: few, so that tests are fast.
    """
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

    class WithoutVideos(made):  # video processors need torchvision
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return WithoutVideos(image_processor=images, tokenizer=tokenizer, video_processor=None, **settings)


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
