"""Runs a user's function as a tokenizer of batches: decodes rows, reads results, and reports faults."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from asyncdata.core.shortage import raise_if_shortage
from asyncdata.tokenization.rows import RowFault, decode_object
from asyncdata.tokenization.user_results import read_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
    from asyncdata.tokenization.user_results import Result

__all__ = ("FunctionTokenizer",)


class FunctionTokenizer:
    """Runs a user's function: ``fn(row)`` for each row, or ``fn(rows)`` if the function has ``batched = True``.

    A result is None (dropped), a list of token ids, or a dict with ``input_ids`` (or ``tokens``) and, if wanted,
    ``labels``, ``prompt``, ``label``, ``metadata`` and any other key with a JSON value, which is stored in
    ``sample.extra``. A label is the token itself if it is trained, and -100 otherwise. A mask such as ``loss_mask``, 0
    or 1 for each token, makes the labels. A result of type ``str`` is the reason to drop the row.

    :param read: reads a result; see :func:`~asyncdata.tokenization.user_results.read_result`.
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
        """One call for all rows. If it raises, one call for each row finds the row to blame."""
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
            # Decoded again: the failed call may have changed the row's value.
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
            out.fail(
                row, RowFault("AD425", f"the tokenize function returned something that is not a sample: {error}", raw)
            )
            return

        if isinstance(found, str):
            out.drop(row, found)
        else:
            out.keep(row, found.tokens, **found.columns)


def _user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on, without frames of this library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
