"""The rank of a worker of Ray Train."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from asyncdata import Ranks
from asyncdata.integrations.torch.ranks import ranks


def train(context: Any) -> types.SimpleNamespace:
    """As the module ``ray.train``, in a process where ``get_context()`` gives this."""

    def get_context() -> Any:
        if isinstance(context, Exception):
            raise context
        return context

    return types.SimpleNamespace(get_context=get_context)


def context(rank: int | None, world_size: int | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world_size)


@pytest.fixture(autouse=True)
def no_other_ranks(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")


def test_a_worker_of_ray_train_has_its_rank(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", train(context(2, 4)))

    assert ranks(gradient_accumulation=3) == Ranks(rank=2, world_size=4, gradient_accumulation=3)


@pytest.mark.parametrize("found", [RuntimeError("outside of a training function"), context(None, None)])
def test_a_process_that_is_no_worker_has_that_of_its_environment(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "ray.train", train(found))

    assert ranks() == Ranks(rank=5, world_size=6)


def test_torch_distributed_comes_first(monkeypatch):
    distributed = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda _: 1, get_world_size=lambda _: 3
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setitem(sys.modules, "ray.train", train(context(2, 4)))

    assert ranks() == Ranks(rank=1, world_size=3)
