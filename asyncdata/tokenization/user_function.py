"""Runs a user's function as a tokenizer of batches: decodes rows, reads results, and reports faults."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import raise_if_shortage, user_traceback
from asyncdata.tokenization.column_writer import NOT_TRAINED, Buffer, ColumnWriter, encode_spans, trained_runs
from asyncdata.tokenization.rows import RowFault, decode_object

if TYPE_CHECKING:
    from asyncdata.core.columns import Column

_FIELDS = ("prompt", "label", "metadata")
_MAX_REASON = 200
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask")
_WEIGHTS = ("loss_weights", "loss_weight", "loss_scale")  # masks, if they are only 0 and 1


class FunctionTokenizer:
    """Runs a user's function: ``fn(row)`` for each row, or ``fn(rows)`` if the function has ``batched = True``.

    A result is None (dropped), a list of token ids, or a dict with ``input_ids`` (or ``tokens``) and, if wanted,
    ``labels``, ``prompt``, ``label``, ``metadata`` and any other key with a JSON value, which is stored in
    ``sample.extra``. What the function declares as ``columns`` is an array (see :class:`~asyncdata.Column`); where it
    has a ``load``, ``media`` says how many values that will give of each of its columns; a plan with ``num_tokens``
    instead of ids leaves all fields to the load. Without one, the arrays of the
    phase ``load`` are let go, and the function is called again for them. A label is the token itself if it is trained,
    and -100 otherwise. A mask such as ``loss_mask``, 0 or 1 for each token, makes
    the labels. A result of type ``str`` is the reason to drop the row.

    :param read: reads a result; None: as :func:`read_result`.
    """

    def __init__(
        self, function: Callable[..., Any], read: Callable[[Any, Sequence[Column]], Result | str] | None = None
    ) -> None:
        declared = declared_of(function)
        self._function = function
        self._loading: Callable[[Any, Any], Any] | None = getattr(function, "load", None)
        self._columns = [column for column in declared if column.phase == "plan" or self._loading is None]
        self._loaded = {column.name: column for column in declared if column.phase == "load"}
        self._read = read or read_result
        self._batched = bool(getattr(function, "batched", False))

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        out.declare(column.key for column in self._columns if column.phase == "plan")
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
            out.fail(row, RowFault("AD421", f"the tokenize function raised {error!r}", raw, user_traceback(error)))
            return

        self._write(row, result, raw, out)

    def _write(self, row: int, result: Any, raw: Buffer, out: ColumnWriter) -> None:
        try:
            found = self._planned(result)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            out.fail(
                row, RowFault("AD425", f"the tokenize function returned something that is not a sample: {error}", raw)
            )
            return

        if isinstance(found, str):
            out.drop(row, found)
        else:
            out.keep(row, found.tokens, **found.columns)

    def _planned(self, result: Any) -> Result | str:
        """The result; of a function of two phases, with what media its load will give.

        :raises TypeError, ValueError, OverflowError, RecursionError: if it is neither a sample nor a reason.
        """
        if self._loaded and self._loading is None:
            return self._without_loaded(self._read(result, self._columns))

        if not self._loaded or not isinstance(result, Mapping) or "media" not in result:
            return self._read(result, self._columns)

        if "num_tokens" in result and result.keys().isdisjoint(("input_ids", "tokens")):
            return counted(index(result["num_tokens"]), _media_counts(result["media"], self._loaded))

        found = self._read({name: value for name, value in result.items() if name != "media"}, self._columns)
        if not isinstance(found, str):
            found.columns["media"] = json_text(_media_counts(result["media"], self._loaded))
        return found

    def _without_loaded(self, found: Result | str) -> Result | str:
        """The result with the numbers of values in place of the columns of the load."""
        if isinstance(found, str):
            return found

        sizes = {name: len(found.columns.pop(column.key, b"")) for name, column in self._loaded.items()}
        counts = {name: size // self._loaded[name].num_bytes(1) for name, size in sizes.items() if size}
        return found._replace(columns=found.columns | ({"media": json_text(counts)} if counts else {}))

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """The second phase: plans each row again, and writes its tokens with the arrays of ``function.load``."""
        out.declare(column.key for column in self._columns if column.phase == "load")
        for row, raw in enumerate(rows):
            out.progress(row)
            try:
                argument = [decode_object(raw)] if self._batched else decode_object(raw)
                plan = self._function(argument)
                (plan,) = plan if self._batched else (plan,)
                # Decoded again: the plan may have changed it.
                values = None if self._loading is None else self._loading(decode_object(raw), plan)
            except BaseException as error:  # a user's function may raise anything, and call exit()
                raise_if_shortage(error)
                out.fail(row, RowFault("AD421", f"load raised {error!r}", raw, user_traceback(error)))
                continue

            try:
                found = self._read(plan, self._columns) if values is None else self._planned(plan)
                if isinstance(found, str):
                    raise TypeError(f"the plan drops the row now: {found}")

                if values is not None:
                    found = self._with_media(dict(values), found)
                out.keep(row, found.tokens, **found.columns)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                out.fail(row, RowFault("AD425", f"load returned other media than were planned: {error}", raw))

    def _with_media(self, values: dict[str, Any], plan: Result) -> Result:
        """What load has returned, as far as it was planned: arrays, and a sample where the plan has only counted."""
        counts = json.loads(plan.columns.get("media", b"{}"))
        whole = Result(plan.tokens, {})
        if counts.pop("input_ids", None):
            fields = {name: values.pop(name) for name in [*values] if name not in self._loaded}
            found = self._read(fields, self._columns)
            if isinstance(found, str) or len(found.tokens) != len(plan.tokens):
                number = found if isinstance(found, str) else f"{len(found.tokens)} tokens"
                raise ValueError(f"{number}, and the plan has counted {len(plan.tokens)}")

            whole = found
        if values.keys() != counts.keys():
            raise ValueError(f"{sorted(values)}, and the plan's media has {sorted(counts)}")

        arrays = {}
        for name, count in counts.items():
            column = self._loaded[name]
            data = column.encode(values[name], len(plan.tokens))
            if len(data) != column.num_bytes(count):
                raise ValueError(f"{name} has {len(data):,} bytes, and {count} values were planned")

            arrays[column.key] = data
        return whole._replace(columns=whole.columns | arrays)


class Result(NamedTuple):
    """A sample: its tokens, and its columns as JSON text."""

    tokens: array[int]
    columns: dict[str, bytes]


def counted(number: int, counts: dict[str, int], **columns: bytes) -> Result | str:
    """A sample of so many tokens that are not known yet, or the reason to drop a row of none.

    Each token is written as -1. That is not a token id, so it is never trained on by mistake.

    :param counts: how many values the load will give of each of its columns.
    """
    planned = {"media": json_text({**counts, "input_ids": number}), **columns}
    return Result(array("i", [-1]) * number, planned) if number else "num_tokens_0"


def declared_of(function: Any) -> tuple[Column, ...]:
    """The columns that a tokenize function declares.

    :raises ConfigError: if they are none.
    """
    if getattr(function, "columns", None) is None:
        return ()

    from asyncdata.core.columns import declared_columns  # imports numpy, which a worker needs for nothing else

    return declared_columns(function)


def read_result(result: Any, columns: Sequence[Column] = ()) -> Result | str:
    """Read the result of a plain function: a sample, or the reason of a drop.

    :param columns: that the function declares.
    :raises TypeError, ValueError, OverflowError, RecursionError: if it is neither.
    """
    if isinstance(result, str) and len(result) > _MAX_REASON:
        raise TypeError(
            f"a text of {len(result):,} characters; a text is the reason to drop the row, of at most {_MAX_REASON} "
            "characters. To keep the row, return its token ids"
        )

    if result is None or isinstance(result, str):
        return (result or "tokenize_fn").encode("ascii", "backslashreplace").decode()

    return read_sample(dict(result) if isinstance(result, Mapping) else {"input_ids": result}, columns)


def read_sample(
    fields: dict[str, Any], declared: Sequence[Column], left_out: tuple[str, ...] = (), *, trains_all: bool = False
) -> Result:
    tokens = _tokens(fields)
    for name in left_out:
        fields.pop(name, None)
    arrays = {column.key: data for column in declared if (data := _array(column, fields, tokens)) is not None}
    labels = _labels(fields, tokens)
    if labels is None and trains_all:
        labels = tokens
    columns = {} if labels is None else {"spans": encode_spans(trained_runs(labels))}
    columns |= {name: json_text(fields.pop(name)) for name in _FIELDS if name in fields}
    for name, value in fields.items():
        if getattr(value, "shape", ()) or isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(
                f"{name!r} is an array; declare it, as in tokenize_fn.columns = (Column({name!r}, 'float32'),)"
            )
    if fields:
        columns["extra"] = json_text(fields)
    return Result(tokens, columns | arrays)


def _media_counts(counts: Any, loaded: Mapping[str, Column]) -> dict[str, int]:
    """What a plan says of the media of its sample, checked."""
    if not isinstance(counts, dict) or not counts.keys() <= loaded.keys():
        raise ValueError(f"media is {counts!r:.80}; it has how many values load gives of {', '.join(loaded) or 'none'}")

    wrong = [name for name, count in counts.items() if type(count) is not int or count < 0]
    if wrong:
        raise ValueError(f"media has {counts[wrong[0]]!r:.40} as the number of values of {wrong[0]}")

    return counts


def _array(column: Column, fields: dict[str, Any], tokens: array[int]) -> bytes | None:
    """The value of a declared column. Weights and masks stay a field, of which labels are made."""
    value = fields.get(column.name)
    if value is None:
        if not column.optional:
            raise TypeError(f"a dict without {column.name!r}, which the function declares; or declare it optional=True")

        fields.pop(column.name, None)
        return None

    if column.name in _WEIGHTS:
        fields[column.name] = [int(weight != 0) for weight in _list(column.name, value)]
    elif column.name not in _MASKS:
        del fields[column.name]
    return column.encode(value, len(tokens))


def _tokens(fields: dict[str, Any]) -> array[int]:
    name = next((name for name in ("input_ids", "tokens") if name in fields), None)
    if name is None:
        raise TypeError(f"a dict without 'input_ids': it has {sorted(map(str, fields))}")

    given = _list(name, fields.pop(name))
    try:
        tokens = array("i", given)
    except TypeError:
        wrong = next(token for token in given if not hasattr(token, "__index__"))
        raise TypeError(f"{name} has {wrong!r:.40}; it is a flat list of whole numbers, the token ids") from None

    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)} is negative")

    return tokens


def _list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | bytearray) or not (hasattr(values, "tolist") or hasattr(values, "__iter__")):
        need = f"a list of {name}"
        if name in ("input_ids", "tokens"):
            need = "a list of token ids, or a dict with 'input_ids'"
        raise TypeError(f"{type(values).__name__}; need {need}")

    return list(values.tolist() if hasattr(values, "tolist") else values)


def _labels(fields: dict[str, Any], tokens: array[int]) -> Sequence[int] | None:
    """The labels that the fields give, as labels or as masks; None if they do not."""
    given, source = fields.pop("labels", None), "labels"
    labels = None if given is None else _checked_labels(_list("labels", given), tokens)
    for name in (*_MASKS, *_WEIGHTS):
        mask = fields.pop(name, None)
        if mask is None:
            continue

        flags = _flags(name, _list(name, mask), len(tokens))
        found = [token if flag else NOT_TRAINED for token, flag in zip(tokens, flags, strict=True)]
        if labels is not None and labels != found:
            place = next(place for place, pair in enumerate(zip(labels, found, strict=True)) if pair[0] != pair[1])
            raise ValueError(f"{source} and {name} differ at token {place}; return one of them, or the same in both")

        labels, source = found, name
    own = fields.get("label")
    if labels is None and own is not None and not isinstance(own, str) and hasattr(own, "__len__"):
        if len(own) == len(tokens) and all(label in (id, NOT_TRAINED) for label, id in zip(own, tokens, strict=True)):
            raise ValueError("'label' is the row's own, such as its answer; return labels of tokens as 'labels'")
    return labels


def _flags(name: str, values: list[Any], num_tokens: int) -> list[Any]:
    wrong = next((value for value in values if value not in (0, 1)), None)
    if wrong is not None:
        declare = f"declare tokenize_fn.columns = (Column({name!r}, 'float32', follows='labels'),)"
        way_out = f"; for weights {declare}" if name in _WEIGHTS else ""
        raise ValueError(f"{name} has {wrong!r:.40}, and must be 0 or 1 for each token{way_out}")

    if len(values) != num_tokens:
        raise ValueError(
            f"{name} has {len(values)} values for {num_tokens} tokens; it needs one for each token, also of the prompt"
        )

    return values


def _checked_labels(labels: list[Any], tokens: array[int]) -> list[int]:
    if len(labels) != len(tokens):
        raise ValueError(f"{len(labels)} labels for {len(tokens)} tokens")

    wrong = [number for number, label in enumerate(labels) if label not in (tokens[number], NOT_TRAINED)]
    if not wrong:
        return labels

    if any(label != NOT_TRAINED for label in labels[:-1]) and all(
        label in (id, NOT_TRAINED) for label, id in zip(labels, [*tokens[1:], NOT_TRAINED], strict=True)
    ):
        raise ValueError("the labels are shifted: each is the next token; return them unshifted, collators shift them")

    raise ValueError(
        f"labels[{wrong[0]}] is {labels[wrong[0]]}, and the token {tokens[wrong[0]]}; a label must be the token itself "
        f"where it is trained, and {NOT_TRAINED} elsewhere"
    )


def json_text(value: Any) -> bytes:
    """JSON text with NaN and lone surrogates, which rows may also contain."""
    return json.dumps(value, default=_refuse_json).encode("ascii")


def _refuse_json(value: Any) -> None:
    what = type(value).__name__
    raise TypeError(f"a value of type {what}; values beside the tokens are what JSON has, or columns that are declared")
