"""Policies: which rows are left out, by their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncdata import ConfigError, Outcomes, OutcomeTable, PassRate
from asyncdata.delivery.outcomes.policy import policy_of


def table(*rows: tuple[int, float, float, int]) -> OutcomeTable:
    """Of (num_scores, mean, last_mean, last_epoch)."""
    counts, means, last_means, epochs = (np.array(column) for column in zip(*rows, strict=True))
    return OutcomeTable(np.arange(len(rows), dtype=np.uint64), counts, means, last_means, epochs)


def left_out(policy: PassRate, outcomes: OutcomeTable, epoch: int = 1) -> list[int]:
    return np.flatnonzero(policy(outcomes, epoch)).tolist()


MEANS = table(*((8, mean, mean, 0) for mean in (0.0, 0.1, 0.5, 0.9, 1.0)))


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (PassRate(), []),
        (PassRate(drop_above=0.9), [3, 4]),
        (PassRate(drop_below=0.1), [0]),
        (PassRate(0.1, 0.9), [0, 3, 4]),
        (PassRate(drop_above=0.9, after=9), []),
    ],
)
def test_a_pass_rate_keeps_the_rows_between_its_limits(policy, wanted):
    assert left_out(policy, MEANS) == wanted


def test_a_row_comes_again_some_epochs_after_its_last_scores():
    outcomes = table((8, 1.0, 1.0, 0), (8, 1.0, 1.0, 3))

    found = {epoch: left_out(PassRate(drop_above=0.9, revisit_every=4), outcomes, epoch) for epoch in range(1, 8)}
    assert found == {1: [0, 1], 2: [0, 1], 3: [0, 1], 4: [1], 5: [1], 6: [1], 7: []}


def test_the_mean_is_that_of_the_last_epoch_or_of_all_scores():
    outcomes = table((16, 0.5, 1.0, 1), (16, 1.0, 0.5, 1))

    assert left_out(PassRate(drop_above=0.9), outcomes, 2) == [0]
    assert left_out(PassRate(drop_above=0.9, over="all"), outcomes, 2) == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"drop_below": 0.9, "drop_above": 0.1},
        {"drop_below": 0.5, "drop_above": 0.5},
        {"drop_above": float("nan")},
        {"after": 0},
        {"revisit_every": 0},
        {"over": "some"},
    ],
)
def test_a_pass_rate_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError, match="PassRate"):
        PassRate(**settings)


def below_ten(outcomes: OutcomeTable, epoch: int) -> Any:
    return outcomes.num_scores < 10 * epoch


def as_numbers(outcomes: OutcomeTable, epoch: int) -> Any:
    return outcomes.num_scores


def fails(outcomes: OutcomeTable, epoch: int) -> Any:
    raise KeyError("mean")


NO_FUNCTION = 3


def test_a_policy_may_be_a_function_by_its_import_path():
    policy = policy_of(Outcomes(policy=f"{__name__}:below_ten"))

    assert policy is not None
    assert policy(MEANS, 1).tolist() == [True] * 5


@pytest.mark.parametrize(
    ("name", "code"), [("as_numbers", "AD481"), ("fails", "AD481"), ("NO_FUNCTION", "AD420"), ("absent", "AD420")]
)
def test_a_function_that_is_no_policy_is_refused_by_its_name(name, code):
    with pytest.raises(ConfigError, match=f"{code}.*{name}"):
        policy = policy_of(Outcomes(policy=f"{__name__}:{name}"))
        assert policy is not None
        policy(MEANS, 1)


def test_outcomes_may_be_settings_as_in_a_file():
    import msgspec

    found = msgspec.convert({"path": "outcomes", "policy": {"drop_above": 0.9}}, Outcomes)
    assert found == Outcomes(path="outcomes", policy=PassRate(drop_above=0.9))


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_can_be_none_is_refused(path):
    with pytest.raises(ConfigError, match="path"):
        Outcomes(path=path)
