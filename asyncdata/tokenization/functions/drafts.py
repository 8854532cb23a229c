"""A row's texts before they are tokens, the tokens that they become, and the sample that is written of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.spans import Span, clip, encode_spans

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Mapping, Sequence

    from asyncdata.tokenization.column_writer import ColumnWriter

__all__ = ("NOTHING_TRAINED", "Draft", "Drafting", "Encoded", "predicted", "write_sample")

Buffer = bytes | memoryview

NOTHING_TRAINED = "no_trained_tokens"


class Draft(NamedTuple):
    """A text that becomes tokens, and the blocks of it that are trained: ranges of characters, rising and disjoint.

    :ivar has_stop: whether a block ends with a token that ends what the model says.
    """

    text: str
    blocks: list[Span]
    has_stop: bool = True


class Drafting(NamedTuple):
    """A row that has been read: its drafts, the columns of its sample, and what else its writer must know."""

    drafts: list[Draft]
    columns: dict[str, Buffer]
    of: Any = None


class Encoded(NamedTuple):
    """The tokens of a draft, and which of them are trained.

    :ivar straddling: the places of tokens that hold a part of a block, and are not trained, as they hold more.
    :ivar has_stop: that of the draft.
    """

    tokens: array[int]
    spans: list[Span]
    straddling: Sequence[int] = ()
    has_stop: bool = True

    def cut(self, start: int, stop: int) -> Encoded:
        """What lies in ``[start, stop)``."""
        straddling = [place - start for place in self.straddling if start <= place < stop]
        return Encoded(self.tokens[start:stop], clip(self.spans, start, stop), straddling, self.has_stop)

    def notes(self) -> list[str]:
        """What statistics count of a sample that is made of them."""
        return ["straddling_token"] * bool(self.straddling) + ["no_stop_token"] * (not self.has_stop)


def write_sample(
    row: int, encoded: Encoded | None, columns: Mapping[str, Buffer], out: ColumnWriter, notes: Iterable[str] = ()
) -> None:
    """Keep a sample, unless it is too long or has nothing to train on.

    :param encoded: None for one that is too long.
    :param notes: what statistics count of it besides.
    """
    if encoded is None:
        out.drop(row, "max_length")
        return

    spans = predicted(encoded.spans)
    if not spans:
        out.drop(row, NOTHING_TRAINED)
        return

    out.keep(row, encoded.tokens, spans=encode_spans(spans), **columns)
    for note in sorted({*encoded.notes(), *notes}):
        out.note(row, note)


def predicted(spans: list[Span]) -> list[Span]:
    """Without a sample's first token: nothing stands before it that it could be predicted from."""
    return [(max(start, 1), stop) for start, stop in spans if stop > 1]
