"""CPUs and memory that this process may use, and memory that a process uses. Linux only, from /proc and /sys.

The limits of containers count: control groups, versions 1 and 2, at every level above this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number of bytes that is larger than any machine's memory."""


def num_usable_cpus(root: Path = _ROOT) -> int:
    """CPUs that this process may use: its affinity mask, which Ray and batch systems set, or fewer if its
    control groups have a quota. A fraction of a CPU counts as one.

    :param root: where /proc and /sys are.
    """
    quotas = [math.ceil(_cpu_quota(folder)) for folder in _control_groups(root, "cpu")]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without evicting pages in use: of the machine, or of a control group that has less.

    :param root: where /proc and /sys are.
    """
    machine = _named_numbers(root / "proc/meminfo").get("MemAvailable:", _NO_LIMIT)
    left = [_memory_left(folder) for folder in _control_groups(root, "memory")]
    return max(0, min([machine, *left]))


def process_memory(pid: int, root: Path = _ROOT) -> int:
    """Bytes that a process uses; shared pages count in proportion (PSS). 0 if that is not known."""
    return _named_numbers(root / f"proc/{pid}/smaps_rollup").get("Pss:", 0)


def resident_memory(pid: int, root: Path = _ROOT) -> int:
    """Resident bytes of a process, as ``ps`` shows them; shared pages count fully. 0 if that is not known.

    A thousand times cheaper than :func:`process_memory`.
    """
    pages = _text(root / f"proc/{pid}/statm").split()[1:2]
    return int(pages[0]) * _PAGE_BYTES if pages else 0


def cpu_times(pid: int, root: Path = _ROOT) -> tuple[float, float]:
    """Seconds for which a process's main thread ran, and for which it waited for a CPU; 0 if that is not known.

    It waits while others run, and while its control group has used up its quota. Some containers do not have the file.
    """
    words = _text(root / f"proc/{pid}/schedstat").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9) if len(words) == 3 else (0.0, 0.0)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that bound this process in ``controller``, the innermost first.

    A container may see its own group as the root, or read a path that is outside of its mount: the root of the mount is
    always among them.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            inner = mount / path.lstrip("/")
            yield inner
            yield from (folder for folder in inner.parents if folder.is_relative_to(mount))


def _cpu_quota(group: Path) -> float:
    """The CPU quota of a group, in CPUs. Version 2 has quota and period in one file, version 1 in two."""
    words = _text(group / "cpu.max").split() or [
        *_text(group / "cpu.cfs_quota_us").split(),
        *_text(group / "cpu.cfs_period_us").split(),
    ]
    if len(words) != 2 or not words[0].isdecimal():  # "max", or -1: no quota
        return _NO_LIMIT

    return int(words[0]) / int(words[1])


def _memory_left(group: Path) -> int:
    """Bytes left below the limit of a group. Cached file pages that are not in active use count as free."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
            return int(limit) - int(used) + _named_numbers(group / "memory.stat").get(cached, 0)

    return _NO_LIMIT


def _named_numbers(path: Path) -> dict[str, int]:
    """Parse lines of a name, a number and an optional unit: ``{name: bytes}``."""
    found = {}
    for line in _text(path).splitlines():
        name, *values = line.split()
        if values and values[0].isdecimal():
            found[name] = int(values[0]) * (1024 if values[-1] == "kB" else 1)
    return found


def _text(path: Path) -> str:
    """The text of a file; empty if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
