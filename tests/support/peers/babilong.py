"""Rows as BABILong's own generator makes them, of text that we made; and what its recipe makes of them."""

from pathlib import Path
from typing import Any

from tests.support.peers.checkouts import module_of
from tests.support.peers.records import recorded
from tests.support.peers.rollouts import TOKENIZER

__all__ = ("RESERVE", "recipe")

RESERVE = 8


@recorded("babilong_recipe", "babilong")
def _babilong_recipe(folder: Path, story: list[str], noise: list[str], size: int, max_length: int) -> Any:
    from transformers import AutoTokenizer

    module, tokenizer = module_of("babilong", "babilong_utils"), AutoTokenizer.from_pretrained(TOKENIZER)
    (folder / "task.txt").write_text("\n".join(story * 2) + "\n")  # the last story of a file is never served
    sampler = module.SentenceSampler([{"text": text} for text in noise], tokenizer=tokenizer, min_sentence_len=2)
    tasks = module.TaskDataset(str(folder / "task.txt"))
    made = module.NoiseInjectionDataset(tasks, sampler, tokenizer, sample_size=size)[0]
    row = {"input": tokenizer.decode(made["input_tokens"]), "question": made["question"], "target": made["answer"]}
    return {"row": row, **recipe(tokenizer, row, max_length, RESERVE)}


def recipe(tokenizer: Any, row: dict[str, str], max_length: int, reserve: int) -> dict[str, list[int]]:
    """The recipe's own steps, by a tokenizer of transformers. A blank line follows the context."""
    prompt = f"{row['input']}\n\nQuestion: {row['question']}\nAnswer:"
    prompt_ids = tokenizer(prompt, add_special_tokens=True, truncation=True, max_length=max_length - reserve).input_ids
    answer_ids = tokenizer(f" {row['target']}", add_special_tokens=False).input_ids
    input_ids = (prompt_ids + answer_ids)[:max_length]
    labels = ([-100] * len(prompt_ids) + answer_ids)[:max_length]
    num_padding = max_length - len(input_ids)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {
        "input_ids": input_ids + [pad_id] * num_padding,
        "labels": labels + [-100] * num_padding,
        "attention_mask": [1] * len(input_ids) + [0] * num_padding,
    }
