"""Bad rows: the error that a user reads, with its place and an excerpt; passing them over; what is logged."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncdata.core.errors import BadRowError, TooManyBadRowsError, excerpt, get_logger
from asyncdata.core.messages import MAX_KEYS, NOT_WRITTEN, ON_PURPOSE, Failed, RowError, Tokenized, is_mass
from asyncdata.core.threads import no_op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdata.core.types import SourceLocation

    Numbers = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]


_EXCERPT_BYTES = 400
_COUNT_LINES_S = 0.02
"""Longest time for which counting the lines of a file may delay the samples, once a source; 100 MB take so long."""
_TRACEBACK = "Traceback (most recent call last):"
_REASONS = {
    "AD101": "invalid JSON",
    "AD104": "a raw control byte",
    "AD105": "NUL bytes: its writer crashed, or the disk was full",
    "AD106": "a byte that is not UTF-8",
    "AD107": "an unpaired surrogate in a text that is to be tokenized",
    "AD108": "longer than max_row_bytes",
    "AD110": "a key is missing that a setting asks for",
    "AD111": "a value has the wrong type",
    "AD112": "a message has no role",
    "AD113": "JSON, but no object",
    "AD114": "a chat has more or fewer placeholders than media",
    "AD115": "keys of two dialects of chats",
    "AD117": "an integer of too many digits",
    "AD118": "nested too deeply",
    "AD119": "more than one value on the line",
    "AD130": "media, which are not supported",
    "AD457": "a picture, video or sound that cannot be read, or is beyond a limit",
    "AD133": "a key that changes the text or what is trained, and is not read",
    "AD131": "a content part that the chat template does not write",
    "AD132": "a turn of a chat without content",
    "AD411": "the tokenizer has no chat template for it",
    "AD412": "the chat template refused it, or failed on it",
    "AD414": "the chat template does not show what is the assistant's",
    "AD415": "longer than max_length",
    "AD421": "the tokenize function raised",
    "AD422": "it hung its worker, twice",
    "AD423": "its worker died of it, twice",
    "AD424": "it has other tokens than when they were counted",
    "AD425": "the tokenize function returned something that is not a sample",
}
"""What is wrong with a row, in words that quote nothing of the row."""
_log = get_logger(__name__)
_NO_STOP_TOKEN = (
    "of some rows no token is trained that ends what the assistant says, as the chat template writes none there, so "
    "the model does not learn from them to stop; pass chat_template= with the stop token inside {% generation %} and "
    "{% endgeneration %}, such as TRL's training template for the model (get_training_chat_template)"
)
_ANSWER_WITHOUT_STOP = (
    "of some rows not every trained answer ends with a stop token: after the others the chat template writes another "
    "token, as that of gpt-oss writes <|end|> for <|return|>. The model does not end an answer with it, so it is not "
    "trained; train_on='last_assistant' trains the last answer only"
)
_PADDED = "fields of objects in lists are null, most as other rows have them, and are left out"
_TURN_LEFT_OUT = (
    "some turns have a flag, such as a weight of 0, that says not to train them, and are not trained; "
    "statistics().noted_total counts them, and turn_flags=() ignores flags"
)


class BadRowPolicy(NamedTuple):
    """What is done with the bad rows of a source; see :class:`~asyncdata.BadRows`.

    :ivar is_raised: whether none may be passed over, so that the row's own error is raised.
    :ivar max: bad rows that may be passed over; None: no limit.
    :ivar shows_row: whether errors may quote the row; see :func:`without_text`.
    :ivar pass_over: called with the error of a row that is passed over.
    """

    is_raised: bool = True
    max: int | None = None
    shows_row: bool = True
    pass_over: Callable[[BadRowError], object] = no_op

    def stops_after(self, num_passed: int) -> bool:
        """Whether a bad row may not be passed over after ``num_passed`` others."""
        return self.is_raised or (self.max is not None and num_passed >= self.max)

    def stop_error(self, error: BadRowError) -> BadRowError | TooManyBadRowsError:
        """The error of a row that may not be passed over."""
        if self.is_raised:
            error.add_note('bad_rows="skip" leaves such rows out, and counts them')
            return error

        return TooManyBadRowsError(f"a bad row, after BadRows(max={self.max}) of them: {error}")


def bad_row_error(place: SourceLocation, error: RowError, *, shows_row: bool = True) -> BadRowError:
    """The error for a bad row. Reads the file up to the row, to count lines.

    :param shows_row: whether the error may quote the row; see :func:`without_text`.
    """
    if not error.excerpt and shows_row:
        error = msgspec.structs.replace(error, excerpt=_excerpt(place))
    found = error_at(place, error)
    return found if shows_row else without_text(found)


def error_at(place: SourceLocation, error: RowError) -> BadRowError:
    """The error for a bad row at ``place``. Reads the file up to the row, to count lines."""
    return BadRowError(
        error.code,
        error.reason,
        path=place.path,
        line=_line_number(place),
        byte_offset=place.byte_offset,
        row_number=place.row_number,
        excerpt=error.excerpt,
        traceback=error.traceback,
    )


def located(failed: Failed, place: SourceLocation, *, shows_row: bool = True) -> Failed:
    """``failed`` with the location of the row at ``place``, which caused it, in its message."""
    code, _, reason = failed.message.partition(" ")
    told = error_at(place, RowError(failed.row, code, reason))
    shown = " (BadRows(excerpts=False) shows no more)"
    if shows_row:
        shown = f" (it begins {failed.excerpt!r})" if failed.excerpt else ""
    trace = failed.traceback if shows_row else _bare_traceback(failed.traceback)[0]
    return msgspec.structs.replace(failed, message=f"{told}{shown}", traceback=trace, row=-1, excerpt="")


def without_text(error: BadRowError) -> BadRowError:
    """``error`` without any text of the row: no excerpt, no value in the reason.

    Of the traceback, only the file names, the line numbers and the type of the exception are left.
    """
    frames, kind = _bare_traceback(error.traceback)
    reason = _REASONS.get(error.code, "a bad row") + (f" {kind}" if kind else "")
    return BadRowError(
        error.code,
        f"{reason} (BadRows(excerpts=False) shows no more)",
        path=error.path,
        line=error.line,
        byte_offset=error.byte_offset,
        row_number=error.row_number,
        traceback=frames,
    )


def _bare_traceback(text: str) -> tuple[str, str]:
    """Where the first exception of a traceback was raised, and its type. All other lines may quote the row."""
    head, *lines = text.splitlines() or [""]
    if head != _TRACEBACK:
        return "", ""

    frames = list(takewhile(lambda line: line.startswith("  "), lines))
    places = [line for line in frames if line.startswith('  File "')]
    kind = lines[len(frames)].partition(":")[0] if len(frames) < len(lines) else ""
    return "\n".join([head, *places]), kind if kind.replace(".", "").isidentifier() else ""


def _line_number(place: SourceLocation) -> int | None:
    """The row's line number; None if the file can no longer be read. That must not hide the error of the row."""
    with suppress(OSError):
        return place.line_number()
    return None


def _excerpt(place: SourceLocation) -> str:
    """The start of a row whose worker died or hung, so that it sent no excerpt."""
    if place.row_number is not None:
        return ""

    with suppress(OSError), open(place.path, "rb", buffering=0) as file:
        file.seek(place.byte_offset)
        length = _EXCERPT_BYTES if place.num_bytes < 0 else min(place.num_bytes, _EXCERPT_BYTES)
        return excerpt(file.read(length).partition(b"\n")[0])
    return ""


class Rows(Protocol):
    """Rows that came together, numbered from 0: a chunk, or a part of the row index."""

    @property
    def num_rows(self) -> int:
        """How many there are."""
        ...

    def row_location(self, row: int) -> SourceLocation:
        """The location of a row."""
        ...

    def file_ids(self) -> Any:
        """The number of each row's file, int64."""
        ...


class NotesLog:
    """Logs an event when a note that needs one, or a key that is not read, comes for the first time.

    :param source: the name of a part of a mixture; empty for a single source.
    :param shows_row: whether an event may quote a row.
    :ivar unread: of the rows that were looked at, how many have each key that is not read; at most so many keys as are
        named.
    """

    def __init__(self, source: str, *, shows_row: bool) -> None:
        self._source, self._shows_row = {"source": source} if source else {}, shows_row
        self._logged, self._log = set[str](), _log.owned()
        self.unread: dict[str, int] = {}

    def see(self, reply: Tokenized, rows: Rows) -> None:
        """Look at the reply for these rows."""
        if reply.is_padded and _PADDED not in self._logged:
            self._logged.add(_PADDED)
            self._log.info("rows.nulls_left_out", **self._source, reason=_PADDED)
        for name in [name for name in reply.notes if name not in self._logged]:
            self._logged.add(name)
            if name == "no_stop_token":
                self._log.warning("chat.no_stop_token", reason=_NO_STOP_TOKEN)
            elif name == "answer_without_stop":
                self._log.warning("chat.answer_without_stop", reason=_ANSWER_WITHOUT_STOP)
            elif name == "turn_left_out":
                self._log.info("chat.turn_left_out", reason=_TURN_LEFT_OUT)
            elif name.endswith(NOT_WRITTEN):
                what, found, number = name.removesuffix(NOT_WRITTEN), len(reply.notes[name]) // 4, rows.num_rows
                self._log.warning("chat.not_written", **self._source, what=what, num_found=found, num_rows=number)
        for key, (number, row, text) in reply.unread.items():
            if key in self.unread or len(self.unread) < MAX_KEYS:
                self.unread[key] = self.unread.get(key, 0) + number
            if text is not None and "" not in self._logged:
                self._logged.add("")
                keys, value = list(reply.unread)[:MAX_KEYS], f"{key}: {text}" if self._shows_row else ""
                place = rows.row_location(row).described(_COUNT_LINES_S)
                self._log.info("rows.unread_keys", **self._source, keys=keys, value=value, example=place)


_MAX_NAMED = 20
"""Files that are named for one reason. What further ones drop counts for the whole source."""
_MAX_FILES = 1 << 16
"""Files that are counted one by one. It takes 8 bytes for each, and as many for each reason."""
_MAX_REASONS = 30
"""A tokenize function may make up a reason for each row: those after the first ones are counted together."""
_OTHER = "other reasons"
_COUNT_DROPS_S = 0.25
"""Longest time for which counting the lines of a file may delay the samples, once a file and reason."""


class _Reason:
    """Rows that are dropped for one reason.

    :ivar of_files: how many of each file; ``named``: files that were named in the log.
    :ivar share_told: the share of the whole source that was told in the log; 0 if none was.
    """

    def __init__(self, num_files: int) -> None:
        self.num_dropped = 0
        self.of_files: Numbers = np.zeros(num_files, np.int64)
        self.named: list[int] = []
        self.share_told = 0.0

    @property
    def num_unnamed(self) -> int:
        """The rows of files that were not named."""
        return self.num_dropped - int(self.of_files[self.named].sum())


class MassDrops:
    """Counts what a source drops, by file and reason. Each is logged once; the whole source if no file explains it.

    It counts the rows that were read ahead since :meth:`restart`, those of a request at once.

    :param source: the name of a part of a mixture; empty for a single source.
    :param num_files: files of the source.
    """

    def __init__(self, source: str, num_files: int) -> None:
        self._source, self._num_files = {"source": source} if source else {}, num_files
        self._num_rows = 0
        self._of_files: Numbers = np.zeros(min(num_files, _MAX_FILES) if num_files > 1 else 0, np.int64)
        self._reasons: dict[str, _Reason] = {}
        self._log = _log.owned()

    def restart(self) -> None:
        """Rows come again, so they are counted anew. What was logged is not logged again."""
        self._num_rows = 0
        self._of_files.fill(0)
        for found in self._reasons.values():
            found.num_dropped = 0
            found.of_files.fill(0)

    def see(self, rows: Rows, drops: Mapping[str, Any], ours: Bools | None = None) -> None:
        """Count rows.

        :param drops: the rows that yield no sample, by reason.
        :param ours: whether this rank has each row; None: it has all.
        """
        self._num_rows += rows.num_rows if ours is None else int(ours.sum())
        ids = rows.file_ids() if len(self._of_files) else None
        if ids is not None:
            _add(self._of_files, ids if ours is None else ids[ours])
        others = []
        for reason, dropped in drops.items():
            if not len(dropped) or reason in ON_PURPOSE:
                continue

            if reason in self._reasons or len(self._reasons) < _MAX_REASONS:
                self._count(reason, np.asarray(dropped, np.int64), ids, rows)
            else:
                others.append(dropped)
        if others:
            self._count(_OTHER, np.concatenate(others).astype(np.int64), ids, rows)

    def _count(self, reason: str, dropped: Numbers, ids: Numbers | None, rows: Rows) -> None:
        found = self._reasons.setdefault(reason, _Reason(len(self._of_files)))
        found.num_dropped += len(dropped)
        if ids is not None:
            its_files = ids[dropped]
            for file in self._to_name(found, _add(found.of_files, its_files)):
                found.named.append(file)
                place = rows.row_location(int(dropped[np.argmax(its_files == file)]))
                self._tell(reason, int(found.of_files[file]), int(self._of_files[file]), place, path=place.path)
        number = found.num_unnamed
        if not found.share_told and is_mass(number, self._num_rows):
            found.share_told = number / self._num_rows
            place = rows.row_location(int(dropped[0]))
            path = {"path": place.path} if self._num_files == 1 else {}
            self._tell(reason, number, self._num_rows, place, **path)

    def _to_name(self, found: _Reason, files: Numbers) -> list[int]:
        """Those of the files of which too many rows are dropped: if the source was told of, twice its share."""
        dropped, rows = found.of_files[files], self._of_files[files]
        is_wanted = is_mass(dropped, rows) & (dropped >= 2 * found.share_told * rows)
        wanted = [file for file in files[is_wanted].tolist() if file not in found.named]
        return wanted[: _MAX_NAMED - len(found.named)]

    def _tell(self, reason: str, num_dropped: int, num_rows: int, place: SourceLocation, **path: str) -> None:
        counts = {"num_dropped": num_dropped, "num_rows": num_rows}
        self._log.warning(
            "rows.dropped", **self._source, **path, reason=reason, **counts, example=place.described(_COUNT_DROPS_S)
        )


def _add(counts: Numbers, files: Numbers) -> Numbers:
    """Count the files, those that have a place; return them, each once."""
    found, numbers = np.unique(files[files < len(counts)], return_counts=True)
    counts[found] += numbers
    return found
