"""The environment of chat templates: Jinja in a sandbox, with the same names as in transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser

Message = dict[str, Any]

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_ARE_REASONING = frozenset(_REASONING_KEYS)

AnyEnvironment = TypeVar("AnyEnvironment", bound=ImmutableSandboxedEnvironment)


class Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the trained text; it does not change the rendered text.

    Only a rendering with ``generation_marks`` shows where the blocks are.

    :ivar is_used: whether a template that was parsed has such a block.
    """

    tags = {"generation"}
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that renders it."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render", [nodes.Name("generation_marks", "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, marks: tuple[str, str] | Undefined, caller: Callable[[], str]) -> str:
        return caller() if isinstance(marks, Undefined) else marks[0] + caller() + marks[1]


class _Unfolded(CodeGenerator):
    """Compiles a template without running any of it.

    Jinja evaluates constant expressions while it compiles. The trainer's process compiles templates without a deadline,
    so ``{{ 9 ** (9 ** 9) }}`` would hang it. A worker that hangs while it renders is killed.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible

        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:  # noqa: N802 - Jinja's
        """``{% autoescape %}``, which Jinja also evaluates."""
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape must be true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


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
    """``tojson`` without the HTML escapes of Jinja's own filter, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def normalized(message: Message) -> Message:
    """A message as templates expect it: without nulls but its content, and with its reasoning under each of its names.

    A null content is left only if the template writes it right: see ``calls``.
    """
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if _ARE_REASONING.isdisjoint(message):
        return message

    reasoning = next(message[key] for key in _REASONING_KEYS if key in message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def make_environment(kind: type[AnyEnvironment]) -> AnyEnvironment:
    """An environment for chat templates. It is a sandbox, because tokenizers may come from any source."""
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
    environment.code_generator_class = _Unfolded
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        dict=_Dict(), namespace=_GuardedNamespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return environment
