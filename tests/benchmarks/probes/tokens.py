"""The tokenizer alone, which no loader can go beyond; whether our ids are its own; and chat templates beside Jinja."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tests.benchmarks.clock import seconds
from tests.benchmarks.probes import loading

BATCH = 256
"""Of the tokenizer alone. What counts: the seconds from when all processes have their texts, extracted from the JSON
beforehand, to when the last of them has called the tokenizer for all of its own: HF's ``encode_batch_fast``, or the
fast backend's flat call, in one thread each. What it returns is dropped: no id is taken out of it. Before that each has
encoded other texts, since a fast backend is slow on the first megabytes it sees.
"""
NUM_WARM_ROWS = 4096


def load_vocabulary(path: str, tokenizer: str, backend: str = "hf") -> dict[str, float]:
    """Seconds of a process that does nothing but load the tokenizer and encode one batch of 32."""
    from tests.benchmarks.backends import raw_encoder

    texts = _texts(path, 0, 1, 32)
    raw_encoder(tokenizer, backend)(texts)
    return {"load_s": seconds()}


def raw(path, tokenizer, backend, first, step, num_rows, num_warm_rows):
    """One of the processes: every ``step``-th row from ``first`` on, behind warm ones. Waits on stdin for its start."""
    from tests.benchmarks.backends import raw_encoder

    texts = _texts(path, first, step, num_warm_rows + num_rows)
    encode = raw_encoder(tokenizer, backend)
    num_warm = num_warm_rows // step
    for start in range(0, num_warm, BATCH):
        encode(texts[start : start + BATCH])
    del texts[:num_warm]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    for start in range(0, len(texts), BATCH):
        encode(texts[start : start + BATCH])
    return {"num_rows": len(texts), "num_bytes": sum(map(len, texts)), "seconds": time.perf_counter() - began}


def _texts(path: str, first: int, step: int, num_rows: int) -> list[str]:
    with open(path, "rb") as file:
        return [json.loads(line)["input"] for line in islice(file, first, num_rows, step)]


def raw_in_processes(path, tokenizer, num_processes, num_rows, num_warm_rows=NUM_WARM_ROWS, backend="hf"):
    """Rows per second of :func:`raw` in so many processes, which start together."""
    argument = {"path": path, "tokenizer": tokenizer, "backend": backend, "step": num_processes, "num_rows": num_rows}
    argument["num_warm_rows"] = num_warm_rows
    running = []
    for first in range(num_processes):
        command = [sys.executable, "-m", "tests.benchmarks.probe", "raw", json.dumps(argument | {"first": first})]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in running:
        assert process.stdout.readline() == "ready\n", "a process of the raw measurement failed"
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in running]
    return {
        "rows_per_s": sum(one["num_rows"] for one in found) / max(one["seconds"] for one in found),
        "megabytes_per_s": sum(one["num_bytes"] for one in found) / max(one["seconds"] for one in found) / 1e6,
    }


def prove(path: str, tokenizer: str, backend: str) -> dict[str, float]:
    """Prove all characters, as runs do in time, and have one batch of a backend."""
    from asyncdata.cli.main import main

    main(["tokenizer", "prove", "--all", "--backend", backend, tokenizer])
    with loading.loader(path, tokenizer, backend, num_workers=1) as made:
        return {"rows": len(made.get_next_batch(loading.BATCH))}


def hf_ids(path: str, tokenizer: str, out: str) -> dict[str, float]:
    """Write the ids of all rows, as :func:`mismatches` wants them: ``out.ids`` int32, ``out.ends`` int64."""
    import numpy as np
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    with open(path, "rb") as file:
        texts = [json.loads(line)["input"] for line in file]
    ids = [
        np.array(encoding.ids, np.int32)
        for start in range(0, len(texts), 1024)
        for encoding in engine.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False)
    ]
    np.concatenate(ids).tofile(f"{out}.ids")
    np.cumsum([len(one) for one in ids]).astype(np.int64).tofile(f"{out}.ends")
    return {"rows": len(ids), "tokens": sum(map(len, ids)), "bytes": sum(map(len, texts))}


def mismatches(path: str, tokenizer: str, backend: str, expected: str) -> dict[str, float]:
    """Rows whose ids through a loader are not those that :func:`hf_ids` wrote. Rows of no token are none there."""
    import numpy as np

    ids, ends = np.fromfile(f"{expected}.ids", np.int32), np.fromfile(f"{expected}.ends", np.int64)
    wanted = [one for one in np.split(ids, ends[:-1]) if len(one)]
    num_rows = num_wrong = 0
    with loading.loader(path, tokenizer, backend, num_workers=2, shuffle=False, epochs=1, batch_size=1024) as made:
        for batch in made:
            for sample in batch:
                num_wrong += num_rows >= len(wanted) or not np.array_equal(wanted[num_rows], sample.tokens)
                num_rows += 1
    return {"rows": len(wanted), "wrong": num_wrong + abs(len(wanted) - num_rows)}


NUM_TURNS, NUM_RENDERS = 9, 2000


def chat_template(tokenizer: str) -> dict[str, float]:
    """Microseconds a chat, medians of turns taken one after the other: bare Jinja, ours as any chat is rendered, and,
    where this build proves templates, ours as a proven one is."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    ours, source, variables = _template(tokenizer, add_generation_prompt=True)
    bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
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
    (template, *_), num_rows = _template(tokenizer, add_generation_prompt=False), 0
    with open(path, "rb") as chats, open(out, "w", encoding="utf-8") as file:
        for line in chats:
            file.write(json.dumps({"input": template.rendered(json.loads(line)["messages"])}) + "\n")
            num_rows += 1
    return {"num_rows": num_rows}


def _template(tokenizer: str, *, add_generation_prompt: bool) -> tuple[Any, str, dict[str, Any]]:
    """Ours, its text, and its variables."""
    from asyncdata.tokenization.chat_template.template import ChatTemplate, choose_templates
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    files = TokenizerFiles(tokenizer)
    source, _ = choose_templates(files.chat_templates, None)
    variables = {"add_generation_prompt": add_generation_prompt, **files.special_tokens}
    return ChatTemplate(source, variables), source, variables


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
