"""A rank of a node, as a process of its own, which may kill or stop itself in the middle of sharing.

``python -m tests.faults.support.node_rank SETTINGS`` delivers all batches. After each it writes the digests of all, its
state and its statistics to a file; when it is started again, it continues from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata import Limits, Ranks
from asyncdata.prefetch.node_share import folder as folders
from asyncdata.prefetch.node_share.folder import NodeFolder
from asyncdata.prefetch.node_share.links import Links
from tests.support.faults import until
from tests.support.ranks import WAYS, make, numbered, stream

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = "ASYNCDATA_TEST_CALLS"
KILLS_ON = "ASYNCDATA_TEST_KILLS_ON"
POINTS = {
    "claimed": (NodeFolder, "claim", "after"),
    "while it publishes": (os, "rename", "before"),
    "published, before it tells the others": (Links, "tell", "before"),
    "while it reads": (NodeFolder, "read", "before"),
    "while it joins": (Links, "run", "before"),
}
"""Where a rank may end: what is called there, and whether it ends before or after that."""


def counted(row: dict[str, Any]) -> list[int]:
    """The tokens of a row, whose number is added to a file; one row may kill its worker."""
    fd = os.open(os.environ[CALLS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\n" % row["id"])
    os.close(fd)
    if str(row["id"]) == os.environ[KILLS_ON]:
        os.kill(os.getpid(), signal.SIGKILL)
    return numbered(row)


counted.version = 1  # type: ignore[attr-defined]


def arm(point: str, number: int, signal_number: int) -> None:
    """Have this process send itself a signal at the call of that number."""
    owner, name, when = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    def armed(*args: Any, **settings: Any) -> Any:
        nonlocal num_calls
        if owner is os and "/." not in args[0]:  # it joins by a rename, too
            return original(*args, **settings)

        num_calls += 1
        is_due = num_calls == number
        if is_due and when == "before":
            os.kill(os.getpid(), signal_number)
        found = original(*args, **settings)
        if is_due and when == "after":
            os.kill(os.getpid(), signal_number)
        return found

    setattr(owner, name, armed)


def main(settings: dict[str, Any]) -> None:
    """Deliver everything, from where this rank has come to."""
    folders.SHARED_MEMORY = settings["root"]
    os.environ[CALLS], os.environ[KILLS_ON] = settings["calls"], str(settings.get("kills_on"))
    if "end" in settings:
        arm(*settings["end"])
    report = Path(settings["report"])
    done = json.loads(report.read_text()) if report.exists() else {"batches": []}
    ranks = Ranks(rank=settings["rank"], world_size=settings["world_size"], share_node=settings.get("share", True))
    with make(
        Path(settings["path"]),
        "tests.faults.support.node_rank:counted",
        ranks=ranks,
        num_workers=settings.get("num_workers", 1),
        epochs=settings.get("epochs", 1),
        bad_rows="skip",
        limits=Limits(row_timeout_s=settings.get("row_timeout_s", 60.0)),
        **WAYS[settings["way"]],
    ) as loader:
        if "state" in done:
            loader.load_state_dict(done["state"])
        for batch in stream(loader):
            done["batches"].append(hashlib.sha256(batch.content).hexdigest())
            done["state"] = loader.state_dict()
            done["statistics"] = msgspec.to_builtins(loader.statistics())
            _replace(report, done)
        until(lambda: "leave" not in settings or os.path.exists(settings["leave"]))
    done["cpu_s"] = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    _replace(report, done)


def _replace(report: Path, done: dict[str, Any]) -> None:
    temporary = report.with_suffix(".new")
    temporary.write_text(json.dumps(done))
    temporary.replace(report)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
