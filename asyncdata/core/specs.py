"""How a worker makes its own tokenize function and its own reader, told by import paths: neither is pickled."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class TokenizeSpec(msgspec.Struct, frozen=True):
    """A tokenize function by its import path, so that a worker can make its own.

    ``settings`` is None for a plain function, else the arguments of the class at ``path``.
    """

    path: str
    settings: dict[str, Any] | None = None


class ReaderSpec(msgspec.Struct, frozen=True):
    """How a worker reads blocks: the class at the import path ``path``, made of the job and ``settings``.

    :ivar tag: the reader's fixed name in the keys of row indexes, so that the class may move to another module; empty:
        ``path`` is that name.
    """

    path: str
    settings: dict[str, Any] = {}
    tag: str = ""

    @property
    def identity(self) -> str:
        """The reader's name in keys."""
        return self.tag or self.path


class ReadLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a store is read.

    :ivar max_reads: requests in flight at a time, in each process that reads.
    :ivar max_bytes: bytes in flight at a time.
    :ivar retry_timeout_s: seconds from a request's first try in which it may be tried again.
    """

    max_reads: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    retry_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 120.0


class BlockCacheSpec(msgspec.Struct, frozen=True):
    """Where blocks of objects are kept on the local disk, and how many bytes of them."""

    folder: str
    max_bytes: int


class StoreSpec(msgspec.Struct, frozen=True):
    """How a process that reads opens a store: the class at the import path ``path``, made of ``url`` and ``options``.

    Both may give access to the store, so neither is shown.
    """

    path: str
    url: str
    options: dict[str, Any] = {}
    limits: ReadLimits = ReadLimits()
    cache: BlockCacheSpec | None = None

    def __repr__(self) -> str:
        return f"StoreSpec({self.path!r}, ...)"

    def with_cache(self, kept: BlockCacheSpec) -> StoreSpec:
        """The same store, whose blocks are kept there."""
        return msgspec.structs.replace(self, cache=kept)


LINES = ReaderSpec("asyncdata.sources.text.line_scanner:LineReader", tag="lines")
"""The reader of lines that end with a line feed."""

REMOTE_LINES = ReaderSpec("asyncdata.sources.remote.line_reader:RemoteLineReader", tag="lines")
"""The same of objects in stores."""
