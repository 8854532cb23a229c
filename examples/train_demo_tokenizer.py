"""How asyncdata's demo tokenizer was made: byte-level BPE, trained on the docstrings of the standard library.

::

    python examples/train_demo_tokenizer.py FOLDER [VOCABULARY_SIZE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncdata.demo import CHAT_TEMPLATE, docstring_prompts

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def train(vocabulary_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["input"] for row in docstring_prompts()), trainer)
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "additional_special_tokens": SPECIAL_TOKENS[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    folder, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6000
    tokenizer = train(size)
    write(folder, tokenizer)
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")
