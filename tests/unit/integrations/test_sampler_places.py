"""SamplerPlaces: the shuffle of torch's DistributedSampler, undone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DistributedSampler  # noqa: E402

from asyncdata.integrations.torch.sampler_places import SamplerPlaces  # noqa: E402


def indices(length: int, ranks: int = 1, rank: int = 0, **settings: Any) -> list[int]:
    """What torch's own sampler gives to a rank."""
    return list(DistributedSampler(range(length), ranks, rank, drop_last=True, **settings))  # type: ignore[arg-type]


def places_of(places: SamplerPlaces, wanted: list[int], batch_size: int) -> list[int]:
    found: list[int] = []
    for start in range(0, len(wanted), batch_size):
        batch = places.of(wanted[start : start + batch_size])
        assert batch is not None
        places.took(batch)
        found += batch
    return found


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (40, 1), (40, 3), (101, 8)])
def test_each_rank_has_every_nth_place(length: int, ranks: int, batch_size: int) -> None:
    for rank in range(ranks):
        found = places_of(SamplerPlaces(length), indices(length, ranks, rank), batch_size)

        assert found == list(range(length))[rank : length // ranks * ranks : ranks]


@pytest.mark.parametrize("taken", [0, 1, 2, 7])
def test_a_restored_rank_demands_the_next_place(taken: int) -> None:
    wanted = indices(40, 2, 1)
    before, after = SamplerPlaces(40), SamplerPlaces(40)
    places_of(before, wanted[:taken], 1)

    after.load_state_dict(before.state_dict())

    if taken:
        assert after.of(wanted[:4]) is None, "these were taken before"
    assert after.of(wanted[taken + 1 :]) is None, "one is skipped"
    assert places_of(after, wanted[taken:], 4) == list(range(1, 40, 2))[taken:]


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(indices(40, seed=1)[:4], id="another seed"),
        pytest.param([0, 1, 2, 3], id="no shuffle"),
        pytest.param(indices(40)[3::-1], id="backwards"),
        pytest.param(indices(40)[4:8], id="not from the start"),
        pytest.param(indices(40)[:1] * 2, id="one twice"),
        pytest.param([*indices(40)[:2], *indices(40)[3:5]], id="a gap"),
    ],
)
def test_indices_of_another_sampler_have_no_places_and_nothing_is_taken(wanted: list[int]) -> None:
    places = SamplerPlaces(40)

    assert places.of(wanted) is None
    assert places_of(places, indices(40), 4) == list(range(40))


def test_the_first_index_alone_is_judged_by_the_second() -> None:
    places = SamplerPlaces(40)
    wanted = indices(40)[8:10]

    places_of(places, wanted[:1], 1)

    assert places.of(wanted[1:]) is None, "a first place of 8 is that of one of nine ranks or more"


def test_another_number_of_ranks_has_no_places_after_a_restore() -> None:
    before, after = SamplerPlaces(40), SamplerPlaces(40)
    places_of(before, indices(40, 2, 0)[:8], 4)
    after.load_state_dict(before.state_dict())

    assert after.of(indices(40)[8:12]) is None
    assert after.of(indices(40, 4, 0)[2:6]) is None


def test_a_second_epoch_has_no_places() -> None:
    places = SamplerPlaces(40)
    places_of(places, indices(40), 4)
    sampler = DistributedSampler(range(40), 1, 0, drop_last=True)  # type: ignore[arg-type, var-annotated]
    sampler.set_epoch(1)

    assert places.of(list(sampler)[:1]) is None
    assert places.of(indices(40)[:1]) is None


def test_an_index_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError, match=r"index 40 is not in 0\.\.39"):
        SamplerPlaces(40).of([40])
