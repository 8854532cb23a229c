"""A loader gives each rank the batches that XTuner's own packing, samplers and collator give it.

What XTuner delivers is recorded in ``tests/golden``; ASYNCDATA_XTUNER may name a checkout of it (see ``records``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, LengthGrouping, Ranks, XTunerCollator, XTunerPacking, XTunerTokenizeFn
from tests.support.peers.records import Case, cases_of, plain
from tests.support.peers.xtuner import batch_of, shown

if TYPE_CHECKING:
    from pathlib import Path


def loader_of(folder: Path, rank: int, given: dict[str, Any]) -> DataLoader:
    return DataLoader(
        [str(path) for path in sorted(folder.glob("*.jsonl"))],
        tokenize_fn=XTunerTokenizeFn("tests.support.xtuner_fns:Numbered"),
        packing=XTunerPacking(**given["settings"]),
        length_grouping=LengthGrouping(method="xtuner") if given["grouped"] else None,
        collate_fn=XTunerCollator(
            max_length=given["settings"]["max_length"], shift="pack", overlong="truncate", output="tensors"
        ),
        batch_size=given["batch_size"],
        ranks=Ranks(rank=rank, world_size=given["world_size"], gradient_accumulation=given["accumulation"]),
        drop_last=not given["round_up"],
        seed=given["settings"]["seed"],
        epochs=2,
        num_workers=0,
        cache={"folder": str(folder / "index")},
    )


@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed"])
@pytest.mark.parametrize("case", cases_of("xtuner_epochs"), ids=str)
def test_a_rank_gets_what_xtuners_sampler_gives_it(tmp_path: Path, case: Case, is_killed: bool) -> None:
    pytest.importorskip("torch")
    first = 0
    for number, lengths in enumerate(case.given["lengths"]):
        rows = [{"number": first + row, "tokens": tokens} for row, tokens in enumerate(lengths)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += len(rows)

    for rank, expected in enumerate(case.delivered(tmp_path)):
        found: list[Any] = []
        num_before = len(expected) // 3 if is_killed else 0
        with loader_of(tmp_path, rank, case.given) as loader:
            batches = (batch for _ in range(2) for batch in loader)
            found += [shown(batch_of(next(batches))) for _ in range(num_before)]
            if is_killed:
                state = plain(loader.state_dict())
                next(batches)
            else:
                found += [shown(batch_of(batch)) for batch in batches]
        if is_killed:
            with loader_of(tmp_path, rank, case.given) as loader:
                loader.load_state_dict(state)
                found += [shown(batch_of(batch)) for _ in range(2) for batch in loader]
        assert plain(found) == expected
