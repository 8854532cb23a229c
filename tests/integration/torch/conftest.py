"""Loaders of one file of chats, closed after the test."""

from __future__ import annotations

import contextlib

import pytest

from asyncdata import DataLoader


@pytest.fixture
def chats(tmp_path):
    from tests.support.torch_loading import write_chats  # it needs torch

    return write_chats(tmp_path / "rows.jsonl")


@pytest.fixture
def opened():
    """Loaders that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda loader: stack.enter_context(contextlib.closing(loader))


@pytest.fixture
def open_loader(chats, opened):
    from asyncdata.integrations.torch import StatefulDataLoader
    from tests.support.torch_loading import knobs

    def opens(trainer_lookahead=0, **changes):
        inner = DataLoader(chats, **knobs(**changes))
        return opened(StatefulDataLoader(inner, trainer_lookahead=trainer_lookahead))

    return opens
