"""The tables of ``docs/reference/configuration.md``, made of the declaration in ``asyncdata/loader/config.py``.

``python -m tests.support.knob_table`` prints them. The page may add links to what they say, and nothing else.
"""

from __future__ import annotations

import inspect
import re
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from asyncdata import LoaderConfig
from asyncdata.core.settings import Description
from asyncdata.loader.config import STRUCTS

if TYPE_CHECKING:
    import msgspec

_ENTRY = re.compile(r"^:ivar (\w+): (.*?)(?=^:|\Z)", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_PLAIN = {int: "any integer", bool: "bool", str: "text"}


class Row(NamedTuple):
    """A row of a table: cells in Markdown."""

    name: str
    default: str
    values: str
    meaning: str

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.default} | {self.values} | {self.meaning} |"


def meanings_of(kind: type) -> dict[str, str]:
    """What the class's docstring says of each field, in one line of Markdown."""
    found = {}
    for name, text in _ENTRY.findall(inspect.getdoc(kind) or ""):
        line = _ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`").removesuffix(".")
        found[name] = line
    return found


def values_of(annotation: Any) -> str:
    """Which values a field may have."""
    if get_origin(annotation) is Annotated:
        kind, (meta,) = get_args(annotation)[0], annotation.__metadata__
        if meta.description is not None:
            return str(meta.description)

        return f"above {meta.gt}" if meta.gt is not None else f"from {meta.ge}" if meta.ge is not None else str(kind)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(values_of(kind) for kind in get_args(annotation))
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and issubclass(annotation, Description):
        return f"`{annotation.__name__}` or a dict"

    return _PLAIN[annotation]


def rows_of(kind: type[msgspec.Struct]) -> list[Row]:
    """The rows of a class's fields, in their order."""
    meanings, types = meanings_of(kind), get_type_hints(kind, include_extras=True)
    config = kind()
    rows = []
    for name in kind.__struct_fields__:
        default = getattr(config, name)
        shown = f"{type(default).__name__}()" if isinstance(default, Description) else repr(default)
        rows.append(Row(name, f"`{shown}`", values_of(types[name]), meanings[name]))
    return rows


if __name__ == "__main__":
    for shown in (LoaderConfig, *STRUCTS.values()):
        print(f"\n{shown.__name__}\n\n| setting | default | values | meaning |\n|---|---|---|---|")
        print("\n".join(map(str, rows_of(shown))))
