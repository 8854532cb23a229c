"""Calls of tools in the form that a template writes right: arguments as an object or as JSON text, and no content.

A template is a program: its text does not tell, but what it makes of a probe does. This is a chat with one call, whose
name and arguments are words that no template has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from asyncdata.tokenization.rows import Message, RowFault, decode_value

_KINDS = (dict, str)
_NAME, _WORD = "asyncdata_probe", "asyncdata_word"
_OBJECT = {_WORD: _WORD}
_TEXT = json.dumps(_OBJECT)
_MISWRITTEN = (str(_OBJECT), repr(_TEXT), f'\\"{_WORD}')
"""An object or JSON text as Python shows them, and JSON text that is encoded once more."""

_EMPTY: tuple[Message, ...] = ({}, {"content": None}, {"content": ""})
"""No content: without the key first, as transformers leaves out a null."""

_SCHEMA = {"name": ".", "description": ".", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _SCHEMA}]


class _Forms(NamedTuple):
    """What a template writes right.

    :ivar grade: 2 if it writes the arguments of a call, 1 if only its name, 0 if nothing, -1 if it rejects calls.
    :ivar arguments: their types; () if they are not written.
    :ivar beside_calls: no content beside calls; the first form is given in place of one that is not here.
    :ivar of_tools: the same for null in a tool's message.
    """

    grade: int = -1
    arguments: tuple[type, ...] = ()
    beside_calls: tuple[Message, ...] = _EMPTY
    of_tools: Message = _EMPTY[0]


class _Probe(NamedTuple):
    """Chats with a call as a template may expect them: with tools, as the end of a chat, without ``function``."""

    render: Callable[[list[Message], list[Message] | None], str]
    tools: list[Message] | None
    length: int
    is_plain: bool

    def forms(self) -> _Forms:
        """What the template writes right of them."""
        texts = self._texts(_KINDS, range(len(_EMPTY)), [{"content": "."}])
        grades = {place: _grade(text) for place, text in texts.items()}
        best = max(grades.values(), default=-1)
        right = {place: texts[place] for place, grade in grades.items() if grade == best}
        if not right:
            return _Forms()

        kind = next(iter(right))[0]
        contents = _shortest({content: text for (one, content, _), text in right.items() if one is kind})
        written = {each: right[each, contents[0], 0] for each in _KINDS if (each, contents[0], 0) in right}
        # If texts differ, the template writes an object in a form of its own, and passes text on as it is.
        kinds = tuple(written) if len({*written.values()}) == 1 else (dict,)
        of_tools = {number: text for (_, _, number), text in self._texts((kind,), contents[:1], _EMPTY).items()}
        return _Forms(
            best,
            kinds if best == 2 else (),
            # A template that does not write calls would make an empty turn of one without content.
            tuple(_EMPTY[number] for number in contents) if best else _EMPTY,
            _EMPTY[next(iter(_shortest(of_tools)), 0)],
        )

    def _texts(
        self, kinds: Iterable[type], contents: Iterable[int], of_tools: Iterable[Message]
    ) -> dict[tuple[type, int, int], str]:
        """What the template writes, unless it rejects the chat."""
        found = {}
        for kind, content, (number, of_tool) in product(kinds, contents, enumerate(of_tools)):
            function = {"name": _NAME, "arguments": _OBJECT if kind is dict else _TEXT}
            call = {"id": "callprobe", "type": "function", **(function if self.is_plain else {"function": function})}
            chat = [
                {"role": "user", "content": "."},
                {"role": "assistant", **_EMPTY[content], "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "callprobe", "name": ".", **of_tool},
                {"role": "assistant", "content": "."},
            ]
            with suppress(RowFault):
                found[kind, content, number] = self.render(chat[: self.length], self.tools)
        return found


def _shortest(texts: dict[int, str]) -> list[int]:
    """The contents of which nothing is written: a longer text has a None, a null, or an empty turn."""
    return [number for number, text in texts.items() if len(text) == min(map(len, texts.values()))]


def _grade(text: str) -> int:
    is_right = _WORD in text and not any(words in text for words in _MISWRITTEN)
    return 2 if is_right else int(_NAME in text)


class Fitting:
    """Brings chats into the form that a template writes right. It is probed by the first chat that needs it.

    :param render: the template; it raises RowFault for a chat that it rejects. It may run forever, so nothing is probed
        before there are rows.
    """

    def __init__(self, render: Callable[[list[Message], list[Message] | None], str]) -> None:
        self._render = render

    def __call__(self, messages: list[Message]) -> list[Message]:
        """The chat, with calls of tools, and turns without content, in the form that the template writes right.

        :raises RowFault: if arguments of a call are text, and no JSON object.
        """
        if not any("tool_calls" in message or message.get("content") is None for message in messages):
            return messages

        return [_fitted(number, message, self._forms) for number, message in enumerate(messages)]

    @cached_property
    def _forms(self) -> _Forms:
        found = _Forms()
        for probe in product((None, _TOOLS), (4, 2), (False, True)):
            if found.grade < 2:
                found = max(found, _Probe(self._render, *probe).forms(), key=itemgetter(0))
        return found


def _fitted(number: int, message: Message, forms: _Forms) -> Message:
    empty: tuple[Message, ...] = (forms.of_tools if message.get("role") == "tool" else {}, {"content": ""})
    if message.get("tool_calls"):
        message, empty = fit_calls(number, message, forms.arguments), forms.beside_calls
    if message.get("content") is None or (message["content"] == "" and {"content": ""} not in empty):
        rest = message if empty[0] else {key: value for key, value in message.items() if key != "content"}
        return {**rest, **empty[0]}

    return message


def fit_calls(number: int, message: Message, kinds: tuple[type, ...] = (dict, str)) -> Message:
    """The message with arguments of calls of these types; (): as they are.

    :raises RowFault: if they are text, and no JSON object.
    """
    calls = message.get("tool_calls")
    if not (kinds and isinstance(calls, list)):
        return message

    made = [_fit(f"messages[{number}], tool_calls[{place}]", call, kinds) for place, call in enumerate(calls)]
    return {**message, "tool_calls": made}


def _fit(place: str, call: Any, kinds: tuple[type, ...]) -> Any:
    """The call. Its arguments are its own key, or a key of its function."""
    if not isinstance(call, dict):
        return call

    if isinstance(call.get("function"), dict):
        call = {**call, "function": _fit(place, call["function"], kinds)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        decoded = None
        with suppress(RowFault, UnicodeEncodeError):
            decoded = decode_value(arguments.encode())
        if not isinstance(decoded, dict):
            name, shown = ascii(call.get("name")), ascii(arguments if len(arguments) < 60 else arguments[:60] + "...")
            reason = f"{place} of {name}: its arguments are text that is no JSON object: {shown}"
            raise RowFault("AD111", f"{reason}; write an object, or its JSON text: {{}} for a call without arguments")

        return call if str in kinds else {**call, "arguments": decoded}

    if isinstance(arguments, dict) and dict not in kinds:
        with suppress(TypeError, ValueError, RecursionError):  # the template is given the object, and may reject it
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}

    return call
