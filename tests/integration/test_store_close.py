"""A loader that waits for a store that fails is closed at once, and says what it waits for."""

from __future__ import annotations

import pytest

from asyncdata import DataLoader, JsonlSource, PrefetchTimeoutError
from tests.support.fault_proxy import FaultProxy, Faults
from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.loading import SHUFFLE, write_rows
from tests.support.tokenize_fns import id_and_text

pytest.importorskip("obstore")


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_closing_does_not_wait_for_the_next_try(tmp_path, num_workers):
    """A thread that still waits for its next try when the test ends fails it."""
    data = write_rows(tmp_path / "rows.jsonl", 200).read_bytes()

    async def answer(request: Request) -> Response:
        return ranged(request, data, "v1")

    with HttpServer(answer) as origin, FaultProxy(origin.url) as proxy:
        source = JsonlSource(f"{proxy.url}/rows.jsonl", storage_options={"retry_timeout_s": 600})
        loader = DataLoader(source, tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=num_workers, timeout_s=1.5)
        proxy.faults = Faults(("503",), share=1, repeats=10**6, retry_after_s=300)
        with loader, pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(200)
