"""Pages of made-up runs: the usual one, one with hostile texts, and ones of any number of ranks and samples."""

from pathlib import Path
from typing import Any

import msgspec

from asyncdata.cli.main import main
from asyncdata.telemetry.records import BadRowRecord, Document, End, Event, Record, SourceCounts, TokenizerName
from tests.support.telemetry_files import BEGAN, interval, place, sample, start, write, write_run

__all__ = ("HOSTILE", "page_of", "write_hostile_run", "write_packed_run", "write_run_of", "written_page")

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src='https://example.invalid/a.png' onerror='window.hacked = 1'>"
    "<style>@import 'https://example.invalid/b.css';</style><!--<script> \u202eevil\u202c \u2028 "
    "{{ 7 * 7 }} 😀 \x00\x1b[31m &amp; '\"`"
)
"""What a row may have, all of which a page shows as text."""


def page_of(folder: Path, page: Path, *words: object) -> bytes:
    """The page that ``asyncdata report`` writes about a folder."""
    assert main(["report", str(folder), "-o", str(page), *map(str, words)]) == 0
    return page.read_bytes()


def written_page(folder: Path) -> bytes:
    """The page of the usual run."""
    write_run(folder / "run")
    return page_of(folder / "run", folder / "report.html")


def write_hostile_run(folder: Path) -> None:
    """Every text of every record is hostile."""
    reason = {HOSTILE: 3}
    names: dict[str, Any] = dict.fromkeys(("library", "host", "tokenizer"), HOSTILE)
    names |= {
        "tokenizers": {HOSTILE: TokenizerName(HOSTILE)},
        "sources": [HOSTILE],
        "files": [HOSTILE],
        "config": {HOSTILE: HOSTILE, "values": [HOSTILE]},
    }
    header = msgspec.structs.replace(start(), packing={"kind": HOSTILE}, **names)
    part = SourceCounts(samples=80, dropped=reason, noted=reason, target=1.0)
    counts: dict[str, Any] = dict.fromkeys(("dropped", "noted", "unpacked", "lost"), reason)
    counts |= {"by_source": {HOSTILE: part}, "wait_s": {HOSTILE: 1.0}}
    last = msgspec.structs.replace(interval(0, 0, 2, 80, 80), **counts)
    of_row: dict[str, Any] = {"source": HOSTILE, "path": HOSTILE}
    samples = [
        msgspec.structs.replace(sample(number), text=HOSTILE, is_cut=True, label=HOSTILE, metadata=HOSTILE, **of_row)
        for number in range(2)
    ]
    bad = BadRowRecord(at=BEGAN, code="AD421", reason=HOSTILE, excerpt=HOSTILE, place=place(2), line=3, **of_row)
    event = Event(at=BEGAN, name=HOSTILE, level=HOSTILE, fields={HOSTILE: HOSTILE})
    records = [header, interval(0, 0, 0, 0, 0), *samples, last, bad, event, End(at=BEGAN + 10, reason=HOSTILE)]
    write(folder / "rank-00000-0000.jsonl", records)


def write_packed_run(folder: Path) -> None:
    """A run without a mixture, without scores, of packs of 1000 tokens that become fuller."""
    header = msgspec.structs.replace(
        start(), sources=[], mix_by="", group_size=1, packing={"max_length": 1000}, pack_length=1000
    )
    nothing: dict[str, Any] = dict.fromkeys(("by_source", "staleness", "group_sizes", "version_lags"), {})
    nothing |= {"degenerate": 0, "returned": 0}
    steps = [(0, 0, 0), (1, 10, 8_000), (2, 20, 17_500)]
    records: list[Record] = [header]
    for elapsed, packs, tokens in steps:
        record = interval(0, 0, elapsed, 40 * elapsed, 40 * elapsed)
        filled: dict[str, Any] = {"packs": packs, "packed_tokens": tokens, "unpacked": {"overlong": elapsed}}
        filled |= {"pack_fill": {80: 7 * elapsed, 95: 3 * elapsed}, "pack_documents": {4: 10 * elapsed}}
        documents = [Document(place=place(at), num_tokens=200 + at, path="rows.jsonl", byte_offset=at) for at in (0, 1)]
        filled["pack"] = [*documents, Document(place=place(2), num_tokens=9, path="rows.parquet", row_number=7)]
        records.append(msgspec.structs.replace(record, **filled, **nothing))
    write(folder / "rank-00000-0000.jsonl", [*records, End(at=BEGAN + 10)])


def write_run_of(folder: Path, *, ranks: int, samples: int, intervals: int = 3) -> None:
    """A run of so many ranks; the first one has all samples. Rank ``r`` waits ``r + 1`` times as long as rank 0."""
    for rank in range(ranks):
        header = msgspec.structs.replace(start(rank), world_size=ranks, max_samples=samples)
        found = [sample(number) for number in range(samples if rank == 0 else 0)]
        states = [interval(rank, 0, elapsed, 40 * elapsed, 40 * elapsed) for elapsed in range(intervals + 1)]
        write(folder / f"rank-{rank:05}-0000.jsonl", [header, *found, *states, End(at=states[-1].at)])
