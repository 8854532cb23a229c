"""What every class of settings says of names and values that it does not take, and what it costs."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import msgspec
import pytest

import asyncdata
from asyncdata import (
    BadRows,
    Cache,
    ChatTokenizeFn,
    ConfigError,
    JsonlSource,
    Limits,
    Mix,
    Outcomes,
    PackedCollator,
    ParquetSource,
    Part,
    PassRate,
    Ranks,
    RayExecutor,
    Replay,
    RowShuffle,
    Shuffle,
    SoftPacking,
    Telemetry,
    XTunerTokenizeFn,
)
from asyncdata.core.settings import Settings

OF_SAMPLES = {"Document", "OutcomeTable", "Position", "Sample", "SourceLocation", "SourceStatistics", "Statistics"}
"""What the library makes, many times, and no user does."""


def kinds() -> list[type]:
    """The classes that users make, but for loaders and errors."""
    found = [getattr(asyncdata, name) for name in asyncdata.__all__]
    classes = [one for one in found if isinstance(one, type) and inspect.signature(one).parameters]
    others = (BaseException, str, asyncdata.DataLoader, asyncdata.AsyncDataLoader, asyncdata.TokenizeFn)
    return [one for one in classes if not issubclass(one, others) and one.__name__ not in OF_SAMPLES]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_a_name_that_there_is_not_is_refused_with_the_class_and_all_that_it_takes(kind):
    known = ", ".join(sorted(inspect.signature(kind).parameters))

    with pytest.raises(ConfigError) as refused:
        kind(zzz=1)

    assert str(refused.value) == f"there is no setting 'zzz' of {kind.__name__}; there are {known}"


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: Shuffle(window_block=3), "window_blocks"),
        (lambda: RowShuffle(methods="keyed"), "method"),
        (lambda: Limits(max_worker=1), "max_workers"),
        (lambda: Cache(token=True), "tokens"),
        (lambda: Ranks(worldsize=2), "world_size"),
        (lambda: Outcomes(polcy=None), "policy"),
        (lambda: PassRate(drop_over=0.9), "drop_above"),
        (lambda: SoftPacking(max_len=8), "max_length"),
        (lambda: PackedCollator(max_len=8), "max_length"),
        (lambda: ChatTokenizeFn("a", max_len=8), "max_length"),
        (lambda: XTunerTokenizeFn("a:b", argument={}), "arguments"),
        (lambda: JsonlSource("a", storage_option={}), "storage_options"),
        (lambda: ParquetSource("a", column=["b"]), "columns"),
        (lambda: RayExecutor(num_worker=2), "num_workers"),
        (lambda: Telemetry(folders="a"), "folder"),
        (lambda: Part("a", weights=2), "weight"),
        (lambda: Mix({"a": "a"}, temprature=2), "temperature"),
        (lambda: Replay("a", PassRate(0.1), weights=1), "weight"),
    ],
)
def test_the_nearest_name_is_given(make, meant):
    with pytest.raises(ConfigError, match=rf"did you mean '{meant}'\? There are "):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Shuffle(64), "Shuffle takes its settings each by its name, as in name=value; they are enabled, "),
        (lambda: ChatTokenizeFn("a", "b"), r"at most 1 without a name \(tokenizer\)"),
        (lambda: ChatTokenizeFn("a", tokenizer="b"), "ChatTokenizeFn was given tokenizer twice"),
        (lambda: Mix({"a": "a"}, 3), r"Mix takes its settings at most 1 without a name \(parts\)"),
    ],
)
def test_settings_without_a_name_are_refused_by_name(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_settings_that_are_missing_are_a_type_error_that_names_them():
    with pytest.raises(TypeError, match=r"^SoftPacking needs max_length; its settings are max_length, window_samples"):
        SoftPacking()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Part needs source; "):
        Part()  # type: ignore[call-arg]


def test_a_few_values_are_named_where_another_one_is_refused():
    with pytest.raises(ConfigError, match=r"^BadRows: policy='drop': it must be 'raise', 'skip' or 'quarantine'$"):
        BadRows(policy="drop")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^RowShuffle: part='test': it must be 'train', 'eval' or None$"):
        RowShuffle(part="test")  # type: ignore[arg-type]


class OfTests(Settings, frozen=True):
    """Settings whose own checks raise a TypeError."""

    number: Any = 1

    def __post_init__(self) -> None:
        self.number + 1


def test_an_error_of_its_own_checks_is_left_as_it_is():
    with pytest.raises(TypeError, match="concatenate"):
        OfTests("a")


def test_it_is_copied_pickled_replaced_shown_and_decoded_as_any_struct():
    shuffle = Shuffle(window_blocks=3)

    assert copy.copy(shuffle) == copy.deepcopy(shuffle) == shuffle
    assert pickle.loads(pickle.dumps(shuffle)) == shuffle  # noqa: S301 - our own
    assert msgspec.structs.replace(shuffle, window_blocks=4) == Shuffle(window_blocks=4)
    assert msgspec.json.decode(msgspec.json.encode(shuffle), type=Shuffle) == shuffle
    assert repr(shuffle) == "Shuffle(enabled=True, block_bytes=32768, window_blocks=3)"
    assert list(inspect.signature(Shuffle).parameters) == ["enabled", "block_bytes", "window_blocks"]


@pytest.mark.parametrize("name", sorted(OF_SAMPLES))
def test_what_is_made_for_each_sample_costs_no_further_call(name):
    assert not issubclass(getattr(asyncdata, name), Settings)
