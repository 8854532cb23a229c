"""The forms in which other trainers keep chats, read as messages: one table of them, and how their rows are told apart.

The keys and roles are those that TRL, LLaMA-Factory and ms-swift read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import unknown_setting
from asyncdata.tokenization.row_fields import TURN_FLAGS, Account, RowReader
from asyncdata.tokenization.rows import MEDIA_KEYS, Message, RowFault, decode_object, decode_value, json_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncdata.tokenization.column_writer import Buffer

Fields = dict[str, Any]
Chat = tuple[list[Message], int]
"""The messages of a row, and the number of the first that may be trained."""

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_ROLES |= {"system": "system", "observation": "tool", "function_response": "tool", "tool": "tool"}
_CALLS = ("function_call", "tool_call")
_SYSTEMS = ("system", "system_prompt")


class Dialect(NamedTuple):
    """How rows of one form are read.

    :ivar required: the keys that a row must have. A row that has them is of this form; null is as absent.
    :ivar read: makes a chat of a row; raises RowFault for a value of the wrong type, or a role that is not known.
    :ivar optional: further keys that are read.
    """

    required: tuple[str, ...]
    read: Callable[[RowReader, Fields, Buffer], Chat]
    optional: tuple[str, ...] = ()


def _messages(row: RowReader, fields: Fields, raw: Buffer) -> Chat:
    return row.chat("messages", fields["messages"], raw), 0


def _share_gpt(row: RowReader, fields: Fields, raw: Buffer) -> Chat:
    turns = fields["conversations"]
    if not isinstance(turns, list):
        raise row.wrong_type("conversations", "a list of turns", turns, raw)

    messages = [_turn(row, f"conversations[{number}]", turn, raw) for number, turn in enumerate(turns)]
    return _with_system(row, fields, messages, raw), 0


def _turn(row: RowReader, name: str, turn: Any, raw: Buffer) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        has = ", ".join(map(ascii, turn)) if isinstance(turn, dict) else json_type(turn)
        way_out = "; for messages, set messages_key to this key" if isinstance(turn, dict) and "role" in turn else ""
        raise RowFault(
            "AD112", f"{row.name(name)} must have 'from' and 'value'; it has {has or 'nothing'}{way_out}", raw
        )

    said, value = turn["from"], turn.get("value")
    if not isinstance(value, str):
        raise RowFault("AD111", f"{row.name(name)}: 'value' must be a string, got {json_type(value)}", raw)

    if len(turn) > 2 and row.account is not None:
        row.account.refuse_turn(turn, row.name(name), raw)
    flags: Message = {key: turn[key] for key in (*TURN_FLAGS, *MEDIA_KEYS) if key in turn}
    if said in _CALLS:
        return {**_calling(row, name, value, raw), **flags}

    if said not in _ROLES:
        roles = ", ".join((*_ROLES, *_CALLS))
        raise RowFault("AD112", f"{row.name(name)} is from {ascii(said)}, which is no role of ShareGPT: {roles}", raw)

    return {"role": _ROLES[said], "content": value, **flags}


def _calling(row: RowReader, name: str, value: Any, raw: Buffer) -> Message:
    """The turn with the calls of a value, or of its text: an object with ``name`` and ``arguments``, or such a list."""
    found = decode_value(value.encode("utf-8", "surrogatepass"), raw) if isinstance(value, str) else value
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RowFault("AD111", f"{row.name(name)}: a call must be JSON with 'name' and 'arguments'", raw)

    made = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _texts(row: RowReader, fields: Fields, raw: Buffer, *, asks: str, says: str, more: str = "") -> Chat:
    """A question and its answer, after the pairs of ``history``; with what is under ``more`` on a line of its own."""
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise row.wrong_type("history", "a list of pairs of a question and its answer", history, raw)

    added = fields.get(more)
    asked = row.text(asks, fields[asks], raw) + (f"\n{row.text(more, added, raw)}" if added else "")
    texts = [row.text("history", text, raw) for pair in history for text in pair]
    texts += [asked, row.text(says, fields[says], raw)]
    messages = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]
    return _with_system(row, fields, messages, raw), 0


def _xlam(row: RowReader, fields: Fields, raw: Buffer) -> Chat:
    asked = {"role": "user", "content": row.text("query", fields["query"], raw)}
    messages = [asked, _calling(row, "answers", fields["answers"], raw)]
    return _with_system(row, fields, messages, raw), 0


def _prompt_completion(row: RowReader, fields: Fields, raw: Buffer) -> Chat:
    for name in ("prompt", "completion"):
        if not isinstance(fields[name], list):  # two texts are no chat: they are not read here
            raise row.wrong_type(name, "a list of messages, or both texts", fields[name], raw)

    prompt = row.messages("prompt", fields["prompt"], raw)
    return prompt + row.messages("completion", fields["completion"], raw), len(prompt)


def _with_system(row: RowReader, fields: Fields, messages: list[Message], raw: Buffer) -> list[Message]:
    """The chat after the row's system texts; one that the chat begins with is not repeated."""
    texts = dict.fromkeys(row.text(key, fields[key], raw) for key in _SYSTEMS if fields.get(key))
    before: list[Message] = [{"role": "system", "content": text} for text in texts]
    begins = [{key: turn[key] for key in ("role", "content")} for turn in messages[:1]] == before
    return messages if begins else before + messages


def _pair(asks: str, says: str, more: str = "") -> Dialect:
    keys = (*_SYSTEMS, "history", *filter(None, [more]))
    return Dialect((asks, says), partial(_texts, asks=asks, says=says, more=more), keys)


DIALECTS: dict[str, Dialect] = {
    "messages": Dialect(("messages",), _messages),
    "sharegpt": Dialect(("conversations",), _share_gpt, _SYSTEMS),
    "alpaca": _pair("instruction", "output", "input"),
    "prompt_completion": Dialect(("prompt", "completion"), _prompt_completion),
    "prompt_response": _pair("prompt", "response"),
    "query_response": _pair("query", "response"),
    "question_answer": _pair("question", "answer"),
    "query_answer": _pair("query", "answer"),
    "question_response": _pair("question", "response"),
    "instruction_response": _pair("instruction", "response", "context"),
    "xlam": Dialect(("query", "answers"), _xlam, _SYSTEMS),
}
"""The forms that can be named, and that are recognised."""

_PAIRS = frozenset(name for name, each in DIALECTS.items() if len(each.required) == 2) - {"alpaca", "prompt_completion"}
"""Such columns often stand beside a chat, and are then no other form of it: a row of both is of the chat's dialect."""


def fitting(row: Mapping[str, Any]) -> list[str]:
    """The dialects whose keys a row has; pairs of texts, if it has no other."""
    found = [name for name, each in DIALECTS.items() if all(row.get(key) is not None for key in each.required)]
    return [name for name in found if name not in _PAIRS] or found


def check_dialect(dialect: str | None, keys: Mapping[str, str]) -> None:
    """Check the settings of a dialect.

    :raises ConfigError: if there is no such dialect, or it has no such keys.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(unknown_setting(dialect, DIALECTS, what="dialect", of=""))

    if keys and dialect in (None, "messages"):
        raise ConfigError("dialect_keys are the keys of a dialect: name it by dialect=, or set messages_key")

    known = () if dialect is None else DIALECTS[dialect].required + DIALECTS[dialect].optional
    for name in keys:
        if name not in known:
            raise ConfigError(unknown_setting(name, known, what="key", of=f"dialect={dialect!r}"))


def own_keys(dialect: str, keys: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """``{field: key}`` of what a row of a dialect must have, and of what it may have.

    :param keys: the row's own names of some.
    """
    required, optional = ({key: keys.get(key, key) for key in some} for some in DIALECTS[dialect][::2])
    return required, optional


class DialectReader(RowReader):
    """Reads the rows of one dialect, and says of other rows which dialect they are of.

    :param dialect: of all rows; where it was recognised, a row that is of another one, or of two, is bad.
    :param keys: the row's own names of some keys of the dialect.
    :param more: ``{field: key}`` of further fields.
    :param decided_by: the row by which the dialect was recognised; empty if it was named.
    :param label_key: the key of the label, which each row must have.
    """

    def __init__(
        self,
        dialect: str,
        keys: Mapping[str, str],
        more: Mapping[str, str | None],
        decided_by: str = "",
        label_key: str | None = None,
        account: Account | None = None,
    ) -> None:
        required, optional = own_keys(dialect, keys)
        taken = {*required.values(), *optional.values(), *more.values(), label_key}
        rivals = [each for name, each in DIALECTS.items() if dialect in _PAIRS or name not in _PAIRS]
        others = [set(each.required) - taken for each in rivals] if decided_by else []
        self._others = list(filter(None, others))  # what other dialects need beside the keys of this one
        foreign = dict.fromkeys(key for keys in self._others for key in sorted(keys))
        setting = "{}_key" if dialect == "messages" else "dialect_keys" if keys else "dialect"
        fields = {**optional, **more, **{key: key for key in foreign}}
        super().__init__(
            {**required, "label": label_key}, fields, setting, decoded=[*required, *optional], account=account
        )
        self._required.update({"label": "label_key"} if label_key else {})
        self.read_keys -= foreign.keys() - taken
        self._dialect, self._decided_by = dialect, decided_by

    def columns(self, rows: Sequence[Buffer]) -> dict[str, list[Any]] | None:
        found = super().columns(rows)
        if found is None:
            return None

        seen = {key for keys in self._others for key in keys if any(value is not None for value in found[key])}
        return None if any(keys <= seen for keys in self._others) else found

    def __call__(self, raw: Buffer) -> Fields:
        fields = super().__call__(raw)
        if any(keys <= fields.keys() for keys in self._others):
            seen = fitting(decode_object(raw))
            if len(seen) > 1:
                names = " and ".join(map(ascii, seen))
                raise RowFault("AD115", f"{names} can both be read: say which by dialect=... {self._why()}", raw)

            if seen and seen != [self._dialect]:
                raise self._of_another(seen[0], raw)

        return fields

    def missing(self, name: str, raw: Buffer, otherwise: str = "") -> RowFault:
        seen = [] if name == "label" else fitting(decode_object(raw))
        if name == "messages":
            otherwise = "name their form by dialect=, and your names of its keys by dialect_keys="
        return self._of_another(seen[0], raw) if seen else super().missing(name, raw, otherwise)

    def _of_another(self, dialect: str, raw: Buffer) -> RowFault:
        keys = ", ".join(map(ascii, DIALECTS[dialect].required))
        way_out = "read them as two sources, as parts of a Mix" if self._decided_by else f"set dialect={dialect!r}?"
        reason = f"the row has {keys}: it is of the dialect {dialect!r}, not {self._dialect!r}"
        return RowFault("AD110", f"{reason}; {way_out} {self._why()}".rstrip(), raw)

    def _why(self) -> str:
        return f"({self._decided_by} is of {self._dialect!r}, and comes first)" if self._decided_by else ""
