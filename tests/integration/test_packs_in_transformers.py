"""Packs in calls of transformers' models, with pictures and without: the loss is that of the documents one by one."""

import functools
import inspect
import json
import random
from typing import Any

import numpy as np
import pytest

from asyncdata import ChatTokenizeFn, DataLoader, Document, FixedCollator, PackedCollator, PaddedCollator, SoftPacking
from asyncdata.errors import ConfigError
from tests.support.examples import each_value
from tests.support.media import PATCH, draw, processor_of, save_processor
from tests.support.parts import to_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

VOCABULARY = 97
LENGTHS = [[7, 1, 12], [5, 9, 3, 2]]
OF_PACKS = ("input_ids", "position_ids", "labels")
EXACT = 1e-6  # transformers computes the loss in float32


def document(rng, length):
    """Random tokens, of which about two thirds are trained, the first one among them."""
    is_trained = rng.random(length) < 0.7
    is_trained[0] = True
    return Document(rng.integers(1, VOCABULARY, length).astype(np.int32), loss_mask=is_trained.astype(np.uint8))


@pytest.fixture(scope="module")
def packs():
    rng = np.random.default_rng(7)
    return [[document(rng, length) for length in lengths] for lengths in LENGTHS]


@functools.cache
def model_with(attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, initializer_range=0.5, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).double().eval()


@torch.no_grad()
def loss_one_by_one(model, packs):
    """The mean over all tokens that are trained and have one before them, of documents that know no other."""
    total, number = 0.0, 0
    for tokens, mask in [(each.tokens, each.loss_mask) for pack in packs for each in pack]:
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
        for place in range(1, len(tokens)):
            if mask[place]:
                total -= float(logits[place - 1].log_softmax(-1)[tokens[place]])
                number += 1
    return total / number


def tensors_of(batch):
    """As a trainer gets them: arrays as tensors, and what is none as it is."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


@torch.no_grad()
def loss_of(model, batch, *names):
    tensors = tensors_of(batch)
    return float(model(**{name: tensors[name] for name in names or tensors}, use_cache=False).loss)


def by_segments(module, query, key, value, attention_mask, **given):
    """Attention of nothing but the boundaries, as flash attention does it: rows end to end, and no mask."""
    ends, width = given["cu_seq_lens_q"], query.shape[2]
    assert attention_mask is None
    assert ends.dtype == torch.int32
    assert given["cu_seq_lens_k"].tolist() == ends.tolist()
    assert given["max_length_q"] == given["max_length_k"] == int(ends.diff().max())
    repeats = query.shape[1] // key.shape[1]
    rows = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    rows = [part.repeat_interleave(repeats if number else 1, 1) for number, part in enumerate(rows)]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part[start:stop].transpose(0, 1)[None] for part in rows), is_causal=True, scale=given["scaling"]
        )
        for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1).unflatten(0, (-1, width)), None


SETTINGS = [{}, {"max_length": 40, "pad_chunk": 4}, {"segment_multiple_of": 8}, {"pad_to_multiple_of": 16}]


def whole_call(case):
    """With the keys of transformers, a batch is a whole call."""
    settings, attention = case.values
    return pytest.param(PackedCollator(keys="transformers", **settings), attention, (), marks=case.marks)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("collator", "attention", "names"),
    [
        *((PackedCollator(), attention, OF_PACKS) for attention in ("eager", "sdpa")),
        (PackedCollator(max_length=40, pad_chunk=4), "eager", OF_PACKS),
        (PackedCollator(max_length=64, pad_chunk=8, segment_multiple_of=8), "sdpa", OF_PACKS),
        (PaddedCollator(pad_to_multiple_of=4), "sdpa", ()),
        (PaddedCollator(side="left", pad_to_multiple_of=16), "sdpa", ()),
        (FixedCollator(length=20), "sdpa", ()),
        *map(whole_call, each_value(SETTINGS, ["by_segments", "sdpa"])),
    ],
)
def test_the_loss_of_a_batch_is_that_of_its_documents_one_by_one(packs, collator, attention, names):
    transformers.AttentionInterface.register("by_segments", by_segments)
    transformers.AttentionMaskInterface.register("by_segments", lambda **_: None)
    given = packs if isinstance(collator, PackedCollator) else [document for pack in packs for document in pack]
    found = loss_of(model_with(attention), collator(given), *names)
    assert found == pytest.approx(loss_one_by_one(model_with("sdpa"), packs), rel=EXACT)


@pytest.mark.parametrize(
    "collator",
    [PackedCollator(shift="document"), PaddedCollator(shift_labels=True), FixedCollator(length=30, shift_labels=True)],
)
def test_shifted_labels_are_never_called_labels(packs, collator):
    given = packs if isinstance(collator, PackedCollator) else packs[0]
    batch = collator(given)
    assert "labels" not in batch
    unshifted = (PackedCollator() if isinstance(collator, PackedCollator) else FixedCollator(length=30))(given)
    width = batch["shifted_labels"].shape[1] - 1
    assert batch["shifted_labels"][:, :width].tolist() == unshifted["labels"][:, 1 : width + 1].tolist()
    assert (batch["shifted_labels"][:, -1] == -100).all()


@pytest.mark.thorough
@torch.no_grad()
def test_shifted_labels_line_up_with_the_models_outputs(packs):
    model = model_with("sdpa")
    batch = tensors_of(PackedCollator(shift="document")(packs))
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shifted_labels"].flatten())
    assert float(found) == pytest.approx(loss_one_by_one(model, packs), rel=EXACT)


def test_the_keys_are_those_that_transformers_own_collator_gives():
    rng = np.random.default_rng(1)
    pack = [document(rng, length) for length in (5, 1, 8)]
    labels = [np.where(np.asarray(mask, bool), tokens, -100) for tokens, _, mask, *_ in pack]
    shape = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_tensors": "np"}
    features = [{"input_ids": d.tokens.tolist(), "labels": own.tolist()} for d, own in zip(pack, labels, strict=True)]
    wanted = transformers.DataCollatorWithFlattening(**shape)(features)
    found = PackedCollator(keys="transformers")([pack])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
        assert getattr(found[name], "dtype", int) == getattr(value, "dtype", int), name


def test_flash_attention_of_transformers_reads_these_keys():
    from transformers import modeling_flash_attention_utils as flash

    names = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert names <= set(inspect.signature(flash._flash_attention_forward).parameters)  # noqa: SLF001
    assert names <= PackedCollator(keys="transformers")([[Document(np.arange(3))]]).keys()


@pytest.mark.parametrize("settings", [{"shift": "document"}, {"shift": "pack"}, {"truncate_packs": True}])
def test_what_a_call_of_transformers_cannot_take_is_refused(settings):
    with pytest.raises(ConfigError, match='keys="transformers"'):
        PackedCollator(keys="transformers", max_length=8, **settings)


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
def pictured_rows(tmp_path, family):
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
    knobs = {"num_workers": 1, "collate_fn": COLLATE, "timeout_s": 240, "cache": {"folder": ""}} | packing | knobs
    folder = str(path.parent / "processor")
    return DataLoader(path, tokenize_fn=ChatTokenizeFn(folder, processor=folder), **knobs)


@pytest.mark.thorough
def test_a_pack_has_the_logits_of_its_samples_alone(pictured_rows, family):
    with make(pictured_rows, epochs=1, collate_fn=None) as loader:
        packs = [batch[0] for batch in loader]
    assert max(map(len, packs)) > 2
    assert sum("pixel_values" in document.sample.columns for pack in packs for document in pack) == 9
    for pack in packs:
        together = logits(COLLATE([pack]), family)
        alone = torch.cat([logits(COLLATE([[document]]), family) for document in pack])
        assert float((together - alone).abs().max()) <= EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_logits_of_their_samples_alone(pictured_rows, family, side):
    collate = PaddedCollator(side=side, keys="transformers")
    with make(pictured_rows, packing=None, plan_packs=False, collate_fn=None) as loader:
        samples = loader.get_next_batch(12)
    for four in (samples[:4], samples[4:8], samples[8:]):
        together = logits(collate(four), family)
        alone = torch.cat([logits(collate([sample]), family) for sample in four])
        assert float((together - alone).abs().max()) <= EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_dummy_runs_the_vision_tower_and_trains_nothing(pictured_rows, family, is_packed):
    with make(pictured_rows, packing=None, plan_packs=False, collate_fn=None, shuffle=False) as loader:
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


@pytest.mark.thorough
def test_positions_of_qwen_are_those_that_its_model_counts(pictured_rows, family):
    if family != "qwen3_vl":
        pytest.skip("only Qwen counts in three dimensions")
    with make(pictured_rows, packing=None, plan_packs=False, collate_fn=None) as loader:
        samples = loader.get_next_batch(12)
    for sample in samples:
        found = to_torch(dict(sample.columns))
        named = {"image_grid_thw": found["image_grid_thw"]} if len(found["image_grid_thw"]) else {}
        tokens, types = torch.from_numpy(sample.tokens.astype(np.int64))[None], found["mm_token_type_ids"][None]
        wanted, _ = model_of(family).model.get_rope_index(tokens, mm_token_type_ids=types, **named)
        assert wanted[:, 0].T.tolist() == sample.columns["mrope"].tolist()
