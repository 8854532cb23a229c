"""The data source inside slime: a process that never closes it, and calls from a thread that runs a loop."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.faults import Program
from tests.support.slime_source import labels, no_rollout, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = [pytest.mark.usefixtures("no_rollout"), pytest.mark.thorough]


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
