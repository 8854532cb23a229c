"""OrderSampler: the order of SkyRL's SFT, and its state."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from asyncdata import SnapshotError, SnapshotMismatchError
from asyncdata.integrations.skyrl_sft import OrderSampler

ROWS = 2500  # more than are computed together


def sampler(number: int = ROWS, seed: int = 1) -> OrderSampler:
    return OrderSampler(range(number), seed=seed)


def test_each_epoch_has_each_index_once_in_an_order_of_its_own() -> None:
    ours = sampler()
    epochs = [list(ours) for _ in range(3)]

    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(sampler(seed=2)) != epochs[0]


def test_the_order_is_pinned() -> None:
    """Another one would continue a run that was begun with an earlier release with other rows."""
    ours = sampler(10)

    assert [list(ours), list(ours)] == [[5, 8, 7, 3, 9, 1, 0, 6, 2, 4], [4, 5, 0, 9, 3, 1, 7, 6, 2, 8]]


@pytest.mark.parametrize("number", [0, 1, 3, 1024, 1025, ROWS - 1, ROWS, ROWS + 7])
def test_a_restored_sampler_continues_with_exactly_the_next_index(number: int) -> None:
    def endless(ours: OrderSampler) -> Any:
        while True:
            yield from ours

    first, whole = sampler(), list(islice(endless(sampler()), 3 * ROWS))
    taken = list(islice(endless(first), number))
    state = json.loads(json.dumps(first.state_dict()))

    second = sampler()
    second.load_state_dict(state)

    assert taken + list(islice(endless(second), 3 * ROWS - number)) == whole


def test_a_state_at_the_end_of_an_epoch_begins_the_next_one() -> None:
    first = sampler(4)
    list(islice(first, 4))

    second = sampler(4)
    second.load_state_dict(first.state_dict())

    assert len(list(second)) == 4, "an empty epoch would count as one"


def test_the_lengths_that_skyrl_passes_for_several_data_sets_are_accepted() -> None:
    assert sorted(OrderSampler(range(5), lengths=[2, 3], seed=1)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampler(ROWS + 1), "AD603 the checkpoint has num_rows=2501, and the sampler num_rows=2500: restore the data"),
        (sampler(seed=2), "AD603 the checkpoint has seed=2, and the sampler seed=1: restore the seed"),
    ],
)
def test_a_state_of_other_data_or_another_seed_is_refused(other: OrderSampler, message: str) -> None:
    with pytest.raises(SnapshotMismatchError, match=message):
        sampler().load_state_dict(other.state_dict())


def test_the_state_of_skyrls_own_sampler_is_refused() -> None:
    with pytest.raises(SnapshotError, match="AD602 this is the state of another sampler: it has no 'epoch'"):
        sampler().load_state_dict({"position": 3})
