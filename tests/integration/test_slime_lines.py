"""Lines that slime reads are rows here too: one more or one less would change the shuffle of all of them."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.integrations.slime import AsyncDataSource

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

ODD = [
    '\u2028{"input": "line separator"}',
    '{"input": "ideographic space"}\u3000',
    '\x0c{"input": "form feed"}\x1f',
    '{"input": "carriage return"}\r{"input": "and again"}\r\n{"input": "and a newline"}',
    "\u3000",
    '{"input": "cut',
]


def lines_of_slime(path: Path) -> list[str]:
    """The prompts as a program finds them that opens a file as text, strips its lines, and skips what is no JSON."""
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                found.append(json.loads(line.strip())["input"])
            except ValueError:
                continue
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("max_length", [None, 50])
@pytest.mark.parametrize("shuffled", [False, True])
def test_odd_lines_are_the_rows_that_slime_reads_in_its_order(
    tmp_path: Path, small_tokenizer: Path, shuffled: bool, max_length: int | None, num_workers: int
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [*ODD, *(json.dumps({"input": f"row {number}"}) for number in range(40)), *ODD]
    path.write_bytes("\n".join(lines).encode())
    expected = lines_of_slime(path)
    assert len(expected) == 2 * 6 + 40
    if shuffled:
        order = list(range(len(expected)))
        random.Random(42).shuffle(order)
        expected = [expected[number] for number in order]

    args: dict[str, Any] = {"hf_checkpoint": str(small_tokenizer), "rollout_max_prompt_len": max_length}
    source = AsyncDataSource(
        SimpleNamespace(
            prompt_data=str(path),
            rollout_shuffle=shuffled,
            asyncdata_num_workers=num_workers,
            asyncdata_cache={"folder": str(tmp_path / "cache")},
            asyncdata_timeout_s=240,
            **args,
        )
    )
    found = [group[0].prompt for group in source.get_samples(len(expected))]
    assert len(source) == len(expected)
    source.close()

    assert found == expected
