"""A chat template: what a chat of one turn costs to render, beside the same template compiled by bare Jinja."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("chat_template",)

NUM_TURNS, NUM_RENDERS = 9, 2000


def chat_template(tokenizer: str) -> dict[str, float]:
    """Microseconds a chat, medians of turns taken one after the other.

    ``ours_us`` is :class:`ChatTemplate`'s rendering; ``row_us`` what a templated row of ``PromptTokenizeFn`` costs more
    than a row that holds the rendered text.
    """
    from asyncdata.tokenization.chat_template import ChatTemplate, choose_templates
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    files = TokenizerFiles(tokenizer)
    source, _ = choose_templates(files.chat_templates, None)
    variables = {"add_generation_prompt": True, **files.special_tokens}
    ours, bare = ChatTemplate(source, variables), _bare(source)
    chats = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(NUM_RENDERS)]
    texts = [ours.render(chat) for chat in chats]
    assert texts == [bare.render(messages=chat, **variables) for chat in chats]
    templated, plain = _prompt_functions(tokenizer, chats, texts)
    found = _in_turns(
        {
            "ours_us": lambda: [ours.render(chat) for chat in chats],
            "bare_us": lambda: [bare.render(messages=chat, **variables) for chat in chats],
            "templated_us": templated,
            "plain_us": plain,
        }
    )
    return found | {"row_us": found["templated_us"] - found["plain_us"]}


def _bare(source: str) -> Any:
    """The template as transformers compiles it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def _prompt_functions(
    tokenizer: str, chats: list[list[dict[str, str]]], texts: list[str]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Tokenize rows that are rendered, and rows that hold the text already: the tokens are the same."""
    import msgspec

    from asyncdata import PromptTokenizeFn
    from asyncdata.tokenization.base import ColumnWriter, open_tokenize_fn

    templated = open_tokenize_fn(PromptTokenizeFn(tokenizer, apply_chat_template=True))
    plain = open_tokenize_fn(PromptTokenizeFn(tokenizer))
    chat_rows = [msgspec.json.encode({"input": chat[0]["content"]}) for chat in chats]
    text_rows = [msgspec.json.encode({"input": text}) for text in texts]
    return lambda: templated(chat_rows, ColumnWriter()), lambda: plain(text_rows, ColumnWriter())


def _in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds a chat of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(NUM_TURNS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) / NUM_RENDERS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}
