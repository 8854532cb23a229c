"""The error of a tokenizer backend that gave wrong ids. In its own module: catching it must not import tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncdata.core.messages import Overflow

__all__ = ("WrongIdsError",)


class WrongIdsError(ConfigError):
    """A proven backend gave other ids than ``tokenizers``. No row is to blame, and the error must not be skipped.

    :ivar excerpt: the beginning of the text with wrong ids. The message does not show it.
    :ivar is_here: whether the text was in the call that raised this; otherwise it was in an earlier call.
    :ivar row: the index in the request of the row with the text; -1 while it is not known.
    :ivar place: the position of that row in its file, for rows that have no number yet.
    """

    def __init__(self, message: str, excerpt: str = "", *, is_here: bool = True) -> None:
        super().__init__(message)
        self.excerpt = excerpt
        self.is_here = is_here
        self.row = -1
        self.place: Overflow | None = None
