"""Two processes as torchrun starts them: they share the tokenizing without being asked to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests.support.faults import ROOT
from tests.support.torch_loading import chat

RANKS = 2
NUM_ROWS = 400

pytestmark = [pytest.mark.thorough]


def run(rows, folder, root, **environment):
    """The reports of the ranks."""
    folder.mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    reports = [folder / f"{rank}.json" for rank in range(RANKS)]
    words = [sys.executable, "-W", "ignore", "-m", "tests.support.torch_rank", str(rows)]
    ranks = [
        subprocess.Popen(
            [*words, str(report), root],
            env={**kept, **place, "RANK": str(rank), **environment},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for rank, report in enumerate(reports)
    ]
    try:
        for process in ranks:
            said = process.communicate()[1].decode()
            assert process.returncode == 0, said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads(report.read_text()) for report in reports]


def test_ranks_of_torch_tokenize_each_row_once_and_get_the_same(tmp_path, jsonl_file):
    rows = jsonl_file([{"messages": chat(number, 1 + number % 17), "number": number} for number in range(NUM_ROWS)])

    with tempfile.TemporaryDirectory(prefix="ad-") as root:
        alone = run(rows, tmp_path / "alone", root)
        shared = run(rows, tmp_path / "shared", root, LOCAL_WORLD_SIZE=str(RANKS))
        assert os.listdir(root) == []

    assert [one["batches"] for one in shared] == [one["batches"] for one in alone]
    assert sum(len(one["batches"]) for one in shared) > RANKS
    tokenized = Counter(number for one in shared for number in one["calls"])
    canaries = tokenized - Counter(range(NUM_ROWS))
    assert set(tokenized) == set(range(NUM_ROWS))
    assert canaries.total() <= 8 * RANKS
    assert Counter(number for one in alone for number in one["calls"]).total() >= RANKS * NUM_ROWS
