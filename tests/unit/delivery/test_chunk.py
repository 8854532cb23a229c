"""Chunks: what the packed columns of a reply say about samples, rows and places."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest

from asyncdata import Position, SourceLocation
from tests.support.chunks import Lines
from tests.support.parts import IS_IN_JOURNAL, Chunk, ColumnWriter, RowFault

FIRST = Position(2, 5, 100)


def chunk_of(out, num_rows, *, ends_epoch=False):
    return Chunk(out.finish(num_rows, 0.0), FIRST, num_rows, Lines(), ends_epoch=ends_epoch)


@pytest.fixture
def gappy():
    """Seven rows: 1, 4 and 5 are kept, 0 and 6 too short, 3 dull, 2 bad."""
    out = ColumnWriter()
    out.drop(0, "short")
    out.keep(1, [1], label=b'"a"')
    out.fail(2, RowFault("AD101", "bad", b"{"))
    out.drop(3, "dull")
    out.keep(4, [4, 4], label=b"[1]", prompt=b'"p"')
    out.keep(5, [5])
    out.drop(6, "short")
    return chunk_of(out, 7, ends_epoch=True)


def test_samples_are_those_of_the_rows_that_were_kept(gappy):
    samples = range(3)

    assert [gappy.tokens_of(sample).tolist() for sample in samples] == [[1], [4, 4], [5]]
    assert [gappy.value("label", sample) for sample in samples] == ["a", [1], None]
    assert [gappy.value("prompt", sample) for sample in samples] == [None, "p", None]
    assert gappy.value("metadata", 0) is None
    assert [gappy.row_of(sample) for sample in samples] == [1, 4, 5]
    assert [str(gappy.position(sample)) for sample in samples] == ["2:5:101", "2:5:104", "2:5:105"]
    assert [gappy.samples_before(row) for row in range(9)] == [0, 0, 1, 1, 1, 2, 3, 3, 3]
    assert [gappy.num_tokens(start, 3) for start in range(4)] == [4, 3, 1, 0]
    assert (gappy.num_samples, gappy.ends_epoch, gappy.notes) == (3, True, [])


def test_tokens_are_views_that_cannot_be_written_and_memory_is_that_of_tokens_and_columns(gappy):
    tokens = gappy.tokens_of(0)

    assert tokens.dtype == np.int32
    assert np.shares_memory(tokens, gappy.tokens_of(0))
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 7
    assert gappy.num_bytes == 4 * 4 + len(b'"a"') + len(b"[1]") + len(b'"p"')


def test_rows_without_a_sample_are_told_with_their_reasons_and_their_places(gappy):
    assert {drop.reason: drop.rows.tolist() for drop in gappy.drops} == {"short": [0, 6], "dull": [3]}
    (error,) = gappy.errors
    assert (error.row, error.code, error.reason, error.excerpt) == (2, "AD101", "bad", "{")
    assert (gappy.row_location(2), gappy.row_key(2)) == (SourceLocation("rows.jsonl", 1020, 9), (0, 1020))
    assert [gappy.location(sample).byte_offset for sample in range(3)] == [1010, 1040, 1050]


@pytest.mark.parametrize(
    ("text", "expected"), [(b"NaN", "nan"), (b"[Infinity]", "[inf]"), (rb'"\ud800"', r"'\ud800'"), (b"1e400", "inf")]
)
def test_a_value_that_only_pythons_reader_takes_is_decoded_as_there(text, expected):
    out = ColumnWriter()
    out.keep(0, [1], label=text)

    assert repr(chunk_of(out, 1).value("label", 0)) == expected


def test_notes_are_told_by_name_with_their_rows_which_are_all_kept():
    out = ColumnWriter()
    for row in (2, 0, 1):
        out.keep(row, [row])
        out.note(row, "odd" if row == 1 else "even")
    out.note(1, "small")

    chunk = chunk_of(out, 3)
    notes = {note.name: note.rows.tolist() for note in chunk.notes}
    assert notes == {"even": [0, 2], "odd": [1], "small": [1]}
    assert (chunk.drops, chunk.errors, chunk.ends_epoch) == ([], [], False)
    assert [chunk.row_of(sample) for sample in range(3)] == [0, 1, 2]
    assert [str(chunk.position(sample)) for sample in range(3)] == ["2:5:100", "2:5:101", "2:5:102"]
    assert [chunk.samples_before(row) for row in range(5)] == [0, 1, 2, 3, 3]


def test_notes_are_of_the_requests_own_rows():
    out, more = ColumnWriter(numbers=[1, 4]), ColumnWriter(numbers=[6])
    for row, writer in ((0, out), (1, out), (0, more)):
        writer.keep(row, [1])
        writer.note(row, "seen")
    out.extend(more)
    (note,) = chunk_of(out, 7).notes

    assert (note.name, note.rows.dtype, note.rows.tolist()) == ("seen", np.int32, [1, 4, 6])


# Where the tokens of rows were counted before.


def counted(out, expected):
    reply = msgspec.structs.replace(out.finish(len(expected), 0.0), expected=array("i", expected).tobytes())
    return Chunk(reply, FIRST, len(expected), Lines(), ends_epoch=False)


def test_rows_of_other_ranks_and_bad_rows_are_samples_without_tokens():
    out = ColumnWriter()
    out.keep(1, [1, 1], label=b"1")
    out.fail(2, RowFault("AD101", "bad", b"{"))
    out.keep(4, [4], label=b"4", prompt=b'"p"')
    out.note(4, "seen")
    chunk = counted(out, [-1 - 7, 2, 9, -1 - 0, 1, 3])
    chunk.leave_out(np.array([0, 0, 0, 0, 0, IS_IN_JOURNAL], np.int8))

    assert [chunk.tokens_of(sample).tolist() for sample in range(6)] == [[], [1, 1], [], [], [4], []]
    assert [chunk.value("label", sample) for sample in range(6)] == [None, 1, None, None, 4, None]
    assert [chunk.value("prompt", sample) for sample in range(6)] == [None, None, None, None, "p", None]
    assert [chunk.row_of(sample) for sample in range(6)] == list(range(6))
    assert [chunk.samples_before(row) for row in range(6)] == list(range(6))
    assert [chunk.num_tokens(0, stop) for stop in range(7)] == [0, 7, 9, 18, 18, 19, 22], "those of all ranks"
    assert [(error.row, error.code) for error in chunk.errors] == [(2, "AD101")]
    assert [(drop.reason, drop.rows.tolist()) for drop in chunk.drops] == [("journal", [5])]
    assert [(note.name, note.rows.tolist()) for note in chunk.notes] == [("seen", [4])]


def test_a_row_that_has_not_the_tokens_that_were_counted_is_bad_and_has_none():
    out = ColumnWriter()
    out.keep(0, [1], label=b"1")
    out.keep(1, [2, 2, 2])
    out.drop(2, "dull")
    out.keep(3, [4, 4])
    for row, name in ((0, "seen"), (1, "seen"), (1, "lost"), (3, "seen")):
        out.note(row, name)
    chunk = counted(out, [1, 2, 5, 2])

    assert [chunk.tokens_of(sample).tolist() for sample in range(4)] == [[1], [], [], [4, 4]]
    assert [chunk.value("label", sample) for sample in range(4)] == [1, None, None, None]
    assert chunk.drops == []
    assert [(note.name, note.rows.tolist()) for note in chunk.notes] == [("seen", [0, 3])]
    assert [(error.row, error.code) for error in chunk.errors] == [(1, "AD424"), (2, "AD424")]
    assert "has 3 tokens, and had 2 when" in chunk.errors[0].reason
    assert "has no tokens, and had 5 when" in chunk.errors[1].reason
    assert "does not do the same each time" in chunk.errors[0].reason
