"""S3 to S7: beside the other loaders there are; the first batch, memory and resume for any size of the file."""

import tempfile
from collections.abc import Callable
from functools import partial

from tests.benchmarks.contestants import OURS, Contestant, present
from tests.benchmarks.framework import Bench, Figures, MeasurementError, at_least, at_most, over, ratios

PERCENTS = [0, 50, 90, 99]
LARGEST_LEGACY_MB = 50
"""A loader that reads everything first would take minutes of the suite for the others."""
NUM_ROWS = 8000
REST_S = 1.5
"""At the end: a fast backend's audit begins in a pause, and loads ``tokenizers``."""
GOALS = {2: 300, 8: 400}


def first_batch(bench: Bench) -> None:
    """S5, from the process's first statement."""
    found, absent = present(bench, OURS, "hf")
    large = partial(found[0].run, "first_batch", bench, bench.large)
    load = partial(bench.probe, "load_vocabulary", path=bench.small, tokenizer=bench.tokenizer)
    ours, *hf = (partial(one.run, "first_batch", bench, bench.small) for one in found)
    small, large, load, *hf = bench.rounds(ours, large, load, *hf, num_rounds=bench.num_rounds)
    for size, one in ((bench.small_mb, small), (bench.large_mb, large)):
        bench.report("S5", f"first batch of 32, {size} MB", one["first_batch_s"], "s", at_most(0.6))
    bench.report("S5", "large file over small file", over(large, small, "first_batch_s"), "x", at_most(1.1))
    bench.report("S5", "a process that only loads the vocabulary", load["load_s"], "s")
    bench.report("S5", "ours over that", ratios(small["first_batch_s"], load["load_s"]), "x")
    for one in hf:
        bench.report("S5", "HF streaming over ours", over(one, small, "first_batch_s"), "x", at_least(4))
    for name, why in absent.items():
        bench.note("S5", name, why)
    for backend in bench.fast_backends:
        (ours,), _ = present(bench, f"{OURS} {backend}")
        (found,) = bench.rounds(partial(ours.run, "first_batch", bench, bench.small))
        bench.report("S5", f"first batch with {backend}", found["first_batch_s"], "s")
    num_rounds = min(2, bench.num_long_rounds)
    _by_size(bench, lambda one, path: one.run("first_batch", bench, path)["first_batch_s"], num_rounds)


def _by_size(bench: Bench, measure: Callable[[Contestant, str], float], num_rounds: int) -> None:
    """For the plot: each contestant at each size."""
    found, _ = present(bench, OURS, "hf", "legacy")
    sizes = [1, bench.small_mb, bench.fresh_mb] if bench.quick else [5, bench.small_mb, 500, bench.large_mb]
    taken: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in found}
    for size in sizes:
        able = [one for one in found if one.name != "legacy" or size <= LARGEST_LEGACY_MB]
        for _ in range(num_rounds):
            for one in able:
                taken[one.name].setdefault(str(size), []).append(measure(one, bench.input(size)))
    bench.data["sizes"] = taken


def memory(bench: Bench) -> None:
    """S6: the highest of a run, as proportional set size of all its processes. It must not grow with the file."""
    for backend in bench.backends:
        for num_workers, most in GOALS.items():
            _of(bench, backend, num_workers, most)
        if backend != "hf":
            _bounded(bench, backend)
    _by_size(bench, lambda one, path: one.epoch(bench, path, NUM_ROWS)["peak_pss_mb"], num_rounds=1)


def _of(bench: Bench, backend: str, num_workers: int, most: int) -> None:
    knobs = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": num_workers, "num_rows": NUM_ROWS}
    knobs["rest_s"] = 0 if backend == "hf" else REST_S
    steady = partial(bench.probe, "steady", watched=True, **knobs)
    calls = [partial(steady, path=path) for path in (bench.small, bench.large)]
    small, large = bench.rounds(*calls)
    what = f"{backend}, {num_workers} workers, "
    for size, one in ((bench.small_mb, small), (bench.large_mb, large)):
        bench.report("S6", f"{what}{size} MB", one["peak_pss_mb"], "MB", at_most(most))
    bench.report("S6", f"{what}large file over small file", over(large, small, "peak_pss_mb"), "x", at_most(1.1))


def _bounded(bench: Bench, backend: str) -> None:
    """What a fast backend remembers of the text it has seen is bounded."""
    knobs = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": 2, "path": bench.fresh, "rest_s": REST_S}
    few, many = (16_000, 20_000) if bench.quick else (40_000, 200_000)
    steady = partial(bench.probe, "steady", watched=True, **knobs)
    some, all_ = bench.rounds(*(partial(steady, num_rows=number) for number in (few, many)))
    found = over(all_, some, "peak_pss_mb")
    bench.report("S6", f"{backend}, after {many:,} fresh rows over {few:,}", found, "x", at_most(1.1))


def resume(bench: Bench) -> None:
    """S7, at 0 % and at 99 % of the large file; and beside the peers on the small one."""
    (ours,), _ = present(bench, OURS)
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        ours.run("save", bench, bench.large, state=f"{scratch}/s", percents=PERCENTS)
        calls = [partial(ours.run, "resume", bench, bench.large, state=f"{scratch}/s.{at}") for at in (0, 99)]
        start, end = bench.rounds(*calls, num_rounds=2 * bench.num_rounds)
    bench.report("S7", f"resume at 0 % of {bench.large_mb} MB, first batch", start["resume_s"], "s")
    bench.report("S7", "resume at 99 %, first batch", end["resume_s"], "s")
    bench.report("S7", "resume at 99 % over resume at 0 %", over(end, start, "resume_s"), "x", at_most(1.05))
    peers, _ = present(bench, OURS, "hf", "torchdata", "grain", "mosaic")
    bench.data["resume"] = {}
    for peer in peers:
        _curve(bench, peer)


def _curve(bench: Bench, contestant: Contestant) -> None:
    """For the plot: seconds to the first batch after a restore, by position."""
    with open(bench.small, "rb") as file:
        num_rows = sum(1 for _ in file)
    with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
        state, more = f"{scratch}/state", {"folder": f"{scratch}/converted"} if contestant.peer else {}
        try:
            about = {"num_rows": num_rows, **more} if contestant.peer else {}
            contestant.run("save", bench, bench.small, state=state, percents=PERCENTS, **about)
        except MeasurementError as error:
            bench.note("S7", f"{contestant.label}: save", f"failed: {error.last_words}")
            return

        curve = bench.data["resume"].setdefault(contestant.name, {})
        for percent in PERCENTS:
            call = partial(contestant.run, "resume", bench, bench.small, state=f"{state}.{percent}", **more)
            what = f"{contestant.label}: resume at {percent} % of {bench.small_mb} MB"
            try:
                (found,) = bench.rounds(call, num_rounds=min(2, bench.num_long_rounds))
            except MeasurementError as error:
                bench.note("S7", what, f"failed: {error.last_words}")
            else:
                curve[str(percent)] = found["resume_s"]
                bench.report("S7", what, found["resume_s"], "s")


KEYS = {
    "first_batch_s": ("first batch", "s"),
    "steady_rows_per_s": ("steady", "rows/s"),
    "end_to_end_rows_per_s": ("end to end", "rows/s"),
    "peak_pss_mb": ("memory", "MB"),
}
RATES = ("steady_rows_per_s", "end_to_end_rows_per_s")
OTHERS = ("torchdata", "grain", "mosaic", "litdata", "legacy")


def contest(bench: Bench, code: str, path: str, *names: str) -> dict[str, Figures]:
    """The installed peers read the file in turn, round after round; one that fails is named and left out."""
    found, absent = present(bench, *names)
    for name, why in absent.items():
        bench.note(code, name, why)
    able = [contestant for contestant in found if _is_able(bench, code, contestant)]
    calls = [partial(contestant.epoch, bench, path) for contestant in able]
    results = bench.rounds(*calls)
    for contestant, result in zip(able, results, strict=True):
        for key, (what, unit) in KEYS.items():
            bench.report(code, f"{contestant.label}: {what}", result[key], unit)
    return {contestant.name: result for contestant, result in zip(able, results, strict=True)}


def _is_able(bench: Bench, code: str, contestant: Contestant) -> bool:
    """Whether it comes through a few rows; a peer that does not is a row of the table, and not the suite's end."""
    if not contestant.peer:
        return True

    try:
        contestant.epoch(bench, bench.input(1))
    except MeasurementError as error:
        bench.note(code, contestant.label, f"failed: {error.last_words}")
        return False

    return True


def beside_streaming(bench: Bench) -> None:
    """S3, with HF's tokenizer on both sides, every peer besides; and with a fast backend on our side alone."""
    results = contest(bench, "S3", bench.small, OURS, "hf", *OTHERS)
    bench.data["contest"] = results
    if {OURS, "hf"} <= set(results):
        steady, whole = (over(results[OURS], results["hf"], key) for key in RATES)
        bench.report("S3", "ours over HF streaming, both with HF's tokenizer: steady", steady, "x", at_least(1.3))
        bench.report("S3", "the same, end to end", whole, "x", at_least(2))
    for name in sorted(set(results) & set(OTHERS)):
        bench.report("S3", f"ours over {name}, end to end", over(results[OURS], results[name], RATES[1]), "x")
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
    fast, slow = bench.rounds(partial(ours.epoch, bench, bench.fresh), partial(hf.epoch, bench, bench.small))
    steady = over(fast, slow, "steady_rows_per_s")
    bench.report("S3", f"ours with {backend} over HF streaming, steady", steady, "x", at_least(40))


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
            found = over(*map(steady.get, names), RATES[0])
            bench.report("S4", f"ours over HF streaming, both with {backend}: steady", found, "x", at_least(9))
            bench.report("S4", "the same, end to end", over(*map(whole.get, names), RATES[1]), "x", at_least(4))
