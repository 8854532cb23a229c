"""Policies: which rows are left out, by their scores."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from asyncdata import Outcomes, OutcomeTable, PassRate
from asyncdata.errors import ConfigError
from tests.support.parts import policy_of


def table(*rows):
    """Of (num_scores, mean, last_mean, last_epoch)."""
    counts, means, last_means, epochs = (np.array(column) for column in zip(*rows, strict=True))
    return OutcomeTable(np.arange(len(rows), dtype=np.uint64), counts, means, last_means, epochs)


def left_out(policy, outcomes, epoch=1):
    return np.flatnonzero(policy(outcomes, epoch)).tolist()


MEANS = table(*((8, mean, mean, 0) for mean in (0.0, 0.1, 0.5, 0.9, 1.0)))


MIXED = table((16, 0.5, 1.0, 1), (16, 1.0, 0.5, 1))


@pytest.mark.parametrize(
    ("policy", "outcomes", "wanted"),
    [
        (PassRate(drop_above=0.9), MEANS, [3, 4]),
        (PassRate(drop_below=0.1), MEANS, [0]),
        (PassRate(0.1, 0.9), MEANS, [0, 3, 4]),
        (PassRate(drop_above=0.9, after=8), MEANS, [3, 4]),
        (PassRate(drop_above=0.9, after=9), MEANS, []),
        pytest.param(PassRate(drop_above=0.9), MIXED, [0], id="the mean of the last epoch"),
        pytest.param(PassRate(drop_above=0.9, over="all"), MIXED, [1], id="the mean of all scores"),
    ],
)
def test_a_pass_rate_keeps_the_rows_between_its_limits(policy, outcomes, wanted):
    assert left_out(policy, outcomes) == wanted


def test_a_row_is_left_out_that_was_on_one_side_of_the_limits_in_each_of_the_last_epochs():
    nan = float("nan")
    rows = table(*((3, 1.0, loss, 2) for loss in (0.1, 0.1, 0.1, 4.0, 4.0, 0.1)))
    earlier = np.array([[0.1, 0.1], [0.1, 2.0], [0.1, nan], [5.0, 4.0], [5.0, 0.1], [4.0, 5.0]])
    outcomes = rows._replace(earlier=tuple(earlier.T))

    found = {epochs: left_out(PassRate(0.2, 4.0, epochs=epochs), outcomes, 3) for epochs in (1, 2, 3)}
    assert found == {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 4], 3: [0, 3]}
    low, high = PassRate(0.2, 4.0, epochs=3).sides(outcomes, 3)
    assert (np.flatnonzero(low).tolist(), np.flatnonzero(high).tolist()) == ([0], [3])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PassRate, {}, "PassRate: without limits it leaves no row out"),
        (PassRate, {"drop_below": 0.9, "drop_above": 0.1}, "PassRate"),
        (PassRate, {"drop_below": 0.5, "drop_above": 0.5}, "PassRate"),
        (PassRate, {"drop_above": float("nan")}, "PassRate"), (PassRate, {"after": 0}, "PassRate"),
        (PassRate, {"revisit_every": 0}, "PassRate"), (PassRate, {"over": "some"}, "PassRate"),
        (PassRate, {"epochs": 65}, "PassRate"),
        (PassRate, {"drop_above": 1, "epochs": 2, "over": "all"}, "PassRate: epochs=2 .* leave one out"),
        (Outcomes, {"path": ""}, "path"), (Outcomes, {"path": "a\0b"}, "path"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def as_numbers(outcomes, epoch):
    return outcomes.num_scores


def fails(outcomes, epoch):
    raise KeyError("mean")


NO_FUNCTION = 3


@pytest.mark.parametrize(
    ("name", "code"), [("as_numbers", "AD481"), ("fails", "AD481"), ("NO_FUNCTION", "AD420"), ("absent", "AD420")]
)
def test_a_function_that_is_no_policy_is_refused_by_its_name(name, code):
    with pytest.raises(ConfigError, match=f"{code}.*{name}"):
        policy = policy_of(Outcomes(policy=f"{__name__}:{name}"))
        assert policy is not None
        policy(MEANS, 1)


def test_outcomes_may_be_settings_as_in_a_file():
    found = msgspec.convert({"policy": {"drop_above": 0.9}}, Outcomes)
    assert found == Outcomes(policy=PassRate(drop_above=0.9))
