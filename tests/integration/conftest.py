"""What several integration tests share: rows, and the fast tokenizers."""

from pathlib import Path

import pytest

from tests.support.loading import NUM_ROWS, write_rows
from tests.support.parts import FAST_BACKENDS


@pytest.fixture(params=FAST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of rows."""
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
