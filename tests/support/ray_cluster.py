"""A Ray cluster of small nodes on this machine, for tests: its processes are no descendants of the test's process.

``python -m tests.support.ray_cluster`` reads one command a line, and answers each with one line. It ends, with the
cluster, when its input ends.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

_OFF = "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_enable_metrics_collection"
ENVIRONMENT = {**dict.fromkeys(_OFF, "0"), "PYTHONPATH": str(Path(__file__).parents[2])}
STORE_BYTES = 80 << 20
CPUS = 2


class RayNodes:
    """The cluster, from the test's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._ask("start"))

    def _ask(self, command: str) -> Any:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def add(self) -> str:
        """Add a node, the only kind with the resource ``spare``; returns its name."""
        return str(self._ask("add"))

    def actors(self) -> list[int]:
        """The processes of our actors, on all nodes."""
        return list(self._ask("actors"))

    def actors_left(self, timeout_s: float = 120.0) -> list[int]:
        """Those that are still there after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := self.actors()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def remove(self, name: str) -> None:
        """Kill a node with everything on it."""
        self._ask(f"remove {name}")

    def kill(self, process: str) -> None:
        self._ask(f"kill {process}")

    def stop(self) -> None:
        self._ask("stop")


@contextlib.contextmanager
def two_nodes() -> Iterator[RayNodes]:
    """A cluster of two nodes, to which this process is connected."""
    import ray

    command = [sys.executable, "-m", "tests.support.ray_cluster"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        mock.patch.dict(os.environ, ENVIRONMENT),
        subprocess.Popen(command, cwd=ENVIRONMENT["PYTHONPATH"], text=True, **pipes) as process,
    ):
        process.wait()  # the cluster is with its child
        nodes = RayNodes(process)
        try:
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            nodes.stop()


def is_actor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("RemoteWorker" in word for word in process.cmdline())
    return False


def main() -> None:  # noqa: C901 - one command after another
    if os.fork():
        os._exit(0)
    os.setsid()
    from ray.cluster_utils import Cluster

    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    settings = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(**settings)
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        answer: Any = None
        processes = psutil.Process().children(recursive=True)
        if command == "start":
            answer = cluster.address
        elif command == "add":
            answer = f"n{len(nodes)}"
            nodes[answer] = cluster.add_node(**settings, resources={"spare": CPUS})
        elif command == "actors":
            answer = [child.pid for child in processes if is_actor(child)]
        elif command == "remove":
            cluster.remove_node(nodes[name], allow_graceful=False)
        elif command == "kill":
            for child in processes:
                if child.name() == name:
                    child.kill()
        elif command == "stop":
            break
        os.write(out, (json.dumps(answer) + "\n").encode())
    cluster.shutdown()
    os.write(out, b"null\n")


if __name__ == "__main__":
    main()
