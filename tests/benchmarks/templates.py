"""What a chat template costs: transformers, Jinja compiled beforehand, and ours where nothing and where all is proven.

``python -m tests.benchmarks.templates --tokenizer DIR``; ``--chats`` for a JSONL file of chats of one's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from asyncdata import ChatTokenizeFn
from asyncdata.tokenization.chat_template.assistant_spans import ChatSpans
from asyncdata.tokenization.chat_template.template import ChatTemplate
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.functions.chat_settings import assistants
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.benchmarks.chats import chats
from tests.support.chat_templates import WELL_KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("main",)

ROUNDS = 15
CALLS = 200
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = "The keyword arguments are passed on to the constructor, and the result is the object that it returns. " * 8


def medians(contestants: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Microseconds of a call, the median of rounds in which each has its turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            for _ in range(calls):
                contestant()
            times[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def shown(what: str, found: dict[str, float], base: str) -> None:
    """A line: each one's microseconds, and how many times those of ``base`` they are."""
    cells = [f"{name} {value:.2f} us ({value / found[base]:.2f}x)" for name, value in found.items()]
    print(f"{what:28}", "  ".join(cells), flush=True)


def turns(num: int) -> list[dict[str, Any]]:
    """A chat of so many messages, the first the user's."""
    return [{"role": ("user", "assistant")[number % 2], "content": TEXT} for number in range(num)]


def time_templates(texts: dict[str, str], num_turns: int, theirs: Any) -> None:
    """Every way to the text of a chat, for each template."""
    chat = turns(num_turns)
    for name, text in texts.items():
        template = ChatTemplate(text, {**VARIABLES, "add_generation_prompt": True})
        bare = template._template  # noqa: SLF001 - what Jinja itself takes
        seen = {**VARIABLES, "add_generation_prompt": True, "documents": None, "messages": chat, "tools": None}
        contestants = {
            "jinja": lambda bare=bare, seen=seen: bare.render(seen),
            "rendered": lambda template=template: template.rendered(chat),
            "proven": lambda template=template: template.render(chat),
        }
        if theirs is not None:
            contestants["transformers"] = lambda text=text: theirs.apply_chat_template(
                chat, chat_template=text, tokenize=False, add_generation_prompt=True, **VARIABLES
            )
        assert contestants["proven"]() == contestants["rendered"]() == contestants["jinja"]()
        template.render(chat)
        shown(f"{name}, {num_turns} messages", medians(contestants, CALLS // num_turns), "jinja")


def time_chats(tokenizer: str, rows: list[bytes]) -> None:
    """Chats to samples: with proofs, with each chat asked for itself, and nothing but their tokens."""
    fn = ChatTokenizeFn(tokenizer)
    proving, asking, files = fn.open(), fn.open(), TokenizerFiles(tokenizer)
    texts, library = texts_of(fn, files, rows), files.load()

    def ask() -> None:
        with mock.patch.object(ChatSpans, "__call__", ChatSpans.asked):
            asking(rows, ColumnWriter())

    contestants = {
        "tokens alone": lambda: library.encode_batch(texts, add_special_tokens=False),
        "proven": lambda: proving(rows, ColumnWriter()),
        "asked": ask,
    }
    for contestant in contestants.values():
        contestant()
        contestant()
    found = {name: value / len(rows) for name, value in medians(contestants, 1).items()}
    shown(f"{len(rows)} chats, a row", found, "tokens alone")


def texts_of(fn: ChatTokenizeFn, files: TokenizerFiles, rows: list[bytes]) -> list[str]:
    """The chats as text; prints how many are made by a program when their shapes have been seen."""
    special = list(files.special_tokens.values())
    without_tools, with_tools = fn.chat_spans(files, special)
    texts, num_rendered = [], 0
    for last in (False, False, True):
        texts, num_rendered = [], 0
        for row in map(json.loads, rows):
            spans = without_tools if row.get("tools") is None else with_tools
            with mock.patch.object(spans, "asked", wraps=spans.asked) as asked:
                texts.append(spans(row["messages"], row.get("tools"), assistants(row["messages"]))[0])
            num_rendered += asked.called
        if last:
            print(f"{len(rows) - num_rendered} of {len(rows)} chats by a proven program", flush=True)
    return texts


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer that has a chat template")
    parser.add_argument("--chats", type=Path, help="a JSONL file with messages; made up by default")
    parser.add_argument("--num-rows", type=int, default=300)
    arguments = parser.parse_args()
    theirs = None
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(arguments.tokenizer)
    own = TokenizerFiles(arguments.tokenizer).chat_templates["default"]
    for num_turns in (1, 5):
        time_templates({"the tokenizer's own": own, **WELL_KNOWN}, num_turns, theirs)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.chats or chats(Path(folder), arguments.num_rows)
        time_chats(arguments.tokenizer, path.read_bytes().splitlines()[: arguments.num_rows])


if __name__ == "__main__":
    main()
