"""Characters that mark places in a chat while it is rendered."""

from __future__ import annotations

__all__ = ("MARKS",)

MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters: code points that will never be assigned."""
