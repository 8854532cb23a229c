"""The records of a telemetry file, and the page that describes them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from asyncdata.telemetry import records
from asyncdata.telemetry.records import EDGES, Interval, Record, SourceCounts, decode, encode
from tests.support.telemetry_files import write_run

PAGE = Path(__file__).parents[3] / "docs/reference/telemetry.md"
_NAMES = ("RunStart", "SampleRecord", "DroppedRow", "Interval", "BadRowRecord", "Event", "End")
KINDS = [getattr(records, name) for name in _NAMES]


def fields_in_page(heading: str) -> list[str]:
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(heading, 1)[1].split("\n## ")[0].split("`by_source` has")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_every_field_of_every_record(kind):
    assert fields_in_page(f"\n## `{kind.__struct_config__.tag}`\n") == list(kind.__struct_fields__)


def test_the_page_has_every_total_of_a_part():
    assert fields_in_page("`by_source` has for each part:") == list(SourceCounts.__struct_fields__)


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_of_a_record_is_explained_where_it_is_declared(kind):
    words = set(re.findall(r"\w+", kind.__doc__))

    assert [name for name in kind.__struct_fields__ if name not in words] == []


def test_a_run_reads_as_it_was_written(tmp_path):
    write_run(tmp_path)
    kinds = set()
    for path in tmp_path.iterdir():
        for line in path.read_bytes().split(b"\n")[:-1]:
            record: Record = decode(line)
            kinds.add(type(record))
            assert encode(record) == line

    assert kinds == set(KINDS)


def test_a_reader_ignores_fields_that_it_does_not_know():
    assert decode(b'{"kind":"interval","at":1.0,"elapsed_s":2.0,"place":[0,1,2],"later":3}') == Interval(
        at=1.0, elapsed_s=2.0, place=records.Place(0, 1, 2)
    )


def test_a_record_without_its_place_is_refused():
    with pytest.raises(msgspec.ValidationError, match="place"):
        decode(b'{"kind":"interval","at":1.0,"elapsed_s":2.0}')


def test_the_buckets_are_exact_for_small_numbers_and_a_fifth_wide_for_large_ones():
    assert EDGES[:8] == tuple(range(8))
    widths = [after / before for before, after in zip(EDGES[8:], EDGES[9:], strict=False)]
    assert 1.1 <= min(widths) and max(widths) < 1.26
