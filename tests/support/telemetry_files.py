"""Telemetry of made-up runs, and their pages: RL that resumes after a crash, packs, hostile texts, many ranks."""

from typing import Any

import msgspec

from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder
from asyncdata.telemetry import records

BEGAN = 1_800_000_000.0
INTERVAL_S = 5.0
GROUPS_PER_INTERVAL = 40
ROWS_PER_WINDOW = 1024


def place(number):
    """The place of sample ``number``."""
    return records.Place(0, *divmod(number, ROWS_PER_WINDOW))


def start(rank=0, number=0, at_groups=0, *, shows_rows=True):
    """The first record of a file."""
    where = {"at": BEGAN + number * 1000, "rank": rank, "number": number, "pid": 100 + rank, "host": "node-a"}
    data = {"files": ["data/math.jsonl", "data/code.jsonl"], "num_files": 2, "num_bytes": 12_000_000, "mix_by": "rows"}
    settings = {"config": {"n_samples_per_prompt": 4, "seed": 7}, "tokenizer": "PromptTokenizeFn(tokenizer='qwen3')"}
    limits = {"interval_s": INTERVAL_S, "max_samples": 8, "max_of_reason": 16, "shows_rows": shows_rows}
    place_ = {"place": place(at_groups), "samples": at_groups * 4, "group_size": 4, "world_size": 2}
    tokenizers = {source: records.TokenizerName(tokenizer_folder()) for source in ("math", "code") if shows_rows}
    more: dict[str, Any] = {**where, **data, **settings, **limits, **place_, "sources": ["math", "code"]}
    more["tokenizers"] = tokenizers
    return records.RunStart(version=records.FORMAT_VERSION, library="0.1.0", **more)


def sample(number, *, shows_rows=True):
    """A sample of that number in the stream; its second token is trained."""
    source = "math" if number % 4 else "code"
    where = {"source": source, "path": f"data/{source}.jsonl", "byte_offset": number * 300, "line": number + 1}
    tokens = {"num_bytes": 299, "num_tokens": 3, "num_trained": 1, "trained": [(1, 2)]}
    text = {"ids": [1, 3871 + number, 204], "text": f"two {number}", "label": '"4"', "metadata": '{"level":2}'}
    more: dict[str, Any] = {**where, **tokens, **(text if shows_rows else {})}
    key = number * 0x9E3779B97F4A7C15 % 2**53
    return records.SampleRecord(at=BEGAN + number, key=key, place=place(number), **more)


def interval(rank, number, elapsed, groups, own):
    """The state after ``elapsed`` intervals of a file, when ``groups`` are delivered, ``own`` of them in this start."""

    def of_source(count, target):
        left = {"dropped": {"too long": count // 10}, "noted": {"truncated": count // 20}}
        return records.SourceCounts(samples=4 * count, tokens=100 * count, wait_s=0.01 * elapsed, target=target, **left)

    code, math = groups // 4, groups - groups // 4
    delivered = {"samples": 4 * groups, "groups": groups, "tokens": 100 * groups}
    delivered["lengths"] = {54: own // 2, 91: own // 4, 861: own - own // 2 - own // 4}
    delivered["by_source"] = {"math": of_source(math, 0.75), "code": of_source(code, 0.25)}
    left = {"dropped": {"too long": groups // 10, "bad row AD421": 1}, "noted": {"truncated": groups // 20}}
    left["bad_rows"] = 1
    waited = {"start": min(0.5, float(elapsed)), "tokenize": 0.25 * elapsed * (1 + rank), "read": 0.1 * elapsed}
    calls = {"calls": 10 * elapsed, "waits": elapsed + rank, "wait_s": waited, "step_s": 4.0 * elapsed}
    calls["step_ms"], calls["wait_ms"] = {380: 8 * elapsed, 431: 2 * elapsed}, {362: elapsed}
    ready = {"ready": 8 if rank else 120, "capacity": 1000, "in_flight": 64, "has_no_room": rank == 0, "buffered": 3}
    work = {"workers": 4, "busy": 2 + rank, "work_s": 8.0 * elapsed, "lost": {"queue": 1} if elapsed > 2 else {}}
    groups_ = {"returned": 5 * elapsed, "degenerate": 2 * elapsed, "group_sizes": {4: 9 * elapsed, 3: elapsed}}
    groups_ |= {"staleness": {0: 2 * elapsed, 8: 3 * elapsed}, "version_lags": {1: elapsed}}
    at = {"at": BEGAN + number * 1000 + elapsed * INTERVAL_S, "elapsed_s": elapsed * INTERVAL_S, "begins": elapsed == 0}
    more: dict[str, Any] = {**at, **delivered, **left, **calls, **ready, **work, **groups_}
    return records.Interval(place=place(groups), **more)


def write(path, written, torn=b""):
    """Write a file, and ``torn`` after its last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(records.encode(record) + b"\n" for record in written) + torn)


def write_run(folder, *, shows_rows=True):
    """Two ranks of four intervals. Rank 0 was killed, and resumed at 80 of the 160 groups that it had delivered."""
    for rank, number, first, num_intervals in ((0, 0, 0, 4), (0, 1, 80, 6), (1, 0, 0, 4), (1, 1, 80, 6)):
        header = start(rank, number, first, shows_rows=shows_rows)
        written = [header, interval(rank, number, 0, first, 0)]
        for elapsed in range(1, num_intervals + 1):
            groups = first + elapsed * GROUPS_PER_INTERVAL
            written += [sample(at, shows_rows=shows_rows) for at in range(groups - GROUPS_PER_INTERVAL, groups, 7)]
            written.append(interval(rank, number, elapsed, groups, elapsed * GROUPS_PER_INTERVAL))
        where = {"source": "code", "path": "data/code.jsonl", "line": 17, "byte_offset": 4811}
        bad = records.BadRowRecord(at=BEGAN + 2, code="AD421", **where)
        text = {"reason": "the row is not valid JSON", "excerpt": '{"prompt": '} if shows_rows else {}
        written.insert(4, msgspec.structs.replace(bad, place=place(16), **text))
        dropped = records.DroppedRow(at=BEGAN + 2, key=1, reason="too long", place=place(17), source="math", line=18)
        written.insert(5, msgspec.structs.replace(dropped, path="data/math.jsonl", num_bytes=30 if shows_rows else -1))
        written.insert(6, records.Event(at=BEGAN + 3, name="worker.lost", level="warning", fields={"pid": 4711}))
        path = folder / f"rank-{rank:05}-{number:04}.jsonl"
        if number == 1:
            write(path, [*written, records.End(at=BEGAN + 2000, reason="closed")])
        else:
            write(path, written, torn=b'{"kind":"int')


HOSTILE = (
    "</script><script>window.hacked = 1</script><img src='https://example.invalid/a.png' onerror='window.hacked = 1'>"
    "<style>@import 'https://example.invalid/b.css';</style><!--<script> \u202eevil\u202c \u2028 "
    "{{ 7 * 7 }} 😀 \x00\x1b[31m &amp; '\"`"
)
"""What a row may have, all of which a page shows as text."""


def page_of(folder, page, *words):
    """The page that ``asyncdata report`` writes about a folder."""
    assert main(["report", str(folder), "-o", str(page), *map(str, words)]) == 0
    return page.read_bytes()


def written_page(folder):
    """The page of the usual run."""
    write_run(folder / "run")
    return page_of(folder / "run", folder / "report.html")


def write_hostile_run(folder):
    """Every text of every record is hostile."""
    reason = {HOSTILE: 3}
    names: dict[str, Any] = dict.fromkeys(("library", "host", "tokenizer"), HOSTILE)
    names |= {"tokenizers": {HOSTILE: records.TokenizerName(HOSTILE)}, "sources": [HOSTILE], "files": [HOSTILE]}
    names["config"] = {HOSTILE: HOSTILE, "values": [HOSTILE]}
    header = msgspec.structs.replace(start(), packing={"kind": HOSTILE}, **names)
    part = records.SourceCounts(samples=80, dropped=reason, noted=reason, target=1.0)
    counts: dict[str, Any] = dict.fromkeys(("dropped", "noted", "unpacked", "lost"), reason)
    counts |= {"by_source": {HOSTILE: part}, "wait_s": {HOSTILE: 1.0}}
    last = msgspec.structs.replace(interval(0, 0, 2, 80, 80), **counts)
    of_row: dict[str, Any] = {"source": HOSTILE, "path": HOSTILE}
    shown = of_row | dict.fromkeys(("text", "label", "metadata"), HOSTILE)
    samples = [msgspec.structs.replace(sample(number), is_cut=True, **shown) for number in range(2)]
    why = of_row | {"reason": HOSTILE, "excerpt": HOSTILE}
    bad = records.BadRowRecord(at=BEGAN, code="AD421", place=place(2), line=3, **why)
    event = records.Event(at=BEGAN, name=HOSTILE, level=HOSTILE, fields={HOSTILE: HOSTILE})
    written = [header, interval(0, 0, 0, 0, 0), *samples, last, bad, event, records.End(at=BEGAN + 10, reason=HOSTILE)]
    write(folder / "rank-00000-0000.jsonl", written)


def write_packed_run(folder):
    """A run without a mixture, without scores, of packs of 1000 tokens that become fuller."""
    packed = {"packing": {"max_length": 1000}, "pack_length": 1000}
    header = msgspec.structs.replace(start(), sources=[], mix_by="", group_size=1, **packed)
    nothing: dict[str, Any] = dict.fromkeys(("by_source", "staleness", "group_sizes", "version_lags"), {})
    nothing |= {"degenerate": 0, "returned": 0}
    steps = [(0, 0, 0), (1, 10, 8_000), (2, 20, 17_500)]
    written = [header]
    for elapsed, packs, tokens in steps:
        record = interval(0, 0, elapsed, 40 * elapsed, 40 * elapsed)
        filled: dict[str, Any] = {"packs": packs, "packed_tokens": tokens, "unpacked": {"overlong": elapsed}}
        filled |= {"pack_fill": {80: 7 * elapsed, 95: 3 * elapsed}, "pack_documents": {4: 10 * elapsed}}
        documents = [
            records.Document(place=place(at), num_tokens=200 + at, path="rows.jsonl", byte_offset=at) for at in (0, 1)
        ]
        filled["pack"] = [*documents, records.Document(place=place(2), num_tokens=9, path="rows.parquet", row_number=7)]
        written.append(msgspec.structs.replace(record, **filled, **nothing))
    write(folder / "rank-00000-0000.jsonl", [*written, records.End(at=BEGAN + 10)])


def write_run_of(folder, *, ranks, samples, intervals=3):
    """A run of so many ranks; the first one has all samples. Rank ``r`` waits ``r + 1`` times as long as rank 0."""
    for rank in range(ranks):
        header = msgspec.structs.replace(start(rank), world_size=ranks, max_samples=samples)
        found = [sample(number) for number in range(samples if rank == 0 else 0)]
        states = [interval(rank, 0, elapsed, 40 * elapsed, 40 * elapsed) for elapsed in range(intervals + 1)]
        write(folder / f"rank-{rank:05}-0000.jsonl", [header, *found, *states, records.End(at=states[-1].at)])
