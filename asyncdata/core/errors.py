"""Every error the library raises, in one tree.

::

    AsyncDataError
    ├── ConfigError (ValueError)        a setting that cannot work
    ├── EndOfData                       ``epochs=k`` are used up
    ├── LoaderClosedError               used after ``close()``
    ├── LoaderForkedError               used in a forked child
    ├── PrefetchTimeoutError (TimeoutError)
    ├── FilterError                     the filter raised, or returned a wrong value
    ├── InvalidGroupError (ValueError)  ``add_samples`` refused a group; none was added
    ├── SourceError                     a file that cannot be read as it should
    │   ├── SourceChangedError          ... is not the file it was
    │   └── NoSamplesError              ... yields nothing
    ├── BadRowError                     one row is bad: where, why, and the way out
    ├── TooManyBadRowsError             more bad rows than the budget allows
    ├── QuarantineError                 a bad row cannot be written down
    ├── WorkerError                     workers cannot be started or kept alive
    └── SnapshotError                   a snapshot that cannot be written or read
        ├── SnapshotVersionError        ... of a schema this version does not know
        └── SnapshotMismatchError       ... of other data, function, seed or order

Each message says what, where and the way out; the facts are attributes as well.

And events, by structlog where the application has configured it, and else by ``logging``. structlog without
configuration prints everything to stdout, between the lines of the trainer's own output. ``logging`` without
configuration sends only warnings, to stderr. A process may have several loaders. An event belongs to the loader for
which the code runs that logs it: the loader's threads and tasks know it by a context variable, and objects that the
trainer's threads call have a logger of their own.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdata.core.messages import Overflow


_MAX_MESSAGE, _MAX_REASONS = 20_000, 10
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of the whole package
_IMPORTING = ("<frozen importlib", os.path.dirname(os.__file__) + os.sep + "importlib" + os.sep)

_HIDDEN = "[redacted]"
_SIGNS = tuple("signature= credential= token= sig= key= keyid= password= secret= authorization bearer hf_ ://".split())
"""A text without one of these, in whatever case, has no secret; most have none."""

_SECRETS = r"""
    (?P<name>(?<![\w-])(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|credential|signature|sig
        |(?:access_|auth_|refresh_)?token|api[_-]?key|password|secret)=)[^\s&;,'"<>)\\]+
    | (?P<header>\bauthorization\b['"]?\s{0,9}[:=]\s{0,9}['"]?
        (?:(?:bearer|basic|digest|token|aws4-hmac-sha256)\s{1,9})?)[^\s'",;}]+
    | (?P<scheme>\bbearer\s{1,9})[\w.~+/-]{8,}=*
    | (?P<address>://)[^\s/@'"]+(?=@)
    | \bhf_[a-z0-9]{24,}
"""
"""What gives access: parts of signed addresses, headers, users and passwords in addresses, tokens of Hugging Face."""


def redacted(text: str) -> str:
    """``text`` without what gives access to a store, such as the signature of a signed address."""
    lower = text.lower()
    if not any(sign in lower for sign in _SIGNS):
        return text

    import re  # not at a worker's start

    pattern = re.compile(_SECRETS, re.IGNORECASE | re.VERBOSE)  # kept by re
    return pattern.sub(lambda found: next(filter(None, found.groups()), "") + _HIDDEN, text)


def shortened(text: str, limit: int = 2000) -> str:
    """``text``, or of a longer one than ``limit`` its beginning and its end: values of users may be of any size."""
    if len(text) <= limit:
        return text

    head, gap = 2 * limit // 3, "\n" if "\n" in text else " "
    left_out = f"... ({len(text) - limit:,} characters left out) ..."
    return f"{text[:head]}{gap}{left_out}{gap}{text[head - limit :]}"


def printable(text: str) -> str:
    """The text on one line, with an escape in place of each character that a terminal obeys, or hides."""
    if text.isprintable():
        return text

    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """The same for each line."""
    return "\n".join(map(printable, text.split("\n")))


def excerpt(raw: bytes | memoryview) -> str:
    """The first 80 characters of a row, escaped so that they fit on one line of a log."""
    text = bytes(raw[:320]).decode("utf-8", "backslashreplace")
    shown = text[:80].encode("unicode_escape").decode("ascii")
    return shown + ("..." if len(text) > 80 or len(raw) > 320 else "")


def safe_cause(error: BaseException) -> BaseException | None:
    """``error``, to be the cause of ours; None if it would show what is redacted, as tracebacks print it as it is."""
    found: BaseException | None = error
    while found is not None:
        if redacted(str(found)) != str(found):
            return None

        found = found.__cause__ or found.__context__
    return error


def by_reason(drops: Mapping[str, int]) -> str:
    """How many rows were dropped for which reason; the most frequent ones, if a function gives very many."""
    shown = sorted(sorted(drops.items()), key=lambda item: -item[1])[:_MAX_REASONS]
    rest = [f"{len(drops) - len(shown):,} other reasons"] if len(drops) > len(shown) else []
    return ", ".join([*(f"{number} by {reason}" for reason, number in sorted(shown)), *rest]) or "there was no row"


class AsyncDataError(Exception):
    """Root of the tree: ``except AsyncDataError`` catches everything the library raises.

    No message shows what gives access to a store: see :func:`redacted`. Very long ones are :func:`shortened`. Names of
    files, and whatever else is in one, are :func:`printable`.
    """

    def __init__(self, *args: Any) -> None:
        texts = (shortened(redacted(arg), _MAX_MESSAGE) if isinstance(arg, str) else arg for arg in args)
        super().__init__(*(printable_lines(arg) if isinstance(arg, str) else arg for arg in texts))


class ConfigError(AsyncDataError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class EndOfData(AsyncDataError):  # noqa: N818 - an end is not an error, as in anyio's EndOfStream
    """All epochs are delivered.

    :ivar groups: the groups that were left, fewer than requested; they count as delivered.
        Empty under ``drop_last=True``.
    """

    def __init__(self, message: str, groups: list[Any] | None = None) -> None:
        super().__init__(message)
        self.groups: list[Any] = groups or []

    @property
    def samples(self) -> list[Any]:
        """The samples of :attr:`groups`, flattened: what ``get_next_batch`` could not fill."""
        return [sample for group in self.groups for sample in group]


class LoaderClosedError(AsyncDataError):
    """The loader was closed, before the call or while it waited."""


class LoaderForkedError(AsyncDataError):
    """The loader was made in another process; threads and workers do not survive a fork."""


class PrefetchTimeoutError(AsyncDataError, TimeoutError):
    """No data within ``timeout_s``; nothing was consumed, and the call may be made again.

    :ivar diagnosis: what :meth:`statistics` knew at that moment, as plain builtins.
    """

    def __init__(self, message: str, diagnosis: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.diagnosis: dict[str, Any] = dict(diagnosis or {})


class FilterError(AsyncDataError):
    """The buffer filter failed or broke its contract; the buffer is as it was."""


class InvalidGroupError(AsyncDataError, ValueError):
    """``add_samples`` was given a group it cannot keep; nothing was added."""


class SourceError(AsyncDataError):
    """Input files that cannot be read as they should be."""


class SourceChangedError(SourceError):
    """A file was replaced, edited or cut while it was being read."""


class NoSamplesError(SourceError):
    """The source, or a whole epoch of it, yields no sample."""


class BadRowError(AsyncDataError):
    """One row that cannot become a sample.

    :ivar code: a stable identifier such as ``AD101`` (``docs/reference/errors.md``).
    :ivar path: the file.
    :ivar line: its line, counted from 1; None where the source has no lines.
    :ivar byte_offset: where the row starts in the file, or in its text if it is compressed; -1 where there is no text.
    :ivar row_number: its number in the file, counted from 0; None in files of lines that are not compressed.
    :ivar reason: what is wrong, in one sentence.
    :ivar excerpt: at most 80 characters of the row, escaped.
    :ivar traceback: the user function's own traceback, or an empty string.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        *,
        path: str = "",
        line: int | None = None,
        byte_offset: int = 0,
        row_number: int | None = None,
        excerpt: str = "",
        traceback: str = "",
    ) -> None:
        reason, excerpt, traceback = redacted(reason), redacted(excerpt), redacted(traceback)
        where = printable(path if line is None else f"{path}:{line}")
        numbered = f"row {row_number}" if row_number is not None and line is None else ""
        place = ", ".join(filter(None, (numbered, f"byte {byte_offset}" if byte_offset >= 0 else "")))
        message = f"{code} {where} ({place}): {reason}"
        if excerpt:
            message += f"\n  row: {excerpt}"
        if traceback:
            message += f"\n{traceback.rstrip()}"
        super().__init__(message)
        self.code = code
        self.path = path
        self.line = line
        self.byte_offset = byte_offset
        self.row_number = row_number
        self.reason = reason
        self.excerpt = excerpt
        self.traceback = traceback


class TooManyBadRowsError(AsyncDataError):
    """More rows were bad than ``BadRows(max=...)`` allows."""


class QuarantineError(AsyncDataError):
    """A bad row could not be written to ``BadRows(path=...)``; it was not passed over."""


class WorkerError(AsyncDataError):
    """Worker processes cannot be started, or die faster than they work."""


class SnapshotError(AsyncDataError):
    """A snapshot that could not be written, or is damaged."""


class SnapshotVersionError(SnapshotError):
    """A snapshot of a schema that this version does not know."""


class SnapshotMismatchError(SnapshotError):
    """A snapshot of other data or settings.

    :ivar differences: ``{what: (saved, present)}``.
    """

    def __init__(self, message: str, differences: Mapping[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(message)
        self.differences: dict[str, tuple[Any, Any]] = dict(differences or {})


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


_ERRNOS = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS})
_NO_THREAD = "can't start new thread"
_PANIC = "PanicException"
"""What a panic in Rust is in Python. Its text has the system's answer: ``Os { code: 11, ...``, or ``(os error 11)``."""
_MAX_CAUSES = 20


class ShortageError(Exception):
    """A request could not be answered for want of something.

    :ivar row: the request's number of the row that was worked on.
    :ivar excerpt: how that row begins. The message does not show it.
    :ivar place: where that row lies, while rows have no place by their number.
    """

    def __init__(self, cause: BaseException, row: int, excerpt: str) -> None:
        super().__init__(short_of(cause))
        self.cause = cause
        self.row = row
        self.excerpt = excerpt
        self.place: Overflow | None = None


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says so, or follows from one that does."""
    return bool(short_of(error))


def short_of(error: BaseException) -> str:
    """What has run out, in the system's words, without text of a row; empty if the error has another cause."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            return ""

        if words := _words(found):
            return words

        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return ""


def raise_if_shortage(error: BaseException) -> None:
    """Where an error of a row is made of ``error``: none is made of one that is no row's.

    :raises BaseException: ``error`` itself.
    """
    if is_shortage(error):
        raise error


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        found = list(map(short_of, error.exceptions))
        return found[0] if all(found) else ""

    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in _ERRNOS else ""

    if isinstance(error, MemoryError):
        return "out of memory (MemoryError)"

    if isinstance(error, RuntimeError) and error.args == (_NO_THREAD,):
        return _NO_THREAD

    if type(error).__name__ == _PANIC:
        text = str(error)
        codes = (code for code in _ERRNOS if f"code: {code}," in text or f"(os error {code})" in text)
        return next(map(os.strerror, codes), "")

    return str(error) if isinstance(error, ShortageError) else ""


# Events

Observer = Callable[[str, str, dict[str, Any]], object]

events_owner: ContextVar[object] = ContextVar("asyncdata_events_owner", default=None)
"""Stands for the loader for which the current code runs; None: for no one loader."""

_observers: list[tuple[Observer, object]] = []


def observe_events(observer: Observer, owner: object) -> None:
    """Call ``observer``, in any thread, with the method, the name and the fields of each event of this process that
    belongs to ``owner``, or to no one loader.
    """
    _observers.append((observer, owner))


def stop_observing(observer: Observer) -> None:
    """No longer call it."""
    _observers[:] = [pair for pair in _observers if pair[0] != observer]


@contextmanager
def owning_events(owner: object) -> Iterator[None]:
    """Events of the block, and of loggers that :meth:`Logger.owned` makes in it, belong to ``owner``."""
    before = events_owner.set(owner)
    try:
        yield
    finally:
        events_owner.reset(before)


class Logger:
    """Logs a module's events, under the module's name. Each method takes an event's name and its fields.

    :param owner: the loader that owns the events; None: the current one.
    """

    def __init__(self, name: str, owner: object = None) -> None:
        self._name, self._owner = name, owner

    def owned(self) -> Logger:
        """A logger whose events belong to the current loader, whatever code logs them later."""
        return Logger(self._name, events_owner.get())

    def own_thread(self) -> None:
        """From now on events of this thread, and of the tasks and threads of its event loop, belong to its owner."""
        events_owner.set(self._owner)

    def info(self, event: str, **fields: Any) -> None:
        """Something worth knowing happened."""
        self._log("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something went wrong, but the run continues."""
        self._log("warning", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Something went wrong that should not have; with the traceback."""
        self._log("exception", event, fields)

    def _log(self, method: str, event: str, fields: dict[str, Any]) -> None:
        fields = cleaned(fields)
        owner = self._owner or events_owner.get()
        for observer, wanted in tuple(_observers):
            if owner is None or owner is wanted:
                observer(method, event, fields)
        structlog = sys.modules.get("structlog")  # if it is configured, it is imported
        if structlog is not None and structlog.is_configured():
            getattr(structlog.get_logger(self._name), method)(event, **fields)
        else:
            _log_plainly(self._name, method, event, fields)


def _log_plainly(name: str, method: str, event: str, fields: dict[str, Any]) -> None:
    """One line, of which the event's name and fields are attributes of the record as well."""
    import logging  # not at a worker's start

    logger = logging.getLogger(name)
    text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
    text = text if logger.hasHandlers() else f"asyncdata: {text}"  # without a handler, the text has no name
    getattr(logger, method)("%s", text, extra={"event": event, "fields": fields}, stacklevel=4)


def cleaned(value: Any) -> Any:
    """The value without what gives access to a store, and without what a terminal obeys."""
    if isinstance(value, str):
        return printable_lines(redacted(value))

    if isinstance(value, dict):
        return {name: cleaned(each) for name, each in value.items()}

    return [cleaned(each) for each in value] if isinstance(value, list) else value


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
