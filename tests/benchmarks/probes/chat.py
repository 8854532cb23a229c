"""A chat template: what a chat of one turn costs to render, beside the same template compiled by bare Jinja."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("chat_template", "rendered_chats")

NUM_TURNS, NUM_RENDERS = 9, 2000


def chat_template(tokenizer: str) -> dict[str, float]:
    """Microseconds a chat, medians of turns taken one after the other: bare Jinja, ours as any chat is rendered, and,
    where this build proves templates, ours as a proven one is."""
    from asyncdata.tokenization.chat_template.template import ChatTemplate, choose_templates
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    files = TokenizerFiles(tokenizer)
    source, _ = choose_templates(files.chat_templates, None)
    variables = {"add_generation_prompt": True, **files.special_tokens}
    ours, bare = ChatTemplate(source, variables), _bare(source)
    chats = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(NUM_RENDERS)]
    calls: dict[str, Callable[[Any], str]] = {
        "bare_us": lambda chat: bare.render(messages=chat, **variables),
        "ours_us": ours.rendered,
        "proven_us": ours.render,
    }
    texts = {name: [call(chat) for chat in chats] for name, call in calls.items()}
    assert all(found == texts["bare_us"] for found in texts.values()), "not the text that Jinja renders"
    return _in_turns(calls, chats)


def rendered_chats(tokenizer: str, path: str, out: str) -> dict[str, float]:
    """Write the text of each chat of ``path``, as the ``input`` of a row of ``out``; the number of rows."""
    from asyncdata.tokenization.chat_template.template import ChatTemplate, choose_templates
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    files = TokenizerFiles(tokenizer)
    source, _ = choose_templates(files.chat_templates, None)
    template, num_rows = ChatTemplate(source, {"add_generation_prompt": False, **files.special_tokens}), 0
    with open(path, "rb") as chats, open(out, "w", encoding="utf-8") as file:
        for line in chats:
            file.write(json.dumps({"input": template.rendered(json.loads(line)["messages"])}) + "\n")
            num_rows += 1
    return {"num_rows": num_rows}


def _bare(source: str) -> Any:
    """The template as transformers compiles it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def _in_turns(calls: dict[str, Callable[[Any], str]], chats: list[Any]) -> dict[str, float]:
    """Microseconds a chat of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(NUM_TURNS):
        for name, call in calls.items():
            began = time.perf_counter()
            for chat in chats:
                call(chat)
            times[name].append((time.perf_counter() - began) / len(chats) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}
