"""Chats to text through a tokenizer's Jinja template, as ``apply_chat_template(..., tokenize=False)`` renders them.

Import it only where a template is used: Jinja adds to a worker's start.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from asyncdata.errors import ConfigError
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

    from jinja2.parser import Parser

__all__ = ("ChatTemplate", "choose_templates")

Message = dict[str, Any]

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_TEMPLATE_FILE = "<template>"  # what Jinja calls the code of a template that is no file


class ChatTemplate:
    """One template, compiled.

    :param source: the template's text.
    :param variables: what it always sees: the special tokens, and the user's own.
    :param today: what ``strftime_now`` takes for the time. The clock's would make other tokens of a row tomorrow.
    :ivar has_generation: whether it has ``{% generation %}`` blocks.
    :raises ConfigError: if it is no valid template, or needs ``today``.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], today: datetime | None = None) -> None:
        if "strftime_now" in source and today is None and "date_string" not in variables:
            raise ConfigError(
                "AD411 the chat template writes today's date, so that its tokens would change at midnight; fix it: "
                "today='2026-01-31', or chat_template_kwargs={'date_string': '31 Jan 2026'}"
            )

        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"AD411 the chat template's line {error.lineno} is no Jinja: {error.message}") from error

        generation: Any = environment.extensions[_Generation.identifier]
        self.has_generation: bool = generation.is_used
        self._variables = {"documents": None, "add_generation_prompt": False, **variables}
        if today is not None:
            self._variables.setdefault("strftime_now", today.strftime)

    def render(self, messages: Iterable[Message], tools: list[Message] | None = None, **variables: Any) -> str:
        """The chat as text.

        :param tools: schemas of the tools that the model may call; an empty list is not the same as none.
        :param variables: go before the template's own; ``generation_marks``, a pair of strings, is put around what is
            in its ``{% generation %}`` blocks.
        :raises RowFault: if the template refuses the chat, or fails on it.
        """
        chat = [_normalized(message) for message in messages]
        seen = {**self._variables, **variables, "messages": chat, "tools": tools}
        try:
            return self._template.render(seen)
        except Exception as error:  # a template is a program: it may raise anything
            line = _template_line(error.__traceback__)
            where = "chat template" if line is None else f"chat template line {line}"
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            raise RowFault("AD412", f"{where}: {kind}{error}") from error


def choose_templates(templates: Mapping[str, str], chosen: str | None = None) -> tuple[str, str]:
    """The text of the template for chats without tools, and of the one for chats with tools.

    :param templates: the tokenizer's, by name.
    :param chosen: one of their names, or a template's text.
    :raises ConfigError: if there is no such template.
    """
    if chosen is not None and chosen not in templates and "{" in chosen:
        return chosen, chosen

    name = chosen or "default"
    if name not in templates:
        has = f"its templates are {', '.join(sorted(templates))}" if templates else "it has none"
        raise ConfigError(
            f"AD411 the tokenizer has no chat template {name!r}: {has}. Pass chat_template= with a template's text or "
            "name, or a tokenizer that has one, or apply_chat_template=False."
        )

    with_tools = "tool_use" if chosen is None and "tool_use" in templates else name
    return templates[name], templates[with_tools]


def _normalized(message: Message) -> Message:
    """A message as templates expect it: no key without a value, and its reasoning under each name it goes by."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message

    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _template_line(trace: TracebackType | None) -> int | None:
    """The template's line that failed: the innermost one, be it in a macro."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model is to learn; the text is as without it.

    Only a rendering with ``generation_marks`` shows where the blocks are.
    """

    tags = {"generation"}
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render", [nodes.Name("generation_marks", "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, marks: tuple[str, str] | Undefined, caller: Callable[[], str]) -> str:
        return caller() if isinstance(marks, Undefined) else marks[0] + caller() + marks[1]


class _GuardedNamespace(Namespace):
    """``namespace()`` without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict`` without the type's attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace; rename it")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    raise TemplateError("it asks for today's date; give one: today='2026-01-31'")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for. They come with tokenizers from anywhere, hence the sandbox."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        dict=_Dict(), namespace=_GuardedNamespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return environment
