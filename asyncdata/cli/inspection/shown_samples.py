"""Samples for a page: rows that were inspected, and rows that a run has recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncdata.cli.commands.mask_text import lines_of
from asyncdata.cli.inspection.loss_mask import MaskedText
from asyncdata.report.samples import Run, ShownSample, ShownText
from asyncdata.tokenization.token_text import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdata.cli.inspection.mixture_view import PlacedRow
    from asyncdata.telemetry.records import BadRowRecord, DroppedRow, SampleRecord

__all__ = ("place_of", "shown_bad_row", "shown_dropped_row", "shown_record", "shown_row")


def shown_row(
    placed: PlacedRow, place: str, texts: list[MaskedText], facts: Mapping[str, object], max_context_tokens: int
) -> ShownSample:
    """An inspected row. One that yields no sample is shown as it stands in its file.

    :param place: its file and line.
    :param texts: of its sample; empty if it yields none.
    :param max_context_tokens: to show of a stretch of context; 0 for all.
    """
    row = placed.row
    raw = row.raw.decode("utf-8", "surrogateescape")
    is_labelled = any(text.is_labelled for text in texts)
    return ShownSample(
        position=str(placed.position or ""),
        place=place,
        source=placed.source_name,
        state="bad" if row.fault is not None else "kept" if texts else "dropped",
        reason=row.fault or row.dropped,
        reasons=[row.dropped] if row.dropped else [],
        num_tokens=sum(text.num_tokens for text in texts),
        num_trained=sum(text.num_trained for text in texts) if is_labelled else None,
        texts=[_text(text, max_context_tokens) for text in texts] or [ShownText("the row", [Run(raw)])],
        facts={name: str(value) for name, value in facts.items()},
    )


def shown_record(record: SampleRecord) -> ShownSample:
    """A sample that a run has recorded. Its texts may be cut."""
    pieces = [
        Piece(start, stop, text, text if special else "", trained)
        for start, stop, text, trained, special in record.pieces
    ]
    if pieces:
        text = _text(MaskedText("", pieces, [], is_labelled=record.num_trained >= 0), 0)
    else:
        text = ShownText("", [Run(record.text)] if record.text else [])
    if record.is_cut and text.runs:
        text.runs.append(Run("⟨… the rest was not recorded …⟩", "sign"))
    return ShownSample(
        position=":".join(map(str, record.place)),
        place=place_of(record),
        source=record.source,
        state="noted" if record.notes else "kept",
        reason=", ".join(record.notes),
        reasons=record.notes,
        num_tokens=record.num_tokens,
        num_trained=record.num_trained if record.num_trained >= 0 else None,
        texts=[text] if text.runs else [],
        facts={name: value for name in ("label", "metadata") if (value := getattr(record, name))},
    )


def shown_bad_row(record: BadRowRecord) -> ShownSample:
    """A bad row that a run has recorded, with its start."""
    return ShownSample(
        position="" if record.place is msgspec.UNSET else ":".join(map(str, record.place)),
        place=place_of(record),
        source=record.source,
        state="bad",
        reason=f"{record.code} {record.reason}".rstrip(),
        reasons=[record.code],
        texts=_start_of(record),
    )


def shown_dropped_row(record: DroppedRow) -> ShownSample:
    """A dropped row that a run has recorded, with its start."""
    return ShownSample(
        position=":".join(map(str, record.place)),
        place=place_of(record),
        source=record.source,
        state="dropped",
        reason=record.reason,
        reasons=[record.reason],
        texts=_start_of(record),
    )


def _start_of(record: BadRowRecord | DroppedRow) -> list[ShownText]:
    return [ShownText("how the row begins", [Run(record.excerpt)])] if record.excerpt else []


def place_of(record: SampleRecord | BadRowRecord | DroppedRow) -> str:
    """Where a row is: its file and its line, number or byte."""
    if not record.path:
        return ""

    if record.line:
        return f"{record.path}:{record.line}"

    if record.row_number >= 0:
        return f"{record.path}:{record.row_number} (row number)"

    return f"{record.path}, byte {record.byte_offset:,}" if record.byte_offset >= 0 else record.path


def _text(masked: MaskedText, max_context_tokens: int) -> ShownText:
    return ShownText(masked.name, list(_runs(masked, max_context_tokens)))


def _runs(masked: MaskedText, max_context_tokens: int) -> Iterator[Run]:
    for line in lines_of(masked, max_context_tokens):
        if line.role:
            yield Run(line.role, "role")
        for cell in line.cells:
            yield Run(cell.text, cell.kind, cell.is_trained)
        yield Run("\n")
