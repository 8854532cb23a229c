"""The tokenizer backends: which of them are installed, how ours is asked for one, and what each can do by itself."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

FAST_BACKENDS = ("gigatoken", "fastokens")


def installed() -> list[str]:
    return [name for name in FAST_BACKENDS if importlib.util.find_spec(name) is not None]


def tokenize_fn(kind: str, tokenizer: str, backend: str) -> Any:
    """For prompts, chats, or long contexts, which are cut to 32,768 tokens with their question."""
    import asyncdata

    if kind == "prompt":
        return asyncdata.PromptTokenizeFn(tokenizer, label_key="label", tokenizer_backend=backend)

    if kind == "chat":
        return asyncdata.ChatTokenizeFn(tokenizer, tokenizer_backend=backend)

    cut = {"max_length": 32_768, "overlong": "truncate_context_middle"}
    return asyncdata.FixedLengthTokenizeFn.babilong(tokenizer, **cut, tokenizer_backend=backend)


def raw_encoder(tokenizer: str, backend: str) -> Any:
    """The backend's fastest call for a batch of texts, in one thread; what it returns is left as it is."""
    path = str(Path(tokenizer) / "tokenizer.json")
    if backend == "gigatoken":
        import gigatoken

        return partial(gigatoken.Tokenizer(path).encode_batch, parallel=False)

    if backend == "fastokens":
        import fastokens

        return fastokens.Tokenizer.from_file(path).encode_batch_flat

    from tokenizers import Tokenizer

    return partial(Tokenizer.from_file(path).encode_batch_fast, add_special_tokens=False)


def special_tokens(tokenizer: str) -> list[str]:
    """The tokens that a tokenizer cuts a text at."""
    found = json.loads((Path(tokenizer) / "tokenizer.json").read_bytes())
    return [token["content"] for token in found.get("added_tokens", ())]
