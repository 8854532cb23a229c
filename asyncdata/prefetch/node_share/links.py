"""Connections between the members of a node's folder: one says when it has published, and its end is its death.

A message has no content: its receiver looks at what it waits for. So a message that finds the socket full may be left
out, because another one is in the socket that was not received yet.
"""

from __future__ import annotations

import math
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import anyio

from asyncdata.prefetch.node_share.folder import place_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from asyncdata.prefetch.node_share.folder import NodeFolder, Place

__all__ = ("Links",)

_WORD = b"."
_MAX_WORDS = 4096


class _Link:
    """A connection to a member.

    :ivar deadline: when the member counts as silent; infinity while nothing is expected of it.
    :ivar is_silent: whether it has let the deadline pass, and was not heard since.
    """

    def __init__(self, member: str, sock: socket.socket, at: mmap.mmap) -> None:
        self.member = member
        self.sock = sock
        self.at = at
        self.deadline = math.inf
        self.is_silent = False
        self.listening: anyio.CancelScope | None = None

    def expect_by(self, deadline: float) -> None:
        """Something must be heard until then, unless that is expected already."""
        if self.deadline == math.inf:
            self.deadline = deadline
            if self.listening is not None:
                self.listening.deadline = deadline

    def heard(self, *, is_silent: bool) -> None:
        """A word has come, or the deadline. Nothing more is expected."""
        self.is_silent, self.deadline = is_silent, math.inf
        if self.listening is not None:
            self.listening.deadline = math.inf

    def tell(self) -> None:
        """Send a word."""
        with suppress(OSError):  # it is full, or the member is gone, which its own task finds out
            self.sock.send(_WORD)

    def close(self) -> None:
        self.sock.close()
        self.at.close()


class Links:
    """The connections to all other members. All methods are called in the service's thread.

    :param on_word: called with a member's name when it may have published, has left, or has been silent for too long.
    :param patience_s: seconds for which a member may be silent while a reply is expected of it.
    """

    def __init__(self, folder: NodeFolder, on_word: Callable[[str], object], patience_s: float) -> None:
        self._folder = folder
        self._on_word = on_word
        self._patience_s = patience_s
        self._links: list[_Link] = []  # two to a member, if it and this one joined at the same time
        self._group: TaskGroup | None = None
        self._listener = _socket()
        try:
            self._listener.bind(f"{folder.own}/s")
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise

    async def run(self, connected: Callable[[], object]) -> None:
        """Connect to all members that are there, call ``connected``, and listen to them until cancelled."""
        with ExitStack() as closing:
            closing.callback(self._close)
            members = self._folder.others()
            async with anyio.create_task_group() as self._group:
                for member in members:
                    self._connect(member)
                connected()
                while True:
                    await anyio.wait_readable(self._listener)
                    self._accept()

    def _close(self) -> None:
        self._listener.close()
        while self._links:
            self._links.pop().close()

    def _connect(self, member: str) -> None:
        sock = _socket()
        try:
            sock.bind(f"{self._folder.own}/{member}")  # this name tells the other who we are
            sock.connect(f"{self._folder.path}/{member}/s")
            self._add(member, sock)
        except OSError:  # it is dead; or it is just joining, and will connect to us
            sock.close()

    def _accept(self) -> None:
        """Accept those who have connected."""
        with suppress(BlockingIOError):
            while True:
                sock, address = self._listener.accept()
                sock.setblocking(False)
                try:
                    self._add(address.split("/")[-2], sock)
                except (OSError, IndexError):  # it is gone already
                    sock.close()

    def _add(self, member: str, sock: socket.socket) -> None:
        link = _Link(member, sock, self._folder.reached_by(member))
        assert self._group is not None, "run() has not begun"
        self._links.append(link)
        self._group.start_soon(self._listen, link)
        link.tell()  # what was published before the other could hear it

    async def _listen(self, link: _Link) -> None:
        """Until the member has left or died."""
        while await self._hear(link):
            self._on_word(link.member)
        self._links.remove(link)
        link.close()
        self._on_word(link.member)

    async def _hear(self, link: _Link) -> bool:
        """Wait for a word or for the deadline; return whether the member is still there."""
        with anyio.CancelScope(deadline=link.deadline) as link.listening:
            await anyio.wait_readable(link.sock)
        for same in self._to(link.member):
            same.heard(is_silent=link.listening.cancelled_caught)
        try:
            return link.is_silent or bool(link.sock.recv(_MAX_WORDS))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _to(self, member: str) -> list[_Link]:
        return [link for link in self._links if link.member == member]

    @property
    def num_members(self) -> int:
        """Other members that are here now."""
        return len({link.member for link in self._links})

    def awaits(self, member: str) -> bool:
        """Expect something of ``member`` from now on; return False if it is gone, or silent."""
        if not self._to(member):
            self._accept()  # it connects before it claims anything
        link = next(iter(self._to(member)), None)
        if link is None or link.is_silent:
            return False

        link.expect_by(anyio.current_time() + self._patience_s)
        return True

    def tell(self) -> None:
        """Tell all members to look again at what they wait for."""
        for link in self._links:
            link.tell()

    def reached(self) -> Place:
        """The place that all other members have reached; there must be one."""
        return min(place_of(link.at) for link in self._links)


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock
