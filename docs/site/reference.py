"""The reference, made from the code: ``python docs/site/reference.py`` renews it in all pages of ``docs``.

A page has it between ``<!-- generated: KIND WHAT -->`` and ``<!-- end -->``, so that the repository shows what the site
shows. A new mark needs no end: it is added.

Kinds: ``api NAME``, ``settings CLASS [FIELD ...]``, ``fields CLASS``, ``keys``, ``command NAME``,
``errors FIRST LAST``, ``tree``, and ``events``, which adds level and fields to the rows of the table below it. ``api``
needs the extra ``docs``; it reads the code, and imports none.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncdata"

_MARK = re.compile(
    r"^<!-- generated: (?!events )(\w+)(?: (.*?))? -->\n(?:(?:(?!<!-- generated)[^\0])*?^<!-- end -->\n)?",
    re.MULTILINE,
)
_ENTRY = re.compile(r"^:ivar (\w+): (.*?)(?=^:|^\S|\Z)", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_EVENT = re.compile(r"^\| `([\w.]+)` \|(?: \w+ \| [^|]* \|)? ([^|]*) \|$", re.MULTILINE)
_PLAIN = {int: "any integer", bool: "bool", str: "text"}
_LOG = re.compile(r"(?:self\.)?_log\.(\w+ing|info|exception)")


def main() -> None:
    """Renew all pages."""
    sys.path.insert(0, str(ROOT))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(filled(page.read_text("utf-8")), "utf-8")


def filled(text: str) -> str:
    """The page with what is made from the code, as it is now."""
    makers: dict[str, Callable[[str], str]] = {
        "api": partial(api, {}),
        "command": command,
        "errors": errors,
        "fields": fields,
        "keys": lambda _: keys(),
        "settings": settings,
        "tree": lambda _: tree(),
    }
    if "<!-- generated: events -->" in text:
        found = logged_events()
        text = _EVENT.sub(
            lambda row: f"| `{row[1]}` | {_of_event(*found[row[1]])} | {row[2]} |",
            text,
        )

    def made(mark: re.Match[str]) -> str:
        what = mark[2] or ""
        return f"<!-- generated: {mark[1]}{what and ' '}{what} -->\n\n{makers[mark[1]](what).strip()}\n\n<!-- end -->\n"

    return _MARK.sub(made, text)


def _table(columns: str, rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    head = f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _named(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(
        importlib.import_module(f"asyncdata.{module}" if module else "asyncdata"),
        name,
    )
    return found


# The public names


def api(shown: dict[str, str], name: str) -> str:
    """A name of ``asyncdata``, or all names of a module, with parameters and errors.

    :param shown: methods that stand on the page already, with their headings: a class that inherits one refers to it.
    """
    found = _package()[name]
    if found.is_module:
        return "\n\n".join(api(shown, f"{name}.{one}") for one in sorted(found.exports or ()))

    found = found.final_target if found.is_alias else found
    source = found.relative_package_filepath
    head = f"### `{found.name}`\n\nSource: [`{source}`](../../{source})"
    if not found.is_class:
        value = f"```python3\n{found.name} = {found.value}\n```" if found.is_attribute else _signature(found)
        return f"{head}\n\n{value}\n\n{_docstring(found)}"

    init = found.all_members.get("__init__")
    parts = [
        head,
        _signature(init, found.name) if init is not None else "",
        _docstring(found),
    ]
    members = [one for one in found.all_members.values() if not one.name.startswith("_") and one.docstring]
    members = [one for one in members if one.is_function or "property" in one.labels]
    parts.extend(_method(one, found.name) for one in members if one.canonical_path not in shown)
    inherited = [f"`{shown[one.canonical_path]}`" for one in members if one.canonical_path in shown]
    parts += [f"Also {', '.join(inherited)}."] if inherited else []
    shown |= {one.canonical_path: f"{found.name}.{one.name}" for one in members if one.canonical_path not in shown}
    return "\n\n".join(filter(None, parts))


@functools.cache
def _package() -> Any:
    import griffe

    sys.path.insert(0, str(Path(__file__).parent))
    from docstrings import Roles, Structs

    extensions = griffe.load_extensions(Roles(), Structs())
    return griffe.load("asyncdata", search_paths=[str(ROOT)], extensions=extensions)


def _method(found: Any, owner: str) -> str:
    shape = "" if "property" in found.labels else _signature(found)
    return f"#### `{owner}.{found.name}`\n\n{shape}\n\n{_docstring(found)}"


def _signature(found: Any, name: str = "") -> str:
    """How it is called; each parameter on a line of its own, where one line is too long."""
    words, is_named = [], False
    for one in found.parameters:
        kind = str(one.kind.value)
        if one.name == "self":
            continue
        if kind == "keyword-only" and not is_named:
            words.append("*")
        is_named |= kind in ("keyword-only", "variadic positional")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        of = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and not stars else ""
        words.append(f"{stars}{one.name}{of}{default}")
    back = "" if name or found.returns is None else f" -> {found.returns}"
    wait = "async " if "async" in found.labels else ""
    line = f"{wait}{name or found.name}({', '.join(words)}){back}"
    if len(line) > 100:
        inner = "".join(f"    {word},\n" for word in words)
        line = f"{wait}{name or found.name}(\n{inner}){back}"
    return f"```python3\n{line}\n```"


def _docstring(found: Any) -> str:
    """What the docstring says, as Markdown."""
    if found.docstring is None:
        return ""

    parts = []
    for section in found.docstring.parse("sphinx"):
        kind = str(section.kind.value)
        if kind == "text":
            parts.append(section.value)
        else:
            lines = [(getattr(one, "name", "") or str(one.annotation or ""), one.description) for one in section.value]
            named = [
                (f"`{name}`: " if name and kind != "returns" else "", " ".join(text.split())) for name, text in lines
            ]
            parts.append(f"{kind.capitalize()}:\n\n" + "\n".join(f"- {name}{text}" for name, text in named))
    return "\n\n".join(parts)


# Settings and fields


def meanings_of(kind: type) -> dict[str, str]:
    """What the class's docstring says of each field, in one line of Markdown."""
    found = {}
    for name, text in _ENTRY.findall(inspect.cleandoc(kind.__doc__ or "")):
        line = _ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`").removesuffix(".")
        found[name] = line.replace("|", r"\|")
    return found


def values_of(annotation: Any) -> str:
    """Which values a setting may have."""
    if get_origin(annotation) is Annotated:
        kind, (meta,) = get_args(annotation)[0], annotation.__metadata__
        if meta.description is not None:
            return str(meta.description)

        return f"above {meta.gt}" if meta.gt is not None else f"from {meta.ge}" if meta.ge is not None else str(kind)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(values_of(kind) for kind in get_args(annotation))
    if get_origin(annotation) in (dict, list):
        return f"a {get_origin(annotation).__name__}"
    if annotation is NoneType:
        return "None"
    if isinstance(annotation, type) and hasattr(annotation, "__struct_fields__"):
        return f"`{annotation.__name__}` or a dict"

    return _PLAIN[annotation]


def settings(what: str) -> str:
    """A row for each setting of a class of descriptions: all of them, or those that are named."""
    path, *names = what.split()
    kind: Any = _named(path)
    meanings, types, config = (
        meanings_of(kind),
        get_type_hints(kind, include_extras=True),
        kind(),
    )
    rows = []
    for name in names or kind.__struct_fields__:
        default = getattr(config, name)
        shown = repr(default) if not hasattr(default, "__struct_fields__") else f"{type(default).__name__}()"
        rows.append((f"`{name}`", f"`{shown}`", values_of(types[name]), meanings[name]))
    return _table("setting | default | values | meaning", rows)


def keys() -> str:
    """The settings of slime's data source, with the meanings of the loader's settings where they have none."""
    options: Any = _named("integrations.slime.config.Options")
    meanings = {**meanings_of(_named("LoaderConfig")), **meanings_of(options)}
    types, config = get_type_hints(options, include_extras=True), options()
    rows = [
        (
            f"`asyncdata_{name}`",
            f"`{getattr(config, name)}`",
            values_of(types[name]),
            meanings[name],
        )
        for name in options.__struct_fields__
    ]
    return _table("key | default | values | meaning", rows)


def fields(path: str) -> str:
    """A row for each field that the docstring of a class explains."""
    rows = [(f"`{name}`", text) for name, text in meanings_of(_named(path)).items()]
    return _table("field | meaning", rows)


# Commands


def contexts_of(command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """A context of each command, without those that have commands themselves."""
    context = click.Context(command, parent, command.name, **command.context_settings)
    if not isinstance(command, click.Group):
        yield context
        return

    for child in command.commands.values():
        yield from contexts_of(child, context)


def command(path: str) -> str:
    """What ``--help`` says of a command, and its arguments and options."""
    from asyncdata.cli.main import commands

    context = {context.command_path: context for context in contexts_of(commands)}[path]
    records = [param.get_help_record(context) for param in context.command.params]
    rows = [(f"`{names}`".replace("|", r"\|"), " ".join(about.split())) for names, about in filter(None, records)]
    return f"{inspect.cleandoc(context.command.help or '')}\n\n{_table('argument | meaning', rows)}"


# Errors and events, by the calls in the code


@functools.cache
def _trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]


def _text_of(node: ast.AST) -> str | None:
    """A text of the code; what is put into it is ``{name}``, or ``...`` if it is no plain name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None

    parts = []
    for part in node.values:
        name = (
            re.fullmatch(r"(?:\w+\.)*_?(\w+)", ast.unparse(part.value))
            if isinstance(part, ast.FormattedValue)
            else None
        )
        parts.append(str(part.value) if isinstance(part, ast.Constant) else f"{{{name[1]}}}" if name else "...")
    return "".join(parts)


@functools.cache
def messages() -> dict[str, list[tuple[str, str]]]:
    """The messages of each code, each with the name of its error, where the call shows it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for tree in _trees():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {id(word): ast.unparse(call.func) for call in calls for word in call.args}
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = None if id(node) in inner else _text_of(node)
            if text and (coded := re.match(r"(AD\d{3})(?: (.+))?$", text, re.DOTALL)):
                name = names.get(id(node), "")
                of_code = found.setdefault(coded[1], [])
                if coded[2] and not coded[2].strip("{}").isidentifier():
                    of_code.append(
                        (
                            name if name.endswith(("Error", "Data")) else "",
                            " ".join(coded[2].split()),
                        )
                    )
    return found


def errors(bounds: str) -> str:
    """A row for each code between two, with its errors and messages as they stand in the code."""
    first, last = bounds.split()
    rows = []
    for code, of_code in sorted(messages().items()):
        if of_code and f"AD{first}" <= code <= f"AD{last}":
            names = ", ".join(f"`{name}`" for name in sorted({name for name, _ in of_code} - {""}))
            texts = dict.fromkeys(re.sub(r"[|<>*]", r"\\\g<0>", text) for _, text in of_code)
            rows.append((f"`{code}`", names, "<br>".join(texts)))
    return _table("code | error | messages", rows)


def tree() -> str:
    """The tree of errors in their module's docstring."""
    text = inspect.cleandoc(importlib.import_module("asyncdata.core.errors").__doc__ or "")
    found = re.search(r"^::\n\n(.*?)\n\n(?=\S)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return f"```text\n{inspect.cleandoc(found[1]).replace('``', '')}\n```"


@functools.cache
def logged_events() -> dict[str, tuple[str, list[str]]]:
    """What the package logs: event -> level and fields, without those that are given as a dict."""
    found: dict[str, tuple[str, list[str]]] = {}
    for call in (node for one in _trees() for node in ast.walk(one) if isinstance(node, ast.Call)):
        if logged := _LOG.fullmatch(ast.unparse(call.func)):
            level = logged[1].replace("exception", "error")
            names = [word.arg for word in call.keywords if word.arg]
            found[ast.literal_eval(call.args[0])] = level, names
    return found


def _of_event(level: str, names: list[str]) -> str:
    return f"{level} | {', '.join(f'`{name}`' for name in names)}"


if __name__ == "__main__":
    main()
