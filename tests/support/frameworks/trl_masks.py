"""The tokens that TRL trains, of its own trainers' data sets, beside those of our tokenize functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn
from tests.support.frameworks.killed_runs import main

if TYPE_CHECKING:
    from pathlib import Path

IGNORED = -100
GENERATION = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS = [
    [user("What is 1 + 1?"), assistant("It is 2.")],
    [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("\n\nHello"), user("And?"), assistant("Bye  ")],
    [user("a"), assistant("é 中文 😀"), user("b"), assistant("")],
]
PAIRS = [
    {"prompt": [user("Sky?")], "chosen": [assistant("Blue.")], "rejected": [assistant("A fish.")]},
    {
        "prompt": [user("a"), assistant("b"), user("c")],
        "chosen": [assistant("\n\ngood")],
        "rejected": [assistant("bad"), user("no"), assistant("worse")],
    },
]
IMPLICIT = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in PAIRS]
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."},
    {"prompt": "under", "chosen": "standing", "rejected": "stand"},
    {"prompt": "It ends", "chosen": " here<|im_end|>", "rejected": " there"},
]
IMPLICIT_TEXTS = [
    {"chosen": "The sky is grey today", "rejected": "The sky is green"},
    {"chosen": "ab", "rejected": "abc"},
    {"chosen": "One two three", "rejected": "One two  four"},
]


def _ours(folder: Path, rows: list[dict[str, Any]], tokenize_fn: Any) -> list[Any]:
    import json

    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with DataLoader(path, tokenize_fn=tokenize_fn, shuffle=False, num_workers=0, timeout_s=240, epochs=1) as loader:
        return list(loader.get_next_batch(len(rows)))


def _model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))


def _sft(folder: Path, tokenizer: Any, name: str, **settings: Any) -> dict[str, Any]:
    """The labels of SFTTrainer, and of ours; the first token has none, as nothing predicts it."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(output_dir=str(folder), use_cpu=True, report_to=[], max_length=None, **settings)
    rows = [{"messages": chat} for chat in CHATS]
    trainer = SFTTrainer(
        _model(tokenizer), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    theirs = [[row["input_ids"], [IGNORED, *row["labels"][1:]]] for row in trainer.train_dataset]
    template = {"chat_template": GENERATION} if settings["assistant_only_loss"] else {}
    train_on = "assistant" if settings["assistant_only_loss"] else "all"
    found = _ours(folder, rows, ChatTokenizeFn(name, train_on=train_on, **template))
    return {"trl": theirs, "ours": [[sample.tokens.tolist(), sample.labels.tolist()] for sample in found]}


def _dpo(folder: Path, tokenizer: Any, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each answer: its tokens, and where the trained ones begin: the first token is never one of them."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(output_dir=str(folder), use_cpu=True, report_to=[], max_length=None)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = DPOTrainer(_model(tokenizer), ref_model=_model(tokenizer), args=arguments, **given)
    theirs = [
        [[row["prompt_ids"] + row[f"{answer}_ids"], len(row["prompt_ids"]) or 1] for answer in ("chosen", "rejected")]
        for row in trainer.train_dataset
    ]
    ours = []
    for sample in _ours(folder, rows, PreferenceTokenizeFn(name, train_on="completion")):
        ids, ((start, stop),) = sample.extra["rejected_input_ids"], sample.extra["rejected_spans"]
        assert stop == len(ids)
        first = int((sample.labels == IGNORED).sum())
        assert (sample.labels[first:] == sample.tokens[first:]).all()
        ours.append([[sample.tokens.tolist(), first], [ids, start]])
    return {"trl": theirs, "ours": ours}


def drive(folder: Path, name: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    def tokenizer() -> Any:
        return AutoTokenizer.from_pretrained(name)

    marked = tokenizer()
    marked.chat_template = GENERATION
    kinds = {"chats": PAIRS, "chats without a prompt": IMPLICIT, "texts": TEXTS, "texts without one": IMPLICIT_TEXTS}
    return {
        "all": _sft(folder, tokenizer(), name, assistant_only_loss=False),
        "assistant": _sft(folder, marked, name, assistant_only_loss=True),
        **{kind: _dpo(folder, tokenizer(), name, rows) for kind, rows in kinds.items()},
    }


if __name__ == "__main__":
    main(drive)
