"""A Ray cluster of small nodes on this machine, for tests: its processes are no descendants of the test's process.

``python -m tests.support.ray_cluster`` reads one command a line, and answers each with one line. It ends, with the
cluster, when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
STORE_BYTES = 80 << 20
CPUS = 2


class RayNodes:
    """The cluster, from the test's process.

    :ivar address: of the cluster.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def add(self) -> str:
        """Add a node, the only kind with the resource ``spare``; returns its name."""
        return str(ask(self._process, "add"))

    def actors(self) -> list[int]:
        """The processes of our actors, on all nodes."""
        return list(ask(self._process, "actors"))

    def actors_left(self, timeout_s: float = 120.0) -> list[int]:
        """Those that are still there after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := self.actors()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def remove(self, name: str) -> None:
        """Kill a node with everything on it."""
        ask(self._process, f"remove {name}")

    def kill(self, process: str) -> None:
        """Kill all processes of the cluster with this name."""
        ask(self._process, f"kill {process}")

    def stop(self) -> None:
        """End the cluster."""
        ask(self._process, "stop")


def ask(process: subprocess.Popen[str], command: str) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@contextlib.contextmanager
def two_nodes() -> Iterator[RayNodes]:
    """A cluster of two nodes, to which this process is connected."""
    import ray

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    command = [sys.executable, "-m", "tests.support.ray_cluster"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.wait()  # the cluster is with its child
        nodes = RayNodes(process, ask(process, "start"))
        try:
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            nodes.stop()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def actors() -> list[int]:
    return [child.pid for child in processes() if is_actor(child)]


def kill_all(name: str) -> None:
    for child in processes():
        if child.name() == name:
            child.kill()


def is_actor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("RemoteWorker" in word for word in process.cmdline())
    return False


def main() -> None:  # noqa: C901 - one command after another
    """Serve the commands."""
    if os.fork():
        os._exit(0)
    os.setsid()
    from ray.cluster_utils import Cluster

    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    settings = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster: Any = None
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        answer: Any = None
        if command == "start":
            cluster = Cluster(initialize_head=True, head_node_args=settings)
            cluster.add_node(**settings)
            answer = cluster.address
        elif command == "add":
            answer = f"n{len(nodes)}"
            nodes[answer] = cluster.add_node(**settings, resources={"spare": CPUS})
        elif command == "actors":
            answer = actors()
        elif command == "remove":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        elif command == "kill":
            kill_all(name)
        elif command == "stop":
            cluster.shutdown()
        os.write(out, (json.dumps(answer) + "\n").encode())
        if command == "stop":
            return
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    main()
