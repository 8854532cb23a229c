"""The data source inside slime: its own contract test, its threads, its checkpoints, and worker processes.

slime's contract test is run as its authors tell plugins to run it, in a process of its own, in the checkout that
ASYNCDATA_SLIME names. It imports what slime's rewards need; where that is not installed, PYTHONPATH may name a folder
that has it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import Program
from tests.support.loading import NEVER_S
from tests.support.peers.checkouts import needs_checkout
from tests.support.slime_source import labels, no_rollout, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = [pytest.mark.usefixtures("no_rollout"), pytest.mark.thorough]

NEEDED = ("torch", "httpx", "aiohttp", "pylatexenc", "sympy")
CONTRACT = "tests/plugin_contracts/test_plugin_path_loading_contracts.py"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("AsyncDataSource", 0, " passed"),
        ("config.Options", 1, "test_path_loading_path_aligns_with_expected_format[data_"),
    ],
)
def test_slimes_own_contract_test_passes_and_can_fail(path, status, said):
    folder = needs_checkout("slime")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"slime needs {', '.join(missing)}")

    # No plugins of ours, no settings of ours: the test is slime's.
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.")
    ours = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    ours = {"PYTHONPATH": ours, "SLIME_CONTRACT_DATA_SOURCE_PATH": f"asyncdata.integrations.slime.{path}"}
    command = [sys.executable, "-m", "pytest", *options, CONTRACT]
    how = {"capture_output": True, "text": True, "timeout": NEVER_S * 2, "check": False}
    done = subprocess.run(command, cwd=folder, env=os.environ | ours, **how)

    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout


def test_a_process_that_never_closes_it_ends_without_a_word(tmp_path):
    """slime has no call for it; a Ray actor just ends."""
    path = write_prompts(tmp_path / "p.jsonl", 50)
    code = (
        "from tests.support.slime_source import args_for\n"
        "from asyncdata.integrations.slime import AsyncDataSource\n"
        f"source = AsyncDataSource(args_for({str(path)!r}, asyncdata_num_workers=1, asyncdata_order='stream'))\n"
        "source.get_samples(3)\n"
    )
    with Program("-c", code, options=("-W", "error")) as program:
        assert program.end() == (0, "")
        program.assert_gone()


def test_it_may_be_called_from_a_thread_that_runs_a_loop(tmp_path):
    """As slime's rollout does: from a coroutine, while others of the same loop go on afterwards."""
    path = write_prompts(tmp_path / "p.jsonl", 50)

    async def rollout(source):
        groups = source.get_samples(4)
        await asyncio.gather(*(asyncio.sleep(0) for _ in groups))
        source.add_samples(groups[2:])
        return groups[:2]

    with source_of(path, asyncdata_num_workers=1) as source:
        done = asyncio.run(rollout(source)) + asyncio.run(rollout(source))
        assert labels(done) == ["0", "1", "2", "3"]
