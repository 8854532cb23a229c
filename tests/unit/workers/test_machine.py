"""The CPUs, memory and files that may be used, in both versions of control groups; and the heartbeat of a handler."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from asyncdata import DataLoader
from tests.support import parts
from tests.support.faults import until
from tests.support.loading import ids, row_id
from tests.support.parts import change

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"
ALL = 8_000_000 * 1024
V1, V2 = "12:memory:/d/x\n4:cpu,cpuacct:/d/x\n1:name=systemd:/x\n", "0::/a/b\n"
CACHED, CACHED_V1 = "inactive_file 300\nactive_file 7\n", "inactive_file 1\ntotal_inactive_file 300\n"
CPU_V1 = {"cpu,cpuacct/d/x/cpu.cfs_period_us": "100000"}
GROUP_V1 = "memory/d/x/memory"
MEMORY_V1 = {f"{GROUP_V1}.limit_in_bytes": "5000", f"{GROUP_V1}.usage_in_bytes": "4000", f"{GROUP_V1}.stat": CACHED_V1}


def memory_v2(limit: str, used: str, group: str = "a/b", cached: str = "") -> dict[str, str]:
    memory = f"{group}/memory"
    return {f"{memory}.max": limit, f"{memory}.current": used, f"{memory}.stat": cached}


NESTED = {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "300000 100000\n"}
NESTED |= memory_v2("max\n", "500\n") | memory_v2("2000\n", "900\n", "a")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that creates the files of a machine with 16 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    def make(files: dict[str, str]) -> Path:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("own", "groups", "num_cpus", "num_bytes"),
    [
        pytest.param(None, {}, 16, ALL, id="without control groups the whole machine may be used"),
        pytest.param(V2, {"cpu.max": "max 100000\n"}, 16, ALL, id="no quota"),
        pytest.param(V2, {"cpu.max": "400000 100000\n"}, 4, ALL, id="a quota"),
        pytest.param(V2, {"cpu.max": "150000 100000\n"}, 2, ALL, id="a fraction of a CPU counts as one"),
        pytest.param(V2, {"cpu.max": "1000 100000\n"}, 1, ALL, id="less than one CPU"),
        pytest.param(V2, {"cpu.max": "9900000 100000\n"}, 16, ALL, id="a quota of more than there is"),
        pytest.param(V1, CPU_V1 | {"cpu,cpuacct/d/x/cpu.cfs_quota_us": "-1\n"}, 16, ALL, id="no quota, version 1"),
        pytest.param(V1, CPU_V1 | {"cpu,cpuacct/d/x/cpu.cfs_quota_us": "350000\n"}, 4, ALL, id="a quota, version 1"),
        pytest.param("0::/../../kubepods/x\n", {"cpu.max": "200000 100000\n"}, 2, ALL, id="a path beyond the mount"),
        pytest.param(V2, NESTED, 3, 1100, id="the tightest limit of all groups above this process"),
        pytest.param(V2, memory_v2("5000\n", "4000\n", cached=CACHED), 16, 1300, id="cached pages count as free"),
        pytest.param(V1, MEMORY_V1, 16, 1300, id="cached pages count as free, version 1"),
        pytest.param(V2, memory_v2("5\n", "9\n"), 16, 0, id="a group above its limit has nothing left"),
    ],
)
def test_what_may_be_used_is_the_least_of_all_limits(machine, own, groups, num_cpus, num_bytes):
    files = {f"sys/fs/cgroup/{name}": text for name, text in groups.items()}
    root = machine(files if own is None else {"proc/self/cgroup": own, **files})
    assert (parts.num_usable_cpus(root), parts.available_memory(root)) == (num_cpus, num_bytes)


def test_the_memory_of_a_process_counts_shared_pages_in_proportion_or_fully(machine):
    text = "5581-7ffd ---p 00000000 00:00 0      [rollup]\nRss:     9000 kB\nPss:     4000 kB\nPss_Anon: 1 kB\n"
    root = machine({"proc/42/smaps_rollup": text, "proc/42/statm": "9000 300 20 1 0 50 0\n"})
    assert [parts.process_memory(pid, root) for pid in (42, 43)] == [4000 * 1024, 0]
    assert [parts.resident_memory(pid, root) for pid in (42, 43)] == [300 * os.sysconf("SC_PAGE_SIZE"), 0]


def test_only_cpus_in_the_affinity_mask_count_and_this_machine_can_be_measured(machine, monkeypatch):
    assert 1 <= parts.num_usable_cpus() <= len(os.sched_getaffinity(0))
    assert parts.available_memory() > 0
    assert parts.resident_memory(os.getpid()) > 1_000_000
    if Path("/proc/self/smaps_rollup").exists():
        assert parts.process_memory(os.getpid()) > 1_000_000
    root = machine({})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert parts.num_usable_cpus(root) == 2


def test_slow_library_code_reports_progress_by_a_heartbeat(monkeypatch):
    beats, is_going_on = list[int](), threading.Event()

    def progress(row: int) -> None:
        beats.append(row)
        if len(beats) == 3:
            is_going_on.set()

    def permute_slowly(request: parts.Permute) -> parts.Permuted:
        assert is_going_on.wait(240)
        return parts.Permuted(b"")

    change(monkeypatch, beat_s=0.001)
    change(monkeypatch, permute=permute_slowly)
    job = parts.Job(files=[], tokenize=None, max_row_bytes=64, block_bytes=256, slack_bytes=32)
    handler = parts.Handler(job, [memoryview(bytearray(1 + 256 + 32))], parts.FunctionTokenizer(row_id), progress)
    assert handler(parts.Permute(3, 0)) == parts.Permuted(b"")
    assert beats[:3] == [-2, -1, -2], "no row in particular"


def num_open(folder) -> int:
    return sum(file.path.startswith(f"{folder}/") for file in psutil.Process().open_files())


def test_no_more_than_64_files_are_open_however_many_there_are_and_none_when_it_is_closed(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:02}.jsonl").write_text(f'{{"id": {number}}}\n')
    loader = DataLoader(str(tmp_path / "*.jsonl"), tokenize_fn=row_id, num_workers=0, shuffle=False)
    assert num_open(tmp_path) == 0
    with loader:
        assert ids(loader.get_next_batch(100)) == list(range(100))
        assert 0 < num_open(tmp_path) <= 64
    until(lambda: num_open(tmp_path) == 0)
