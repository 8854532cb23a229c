"""What a telemetry file shows of a sample and of a bad row: bounded, and without text where rows are not shown."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import redacted
from asyncdata.telemetry.records import MAX_VALUE, BadRowRecord, DroppedRow, Place, SampleRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.types import SourceLocation, Tokens
    from asyncdata.delivery.chunk import Chunk, Drop
    from asyncdata.delivery.merged_chunk import MergedChunk

    AnyChunk = Chunk | MergedChunk

__all__ = ("bad_row_record", "cut", "dropped_row", "sample_record", "whole_text")

MAX_TOKENS = 1024
_MAX_SPANS = 256
_MAX_TEXT = 8000
_LONE = re.compile("[\ud800-\udfff]")


def whole_text(text: str) -> str:
    """The text with U+FFFD for what is no character, which JSON cannot hold."""
    return _LONE.sub("\N{REPLACEMENT CHARACTER}", text)


def cut(text: str, most: int) -> str:
    """The first ``most`` characters."""
    return whole_text(text[:most])


def sample_record(chunk: AnyChunk, sample: int, key: int, source: str, *, shows_row: bool) -> SampleRecord:
    """The record of a sample, without the texts of its tokens."""
    location, tokens, spans = chunk.location(sample), chunk.tokens_of(sample), chunk.value("spans", sample)
    position = chunk.position(sample)
    shown = _shown(chunk, sample, tokens) if shows_row else {}
    return SampleRecord(
        at=time.time(),
        key=key,
        place=Place(position.epoch, position.window, position.row),
        source=source,
        **_located(location),
        num_bytes=location.num_bytes,
        num_tokens=len(tokens),
        num_trained=-1 if spans is None else sum(stop - start for start, stop in spans),
        trained=[(start, stop) for start, stop in (spans or [])[:_MAX_SPANS]],
        notes=[note.name for note in chunk.notes if chunk.row_of(sample) in note.rows],
        **shown,
    )


def _shown(chunk: AnyChunk, sample: int, tokens: Tokens) -> dict[str, Any]:
    prompt = chunk.value("prompt", sample)
    texts = {
        "text": (prompt if isinstance(prompt, str) else _json(prompt), _MAX_TEXT),
        "label": (_json(chunk.value("label", sample)), MAX_VALUE),
        "metadata": (_json(chunk.value("metadata", sample) or None), MAX_VALUE),
    }
    is_cut = len(tokens) > MAX_TOKENS or any(len(text) > most for text, most in texts.values())
    shown: dict[str, Any] = {name: cut(text, most) for name, (text, most) in texts.items()}
    return {**shown, "ids": tokens[:MAX_TOKENS].tolist(), "is_cut": is_cut}


def _json(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _located(location: SourceLocation) -> dict[str, Any]:
    number = -1 if location.row_number is None else location.row_number
    place = {"byte_offset": location.byte_offset, "line": location.line or 0, "row_number": number}
    return {"path": redacted(location.path), **place}


def dropped_row(chunk: AnyChunk, drop: Drop, at: int, key: int) -> DroppedRow:
    """The record of row number ``at`` of a drop, without its text."""
    first, (source, location) = chunk.first, chunk.dropped_row(drop, at)
    return DroppedRow(
        at=time.time(),
        key=key,
        reason=drop.reason,
        place=Place(first.epoch, first.window, first.row + int(drop.rows[at])),
        source=source,
        **_located(location),
        num_bytes=location.num_bytes,
    )


def bad_row_record(chunk: AnyChunk, row: int, shows_rows: Callable[[str], bool]) -> BadRowRecord:
    """The record of the bad row ``row`` of a chunk."""
    error = next(error for error in chunk.errors if error.row == row)
    first, policy = chunk.first, chunk.policies.get(row)
    shows_row = shows_rows("") if policy is None else policy.shows_row
    return BadRowRecord(
        at=time.time(),
        code=error.code,
        place=Place(first.epoch, first.window, first.row + row),
        source=chunk.row_source(row),
        **_located(chunk.row_location(row)),
        reason=cut(redacted(error.reason), MAX_VALUE) if shows_row else "",
        excerpt=cut(error.excerpt, MAX_VALUE) if shows_row else "",
    )
