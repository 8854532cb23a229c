"""Chats as miles renders them: tools brought into sglang's form first, arguments of tool calls parsed.

miles parses each tool by sglang's ``Tool`` and dumps it again, so that prompts are those that the engine makes of the
same request. The effect of this is found out once, where sglang can be imported, and is plain data for the workers,
which never import it: a *form*, ``{"tool": {...}, "function": {...}, "hidden": [...]}``, the fields of a tool
and of its function with their defaults, in their order, and those that are written only where they are set.
"""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.tokenization.encoders.transformers_tokenizer import CodedTokenizer
    from asyncdata.tokenization.functions.tokenizer_settings import Templates

    Message = dict[str, Any]

_PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
_UNKNOWN = "asyncdata_no_such_field"
_PLAIN_PROMPTS = "Take plain prompts, without --apply-chat-template, or miles' own data source"


class UnfitError(Exception):
    """A value that miles refuses: its location, such as ``tools[0]['name']``; what it must be; and the value."""


# At the start, where miles can be imported


def tool_form() -> dict[str, Any]:
    """A tool as sglang's ``Tool`` writes it.

    :raises ConfigError: if it cannot be imported, or does more than select fields by their names.
    """
    try:
        tool: Any = importlib.import_module(_PROTOCOL).Tool
        found = _written(tool, {"name": "n", _UNKNOWN: 1}, {_UNKNOWN: 1})
        function_type = tool.model_fields["function"].annotation
        known = set(tool.model_fields), set(function_type.model_fields)
    except Exception as error:  # another version of sglang may raise anything
        raise ConfigError(
            f"miles brings tools into the form of sglang's Tool, which cannot be imported: {error!r}. {_PLAIN_PROMPTS}"
        ) from error

    function = found.pop("function", None)
    if not isinstance(function, dict) or _UNKNOWN in found or _UNKNOWN in function or function.get("name") != "n":
        raise ConfigError(f"what this version of sglang makes of tools is not known: {found}. {_PLAIN_PROMPTS}")

    hidden = sorted(known[0] - {*found, "function"} | known[1] - set(function))
    return {"tool": found, "function": function, "hidden": hidden}


def _written(tool: Any, function: Message, more: Message) -> Message:
    found: Message = tool.model_validate({"type": "function", "function": function, **more}).model_dump()
    return found


def refuse_own_encoders(checkpoint: str | None) -> None:
    """Refuse models whose chats miles renders by its own code, and not by a template.

    :raises ConfigError: naming the model's type.
    """
    try:
        chats = importlib.import_module("miles.utils.chat_template_utils")
        deepseek = importlib.import_module(f"{chats.__name__}.deepseek").model_type
        inkling = importlib.import_module(f"{chats.__name__}.inkling").is_inkling
        model = SimpleNamespace(name_or_path=checkpoint or "")
        kind = deepseek(model) or ("inkling" if inkling(model) else None)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"it cannot be found out whether miles renders chats by code of its own: {error!r}. {_PLAIN_PROMPTS}"
        ) from error

    if kind is not None:
        raise ConfigError(
            f"miles renders chats of {kind} models ({checkpoint}) by code of its own, which asyncdata does not have. "
            f"{_PLAIN_PROMPTS}"
        )


# In workers


def render(
    templates: Templates | CodedTokenizer, messages: list[Message], tools: list[Any] | None, form: dict[str, Any]
) -> str:
    """The chat as text. If the template refuses the tools, it gets their functions alone.

    :param messages: are changed in place.
    :raises UnfitError: for values that miles refuses.
    :raises RowFault: if the template refuses the chat, or fails on it.
    """
    from jinja2 import TemplateError

    _normalize(messages)
    schemas = [_formed(number, tool, form) for number, tool in enumerate(tools)] if tools else None
    try:
        return templates.render(messages, schemas)
    except RowFault as fault:
        if schemas is None or not isinstance(fault.__cause__, TemplateError):
            raise

    return templates.render(messages, [schema["function"] for schema in schemas])


def _normalize(messages: list[Message]) -> None:
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue

        if message.get("content") is None:
            message["content"] = ""
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            name = f"prompt[{number}]['tool_calls'][{place}]"
            _parse_arguments(_of_type(name, "an object", call, dict).get("function"), f"{name}['function']")


def _parse_arguments(function: Any, name: str) -> None:
    if not function:
        return

    arguments = _of_type(name, "an object", function, dict).get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            _refuse(f"{name}['arguments']", "JSON text", arguments)


def _formed(number: int, tool: Any, form: dict[str, Any]) -> Message:
    """The tool as sglang dumps it: its own fields, in their order, without unknown ones."""
    name = f"tools[{number}]"
    if not (isinstance(tool, dict) and "function" in tool):
        tool = {"type": "function", "function": tool}
    function = _of_type(f"{name}['function']", "an object", tool["function"], dict)
    for field in form["hidden"]:
        if tool.get(field) is not None or function.get(field) is not None:
            _refuse(f"{name}[{field!r}]", "absent: asyncdata does not know how sglang writes it", True)

    if "name" not in function:
        _refuse(f"{name}['function']", "an object with 'name'", function)

    own = {field: function.get(field, default) for field, default in form["function"].items()}
    for field, (need, is_right) in _CHECKED.items():
        if field in own and not is_right(own[field]):
            _refuse(f"{name}['function'][{field!r}]", need, own[field])

    outer = {field: tool.get(field, default) for field, default in form["tool"].items()}
    _of_type(f"{name}['type']", "a string", outer.get("type", ""), str)
    first = {"type": outer.pop("type")} if "type" in outer else {}
    return {**first, "function": own, **outer}


_CHECKED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a string", lambda value: isinstance(value, str)),
    "description": ("a string or null", lambda value: value is None or isinstance(value, str)),
    "strict": ("true or false", lambda value: isinstance(value, bool)),
}


def _of_type(name: str, need: str, value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        _refuse(name, need, value)

    return value


def _refuse(name: str, need: str, value: Any) -> NoReturn:
    raise UnfitError(name, need, value)
