"""The CPUs and the memory that may be used: limits of containers count, in both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncdata.workers.machine import available_memory, num_usable_cpus, process_memory, resident_memory

if TYPE_CHECKING:
    from collections.abc import Callable

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"
Files = dict[str, str]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Files], Path]:
    """A function that creates the files of a machine with 16 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    def make(files: Files) -> Path:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_without_control_groups_the_whole_machine_may_be_used(machine: Callable[[Files], Path]) -> None:
    root = machine({})

    assert num_usable_cpus(root) == 16
    assert available_memory(root) == 8_000_000 * 1024


def test_only_cpus_in_the_affinity_mask_count(
    machine: Callable[[Files], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine({})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})

    assert num_usable_cpus(root) == 2


@pytest.mark.parametrize(
    ("quota", "num_cpus"),
    [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 2), ("1000 100000", 1), ("9900000 100000", 16)],
)
def test_a_cpu_quota_of_version_2_counts(machine: Callable[[Files], Path], quota: str, num_cpus: int) -> None:
    root = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})

    assert num_usable_cpus(root) == num_cpus


@pytest.mark.parametrize(("quota", "num_cpus"), [("-1", 16), ("350000", 4)])
def test_a_cpu_quota_of_version_1_counts(machine: Callable[[Files], Path], quota: str, num_cpus: int) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct/docker/abc"
    root = machine(
        {
            "proc/self/cgroup": "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n",
            f"{group}/cpu.cfs_quota_us": f"{quota}\n",
            f"{group}/cpu.cfs_period_us": "100000\n",
        }
    )

    assert num_usable_cpus(root) == num_cpus


def test_the_tightest_limit_of_all_groups_above_this_process_counts(machine: Callable[[Files], Path]) -> None:
    root = machine(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "500\n",
            "sys/fs/cgroup/a/memory.max": "2000\n",
            "sys/fs/cgroup/a/memory.current": "900\n",
        }
    )

    assert num_usable_cpus(root) == 3
    assert available_memory(root) == 1100


def test_a_path_outside_of_the_mount_of_a_container_leads_to_its_root(machine: Callable[[Files], Path]) -> None:
    root = machine({"proc/self/cgroup": "0::/../../kubepods/x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})

    assert num_usable_cpus(root) == 2


@pytest.mark.parametrize(
    ("line", "folder", "names", "cached"),
    [
        ("0::/g", "sys/fs/cgroup/g", ("memory.max", "memory.current"), "inactive_file 300\nactive_file 7\n"),
        (
            "9:memory:/g",
            "sys/fs/cgroup/memory/g",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 1\ntotal_inactive_file 300\n",
        ),
    ],
)
def test_cached_pages_of_files_count_as_free(
    machine: Callable[[Files], Path], line: str, folder: str, names: tuple[str, str], cached: str
) -> None:
    limit, used = names
    root = machine(
        {
            "proc/self/cgroup": f"{line}\n",
            f"{folder}/{limit}": "5000\n",
            f"{folder}/{used}": "4000\n",
            f"{folder}/memory.stat": cached,
        }
    )

    assert available_memory(root) == 1300


def test_a_group_above_its_limit_has_no_memory_left(machine: Callable[[Files], Path]) -> None:
    files = {"sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n"}

    assert available_memory(machine({"proc/self/cgroup": "0::/\n", **files})) == 0


def test_process_memory_counts_shared_pages_in_proportion(machine: Callable[[Files], Path]) -> None:
    text = "5581-7ffd ---p 00000000 00:00 0      [rollup]\nRss:     9000 kB\nPss:     4000 kB\nPss_Anon: 1 kB\n"
    root = machine({"proc/42/smaps_rollup": text})

    assert process_memory(42, root) == 4000 * 1024
    assert process_memory(43, root) == 0


def test_resident_memory_counts_shared_pages_fully(machine: Callable[[Files], Path]) -> None:
    root = machine({"proc/42/statm": "9000 300 20 1 0 50 0\n"})

    assert resident_memory(42, root) == 300 * os.sysconf("SC_PAGE_SIZE")
    assert resident_memory(43, root) == 0
    assert resident_memory(os.getpid()) > 1_000_000


def test_this_machine_and_this_process_can_be_measured() -> None:
    assert 1 <= num_usable_cpus() <= len(os.sched_getaffinity(0))
    assert available_memory() > 0
    if Path("/proc/self/smaps_rollup").exists():
        assert process_memory(os.getpid()) > 1_000_000
