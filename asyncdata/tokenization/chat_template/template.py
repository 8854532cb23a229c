"""Renders chats by a tokenizer's Jinja template, as ``apply_chat_template(..., tokenize=False)`` does.

Import it only if a template is used: Jinja makes the start of a worker slower.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncdata.core.errors import ConfigError, raise_if_shortage
from asyncdata.tokenization.chat_template.calls import Fitting
from asyncdata.tokenization.chat_template.jinja_environment import Generation, make_environment, normalized
from asyncdata.tokenization.chat_template.programs import NOTHING_PROVEN, Program, Shapes
from asyncdata.tokenization.rows import Message, RowFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

    from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat, SymbolicTemplate


_MAX_CHARACTERS, _MAX_TOKENS = 1_000_000, 30_000
"""Of a template. The trainer's process compiles it without a deadline, in a time that grows faster than its size: two
seconds at worst for so many of Jinja's tokens. The largest template of a known model has 7,000."""

_TEMPLATE_FILE = "<template>"  # Jinja's name for the code of a template that is not a file


@lru_cache(256)
def _contains(source: str, word: str) -> bool:
    return word in source


class ChatTemplate:
    """One template, compiled.

    :param source: the template's text.
    :param variables: the variables of every rendering: the special tokens, and the user's.
    :param today: the time for ``strftime_now``. The time of the clock would give other tokens for a row tomorrow.
    :ivar fitted: brings a chat into the form that the template writes right.
    :ivar has_generation: whether it has ``{% generation %}`` blocks.
    :ivar not_written: what it does not write of chats; None: it was not tried yet.
    :raises ConfigError: if it is not a valid template, or needs ``today``.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], today: datetime | None = None) -> None:
        if "strftime_now" in source and today is None and "date_string" not in variables:
            raise ConfigError(
                "AD411 the chat template writes today's date, so that its tokens would change at midnight; fix it: "
                "today='2026-01-31', or chat_template_kwargs={'date_string': '31 Jan 2026'}"
            )

        try:
            self._template, self.has_generation = _compiled(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"AD411 the chat template's line {error.lineno} is not valid Jinja: {error.message}"
            ) from error
        except ConfigError:
            raise
        except Exception as error:  # too deep or too long for Jinja's parser, or for Python's
            raise ConfigError(
                f"AD411 the chat template cannot be compiled: {type(error).__name__}: {error}; pass another template"
            ) from error

        self._variables = {"documents": None, "add_generation_prompt": False, **variables}
        if today is not None:
            self._variables.setdefault("strftime_now", today.strftime)
        self.not_written: list[str] | None = None
        self._source = source
        self._symbolic: SymbolicTemplate | None = None
        self._shapes = Shapes(self._prove)
        self.fitted = Fitting(self.rendered)

    def names(self, word: str) -> bool:
        """Whether its text has this word: without it, the template cannot write what is under this key."""
        return _contains(self._source, word)

    def render(self, messages: list[Message], tools: list[Message] | None = None) -> str:
        """The chat as text; by a program if one has been proven for chats of its shape.

        :param tools: schemas of the tools that the model may call; an empty list is not the same as none.
        :raises RowFault: if the template rejects the chat, or fails.
        """
        messages = self.fitted(messages)
        texts = self._shapes.texts(messages, tools)
        return self.rendered(messages, tools) if texts is None else texts[0]

    def rendered(self, messages: Iterable[Message], tools: list[Message] | None = None, **variables: Any) -> str:
        """The chat as text, by the template itself, as ``fitted`` gives it.

        :param variables: override the template's own; ``generation_marks`` is a pair of strings to write around the
            text of its ``{% generation %}`` blocks.
        :raises RowFault: if the template rejects the chat, or fails.
        """
        template = self._template
        chat = [normalized(message) for message in messages]
        seen = {**self._variables, **variables, "messages": chat, "tools": tools}
        try:
            return "".join(template.root_render_func(template.new_context(seen)))
        except Exception as error:  # a template is a program: it may raise anything
            raise_if_shortage(error)
            raise self._fault() from error

    def _fault(self) -> RowFault:
        """The fault for the exception that is being handled."""
        try:
            self._template.environment.handle_exception()  # raises it again, with the template's lines in its trace
        except Exception as error:
            line = _template_line(error.__traceback__)
            where = "chat template" if line is None else f"chat template line {line}"
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            return RowFault("AD412", f"{where}: {kind}{error}")

    def proven(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        cut: Callable[[SymbolicChat], tuple[list[str], tuple[str, ...]]],
    ) -> Program:
        """The program for chats of the shape of this one; it has no parts if the chat must be rendered.

        :param cut: returns the text of the symbolic chat in parts, and strings that no text may contain.
        """
        from asyncdata.tokenization.chat_template.symbolic_template import SymbolicChat, SymbolicTemplate
        from asyncdata.tokenization.chat_template.symbolic_values import UnprovenError

        try:
            if self._symbolic is None:
                self._symbolic = SymbolicTemplate(self._source, self._variables)
            chat = SymbolicChat(self._symbolic, messages, tools)
        except UnprovenError:
            return NOTHING_PROVEN

        try:
            return chat.trace.program(*cut(chat))
        except (UnprovenError, RowFault):  # a rejection is reported when the chat is rendered
            return chat.trace.program(None)

    def _prove(self, messages: list[Message], tools: list[Message] | None, _: object) -> Program:
        program = self.proven(messages, tools, lambda chat: ([chat.rendered(chat.messages, chat.tools)], ()))
        return program.checked(messages, tools, lambda: [self.rendered(messages, tools)])


@lru_cache(16)
def _compiled(source: str) -> tuple[Template, bool]:
    """The template, and whether it has generation blocks; once, whatever its variables are, which rows may have."""
    environment = make_environment(ImmutableSandboxedEnvironment)
    _check_size(source, environment)
    template, generation = (
        environment.from_string(source),
        cast("Generation", environment.extensions[Generation.identifier]),
    )
    return template, generation.is_used


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
            f"AD411 the tokenizer has no chat template {name!r}: {has}. Pass the text of a chat_template, or the "
            "name of one, or a tokenizer that has one"
        )

    with_tools = "tool_use" if chosen is None and "tool_use" in templates else name
    return templates[name], templates[with_tools]


def _check_size(source: str, environment: Environment) -> None:
    if len(source) > _MAX_CHARACTERS:
        size = f"{len(source):,} characters; at most {_MAX_CHARACTERS:,}"
    elif any(islice(environment.lex(source), _MAX_TOKENS, None)):
        size = f"more than {_MAX_TOKENS:,} names, operators, texts and blanks, as Jinja counts them; at most that many"
    else:
        return

    raise ConfigError(f"AD411 the chat template has {size} are compiled; pass a shorter one")


def _template_line(trace: TracebackType | None) -> int | None:
    """The template's line that failed: the innermost one, also if it is in a macro."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
