"""Chats, long contexts and packs, beside the tokenizer and XTuner; pictures and videos, beside plain loops."""

import hashlib
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.framework import Bench, Figures, at_least, at_most, over, percent, ratios
from tests.benchmarks.inputs import chats, long_contexts, sft_chats

FAST_COUNTS = {"num_rows": 60_000, "num_warm_rows": 16_000}
_WHAT = "ours over XTuner's loader, packed batches of 4096 tokens"
_NEEDED = ("torch", "transformers", "datasets", "pydantic", "xxhash", "PIL")


def chat_template(bench: Bench) -> None:
    """S14: rendering one user turn, beside the same template compiled by bare Jinja."""
    call = partial(bench.probe, "chat_template", tokenizer=bench.tokenizer)
    (found,) = bench.rounds(call, num_rounds=bench.num_rounds)
    bench.report("S14", "bare Jinja, compiled before", found["bare_us"], "us a chat")
    bench.report("S14", "ours, as any chat is rendered", found["ours_us"], "us a chat")
    bench.report("S14", "ours over bare Jinja", ratios(found["ours_us"], found["bare_us"]), "x", at_most(1.1))
    bench.report("S14", "ours, the template proven", found["proven_us"], "us a chat", at_most(1.5))


def chat_sft(bench: Bench) -> None:
    """S15: chats of four turns with labels, steady, over HF's tokenizer alone on the same text."""
    size = 20 if bench.quick else 150
    path, num_rows = str(chats(bench.folder, size)), 1000 if bench.quick else 8000
    knobs = {"path": _rendered(bench, path, size), "tokenizer": bench.tokenizer, "num_processes": bench.num_workers}
    raw = partial(bench.probe, "raw_in_processes", num_rows=num_rows, num_warm_rows=512, **knobs)
    steady = partial(bench.probe, "steady", path=path, tokenizer=bench.tokenizer, kind="chat")
    for backend in bench.backends:
        counts = {"num_rows": num_rows, "num_warm_rows": 512}
        if backend != "hf":
            counts = {name: 2048 if bench.quick else most for name, most in FAST_COUNTS.items()}
        ours = partial(steady, backend=backend, num_workers=bench.num_workers, **counts)
        found, alone = bench.rounds(ours, raw)
        what = f"{backend}: chats of four turns, steady, {bench.num_workers} workers"
        bench.report("S15", what, found["rows_per_s"], "rows/s")
        goal = at_least(0.9 if backend == "hf" else 15.0)
        bench.report("S15", f"{backend}: over HF's tokenizer alone on the same text", over(found, alone), "x", goal)


def _rendered(bench: Bench, chats_path: str, size: int) -> str:
    """The same chats as texts; made once for each tokenizer."""
    source = (Path(bench.tokenizer) / "tokenizer_config.json").read_bytes()
    path = bench.folder / f"chats_{size}mb_{hashlib.sha256(source).hexdigest()[:8]}.jsonl"
    if not path.exists():
        temporary = path.with_suffix(".part")
        bench.probe("rendered_chats", tokenizer=bench.tokenizer, path=chats_path, out=str(temporary))
        temporary.rename(path)
    return str(path)


def packed_sft(bench: Bench) -> None:
    """S16: packed batches beside XTuner's loader, whose cache has the rows' offsets and lengths of an earlier run."""
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if "ASYNCDATA_XTUNER" not in os.environ or lacking:
        bench.note("S16", _WHAT, f"needs XTuner's tree, named by ASYNCDATA_XTUNER, and {', '.join(_NEEDED)}")
        return

    path = str(sft_chats(bench.folder, 4000 if bench.quick else 40_000))
    common = {"path": path, "tokenizer": bench.tokenizer, "max_length": 4096, "num_workers": bench.num_workers}
    theirs = partial(_packs, bench, "xtuner", num_warm=10, num_batches=40 if bench.quick else 250, **common)
    ours = partial(_packs, bench, "ours", num_warm=20, num_batches=100 if bench.quick else 1500, **common)
    calls = {"XTuner": theirs}
    calls |= {f"ours, {backend}": partial(ours, backend=backend) for backend in bench.backends}
    theirs(num_batches=1)  # fills their cache
    found = dict(zip(calls, bench.rounds(*calls.values()), strict=True))
    for name, figures in found.items():
        bench.report("S16", f"{name}: packed batches of 4096 tokens", figures["batches_per_s"], "batches/s")
    for name in list(found)[1:]:
        goal = None if name == "ours, hf" else at_least(10)
        ahead = over(found[name], found["XTuner"], "batches_per_s")
        bench.report("S16", f"{name}: over XTuner's loader", ahead, "x", goal)


def _packs(bench: Bench, side: str, **settings: Any) -> dict[str, float]:
    cache = Path(bench.folder) / "packed" / side
    cache.mkdir(parents=True, exist_ok=True)
    return bench.probe_of("tests.benchmarks.xtuner_probe", side, cache=str(cache), **settings)


def long_context(bench: Bench) -> None:
    """S17: BABILong's rows of 32,768 tokens, steady, by each fast backend over HF's."""
    knobs: dict[str, Any] = {"path": str(long_contexts(bench.folder, 40 if bench.quick else 300))}
    knobs |= {"tokenizer": bench.tokenizer, "kind": "babilong", "num_workers": bench.num_workers, "shuffle": False}
    steady = partial(bench.probe, "steady", **knobs)
    for backend in bench.fast_backends:
        ours = partial(steady, backend=backend, num_rows=128 if bench.quick else 1280)
        fast, slow = bench.rounds(ours, partial(steady, backend="hf", num_rows=32 if bench.quick else 128))
        what = f"{backend}: rows of 32,768 tokens, {bench.num_workers} workers"
        bench.report("S17", what, fast["rows_per_s"], "rows/s")
        bench.report("S17", "hf: the same", slow["rows_per_s"], "rows/s")
        bench.report("S17", f"{backend} over hf", over(fast, slow), "x", at_least(10.0))
    if not bench.fast_backends:
        bench.note("S17", "fast backend over hf", "not installed")


_LIMIT = 256 * 1024 * 1024
_FRAMES = 20
"""Of a video that the processor takes."""


def _lacks(bench: Bench, code: str, what: str, *packages: str) -> bool:
    """Whether a package is missing; then the table says which."""
    lacking = [name for name in packages if find_spec(name) is None]
    if lacking:
        bench.note(code, what, f"needs {', '.join(lacking)}")
    return bool(lacking)


def _memory(bench: Bench, code: str, found: Figures) -> None:
    bench.report(code, "media that are held, over the limit", found["held_over_limit"], "x", at_most(1.2))
    bench.report(code, "growth of the trainer's process in the second half", found["growth_mb"], "MB")


def pictures(bench: Bench) -> None:
    """S22: 800 x 600 JPEG, one a chat, for Qwen3-VL."""
    if _lacks(bench, "S22", "pictures", "PIL", "transformers", "torch"):
        return

    folder, num_rows = str(bench.folder / "pictures"), 40 if bench.quick else 400
    bench.probe("draw_inputs", folder=folder, num_rows=64 if bench.quick else 256)
    knobs = {"folder": folder, "num_rows": num_rows}
    ours = partial(bench.probe, "pictures", max_media_bytes=_LIMIT, num_warm_rows=240, **knobs)
    names = ["plain_loop", "torch_loader", *["trl_loader"] * (find_spec("trl") is not None)]
    others = [partial(bench.probe, name, **knobs) for name in names]
    found, plain, torch, *of_trl = bench.rounds(ours, *others)
    beside_trl = "over datasets, torch's loader and TRL's collator"
    bench.report("S22", "pictures of 800 x 600, two workers", found["rows_per_s"], "rows/s")
    bench.report("S22", "over Pillow and the processor in two processes", over(found, plain), "x", at_least(0.9))
    bench.report("S22", "over torch's loader", over(found, torch), "x")
    for trl in of_trl:
        bench.report("S22", beside_trl, over(found, trl), "x")
        bench.report("S22", f"first batch, {beside_trl}", over(found, trl, "first_batch_s"), "x", at_most(1))
    if not of_trl:
        bench.note("S22", beside_trl, "needs trl")
    bench.report("S22", "first batch, over torch's loader", over(found, torch, "first_batch_s"), "x", at_most(1))
    _memory(bench, "S22", found)
    (half,) = bench.rounds(partial(ours, rows_per_s=min(found["rows_per_s"]) / 2))
    share = percent(half["waited_share"])
    bench.report("S22", "data wait at half that rate, of step time", share, "%", at_most(0.1))


def videos(bench: Bench) -> None:
    """S27: 640 x 360, ten seconds, of which Qwen3-VL takes 20 frames; one a chat."""
    if _lacks(bench, "S27", "videos", "av", "torchvision", "transformers", "torch"):
        return

    folder, num_rows = str(bench.folder / "videos"), 40 if bench.quick else 400
    bench.probe("film_inputs", folder=folder, num_rows=8 if bench.quick else 32)
    knobs = {"folder": folder, "num_rows": num_rows}
    ours = partial(bench.probe, "pictures", max_media_bytes=4 * _LIMIT, num_warm_rows=40, **knobs)
    found, plain = bench.rounds(ours, partial(bench.probe, "plain_loop", **knobs))
    frames = [_FRAMES * rate for rate in found["rows_per_s"]]
    bench.report("S27", "frames of videos of 640 x 360, two workers", frames, "frames/s")
    bench.report("S27", "over PyAV and the processor in two processes", over(found, plain), "x", at_least(0.9))
    _memory(bench, "S27", found)
    bench.report("S27", "growth of the workers in the second half", found["workers_growth_mb"], "MB")
