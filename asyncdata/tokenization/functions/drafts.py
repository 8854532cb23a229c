"""Drafts (a row's texts before tokenization), their tokens, and writing the sample."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.spans import Span, clip, encode_spans

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Mapping, Sequence

    from asyncdata.tokenization.column_writer import ColumnWriter

__all__ = ("NOTHING_TRAINED", "TRUNCATED", "Draft", "Drafting", "Encoded", "predicted", "write_sample")

Buffer = bytes | memoryview

NOTHING_TRAINED = "no_trained_tokens"
TRUNCATED = "truncated"


class Draft(NamedTuple):
    """A text to tokenize, and its trained blocks: ranges of characters, sorted and disjoint.

    :ivar has_stop: whether a block ends with a stop token, at which the model stops.
    """

    text: str
    blocks: list[Span]
    has_stop: bool = True


class Drafting(NamedTuple):
    """A row that was read: its drafts, the columns of its sample, and in ``of`` further data for its writer.

    :ivar has_left_out: whether media of the row were left out.
    """

    drafts: list[Draft]
    columns: dict[str, Buffer]
    of: Any = None
    has_left_out: bool = False


class Encoded(NamedTuple):
    """The tokens of a draft, and which of them are trained.

    :ivar straddling: the indices of tokens that cross the border of a block, and so are not trained.
    :ivar has_stop: as in the draft.
    :ivar is_cut: whether tokens of the draft are missing.
    """

    tokens: array[int]
    spans: list[Span]
    straddling: Sequence[int] = ()
    has_stop: bool = True
    is_cut: bool = False

    def cut(self, start: int, stop: int) -> Encoded:
        """The tokens in ``[start, stop)``."""
        straddling = [place - start for place in self.straddling if start <= place < stop]
        return Encoded(self.tokens[start:stop], clip(self.spans, start, stop), straddling, self.has_stop, is_cut=True)

    def notes(self) -> list[str]:
        """The notes that statistics count for the sample."""
        about_training = ["straddling_token"] * bool(self.straddling) + ["no_stop_token"] * (not self.has_stop)
        return about_training + [TRUNCATED] * self.is_cut


def write_sample(
    row: int, encoded: Encoded | None, columns: Mapping[str, Buffer], out: ColumnWriter, notes: Iterable[str] = ()
) -> None:
    """Keep a sample, unless it is too long or has nothing to train on.

    :param encoded: None if the sample is too long.
    :param notes: further notes that statistics count.
    """
    if encoded is None:
        out.drop(row, "max_length")
        return

    spans = predicted(encoded.spans)
    if not spans:
        out.drop(row, NOTHING_TRAINED)
        return

    out.keep(row, encoded.tokens, spans=encode_spans(spans), **columns)
    for note in sorted(set(chain(encoded.notes(), notes))):
        out.note(row, note)


def predicted(spans: list[Span]) -> list[Span]:
    """The spans without a sample's first token, which no token before it can predict."""
    return [(max(start, 1), stop) for start, stop in spans if stop > 1]
