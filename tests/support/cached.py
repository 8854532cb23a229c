"""Loaders with a token cache: their data, what they deliver in full, and what lies in the cache's folder."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from asyncdata import DataLoader
from tests.support.loading import NEVER_S, SHUFFLE, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata import Sample

Row = dict[str, Any]

CALLS: Counter[int] = Counter()
"""How often each row was tokenized in this process."""


def everything(row: Row) -> dict[str, Any] | str | list[int]:
    """Samples of every kind: of no tokens and of many, with columns and without; and rows dropped for two reasons."""
    number = row["id"]
    CALLS[number] += 1
    if number % 11 == 3:
        return "a reason" if number % 2 else "another, ünusual one"
    if number % 7 == 1:
        return [number]

    result: dict[str, Any] = {"input_ids": [number, *map(ord, row["pad"])], "label": number, "prompt": row["pad"]}
    if number % 5 == 0:
        result["metadata"] = {"ü": "\ud800 \u0000 漢", "n": [None, 1.5, float("nan")]}
    if number % 13 == 2:
        result["labels"] = [-100] * len(result["input_ids"])
    if number % 17 == 4:
        result["score"] = number / 7
    return result


def row_id(row: Row) -> list[int]:
    """One token: the row's ``id``."""
    return [row["id"]]


def row_id_and_pad(row: Row) -> list[int]:
    """A sample of every row, of different lengths."""
    CALLS[row["id"]] += 1
    return [row["id"], *map(ord, row["pad"])]


for function in (everything, row_id, row_id_and_pad):
    function.version = 1  # type: ignore[attr-defined]


def loader(path: Any, tokens: Path | bool | None, max_tokens_bytes: int | None = None, **knobs: Any) -> DataLoader:
    """A loader whose data has several windows."""
    settings: dict[str, Any] = {
        "tokenize_fn": everything,
        "shuffle": SHUFFLE,
        "num_workers": 0,
        "timeout_s": NEVER_S,
        "batch_size": 16,
        "epochs": 1,
        "cache": {
            "tokens": tokens if tokens is None or isinstance(tokens, bool) else str(tokens),
            "max_tokens_bytes": max_tokens_bytes,
        },
    }
    return DataLoader(path, **(settings | knobs))


LONG = {"pad": "ü" * 900}


def write_lines(folder: Path, num_rows: int) -> Path:
    """Lines, some of them longer than a block, and some blank."""
    path = write_rows(folder / "rows.jsonl", num_rows, dict.fromkeys(range(90, 300, 41), LONG))
    path.write_bytes(b"\n" + path.read_bytes().replace(b"\n", b"\n\n", 9) + b" \n")
    return path


def compressed(path: Path, rows: list[bytes]) -> Path:
    """A file of these lines, compressed."""
    path.write_bytes(gzip.compress(b"".join(rows), mtime=0))
    return path


def facts(sample: Sample) -> tuple[Any, ...]:
    """All that a sample is, and where it comes from."""
    labels, source = sample.labels, sample.source
    return (
        str(sample.position),
        None if source is None else (source.path, source.byte_offset, source.num_bytes),
        sample.tokens.tolist(),
        repr((sample.prompt, sample.label, sample.metadata, sample.extra)),
        None if labels is None else labels.tolist(),
    )


class Delivered:
    """What a loader gives, epoch by epoch: all of each sample, and how many rows came from the cache."""

    def __init__(self, data: DataLoader, num_epochs: int = 1, *, settle: bool = False) -> None:
        self.samples: list[tuple[Any, ...]] = []
        self.cached: list[int] = []
        with data:
            for _ in range(num_epochs):
                for batch in data:
                    self.samples += map(facts, batch)
                self.cached.append(data.statistics().cached_rows_total - sum(self.cached))
                if settle:
                    wait_until_stored(data)
            now = data.statistics()
            self.counts = dict(now.dropped_total), dict(now.noted_total), now.blank_lines_total
            self.counters = data.state_dict()["counters"]


def assert_same(found: Delivered, expected: Delivered) -> None:
    """The same samples, and the same rows without one."""
    assert found.samples == expected.samples
    assert found.counts == expected.counts
    assert found.counters == expected.counters


def wait_until_stored(data: DataLoader) -> None:
    """Until nothing is on its way into the cache; polled, as there is nothing to wait for."""
    cache = data._engine.parts[0].cache  # noqa: SLF001
    deadline = time.monotonic() + NEVER_S
    while not cache.is_idle:
        assert time.monotonic() < deadline, "it is never stored"
        time.sleep(0.005)


def segments(cache: Path) -> list[Path]:
    """The segments of all caches in the folder, without their indexes."""
    return sorted(cache.glob("*/*.arrow"))


def num_bytes(cache: Path) -> int:
    """Bytes of the segments and their indexes."""
    return sum(file.stat().st_size for file in [*segments(cache), *cache.glob("*/*.index")])


def damage(segment: Path, number: int = 0) -> None:
    """Change a byte of the samples of block ``number``."""
    from asyncdata.prefetch.token_cache.segment import Segment

    with closing(Segment(str(segment))) as opened:
        body = [entry.body for _, _, entry in opened.entries() if entry.num_samples][number]
    content = bytearray(segment.read_bytes())
    content[body] ^= 4
    segment.write_bytes(content)
