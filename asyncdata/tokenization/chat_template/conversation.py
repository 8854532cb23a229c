"""A chat, and renderings of it and of its parts that show the positions of its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.rows import RowFault, decode_value

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat
    from asyncdata.tokenization.chat_template.template import ChatTemplate
    from asyncdata.tokenization.chat_template.texts import Texts
    from asyncdata.tokenization.spans import Span


Message = dict[str, Any]

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


class Conversation:
    """A chat, rendered whole and in parts.

    :param texts: compares and searches rendered texts.
    :ivar text: the whole chat, rendered.
    """

    def __init__(
        self, template: ChatTemplate | SymbolicChat, messages: list[Message], tools: Any, texts: Texts
    ) -> None:
        self._template = template
        self._tools = tools
        self.messages = messages
        self.texts = texts
        self.text = template.rendered(messages, tools)

    @cached_property
    def header(self) -> str:
        """The generation prompt that the template adds to the whole chat; may be empty."""
        prompt = self.prompt(len(self.messages)) or ""
        return self.texts.constant(prompt[self.texts.num_shared(self.text, prompt) :])

    def prompt(self, length: int) -> str | None:
        """The first ``length`` messages as the prompt for the next one; None if the template rejects them."""
        return self._rendered(self.messages[:length], add_generation_prompt=True)

    def up_to(self, number: int, *, keeps_form: bool = False) -> str | None:
        """The chat up to and including a message; None if the template rejects it, or adds text at the end of a chat.

        :param keeps_form: a turn that is added after the last message has content of the same form as the message.
        """
        if number + 1 < len(self.messages):
            return self.alone(number)

        longer = self.longer(self._form(number, "", keeps_form))
        return self.text if longer is not None and self.texts.starts_with(longer, self.text) else None

    def longer(self, content: Any = "") -> str | None:
        """The chat with one more turn; None if the template rejects it."""
        return self._rendered([*self.messages, {"role": "user", "content": content}])

    def alone(self, number: int) -> str | None:
        """The chat that ends with a message; None if the template rejects it."""
        return self._rendered(self.messages[: number + 1])

    def header_of(self, number: int) -> str:
        """The generation prompt for message ``number``, or for an earlier one if that is not known; empty if none is.

        It is not known if the template renders the message before it differently as the last one of a chat.
        """
        for length in range(number, -1, -1):
            prompt, before = self.prompt(length), self._rendered(self.messages[:length])
            if prompt is not None and before is not None and prompt.startswith(before):
                return prompt[len(before) :]

        return ""

    def with_content(
        self, number: int, content: str, *, last: bool = False, keeps_form: bool = False, asks: bool = False
    ) -> str | None:
        """The chat with only ``content`` in message ``number``; None if the template rejects it.

        :param last: end the chat with this message.
        :param keeps_form: give the content the form of the message's: text, or a list of parts.
        :param asks: add the generation prompt for the next message.
        """
        message = {"role": self.messages[number]["role"], "content": self._form(number, content, keeps_form)}
        messages = [*self.messages[:number], message, *([] if last else self.messages[number + 1 :])]
        return self._rendered(messages, **({"add_generation_prompt": True} if asks else {}))

    def _form(self, number: int, content: str, keeps_form: bool) -> Any:
        is_parts = keeps_form and isinstance(self.messages[number].get("content"), list)
        return [{"type": "text", "text": content}] if is_parts else content

    def generation_blocks(self) -> list[Span] | None:
        """The ranges of the template's ``{% generation %}`` blocks; None if they are not properly separated."""
        opening, closing = self.unused_marks()
        marked = self._rendered(self.messages, generation_marks=(opening, closing))
        if marked is None or not self.texts.same(marked.replace(opening, "").replace(closing, ""), self.text):
            return None

        blocks, end = [], 0
        for number, piece in enumerate(re.split(f"([{opening}{closing}])", marked)):
            if number % 4 == 2:
                blocks.append((end, end + len(piece)))
            if number % 2 == 0:
                end += len(piece)
            elif piece != (opening if number % 4 == 1 else closing):
                return None
        return blocks

    def words_before(self, number: int, mark: str, before: str, *, keeps_form: bool = False) -> str:
        """The text that the template writes between message ``number`` and the one before it."""
        message = {"role": self.messages[number]["role"], "content": self._form(number, mark, keeps_form)}
        earlier = []
        if number:
            said = self._form(number - 1, before, keeps_form)
            earlier = [*self.messages[: number - 1], {**self.messages[number - 1], "content": said}]
        rendered = self._rendered([*earlier, message, *self.messages[number + 1 :]]) or ""
        return rendered.partition(mark)[0].rpartition(before)[2] if mark in rendered else ""

    def unused_marks(self) -> tuple[str, str]:
        """Two characters that do not occur in the text.

        :raises RowFault: if all candidates occur.
        """
        return self.texts.unused_marks(self.text)

    def _rendered(self, messages: list[Message], **variables: Any) -> str | None:
        try:
            return self._template.rendered(messages, self._tools, **variables)
        except RowFault:  # it renders the whole chat, so it rejects only this part
            return None
