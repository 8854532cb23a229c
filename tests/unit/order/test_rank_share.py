"""Which rows or packs a rank owns."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncdata import ConfigError
from asyncdata.order.rank_share import Share


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=f"there is no rank {rank} among {world_size}: ranks are counted from 0"):
        Share(rank=rank, world_size=world_size)


@given(data=st.data(), world_size=st.integers(1, 5), batch_size=st.integers(1, 4), num_rows=st.integers(0, 60))
def test_each_row_of_a_whole_batch_has_one_owner_and_the_rest_all(data, world_size, batch_size, num_rows):
    first = data.draw(st.integers(0, 20))
    shares = [Share(rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]
    stop = first + num_rows
    owners = [share.owns(range(first, stop), first, stop).tolist() for share in shares]

    num_whole = num_rows // (world_size * batch_size) * world_size * batch_size
    for number in range(num_rows):
        found = [rank for rank in range(world_size) if owners[rank][number]]
        expected = [(first + number) % world_size] if number < num_whole else list(range(world_size))
        assert found == expected
