"""Packs in calls of transformers' models: the loss is that of the documents one by one."""

import functools
import inspect

import numpy as np
import pytest

from asyncdata import Document, FixedCollator, PackedCollator, PaddedCollator
from asyncdata.errors import ConfigError
from tests.support.combinations import each_value

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
