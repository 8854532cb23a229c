"""S1: the ids are those of Hugging Face's ``tokenizers``, row by row, by every backend of this build."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.backends import special_tokens
from tests.benchmarks.framework import at_least
from tests.benchmarks.inputs import fuzzed

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("exactness",)


def exactness(bench: Bench) -> None:
    """S1, over generated prompts, texts that no person writes, and real prompts where there are some."""
    files = {
        f"{bench.small_mb} MB of prompts": Path(bench.small),
        "fuzzed texts": fuzzed(bench.folder, 1000 if bench.quick else 10_000, special_tokens(bench.tokenizer)),
        "GSM8K": Path(os.environ.get("ASYNCDATA_TEST_DATA", "-")) / "gsm8k" / "train.slime.jsonl",
    }
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        for name, path in files.items():
            if not path.exists():
                continue

            out = f"{scratch}/{name.replace(' ', '_')}"
            found = bench.probe("hf_ids", path=str(path), tokenizer=bench.tokenizer, out=out)
            bench.data[name] = {**found, "bytes_per_token": found["bytes"] / found["tokens"]}
            for backend in bench.backends:
                _compare(bench, name, str(path), backend, out)
    for backend in sorted({"gigatoken", "fastokens"} - set(bench.backends)):
        bench.note("S1", f"ids equal, {backend}", "not installed")


def _compare(bench: Bench, name: str, path: str, backend: str, expected: str) -> None:
    found = bench.probe("mismatches", path=path, tokenizer=bench.tokenizer, backend=backend, expected=expected)
    equal = 100 * (1 - found["wrong"] / found["rows"])
    bench.report("S1", f"ids equal, {backend}, {name}, {found['rows']:,.0f} rows", [equal], "%", at_least(100))
