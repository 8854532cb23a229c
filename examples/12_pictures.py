"""Pictures: a tiny Qwen3-VL with random weights is trained on packed chats with drawn pictures, stopped and resumed.

It needs torch, transformers and Pillow, downloads nothing, and takes a minute on a CPU.
"""

import json
import os
import tempfile
from itertools import islice

try:
    import torch
    import transformers
    from PIL import Image
except ImportError as error:
    raise SystemExit(f"this example needs torch, transformers and Pillow: {error}") from None

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncdata import ChatTokenizeFn, DataLoader, PackedCollator, SoftPacking
from asyncdata.integrations.torch import to_torch

os.chdir(tempfile.mkdtemp(prefix="asyncdata-pictures-"))

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200)}
rows = []
for number in range(24):
    name = list(COLOURS)[number % 3]
    path = f"{number}.png"
    Image.new("RGB", (64 + 8 * (number % 5), 96 - 8 * (number % 4)), COLOURS[name]).save(path)
    question = {
        "role": "user",
        "content": [
            {"type": "image", "image": path},
            {"type": "text", "text": "Which colour?"},
        ],
    }
    rows.append({"messages": [question, {"role": "assistant", "content": name}]})

with open("colours.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)


marks = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(
    models.BPE(
        vocab={letter: number for number, letter in enumerate(letters)},
        merges=[],
    )
)
core.pre_tokenizer, core.decoder = (
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    decoders.ByteLevel(),
)
core.add_special_tokens(["<pad>", "<eos>", *marks.values()])
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=core,
    pad_token="<pad>",
    eos_token="<eos>",
    extra_special_tokens={f"{name}_token": mark for name, mark in marks.items()},
)
tokenizer.chat_template = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
tokenizer.save_pretrained("tiny-vlm")
size = {"shortest_edge": 4096, "longest_edge": 65536}
processor = transformers.Qwen2VLImageProcessorPil(patch_size=16, size=size)
with open("tiny-vlm/preprocessor_config.json", "w") as file:
    json.dump(processor.to_dict() | {"processor_class": "Qwen3VLProcessor"}, file)


tokenize_fn = ChatTokenizeFn("tiny-vlm", processor="tiny-vlm")
with DataLoader("colours.jsonl", tokenize_fn=tokenize_fn, num_workers=1, shuffle=False) as loader:
    (sample,) = loader.get_next_batch(1)

print({name: array.shape for name, array in sample.columns.items()})
print(tokenizer.decode(sample.labels[sample.labels != -100]))


def tiny_model():
    torch.manual_seed(0)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    rope = {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 10000.0,
    }
    text |= {
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "rope_parameters": rope,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    vision |= {
        "patch_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config)


def packed_loader():
    return DataLoader(
        "colours.jsonl",
        tokenize_fn=tokenize_fn,
        num_workers=1,
        shuffle="full",
        packing=SoftPacking(max_length=256),
        plan_packs=True,
        batch_size=1,
        collate_fn=PackedCollator(keys="transformers"),
    )


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(**to_torch(batch), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


model = tiny_model()
with packed_loader() as loader:
    losses = train(model, torch.optim.AdamW(model.parameters(), 0.01), loader)
print(len(losses), losses[-1] < losses[0])


model = tiny_model()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
with packed_loader() as loader:
    first = train(model, optimizer, islice(loader, 3))
    loader.save("state.json")

with packed_loader() as loader:
    loader.restore("state.json")
    rest = train(model, optimizer, loader)
print("the losses are the same, bit for bit" if first + rest == losses else "the losses differ")
