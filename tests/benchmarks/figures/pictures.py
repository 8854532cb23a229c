"""S22: pictures, beside a plain loop of Pillow and the processor, and torch's loader, alone and with TRL's collator.

S27: videos, beside a plain loop of PyAV and the processor.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.benchmarks.framework import at_least, at_most, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

_LIMIT = 256 * 1024 * 1024
_FRAMES = 20
"""Of a video that the processor takes."""


def _lacks(bench: Bench, code: str, what: str, *packages: str) -> bool:
    """Whether a package is missing; then the table says which."""
    lacking = [name for name in packages if find_spec(name) is None]
    if lacking:
        bench.note(code, what, f"needs {', '.join(lacking)}")
    return bool(lacking)


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
    found, plain, torch, *of_trl = rounds(ours, *others, num_rounds=bench.num_long_rounds)
    bench.report("S22", "pictures of 800 x 600, two workers", found["rows_per_s"], "rows/s")
    over = ratios(found["rows_per_s"], plain["rows_per_s"])
    bench.report("S22", "over Pillow and the processor in two processes", over, "x", at_least(0.9))
    bench.report("S22", "over torch's loader", ratios(found["rows_per_s"], torch["rows_per_s"]), "x")
    for trl in of_trl:
        over = ratios(found["rows_per_s"], trl["rows_per_s"])
        bench.report("S22", "over datasets, torch's loader and TRL's collator", over, "x")
        first = ratios(found["first_batch_s"], trl["first_batch_s"])
        bench.report("S22", "first batch, over datasets, torch's loader and TRL's collator", first, "x", at_most(1))
    if not of_trl:
        bench.note("S22", "over datasets, torch's loader and TRL's collator", "needs trl")
    first = ratios(found["first_batch_s"], torch["first_batch_s"])
    bench.report("S22", "first batch, over torch's loader", first, "x", at_most(1))
    bench.report("S22", "media that are held, over the limit", found["held_over_limit"], "x", at_most(1.2))
    bench.report("S22", "growth of the trainer's process in the second half", found["growth_mb"], "MB")
    rate = min(found["rows_per_s"]) / 2
    (half,) = rounds(partial(ours, rows_per_s=rate), num_rounds=bench.num_long_rounds)
    share = [100 * one for one in half["waited_share"]]
    bench.report("S22", "data wait at half that rate, of step time", share, "%", at_most(0.1))


def videos(bench: Bench) -> None:
    """S27: 640 x 360, ten seconds, of which Qwen3-VL takes 20 frames; one a chat."""
    if _lacks(bench, "S27", "videos", "av", "torchvision", "transformers", "torch"):
        return

    folder, num_rows = str(bench.folder / "videos"), 40 if bench.quick else 400
    bench.probe("film_inputs", folder=folder, num_rows=8 if bench.quick else 32)
    knobs = {"folder": folder, "num_rows": num_rows}
    ours = partial(bench.probe, "pictures", max_media_bytes=4 * _LIMIT, num_warm_rows=40, **knobs)
    alone = partial(bench.probe, "plain_loop", **knobs)
    found, plain = rounds(ours, alone, num_rounds=bench.num_long_rounds)
    frames = [_FRAMES * rate for rate in found["rows_per_s"]]
    bench.report("S27", "frames of videos of 640 x 360, two workers", frames, "frames/s")
    over = ratios(found["rows_per_s"], plain["rows_per_s"])
    bench.report("S27", "over PyAV and the processor in two processes", over, "x", at_least(0.9))
    bench.report("S27", "media that are held, over the limit", found["held_over_limit"], "x", at_most(1.2))
    bench.report("S27", "growth of the trainer's process in the second half", found["growth_mb"], "MB")
    bench.report("S27", "growth of the workers in the second half", found["workers_growth_mb"], "MB")
