"""The connections of a node's members: words are heard, and an end is noticed, however they have joined."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncdata.prefetch.node_share.folder import NodeFolder
from asyncdata.prefetch.node_share.links import Links
from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

JOB = "a" * 16


class Member:
    """A member, and whose words it has heard.

    :param patience_s: see ``Links``.
    """

    def __init__(self, root: str, patience_s: float = NEVER_S) -> None:
        self.folder = NodeFolder(root, JOB)
        self.words: list[str] = []
        self._heard = anyio.Event()
        self.links = Links(self.folder, self._on_word, patience_s)
        self.connected = anyio.Event()
        self._scope = anyio.CancelScope()

    def _on_word(self, member: str) -> None:
        self.words.append(member)
        self._heard.set()
        self._heard = anyio.Event()

    async def run(self) -> None:
        with self._scope:
            await self.links.run(self.connected.set)

    def end(self) -> None:
        self._scope.cancel()

    async def until_connected(self, number: int) -> None:
        with anyio.fail_after(NEVER_S):
            await self.connected.wait()
            while self.links.num_members < number:
                await self._heard.wait()

    async def until_heard(self, member: str) -> None:
        """From now on."""
        self.words.clear()
        with anyio.fail_after(NEVER_S):
            while member not in self.words:
                await self._heard.wait()


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ad-") as root:
        yield root
        assert os.listdir(root) == []


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    if request.param == "trio":
        pytest.importorskip("trio", reason="trio is not installed")
    return str(request.param)


def joined(stack: ExitStack, root: str, patience_s: float = NEVER_S) -> Member:
    member = Member(root, patience_s)
    stack.callback(member.folder.leave)
    return member


def start(group: TaskGroup, *members: Member) -> None:
    for member in members:
        group.start_soon(member.run)


@pytest.mark.anyio
@pytest.mark.parametrize("are_together", [True, False], ids=["together", "one after the other"])
async def test_words_and_the_end_of_a_member_are_noticed(root: str, are_together: bool) -> None:
    with ExitStack() as stack:
        async with anyio.create_task_group() as group:
            first = joined(stack, root)
            if not are_together:
                start(group, first)
                await first.connected.wait()
            second = joined(stack, root)
            start(group, second, *([first] if are_together else []))
            await second.until_connected(1)
            await first.until_connected(1)
            assert first.links.awaits(second.folder.member)
            assert second.links.awaits(first.folder.member)

            second.links.tell()
            await first.until_heard(second.folder.member)

            second.end()
            while first.links.num_members:
                await first.until_heard(second.folder.member)
            assert not first.links.awaits(second.folder.member)
            first.end()


@pytest.mark.anyio
async def test_a_member_that_is_silent_for_too_long_is_not_awaited_until_it_is_heard(root: str) -> None:
    with ExitStack() as stack:
        async with anyio.create_task_group() as group:
            first, second = joined(stack, root, patience_s=0.01), joined(stack, root)
            start(group, first, second)
            await first.until_connected(1)
            while first.links.awaits(second.folder.member):
                await first.until_heard(second.folder.member)

            second.links.tell()
            await first.until_heard(second.folder.member)

            assert first.links.awaits(second.folder.member)
            first.end()
            second.end()


@pytest.mark.anyio
async def test_words_that_are_not_heard_do_not_stop_who_says_them(root: str) -> None:
    with ExitStack() as stack:
        async with anyio.create_task_group() as group:
            first, second = joined(stack, root), joined(stack, root)
            start(group, first, second)
            await first.until_connected(1)
            await second.until_connected(1)

            for _ in range(50_000):  # more than a socket holds
                second.links.tell()

            await first.until_heard(second.folder.member)
            first.end()
            second.end()
