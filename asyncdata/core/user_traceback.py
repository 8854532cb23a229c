"""The traceback of a user's error without our frames, which would only hide it."""

from __future__ import annotations

import os
import traceback

from asyncdata.core.errors import AsyncDataError

__all__ = ("user_traceback",)

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of the whole package
_IMPORTING = ("<frozen importlib", os.path.dirname(os.__file__) + os.sep + "importlib" + os.sep)


def user_traceback(error: BaseException) -> str:
    """``error`` as Python prints it, but for the frames of this package and of the import system; where it is one of
    ours that another one caused, that one.
    """
    while isinstance(error, AsyncDataError) and error.__cause__ is not None:
        error = error.__cause__
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        frames = [frame for frame in each.stack if not frame.filename.startswith((_OURS, *_IMPORTING))]
        each.stack = traceback.StackSummary.from_list(frames)
        each = each.__cause__ or each.__context__
    lines = list(shown.format())
    return "".join(lines if shown.stack else lines[-1:])
