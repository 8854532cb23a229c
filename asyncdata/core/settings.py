"""What descriptions have in common: settings that are checked when they are given, and equal by value."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from asyncdata.core.errors import ConfigError

__all__ = ("Description", "plain_integer")


def plain_integer(value: Any) -> Any:
    """The value, or an int if it is an integer of another library, such as numpy."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, int) else value


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one thing, by name. A kind says in :meth:`check` what its settings must satisfy together.

    :raises ConfigError: for a field of the wrong type or out of its range.
    """

    def __post_init__(self) -> None:
        """A Struct's constructor does not check types."""
        for field in msgspec.structs.fields(type(self)):
            value = plain_integer(getattr(self, field.name))
            try:
                # Converted, so that it is a copy: the caller's dict or list may change later.
                msgspec.structs.force_setattr(self, field.name, msgspec.convert(value, field.type))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{type(self).__name__}: {field.name}={value!r}: {error}") from None
        self.check()

    def check(self) -> None:
        """Whether the settings go together; a kind that has more to say overrides it."""
