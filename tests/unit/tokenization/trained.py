"""Shared by the tests of trained text: which text is trained, and tokenizers with a twist."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from asyncdata import TokenizeFn
from tests.support.loaders import Outcome, deliver
from tests.support.parts import Chunk
from tests.unit.tokenization import run


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def talk(*texts: Any) -> list[dict[str, Any]]:
    """The user and the assistant by turns."""
    return [(user, assistant)[number % 2](text) for number, text in enumerate(texts)]


def outcome(folder: Path, fn: Any, *rows: dict[str, Any] | str, **knobs: Any) -> Outcome:
    """What a loader gives and says of rows, in their order; text is a line as it is. Errors are raised."""
    path = folder / "rows.jsonl"
    lines = ((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    found = deliver(str(path), fn, **knobs)
    if found.error is not None:
        raise found.error
    return found


def delivered(folder: Path, fn: Any, *rows: dict[str, Any] | str, **knobs: Any) -> list[Any]:
    return outcome(folder, fn, *rows, **knobs).samples


def tokenizer_of(fn: Any) -> Tokenizer:
    return Tokenizer.from_file(f"{fn.tokenizer}/tokenizer.json")


def trained_texts(chunk: Chunk, tokenizer: Tokenizer) -> list[list[str]]:
    """For each sample, the text of each of its trained spans."""
    return [
        [tokenizer.decode(ids[start:stop], skip_special_tokens=False) for start, stop in chunk.value("spans", number)]
        for number, ids in ((number, chunk.tokens_of(number).tolist()) for number in range(chunk.num_samples))
    ]


def trained(fn: TokenizeFn, row: dict[str, Any]) -> list[str]:
    """What of one good row is trained."""
    chunk = run(fn.open(), [row])
    assert chunk.errors == []
    (texts,) = trained_texts(chunk, tokenizer_of(fn))
    return texts


def variant(folder: Path, target: Path, *, config: dict[str, Any] | None = None, around: str = "", **parts: Any) -> str:
    """A copy of a tokenizer's folder, with ``parts`` of its tokenizer.json and its configuration changed.

    :param around: special tokens that it puts around every text, ``$A``.
    """
    if around:
        tokens = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
        processor = processors.TemplateProcessing(single=around, special_tokens=tokens)
        parts["post_processor"] = json.loads(processor.__getstate__())
    shutil.copytree(folder, target)
    for name, changes in (("tokenizer.json", parts), ("tokenizer_config.json", config)):
        if changes:
            values = json.loads((target / name).read_text(encoding="utf-8"))
            (target / name).write_text(json.dumps(values | changes), encoding="utf-8")
    return str(target)


def added_tokens(folder: Path, **flags: Any) -> list[dict[str, Any]]:
    """The folder's added tokens, each with these flags."""
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return [token | flags for token in values["added_tokens"]]


def their_mask(folder: str, chat: list[dict[str, Any]], tools: Any = None, template: str | None = None) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        chat, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )


def mask_of(chunk: Any, sample: int = 0) -> list[int]:
    spans = chunk.value("spans", sample)
    return [int(any(start <= at < stop for start, stop in spans)) for at in range(len(chunk.tokens_of(sample)))]
