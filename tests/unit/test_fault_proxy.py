"""The proxy does to answers what its plan says, and counts it; the same whatever the order of requests."""

from __future__ import annotations

import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support.fault_proxy import SPOILED, STATUSES, FaultProxy, Faults
from tests.support.http_server import HttpServer, Request, Response, ranged

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = bytes(range(256)) * 4


async def _data(request: Request) -> Response:
    return ranged(request, DATA, "v1") if request.path == "/data" else Response(404, {})


@pytest.fixture
def origin() -> Iterator[HttpServer]:
    with HttpServer(_data) as server:
        yield server


def get(proxy: HttpServer, start: int = 0, stop: int = 100, **headers: str) -> tuple[int, dict[str, str], bytes]:
    client = http.client.HTTPConnection(str(urlsplit(proxy.url).netloc))
    try:
        client.request("GET", "/data", headers={"Range": f"bytes={start}-{stop - 1}"} | headers)
        found = client.getresponse()
        try:
            body = found.read()
        except http.client.IncompleteRead as cut:
            body = cut.partial
        return found.status, {name.lower(): value for name, value in found.getheaders()}, body
    finally:
        client.close()


def test_without_a_plan_answers_are_those_of_the_origin(origin):
    with FaultProxy(origin.url) as proxy:
        status, headers, body = get(proxy, 10, 30)

        assert (status, body) == (206, DATA[10:30])
        assert headers["content-range"] == f"bytes 10-29/{len(DATA)}"
        assert headers["etag"] == '"v1"'
        assert get(proxy, 10, 30, **{"If-Match": '"v2"'})[0] == 412
        assert get(proxy, 5000, 5001)[0] == 416
        assert proxy.num_faults == 0
        assert proxy.num_requests == 3


@pytest.mark.parametrize("kind", [*map(str, STATUSES), *SPOILED, "other_bytes"])
def test_each_kind_spoils_one_answer_and_the_next_is_good(origin, kind):
    with FaultProxy(origin.url, Faults((kind,), share=1, retry_after_s=3)) as proxy:
        status, headers, body = get(proxy, 200, 300)
        again = get(proxy, 200, 300)

    good = DATA[200:300]
    place = f"bytes 200-299/{len(DATA)}"
    assert (again[0], again[2], again[1]["content-range"], again[1]["etag"]) == (206, good, place, '"v1"')
    assert proxy.counts == {kind: 1}
    if kind.isdigit():
        assert status == int(kind)
        assert headers.get("retry-after") == ("3" if kind in {"429", "503"} else None)
    elif kind == "cut":
        assert (int(headers["content-length"]), body) == (100, good[:50])
    elif kind == "short":
        assert (int(headers["content-length"]), body, headers["content-range"]) == (50, good[:50], place)
    elif kind == "shifted":
        assert (body, headers["content-range"]) == (DATA[100:200], f"bytes 100-199/{len(DATA)}")
    elif kind == "relabelled":
        assert (body, headers["content-range"]) == (good, f"bytes 201-300/{len(DATA)}")
    elif kind == "whole":
        assert (status, body) == (200, DATA)
    elif kind == "etag":
        assert (body, headers["etag"]) == (good, '"another-version"')
    else:
        assert (body, headers["content-range"]) == (DATA[100:200], place)


def test_the_plan_depends_on_requests_and_not_on_their_order(origin):
    plan = Faults(("503", "short", "cut"), share=0.4, seed=7, repeats=2)
    places = [(start, start + 8) for start in range(0, 160, 8)]

    def answers(order: list[tuple[int, int]], num_threads: int) -> tuple[dict[tuple[int, int], list[int]], object]:
        with FaultProxy(origin.url, plan) as proxy, ThreadPoolExecutor(num_threads) as threads:
            tries = [list(threads.map(lambda place: get(proxy, *place), order)) for _ in range(3)]
        found = zip(order, *tries, strict=True)
        return {place: [(one[0], len(one[2])) for one in answered] for place, *answered in found}, proxy.counts

    forward, counts = answers(places, 1)
    assert answers(places[::-1], 8) == (forward, counts)
    assert 4 < counts.total() < 40
    assert all(found[2] == (206, 8) for found in forward.values())  # after two faults at most


def test_requests_without_a_range_are_spoiled_only_if_the_plan_says_so(origin):
    with FaultProxy(origin.url, Faults(("500",), share=1)) as proxy:
        assert get(proxy, Range="")[0] == 200
        proxy.faults = Faults(("500",), share=1, only_ranges=False)
        assert get(proxy, Range="none")[0] == 500


def test_it_counts_the_requests_in_flight(origin):
    inside, release = threading.Semaphore(0), threading.Event()

    async def slow(request: Request) -> Response:
        import asyncio

        inside.release()
        await asyncio.get_running_loop().run_in_executor(None, release.wait)
        return await _data(request)

    with HttpServer(slow) as held, FaultProxy(held.url) as proxy, ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(get, proxy, start, start + 1) for start in range(3)]
        for _ in asked:
            inside.acquire()
        assert proxy.in_flight == proxy.max_in_flight == 3
        release.set()
        assert [one.result()[2] for one in asked] == [DATA[start : start + 1] for start in range(3)]
    assert proxy.in_flight == 0
    assert proxy.num_sent_bytes == 3
