"""What a batch is, for type checkers: what ``collate_fn`` returns, or a list of samples or packs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

BatchT_co = TypeVar("BatchT_co", covariant=True)

if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import TypeVar as WithDefault

    from asyncdata.core.types import Sample

    Item_co = WithDefault("Item_co", default=Sample, covariant=True)
    B_co = WithDefault("B_co", default=list[Item_co], covariant=True)

    class PackingOf(Protocol[Item_co]):
        """A packing, and what a batch is a list of with it."""

        @property
        def _item(self) -> Item_co: ...
else:
    Item_co = TypeVar("Item_co", covariant=True)  # a default needs Python 3.13
    B_co = TypeVar("B_co", covariant=True)
