"""What several integration tests share: the fast tokenizers."""

import pytest

from tests.support.parts import FAST_BACKENDS


@pytest.fixture(params=FAST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name
