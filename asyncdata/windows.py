"""Opens windows: what a producer asks for the next rows of the order, whatever kind of source they come from."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncdata.executors.base import Crashed, error_of
from asyncdata.window import Window
from asyncdata.wire import Scanned

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from asyncdata.executors.base import Executor
    from asyncdata.order import Order
    from asyncdata.sources.base import Blocks
    from asyncdata.window import OpenWindow
    from asyncdata.wire import Reply, Scan

__all__ = ("BlockWindows", "Windows")

_MAX_TRIES = 5


class Windows(Protocol):
    """Opens windows, in the order in which they are wanted.

    :ivar num_blank: blank lines passed over so far.
    """

    num_blank: int

    def restart(self) -> None:
        """What was opened before is given up, and its slots are free."""
        ...

    def open(self, epoch: int, number: int, on_ready: Callable[[], object]) -> OpenWindow | None:
        """Begin to read window ``number`` of ``epoch``; None where there is no room yet.

        :param on_ready: called when it is ready, or has a fault.
        :raises SourceChangedError: if the data is not what it was.
        """
        ...


class BlockWindows:
    """Windows of blocks, which workers scan into slots.

    :param stride: bytes of a slot that one block takes.
    """

    def __init__(self, source: Blocks, order: Order, executor: Executor, stride: int) -> None:
        self.num_blank = 0
        self._source = source
        self._order = order
        self._executor = executor
        self._stride = stride

    def restart(self) -> None:
        """As the protocol says."""

    def open(self, epoch: int, number: int, on_ready: Callable[[], object]) -> Window | None:
        """As the protocol says."""
        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        slot = self._executor.slots.hold()
        if slot is None:
            return None

        blocks = self._source.blocks(self._order.blocks(epoch, number))
        window = Window(self._source, blocks, slot, self._stride, partial(self._order.rows, epoch, number))
        window.is_last = number + 1 == self._order.num_windows
        for part, scan in enumerate(window.scans()):
            self._submit(scan, partial(self._on_scanned, window, part, on_ready), _MAX_TRIES)
        return window

    def _submit(self, scan: Scan, on_scanned: Callable[[Any], object], num_tries: int) -> None:
        def on_reply(reply: Reply | Crashed) -> None:
            if isinstance(reply, Crashed) and num_tries > 1:  # no row is to blame: workers are killed from outside
                self._submit(scan, on_scanned, num_tries - 1)
            else:
                on_scanned(reply)

        self._executor.submit(scan, on_reply)

    def _on_scanned(self, window: Window, part: int, on_ready: Callable[[], object], reply: Reply | Crashed) -> None:
        if not isinstance(reply, Scanned):
            window.fault = error_of(reply)
            on_ready()
        elif window.add(part, reply):
            self.num_blank += window.num_blank
            on_ready()
