"""A proxy on loopback before any HTTP server: it delays and spoils answers by a seeded plan.

What it does to a request depends only on the seed, on the request, and on how often the same one came before. So it
does the same whatever the order of requests; and a client that tries often enough succeeds.
"""

from collections import Counter
from contextlib import closing
from hashlib import blake2b
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.http_server import HttpServer, Request, Response, byte_range

__all__ = ("KINDS", "FaultProxy", "Faults")

STATUSES = (403, 404, 408, 412, 429, 500, 503)
SPOILED = ("cut", "short", "shifted", "relabelled", "whole", "etag")
KINDS = (*map(str, STATUSES), *SPOILED, "other_bytes")
"""All that it can do to an answer:

a status: that one, without asking the origin; ``cut``: the connection ends in the middle of the body; ``short``: a part
of the body, whose length is told truly; ``shifted``: another range, told truly; ``relabelled``: the right bytes, told
as another range; ``whole``: the whole object, as from a server that knows no ranges; ``etag``: that of another version;
``other_bytes``: those of another range, told as the right ones. Only a checksum in the data can find it.
"""


class Faults(NamedTuple):
    """A plan: which of :data:`KINDS` is done to which share of the requests; to the same one ``repeats`` times at most.

    :ivar only_ranges: leave requests without a range alone: listings and looks at an object.
    :ivar delay_s: seconds before each answer.
    :ivar retry_after_s: what 429 and 503 say.
    """

    kinds: tuple[str, ...] = ()
    share: float = 0.0
    seed: int = 0
    repeats: int = 1
    only_ranges: bool = True
    delay_s: float = 0.0
    retry_after_s: int = 0


class FaultProxy(HttpServer):
    """Passes requests on to ``origin``, an ``http://`` address, as ``faults`` say.

    :ivar faults: the plan; it may be replaced at any time.
    :ivar counts: how often it has done each of :data:`KINDS`.
    """

    def __init__(self, origin: str, faults: Faults | None = None) -> None:
        super().__init__(self._pass_on)
        self._origin = urlsplit(origin).netloc
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self._tries: Counter[tuple[str, ...]] = Counter()

    @property
    def num_faults(self) -> int:
        return self.counts.total()

    def _pass_on(self, request: Request) -> Response:
        plan = self.faults
        kind = self._kind(plan, request)
        self.is_closing.wait(plan.delay_s)
        if kind and kind.isdigit():
            headers = {"retry-after": str(plan.retry_after_s)} if kind in {"429", "503"} else {}
            return Response(int(kind), headers, f"fault {kind}".encode())

        return self._spoiled(kind, request)

    def _kind(self, plan: Faults, request: Request) -> str:
        has_range = byte_range(request, 1) is not None
        if not plan.kinds or (plan.only_ranges and not has_range):
            return ""

        key = request.method, request.target, request.headers.get("range", "")
        with self.lock:
            number = self._tries[key]
            self._tries[key] += 1
        word = blake2b(repr((plan.seed, *key, number // (plan.repeats + 1))).encode(), digest_size=16).digest()
        chance, choice = int.from_bytes(word[:8]) / 2**64, int.from_bytes(word[8:])
        if number % (plan.repeats + 1) == plan.repeats or chance >= plan.share:
            return ""

        kind = plan.kinds[choice % len(plan.kinds)]
        if kind in {"shifted", "relabelled", "whole", "other_bytes"} and not has_range:
            return ""

        with self.lock:
            self.counts[kind] += 1
        return kind

    def _spoiled(self, kind: str, request: Request) -> Response:
        if kind in {"shifted", "other_bytes"}:
            honest, found = self._ask(request), self._ask(_moved(request))
            label = found if kind == "shifted" else honest
            return found._replace(status=label.status, headers=label.headers, body=found.body[: len(honest.body)])

        dropped = "range" if kind == "whole" else ""
        kept = {name: value for name, value in request.headers.items() if name != dropped}
        found = self._ask(request._replace(headers=kept))
        match kind:
            case "cut":
                return found._replace(cut_at=len(found.body) // 2)
            case "short":
                return found._replace(body=found.body[: len(found.body) // 2])
            case "relabelled":
                first, _, num_bytes = found.headers.get("content-range", "bytes 0-0/1").partition("/")
                begin, _, end = first.removeprefix("bytes ").partition("-")
                label = f"bytes {int(begin) + 1}-{int(end) + 1}/{num_bytes}"
                return found._replace(headers=found.headers | {"content-range": label})
            case "etag":
                return found._replace(headers=found.headers | {"etag": '"another-version"'})
        return found

    def _ask(self, request: Request) -> Response:
        with closing(HTTPConnection(self._origin)) as connection:
            connection.request(request.method, request.target, request.body or None, request.headers)
            found = connection.getresponse()
            body = found.read()
        dropped = {"connection", "keep-alive", "transfer-encoding"}
        dropped |= set() if request.method == "HEAD" else {"content-length"}
        kept = {name.lower(): value for name, value in found.getheaders()}
        return Response(found.status, {name: kept[name] for name in kept if name not in dropped}, body)


def _moved(request: Request) -> Request:
    """The same for a range elsewhere: before it, or from the front."""
    start, stop = byte_range(request, 1 << 62) or (0, 1)
    length = min(stop - start, 1 << 30)
    begin = max(0, start - length) if start else 1
    return request._replace(headers=request.headers | {"range": f"bytes={begin}-{begin + length - 1}"})
