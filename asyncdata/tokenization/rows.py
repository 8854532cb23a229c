"""Decodes one raw row to values, or finds what is wrong with it.

msgspec decodes JSON; ``json`` tries again what msgspec rejects. So NaN, ``1e400`` and lone surrogates are accepted, as
by every reader that uses ``json.loads``.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from asyncdata.core.errors import ConfigError, excerpt, shortened
from asyncdata.core.threads import no_op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncdata.core.messages import Overflow

    _DecodeRow = Callable[[bytes], tuple[msgspec.Raw | None, ...]]
    _DecodeLines = Callable[[bytes, int], list[list[Any]]]

Buffer = bytes | memoryview
Message = dict[str, Any]

LIST_OF_OBJECTS = re.compile(r"\s*(?:\[\s*\{|\[\s*\]\s*\Z|\{\s*[\"']role[\"'])")
"""How a text begins that is meant to be messages, or one message: as JSON, or as Python prints them."""

MAX_NESTING = 512
"""Deeper rows are bad. The limit of the parser depends on the Python version, but the order must not."""

MAX_DIGITS = 4300
"""A longer integer cannot be read: Python's own limit."""

_MAX_TRACEBACK = 8000

_MANY_NULS = 8
"""So many NUL bytes in sequence are neither a stray character nor UTF-16."""

MEDIA_KEYS = ("images", "videos", "audios", "image", "video", "audio")
"""The usual keys of a row's pictures, videos and sounds."""

TRAINED_CHATS = "To train on chats, ChatTokenizeFn reads them (--kind chat)"
_CHAT_KEYS = ("messages", "conversations")
_PROMPT_KEYS = ("prompt", "input", "messages", "conversations", "question", "problem", "instruction", "text")
_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_DEPTH = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_QUOTE = ord('"')
_OPENS, _CLOSES = ord("{"), ord("}")
_Length0 = msgspec.Meta(max_length=0)
_Empty = bool | None | Annotated[str, _Length0] | Annotated[list[Any], _Length0] | Annotated[dict[str, Any], _Length0]
_first, _last = itemgetter(0), itemgetter(-1)
_RAW_NULL, _NOTHING = msgspec.Raw(b"null"), object()
_NOT_BRACKETS = bytes(set(range(256)) - set(_DEPTH))


class RowFault(Exception):  # noqa: N818 - flow inside a worker: it becomes a RowError on the wire
    """A row is bad: which code, why, and an excerpt of it."""

    def __init__(self, code: str, reason: str, raw: Buffer = b"", traceback: str = "") -> None:
        self.code = code
        self.reason = _encodable(shortened(reason))
        self.excerpt = excerpt(raw)
        self.traceback = _encodable(shortened(traceback, _MAX_TRACEBACK))
        super().__init__(self.reason)


class MediaFault(RowFault):
    """A row has a picture, a video or a sound, which would be lost.

    :ivar what: where it is; ``keys``: the keys of the row whose values are media, if they are not empty.
    """

    def __init__(self, what: str, keys: Sequence[str], raw: Buffer) -> None:
        reason = (
            f"{what}, which would be lost: ChatTokenizeFn(processor=...) reads pictures; media='leave_out' leaves them"
        )
        super().__init__("AD130", reason, raw)
        self.what, self.keys = what, keys


def is_empty(value: Any) -> bool:
    """Whether a value that could be a medium is none: null, a boolean, 0, empty, or a container of such values."""
    if isinstance(value, dict | list):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))

    return not value or value is True


def _encodable(text: str) -> str:
    """Escape lone surrogates that a message quotes from a row; a frame cannot contain them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_type(value: Any) -> str:
    """The JSON type of ``value``, with its article."""
    return _TYPES.get(type(value), "a number")


class RowDecoder:
    """Extracts the values of some keys from a row, as JSON text, without decoding them.

    :param keys: the keys to extract; other keys are skipped. ``a.b`` is the key ``b`` in the object ``a``, if the row
        has no key ``a.b``.
    :param decoded: those among them whose values :meth:`all` decodes.
    :param media: keys of media: a row that has some under other keys than ``keys`` is bad.
    :param silent: keys that must say nothing, unless they are among ``keys``: a type of what says nothing. A row whose
        values are not of it is looked at by ``refuse``.
    """

    def __init__(
        self,
        keys: Sequence[str],
        decoded: Sequence[str] = (),
        media: Sequence[str] = (),
        silent: Mapping[str, Any] = {},
        refuse: Callable[[dict[str, Any], bytes], object] = no_op,
    ) -> None:
        self._keys, self._decoded, self._refuse = tuple(keys), decoded, refuse
        self._first_decoded = self._keys.index(decoded[0]) if decoded else None
        self.media = tuple(key for key in media if key not in self._keys)
        paths = [(number, key.split(".")) for number, key in enumerate(self._keys) if "." in key]
        self._inner = [(number, len(self._keys) + at, path[1:]) for at, (number, path) in enumerate(paths)]
        self._looked_for = (*self._keys, *(path[0] for _, path in paths))  # with the objects that the others may be in
        silent = {**dict.fromkeys(self.media, _Empty), **silent}
        self._decode, self._decode_lines = _struct_decoders(
            self._looked_for, decoded, {key: silent[key] for key in silent if key not in self._looked_for}
        )

    def __call__(self, raw: Buffer) -> tuple[msgspec.Raw | None, ...]:
        """The JSON text of each key, in their order; None for a key that the row lacks.

        :raises RowFault: if the row is not one JSON object, or has a value that cannot be read.
        :raises MediaFault: if it has media.
        """
        row = bytes(raw)
        try:
            found = self._decode(row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = decode_object(row)  # accepts more than msgspec, and explains its errors
            for key in self.media:
                if not is_empty(value.get(key)):
                    raise MediaFault(f"the row has {ascii(key)}", self.media, row) from None

            self._refuse(value, row)
            values = [_dump(value[key]) if key in value else None for key in self._looked_for]
            return self._found(values, row)

        if not row.isascii():
            _decode_utf8(row, row)  # msgspec does not check the values that it skips
        _refuse_deep_nesting(row, row)
        if len(row) > MAX_DIGITS:
            _refuse_long_integers(found, row)
        return self._found(list(found), row) if self._inner else found

    def _found(self, values: list[Any], row: Buffer, *, decodes: bool = False) -> tuple[Any, ...]:
        """The values of the keys, also of those in objects. A null is passed over, as it has two forms if decoded."""
        for number, outer, path in self._inner:
            value: Any = values[outer]
            if values[number] in (None, _RAW_NULL):
                for name in path:
                    value = decode_value(value, row) if isinstance(value, msgspec.Raw) else value
                    value = value.get(name, _NOTHING) if isinstance(value, dict) else _NOTHING
                if value is not _NOTHING:
                    values[number] = value if decodes and self._keys[number] in self._decoded else _dump(value)
        return tuple(values[: len(self._keys)])

    def all(self, rows: Sequence[Buffer]) -> list[list[Any]] | None:
        """The JSON text of each key of all rows: one list for each key. It takes a third of the time of single calls.

        What is decoded is equal to the result of :func:`decode_value`.

        None if any row is bad, or may be: then single calls find the row and the reason.
        """
        # Every row begins and ends as an object does, so that joined rows cannot complete each other.
        if not all(rows) or set(map(_first, rows)) != {_OPENS} or set(map(_last, rows)) != {_CLOSES}:
            return None

        block = b"\n".join(rows)
        try:
            columns = self._decode_lines(block, len(rows))
            if not block.isascii():
                block.decode()
            texts = () if self._first_decoded is None else columns[self._first_decoded]
            for number in _long_rows(rows, texts):
                _check_long_row([column[number] for column in columns], rows[number])
            if self._inner:
                found = [self._found(list(row), b"", decodes=True) for row in zip(*columns, strict=True)]
                columns = list(map(list, zip(*found, strict=True)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RowFault):
            return None

        return columns


def _long_rows(rows: Sequence[Buffer], texts: Sequence[Any]) -> list[int]:
    """The indices of rows that may be nested too deeply outside of their text, or have a number that is too long."""
    found = [number for number, row in enumerate(rows) if len(row) > 2 * MAX_NESTING]
    lengths = [len(text) if type(text) is str else 0 for text in texts] if found else []
    return [
        number
        for number in found
        if len(rows[number]) > MAX_DIGITS or not lengths or len(rows[number]) - lengths[number] > 2 * MAX_NESTING
    ]


def _check_long_row(found: Sequence[Any], row: Buffer) -> None:
    if not _is_mostly_a_string(found, len(row) - 2 * MAX_NESTING):  # what is in a string is not nested
        _refuse_deep_nesting(bytes(row), row)
    if len(row) > MAX_DIGITS:
        _refuse_long_integers([text for text in found if isinstance(text, msgspec.Raw)], bytes(row))


def _is_mostly_a_string(found: Sequence[Any], num_bytes: int) -> bool:
    for text in found:
        if isinstance(text, str):
            if len(text) >= num_bytes:
                return True

        elif isinstance(text, msgspec.Raw):
            view = memoryview(text)
            if len(view) >= num_bytes and view[0] == _QUOTE:
                return True

    return False


def _struct_decoders(
    keys: tuple[str, ...], decoded: Sequence[str], silent: Mapping[str, Any]
) -> tuple[_DecodeRow, _DecodeLines]:
    """Decoders of only ``keys``, for one row and for lines. msgspec skips keys that are not fields of the Struct.

    :param decoded: the keys whose values the decoder for lines decodes.
    :param silent: keys that must say nothing: the type of such values. msgspec checks it, which takes no time in a row
        without such keys.
    """
    names = {key: f"field_{number}" for number, key in enumerate(dict.fromkeys(keys))}
    rename = {name: key for key, name in names.items()} | {key: key for key in silent}
    must_be_empty = [(key, kind, None) for key, kind in silent.items()]
    fields = [*((name, msgspec.Raw, None) for name in names.values()), *must_be_empty]
    types = {key: Any if key in decoded else msgspec.Raw for key in names}
    fields_of_lines = [*((name, types[key], None) for key, name in names.items()), *must_be_empty]
    try:
        decoder = msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=rename, gc=False))
        line_decoder = msgspec.json.Decoder(msgspec.defstruct("Line", fields_of_lines, rename=rename, gc=False))
    except ValueError:  # a key with a quote or a control character in it
        return _decode_nothing, _decode_nothing

    astuple, num = msgspec.structs.astuple, len(names)
    getters = [attrgetter(names[key]) for key in keys]

    def decode_lines(block: bytes, num_rows: int) -> list[list[Any]]:
        found = line_decoder.decode_lines(block)
        if len(found) != num_rows:
            raise msgspec.DecodeError(f"{len(found)} values in {num_rows} rows")

        return [list(map(getter, found)) for getter in getters]

    if len(names) == len(keys):
        return (lambda row: astuple(decoder.decode(row))[:num]), decode_lines

    order = [list(names).index(key) for key in keys]
    return (lambda row: tuple(astuple(decoder.decode(row))[field] for field in order)), decode_lines


def _decode_nothing(*_args: object) -> Any:
    raise msgspec.DecodeError("no Struct can have these keys")


def _refuse_long_integers(found: Sequence[msgspec.Raw | None], row: bytes) -> None:
    for text in found:
        if text is not None and len(memoryview(text)) > MAX_DIGITS:
            decode_value(text, row)  # only such a long text can contain an integer that is too long


def _dump(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode("ascii"))


def decode_object(raw: Buffer) -> dict[str, Any]:
    """The row as a dict. A byte order mark before it is ignored.

    :raises RowFault: if it is not one JSON object.
    """
    value = decode_value(bytes(raw).removeprefix(BOM_UTF8), raw)
    if not isinstance(value, dict):
        raise RowFault("AD113", f"a row must be a JSON object, got {json_type(value)}", raw)

    return value


def decode_value(text: Buffer, row: Buffer | None = None) -> Any:
    """Decode a JSON value.

    :param text: the value's JSON text.
    :param row: the row to quote in an error; None: ``text``.
    :raises RowFault: if it is not valid JSON.
    """
    row = text if row is None else row
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _decode_lenient(bytes(text), row)
    if isinstance(value, dict | list):
        _refuse_deep_nesting(bytes(text), row)
    return value


def _decode_lenient(text: bytes, row: Buffer) -> Any:
    # Decoded here, because json.loads would guess UTF-16 or UTF-32 for some bytes.
    document = _decode_utf8(text, row)
    try:
        return json.loads(document)
    except json.JSONDecodeError as error:
        raise _malformed(error, row) from None
    except RecursionError:
        raise _too_deep(row) from None
    except ValueError:
        reason = f"an integer of more than {MAX_DIGITS} digits cannot be read; store it as a string"
        raise RowFault("AD117", reason, row) from None


def _decode_utf8(text: bytes, row: Buffer) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(text[: error.start].decode("utf-8")) + 1
        reason = f"byte 0x{text[error.start]:02x} at column {column} is not UTF-8; convert the file to UTF-8"
        raise RowFault("AD106", reason, row) from None


def _malformed(error: json.JSONDecodeError, row: Buffer) -> RowFault:
    column, found = error.pos + 1, error.doc[error.pos : error.pos + 1]
    num_nuls = len(error.doc) - error.pos - len(error.doc[error.pos :].lstrip("\0"))
    if num_nuls >= _MANY_NULS:
        reason = f"{num_nuls} NUL bytes from column {column} on: its writer crashed, or the disk was full"
        return RowFault("AD105", f"{reason}; restore the file", row)

    if found and found < " " and (found not in "\t\n\r" or "control character" in error.msg):
        reason = f"raw control byte 0x{ord(found):02x} at column {column}; in a string JSON needs \\u{ord(found):04x}"
        return RowFault("AD104", reason, row)

    if error.msg == "Extra data":
        return RowFault("AD119", f"extra data at column {column}; write one object per line", row)

    near = ascii(error.doc[max(0, error.pos - 16) : error.pos + 16])
    cut = "" if found and "Unterminated" not in error.msg else "; the row is cut off"
    return RowFault("AD101", f"invalid JSON at column {column}: {error.msg}, near {near}{cut}", row)


def _refuse_deep_nesting(text: bytes, row: Buffer) -> None:
    if len(text) <= 2 * MAX_NESTING or text.count(b"{") + text.count(b"[") <= MAX_NESTING:
        return  # nearly every row

    if _depth(text) > MAX_NESTING:
        raise _too_deep(row)


def _depth(text: bytes) -> int:
    """How deep a valid JSON text is nested."""
    without_escapes = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(without_escapes.split(b'"')[::2])
    return max(accumulate(map(_DEPTH.__getitem__, outside_strings.translate(None, _NOT_BRACKETS))), default=0)


def _too_deep(row: Buffer) -> RowFault:
    return RowFault("AD118", f"nested deeper than {MAX_NESTING} levels", row)


def missing_key(raw: Buffer, key: str, setting: str, otherwise: str = "") -> RowFault:
    """The fault of a row without ``key``, which ``setting`` names; lists the row's keys and suggests one.

    :param otherwise: what to do if no key is likely to be meant; empty: to set the right one.
    """
    row = decode_object(raw)
    keys = list(row)
    shown = ", ".join(map(ascii, keys[:20])) + (", ..." if len(keys) > 20 else "")
    has = f"the row has {shown}" if keys else "the row is empty"
    meant = _likely_meant(key, row, setting)
    otherwise = otherwise or f"set {setting} to the right one"
    way_out = f": set {setting}={ascii(meant)}?" if meant else f"; {otherwise}" if keys else ""
    if setting == "prompt_key" and meant in _CHAT_KEYS:
        way_out = f": set prompt_key={ascii(meant)} and apply_chat_template=True? {TRAINED_CHATS}"
    return RowFault("AD110", f"no key {ascii(key)}: {has}{way_out}", raw)


def _likely_meant(key: str, row: dict[str, Any], setting: str) -> str | None:
    import difflib  # imported late: only bad rows need it

    likely = [f"{outer}.{key}" for outer, value in row.items() if isinstance(value, dict) and key in value]
    likely += difflib.get_close_matches(key, row, n=1)
    if setting == "prompt_key":
        likely += [name for name in _PROMPT_KEYS if name in row]
    if setting == "messages_key":
        likely += [name for name, value in row.items() if isinstance(value, list) and "'role'" in str(value[:1])]
    return likely[0] if likely else None


class WrongIdsError(ConfigError):
    """A proven backend gave other ids than ``tokenizers``. No row is to blame, and the error must not be skipped.

    :ivar excerpt: the beginning of the text with wrong ids. The message does not show it.
    :ivar is_here: whether the text was in the call that raised this; otherwise it was in an earlier call.
    :ivar row: the index in the request of the row with the text; -1 while it is not known.
    :ivar place: the position of that row in its file, for rows that have no number yet.
    """

    def __init__(self, message: str, excerpt: str = "", *, is_here: bool = True) -> None:
        super().__init__(message)
        self.excerpt = excerpt
        self.is_here = is_here
        self.row = -1
        self.place: Overflow | None = None
