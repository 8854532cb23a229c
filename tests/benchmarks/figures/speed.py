"""Rows a second, the trainer's cost and waits, and which rows: ids beside HF's, and how well an order mixes."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata.workers.machine import num_usable_cpus
from tests.benchmarks.backends import special_tokens
from tests.benchmarks.contestants import OURS, present
from tests.benchmarks.framework import Bench, at_least, at_most, over, percent, ratios
from tests.benchmarks.inputs import LANGUAGES, chats, fuzzed, languages, made
from tests.benchmarks.probes.loading import BYTES

NUM_ROWS, RUN_ROWS, BATCH = 1_000_000, 5_000, 256
NUM_LABELLINGS = 80
OUR_ORDER = "asyncdata, 1024 x 32 KiB"


def deff(order: np.ndarray, rng: np.random.Generator) -> float:
    """The design effect of ``order`` (row numbers, in the order of delivery), over random labels of the runs."""
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // RUN_ROWS
    values = []
    for _ in range(NUM_LABELLINGS):
        label = rng.standard_normal(NUM_ROWS // RUN_ROWS)
        values.append(((label[batches].mean(axis=1) - label.mean()) ** 2).mean() / (label.var() / BATCH))
    return float(np.mean(values))


def shuffle_quality(folder: Path, probe: Callable[..., Any], seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """``{order: (deff of the epoch, of its last 1 %)}``; ours is read off what a loader delivers from a real file."""
    rng = np.random.default_rng(0)
    path, out = _numbered_rows(folder), str(folder / "delivered.i32")
    orders: dict[str, list[np.ndarray]] = {OUR_ORDER: []}
    for seed in seeds:
        probe("delivered_ids", path=str(path), out=out, seed=seed, num_workers=2, buffer_size=8192)
        orders[OUR_ORDER].append(np.fromfile(out, np.int32))
    assert all(np.array_equal(np.sort(order), np.arange(NUM_ROWS)) for order in orders[OUR_ORDER])
    orders["a shuffle buffer of 10,000 rows"] = [_buffer_shuffle(rng) for _ in seeds]
    orders["a full permutation"] = [rng.permutation(NUM_ROWS).astype(np.int32) for _ in seeds]

    def mean(found: list[np.ndarray], num_rows: int) -> float:
        return float(np.mean([deff(order[-num_rows:], rng) for order in found]))

    return {name: (mean(found, NUM_ROWS), mean(found, NUM_ROWS // 100)) for name, found in orders.items()}


def _buffer_shuffle(rng: np.random.Generator, size: int = 10_000) -> np.ndarray:
    """Rows in file order through a buffer from which a random one is taken, as streaming loaders do."""
    buffer, out = np.arange(size, dtype=np.int32), np.empty(NUM_ROWS, np.int32)
    picks = rng.integers(0, size, NUM_ROWS - size)
    for number, pick in enumerate(picks):
        out[number] = buffer[pick]
        buffer[pick] = number + size
    out[NUM_ROWS - size :] = rng.permutation(buffer)
    return out


def _numbered_rows(folder: Path) -> Path:
    """A file of a million rows of 860 bytes, each with its number."""
    rows = (json.dumps({"id": number, "text": ""}) for number in range(NUM_ROWS))
    return made(folder / "numbered_rows.jsonl", ((row[:-2] + "x" * (859 - len(row)) + '"}\n').encode() for row in rows))


CPUS_FOR_EIGHT = 16
NUM_WARM_ROWS = 100_000
"""Of a fast backend, here and there: until it has seen the usual words, and the read-ahead is found."""


def _loading(bench: Bench, backend: str, fast: int, slow: int) -> dict[str, Any]:
    """For as many rows as a fast backend, or Hugging Face's, goes through in some seconds."""
    is_fast = backend != "hf"
    num_rows = (16_000 if bench.quick else fast) if is_fast else (4000 if bench.quick else slow)
    path = bench.fresh if is_fast else bench.small
    return {"path": path, "tokenizer": bench.tokenizer, "backend": backend, "num_rows": num_rows}


def throughput(bench: Bench) -> None:
    """S2: steady rows/s, shuffled, over the tokenizer alone in as many processes, on fresh text."""
    for backend in bench.backends:
        knobs = _loading(bench, backend, 190_000, 20_000)
        knobs["num_warm_rows"] = 1024 if backend == "hf" else 4096 if bench.quick else NUM_WARM_ROWS
        steady = partial(bench.probe, "steady", num_workers=bench.num_workers, **knobs)
        raw = partial(bench.probe, "raw_in_processes", num_processes=bench.num_workers, **knobs)
        deep = [partial(steady, buffer_size=8192)] * (backend != "hf")
        found, alone, *more = bench.rounds(steady, raw, *deep, num_rounds=bench.num_rounds)
        ours, theirs = found["rows_per_s"], alone["rows_per_s"]
        bench.data[backend] = {"ours": ours, "raw": theirs}
        bench.report("S2", f"{backend}: ours, steady, {bench.num_workers} workers", ours, "rows/s")
        bench.report("S2", f"{backend}: the tokenizer alone in {bench.num_workers} processes", theirs, "rows/s")
        bench.report("S2", f"{backend}: the same", alone["megabytes_per_s"], "MB/s")
        goal = at_least(0.95 if backend == "hf" else 0.80)
        bench.report("S2", f"{backend}: ours over the tokenizer alone", over(found, alone), "", goal)
        for each in more:
            bench.report("S2", f"{backend}: the same, 8192 samples read ahead", over(each, alone))
    if not bench.fast_backends:
        bench.note("S2", "fast backend over the tokenizer alone", "not installed")


def first_run(bench: Bench) -> None:
    """S2b: a run with nothing proven, at full speed, by language; and the last of three short runs."""
    if not bench.fast_backends:
        bench.note("S2b", "first run", "no fast backend is installed")
        return

    short, two, long = ([1.0] * 3, [1.0] * 2, [2.0]) if bench.quick else ([7.0] * 3, [9.0] * 2, [30.0])
    size = 20 if bench.quick else 300
    for name, names, runs_s, num_beside in (
        ("English", ("english",), long, 0),
        ("English, beside two endless loops", ("english",), long, 2),
        ("English, the second run of 9 s beside two endless loops", ("english",), two, 2),
        ("English chats", (), long, 0),
        ("Chinese", ("chinese",), long, 0),
        ("Russian", ("russian",), long, 0),
        ("8 languages", LANGUAGES[:8], long, 0),
        ("8 languages, the third run of 7 s", LANGUAGES[:8], short, 0),
    ):
        path = languages(bench.folder, size, names) if names else chats(bench.folder, size)
        knobs = {"path": str(path), "tokenizer": bench.tokenizer, "num_workers": bench.num_workers}
        knobs |= {"num_rows": 2048 if bench.quick else 30_000, "kind": "prompt" if names else "chat"}
        knobs["num_beside"] = num_beside
        steady = partial(bench.probe, "steady", backend="hf", num_warm_rows=1024, **knobs)
        ours, of_hf = bench.rounds(partial(bench.probe, "first_run", runs_s=runs_s, **knobs), steady)
        goal = at_most(1 if runs_s != long else 15 if num_beside else 10 if "English" in name else 20)
        bench.report("S2b", f"{name}: seconds until 0.8 of the proven rate", ours["fast_s"], "s", goal)
        if runs_s == long:
            least = at_least(0.75 if num_beside else 0.9)
            bench.report("S2b", f"{name}: rows/s until the switch, over HF's tokenizer", over(ours, of_hf), "", least)
        whole = ratios(ours["last_rows_per_s"], of_hf["rows_per_s"])
        bench.report("S2b", f"{name}: rows/s of the run of {runs_s[-1]:.0f} s, over HF's tokenizer", whole, "x")
        proven = ratios(ours["fast_rows_per_s"], of_hf["rows_per_s"])
        bench.report("S2b", f"{name}: rows/s with everything proven, over HF's tokenizer", proven, "x")


def scaling(bench: Bench) -> None:
    """S12: rows/s with more workers over one."""
    num_rows = 2000 if bench.quick else 10_000
    steady = partial(bench.probe, "steady", path=bench.small, tokenizer=bench.tokenizer, num_warm_rows=1024)
    for num_workers, goal in ((2, 1.9), (8, 7.0)):
        if num_workers == 8 and num_usable_cpus() < CPUS_FOR_EIGHT:
            bench.note("S12", "8 workers over 1", f"needs {CPUS_FOR_EIGHT} cores, here are {num_usable_cpus()}")
            continue

        calls = [partial(steady, num_workers=number, num_rows=number * num_rows) for number in (1, num_workers)]
        one, more = bench.rounds(*calls, num_rounds=bench.num_rounds)
        bench.report("S12", f"rows/s with {num_workers} workers over 1", over(more, one), "x", at_least(goal))


def mixtures(bench: Bench) -> None:
    """S19: a mixture beside one file of the same rows: its rate with five parts, and its first batch with twenty."""
    for backend in bench.backends:
        knobs = _loading(bench, backend, 190_000, 20_000) | {"num_warm_rows": 4096, "num_workers": bench.num_workers}
        steady = partial(bench.probe, "steady", **knobs)
        of_five = partial(steady, path=_cut(knobs["path"], 5))
        one, five = bench.rounds(steady, of_five, num_rounds=bench.num_rounds)
        what = f"{backend}: rows/s, a mixture of 5 parts over one file"
        bench.report("S19", what, over(five, one), "x", at_least(0.95))
        bench.report("S19", f"{backend}: CPU of the trainer's process per row", five["parent_cpu_us_per_row"], "us")
    first = partial(bench.probe, "first_batch", tokenizer=bench.tokenizer)
    calls = [partial(first, path=path) for path in (bench.small, _cut(bench.small, 20))]
    one, twenty = bench.rounds(*calls, num_rounds=bench.num_rounds)
    found = over(twenty, one, "first_batch_s")
    bench.report("S19", "first batch of 32, a mixture of 20 parts over one file", found, "x", at_most(1.2))


def _cut(path: str, num_parts: int) -> str:
    """The rows of a file in so many parts, and a mixture of these in equal shares."""
    mix = Path(f"{path}.{num_parts}.mix.json")
    if mix.exists():
        return str(mix)

    names = [f"{path}.{number}-of-{num_parts}.jsonl" for number in range(num_parts)]
    with open(path, "rb") as file:
        lines = file.readlines()
    for number, name in enumerate(names):
        Path(name).write_bytes(b"".join(lines[number::num_parts]))
    mix.write_text(json.dumps({"parts": {f"part{number:02}": name for number, name in enumerate(names)}}))
    return str(mix)


def recorded(bench: Bench) -> None:
    """S20: rows/s with ``telemetry=...`` over without, in turn; every other round begins with the other one.

    After as many rows as are measured the recorder's helper has loaded the vocabulary, and has chosen most of the
    samples that are kept.
    """
    for backend in bench.backends:
        knobs = _loading(bench, backend, 250_000, 10_000) | {"num_workers": bench.num_workers, "pause_s": 1.0}
        knobs["num_warm_rows"] = 4096 if bench.quick else knobs["num_rows"]
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1 if bench.quick else 6):
                for is_recorded in (False, True) if number % 2 == 0 else (True, False):
                    more = {"telemetry": str(Path(folder) / "run")} if is_recorded else {}
                    found[is_recorded].append(bench.probe("steady", **knobs, **more))
        rates, cpu = (
            [[each[name] for each in found[is_recorded]] for is_recorded in (True, False)]
            for name in ("rows_per_s", "parent_cpu_us_per_row")
        )
        bench.report("S20", f"{backend}: rows/s, recorded over not recorded", ratios(*rates), "x", at_least(0.98))
        bench.report("S20", f"{backend}: CPU of the trainer's process per row", cpu[0], "us")
        bench.report("S20", f"{backend}: the same, not recorded", cpu[1], "us")


def exactness(bench: Bench) -> None:
    """S1: ids are those of Hugging Face's ``tokenizers``: of generated prompts, odd texts, and real prompts."""
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
                knobs = {"path": str(path), "tokenizer": bench.tokenizer, "backend": backend}
                found = bench.probe("mismatches", expected=out, **knobs)
                equal, what = 100 * (1 - found["wrong"] / found["rows"]), f"{name}, {found['rows']:,.0f} rows"
                bench.report("S1", f"ids equal, {backend}, {what}", [equal], "%", at_least(100))
    for backend in sorted({"gigatoken", "fastokens"} - set(bench.backends)):
        bench.note("S1", f"ids equal, {backend}", "not installed")


def order(bench: Bench) -> None:
    """S11: the design effect of a batch of 256, on topics of 5,000 rows each, a million rows, 32 MiB at a time."""
    found = shuffle_quality(bench.folder, bench.probe, seeds=(1,) if bench.quick else (1, 2))
    bench.data["deff"] = found
    for name, (whole, tail) in found.items():
        goal = at_most(1.5) if name == OUR_ORDER else None
        bench.report("S11", f"deff at batch 256, {name}: whole epoch", [whole], "", goal)
        bench.report("S11", f"deff at batch 256, {name}: last 1 %", [tail], "", goal)


SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)


def trainer_cost(bench: Bench) -> None:
    """S8, with a tokenize function that costs nothing, so that what remains is the library."""
    knobs: dict[str, Any] = {"path": bench.small, "tokenizer": BYTES, "num_workers": bench.num_workers}
    cost = partial(bench.probe, "call_cost", **knobs | {"path": bench.input(max(bench.small_mb, 20))})
    (call,) = bench.rounds(cost, num_rounds=bench.num_rounds)
    bench.report("S8", "get_next_batch(32), everything ready, median", call["call_us_p50"], "us", at_most(5))
    bench.report("S8", "the same, 99th percentile", call["call_us_p99"], "us")
    knobs["buffer_size"] = 8192
    num_rows = 20_000 if bench.quick else 100_000
    (free,) = bench.rounds(partial(bench.probe, "steady", num_rows=num_rows, **knobs), num_rounds=bench.num_rounds)
    cpu = free["parent_cpu_us_per_row"]
    bench.report("S8", "CPU of the trainer's process a row, all its threads", cpu, "us", at_most(1))
    bench.report("S8", "rows/s then, shuffled", free["rows_per_s"], "rows/s")
    _beside_a_busy_trainer(bench, knobs)


def _beside_a_busy_trainer(bench: Bench, knobs: dict[str, Any]) -> None:
    """A trainer that never lets go of the GIL."""
    seconds = 3.0 if bench.quick else 8.0
    trainer = partial(bench.probe, "busy_trainer", seconds=seconds, **knobs)
    (busy,) = bench.rounds(partial(trainer, rows_per_s=20_000))
    what = "beside a trainer that keeps the GIL, 20k rows/s asked for"
    bench.report("S8", f"{what}: had", busy["rows_per_s"], "rows/s", at_least(19_600))
    bench.report("S8", f"{what}: longest stall", busy["worst_stall_ms"], "ms", at_most(150))
    alone = partial(bench.probe, "idle_trainer", seconds=seconds / 2)
    slow, idle = bench.rounds(partial(trainer, rows_per_s=10_000), alone)
    found = ratios(slow["turns_per_busy_s"], idle["turns_per_s"])
    bench.report("S8", "that trainer's speed at 10k rows/s over its speed alone", found, "", at_least(0.95))


def data_wait(bench: Bench) -> None:
    """S9, at half the rate that each reaches at most; windows are small, so that many ends come by."""
    kinds = {"library alone": (BYTES, "hf"), **{name: (bench.tokenizer, name) for name in bench.backends}}
    for kind, (tokenizer, backend) in kinds.items():
        knobs = {"path": bench.small, "tokenizer": tokenizer, "backend": backend, "num_workers": bench.num_workers}
        num_rows = 40_000 if backend != "hf" or tokenizer == BYTES else 8000
        top = bench.probe("steady", num_rows=min(num_rows, 4000) if bench.quick else num_rows, **knobs)["rows_per_s"]
        seconds = 3.0 if bench.quick else 10.0
        (found,) = bench.rounds(partial(bench.probe, "data_wait", rows_per_s=top / 2, seconds=seconds, **knobs))
        bench.data[kind] = {"top": top, **found}
        share = percent(found["waited_share"])
        bench.report("S9", f"{kind}: data wait at half its top rate, of step time", share, "%", at_most(0.1))
        bench.report("S9", f"{kind}: a call, 99.9th percentile", found["call_us_p999"], "us", at_most(200))
        edges = f"{sum(found['num_edges']):.0f} ends of windows and epochs"
        bench.report("S9", f"{kind}: stalls over 5 ms at {edges}", found["stalls_at_edges"], "", at_most(0))
        bench.report("S9", f"{kind}: stalls over 5 ms anywhere", found["stalls"])
    if bench.draws:
        _by_rate(bench)


def _by_rate(bench: Bench) -> None:
    """For the plot: the share of its time that a trainer waits, by the rate it asks for over the loader's top rate."""
    found, _ = present(bench, OURS, "hf")
    bench.data["by_rate"], seconds = {}, 2.0 if bench.quick else 6.0
    for contestant in found:
        top = contestant.epoch(bench, bench.small, 2000 if bench.quick else 16_000)["steady_rows_per_s"]
        paced = partial(contestant.run, "paced", bench, bench.small, seconds=seconds)
        waits = {str(share): paced(rows_per_s=share * top)["called_share"] for share in SHARES}
        bench.data["by_rate"][contestant.name] = {"top": top, "waits": waits}


def rollouts(bench: Bench) -> None:
    """S13: 32 groups of 8 samples."""
    knobs = {"path": bench.small, "tokenizer": BYTES, "num_workers": bench.num_workers}
    (found,) = bench.rounds(partial(bench.probe, "group_calls", **knobs), num_rounds=bench.num_rounds)
    bench.report("S13", "get_samples(32), n = 8, ready, median", found["call_ms_p50"], "ms", at_most(0.5))
    bench.report("S13", "the same, 99th percentile", found["call_ms_p99"], "ms")
