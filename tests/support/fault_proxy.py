"""A proxy on loopback before any HTTP server: it delays, limits the bandwidth, and spoils answers by a seeded plan.

What it does to a request depends only on the seed, on the request, and on how often the same one came before. So it
does the same whatever the order of requests; and a client that tries often enough succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.http_server import HttpServer, Request, Response, byte_range, head_of

__all__ = ("KINDS", "FaultProxy", "Faults")

STATUSES = (403, 404, 408, 412, 429, 500, 503)
SPOILED = ("cut", "short", "shifted", "relabelled", "whole", "etag")
KINDS = (*map(str, STATUSES), *SPOILED, "other_bytes")
"""All that it can do to an answer:

a status: that one, without asking the origin; 429 and 503 say when to try again;
``cut``: the connection ends in the middle of the body;
``short``: a part of the body, whose length is told truly;
``shifted``: another range, told truly; ``relabelled``: the right bytes, told as another range;
``whole``: status 200 and the whole object, as from a server that knows no ranges;
``etag``: the entity tag of another version;
``other_bytes``: the bytes of another range, told as the right ones. Only a checksum in the data can find it.
"""


class Faults(NamedTuple):
    """A plan.

    :ivar kinds: what is done to answers, of :data:`KINDS`.
    :ivar share: how many of the requests it is done to, from 0 to 1.
    :ivar repeats: how often in a row at most to the same request, before it is answered well.
    :ivar only_ranges: leave requests without a range alone: listings and looks at an object.
    :ivar delay_s: seconds before each answer.
    :ivar bytes_per_s: of all bodies together; 0: no limit.
    :ivar retry_after_s: what 429 and 503 say.
    """

    kinds: tuple[str, ...] = ()
    share: float = 0.0
    seed: int = 0
    repeats: int = 1
    only_ranges: bool = True
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    retry_after_s: int = 0


class FaultProxy(HttpServer):
    """Passes requests on to ``origin``, an ``http://`` address, as ``faults`` say.

    :ivar faults: the plan; it may be replaced at any time.
    :ivar counts: how often it has done each of :data:`KINDS`.
    """

    def __init__(self, origin: str, faults: Faults | None = None) -> None:
        super().__init__(self._pass_on)
        self._origin = urlsplit(origin)
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self._tries: Counter[tuple[str, ...]] = Counter()
        self._free_at = 0.0

    @property
    def num_faults(self) -> int:
        """How many answers it has spoiled."""
        return self.counts.total()

    async def _pass_on(self, request: Request) -> Response:
        plan = self.faults
        kind = self._kind(plan, request)
        if plan.delay_s:
            await _until(asyncio.get_running_loop().time() + plan.delay_s)
        if kind and kind.isdigit():
            found = _refused(int(kind), plan)
        else:
            found = await self._spoiled(kind, request)
        if plan.bytes_per_s:
            begin = max(asyncio.get_running_loop().time(), self._free_at)
            self._free_at = begin + len(found.body) / plan.bytes_per_s
            await _until(self._free_at)
        return found

    def _kind(self, plan: Faults, request: Request) -> str:
        """What to do to the answer; empty: nothing."""
        has_range = byte_range(request, 1) is not None
        if not plan.kinds or (plan.only_ranges and not has_range):
            return ""

        key = request.method, request.target, request.headers.get("range", "")
        number = self._tries[key]
        self._tries[key] += 1
        word = blake2b(repr((plan.seed, *key, number // (plan.repeats + 1))).encode(), digest_size=16).digest()
        chance, choice = int.from_bytes(word[:8]) / 2**64, int.from_bytes(word[8:])
        if number % (plan.repeats + 1) == plan.repeats or chance >= plan.share:
            return ""

        kind = plan.kinds[choice % len(plan.kinds)]
        if kind in {"shifted", "relabelled", "whole", "other_bytes"} and not has_range:
            return ""

        self.counts[kind] += 1
        return kind

    async def _spoiled(self, kind: str, request: Request) -> Response:
        if kind in {"shifted", "other_bytes"}:
            honest, found = await self._ask(request), await self._ask(_moved(request))
            label = found if kind == "shifted" else honest
            return found._replace(status=label.status, headers=label.headers, body=found.body[: len(honest.body)])

        if kind == "whole":
            return await self._ask(_without(request, "range"))

        found = await self._ask(request)
        if kind == "cut":
            return found._replace(cut_at=len(found.body) // 2)

        if kind == "short":
            return found._replace(body=found.body[: len(found.body) // 2])

        if kind == "relabelled":
            first, _, num_bytes = found.headers.get("content-range", "bytes 0-0/1").partition("/")
            begin, _, end = first.removeprefix("bytes ").partition("-")
            label = f"bytes {int(begin) + 1}-{int(end) + 1}/{num_bytes}"
            return found._replace(headers=found.headers | {"content-range": label})

        if kind == "etag":
            return found._replace(headers=found.headers | {"etag": '"another-version"'})

        return found

    async def _ask(self, request: Request) -> Response:
        """The origin's own answer."""
        reader, writer = await asyncio.open_connection(self._origin.hostname, self._origin.port)
        try:
            headers = {**request.headers, "connection": "close", "content-length": str(len(request.body))}
            # 1.0: a body is told by its length or by the connection's end, never sent in pieces
            lines = [f"{request.method} {request.target} HTTP/1.0", *(f"{name}: {headers[name]}" for name in headers)]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + request.body)
            head = await head_of(reader)
            if head is None:
                return Response(502, {})

            body = await reader.read() if request.method != "HEAD" else b""
        finally:
            writer.close()
        dropped = {"connection", "keep-alive"} | (set() if request.method == "HEAD" else {"content-length"})
        kept = {name: value for name, value in head[1].items() if name not in dropped}
        return Response(int(head[0].split()[1]), kept, body)


async def _until(moment: float) -> None:
    """Wait until the loop's clock shows it."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(moment, lambda: reached.done() or reached.set_result(None))
    await reached


def _refused(status: int, plan: Faults) -> Response:
    headers = {"retry-after": str(plan.retry_after_s)} if status in {429, 503} else {}
    return Response(status, headers, f"fault {status}".encode())


def _without(request: Request, name: str) -> Request:
    return request._replace(headers={key: value for key, value in request.headers.items() if key != name})


def _moved(request: Request) -> Request:
    """The same for a range elsewhere: before it, or from the front."""
    start, stop = byte_range(request, 1 << 62) or (0, 1)
    length = min(stop - start, 1 << 30)
    begin = max(0, start - length) if start else 1
    return request._replace(headers=request.headers | {"range": f"bytes={begin}-{begin + length - 1}"})
