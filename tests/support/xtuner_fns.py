"""Tokenize functions as they are written for XTuner, some with pictures; workers import them by path."""

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncdata.tokenization.pictures.transformers_processor import mrope
from tests.support.media import PATCH, image_processor, of_bytes


class Characters:
    """One token a character; ``hash()`` leaves ``max_length`` out, as XTuner's own do."""

    def __init__(self, max_length: int = 8, name: str = "characters") -> None:
        self.max_length = max_length
        self.name = name
        self.state = "runtime"

    def set_state(self, state: str) -> None:
        self.state = state

    def hash(self) -> str:
        return f"hash of {self.name}"

    def __call__(self, item: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        ids = [ord(char) for char in item["text"]][: self.max_length]
        if self.state == "cache":
            return {"num_tokens": len(ids), "proxy_attn_flops": 1.0}

        labels = [-100, *ids[1:]]
        return {"input_ids": ids, "labels": labels, "num_tokens": len(ids), "char_start": 0}


class Returns:
    """Gives what it was made with."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def hash(self) -> str:
        return "returns"

    def __call__(self, item: dict[str, Any]) -> Any:
        return self.result


def counting() -> Characters:
    """One that was last used to count."""
    made = Characters()
    made.set_state("cache")
    return made


ready = Characters(3)


class Numbered:
    """As many tokens as a row says, which tell its number and their places. The first third is not trained."""

    EACH = 1000

    def set_state(self, state: str) -> None: ...

    def hash(self) -> str:
        return "numbered"

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        first = item["number"] * self.EACH
        ids = [*range(first, first + item["tokens"])]
        masked = len(ids) // 3
        return {"input_ids": ids, "labels": [-100] * masked + ids[masked:], "num_tokens": len(ids)}


class Pictured:
    """With the two states, attributes and results of XTuner's function for Qwen3-VL; its pictures are files of numbers.

    A picture of ``[w, h]`` is ``w * h`` tokens. Rows: ``{"id": 3, "text": "abc", "pictures": [["3.json", [2, 4]]]}``.

    :param log: a file to which each file that is opened is written, with the state.
    """

    img_context_token_id = 9
    image_processor = SimpleNamespace(temporal_patch_size=1, patch_size=2)

    def __init__(self, log: str = "", max_length: int | None = None, visual_pack_weight: float = 0.0) -> None:
        self.log, self.max_length, self.visual_pack_weight = log, max_length, visual_pack_weight
        self.state = "runtime"

    def set_state(self, state: str) -> None:
        self.state = state

    def hash(self) -> str:
        return f"pictured {self.max_length}"

    def __call__(self, item: dict[str, Any], media_root: str = "") -> dict[str, Any]:
        if self.state == "runtime":
            found = [self._opened(Path(media_root, name)) for name, _ in item["pictures"]]
            sizes = [size for size, _ in found]
        else:
            sizes = [size or [0, 0] for _, size in item["pictures"]]
        counts = [w * h for w, h in sizes]
        ids = [9] * sum(counts) + [item["id"] * 1000 + ord(letter) for letter in item["text"]]
        is_cut = self.max_length is not None and self.max_length < sum(counts)
        ids = ids[: self.max_length]
        if self.state == "cache":
            number = 0 if 0 in counts or is_cut else len(ids)
            flops = round(number / 128) ** 2 + self.visual_pack_weight * sum((n / 128) ** 2 for n in counts)
            return {"num_tokens": number, "num_img_tokens": counts or [0], "proxy_attn_flops": flops}

        assert not is_cut, "a picture is cut"
        labels = [-100 if token == 9 else token for token in ids]
        result = {"input_ids": ids, "labels": labels, "num_tokens": len(ids), "num_img_tokens": counts or [0]}
        result |= {"position_ids": np.tile(np.arange(len(ids)), (3, 1, 1)), "id": item["id"]}
        if counts:
            result["pixel_values"] = np.concatenate([pixels for _, pixels in found])
            result["image_grid_thw"] = np.array([[1, h, w] for w, h in sizes])
        return result

    def _opened(self, path: Path) -> tuple[list[int], Any]:
        with open(self.log or os.devnull, "a") as log:
            log.write(f"{self.state} {path.name}\n")
        (w, h), value = json.loads(path.read_text())
        return [w, h], np.full((w * h, 12), value, np.float32)


def write_pictured(folder: Path, num_rows: int = 40, sizes: dict[int, Any] | None = None) -> str:
    """Rows of :class:`Pictured`, every fifth without a picture, and their pictures; some say ``sizes`` that are not
    true."""
    rows = []
    for number in range(num_rows):
        size = [1 + number % 3, 2 + number % 4]
        folder.joinpath(f"{number}.json").write_text(json.dumps([size, number]))
        pictures = [[f"{number}.json", (sizes or {}).get(number, size)]] if number % 5 else []
        rows.append({"id": number, "text": "abcdefg"[: 1 + number % 7], "pictures": pictures})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


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
    urls = [{"url": name, "image_wh": size[:2]} for name, size in row["pictures"].items()]
    images = [{"type": "image_url", "image_url": url} for url in urls]
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
