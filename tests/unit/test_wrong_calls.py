"""Calls as a newcomer may write them: each is an error of ours, which says what the call takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRows,
    Cache,
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
    ParquetSource,
    Part,
    PreferenceCollator,
    Ranks,
    SoftPacking,
    XTunerCollator,
)

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"packing": {"max_length": 8}}, r"packing is SoftPacking\(max_length=...\) or another packing; got {"),
        ({"packing": SoftPacking}, "packing is SoftPacking.* got <class"),
        ({"packing": PackedCollator()}, "packing is SoftPacking.* got PackedCollator"),
        ({"packing": 512}, "packing is SoftPacking.* got 512"),
        ({"length_grouping": True}, r"length_grouping is LengthGrouping\(\.\.\.\); got True"),
        ({"length_grouping": LengthGrouping}, "length_grouping is LengthGrouping.* got <class"),
        ({"collate_fn": "pad"}, "collate_fn is a function of a list of samples or packs; got 'pad'"),
        ({"tokenize_fn": 5}, "tokenize_fn is a function of a row, a description .* got int"),
        ({"tokenize_fn": [len]}, "tokenize_fn is a function of a row, a description .* got list"),
        ({"commit": "ack"}, "commit='ack': it must be 'on_delivery' or 'on_ack'"),
    ],
)
def test_a_value_of_another_kind_is_refused_at_once(open_loader, knobs, said):
    with pytest.raises(ConfigError, match=said):
        open_loader(batch_size=2, **knobs)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "the list of a source's paths is empty"),
        (JsonlSource([]), "the list of a source's paths is empty"),
        (JsonlSource(5), "a path or a list of paths; got 5"),  # type: ignore[arg-type]
        (ParquetSource(None), "a path or a list of paths; got None"),  # type: ignore[arg-type]
        (JsonlSource, r"the source is the class JsonlSource; pass an instance"),
        (Path("s3://bucket/a.jsonl"), "AD320 's3:/bucket/a.jsonl' lacks a slash"),
    ],
)
def test_a_source_that_names_nothing_is_refused(source, said):
    with pytest.raises(ConfigError, match=said):
        DataLoader(source, tokenize_fn=len, num_workers=0)
    assert repr(source)


def test_a_path_object_may_be_given_where_settings_have_a_path(tmp_path):
    assert Cache(folder=tmp_path).folder == str(tmp_path)
    assert BadRows(policy="quarantine", path=tmp_path / "bad.jsonl").path == str(tmp_path / "bad.jsonl")


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
