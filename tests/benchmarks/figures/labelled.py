"""S15 and S17: functions that train parts of a text, which need to know where each token lies."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.framework import at_least, ratios, rounds
from tests.benchmarks.inputs import chats, long_contexts

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("chat_sft", "long_context")


def chat_sft(bench: Bench) -> None:
    """S15: chats of four turns with labels, steady, over HF's tokenizer alone on the same text."""
    size = 20 if bench.quick else 150
    path, text = chats(bench.folder, size), _rendered(bench, size)
    for backend in bench.backends:
        is_fast = backend != "hf"
        num_rows = (4000 if bench.quick else 60_000) if is_fast else (1000 if bench.quick else 8000)
        num_warm_rows = (2048 if bench.quick else 16_000) if is_fast else 512
        raw_rows = 1000 if bench.quick else 8000
        found = rounds(
            partial(
                bench.probe,
                "steady",
                path=str(path),
                tokenizer=bench.tokenizer,
                backend=backend,
                kind="chat",
                num_workers=bench.num_workers,
                num_rows=num_rows,
                num_warm_rows=num_warm_rows,
            ),
            partial(
                bench.probe,
                "raw_in_processes",
                path=text,
                tokenizer=bench.tokenizer,
                num_processes=bench.num_workers,
                num_rows=raw_rows,
                num_warm_rows=512,
            ),
            num_rounds=bench.num_long_rounds,
        )
        ours, raw = found[0]["rows_per_s"], found[1]["rows_per_s"]
        bench.report("S15", f"{backend}: chats of four turns, steady, {bench.num_workers} workers", ours, "rows/s")
        goal = at_least(15.0 if is_fast else 0.9)
        bench.report("S15", f"{backend}: over HF's tokenizer alone on the same text", ratios(ours, raw), "x", goal)


def _rendered(bench: Bench, size: int) -> str:
    """The same chats as texts; made once for each tokenizer."""
    source = (Path(bench.tokenizer) / "tokenizer_config.json").read_bytes()
    path = bench.folder / f"chats_{size}mb_{hashlib.sha256(source).hexdigest()[:8]}.jsonl"
    if not path.exists():
        temporary = path.with_suffix(".part")
        chats_path = str(chats(bench.folder, size))
        bench.probe("rendered_chats", tokenizer=bench.tokenizer, path=chats_path, out=str(temporary))
        temporary.rename(path)
    return str(path)


def long_context(bench: Bench) -> None:
    """S17: BABILong's rows of 32,768 tokens, steady, by each fast backend over HF's."""
    knobs: dict[str, Any] = {"path": str(long_contexts(bench.folder, 40 if bench.quick else 300))}
    knobs |= {"tokenizer": bench.tokenizer, "kind": "babilong", "num_workers": bench.num_workers, "shuffle": False}
    for backend in bench.fast_backends:
        fast, slow = rounds(
            partial(bench.probe, "steady", backend=backend, num_rows=128 if bench.quick else 1280, **knobs),
            partial(bench.probe, "steady", backend="hf", num_rows=32 if bench.quick else 128, **knobs),
            num_rounds=bench.num_long_rounds,
        )
        bench.report(
            "S17", f"{backend}: rows of 32,768 tokens, {bench.num_workers} workers", fast["rows_per_s"], "rows/s"
        )
        bench.report("S17", "hf: the same", slow["rows_per_s"], "rows/s")
        found = ratios(fast["rows_per_s"], slow["rows_per_s"])
        bench.report("S17", f"{backend} over hf", found, "x", at_least(10.0))
    if not bench.fast_backends:
        bench.note("S17", "fast backend over hf", "not installed")
