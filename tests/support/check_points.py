"""A KeyboardInterrupt at exactly the n-th instant of a call at which CPython could raise one, in code of the library.

CPython looks for signals when a Python function begins, at the end of a loop's turn, and when a function written in C,
or any function called with ``*args``, has returned. A tracing function sees each of these instants pass, and raises.
"""

import _weakrefset
import dis
import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import asyncdata

_FOLDER = asyncdata.__path__[0]
_WEAK = frozenset({_weakrefset.__file__, weakref.__file__})


class _Tracer:
    """Counts the instants, and raises at one of them."""

    def __init__(self, point: int) -> None:
        self.left = point
        self._last: dict[FrameType, str] = {}
        self._callers: set[FrameType | None] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        caller = frame.f_back
        self._callers.add(caller)
        if _is_ours(frame):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._in_frame

        if caller is not None and _is_ours(caller) and not _is_finalizer(frame):
            self._pass()
        return None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            before = self._last.get(frame, "RESUME")  # the call itself was that
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            is_from_python = frame in self._callers
            self._callers.discard(frame)
            has_returned = before.startswith("CALL") and not is_from_python
            if has_returned or before in {"RESUME", "JUMP_BACKWARD", "CALL_FUNCTION_EX"}:
                self._pass()
        return self._in_frame

    def _pass(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_FOLDER)


def _is_finalizer(frame: FrameType) -> bool:
    """Whether it runs in a finalizer, which Python lets no exception out of."""
    code = frame.f_code
    return code.co_name == "__del__" or code.co_filename in _WEAK


def interrupted_at(point: int, call: Callable[[], Any]) -> Any:
    """The result of ``call``, if it has no more than ``point`` such instants.

    :raises KeyboardInterrupt: if it has.
    """
    before = sys.gettrace()
    gc.disable()  # finalizers of what other tests left behind are not in question
    sys.settrace(_Tracer(point))
    try:
        return call()
    finally:
        sys.settrace(before)
        gc.enable()
