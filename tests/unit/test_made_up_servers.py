"""The proxy that spoils answers in tests does so by its plan, whatever the order of requests."""

import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.fault_proxy import SPOILED, STATUSES, FaultProxy, Faults
from tests.support.http_server import HttpServer, Request, Response, ranged

DATA = bytes(range(256)) * 4
GOOD = DATA[200:300]
PLACE = f"bytes 200-299/{len(DATA)}"


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


ANSWERS: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "cut": (206, GOOD[:50], {"content-length": "100"}),
    "short": (206, GOOD[:50], {"content-length": "50", "content-range": PLACE}),
    "shifted": (206, DATA[100:200], {"content-range": f"bytes 100-199/{len(DATA)}"}),
    "relabelled": (206, GOOD, {"content-range": f"bytes 201-300/{len(DATA)}"}),
    "whole": (200, DATA, {}),
    "etag": (206, GOOD, {"etag": '"another-version"'}),
    "other_bytes": (206, DATA[100:200], {"content-range": PLACE}),
}


@pytest.mark.parametrize("kind", [*map(str, STATUSES), *SPOILED, "other_bytes"])
def test_each_kind_spoils_one_answer_and_the_next_is_good(origin, kind):
    with FaultProxy(origin.url, Faults((kind,), share=1, retry_after_s=3)) as proxy:
        status, headers, body = get(proxy, 200, 300)
        again = get(proxy, 200, 300)

    assert (again[0], again[2], again[1]["content-range"], again[1]["etag"]) == (206, GOOD, PLACE, '"v1"')
    assert proxy.counts == {kind: 1}
    if kind.isdigit():
        assert status == int(kind)
        assert headers.get("retry-after") == ("3" if kind in {"429", "503"} else None)
    else:
        wanted_status, wanted_body, wanted_headers = ANSWERS[kind]
        assert (status, body) == (wanted_status, wanted_body)
        assert wanted_headers.items() <= headers.items()


def test_the_plan_depends_on_requests_and_not_on_their_order(origin):
    plan = Faults(("503", "short", "cut"), share=0.4, seed=7, repeats=2)
    places = [(start, start + 8) for start in range(0, 160, 8)]

    def answers(order: list[tuple[int, int]], num_threads: int) -> tuple[dict[tuple[int, int], list[Any]], object]:
        with FaultProxy(origin.url, plan) as proxy, ThreadPoolExecutor(num_threads) as threads:
            tries = [list(threads.map(lambda place: get(proxy, *place), order)) for _ in range(3)]
        found = zip(order, *tries, strict=True)
        return {place: [(one[0], len(one[2])) for one in answered] for place, *answered in found}, proxy.counts

    forward, counts = answers(places, 1)
    assert answers(places[::-1], 8) == (forward, counts)
    assert 4 < counts.total() < 40
    assert all(found[2] == (206, 8) for found in forward.values())  # after two faults at most


def test_without_a_plan_answers_are_the_origins_and_only_ranges_are_spoiled_unless_the_plan_says_so(origin):
    with FaultProxy(origin.url) as proxy:
        assert get(proxy, 200, 300)[2] == GOOD
        assert get(proxy, 10, 30, **{"If-Match": '"v2"'})[0] == 412
        assert get(proxy, 5000, 5001)[0] == 416
        assert (proxy.num_faults, proxy.num_requests) == (0, 3)
        proxy.faults = Faults(("500",), share=1)
        assert get(proxy, Range="")[0] == 200
        proxy.faults = Faults(("500",), share=1, only_ranges=False)
        assert get(proxy, Range="none")[0] == 500
