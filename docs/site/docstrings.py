"""Extensions of griffe: roles of docstrings are shown as code, and Structs have a constructor."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Object, Parameter, ParameterKind, Parameters

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")
_CODE_FOLLOWS = re.compile(r"^::$|(?<=:):$", re.MULTILINE)
"""What announces indented code, after a text or on a line of its own, and Markdown does not know."""


class Roles(Extension):
    """Shows a role, such as ``:class:`~asyncdata.RowFn```, as code. A tilde means: without the module."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object that was read."""
        if obj.docstring is not None:
            text = _ROLE.sub(_as_code, obj.docstring.value).replace("``", "`")
            obj.docstring.value = _CODE_FOLLOWS.sub("", text)


class Structs(Extension):
    """Gives each msgspec Struct the constructor that it has at run time: its fields, those of its bases first."""

    def on_package(self, *, pkg: Object, **_: Any) -> None:
        """Called when the package was read."""
        for class_ in _classes(pkg):
            init = class_.members.get("__init__")
            for name, field in class_.attributes.items():  # assigned in the constructor, from what it gets
                if field.annotation is None and isinstance(init, Function) and name in init.parameters:
                    field.annotation = init.parameters[name].annotation
            line = [class_, *class_.mro()]
            if (
                any(str(base).endswith("Struct") for each in line for base in each.bases)
                and "__init__" not in class_.members
            ):
                fields = {name: field for each in reversed(line) for name, field in _fields(each)}
                class_.set_member("__init__", _constructor(fields))


def _as_code(role: re.Match[str]) -> str:
    is_short, name = role.groups()
    return f"`{name.rpartition('.')[2] if is_short else name}`"


def _classes(scope: Object) -> list[Class]:
    found = []
    for member in scope.members.values():
        if not member.is_alias and (member.is_class or member.is_module):
            found += [member] if member.is_class else []
            found += _classes(member)
    return found


def _fields(class_: Class) -> list[tuple[str, Any]]:
    """The annotated names in the body of the class; not what methods assign."""
    return [
        (name, member)
        for name, member in class_.attributes.items()
        if member.annotation is not None
        and (member.value is None or "class-attribute" in member.labels)
        and "instance-attribute" in member.labels  # griffe has no ClassVar in annotations
        and not name.startswith("_")
    ]


def _constructor(fields: dict[str, Any]) -> Function:
    kind = ParameterKind.positional_or_keyword
    own = [Parameter("self", kind=kind)]
    own += [
        Parameter(name, annotation=field.annotation, kind=kind, default=field.value) for name, field in fields.items()
    ]
    return Function("__init__", parameters=Parameters(*own))
