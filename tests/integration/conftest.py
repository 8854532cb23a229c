"""What the tests of fast tokenizers share."""

from __future__ import annotations

import pytest

from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS


@pytest.fixture(params=FAST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name
