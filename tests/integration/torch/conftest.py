"""Loaders of one file of chats, closed after the test."""

from __future__ import annotations

import contextlib

import pytest

from asyncdata import DataLoader


@pytest.fixture
def chats(jsonl_file):
    """Rows of many lengths; every seventh is too long, and is dropped."""
    from tests.support.torch_loading import chat  # it needs torch

    return jsonl_file(
        [{"number": number, "messages": chat(number, 1 + number % 7 * 4 ** (number % 7 // 6))} for number in range(150)]
    )


@pytest.fixture
def opened():
    """Loaders that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda loader: stack.enter_context(contextlib.closing(loader))


@pytest.fixture
def open_loader(chats, opened):
    from asyncdata.integrations.torch import StatefulDataLoader
    from tests.support.torch_loading import settings

    def opens(trainer_lookahead=0, **changes):
        inner = DataLoader(chats, **settings(**changes))
        return opened(StatefulDataLoader(inner, trainer_lookahead=trainer_lookahead))

    return opens
