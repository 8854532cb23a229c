"""The text of a prompt and its answer from a row's values, and the place to cut a prompt. Pure functions."""

from __future__ import annotations

from string import Formatter
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.tokenization.spans import Offsets, Span

__all__ = ("Cut", "Filled", "Layout", "place_cut")

Cut = Literal["truncate_context_left", "truncate_context_right", "truncate_context_middle"]


class Filled(NamedTuple):
    """A layout with a row's values in it.

    :ivar context: the range of characters of the context in the prompt; empty if it has none.
    :ivar asked: the end of the row's last value in the prompt; only text of the layout follows.
    """

    prompt: str
    answer: str
    context: Span
    asked: int


class Layout:
    """Two format strings whose fields are keys of a row.

    :ivar keys: the keys, each once.
    :raises ConfigError: if they are not valid format strings, or the context is not exactly one field of the prompt.
    """

    def __init__(self, prompt: str, answer: str, context_key: str | None) -> None:
        self._prompt = _pieces("prompt", prompt)
        self._answer = _pieces("answer", answer)
        self._context_key = context_key
        self.keys = list(dict.fromkeys(key for _, key in self._prompt + self._answer if key is not None))
        if context_key is not None and [key for _, key in self._prompt].count(context_key) != 1:
            raise ConfigError(f"context_key={context_key!r} must be one field of prompt={prompt!r}")

        if not any(key for _, key in self._answer):
            raise ConfigError(f"answer={answer!r} has no field, such as '{{target}}', to be filled from the row")

    def fill(self, values: Mapping[str, str]) -> Filled:
        """The texts for a row.

        :param values: one for each of :attr:`keys`.
        """
        prompt, context, asked = "", (0, 0), 0
        for words, key in self._prompt:
            prompt += words
            if key is not None:
                start, prompt = len(prompt), prompt + values[key]
                asked = len(prompt.rstrip())
                if key == self._context_key:
                    context = start, len(prompt)
        answer = "".join(words + (values[key] if key is not None else "") for words, key in self._answer)
        return Filled(prompt, answer, context, asked)


def _pieces(name: str, text: str) -> list[tuple[str, str | None]]:
    """Pairs of literal text, and the key whose value follows it."""
    try:
        pieces = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: {error}; write two braces for a literal one") from None

    for _, key, spec, conversion in pieces:
        if key is not None and (not key or set(key) & set(".[]") or spec or conversion):
            raise ConfigError(f"{name}={text!r}: a field is a key of the row in braces, as {{question}}; got {key!r}")

    return [(words, key) for words, key, _, _ in pieces]


def place_cut(offsets: Offsets, context: Span, num_tokens: int, cut: Cut) -> Span:
    """The range of tokens to remove from the context: at least ``num_tokens``.

    No character is split: if several tokens share one, all of them are removed.

    :param context: the range of tokens of the context, at least ``num_tokens``.
    """
    first, last = context
    start = {
        "truncate_context_left": first,
        "truncate_context_right": last - num_tokens,
        "truncate_context_middle": first + (last - first - num_tokens + 1) // 2,
    }[cut]
    stop = start + num_tokens
    while start > first and offsets.stops[start - 1] > offsets.starts[start]:
        start -= 1
    while stop < last and offsets.starts[stop] < offsets.stops[stop - 1]:
        stop += 1
    return start, stop
