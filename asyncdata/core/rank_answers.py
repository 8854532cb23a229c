"""What the ranks answered in a call of an exchange, which sends bytes to all ranks and returns each rank's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from asyncdata.core.errors import ConfigError

MessageT = TypeVar("MessageT")


def rank_answers(
    answers: Sequence[bytes], decode: Callable[[bytes], MessageT], world_size: int, name: str
) -> list[MessageT]:
    """The messages of all ranks.

    :param name: of the setting that has the exchange.
    :raises ConfigError: AD487, if they are none.
    """
    try:
        if not all(isinstance(answer, bytes | bytearray | memoryview) for answer in answers):
            raise TypeError(f"they are of the type {type(answers[0]).__name__}")

        messages = list(map(decode, answers))
    except (msgspec.DecodeError, TypeError) as error:
        raise ConfigError(f"AD487 {name} did not return the bytes of each rank: {error}") from error

    if len(messages) != world_size:
        raise ConfigError(f"AD487 {name} returned the bytes of {len(messages)} ranks; world_size is {world_size}")

    return messages
