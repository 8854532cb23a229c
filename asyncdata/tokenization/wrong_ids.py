"""The error of a tokenizer backend that was found out. It stands alone: who catches it need not load tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncdata.core.messages import Overflow

__all__ = ("WrongIdsError",)


class WrongIdsError(ConfigError):
    """A backend that was proven gave other ids than ``tokenizers``: no row's fault, and nothing to be passed over.

    :ivar excerpt: how the text begins for which it did. The message does not show it.
    :ivar is_here: whether it was among the texts of the call that raised this; else it was in those of one before.
    :ivar row: the request's number of the row that has it, once that is known.
    :ivar place: where that row lies, likewise, while rows have no place by their number.
    """

    def __init__(self, message: str, excerpt: str = "", *, is_here: bool = True) -> None:
        super().__init__(message)
        self.excerpt = excerpt
        self.is_here = is_here
        self.row = -1
        self.place: Overflow | None = None
