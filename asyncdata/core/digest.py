"""Digests of content and of settings.

They are pinned in tests: a changed digest would refuse every existing snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec


def digest(*parts: bytes | memoryview | str) -> str:
    """blake2b-128 of the parts, as hex. Each part's length is hashed too: ("ab", "c") is not ("a", "bc")."""
    return digest_each(parts)


def digest_each(parts: Iterable[bytes | memoryview | str]) -> str:
    """The same of parts that are made one by one."""
    state = blake2b(digest_size=16)
    for part in parts:
        # File names and row text may hold lone surrogates, which strict UTF-8 refuses.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


_EMPTY = blake2b(digest_size=16)


def short_digest(data: bytes, more: bytes | None = None) -> bytes:
    """The bytes of ``digest(data)``, or of ``digest(data, more)``; for short data, in a third of the time."""
    text = len(data).to_bytes(8, "little") + data
    if more is not None:
        text += len(more).to_bytes(8, "little") + more
    state = _EMPTY.copy()  # a new one takes twice as long
    state.update(text)
    return state.digest()


class ListDigest:
    """The digests of a list of files or objects, which are taken one by one, in order.

    :ivar with_names: of the name, size and content of each, as hex; ``without_names``: of the size and content.
    """

    def __init__(self) -> None:
        self._with_names, self._without_names = _EMPTY.copy(), _EMPTY.copy()

    def add(self, name: str, num_bytes: int, content: str) -> None:
        """Take one more; what is digested of it is ``canonical([name, num_bytes, content])``."""
        rest = b"%d,%b]" % (num_bytes, canonical(content))
        self._with_names.update(short_digest(b"[%b,%b" % (canonical(name), rest)))
        self._without_names.update(short_digest(b"[" + rest))

    @property
    def with_names(self) -> str:
        return self._with_names.hexdigest()

    @property
    def without_names(self) -> str:
        return self._without_names.hexdigest()


def canonical(value: Any) -> bytes:
    """The one encoding of a value made of builtins: JSON with sorted keys. Tuples and lists are encoded alike.

    :raises TypeError: for values JSON cannot hold, and keys that are not text.
    :raises ValueError: for text that is not valid UTF-8.
    """
    return msgspec.json.encode(value, order="deterministic")
