"""Runs a chat template on a chat whose values are proxies (see ``symbolic_values``).

Jinja itself compiles the code that runs. Before, the syntax tree is checked to have known nodes only, and is rewritten
so that every operation on a value is a method of the proxy or a function of this module:

- A value that is written, or joined by ``~``, passes through a filter that writes its symbol.
- A rendered string that becomes a value again, from a macro or a ``{% set %}`` block, becomes a ``Text`` again.
- Filters, tests, calls, attributes and subscripts are those below. Each is exact for proxies, or refuses them.
- Operators are methods of the proxies.

So the result depends only on the shape and the recorded guards: it is the text of every chat of the shape that passes
the guards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from asyncdata.tokenization.chat_template.jinja_environment import Generation, make_environment, normalized
from asyncdata.tokenization.chat_template.symbolic_values import Text, Trace, UnprovenError, Value, is_plain, stand_in
from asyncdata.tokenization.rows import Message, RowFault

_KNOWN_NODES = frozenset(
    "Template Output TemplateData Const Name NSRef Tuple List Dict Pair Keyword CondExpr Filter Test Call Getitem "
    "Getattr Slice Concat Compare Operand Mul Div FloorDiv Add Sub Mod Pow Not Neg Pos And Or For If Macro CallBlock "
    "Assign AssignBlock With ExtensionAttribute Break Continue".split()
)
_RANDOM = frozenset({"random"})
_OF_STRINGS = frozenset("trim upper lower capitalize title replace indent tojson string".split())
"""Filters that are pure functions of their subject and return a string."""
_OF_CONTAINERS = frozenset("list length count first last items reverse map select reject selectattr rejectattr".split())
"""Filters that return the items of a container, or apply tests and subscripts to them."""
_LENGTHS = frozenset({"length", "count"})
_OF_ANYTHING = frozenset({"default", "d"})
_OF_TYPES = frozenset(
    "defined undefined none boolean integer float number string mapping iterable sequence callable".split()
)
"""Tests that depend only on the type of their subject."""
_OF_VALUES = frozenset("eq equalto == ne != in".split())
"""Tests that are operators."""
_OF_JINJA = frozenset({"filter", "test"})
"""Tests for the names that Jinja has."""
_FUNCTIONS = ("range", "raise_exception", "strftime_now")
_MAKERS = ("dict", "namespace")
_OF_SCOPES = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to the call of a function that takes its context."""
_HOLDERS = frozenset({str, list, tuple, dict})
_READERS = frozenset({"get", "items", "keys", "values"})
"""Methods of a dict that return its values."""


class SymbolicTemplate:
    """A template that can run on proxies.

    :param source: the template's text.
    :param variables: the variables of every rendering.
    :raises UnprovenError: if it has statements that are not in the list above.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        if not is_plain([value for value in variables.values() if type(value) in _HOLDERS]):
            raise UnprovenError("a variable with characters that stand for texts here")

        self._environment = environment = make_environment(_Environment)
        tree = environment.parse(source)
        _check(tree)
        environment.tell_apart(variables)
        _Rewriter().visit(tree)
        tree.set_environment(environment)
        self._template = environment.from_string(tree)
        self._variables = variables
        self._lock = threading.Lock()

    def render(self, trace: Trace, messages: Iterable[Message], tools: Any, variables: Mapping[str, Any]) -> str:
        """The chat as text, with symbols for the values.

        :raises RowFault: if the template rejects every chat that passes the guards.
        :raises UnprovenError: if an operation is refused.
        """
        chat = [normalized(message) for message in messages]
        seen = {**self._variables, **variables, "messages": chat, "tools": tools}
        try:
            with self._lock:
                self._environment.trace = trace
                text = self._template.render(seen)
        except Exception as error:
            # A rejection by the template itself holds for every such chat; any other error may be due to a proxy.
            if isinstance(error, TemplateError) and not trace.is_broken:
                raise RowFault("AD412", str(error)) from error

            raise UnprovenError(f"{type(error).__name__}: {error}") from error
        if trace.is_broken:
            raise UnprovenError("the template caught the error of a refused operation")

        return text


class SymbolicChat:
    """A chat whose values are proxies.

    :ivar messages: the messages; their roles are plain strings.
    :raises UnprovenError: if a role or a key contains a symbol.
    """

    def __init__(self, template: SymbolicTemplate, messages: list[Message], tools: list[Message] | None) -> None:
        if not is_plain([[*message, message["role"]] for message in messages]):
            raise UnprovenError("a role or a key with characters that stand for texts here")

        self._template = template
        self.trace = trace = Trace()
        self.messages = [
            {key: value if key == "role" else trace.load(number, key, value) for key, value in message.items()}
            for number, message in enumerate(messages)
        ]
        self.tools: Any = trace.load(None, "tools", tools)

    def rendered(self, messages: Iterable[Message], tools: Any = None, **variables: Any) -> str:
        """The text of ``messages``: proxies of this chat, or messages with plain values."""
        text = self._template.render(self.trace, messages, tools, variables)
        self.trace.note(text)
        return text


def _check(tree: nodes.Template) -> None:
    for node in [tree, *tree.find_all(nodes.Node)]:
        name = type(node).__name__
        if name not in _KNOWN_NODES:
            raise UnprovenError(f"line {node.lineno}: {name}")

        words = getattr(node, "data", None) or getattr(node, "value", None)
        if isinstance(words, str) and not is_plain(words):
            raise UnprovenError(f"line {node.lineno}: characters that stand for texts here")


def _filtered(node: nodes.Expr | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=1 if node is None else node.lineno)


class _Rewriter(NodeTransformer):
    """Adds a filter of this module to every value that is written, joined or captured."""

    def get_visitor(self, node: nodes.Node) -> Any:
        """The method that rewrites nodes of this kind; None for kinds that stay unchanged."""
        return getattr(self, f"rewrite_{type(node).__name__.lower()}", None)

    def rewrite_output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            each if isinstance(each, nodes.TemplateData) else _filtered(each, "_shown") for each in node.nodes
        ]
        return node

    def rewrite_concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_joined")

    def rewrite_call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_captured")

    def rewrite_callblock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node.call)  # its result is written unchanged
        node.defaults = [self.visit(each) for each in node.defaults]
        node.body = [self.visit(each) for each in node.body]
        return node

    def rewrite_assignblock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_captured")
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's operations, each of which is exact for proxies or refuses them.

    :ivar trace: the trace of the current run.
    """

    trace: Trace

    def tell_apart(self, variables: Mapping[str, Any]) -> None:
        """Wrap the filters, tests and functions of Jinja, which do not know proxies."""
        self.trace = Trace()  # Jinja evaluates constants while it compiles the template
        known = {**self.globals, **variables}
        self._functions = [known[name] for name in _FUNCTIONS]
        self._makers = [self.globals[name] for name in _MAKERS]
        for name, function in [*self.filters.items()]:
            self.filters[name] = _with_context(function, partial(self._filtered, name))
        for name, function in [*self.tests.items()]:
            self.tests[name] = _with_context(function, partial(self._tested, name))
        self.filters["join"] = self._join
        self.filters.update(_shown=self._shown, _joined=self._joined, _captured=self._captured)

    def refuse(self, what: str) -> NoReturn:
        """:raises UnprovenError: always."""
        self.trace.refuse(what)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See the sandbox."""
        self.trace.count()
        if isinstance(obj, partial):
            self.refuse("an attribute of a method")
        if not isinstance(obj, Text):
            return super().getattr(_opened(obj), attribute)

        return obj.method(attribute) if hasattr("", attribute) else self.undefined(obj="", name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See the sandbox."""
        self.trace.count()
        if isinstance(obj, Text) and isinstance(argument, str):
            return self.getattr(obj, argument)

        if isinstance(obj, Text) or not is_plain(argument):
            self.refuse("a subscript")
        return super().getitem(_opened(obj), argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See the sandbox. Only functions that are exact for proxies are called, and others with plain arguments."""
        given = {name: value for name, value in kwargs.items() if name not in _OF_SCOPES}
        if not self._may_call(function, args, given):
            self.refuse("a call")
        return super().call(context, function, *args, **kwargs)

    def _may_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if isinstance(function, Macro) or isinstance(getattr(function, "__self__", None), Generation):
            return True

        if any(function is each for each in self._makers):
            return is_plain(args)

        owner = getattr(function, "__self__", None)
        if type(owner) is dict and function.__name__ in _READERS:
            return True

        is_known = isinstance(function, partial) or any(function == each for each in self._functions)
        return is_plain([args, kwargs]) and (is_known or (type(owner) in (str, list, dict) and is_plain(owner)))

    def _filtered(self, name: str, function: Callable[..., Any], lead: list[Any], *args: Any, **kwargs: Any) -> Any:
        subject, *rest = map(self._captured, args)
        is_known = is_plain([rest, kwargs])
        if name in _RANDOM:
            self.refuse(name)
        if (is_known and is_plain(subject)) or name in _OF_ANYTHING:
            return function(*lead, subject, *rest, **kwargs)

        if not is_known:
            self.refuse(name)
        if isinstance(subject, Text | Value) and name in _OF_STRINGS:
            if name == "string" and isinstance(subject, Text):
                return subject

            return subject.derive(
                lambda value: function(*lead, value, *rest, **kwargs), "|", name, repr((rest, kwargs))
            )

        if isinstance(subject, Text) and name in _LENGTHS:
            return subject.derive(len, "|", "length")

        return function(*lead, _opened(subject), *rest, **kwargs) if name in _OF_CONTAINERS else self.refuse(name)

    def _tested(self, name: str, function: Callable[..., Any], lead: list[Any], *args: Any, **kwargs: Any) -> Any:
        subject, *rest = map(self._captured, args)
        if name in _OF_TYPES:
            return function(*lead, stand_in(subject), *rest, **kwargs)

        if name in _OF_JINJA or (name not in _OF_VALUES and not is_plain([subject, rest, kwargs])):
            self.refuse(name)
        return function(*lead, subject, *rest, **kwargs)

    def _shown(self, value: Any) -> str:
        """The text that is written for a value."""
        self.trace.count()
        if isinstance(value, Text):
            return value.rendered

        if isinstance(value, Value):
            written: Text = value.derive(str, "str")
            return written.rendered

        return str(value) if is_plain(value) else self.refuse("a value that is written")

    def _joined(self, values: Iterable[Any]) -> str | Text:
        return self.trace.captured("".join([self._shown(value) for value in values]))

    def _join(self, values: Any, between: Any = "") -> str | Text:
        return self.trace.captured(self._shown(between).join([self._shown(value) for value in values]))

    def _captured(self, value: Any) -> Any:
        return self.trace.captured(value) if type(value) is str else value


def _with_context(function: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for a filter or test, called as Jinja calls the original."""
    num_lead = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, list(args[:num_lead]), *args[num_lead:], **kwargs)

    return called


def _opened(value: Any) -> Any:
    return value.opened() if isinstance(value, Value) else value
