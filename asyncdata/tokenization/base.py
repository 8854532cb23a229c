"""The tokenize function: how it is described, how it reaches a worker, and what it writes.

A *description* (:class:`TokenizeFn`) is a value: it can be compared, fingerprinted, and made again from its settings.
Opened in a worker it becomes a :class:`BatchTokenizer`, which holds the tokenizer and fills a :class:`ColumnWriter`.
A plain function of rows is accepted in place of a description; :class:`FunctionTokenizer` runs it.
"""

from __future__ import annotations

import sys
import traceback
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from asyncdata.core.errors import ConfigError
from asyncdata.core.import_path import resolve_path, tag_of
from asyncdata.core.messages import Column, Data, RowError, Tokenized
from asyncdata.core.shortage import raise_if_shortage
from asyncdata.core.specs import TokenizeSpec
from asyncdata.tokenization.rows import RowFault, decode_object
from asyncdata.tokenization.user_results import read_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncdata.tokenization.user_results import Result

__all__ = (
    "BatchTokenizer",
    "ColumnWriter",
    "FunctionTokenizer",
    "TokenizeFn",
    "describe",
    "fingerprints_of",
    "open_spec",
    "open_tokenize_fn",
)

Buffer = bytes | memoryview


@runtime_checkable
class TokenizeFn(Protocol):
    """A description of how rows become tokens: a value, importable by its class's path."""

    def resolve(self) -> TokenizeFn:
        """The same description with every name made a local file; runs once, in the trainer's process."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """What the tokens depend on, by part: ``{"tokenizer": digest, "template": digest, "tokenize_fn": digest}``."""
        ...

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins."""
        ...

    def open(self) -> BatchTokenizer:
        """Load what is needed; runs once, before workers are forked, or else once in each."""
        ...


class BatchTokenizer(Protocol):
    """Opened in a worker: turns raw rows into columns."""

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write each row of ``rows`` to ``out`` once: kept, dropped or failed. Kept rows come in rising order."""
        ...


class ColumnWriter:
    """Collects one request's samples as packed columns.

    :param progress: told the request's number of a row before a user's function sees it.
    :param numbers: the request's number of each row that is written; None where they are the same.
    """

    def __init__(self, progress: Callable[[int], None] = lambda _: None, numbers: Sequence[int] | None = None) -> None:
        self._progress = progress
        self._numbers = numbers
        self._tokens = _Pieces()
        self._kept = array("i")
        self._columns: dict[str, _Pieces] = {}
        self._drops: dict[str, array[int]] = {}
        self._notes: dict[str, array[int]] = {}
        self._errors: list[RowError] = []

    def keep(self, row: int, tokens: Iterable[int], **columns: Buffer) -> None:
        """Row ``row`` is a sample of ``tokens``; each column's value is JSON text.

        ``prompt_text`` may be given in place of ``prompt``: the text itself, in UTF-8.

        :raises OverflowError: for a token id outside int32.
        :raises TypeError: for a token that is not an int.
        """
        ids = tokens if isinstance(tokens, array) else array("i", tokens)
        self._tokens.append(ids, len(ids))
        for name, value in columns.items():
            self._column(name).append(value, len(value))
        self._kept.append(self._number(row))
        self._fill_columns()

    def keep_all(
        self, rows: Sequence[int], tokens: Buffer, ends: Sequence[int], columns: Mapping[str, Sequence[Buffer | str]]
    ) -> None:
        """As :meth:`keep` for each of ``rows``, in one go.

        :param tokens: their tokens end to end, int32.
        :param ends: where each row's tokens end.
        :param columns: each one's values, one for each row; an empty one is none. They must have a length in bytes, or
            be texts.
        """
        self._tokens.append_all(tokens, ends)
        for name, values in columns.items():
            data, lengths = _end_to_end(values)
            if data:
                self._column(name).append_all(data, accumulate(lengths))
        self._kept.extend(rows if self._numbers is None else [self._numbers[row] for row in rows])
        self._fill_columns()

    def _column(self, name: str) -> _Pieces:
        if name not in self._columns:
            self._columns[name] = _Pieces()
            self._columns[name].fill(len(self._kept))
        return self._columns[name]

    def _fill_columns(self) -> None:
        """Samples that were given no value of a column have an empty one."""
        for column in self._columns.values():
            column.fill(len(self._kept))

    def progress(self, row: int | None) -> None:
        """Row ``row`` is being worked on, and no other; None: more than one.

        Should it hang, or bring down the worker, that row is to blame, or it is looked for.
        """
        self._progress(-1 if row is None else self._number(row))

    def _number(self, row: int) -> int:
        return row if self._numbers is None else self._numbers[row]

    def drop(self, row: int, reason: str) -> None:
        """Row ``row`` yields no sample, as it should; counted under ``reason``."""
        self._drops.setdefault(reason, array("i")).append(self._number(row))

    def note(self, row: int, name: str) -> None:
        """Row ``row`` is kept, and something is true of it that statistics count under ``name``."""
        self._notes.setdefault(name, array("i")).append(self._number(row))

    def fail(self, row: int, fault: RowFault) -> None:
        """Row ``row`` is bad: ``on_bad_row`` decides what that means."""
        self.fail_at(self._number(row), fault)

    def fail_at(self, number: int, fault: RowFault) -> None:
        """As :meth:`fail`, by the request's own number of the row."""
        self._errors.append(RowError(number, fault.code, fault.reason, fault.excerpt, fault.traceback))

    def extend(self, other: ColumnWriter) -> None:
        """Append what ``other`` holds; its rows come behind ours."""
        self._tokens.extend(other._tokens)
        for name, column in other._columns.items():
            self._column(name).extend(column)
        self._kept.extend(other._kept)
        self._fill_columns()
        for reason, rows in other._drops.items():
            self._drops.setdefault(reason, array("i")).extend(rows)
        for name, rows in other._notes.items():
            self._notes.setdefault(name, array("i")).extend(rows)
        self._errors.extend(other._errors)

    def finish(self, num_rows: int, busy_s: float) -> Tokenized:
        """The reply for a request of ``num_rows`` rows."""
        return Tokenized(
            tokens=self._tokens.joined(),
            token_ends=self._tokens.ends.tobytes(),
            kept=b"" if len(self._kept) == num_rows else self._kept.tobytes(),
            columns={name: Column(column.joined(), column.ends.tobytes()) for name, column in self._columns.items()},
            drops=_packed(self._drops),
            errors=sorted(self._errors, key=lambda error: error.row),
            busy_s=busy_s,
            notes=_packed(self._notes),
        )


class _Pieces:
    """Values end to end, as they came: what arrives in one piece is never copied.

    :ivar ends: where each value stops, uint32.
    """

    __slots__ = ("_pieces", "ends")

    def __init__(self) -> None:
        self._pieces: list[Buffer | array[int]] = []
        self.ends = array("I")

    @property
    def _end(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, value: Buffer | array[int], length: int) -> None:
        """One more value."""
        self._pieces.append(value)
        self.ends.append(self._end + length)

    def append_all(self, values: Buffer, ends: Iterable[int]) -> None:
        """More values, end to end; ``ends`` are counted from their beginning."""
        base = self._end
        self._pieces.append(values)
        self.ends.extend([base + end for end in ends] if base else ends)

    def extend(self, other: _Pieces) -> None:
        """All values of another."""
        base = self._end
        self._pieces += other._pieces
        self.ends.extend(base + end for end in other.ends)

    def fill(self, num_values: int) -> None:
        """Empty values, until there are so many."""
        if len(self.ends) < num_values:
            self.ends.extend([self._end] * (num_values - len(self.ends)))

    def joined(self) -> Buffer:
        """The values, end to end."""
        if len(self._pieces) == 1 and not isinstance(self._pieces[0], array):
            return self._pieces[0]

        return b"".join(self._pieces)


def _end_to_end(values: Sequence[Any]) -> tuple[bytes, Iterable[int]]:
    """The values, and their lengths in bytes."""
    if values and isinstance(values[0], str):
        text = "".join(values)
        if text.isascii():
            return text.encode(), map(len, values)

        values = list(map(str.encode, values))
    return b"".join(values), map(len, values)


def _packed(rows_by_name: dict[str, array[int]]) -> dict[str, Data]:
    """Each one's rows, rising."""
    return {name: array("i", sorted(rows)).tobytes() for name, rows in rows_by_name.items()}


class FunctionTokenizer:
    """Runs a user's function: ``fn(row)`` for each row, or ``fn(rows)`` where the function has ``batched = True``.

    A result is None (dropped), a list of token ids, or a dict with ``input_ids`` (or ``tokens``) and, if wanted,
    ``labels``, ``prompt``, ``label``, ``metadata`` and anything else that JSON can hold, which arrives in
    ``sample.extra``. A label is the token itself where it is trained, and -100 elsewhere. A reason for a drop is given
    by returning a ``str``.

    :param read: takes a result apart; see :func:`~asyncdata.tokenization.user_results.read_result`.
    """

    def __init__(self, function: Callable[..., Any], read: Callable[[Any], Result | str] = read_result) -> None:
        self._function = function
        self._read = read
        self._batched = bool(getattr(function, "batched", False))

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        decoded: list[tuple[int, dict[str, Any]]] = []
        for row, raw in enumerate(rows):
            try:
                decoded.append((row, decode_object(raw)))
            except RowFault as fault:
                out.fail(row, fault)
        if self._batched:
            self._run_batch(rows, decoded, out)
            return

        for row, value in decoded:
            out.progress(row)
            self._run_row(row, value, rows[row], out)

    def _run_batch(self, rows: Sequence[Buffer], decoded: list[tuple[int, dict[str, Any]]], out: ColumnWriter) -> None:
        """One call for all rows. Where it raises, row by row, so that the one to blame is named."""
        try:
            results = list(self._function([value for _, value in decoded])) if decoded else []
        except BaseException:  # a user's function may raise anything, and call exit()
            results = None
        if results is not None and len(results) == len(decoded):
            for (row, _), result in zip(decoded, results, strict=True):
                self._write(row, result, rows[row], out)
            return

        if results is not None:
            reason = f"the batched tokenize function returned {len(results)} results for {len(decoded)} rows"
            for row, _ in decoded:
                out.fail(row, RowFault("AD425", reason, rows[row]))
            return

        for row, _ in decoded:
            out.progress(row)
            # Decoded anew: the failed call may have changed the row's value.
            self._run_row(row, [decode_object(rows[row])], rows[row], out)

    def _run_row(self, row: int, argument: Any, raw: Buffer, out: ColumnWriter) -> None:
        try:
            result = self._function(argument)
            if self._batched:
                (result,) = result
        except BaseException as error:  # as above
            raise_if_shortage(error)
            out.fail(row, RowFault("AD421", f"the tokenize function raised {error!r}", raw, _user_traceback(error)))
            return

        self._write(row, result, raw, out)

    def _write(self, row: int, result: Any, raw: Buffer, out: ColumnWriter) -> None:
        try:
            found = self._read(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            out.fail(row, RowFault("AD425", f"the tokenize function returned what is no sample: {error}", raw))
            return

        if isinstance(found, str):
            out.drop(row, found)
        else:
            out.keep(row, found.tokens, **found.columns)


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: our own frames would only hide it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def describe(fn: TokenizeFn | Callable[..., Any]) -> TokenizeSpec:
    """How a worker makes ``fn`` again.

    :raises ConfigError: for a lambda, a closure, or anything defined in ``__main__``, which a worker cannot import.
    """
    if isinstance(fn, type) and isinstance(fn, TokenizeFn):
        raise ConfigError(f"tokenize_fn is the class {fn.__name__}; pass an instance: {fn.__name__}(...)")

    owner = type(fn) if isinstance(fn, TokenizeFn) else fn
    module, name = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    if module is None or name is None:
        raise ConfigError(
            f"AD420 {fn!r} has no import path. Pass a function, or an object with resolve(), fingerprints(), "
            "settings() and open(), or num_workers=0 to run it in this process."
        )

    path = f"{module}:{name}"
    if module == "__main__" or "<" in name or _imported(module, name) is not owner:
        raise ConfigError(
            f"AD420 {path!r} cannot be imported by a worker process. Move it to a module and pass it from there (or as "
            "'package.module:name'), or use num_workers=0 to run it in this process."
        )

    return TokenizeSpec(path, fn.settings() if isinstance(fn, TokenizeFn) else None)


def fingerprints_of(fn: TokenizeFn | Callable[..., Any]) -> dict[str, str]:
    """What the tokens of ``fn`` depend on, by part.

    A plain function is known by its ``tag``, or else its import path, and by its ``version``, if it has one: hashing
    its source would miss what it calls, and refuse a snapshot for a comment. Canaries find out whether it gives other
    tokens.
    """
    if isinstance(fn, TokenizeFn):
        return fn.fingerprints()

    return {"tokenize_fn": f"{tag_of(fn)} version {getattr(fn, 'version', None)}"}


def _imported(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def open_spec(spec: TokenizeSpec) -> BatchTokenizer:
    """The tokenizer that ``spec`` describes, loaded: what a worker calls at its start."""
    target = resolve_path(spec.path)
    return open_tokenize_fn(target if spec.settings is None else target(**spec.settings))


def open_tokenize_fn(fn: TokenizeFn | Callable[..., Any]) -> BatchTokenizer:
    """``fn`` ready to run in this process."""
    return fn.open() if isinstance(fn, TokenizeFn) else FunctionTokenizer(fn)
