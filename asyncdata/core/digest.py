"""Digests of content and of settings.

They are pinned in tests: a changed digest would refuse every existing snapshot.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

__all__ = ("canonical", "digest")


def digest(*parts: bytes | str) -> str:
    """blake2b-128 of the parts, as hex. Each part's length is hashed too: ("ab", "c") is not ("a", "bc")."""
    state = blake2b(digest_size=16)
    for part in parts:
        # File names and row text may hold lone surrogates, which strict UTF-8 refuses.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def canonical(value: Any) -> bytes:
    """The one encoding of a value made of builtins: JSON with sorted keys. Tuples and lists are encoded alike.

    :raises TypeError: for values JSON cannot hold, and keys that are not text.
    :raises ValueError: for text that is not valid UTF-8.
    """
    return msgspec.json.encode(value, order="deterministic")
