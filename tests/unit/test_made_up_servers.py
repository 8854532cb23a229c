"""Servers and libraries that stand for others in tests behave as those do, and as their plan of faults says."""

from __future__ import annotations

import asyncio
import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support.fault_proxy import SPOILED, STATUSES, FaultProxy, Faults
from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.hub_server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# The hub, as huggingface_hub sees it

FILES = {f"data/part-{number}.jsonl": b'{"id": %d}\n' % number * 50 for number in range(5)} | {"README.md": b"# rows\n"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return pytest.importorskip("huggingface_hub")


def test_a_data_set_is_listed_in_pages_and_read_by_ranges_by_those_who_may(hub):
    with HubServer(token="hf_secret") as server:
        old = server.commit("me/rows", FILES)
        new = server.commit("me/rows", {"data/part-0.jsonl": b"another"})
        api = hub.HfApi(endpoint=server.url, token="hf_secret")

        assert api.dataset_info("me/rows").sha == new
        assert api.dataset_info("me/rows", revision=old).sha == old
        listed = api.list_repo_tree("me/rows", "data", recursive=True, revision=old, repo_type="dataset")
        sizes = {path: len(data) for path, data in FILES.items() if path.startswith("data/")}
        assert {file.path: file.size for file in listed} == sizes
        assert len([asked for asked in server.asked if "/tree/" in asked]) > 1
        files = hub.HfFileSystem(endpoint=server.url, token="hf_secret", skip_instance_cache=True)
        path = f"datasets/me/rows@{old}/data/part-3.jsonl"
        assert files.cat_file(path, start=5, end=25) == FILES["data/part-3.jsonl"][5:25]
        assert files.cat_file("datasets/me/rows/data/part-0.jsonl") == b"another"
        with pytest.raises(hub.errors.RevisionNotFoundError):
            api.dataset_info("me/rows", revision="v9")
        with pytest.raises(hub.errors.RepositoryNotFoundError):
            api.dataset_info("me/others")
        with pytest.raises(hub.errors.RepositoryNotFoundError):
            hub.HfApi(endpoint=server.url, token="hf_wrong").dataset_info("me/rows")


def test_a_bucket_is_listed_with_the_hash_of_each_file(hub):
    def hashes() -> dict[str, str]:
        listed = api.list_bucket_tree("me/files", recursive=True)
        return {file.path: file.xet_hash for file in listed if file.type == "file"}

    with HubServer() as server:
        server.put("me/files", FILES)
        api = hub.HfApi(endpoint=server.url, token=False)
        before = hashes()
        server.put("me/files", {"README.md": b"changed"})
        after = hashes()

    assert set(before) == set(FILES)
    assert {path for path in FILES if after[path] != before[path]} == {"README.md"}


# A proxy that spoils answers by a plan, whatever the order of requests

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


def test_without_a_plan_answers_are_those_of_the_origin(origin):
    with FaultProxy(origin.url) as proxy:
        status, headers, body = get(proxy, 10, 30)

        assert (status, body) == (206, DATA[10:30])
        assert headers["content-range"] == f"bytes 10-29/{len(DATA)}"
        assert headers["etag"] == '"v1"'
        assert get(proxy, 10, 30, **{"If-Match": '"v2"'})[0] == 412
        assert get(proxy, 5000, 5001)[0] == 416
        assert (proxy.num_faults, proxy.num_requests) == (0, 3)


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


def test_requests_without_a_range_are_spoiled_only_if_the_plan_says_so(origin):
    with FaultProxy(origin.url, Faults(("500",), share=1)) as proxy:
        assert get(proxy, Range="")[0] == 200
        proxy.faults = Faults(("500",), share=1, only_ranges=False)
        assert get(proxy, Range="none")[0] == 500


def test_it_counts_the_requests_in_flight():
    inside, release = threading.Semaphore(0), threading.Event()

    async def slow(request: Request) -> Response:
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
    assert (proxy.in_flight, proxy.num_sent_bytes) == (0, 3)
