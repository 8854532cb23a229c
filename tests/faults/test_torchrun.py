"""How a job of torchrun ends whose ranks have an exchange."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.faults import Program
from tests.support.ranks import lengths, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults]
ENDS = ["closed", "closed, destroyed", "left open", "left open, destroyed", "other numbers"]


def job(folder: Path, num_ranks: int, *ways: str) -> tuple[int, str, list[str]]:
    """The status of torchrun, what it says, and what each rank says.

    :param ways: of each pair of ranks, or of all together.
    """
    pytest.importorskip("torch")
    path = write(folder / "rows.jsonl", lengths(60_000, 40))
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--redirects", "3"
    with Program(
        *torchrun, f"--log-dir={folder}/logs", "-m", "tests.faults.support.torchrun_rank", str(path), *ways
    ) as it:
        status, said = it.end()
    logs = [
        "".join(log.read_text() for log in sorted((folder / "logs").glob(f"*/*/{rank}/std*.log"), reverse=True))
        for rank in range(num_ranks)
    ]
    return status, said, logs


def exits(said: str) -> dict[int, int]:
    """The status of each rank that failed, as torchrun tells it."""
    return {int(rank): int(code) for rank, code in re.findall(r"rank +: (\d+).*\n +exitcode +: (-?\d+)", said)}


def test_a_finished_job_succeeds_however_its_ranks_end(tmp_path):
    status, said, logs = job(tmp_path, 2 * len(ENDS), *ENDS)

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
