"""Tokenize functions of XTuner's protocol, unchanged: in two states, if they have them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import canonical, digest
from asyncdata.core.settings import Settings, resolve_path
from asyncdata.tokenization.user_function import FunctionTokenizer, Result, counted, declared_of, json_text, read_sample

if TYPE_CHECKING:
    from asyncdata.core.columns import Column
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter

_COUNTS = ("num_tokens", "proxy_attn_flops")  # computed from the tokens, so not stored


class XTunerTokenizeFn(Settings, frozen=True, forbid_unknown_fields=True):
    """Rows to samples by an object of XTuner's protocol: ``input_ids`` become tokens, ``labels`` become labels.

    Every worker creates the object once. Its ``cache`` state counts the tokens of rows, and says what they cost. Its
    ``runtime`` state makes the samples: where they have columns, only those that are delivered next, within
    ``Limits(max_media_bytes=)``, so that each picture is opened once an epoch. A row with ``num_tokens`` 0 is dropped
    as ``num_tokens_0``: this is how XTuner marks a filtered row. All other keys of a result are stored in ``extra``.

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
        columns = [column.key for column in _columns_of(made)]
        weights = [getattr(made, f"{name}_pack_weight", usual) for name, usual in (("llm", 1.0), ("visual", 0.0))]
        costs = [weights] if weights != [1.0, 0.0] else []  # as it was written before costs were planned with
        parts = [self.arguments, str(made.hash()), *columns, *self._call_arguments().items(), *costs]
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

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the object gives beside tokens."""
        return (
            _columns_by(self.build, canonical(self.arguments))
            if isinstance(self.build, str)
            else _columns_of(self.build)
        )

    def open(self) -> Any:
        """Create the object."""
        made = self._make()
        columns, arguments = _columns_of(made), self._call_arguments()
        is_media = not declared_of(made) and bool(columns)
        call = _Call(made, columns, arguments, media=is_media) if columns or arguments else made
        whole = FunctionTokenizer(call, read_xtuner_result)
        return _TwoStates(made, whole, loads=bool(columns)) if hasattr(made, "set_state") else whole

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


class _TwoStates:
    """An object of XTuner's protocol in its two states, of which it has one at a time.

    :param whole: calls it.
    :param loads: whether its samples have columns. Then a plan has nothing but counts, and the load all else.
    :ivar whole: what makes whole samples, if a call does not.
    """

    def __init__(self, made: Any, whole: FunctionTokenizer, *, loads: bool) -> None:
        self._made, self._loads = made, loads
        self.whole = self.load if loads else None
        self._whole, self._counts = whole, FunctionTokenizer(lambda row: made(row), _read_count)

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        if self._loads:
            self.count(rows, out)
            return

        self._made.set_state("runtime")
        self._whole(rows, out)

    def count(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write how many tokens each row has, and its cost."""
        self._made.set_state("cache")
        try:
            self._counts(rows, out)
        finally:
            self._made.set_state("runtime")

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write each row as a whole."""
        self._made.set_state("runtime")
        self._whole.load(rows, out)


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


def _columns_of(made: Any) -> tuple[Column, ...]:
    """The columns of an object. Where it has two states, the second makes them."""
    found = declared_of(made) or _media_columns(made)
    if not hasattr(made, "set_state"):
        return found

    return tuple(msgspec.structs.replace(column, phase="load") for column in found)


@functools.lru_cache(maxsize=64)  # making an object takes seconds
def _columns_by(build: str, arguments: bytes) -> tuple[Column, ...]:
    return _columns_of(XTunerTokenizeFn(build, msgspec.json.decode(arguments))._make())


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


def read_xtuner_result(result: Any, columns: Sequence[Column] = ()) -> Result | str:
    """Read a result of XTuner's protocol: always a dict, and without labels or a mask every token is trained.

    :raises TypeError, ValueError, OverflowError, RecursionError: if it is not a sample.
    """
    if not isinstance(result, Mapping):
        raise TypeError(f"{type(result).__name__}; need a dict with 'input_ids'")

    if result.get("num_tokens") == 0:
        return "num_tokens_0"

    return read_sample(dict(result), columns, _COUNTS, trains_all=True)


def _read_count(result: Any, columns: Sequence[Column] = ()) -> Result | str:
    """Read what an object of XTuner's protocol says of a row in its first state: how many tokens it has, and its cost.

    :raises TypeError, ValueError, OverflowError: if it is not a count.
    """
    if not isinstance(result, Mapping):
        raise TypeError(f"{type(result).__name__}; need a dict with 'num_tokens'")

    number = result["num_tokens"] if "num_tokens" in result else len(result["input_ids"])
    if not number:
        return "num_tokens_0"

    number = index(number)
    cost, of_text = result.get("proxy_attn_flops"), round(number / 128) ** 2
    costs = {} if cost is None or cost == of_text else {"cost": json_text(float(cost))}
    return counted(number, {}, **costs)
