"""S18: data in a store behind 100 ms of latency, and a store of very many objects."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.contestants import Contestant, present
from tests.benchmarks.framework import Bench, MeasurementError, at_least, at_most, over, percent
from tests.benchmarks.slow_hub import slow_hub

DELAY_S = 0.1
READS = (16, 64, 256)
WINDOWS = {"window_blocks": 256}
"""8 MiB, so that few reads in flight come to the end of a window as well."""
WAITS_AT = (5.0, 30.0)
_ROUNDS = 2
"""What is compared differs by more than the rounds do, and each waits for seconds."""


def object_store(bench: Bench) -> None:
    """S18, beside Hugging Face's streaming through the same proxy; the library alone, without a tokenizer."""
    if find_spec("huggingface_hub") is None:
        bench.note("S18", "a data set of a hub behind 100 ms of latency", "needs huggingface_hub")
        return

    with slow_hub(bench.fresh, DELAY_S) as (hub, web, bucket):
        _rates(bench, hub, web)
        _waits(bench, hub, web)
        _mosaic(bench, bucket)
    _many(bench)


def _rates(bench: Bench, url: str, web: str) -> None:
    ours = partial(bench.probe, "remote_rate", num_workers=bench.num_workers)
    for reads in READS:
        call = partial(ours, url=web, max_reads=reads, num_mb=18, shuffle=WINDOWS)
        (found,) = bench.rounds(call, num_rounds=_ROUNDS)
        bench.report("S18", f"http, 100 ms of latency, {reads} reads in flight", found["mb_per_s"], "MB/s")
    about = {"url": url, "num_mb": 20 if bench.quick else 40}
    theirs = [partial(bench.probe, "streaming_rate", **about)] * (find_spec("datasets") is not None)
    found, *theirs = bench.rounds(partial(ours, max_reads=256, **about), *theirs, num_rounds=_ROUNDS)
    bench.report("S18", "hf://, 100 ms of latency: first batch, from the process's start", found["first_batch_s"], "s")
    for other in theirs:
        bench.report("S18", "HF streaming: the same", other["first_batch_s"], "s")
        bench.report("S18", "HF streaming: at full speed", other["mb_per_s"], "MB/s")
        bench.report("S18", "hf://, over HF streaming", over(found, other, "mb_per_s"), "x", at_least(1.0))


def _waits(bench: Bench, url: str, web: str) -> None:
    for rate in WAITS_AT:
        settings = {"mb_per_s": rate, "span_s": 3.0 if bench.quick else 6.0}
        ours = partial(bench.probe, "remote_wait", max_reads=256, num_workers=bench.num_workers, **settings)
        calls = {"http": partial(ours, url=web), "hf://": partial(ours, url=url)}
        if find_spec("datasets") is not None:
            calls["HF streaming"] = partial(bench.probe, "streaming_wait", url=url, **settings)
        for name, one in zip(calls, bench.rounds(*calls.values(), num_rounds=_ROUNDS), strict=True):
            goal = at_most(1.0) if name == "http" else None
            waits = f"{name}: a trainer at {rate:g} MB/s waits, of its time"
            bench.report("S18", waits, percent(one["waited_share"]), "%", goal)
            bench.report("S18", f"{name}: the same is in calls, of its time", percent(one["call_share"]), "%")
            bench.report("S18", f"{name}: the same has", one["mb_per_s"], "MB/s")


def _mosaic(bench: Bench, bucket: dict[str, str]) -> None:
    """Mosaic Streaming reads shards of its own, so the conversion and the upload are part of its first batch."""
    found, absent = present(bench, "mosaic_from_s3") if bucket else ([], {"mosaic_from_s3": "needs moto"})
    for name, why in absent.items():
        bench.note("S18", name, why)
    for peer in found:
        try:
            _mosaic_reads(bench, peer, bucket)
        except MeasurementError as reason:
            bench.note("S18", peer.name, str(reason))


def _mosaic_reads(bench: Bench, peer: Contestant, bucket: dict[str, str]) -> None:
    """One run only: a second one would share the memory of its names with processes of the first that still end."""
    (one,) = bench.rounds(partial(peer.epoch, bench, bench.fresh, store=bucket), num_rounds=1)
    row_mb = Path(bench.fresh).stat().st_size / one["num_rows"][0] / 1e6
    bench.report("S18", f"{peer.label}: converted, uploaded, first batch", one["first_batch_s"], "s")
    speed = [row_mb * each for each in one["steady_rows_per_s"]]
    bench.report("S18", f"{peer.label}: at full speed", speed, "MB/s")


def _many(bench: Bench) -> None:
    number = 10_000 if bench.quick else 1_000_000
    call = partial(bench.probe, "many_objects", num_objects=number, num_workers=bench.num_workers, watched=True)
    (found,) = bench.rounds(call)
    what = f"{number:,} objects, {number * 10_000:,} rows"
    bench.report("S18", f"{what}: first batch, from the process's start", found["first_batch_s"], "s")
    bench.report("S18", f"{what}: memory of all processes", found["peak_pss_mb"], "MB")
    bench.report("S18", f"{what}: a state", found["state_bytes"], "bytes")
