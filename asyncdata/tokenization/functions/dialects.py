"""Rows of chats in the forms of other trainers: ShareGPT, Alpaca, and prompts with completions, read as messages.

The keys and roles are those that TRL, LLaMA-Factory and ms-swift read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.rows import RowFault, decode_value, json_type

if TYPE_CHECKING:
    from asyncdata.tokenization.column_writer import Buffer
    from asyncdata.tokenization.row_fields import RowReader

__all__ = ("DIALECTS", "Dialect")

Message = dict[str, Any]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_ROLES |= {"system": "system", "observation": "tool", "function_response": "tool", "tool": "tool"}
_CALLS = ("function_call", "tool_call")


class Dialect(ABC):
    """How rows of one form are read.

    :ivar required: ``{field: key}`` of what a row must have; ``optional``: of what it may have.
    """

    required: dict[str, str]
    optional: dict[str, str]

    @abstractmethod
    def read(self, row: RowReader, fields: dict[str, Any], raw: Buffer) -> tuple[list[Message], int]:
        """The messages of a row, and the number of the first that may be trained.

        :raises RowFault: for a value of the wrong type, or a role that is not known.
        """


class _ShareGpt(Dialect):
    required, optional = {"conversations": "conversations"}, {"system": "system"}

    def read(self, row: RowReader, fields: dict[str, Any], raw: Buffer) -> tuple[list[Message], int]:
        turns = fields["conversations"]
        if not isinstance(turns, list):
            raise row.wrong_type("conversations", "a list of turns", turns, raw)

        messages = [_turn(row, f"conversations[{number}]", turn, raw) for number, turn in enumerate(turns)]
        return _system(row, fields, raw) + messages, 0


def _turn(row: RowReader, name: str, turn: Any, raw: Buffer) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        has = ", ".join(map(ascii, turn)) if isinstance(turn, dict) else json_type(turn)
        raise RowFault("AD112", f"{row.name(name)} must have 'from' and 'value'; it has {has or 'nothing'}", raw)

    said, value = turn["from"], turn.get("value")
    if not isinstance(value, str):
        raise RowFault("AD111", f"{row.name(name)}: 'value' must be a string, got {json_type(value)}", raw)

    loss = {name: turn[name] for name in ("loss",) if name in turn}
    if said in _CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(row, name, value, raw), **loss}

    if said not in _ROLES:
        roles = ", ".join((*_ROLES, *_CALLS))
        raise RowFault("AD112", f"{row.name(name)} is from {ascii(said)}, which is no role of ShareGPT: {roles}", raw)

    return {"role": _ROLES[said], "content": value, **loss}


def _calls(row: RowReader, name: str, value: str, raw: Buffer) -> list[Message]:
    """The calls in the text of a turn: an object with ``name`` and ``arguments``, or a list of them."""
    found = decode_value(value.encode("utf-8", "surrogatepass"), raw)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RowFault("AD111", f"{row.name(name)}: a call must be JSON with 'name' and 'arguments'", raw)

    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


class _Alpaca(Dialect):
    required = {"instruction": "instruction", "output": "output"}
    optional = {"input": "input", "system": "system", "history": "history"}

    def read(self, row: RowReader, fields: dict[str, Any], raw: Buffer) -> tuple[list[Message], int]:
        history = fields.get("history") or []
        if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
            raise row.wrong_type("history", "a list of pairs of a question and its answer", history, raw)

        texts = [text for pair in history for text in pair]
        more = fields.get("input")
        asked = row.text("instruction", fields["instruction"], raw)
        asked += f"\n{row.text('input', more, raw)}" if more else ""
        texts += [asked, row.text("output", fields["output"], raw)]
        for text in texts:
            row.text("history", text, raw)
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
        ]
        return _system(row, fields, raw) + messages, 0


class _PromptCompletion(Dialect):
    required, optional = {"prompt": "prompt", "completion": "completion"}, {}

    def read(self, row: RowReader, fields: dict[str, Any], raw: Buffer) -> tuple[list[Message], int]:
        for name in self.required:
            if isinstance(fields[name], str):  # TRL does not render it: as a turn, it would be another text
                raise row.wrong_type(name, "a list of messages", fields[name], raw, "; plain text is not rendered")

        prompt = row.messages("prompt", fields["prompt"], raw)
        return prompt + row.messages("completion", fields["completion"], raw), len(prompt)


def _system(row: RowReader, fields: dict[str, Any], raw: Buffer) -> list[Message]:
    text = fields.get("system")
    return [{"role": "system", "content": row.text("system", text, raw)}] if text else []


DIALECTS: dict[str, Dialect] = {
    "sharegpt": _ShareGpt(),
    "alpaca": _Alpaca(),
    "prompt_completion": _PromptCompletion(),
}
"""The forms that can be named."""
