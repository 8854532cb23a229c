"""Rows with pictures as XTuner's vision-language functions take them, and two functions of the same protocol.

The tokenizer has a token for each byte, and the marks of Qwen with the ids that XTuner knows.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata.tokenization.pictures.transformers_processor import mrope
from tests.support.pictures import PATCH, image_processor, of_bytes

__all__ = ("InternTiles", "QwenPictures", "chat_of", "draw", "qwen_tokenizer", "tiles")

_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652}
_IDS |= {"<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656}
_PAD = _IDS["<|image_pad|>"]


def draw(folder: Path, row: dict[str, Any]) -> None:
    """Draw the pictures of a row, each always alike; one has a size, and a number for its colours."""
    from PIL import Image

    for name, (width, height, seed) in row["pictures"].items():
        y, x, colour = np.ogrid[:height, :width, :3]
        values = (x * (3 + seed) + y * (5 + colour) + 40 * colour + 17 * seed) % 256
        Image.fromarray(values.astype(np.uint8)).save(folder / name)


def chat_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row, as a line of XTuner's files."""
    images = [
        {"type": "image_url", "image_url": {"url": name, "image_wh": size[:2]}}
        for name, size in row["pictures"].items()
    ]
    user = {"role": "user", "content": [*images, {"type": "text", "text": row["text"]}]}
    return {"messages": [user, {"role": "assistant", "content": row["answer"]}]}


@functools.cache
def qwen_tokenizer() -> Any:
    return of_bytes(_IDS, _IDS, eos_token="<|endoftext|>")


class QwenPictures:
    """What XTuner's ``Qwen3VLTokenizeFunction`` does for one question with pictures."""

    def __init__(self) -> None:
        self.image_processor = image_processor(PATCH)
        self.img_context_token_id = _PAD

    def hash(self) -> str:
        return "pictures"

    def __call__(self, item: dict[str, Any], media_root: str = "") -> dict[str, Any]:
        import torch
        from PIL import Image

        user, assistant = item["messages"]
        paths = [Path(media_root, part["image_url"]["url"]) for part in user["content"][:-1]]
        pictures = [Image.open(path).convert("RGB") for path in paths]
        found = self.image_processor.preprocess(pictures, return_tensors="pt") if pictures else {}
        grids = found.get("image_grid_thw", torch.empty(0, 3, dtype=torch.int64))
        text = user["content"][-1]["text"]
        for number, grid in enumerate(grids, 1):
            pads = "<|image_pad|>" * int(grid.prod() // 4)
            text = text.replace("<IMG_CONTEXT>", f"Picture {number}: <|vision_start|>{pads}<|vision_end|>", 1)
        encode = functools.partial(qwen_tokenizer().encode, add_special_tokens=False)
        asked = encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        answered, after = encode(f"{assistant['content']}<|im_end|>"), encode("\n")
        ids = asked + answered + after
        positions = mrope((np.array(ids) == _PAD).astype(int), [(grid, 1.0) for grid in grids.numpy()], 2)
        return {
            "input_ids": ids,
            "labels": [-100] * len(asked) + answered + [-100] * len(after),
            "position_ids": torch.from_numpy(positions.T[:, None].copy()),
            "num_tokens": len(ids),
            "num_img_tokens": grids.prod(dim=1).tolist() or [0],
            "num_imgs": [len(pictures)],
            **found,
        }


def tiles(number: int, seed: int) -> Any:
    """So many tiles of 2 by 2 pixels."""
    import torch

    return torch.arange(seed, seed + number * 12, dtype=torch.float32).reshape(number, 3, 2, 2)


class InternTiles:
    """What XTuner's ``InternS1VLTokenizeFunction`` gives for pictures of so many tiles."""

    image_size = 2
    img_context_token_id = 9

    def hash(self) -> str:
        return "tiles"

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        ids, numbers = item["ids"], item["tiles"]
        fields = {"input_ids": ids, "labels": [-100, *ids[1:]], "num_tokens": len(ids), "num_imgs": [len(numbers)]}
        if not numbers:
            return fields | {"num_img_tokens": [0]}

        return fields | {"num_img_tokens": [4 * each for each in numbers], "pixel_values": tiles(sum(numbers), ids[0])}
