"""S3 and S4: beside Hugging Face streaming, which ours is to replace, and beside the other loaders there are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.contestants import OURS, Contestant, present
from tests.benchmarks.framework import at_least, ratios, rounds
from tests.benchmarks.watching import MeasurementError

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench, Figures

__all__ = ("beside_fast_streaming", "beside_streaming")

KEYS = {
    "first_batch_s": ("first batch", "s"),
    "steady_rows_per_s": ("steady", "rows/s"),
    "end_to_end_rows_per_s": ("end to end", "rows/s"),
    "peak_pss_mb": ("memory", "MB"),
}
OTHERS = ("torchdata", "grain", "mosaic", "litdata", "legacy")


def contest(bench: Bench, code: str, path: str, *names: str, num_rounds: int = 0) -> dict[str, Figures]:
    """The installed peers read the file in turn, round after round; one that fails is named and left out."""
    found, absent = present(bench, *names)
    for name, why in absent.items():
        bench.note(code, name, why)
    able = [contestant for contestant in found if _is_able(bench, code, contestant)]
    calls = [partial(contestant.epoch, bench, path) for contestant in able]
    results = rounds(*calls, num_rounds=num_rounds or bench.num_long_rounds)
    for contestant, result in zip(able, results, strict=True):
        for key, (what, unit) in KEYS.items():
            bench.report(code, f"{contestant.label}: {what}", result[key], unit)
    return {contestant.name: result for contestant, result in zip(able, results, strict=True)}


def _is_able(bench: Bench, code: str, contestant: Contestant) -> bool:
    """Whether it comes through a few rows; a peer that does not is a row of the table, and not the suite's end."""
    if not contestant.script:
        return True

    try:
        contestant.epoch(bench, bench.input(1))
    except MeasurementError as error:
        bench.note(code, contestant.label, f"failed: {error.last_words}")
        return False

    return True


def _over(results: dict[str, Figures], one: str, other: str, key: str) -> list[float]:
    return ratios(results[one][key], results[other][key])


def beside_streaming(bench: Bench) -> None:
    """S3, with HF's tokenizer on both sides, every peer besides; and with a fast backend on our side alone."""
    results = contest(bench, "S3", bench.small, OURS, "hf", *OTHERS)
    bench.data["contest"] = results
    if {OURS, "hf"} <= set(results):
        steady = _over(results, OURS, "hf", "steady_rows_per_s")
        whole = _over(results, OURS, "hf", "end_to_end_rows_per_s")
        bench.report("S3", "ours over HF streaming, both with HF's tokenizer: steady", steady, "x", at_least(1.3))
        bench.report("S3", "the same, end to end", whole, "x", at_least(2))
    for name in sorted(set(results) & set(OTHERS)):
        whole = _over(results, OURS, name, "end_to_end_rows_per_s")
        bench.report("S3", f"ours over {name}, end to end", whole, "x")
    for backend in bench.fast_backends:
        _fast_over_streaming(bench, backend)
    if not bench.fast_backends:
        bench.note("S3", "fast backend over HF streaming, steady", "not installed")


def _fast_over_streaming(bench: Bench, backend: str) -> None:
    """Ours goes through more rows: it would be at the end of the small file at once."""
    found, absent = present(bench, f"{OURS} {backend}", "hf")
    if absent:
        return

    ours, hf = found
    fast, slow = rounds(
        partial(ours.epoch, bench, bench.fresh), partial(hf.epoch, bench, bench.small), num_rounds=bench.num_long_rounds
    )
    over = ratios(fast["steady_rows_per_s"], slow["steady_rows_per_s"])
    bench.report("S3", f"ours with {backend} over HF streaming, steady", over, "x", at_least(40))


def beside_fast_streaming(bench: Bench) -> None:
    """S4: the same fast tokenizer on both sides. End to end over 50 MB, steady over 300 MB."""
    if not bench.fast_backends:
        bench.note("S4", "over HF streaming given the same fast tokenizer", "not installed")
    for backend in bench.fast_backends:
        names = (f"{OURS} {backend}", f"hf {backend}")
        whole = contest(bench, "S4", bench.small, *names)
        steady = contest(bench, "S4", bench.fresh, *names)
        bench.data[backend] = {"small": whole, "fresh": steady}
        if set(names) <= set(whole) and set(names) <= set(steady):
            bench.report(
                "S4", f"ours over HF streaming, both with {backend}: steady",
                _over(steady, *names, "steady_rows_per_s"), "x", at_least(9),
            )  # fmt: skip
            bench.report("S4", "the same, end to end", _over(whole, *names, "end_to_end_rows_per_s"), "x", at_least(4))
