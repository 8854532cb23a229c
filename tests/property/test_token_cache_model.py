"""What is stored in a segment comes back, whatever rows become. And what is damaged does not."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncdata import JsonlSource, Shuffle
from asyncdata.core.cache_messages import SegmentListing
from asyncdata.prefetch.token_cache import worker
from asyncdata.prefetch.token_cache.block_samples import blocks_of, joined
from asyncdata.prefetch.token_cache.catalog import Catalog
from asyncdata.prefetch.token_cache.segment import DamagedError, Segment
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.support.cached import Delivered, assert_same, loader, segments
from tests.support.loading import write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.column_writer import Buffer

pa = pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy


class AsTold:
    """A tokenize function. Each row gives its own tokens, columns and notes, or the reason why it is dropped."""

    resolve = open = lambda self: self

    def fingerprints(self) -> dict[str, str]:
        return {"tokenize_fn": "as told"}

    def settings(self) -> dict[str, Any]:
        return {}

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        for number, row in enumerate(map(msgspec.json.decode, rows)):
            if row["reason"] is not None:
                out.drop(number, row["reason"])
                continue
            columns = {name: msgspec.json.encode(value) for name, value in row["columns"].items()}
            out.keep(number, row["tokens"], **columns)
            for note in row["notes"]:
                out.note(number, note)


told_rows = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
        "columns": st.dictionaries(
            st.sampled_from(["prompt", "label", "metadata", "extra"]),
            st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=2),
        ),
        "reason": st.none() | st.sampled_from(["max_length", "empty", "für nichts"]),
        "notes": st.lists(st.sampled_from(["lost", "found", "n3"]), unique=True),
    }
)
KNOBS: dict[str, Any] = {"shuffle": Shuffle(block_bytes=256, window_blocks=4)}


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])  # where the CPUs are busy
@given(st.lists(told_rows, min_size=1, max_size=60), st.integers(1000, 20_000), st.integers(0, 1 << 10))
def test_whatever_rows_become_is_the_same_from_all_or_a_part_of_the_cache(rows, max_bytes, gone):
    rows = [*rows, {"tokens": [7], "columns": {}, "reason": None, "notes": []}]  # an epoch has a sample
    knobs = {"tokenize_fn": AsTold(), **KNOBS}
    with tempfile.TemporaryDirectory() as folder, patch.object(worker, "_MAX_SEGMENT_BYTES", max_bytes):
        path, cache = Path(folder, "rows.jsonl"), Path(folder, "cache")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        expected = Delivered(loader(path, None, **knobs))

        assert_same(Delivered(loader(path, cache, **knobs), settle=True), expected)
        whole = Delivered(loader(path, cache, **knobs))
        assert_same(whole, expected)
        assert whole.cached == [len(rows)]
        stored = [one for segment in segments(cache) for one in read_by_arrow(segment)]
        assert sorted(one["tokens"] for one in stored) == sorted(sample[2] for sample in expected.samples)
        for number, segment in enumerate(segments(cache)):
            if gone >> number % 10 & 1:
                segment.unlink()
        assert_same(Delivered(loader(path, cache, **knobs)), expected)


@given(st.lists(told_rows, max_size=20), st.lists(st.integers(0, 6), max_size=8))
def test_a_reply_that_is_cut_into_blocks_and_joined_is_the_same(rows, counts):
    counts = [*counts, max(0, len(rows) - sum(counts))]
    rows = [*rows, *({"reason": "empty"} for _ in range(sum(counts) - len(rows)))]
    out = ColumnWriter()
    AsTold()([msgspec.json.encode(row) for row in rows], out)
    reply = out.finish(len(rows), 0.0)

    found = joined([(part.num_rows, part.reply) for part in blocks_of(reply, counts)])

    assert plain(found) == plain(reply)


def plain(reply: Any) -> dict[str, Any]:
    """The reply without columns that have no value, which are the same as none."""
    columns = {name: [bytes(column.data), bytes(column.ends)] for name, column in reply.columns.items() if column.data}
    rows = [{name: bytes(rows) for name, rows in of.items()} for of in (reply.drops, reply.notes)]
    return {
        "tokens": [bytes(reply.tokens), bytes(reply.token_ends), bytes(reply.kept)],
        "columns": columns,
        "rows": rows,
    }


def read_by_arrow(segment: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(segment)) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    table.validate(full=True)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


# Which blocks are known


def listing(name: str, entries: list[int], numbers: list[int], *, are_sure: bool = True) -> SegmentListing:
    starts = np.array(numbers, np.int64) * 101
    sure = np.full(len(numbers), are_sure)
    files = np.zeros(len(numbers), np.int32)
    columns = (np.array(entries, np.int64), files, starts, starts + 101, sure)
    return SegmentListing(name, 10, 99, *(column.tobytes() for column in columns))


blocks = st.lists(st.integers(0, 29), unique=True, max_size=8)
steps = st.lists(st.tuples(st.sampled_from(["take", "add", "forget", "block"]), st.integers(0, 9), blocks), max_size=20)


@pytest.fixture(scope="module")
def thirty_blocks(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("catalog") / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 334)
    files = JsonlSource(str(path)).open(101)
    assert files.num_blocks == 30
    return files


@given(steps)
def test_the_catalog_does_as_a_dict_would(thirty_blocks, steps):
    files, catalog, model = thirty_blocks, Catalog(thirty_blocks), dict[int, tuple[str, int]]()
    for step, number, numbers in steps:
        name = f"segment {number}"
        entries = [2 * place for place in range(len(numbers))]
        if step == "take":
            catalog.take(listing(name, entries, numbers))
        elif step == "add":
            catalog.add(name, 10, files.blocks(numbers), np.array(entries, np.int64), 99)
        elif step == "forget":
            catalog.forget([name])
            model = {block: place for block, place in model.items() if place[0] != name}
        else:
            for block in numbers:
                catalog.forget_block(files.blocks([block])[0])
                model.pop(block, None)
        if step in ("take", "add"):
            model |= {block: (name, entry) for block, entry in zip(numbers, entries, strict=True)}

    found = catalog.find(files.blocks(range(30)))
    assert {item.block: (item.segment, item.entry) for item in found} == model


@pytest.mark.parametrize("names", [("sure", "unsure"), ("unsure", "sure")])
def test_a_block_that_is_known_to_be_the_same_is_preferred_to_one_that_must_be_compared(thirty_blocks, names):
    catalog = Catalog(thirty_blocks)
    for name in names:
        catalog.take(listing(name, [0, 1], [3, 4], are_sure=name == "sure"))

    assert {item.segment for item in catalog.find(thirty_blocks.blocks(range(30)))} == {"sure"}


# Damage


@pytest.fixture(scope="module")
def cache_and_data(tmp_path_factory) -> tuple[Path, Path, Delivered]:
    folder = tmp_path_factory.mktemp("damage")
    path = write_rows(folder / "rows.jsonl", 60)
    expected = Delivered(loader(path, folder / "cache", **KNOBS), settle=True)
    return path, folder / "cache", expected


def files_of(cache: Path) -> list[Path]:
    return [*segments(cache), *sorted(cache.glob("*/*.index"))]


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_byte_of_a_segment_is_changed_or_cut_off_the_same_is_delivered(cache_and_data, data):
    path, cache, expected = cache_and_data
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "cache"
        shutil.copytree(cache, copy)
        segment = data.draw(st.sampled_from(files_of(copy)))
        content = bytearray(segment.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place:]
        segment.write_bytes(content)

        assert_same(Delivered(loader(path, copy, **KNOBS)), expected)


@given(data=st.data())
def test_verifying_finds_every_change_of_what_is_read(cache_and_data, data):
    """Bytes that only Arrow reads are not looked at: the schema, and what leads to a batch.

    An index whose last entry is cut off is no damage: it may be being written.
    """
    (source,) = segments(cache_and_data[1])
    with closing(Segment(str(source))) as whole:
        entries = list(whole.entries())
    is_index = data.draw(st.booleans())
    if is_index:
        places = st.sampled_from(entries).flatmap(lambda entry: st.integers(entry[0] + 4, entry[1] - 1))
    else:
        bodies = [entry for _, _, entry in entries if entry.body_bytes]
        in_a_body = st.sampled_from(bodies)
        places = in_a_body.flatmap(lambda entry: st.integers(entry.body, entry.body + entry.body_bytes - 1))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.name
        for suffix in (".arrow", ".index"):
            content = bytearray(source.with_suffix(suffix).read_bytes())
            if is_index == (suffix == ".index"):
                content[data.draw(places)] ^= data.draw(st.integers(1, 255))
            path.with_suffix(suffix).write_bytes(content)
        with pytest.raises(DamagedError), closing(Segment(str(path))) as segment:
            segment.verify()
