"""What is asked of each kind of media: a text and shapes from a header, and columns from the medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.tokenization.pictures.files import Medium

Array = np.ndarray[Any, np.dtype[Any]]


class Planned(NamedTuple):
    """What is known of a medium from its header.

    :ivar text: what stands for it in the tokenized text.
    :ivar counts: how many values of each column of the phase ``load`` it has.
    :ivar grid: for Qwen: patches in time, height and width.
    :ivar of: what else its kind needs to load it.
    :ivar notes: of its row.
    """

    medium: Medium
    text: str
    counts: dict[str, int]
    grid: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()
    of: Any = None


class Kind(ABC):
    """What a processor does with media of one kind.

    :ivar mark: what a template writes for one.
    :ivar token: the text of the token that stands for a part of one; ``number``: what that token has in the column of
        types.
    """

    mark: str
    token: str
    number: int

    @abstractmethod
    def plan(self, medium: Medium) -> Planned:
        """What follows from the header of a medium.

        :raises RowFault: if it cannot be read, or is beyond a limit.
        """

    def axes(self, planned: Planned) -> list[tuple[tuple[int, ...], float]]:
        """For Qwen: the grids of a medium's runs of tokens, and how many positions of time a patch of each takes.

        The tokens of what has no grid are counted as those of text.
        """
        return [] if planned.grid is None else [(planned.grid, 1.0)]

    def shown(self, planned: Planned) -> tuple[Any, str]:
        """A picture of a medium, as Pillow has it, and its size in words; None: it has none.

        :raises RowFault: as :meth:`load`.
        """
        return None, ""

    @abstractmethod
    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        """The columns of the plan for the media of a row that are of this kind, or for none, by name."""

    @abstractmethod
    def load(self, planned: Planned) -> dict[str, Array]:
        """The columns of the phase ``load`` for one medium, by name.

        :raises RowFault: if it cannot be decoded, or is another than by its header.
        """


@contextmanager
def refused(medium: Medium, what: str) -> Iterator[None]:
    """What a processor raises for a medium, such as a sound that is too short for it, is the row's."""
    try:
        yield
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        place = f"{medium.name} ({medium.path or 'bytes of the row'})"
        raise RowFault("AD457", f"{place}: its processor refuses {what}: {error!s:.300}") from None
