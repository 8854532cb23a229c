"""What descriptions have in common: settings that are checked when they are given, and equal by value; numbers as users
give them: seconds that every clock can count, and whole numbers; functions and classes by the text that names them:
``package.module:name``, or a fixed tag; and missing packages.
"""

from __future__ import annotations

import importlib
import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from asyncdata.core.errors import ConfigError

KindT = TypeVar("KindT")


InitT = TypeVar("InitT", bound=Callable[..., None])

Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
"""The number of an epoch, a window or a row. The limit keeps what is computed from it within 64 bits."""

Exchange = Annotated[Any, msgspec.Meta(description="function of bytes")]

_FOR_EVER_S = threading.TIMEOUT_MAX / 2
"""More than a hundred years. No lock and no loop can wait for infinity."""

opening_until: ContextVar[float] = ContextVar("asyncdata_opening_until", default=math.inf)
"""Until when, on the monotonic clock, a loader may be opened here: then, no store is asked again."""


_ELSEWHERE = {"backend": "event_loop", "truncation": "overlong", "truncate": "overlong", "overlong": "truncate_packs"}
"""Settings that have another name in other libraries, or in another class of this one."""

_prepared: set[Any] = set()
_preparing = threading.RLock()


def prepared(kind: type[KindT]) -> type[KindT]:
    """``kind``, of which msgspec knows all Structs by then. If two threads have it look at one for the first time, one
    may use what the other has half made, and the process ends with a segmentation fault (msgspec 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.msgpack.Decoder(kind)
            _prepared.add(kind)
    return kind


def unknown_setting(
    name: str, known: Iterable[str], *, what: str = "setting", of: str, meant: str | None = None
) -> str:
    """What an error says of a name that there is not: the nearest that there is, and all of them.

    :param of: whose settings they are.
    :param meant: a name that is known to be meant.
    """
    import difflib  # not at a worker's start

    known = sorted(known)
    meant = meant or next(iter(difflib.get_close_matches(_ELSEWHERE.get(name, name), known, n=1)), None)
    hint = f"did you mean {meant!r}? There" if meant else "there"
    return f"there is no {what} {name!r}{of and f' of {of}'}; {hint} are {', '.join(known)}"


def wrong_value(field: msgspec.structs.FieldInfo, value: Any, error: msgspec.ValidationError) -> str:
    """What an error says of a value that the field does not take; where it takes a few, which."""
    reason = str(error).replace("`null`", "None").replace(" | null`", " | None`")
    if "enum" in reason and (choices := [repr(choice) for choice in _choices(field.type)]):
        reason = f"it must be {' or '.join(filter(None, (', '.join(choices[:-1]), choices[-1])))}"
    return f"{field.name}={value!r}: {reason}"


def _choices(kind: Any) -> list[Any]:
    """The values that a type names: a ``Literal``'s, and None."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))

    return [None] if kind is type(None) else [choice for one in get_args(kind) for choice in _choices(one)]


def _refusal(kind: type, args: tuple[Any, ...], settings: Mapping[str, Any]) -> Exception | None:
    """The error for arguments that Python has refused; None if its error was about something else."""
    import inspect

    takes = inspect.signature(kind).parameters
    for name in settings:
        if name not in takes:
            return ConfigError(unknown_setting(name, takes, of=kind.__name__))

    by_place = [name for name, one in takes.items() if one.kind is not one.KEYWORD_ONLY]
    names = ", ".join(takes)
    if len(args) > len(by_place):
        at_most = f"at most {len(by_place)} without a name ({', '.join(by_place)})" if by_place else "each by its name"
        return ConfigError(f"{kind.__name__} takes its settings {at_most}, as in name=value; they are {names}")

    if twice := [name for name in by_place[: len(args)] if name in settings]:
        return ConfigError(f"{kind.__name__} was given {', '.join(twice)} twice: by place, and by name")

    given = {*by_place[: len(args)], *settings}
    needed = [name for name, one in takes.items() if one.default is one.empty and name not in given]
    return TypeError(f"{kind.__name__} needs {', '.join(needed)}; its settings are {names}") if needed else None


def naming_settings(init: InitT) -> InitT:
    """Decorates ``__init__``: wrong names of settings are errors as in :class:`Settings`."""

    @wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        try:
            init(self, *args, **settings)
        except TypeError:
            if refusal := _refusal(type(self), args, settings):
                raise refusal from None
            raise

    return checked  # type: ignore[return-value]


class _NamingSettings(msgspec.StructMeta):
    """Makes of the refusal of a Struct's constructor, which names no class, an error that does."""

    if not TYPE_CHECKING:  # type checkers read the fields

        def __call__(self, *args: Any, **settings: Any) -> Any:
            try:
                return super().__call__(*args, **settings)
            except TypeError:
                if refusal := _refusal(self, args, settings):
                    raise refusal from None
                raise


class Settings(msgspec.Struct, frozen=True, metaclass=_NamingSettings):
    """A Struct that users make: a name that it does not take is an error with the nearest, and all that it takes.

    A call costs half a microsecond more, so what is made for each sample is a plain Struct.
    """


def plain_integer(value: Any) -> Any:
    """The value, or an int if it is an integer of another library, such as numpy."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, int) else value


class Description(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one thing, by name. A kind says in :meth:`check` what its settings must satisfy together.

    :raises ConfigError: for a field of the wrong type or out of its range.
    """

    def __post_init__(self) -> None:
        """A Struct's constructor does not check types."""
        for field in msgspec.structs.fields(type(self)):
            value = plain_integer(getattr(self, field.name))
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            try:
                # Converted, so that it is a copy: the caller's dict or list may change later.
                msgspec.structs.force_setattr(self, field.name, msgspec.convert(value, prepared(field.type)))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{type(self).__name__}: {wrong_value(field, value, error)}") from None
        self.check()

    def check(self) -> None:
        """Whether the settings go together; a kind that has more to say overrides it."""


def checked_timeout(value: Any) -> float | None:
    """``timeout_s`` of a loader or of a call, in seconds; infinity is the longest wait there is.

    :raises ConfigError: if it is not a number.
    """
    if value is None:
        return None

    try:
        seconds = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    except OverflowError:
        seconds = math.inf
    if math.isnan(seconds):
        raise ConfigError(f"`timeout_s` is a number of seconds, or None for no limit; got {value!r}")

    return min(seconds, _FOR_EVER_S)


def whole_number(value: Any) -> int:
    """The number as an int, also if it is one of numpy; -1 if it is not a whole number."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


# Functions and classes by name


def from_clone(extra: str) -> str:
    """How to install an extra of asyncdata, whose name on the package index is not ours yet."""
    return f'pip install ".[{extra}]" in a clone of asyncdata'


def missing_package(what: str, package: str, error: ImportError) -> ConfigError:
    """The error for ``what``, which needs ``package``, which cannot be imported.

    :param what: the feature, as the user knows it: ``attach``, ``Parquet``.
    :param package: the name by which pip knows it.
    :param error: what the import raised; a package may be there and broken, so its message is shown.
    """
    return ConfigError(f"{what} needs {package} ({error}): pip install {package}")


@contextmanager
def needing(what: str, package: str) -> Iterator[None]:
    """Import within the block what ``what`` needs.

    :raises ConfigError: as :func:`missing_package`, if it cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise missing_package(what, package, error) from error


def resolve_path(path: str) -> Any:
    """What ``pkg.mod:attr`` names.

    :raises ConfigError: if the text is not an import path, or cannot be imported.
    """
    module, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in (module + "." + name).split(".")):
        raise ConfigError(f"AD420 {path!r} is no import path; write 'package.module:name'")

    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"AD420 cannot import {path!r}: {error}; pass 'package.module:name'") from error

    return value


def is_loaded_instance(value: Any, path: str) -> bool:
    """Whether ``value`` is an instance of the class ``pkg.mod:Class``, without importing its module.

    Who has an instance has imported the module. So what only some runs need is not imported by those that only ask.
    """
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def tag_of(value: Any) -> str:
    """The name of a class, a function or a callable object in fingerprints and keys.

    It is the class's or function's own attribute ``tag``, which stays when the code moves to another module; else the
    import path. A subclass has no tag but its own: it may give other tokens.
    """
    owner = value if hasattr(value, "__qualname__") else type(value)
    tag = getattr(owner, "__dict__", {}).get("tag")
    return tag if isinstance(tag, str) and tag else f"{getattr(owner, '__module__', '')}:{owner.__qualname__}"
