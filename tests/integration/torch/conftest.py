"""Loaders of one file of chats, closed after the test."""

import contextlib

import pytest

from asyncdata import DataLoader

OF_TORCH = ("device", "follows_set_epoch", "pin_memory", "trainer_lookahead")
"""Arguments of the StatefulDataLoader. All others are those of the DataLoader in it."""


@pytest.fixture
def chats(tmp_path):
    from tests.support.adapters import write_chats  # it needs torch

    return write_chats(tmp_path / "rows.jsonl")


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield lambda loader: stack.enter_context(contextlib.closing(loader))


@pytest.fixture
def open_loader(chats, opened):
    from asyncdata.integrations.torch import StatefulDataLoader
    from tests.support.adapters import knobs

    def opens(**given):
        ours = {name: given.pop(name) for name in OF_TORCH if name in given}
        return opened(StatefulDataLoader(opened(DataLoader(chats, **knobs(**given))), **ours))

    return opens
