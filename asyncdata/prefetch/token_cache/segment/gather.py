"""Reads the records of cached samples in a slot: where the values of each sample are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.row_codes import NO_SAMPLE, noted_tokens
from asyncdata.prefetch.merged_samples import Found, Piece
from asyncdata.prefetch.token_cache.segment.layout import RECORD_WORDS, WORDS_PER_COLUMN, Names, Word, decode_names

if TYPE_CHECKING:
    from asyncdata.prefetch.merged_samples import Indices

__all__ = ("RowFacts", "cached_rows", "names_at", "row_facts")

Int32 = np.ndarray[Any, np.dtype[np.int32]]


class RowFacts(NamedTuple):
    """What is told of cached rows when they are put into a slot: int32 each, of shape (num_rows,).

    :ivar num_tokens: a code of ``row_codes``.
    :ivar num_bytes: of all values together.
    """

    offsets: Int32
    lengths: Int32
    num_tokens: Int32
    num_bytes: Int32


def row_facts(words: Int32, places: Indices, record_words: int) -> RowFacts:
    """What the records at these places say.

    :param words: the slot.
    :param places: int64, in words.
    """
    records = _records_at(words, places, record_words)
    is_sample, sizes = records[:, Word.VERDICT] == 0, records[:, RECORD_WORDS + 1 :: WORDS_PER_COLUMN]
    num_tokens = np.where(is_sample, sizes[:, 0] >> 2, NO_SAMPLE)
    is_noted = is_sample & (records[:, Word.NOTES] != 0)
    if is_noted.any():
        num_tokens[is_noted] = noted_tokens(num_tokens[is_noted])
    num_bytes = sizes.sum(axis=1, dtype=np.int32)
    return RowFacts(records[:, Word.OFFSET], records[:, Word.LENGTH], num_tokens.astype(np.int32), num_bytes)


def cached_rows(slot: memoryview, rows: Indices, records: Indices) -> Found:
    """Read the records of these rows, at these offsets of the slot."""
    found = Found([], {}, {})
    words = np.frombuffer(slot[: len(slot) // 4 * 4], np.int32)
    places = records >> 2
    firsts = places - (words[places] >> 2)
    layouts = words[firsts - 1]
    if len(rows) and (layouts == layouts[0]).all():
        _read_records(slot, words, rows, places, firsts, found)
        return found

    for layout in np.unique(layouts).tolist():
        chosen = layouts == layout
        _read_records(slot, words, rows[chosen], places[chosen], firsts[chosen], found)
    return found


def _read_records(
    slot: memoryview, words: np.ndarray[Any, Any], rows: Indices, places: Indices, firsts: Indices, found: Found
) -> None:
    """The same for rows whose blocks have the same columns."""
    names = names_at(slot, words, int(firsts[0]))
    records = _records_at(words, places, names.record_words)
    for number in np.flatnonzero(records[:, Word.VERDICT]).tolist():
        reason = names_at(slot, words, int(firsts[number])).reasons[-1 - int(records[number, Word.VERDICT])]
        found.drops.setdefault(reason, []).append(int(rows[number]))
    for number in np.flatnonzero(records[:, Word.NOTES]).tolist():
        bits = int(records[number, Word.NOTES])
        for bit, note in enumerate(names_at(slot, words, int(firsts[number])).notes):
            if bits >> bit & 1:
                found.notes.setdefault(note, []).append(int(rows[number]))
    is_kept = records[:, Word.VERDICT] == 0
    if not is_kept.all():
        rows, places, records = rows[is_kept], places[is_kept], records[is_kept]
    starts, sizes = {}, {}
    for number, name in enumerate(("", *names.columns)):
        word = RECORD_WORDS + WORDS_PER_COLUMN * number
        starts[name] = (places << 2) + records[:, word]
        sizes[name] = records[:, word + 1].astype(np.int64)
    found.pieces.append(Piece(slot, rows, starts, sizes))


def _records_at(words: np.ndarray[Any, Any], places: Indices, record_words: int) -> np.ndarray[Any, Any]:
    """Records, int32 of shape (num_rows, record_words). Each is copied whole: as one of the items of its size, of which
    there is one at every word.
    """
    items = np.ndarray((len(words) - record_words + 1,), f"V{4 * record_words}", words, strides=(4,))
    return items[places].view(np.int32).reshape(len(places), record_words)


def names_at(slot: memoryview, words: Any, first: int) -> Names:
    """The names of the block whose records begin at place ``first`` of ``words``: the slot, as int32."""
    stop = 4 * first - 8
    return decode_names(bytes(slot[stop - int(words[first - 2]) : stop]))
