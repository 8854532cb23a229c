"""The trusted library encodes in the thread that asks it, and leaves no thread of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from asyncdata.tokenization.encoders.hf_encoder import encode_here
from tests.support.executors import NEVER_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

TEXTS = ["one two", "", "three", "<|im_end|> four"]

LOADS = """
import os, sys, time
os.environ.pop("TOKENIZERS_PARALLELISM", None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's have nothing to do with it
from asyncdata import {function}, DataLoader
with DataLoader(sys.argv[1], tokenize_fn={function}(sys.argv[2], {settings}), num_workers=0) as loader:
    loader.get_next_batch(20)
    loader.get_next_batch(20)
deadline = time.monotonic() + 10  # Python's threads are on their way out
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
    time.sleep(0.005)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        ("PromptTokenizeFn", "prompt_key='text', tokenizer_backend='hf'"),
        ("TextTokenizeFn", "text_key='text', tokenizer_backend='hf'"),
        ("ChatTokenizeFn", "messages_key='messages', tokenizer_backend='hf'"),
    ],
)
def test_a_loader_without_workers_leaves_no_thread_of_the_library(small_tokenizer, jsonl_file, function, settings):
    """Each would keep 4 to 5 MB for every tokenizer that it has ever worked for, as long as the trainer lives."""
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path: Path = jsonl_file([{"text": f"number {number}", "messages": turns} for number in range(30)])
    code = LOADS.format(function=function, settings=settings)
    command = [sys.executable, "-c", code, str(path), str(small_tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("value", [None, "true", "FALSE", "0", ""])
@pytest.mark.parametrize("adds", [False, True])
def test_the_ids_are_the_same_one_by_one_and_at_once(small_tokenizer, monkeypatch, value, with_offsets, adds):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if value is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    at_once = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS, add_special_tokens=adds)]

    found = encode_here(tokenizer, with_offsets=with_offsets)(TEXTS, add_special_tokens=adds)

    assert [encoding.ids for encoding in found] == at_once
