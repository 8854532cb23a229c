"""How a worker makes its own tokenize function and its own reader, told by import paths: neither is pickled."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ("LINES", "ReaderSpec", "TokenizeSpec")


class TokenizeSpec(msgspec.Struct, frozen=True):
    """A tokenize function by its import path, so that a worker can make its own.

    ``settings`` is None for a plain function, else the arguments of the class at ``path``.
    """

    path: str
    settings: dict[str, Any] | None = None


class ReaderSpec(msgspec.Struct, frozen=True):
    """How a worker reads blocks: the class at the import path ``path``, made of the job and ``settings``.

    :ivar tag: the reader's fixed name in the keys of row indexes and token caches, so that the class may move to
        another module; empty: ``path`` is that name.
    """

    path: str
    settings: dict[str, Any] = {}
    tag: str = ""

    @property
    def identity(self) -> str:
        """The reader's name in keys."""
        return self.tag or self.path


LINES = ReaderSpec("asyncdata.sources.text.line_scanner:LineReader", tag="lines")
"""The reader of lines that end with a line feed."""
