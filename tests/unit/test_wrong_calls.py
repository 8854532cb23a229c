"""Calls as a newcomer may write them: each is an error of ours, which says what the call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    ConfigError,
    DataLoader,
    FixedCollator,
    InvalidGroupError,
    JsonlSource,
    LengthGrouping,
    Mix,
    Outcomes,
    PackedCollator,
    PaddedCollator,
    Part,
    PreferenceCollator,
    Ranks,
    SoftPacking,
    XTunerCollator,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PACKING = SoftPacking(max_length=8)


@pytest.fixture
def open_loader(tmp_path: Path) -> Callable[..., DataLoader]:
    """Opens a loader over a few rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 20)
    defaults: dict[str, Any] = {"tokenize_fn": lambda row: [1, 2], "num_workers": 0, "timeout_s": 240}
    return lambda **knobs: DataLoader(path, **defaults | knobs)


@pytest.mark.parametrize("parts", [["a"], [Part("a")], "a", JsonlSource("a"), None])
def test_a_mix_of_parts_without_names_is_refused(parts):
    with pytest.raises(ConfigError, match=r"^AD470 a Mix takes its parts by name, as in Mix\(\{'math'"):
        Mix(parts)


@pytest.mark.parametrize("collator", [PackedCollator(), XTunerCollator(max_length=8)])
@pytest.mark.parametrize("knobs", [{}, {"length_grouping": LengthGrouping()}])
def test_a_collator_of_packs_needs_a_packing(open_loader, collator, knobs):
    with pytest.raises(ConfigError, match=f"^AD405 {type(collator).__name__} .*packing=SoftPacking"):
        open_loader(collate_fn=collator, batch_size=4, **knobs)


@pytest.mark.parametrize(
    "collator", [PaddedCollator(pad_id=0), FixedCollator(length=8, pad_id=0), PreferenceCollator(pad_id=0)]
)
def test_a_collator_of_samples_takes_no_packs(open_loader, collator):
    with pytest.raises(ConfigError, match=f"^AD405 {type(collator).__name__} .*take PackedCollator"):
        open_loader(collate_fn=collator, batch_size=4, packing=PACKING)


def test_outcomes_of_ranks_are_refused_as_such(open_loader):
    with pytest.raises(ConfigError, match=r"^AD480 outcomes cannot be remembered with Ranks\(world_size=\.\.\.\)"):
        open_loader(outcomes=Outcomes(), ranks=Ranks(world_size=2))
    with pytest.raises(ConfigError, match="^AD480 outcomes cannot be remembered with packs"):
        open_loader(outcomes=Outcomes(), packing=PACKING, batch_size=4)


def test_what_is_no_list_of_groups_or_samples_is_refused(open_loader):
    with open_loader(outcomes=Outcomes()) as loader:
        sample, *_ = loader.get_next_batch(2)
        for wrong, what in [
            (sample, "got Sample; of one sample it is report\\(\\[sample\\]\\)"),
            (None, "got NoneType"),
            ("text", "got str"),
            ({0: sample}, "got dict"),
            ([0, 1], "got one with int"),
            ([[0.5]], "got one with list"),
        ]:
            with pytest.raises(InvalidGroupError, match=f"^AD409 report.* takes a list of groups .*{what}"):
                loader.report(wrong, [1.0])
        with pytest.raises(InvalidGroupError, match=r"^AD482 report\(\) was given 1.0 as scores; it takes one"):
            loader.report([sample], 1.0)  # type: ignore[arg-type]

        assert loader.report([sample], [1.0]) == 1


def test_what_is_acknowledged_is_a_list_of_groups_or_samples(open_loader):
    with open_loader(commit="on_ack") as loader:
        sample, *_ = loader.get_next_batch(2)
        with pytest.raises(InvalidGroupError, match=r"^AD409 ack\(\) .*got Sample"):
            loader.ack(sample)
        loader.ack([sample])
