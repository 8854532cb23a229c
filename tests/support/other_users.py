"""Files of another user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ANOTHER_USER = 12345


def give_away(path: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file or folder another user's. Who is not root cannot: this process looks like another user then."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER_USER, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
