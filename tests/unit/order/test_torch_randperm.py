"""torch's permutations without torch: pinned, and compared with torch where it is installed."""

from __future__ import annotations

import pytest

from asyncdata import ConfigError
from asyncdata.order.torch_randperm import TorchGenerator


def test_ten_numbers_are_permuted_so_for_ever() -> None:
    generator = TorchGenerator(42)

    assert generator.randperm(10).tolist() == [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]
    assert generator.randperm(5).tolist() == [3, 0, 1, 2, 4]


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 + 5, -3, 2**63 - 1])
def test_the_permutations_are_torchs_one_after_the_other(seed: int) -> None:
    torch = pytest.importorskip("torch")
    theirs, ours = torch.Generator().manual_seed(seed), TorchGenerator(seed)

    for size in (0, 1, 2, 3, 10, 1000, 12345, 0, 7):
        assert ours.randperm(size).tolist() == torch.randperm(size, generator=theirs).tolist()


@pytest.mark.parametrize("size", [-1, 2**32])
def test_sizes_that_torch_permutes_otherwise_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"not for {size}"):
        TorchGenerator(0).randperm(size)
