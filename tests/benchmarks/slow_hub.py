"""A hub, a web server and S3 on loopback that answer late: ``python -m tests.benchmarks.slow_hub FILE DELAY_S``.

It prints the hub's address, that of the file on the web server, and those of an empty bucket: without delay, and with.
In the hub, the file is ``data/rows.jsonl`` of the data set ``bench/rows``. It ends when its input ends.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.framework import ROOT
from tests.support.servers import FaultProxy, Faults, HttpServer, HubServer, Request, Response, ranged
from tests.support.stores import BUCKET, s3


@contextmanager
def slow_hub(path: str, delay_s: float) -> Iterator[tuple[str, str, dict[str, str]]]:
    """All in a process of their own; gives the addresses of the hub and the file, and the bucket, if moto is there."""
    command = [sys.executable, "-m", "tests.benchmarks.slow_hub", path, str(delay_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            hub, file, *bucket = process.stdout.readline().split()
            yield hub, file, dict(zip(("bucket", "direct", "slow"), bucket, strict=False))
        finally:
            process.stdin.close()
            process.wait()


def main() -> None:
    data, delay_s = Path(sys.argv[1]).read_bytes(), float(sys.argv[2])

    async def late(request: Request) -> Response:
        await asyncio.sleep(delay_s)
        return ranged(request, data, "1")

    with ExitStack() as stack:
        hub, web = stack.enter_context(HubServer()), stack.enter_context(HttpServer(late))
        proxy = stack.enter_context(FaultProxy(hub.url, Faults(delay_s=delay_s)))
        hub.commit("bench/rows", {"data/rows.jsonl": data})
        bucket = []
        if find_spec("moto") is not None:
            direct = s3().endpoint
            bucket = [BUCKET, direct, stack.enter_context(FaultProxy(direct, Faults(delay_s=delay_s))).url]
        print(proxy.url, f"{web.url}/rows.jsonl", *bucket, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
