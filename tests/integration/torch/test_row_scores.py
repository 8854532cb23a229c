"""Scores of rows that a framework carries through batches of its own, as verl's trainers give them back."""

# ruff: noqa: SLF001 - stands for what verl does with its own

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, Mix
from asyncdata.integrations.torch.rows import order_view_of_rows
from asyncdata.integrations.verl import VerlRows, report_in_v1_trainer
from tests.support.loading import write_rows

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")

NUM_ROWS = 12


class FakeTrainer:
    """verl's trainer of ``trainer.use_v1``, as far as scores go: a queue has the fields of each rollout's outputs."""

    def __init__(self, train_dataset: Any) -> None:
        self.train_dataset = train_dataset

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch, metrics


def queue_of(fields: dict[str, tuple[Any, float]]) -> Any:
    """verl's TransferQueue with ``extra_info`` and the score of each key."""

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert (partition_id, select_fields) == ("train", ["extra_info", "rm_scores"])
        infos = [SimpleNamespace(data=fields[key][0]) for key in keys]  # as tensordict wraps what is no tensor
        return {"extra_info": infos, "rm_scores": torch.tensor([[0.0, fields[key][1]] for key in keys])}

    return SimpleNamespace(kv_batch_get=kv_batch_get)


class Rows(VerlRows):
    """Without verl's own class: its configuration, its view, and its hook."""

    def __init__(self, source: Any, outcomes: Any, **knobs: Any) -> None:
        self.image_key, self.video_key, self.audio_key = "images", "videos", "audios"
        settings = {"num_workers": 0, "outcomes": outcomes, "seed": 3, **knobs}
        self._view = order_view_of_rows(source, settings, item=self._row)

    def is_validation(self) -> bool:
        return False

    def statistics(self) -> Any:
        return self._view.loader.statistics()

    def step(self, indices: list[int], repeats: int = 2) -> list[int]:
        """One step of the trainer: rollouts of each row, their scores, and the hook."""
        rows = [json.loads(json.dumps(row)) for row in self._view.__getitems__(indices)]
        repeated = [row for row in rows for _ in range(repeats)]
        scores = torch.tensor([[0.0, float(row["id"] % 2)] for row in repeated])
        infos = [row["extra_info"] for row in repeated]
        self.on_batch_end(SimpleNamespace(batch={"token_level_scores": scores}, non_tensor_batch={"extra_info": infos}))
        return [row["id"] for row in rows]


def test_rows_that_verl_says_are_solved_are_left_out_of_the_next_epoch(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    rows = Rows(str(path), {"policy": {"drop_above": 0.9}}, rows_per_epoch=NUM_ROWS, shuffle=True)
    try:
        assert sorted(rows.step(list(range(NUM_ROWS)))) == list(range(NUM_ROWS))
        assert rows.statistics().outcome_scores_total == 2 * NUM_ROWS
        assert sorted(rows.step([0, 1, 2, 3, 4, 5])) == [0, 2, 4, 6, 8, 10]
    finally:
        rows.close()


def test_the_trainer_of_use_v1_reports_scores_before_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rollout's outputs the last one counts, and padding of a batch does not."""
    kind = type("PPOTrainer", (FakeTrainer,), {"_compute_advantage": FakeTrainer._compute_advantage})
    module: Any = SimpleNamespace(PPOTrainer=kind, tq=None)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1.trainer_base", module)
    report_in_v1_trainer()
    report_in_v1_trainer()  # of a second data set
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    rows = Rows(str(path), {"policy": {"drop_above": 0.9}}, rows_per_epoch=NUM_ROWS, shuffle=True)
    try:
        taken = rows._view.__getitems__(list(range(NUM_ROWS)))
        fields = {
            f"{row['id']}_{rollout}_{output}": (row["extra_info"], float(row["id"] % 2 if output == 10 else 7))
            for row in taken
            for rollout in range(2)
            for output in (9, 10)
        }
        module.tq = queue_of(fields)
        tags = [{}] * len(fields) + [{"is_padding": True}]
        batch = SimpleNamespace(keys=[*fields, "padding_0_0"], tags=tags, partition_id="train")
        assert kind(rows)._compute_advantage(batch, metrics={}) == (batch, {})
        assert rows.statistics().outcome_scores_total == 2 * NUM_ROWS
        assert sorted(row["id"] for row in rows._view.__getitems__([0, 1, 2, 3, 4, 5])) == [0, 2, 4, 6, 8, 10]
    finally:
        rows.close()


def test_a_trainer_of_use_v1_without_the_place_for_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(PPOTrainer=type("PPOTrainer", (), {}))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1.trainer_base", module)

    with pytest.raises(ConfigError, match="AD447 data.asyncdata.outcomes: .* no _compute_advantage"):
        report_in_v1_trainer()


def test_a_row_of_a_mixture_is_reported_to_its_part(tmp_path: Path) -> None:
    for name in ("math", "code"):
        write_rows(tmp_path / f"{name}.jsonl", NUM_ROWS)
    mix = Mix({name: tmp_path / f"{name}.jsonl" for name in ("math", "code")}, quota=4)
    rows = Rows(mix, {}, rows_per_epoch=8, shuffle=True)
    try:
        rows.step(list(range(8)))
        by_source = rows.statistics().by_source
        assert [by_source[name].outcome_scores_total for name in ("code", "math")] == [8, 8]
    finally:
        rows.close()


def test_without_outcomes_a_batch_is_left_alone(tmp_path: Path) -> None:
    rows = Rows(str(write_rows(tmp_path / "rows.jsonl", NUM_ROWS)), None, rows_per_epoch=4, shuffle=True)
    try:
        assert len(rows.step([0, 1])) == 2
        assert rows.statistics().outcome_rows == 0
    finally:
        rows.close()
