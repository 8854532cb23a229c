"""The ends of scripts: each way in which a program ends, with each thing that a loader may have loaded."""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncdata.telemetry.reader import read
from tests.faults.support.ends import KILLED, METHODS, RAY_WAYS, WAYS, Way
from tests.support.faults import Program, record
from tests.support.loading import NEVER_S, write_rows
from tests.support.ranks import lengths, write
from tests.support.stores import HttpHost

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

LOADS = {
    "workers": ["workers"],
    "workers busy in C": ["workers", "busy"],
    "exchange": ["workers", "exchange"],
    "telemetry": ["telemetry"],
    "prover": ["workers", "prover"],
    "store": ["workers", "store"],
    "all": ["workers", "telemetry", "prover", "store", "exchange"],
}
NEED_ROWS = ("interrupted", "beside", "asyncio")
"""Ways that need a batch."""


TRACED = re.compile("exception|nterrupt")


def cells() -> list[object]:
    """Every way with everything; those that are not slow: each way once, and each load in some of the ways."""
    found = []
    for way in WAYS:
        is_child = way.startswith("in a child")
        for method in METHODS if is_child else [""]:
            for load in ["workers, telemetry", *LOADS]:
                if load == "workers busy in C" and any(word in way for word in NEED_ROWS):
                    continue

                is_quick = load == "workers, telemetry" and (method in ("", "fork") or "return" in way)
                is_quick |= load == "all" and way in ("SIGTERM", "an exception leaves the `with`")
                is_quick |= load == "exchange" and method == "fork" and "return" in way
                is_quick |= load == "workers busy in C" and way == "return"
                marks = [] if is_quick else [pytest.mark.slow]
                found.append(pytest.param(way, method, load, marks=marks, id=f"{way}{method and f', {method}'}-{load}"))
    return found


def whats_told(folder: Path) -> tuple[str, ...]:
    """The last line of each loader's telemetry."""
    ends = [start.end for start in read(folder).starts]
    return tuple("" if end is None else ": ".join(filter(None, (end.reason, end.error))) for end in ends)


@pytest.fixture
def temporary(monkeypatch):
    """The folder of temporary files. Its name is short, as multiprocessing makes a socket there."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("ASYNCDATA_PROVE", raising=False)
        yield folder


@pytest.mark.parametrize(("way", "method", "load"), cells())
def test_it_ends_in_time_with_its_own_status_and_leaves_nothing(
    tmp_path, temporary, small_tokenizer, way, method, load
):
    ends_with(tmp_path, temporary, small_tokenizer, way, method, LOADS.get(load, ["workers", "telemetry"]))


@pytest.mark.parametrize("way", ["return", "the loader is garbage"])
def test_a_warning_that_is_an_error_changes_no_status(tmp_path, temporary, way):
    ends_with(tmp_path, temporary, Path(), way, "", ["workers", "telemetry"], policy="error")


def ends_with(tmp_path, temporary, tokenizer, way, method, loads, policy="always"):
    path, has_trace = write_rows(tmp_path / "rows.jsonl", 1000), policy == "error" or bool(TRACED.search(way))
    settings = {"way": way, "method": method, "loads": loads, "tokenizer": str(tokenizer), "policy": policy}
    settings |= {"peer": uuid.uuid4().hex, "world_size": 1 + ("exchange" in loads)}
    with HttpHost() as host:
        settings["place"] = host.put("/rows.jsonl", path.read_bytes()) if "store" in loads else str(path)
        folders = [tmp_path / str(rank) for rank in range(settings["world_size"])]
        programs = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            programs.append(Program.of("ends", {**settings, "folder": str(folder), "rank": rank}))
        try:
            for folder, program in zip(folders, programs, strict=True):
                check(program, folder, WAYS[way], loads, has_trace=has_trace)
        finally:
            for program in programs:
                program.__exit__()
    left = os.listdir(temporary)
    assert [name for name in left if not name.startswith("pymp-")] == [], "those of multiprocessing itself may stay"
    kept = [path for folder in (tmp_path / "cache", *folders) for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix or path.name for path in kept} <= {".lock", ".proof", ".jsonl", "over"}
    assert not any("asyncdata" in name for name in os.listdir("/dev/shm"))


def check(program: Program, folder: Path, way: Way, loads: list[str], *, has_trace: bool) -> None:
    """It ends so, in time; none of its processes is left."""
    status, said = program.end(NEVER_S)
    ended = time.monotonic()
    program.assert_gone()
    assert status == way.status, said
    assert ("ResourceWarning: unclosed" in said) == way.warns, said
    assert "Fatal" not in said
    assert "AD486" not in said or KILLED in way.told, "no alarm, unless the other rank was killed"
    assert ("Traceback" in said) == has_trace, said
    if "telemetry" in loads:
        assert whats_told(folder / "run") == way.told
    exit_s = ended - float((folder / "over").read_text())
    figures = {"exit_s": exit_s} if loads in (["workers"], ["workers", "telemetry"]) else {}
    record("R11", program.process.args[-1], exits=1, hangs=0, left=0, **figures)


# Ray


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_an_actor_leaves_no_process_however_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings = {"way": "ray", "loads": ["workers", "telemetry"], "folder": str(tmp_path)}
    with Program.of("ends", {**settings, "place": str(write_rows(tmp_path / "rows.jsonl", 1000))}) as program:
        program.said()
        program.assert_gone()

    found = {way: whats_told(tmp_path / way / "run") for way in RAY_WAYS}
    assert found == {way: (told,) for way, (_, told) in RAY_WAYS.items()}


# torchrun

TORCHRUN = ["closed", "closed, destroyed", "left open", "left open, destroyed", "other numbers"]


def job(folder: Path, num_ranks: int, *ways: str) -> tuple[int, str, list[str]]:
    """The status of torchrun, what it says, and what each rank says; each pair of ranks has a way, or all have one."""
    pytest.importorskip("torch")
    path = write(folder / "rows.jsonl", lengths(60_000, 40))
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--redirects", "3"
    rank = "-m", "tests.faults.support.torchrun_rank", str(path), *ways
    with Program(*torchrun, f"--log-dir={folder}/logs", *rank) as it:
        status, said = it.end()
    logs = [sorted(folder.glob(f"logs/*/*/{rank}/std*.log"), reverse=True) for rank in range(num_ranks)]
    return status, said, ["".join(log.read_text() for log in of_rank) for of_rank in logs]


def exits(said: str) -> dict[int, int]:
    """The status of each rank that failed, as torchrun tells it."""
    return {int(rank): int(code) for rank, code in re.findall(r"rank +: (\d+).*\n +exitcode +: (-?\d+)", said)}


def test_a_finished_job_succeeds_however_its_ranks_end(tmp_path):
    status, said, logs = job(tmp_path, 2 * len(TORCHRUN), *TORCHRUN)

    assert status == 0, said + "\n".join(logs)
    assert all("done" in log for log in logs)
    assert not any("AD486" in log or "scans.not_shared" in log for log in logs), "\n".join(logs)


@pytest.mark.parametrize(("way", "codes"), [("raises", {0: 1}), ("killed", {1: -9})])
def test_a_rank_that_fails_is_the_only_one_that_aborts_the_job(tmp_path, way, codes):
    status, said, logs = job(tmp_path, 2, way)

    assert status == 1
    assert {rank: code for rank, code in exits(said).items() if code != -15} == codes, said + "\n".join(logs)
    assert way == "raises" or "done" in logs[0], "it makes all samples itself"


def test_a_rank_that_waits_for_a_stuck_one_ends_with_its_own_status_and_says_so(tmp_path):
    status, said, logs = job(tmp_path, 3, "stuck")

    assert status == 1
    assert {rank: code for rank, code in exits(said).items() if rank != 1} == {0: 3, 2: 3}, said + "\n".join(logs)
    for rank in (0, 2):
        assert "AD486 the other ranks did not come to the last exchange" in logs[rank].splitlines()[-1]


TORCH_INLINE = """
import sys, torch
from asyncdata import DataLoader
torch.set_num_threads(1)
numbers = torch.randn(100, 100)
def multiplies(row):
    for _ in range(100):
        numbers @ numbers
    return {"input_ids": [1]}
with DataLoader(sys.argv[1], tokenize_fn=multiplies, num_workers=0, batch_size=1) as loader:
    next(iter(loader))
"""


@pytest.mark.thorough
def test_a_program_that_ends_while_torch_computes_in_the_thread_of_its_loader_is_not_aborted(tmp_path):
    pytest.importorskip("torch")
    rows = str(write_rows(tmp_path / "rows.jsonl", 100))
    programs = [subprocess.Popen([sys.executable, "-c", TORCH_INLINE, rows]) for _ in range(2)]
    assert [program.wait() for program in programs] == [0, 0]
