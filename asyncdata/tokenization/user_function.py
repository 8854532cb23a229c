"""Runs a user's function as a tokenizer of batches: decodes rows, reads results, and reports faults."""

from __future__ import annotations

import inspect
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError, raise_if_shortage, user_traceback
from asyncdata.core.imports import resolve_path
from asyncdata.core.settings import Settings
from asyncdata.tokenization.rows import RowFault, decode_object
from asyncdata.tokenization.spans import NOT_TRAINED, encode_spans, trained_runs

if TYPE_CHECKING:
    from asyncdata.core.columns import Column
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter

_FIELDS = ("prompt", "label", "metadata")
_MAX_REASON = 200
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask")
_WEIGHTS = ("loss_weights", "loss_weight", "loss_scale")  # masks, if they are only 0 and 1
_XTUNER_COUNTS = ("num_tokens", "proxy_attn_flops")  # computed from the tokens, so not stored


class FunctionTokenizer:
    """Runs a user's function: ``fn(row)`` for each row, or ``fn(rows)`` if the function has ``batched = True``.

    A result is None (dropped), a list of token ids, or a dict with ``input_ids`` (or ``tokens``) and, if wanted,
    ``labels``, ``prompt``, ``label``, ``metadata`` and any other key with a JSON value, which is stored in
    ``sample.extra``. What the function declares as ``columns`` is an array (see :class:`~asyncdata.Column`); where it
    has a ``load``, ``media`` says how many values that will give of each of its columns. A label is
    the token itself if it is trained, and -100 otherwise. A mask such as ``loss_mask``, 0 or 1 for each token, makes
    the labels. A result of type ``str`` is the reason to drop the row.

    :param read: reads a result; None: as :func:`read_result`.
    """

    def __init__(
        self, function: Callable[..., Any], read: Callable[[Any, Sequence[Column]], Result | str] | None = None
    ) -> None:
        declared = declared_of(function)
        self._function = function
        self._loading: Callable[[Any, Any], Any] = getattr(function, "load", None) or _no_load
        self._columns = [column for column in declared if column.phase == "plan"]
        self._loaded = {column.name: column for column in declared if column.phase == "load"}
        self._read = read or read_result
        self._batched = bool(getattr(function, "batched", False))

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        out.declare(column.key for column in self._columns)
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
        if not self._loaded or not isinstance(result, Mapping) or "media" not in result:
            return self._read(result, self._columns)

        found = self._read({name: value for name, value in result.items() if name != "media"}, self._columns)
        if not isinstance(found, str):
            found.columns["media"] = _json(_media_counts(result["media"], self._loaded))
        return found

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """The second phase: plans each row again, and writes its tokens with the arrays of ``function.load``."""
        for row, raw in enumerate(rows):
            out.progress(row)
            try:
                argument = [decode_object(raw)] if self._batched else decode_object(raw)
                plan = self._function(argument)
                (plan,) = plan if self._batched else (plan,)
                values = self._loading(decode_object(raw), plan)  # decoded again: the plan may have changed it
            except BaseException as error:  # a user's function may raise anything, and call exit()
                raise_if_shortage(error)
                out.fail(row, RowFault("AD421", f"load raised {error!r}", raw, user_traceback(error)))
                continue

            try:
                found = self._planned(plan)
                if isinstance(found, str):
                    raise TypeError(f"the plan drops the row now: {found}")

                out.keep(row, found.tokens, **self._arrays(dict(values), found))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                out.fail(row, RowFault("AD425", f"load returned other media than were planned: {error}", raw))

    def _arrays(self, values: dict[str, Any], plan: Result) -> dict[str, bytes]:
        """What load has returned, as far as it was planned."""
        counts = json.loads(plan.columns.get("media", b"{}"))
        if values.keys() != counts.keys():
            raise ValueError(f"{sorted(values)}, and the plan's media has {sorted(counts)}")

        arrays = {}
        for name, count in counts.items():
            column = self._loaded[name]
            data = column.encode(values[name], len(plan.tokens))
            if len(data) != column.num_bytes(count):
                raise ValueError(f"{name} has {len(data):,} bytes, and {count} values were planned")

            arrays[column.key] = data
        return arrays


class Result(NamedTuple):
    """A sample: its tokens, and its columns as JSON text."""

    tokens: array[int]
    columns: dict[str, bytes]


def declared_of(function: Any) -> tuple[Column, ...]:
    """The columns that a tokenize function declares.

    :raises ConfigError: if they are none, or nothing loads the columns of the phase ``load``.
    """
    if getattr(function, "columns", None) is None:
        return ()

    from asyncdata.core.columns import declared_columns  # imports numpy, which a worker needs for nothing else

    found = declared_columns(function)
    loaded = [column.name for column in found if column.phase == "load"]
    if loaded and not callable(getattr(function, "load", None)):
        raise ConfigError(f"AD420 {function!r} has columns of the phase load ({', '.join(loaded)}), and no load")

    return found


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

    return _sample(dict(result) if isinstance(result, Mapping) else {"input_ids": result}, columns)


def read_xtuner_result(result: Any, columns: Sequence[Column] = ()) -> Result | str:
    """Read a result of XTuner's protocol: always a dict, and without labels or a mask every token is trained.

    :raises TypeError, ValueError, OverflowError, RecursionError: if it is not a sample.
    """
    if not isinstance(result, Mapping):
        raise TypeError(f"{type(result).__name__}; need a dict with 'input_ids'")

    if result.get("num_tokens") == 0:
        return "num_tokens_0"

    return _sample(dict(result), columns, _XTUNER_COUNTS, trains_all=True)


def _sample(
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
    columns |= {name: _json(fields.pop(name)) for name in _FIELDS if name in fields}
    for name, value in fields.items():
        if getattr(value, "shape", ()) or isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(
                f"{name!r} is an array; declare it, as in tokenize_fn.columns = (Column({name!r}, 'float32'),)"
            )
    if fields:
        columns["extra"] = _json(fields)
    return Result(tokens, columns | arrays)


def _no_load(row: Any, plan: Any) -> Any:
    raise TypeError("the function has no load")


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

    tokens = array("i", _list(name, fields.pop(name)))
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


def _json(value: Any) -> bytes:
    """JSON text with NaN and lone surrogates, which rows may also contain."""
    return json.dumps(value).encode("ascii")


class XTunerTokenizeFn(Settings, frozen=True, forbid_unknown_fields=True):
    """Rows to samples by an object of XTuner's protocol: ``input_ids`` become tokens, ``labels`` become labels.

    Every worker creates the object once. It runs in its ``runtime`` state; its ``cache`` state is not used, as this
    package counts the tokens itself. A result with ``num_tokens`` 0 is dropped as ``num_tokens_0``: this is how XTuner
    marks a filtered row. All other keys of a result are stored in ``extra``.

    XTuner's functions for pictures and videos give columns: ``pixel_values``, ``image_grid_thw`` and ``num_img_tokens``
    as items, and their ``position_ids`` as ``mrope``. An object that declares ``columns`` itself gives those instead.

    The fingerprint is the object's own ``hash()`` with ``build`` and ``arguments``, as the hashes of XTuner's own
    functions do not include ``max_length``. If the hash changes by itself, for example because a template contains
    today's date, a state is refused on another day unless ``allow_changed`` names ``tokenize_fn``.

    :param build: creates the object: an import path ``pkg.mod:name``, or a class or function that has one. It also
        loads the tokenizer that the object needs. With ``num_workers=0`` this may be the object itself. Its settings
        are not known then, so only canaries detect changes that its hash does not show.
    :param arguments: the keyword arguments of ``build``; JSON values.
    :param media_root: the folder of pictures and videos, as the object takes it: ``function(row, media_root=...)``.
    :raises ConfigError: for arguments that are not JSON values, or a ``build`` without an import path.
    """

    build: Any
    arguments: dict[str, Any] = {}
    media_root: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.build, str) and not _is_tokenize_fn(self.build):
            msgspec.structs.force_setattr(self, "build", _import_path(self.build))
        try:
            copy = msgspec.json.decode(canonical(self.arguments))
        except (TypeError, ValueError):
            copy = None
        if copy != self.arguments:
            raise ConfigError(f"arguments must be JSON values, got {self.arguments}")

        if not isinstance(self.media_root, str | None):
            raise ConfigError(f"media_root is the path of a folder, as text; got {self.media_root!r}")

        msgspec.structs.force_setattr(self, "arguments", copy)

    def resolve(self) -> XTunerTokenizeFn:
        """Check that the object can be created, and return self.

        :raises ConfigError: if the object does not follow XTuner's protocol.
        """
        declared_of(self._make())
        return self

    def fingerprints(self) -> dict[str, str]:
        """The object's hash, with ``build`` and ``arguments``."""
        name = self.build if isinstance(self.build, str) else _path(type(self.build))
        made = self._make()
        columns = [column.key for column in declared_of(made) or _media_columns(made)]
        parts = [self.arguments, str(made.hash()), *columns, *self._call_arguments().items()]
        return {"tokenize_fn": f"{name} {digest(canonical(parts))}"}

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as builtins.

        :raises ConfigError: if ``build`` is the object itself, which cannot be sent to a worker.
        """
        if not isinstance(self.build, str):
            raise ConfigError(
                f"AD420 a worker process cannot be sent a {type(self.build).__name__}; name what makes it, as "
                "XTunerTokenizeFn('package.module:name', {...}), or the variable of a module that holds it, as "
                "tokenize_fn='package.module:name', or use num_workers=0"
            )

        return msgspec.structs.asdict(self)

    def open(self) -> FunctionTokenizer:
        """Create the object."""
        made = self._make()
        if hasattr(made, "set_state"):
            made.set_state("runtime")
        own, arguments = declared_of(made), self._call_arguments()
        media = () if own else _media_columns(made)
        if media or arguments:
            made = _Call(made, own or media, arguments, media=bool(media))
        return FunctionTokenizer(made, read_xtuner_result)

    def _call_arguments(self) -> dict[str, str]:
        return {} if self.media_root is None else {"media_root": self.media_root}

    def _make(self) -> Any:
        found = resolve_path(self.build) if isinstance(self.build, str) else self.build
        made = found if _is_tokenize_fn(found) else self._made_by(found)
        if not _is_tokenize_fn(made):
            raise ConfigError(
                f"AD420 {self.build!r} makes a {type(made).__name__}, which lacks __call__ or hash(); "
                "name what makes an object of XTuner's protocol"
            )

        return made

    def _made_by(self, build: Any) -> Any:
        try:
            inspect.signature(build).bind(**self.arguments)
        except TypeError as error:
            raise ConfigError(
                f"AD420 {self.build!r} cannot be called with the arguments {self.arguments}: {error}; pass "
                f"tokenize_fn=XTunerTokenizeFn({self.build!r}, {{...}}) with those that it needs"
            ) from None
        except ValueError:  # some built-in callables have no signature
            pass

        return build(**self.arguments)


class _Call:
    """Calls an object, and gives its pictures the names of the columns that stand for them.

    :param media: whether the columns are :func:`_media_columns`.
    """

    def __init__(self, made: Any, columns: tuple[Column, ...], arguments: dict[str, str], *, media: bool) -> None:
        self.columns = columns
        self._made = made
        self._arguments = arguments
        self._media = media

    def __call__(self, row: dict[str, Any]) -> Any:
        result = self._made(row, **self._arguments)
        if not self._media or not isinstance(result, Mapping):
            return result

        fields = dict(result)
        positions = fields.pop("position_ids", None)
        if positions is not None:  # of shape (3, 1, num_tokens)
            fields["mrope"] = positions[:, 0].T
        if fields.get("pixel_values") is None:
            fields.pop("num_img_tokens", None)  # [0], which is no item
        return fields


def _media_columns(made: Any) -> tuple[Column, ...]:
    """What XTuner's functions for pictures give beside tokens; known by the attributes that these have."""
    if not hasattr(made, "img_context_token_id"):
        return ()

    from asyncdata.core.columns import Column  # as in declared_of

    counts = Column("num_img_tokens", "int64", "item", optional=True)
    processor: Any = getattr(made, "image_processor", None)
    if hasattr(processor, "temporal_patch_size"):
        values = 3 * processor.temporal_patch_size * processor.patch_size**2
        pixels = Column("pixel_values", "float32", "item", (values,), optional=True)
        found = (pixels, Column("image_grid_thw", "int64", "item", (3,), optional=True), counts)
        mrope = Column("mrope", "int64", shape=(3,), optional=True)
        return (*found, mrope) if getattr(made, "enable_3d_rope", True) else found

    if hasattr(made, "image_size"):
        return (Column("pixel_values", "float32", "item", (3, made.image_size, made.image_size), optional=True), counts)

    return ()


def is_of_xtuner(value: Any) -> bool:
    """Whether ``value`` is an object of XTuner's protocol, or a class of such objects."""
    if isinstance(value, type):
        return callable(getattr(value, "hash", None)) and any("__call__" in vars(each) for each in value.__mro__)

    return _is_tokenize_fn(value)


def _is_tokenize_fn(value: Any) -> bool:
    return not isinstance(value, type) and callable(value) and callable(getattr(value, "hash", None))


def _path(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', None)}"


def _import_path(build: Any) -> str:
    path = _path(build)
    if not hasattr(build, "__qualname__") or "<" in path or path.startswith("__main__:"):
        raise ConfigError(
            f"AD420 {build!r} has no import path; pass a class or function of a module, and the arguments beside it"
        )

    return path
