"""Pictures as columns: a pack of samples with pictures is what its samples are alone, and a resumed run goes on so."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from asyncdata import Cache, ChatTokenizeFn, DataLoader, Document, PackedCollator, PaddedCollator, SoftPacking
from tests.support.parts import to_torch
from tests.support.pictures import PATCH, draw, processor_of, save_processor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

pytestmark = pytest.mark.thorough

EXACT = 1e-6
COLLATE = PackedCollator(keys="transformers")
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 64}


@functools.cache
def model_of(family: str) -> Any:
    """A tiny model with random weights."""
    tokenizer = processor_of(family).tokenizer
    ids = {name.removesuffix("_token"): tokenizer.convert_tokens_to_ids(mark) for name, mark in marks(tokenizer)}
    torch.manual_seed(0)
    if family == "gemma3":
        text = TEXT | {"vocab_size": len(tokenizer), "sliding_window": 512, "layer_types": ["full_attention"] * 2}
        vision = VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 7}
        named = {"image_token_id": ids["image"], "boi_token_index": ids["boi"], "eoi_token_index": ids["eoi"]}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, **named)
        return transformers.Gemma3ForConditionalGeneration(config).eval()

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = VISION | {"depth": 2, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    named = {"image_token_id": ids["image"], "video_token_id": ids["video"]}
    named |= {"vision_start_token_id": ids["vision_start"], "vision_end_token_id": ids["vision_end"]}
    text = TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **named)
    return transformers.Qwen3VLForConditionalGeneration(config).eval()


def marks(tokenizer: Any) -> list[tuple[str, str]]:
    names = ("image", "video", "vision_start", "vision_end", "boi", "eoi")
    return [(name, mark) for name in names if (mark := getattr(tokenizer, f"{name}_token", None))]


@torch.no_grad()
def logits(batch: dict[str, Any], family: str) -> Any:
    """Of a batch as it comes, without its padding, end to end."""
    model = model_of(family)
    model.model.rope_deltas = None
    found = model(**to_torch(batch), use_cache=False).logits
    return found[torch.from_numpy(batch["attention_mask"]).bool()] if "attention_mask" in batch else found[0]


@pytest.fixture(params=["qwen3_vl", "gemma3"])
def family(request) -> str:
    return request.param


@pytest.fixture
def rows(tmp_path, family):
    """A file of chats with no picture to three, and the folder of a processor."""
    rng, lines = random.Random(5), []
    for number in range(12):
        sizes = [(rng.randint(40, 160), rng.randint(40, 160)) for _ in range(number % 4)]
        paths = [draw(tmp_path / f"{number}-{each}.png", *size, each) for each, size in enumerate(sizes)]
        chat = [("user", "see <image> and " * len(paths)), ("assistant", "x" * rng.randint(3, 30))]
        messages = [{"role": role, "content": content} for role, content in chat]
        lines.append(json.dumps({"messages": messages, "images": paths}) + "\n")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    save_processor(tmp_path / "processor", family)
    return path


def make(path, **knobs):
    packing = {"packing": SoftPacking(max_length=400), "plan_packs": True, "shuffle": "full", "batch_size": 1}
    knobs = {"num_workers": 1, "collate_fn": COLLATE, "timeout_s": 240, "cache": Cache(folder="")} | packing | knobs
    folder = str(path.parent / "processor")
    return DataLoader(path, tokenize_fn=ChatTokenizeFn(folder, processor=folder), **knobs)


def test_a_pack_has_the_logits_of_its_samples_alone(rows, family):
    with make(rows, epochs=1, collate_fn=None) as loader:
        packs = [batch[0] for batch in loader]
    assert max(map(len, packs)) > 2
    assert sum("pixel_values" in document.sample.columns for pack in packs for document in pack) == 9
    for pack in packs:
        together = logits(COLLATE([pack]), family)
        alone = torch.cat([logits(COLLATE([[document]]), family) for document in pack])
        assert float((together - alone).abs().max()) <= EXACT


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_logits_of_their_samples_alone(rows, family, side):
    collate = PaddedCollator(side=side, keys="transformers")
    with make(rows, packing=None, plan_packs=False, collate_fn=None) as loader:
        samples = loader.get_next_batch(12)
    for four in (samples[:4], samples[4:8], samples[8:]):
        together = logits(collate(four), family)
        alone = torch.cat([logits(collate([sample]), family) for sample in four])
        assert float((together - alone).abs().max()) <= EXACT


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_dummy_runs_the_vision_tower_and_trains_nothing(rows, family, is_packed):
    with make(rows, packing=None, plan_packs=False, collate_fn=None, shuffle=False) as loader:
        text, dummy = loader.get_next_batch(2)
    document, model = Document(text.tokens, text.labels, None, text), model_of(family)
    collator, documents = (PackedCollator, [[document]]) if is_packed else (PaddedCollator, [document])
    without, batch = (collator(keys="transformers", dummy=one)(documents) for one in (None, dummy))
    assert "pixel_values" not in without
    assert (batch["labels"] != -100).sum() == (without["labels"] != -100).sum()

    num_tokens = len(text.tokens)
    assert float((logits(batch, family)[:num_tokens] - logits(without, family)).abs().max()) <= EXACT
    model.model.rope_deltas = None
    model(**to_torch(batch), use_cache=False).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    tower = [gradient for name, gradient in gradients.items() if "visual" in name or "vision_tower" in name]
    assert tower and not any(gradient.any() for gradient in tower)
    assert gradients["lm_head.weight" if family != "gemma3" else "model.language_model.embed_tokens.weight"].any()


def test_positions_of_qwen_are_those_that_its_model_counts(rows, family):
    if family != "qwen3_vl":
        pytest.skip("only Qwen counts in three dimensions")

    with make(rows, packing=None, plan_packs=False, collate_fn=None) as loader:
        samples = loader.get_next_batch(12)
    for sample in samples:
        found = to_torch(dict(sample.columns))
        named = {"image_grid_thw": found["image_grid_thw"]} if len(found["image_grid_thw"]) else {}
        tokens, types = torch.from_numpy(sample.tokens.astype(np.int64))[None], found["mm_token_type_ids"][None]
        wanted, _ = model_of(family).model.get_rope_index(tokens, mm_token_type_ids=types, **named)
        assert wanted[:, 0].T.tolist() == sample.columns["mrope"].tolist()
