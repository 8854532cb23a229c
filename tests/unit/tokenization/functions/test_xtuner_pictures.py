"""What an object of XTuner's protocol gives for pictures: columns, which its attributes declare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncdata import Column, DataLoader
from asyncdata.errors import ConfigError
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.xtuner import XTunerTokenizeFn
from tests.unit.tokenization import faults, run

PROCESSOR = SimpleNamespace(patch_size=2, temporal_patch_size=2)
VL = {
    "input_ids": [1, 2],
    "labels": [-100, 2],
    "num_tokens": 2,
    "num_imgs": [1],
    "pixel_values": np.ones((4, 24), np.float32),
    "image_grid_thw": np.array([[1, 2, 2]]),
    "num_img_tokens": [4],
    "position_ids": np.arange(6).reshape(3, 1, 2),
}


class Pictures:
    """With the attributes of XTuner's function for Qwen3-VL."""

    img_context_token_id = 9

    def __init__(self, result: dict[str, Any], processor: Any = PROCESSOR, **attributes: Any) -> None:
        self.result = result
        self.image_processor = processor
        vars(self).update(attributes)

    def hash(self) -> str:
        return "pictures"

    def __call__(self, item: dict[str, Any], media_root: str = "") -> dict[str, Any]:
        return self.result | ({"root": media_root} if media_root else {})


def sample_of(path: Any, made: Any, **settings: Any) -> Any:
    with DataLoader(path, tokenize_fn=XTunerTokenizeFn(made, **settings), num_workers=0) as loader:
        return loader.get_next_batch(1)[0]


@pytest.fixture
def path(jsonl_file):
    return jsonl_file([{"text": "a"}])


def test_pictures_of_qwen_are_columns_and_positions_are_those_of_each_token(path):
    sample = sample_of(path, Pictures(VL), media_root="media")

    shapes = {name: (array.shape, array.dtype) for name, array in sample.columns.items()}
    assert shapes == {
        "pixel_values": ((4, 24), np.float32),
        "image_grid_thw": ((1, 3), np.int64),
        "num_img_tokens": ((1,), np.int64),
        "mrope": ((2, 3), np.int64),
    }
    assert sample.columns["mrope"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert sample.extra == {"num_imgs": [1], "root": "media"}


def test_a_text_among_them_has_positions_only(path):
    text = {name: VL[name] for name in ("input_ids", "labels", "position_ids", "num_tokens", "num_imgs")}
    sample = sample_of(path, Pictures(text | {"num_img_tokens": [0]}))

    assert [name for name, array in sample.columns.items() if len(array)] == ["mrope"]
    assert sample.extra == {"num_imgs": [1]}


def test_tiles_of_internvl_are_columns_without_positions(path):
    tiles = {name: VL[name] for name in ("input_ids", "num_tokens", "num_img_tokens")}
    made = Pictures(tiles | {"pixel_values": np.ones((2, 3, 4, 4))}, None, image_size=4)
    columns = sample_of(path, made).columns

    assert (columns["pixel_values"].shape, set(columns)) == ((2, 3, 4, 4), {"pixel_values", "num_img_tokens"})


def test_positions_are_no_column_where_the_function_makes_none_and_declared_columns_go_first(path):
    assert "mrope" not in sample_of(path, Pictures(VL | {"position_ids": None}, enable_3d_rope=False)).columns.declared
    own = (Column("weights", "float32"),)
    made = Pictures({"input_ids": [1, 2], "weights": [0.5, 1]}, columns=own)
    assert sample_of(path, made, media_root="media").columns.declared == {"weights": own[0]}


def test_what_the_pictures_depend_on_is_in_the_fingerprint():
    larger = SimpleNamespace(patch_size=4, temporal_patch_size=2)
    made = [
        XTunerTokenizeFn(Pictures(VL)),
        XTunerTokenizeFn(Pictures(VL), media_root="a"),
        XTunerTokenizeFn(Pictures(VL, larger)),
        XTunerTokenizeFn(Pictures(VL, enable_3d_rope=False)),
    ]
    assert len({fn.fingerprints()["tokenize_fn"] for fn in made}) == len(made)


def test_pictures_of_another_size_are_bad_rows_and_a_root_is_a_path():
    opened = XTunerTokenizeFn(Pictures(VL | {"pixel_values": np.ones((4, 25))})).open()
    assert isinstance(opened, FunctionTokenizer)
    assert faults(run(opened, [{}])) == [(0, "AD425")]
    with pytest.raises(ConfigError, match="media_root is the path of a folder"):
        XTunerTokenizeFn(Pictures(VL), media_root=1)
