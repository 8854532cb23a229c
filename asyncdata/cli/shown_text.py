"""Samples as text: for the terminal, and for a page in a browser; of rows that were looked at, and that a run recorded.

Without colour, trained text is in ``⟦ ⟧``. Everything other than text is in ``⟨ ⟩``: special tokens, characters that
cannot be shown, bytes without a character, and a note for omitted text. A line break of the text is ``↵``, a tab ``⇥``.
If the text itself contains one of these signs, the sign is shown by its code point. Before that: which tokens are
trained, with the text of each token and its turn of the chat.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.cli.output import Piece, TokenTexts, without_texts
from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import line_number
from asyncdata.report.page import Run, ShownSample, ShownText
from asyncdata.telemetry.records import MAX_VALUE, BadRowRecord, DroppedRow, SampleRecord, TokenizerName
from asyncdata.tokenization.chat_template.conversation import Conversation, Texts
from asyncdata.tokenization.functions.chat import ChatTokenizeFn, PreferenceTokenizeFn
from asyncdata.tokenization.functions.tokenizer_settings import Templates
from asyncdata.tokenization.media import without_media
from asyncdata.tokenization.row_fields import RowReader
from asyncdata.tokenization.rows import LIST_OF_OBJECTS, RowDecoder, decode_value
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from asyncdata.cli.rows import InspectedRow
    from asyncdata.core.types import Sample
    from asyncdata.tokenization.functions.of_chat import OfChat

_LONE_BYTES = "".join(map(chr, range(0xDC80, 0xDD00)))
"""Characters for the single bytes of a character that was cut in two."""


class Turn(NamedTuple):
    """A message of ``role`` from character ``start`` on; ``user+assistant`` if two messages have no visible border."""

    start: int
    role: str


class MaskedText(NamedTuple):
    """One text of a sample.

    :ivar name: ``chosen`` or ``rejected`` in a pair, else empty.
    :ivar pieces: its tokens, in their order.
    :ivar turns: with offsets in the joined texts of the pieces; empty if it is not a chat.
    :ivar is_labelled: whether the sample has labels.
    """

    name: str
    pieces: list[Piece]
    turns: list[Turn]
    is_labelled: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def num_trained(self) -> int:
        """Trained tokens of the text."""
        return sum(piece.stop - piece.start for piece in self.pieces if piece.is_trained)


class LossMask:
    """Finds the tokens that a tokenize function trains.

    :param tokenize_fn: the function, or its description.
    :param tokenizer: the tokenizer that decodes; None: the description's own. Without either, tokens are
        shown as numbers.
    :raises ConfigError: if there is no such tokenizer.
    """

    def __init__(self, tokenize_fn: Any, tokenizer: str | None = None) -> None:
        own = getattr(tokenize_fn, "tokenizer", None)
        name = tokenizer or (os.fspath(own) if isinstance(own, str | os.PathLike) else None)
        revision = getattr(tokenize_fn, "revision", None) if tokenizer is None else None
        self._texts = None if name is None else TokenTexts(TokenizerFiles(resolve(name, revision).folder).load())
        self._turns = _turns_of(tokenize_fn)

    def __call__(self, row: InspectedRow) -> list[MaskedText]:
        """The texts of a row's sample: two for a pair, none if the row yields no sample."""
        sample = row.sample
        if sample is None:
            return []

        labels = sample.labels
        trained = [False] * len(sample.tokens) if labels is None else (labels == sample.tokens).tolist()
        other = _rejected(sample)
        name = "" if other is None else "chosen"
        masked = [self._masked(row, name, sample.tokens.tolist(), trained, labels is not None)]
        return masked if other is None else [*masked, self._masked(row, "rejected", *other, is_labelled=True)]

    def _masked(
        self, row: InspectedRow, name: str, ids: list[int], trained: list[bool], is_labelled: bool
    ) -> MaskedText:
        pieces = without_texts(ids, trained) if self._texts is None else self._texts(ids, trained)
        find = self._turns.get(name)
        turns = [] if find is None else find(row.raw, "".join(piece.text for piece in pieces))
        return MaskedText(name, pieces, turns, is_labelled)


def _turns_of(tokenize_fn: Any) -> dict[str, Turns]:
    if isinstance(tokenize_fn, ChatTokenizeFn):
        return {"": Turns(tokenize_fn, [tokenize_fn.messages_key])}

    if isinstance(tokenize_fn, PreferenceTokenizeFn):
        prompt = [] if tokenize_fn.prompt_key is None else [tokenize_fn.prompt_key]
        keys = {"chosen": tokenize_fn.chosen_key, "rejected": tokenize_fn.rejected_key}
        return {name: Turns(tokenize_fn, [*prompt, key]) for name, key in keys.items()}

    return {}


def _rejected(sample: Sample) -> tuple[list[int], list[bool]] | None:
    """The other text of a pair."""
    ids, spans = sample.extra.get("rejected_input_ids"), sample.extra.get("rejected_spans")
    if ids is None or spans is None:
        return None

    trained = [False] * len(ids)
    for start, stop in spans:
        trained[start:stop] = [True] * (stop - start)
    return ids, trained


# Which message of a chat each part of its text belongs to


class Turns:
    """Finds the turns in the text of a chat.

    The template renders the chat up to each message. If the result is not a prefix of the whole text, as with templates
    that change earlier turns, the message and the next one are one turn.

    :param keys: the keys of a row's parts of the chat.
    """

    def __init__(self, fn: OfChat, keys: list[str]) -> None:
        self._keys = keys
        self._tool_key = fn.tool_key
        self._row = RowReader({"prompt": keys[-1]}, {"tools": fn.tool_key})
        self._decode = RowDecoder((*keys, fn.tool_key or keys[-1]))
        self._leaves_media_out = fn.media == "leave_out"
        files = fn.files()
        self._templates: Templates | None = None
        if files.chat_templates or fn.chat_template is not None:
            variables = {**fn.chat_template_kwargs, "add_generation_prompt": False}
            self._templates = Templates.compiled(files, fn.chat_template, variables, fn.today)

    def __call__(self, raw: bytes, text: str) -> list[Turn]:
        """The turns of ``text``, which may be cut at either end; none if the row has no chat, or another one.

        :param raw: a row that became a sample.
        """
        *parts, tools_text = self._decode(without_media(raw, ()) if self._leaves_media_out else raw)
        values = [decode_value(part) for part in parts if part is not None]
        chats = [value for value in values if value is not None]
        texts = [chat for chat in chats if isinstance(chat, str)]
        if self._templates is None or any(len(self._keys) > 1 or not LIST_OF_OBJECTS.match(text) for text in texts):
            return []

        messages = [message for chat in chats for message in self._row.chat("prompt", chat, raw)]
        tools = None if self._tool_key is None or tools_text is None else self._row.tools(tools_text, raw)
        schemas = self._row.schemas(tools, raw)
        template = self._templates.without_tools if schemas is None else self._templates.with_tools
        conversation = Conversation(template, template.fitted(messages), schemas, Texts([]))
        first = _place(text, conversation.text)
        return [] if first is None else _seen(_turns(conversation), first, text)


def _turns(chat: Conversation) -> list[Turn]:
    turns, start, roles = [], 0, list[str]()
    for number, message in enumerate(chat.messages):
        roles.append(str(message["role"]))
        up_to: str | None = chat.text
        if number + 1 < len(chat.messages):
            up_to = chat.up_to(number)
        if up_to is not None and chat.text.startswith(up_to):
            turns.append(Turn(start, "+".join(roles)))
            start, roles = len(up_to), []
    return turns


def _place(text: str, chat: str) -> int | None:
    """The offset of the text in the chat; None if it is not there. The text may be cut at one end."""
    whole = text.strip(_LONE_BYTES)
    if chat.startswith(whole):
        return -_num_lone(text)

    return len(chat) - len(whole) - _num_lone(text) if chat.endswith(whole) else None


def _num_lone(text: str) -> int:
    """The number of bytes of a cut character at the start of the text."""
    return len(text) - len(text.lstrip(_LONE_BYTES))


def _seen(turns: list[Turn], first: int, text: str) -> list[Turn]:
    """The turns of a text that begins at character ``first`` of the chat."""
    moved = [Turn(turn.start - first, turn.role) for turn in turns if turn.start - first < len(text)]
    num_before = sum(turn.start <= max(0, _num_lone(text) - 1) for turn in moved)
    return [Turn(0, moved[num_before - 1].role), *moved[num_before:]] if num_before else moved


Line = list[Run]

_SIGNS = {"\n": "↵", "\t": "⇥"}
_LINE_BREAK = Run("↵", "sign")
_RESERVED = "⟦⟧⟨⟩↵⇥"
_MAX_ALIKE = 3
_MAX_COUNTED_BYTES = 1 << 32
"""The line of a row is found by reading its file up to there: in a second for so many bytes."""
_STYLES = {
    ("text", True): "bold green",
    ("special", True): "bold magenta",
    ("sign", True): "green",
    ("text", False): "dim",
    ("special", False): "dim magenta",
    ("sign", False): "dim yellow",
}


def lines_of(masked: MaskedText, max_context_tokens: int = 0) -> list[Line]:
    """The lines that show a text, each in runs. Where a turn starts, the first run of a line is its role.

    :param max_context_tokens: tokens to show of a stretch of context, half from its start and half from its end; 0 for
        all.
    """
    lines: list[Line] = []
    is_open = False  # whether the last line goes on
    for role, pieces in _stretches(masked):
        if role or not is_open:
            lines.append([Run(role, "role")] if role else [])
            is_open = True
        for run in _runs(pieces, max_context_tokens):
            if not is_open:
                lines.append([])
            lines[-1].append(run)
            is_open = run != _LINE_BREAK._replace(is_trained=run.is_trained)
    return lines


def _stretches(masked: MaskedText) -> Iterator[tuple[str, list[Piece]]]:
    """Pieces of one turn that are all trained or all context, with the role of the turn that starts there."""
    turns = list(reversed(masked.turns))
    place, number = 0, 0
    keys = []
    roles: dict[int, str] = {}
    for piece in masked.pieces:
        while turns and turns[-1].start <= place:
            number += 1
            roles[number] = _shown(turns.pop().role)
        keys.append((number, piece.is_trained))
        place += len(piece.text)
    for key, group in groupby(zip(keys, masked.pieces, strict=True), key=lambda pair: pair[0]):
        yield roles.pop(key[0], ""), [piece for _, piece in group]


def _runs(pieces: list[Piece], max_tokens: int) -> Iterator[Run]:
    num_tokens = pieces[-1].stop - pieces[0].start
    if pieces[0].is_trained or max_tokens == 0 or num_tokens <= max_tokens:
        yield from _runs_of_all(pieces)
        return

    first, last = pieces[0].start + (max_tokens + 1) // 2, pieces[-1].stop - max_tokens // 2
    begin = [piece for piece in pieces if piece.stop <= first]
    end = [piece for piece in pieces if piece.start >= last]
    num_left = num_tokens - sum(piece.stop - piece.start for piece in begin + end)
    yield from _runs_of_all(begin)
    yield Run(f"⟨… {num_left:,} tokens …⟩", "sign", False)
    yield from _runs_of_all(end)


def _runs_of_all(pieces: Iterable[Piece]) -> Iterator[Run]:
    for (name, is_trained), group in groupby(pieces, key=lambda piece: (piece.name, piece.is_trained)):
        alike = list(group)
        if not name:
            yield from _runs_of_text("".join(piece.text for piece in alike), is_trained)
        elif len(alike) > _MAX_ALIKE:
            yield Run(f"{_shown(name)} ×{len(alike):,}", "special", is_trained)
        else:
            yield from (Run(_shown(name), "special", is_trained) for _ in alike)


def _runs_of_text(text: str, is_trained: bool) -> Iterator[Run]:
    for is_plain, group in groupby(text, key=_is_plain):
        if is_plain:
            yield Run("".join(group), "text", is_trained)
        else:
            yield from (Run(_sign(char), "sign", is_trained) for char in group)


def _is_plain(char: str) -> bool:
    return char.isprintable() and char not in _RESERVED


def _sign(char: str) -> str:
    """The sign for a character. Single bytes are encoded as by Python's ``surrogateescape``."""
    if char in _SIGNS:
        return _SIGNS[char]

    code = ord(char)
    return f"⟨0x{code - 0xDC00:02X}⟩" if 0xDC80 <= code < 0xDD00 else f"⟨U+{code:04X}⟩"


def _shown(name: str) -> str:
    return "".join(char if _is_plain(char) else f"U+{ord(char):04X}" for char in name)


def plain_text(lines: list[Line]) -> str:
    """The lines without colour; trained text is marked in each line."""
    return "\n".join(f"{role}│ {_plain(runs)}" for role, runs in _with_margin(lines))


def _plain(runs: list[Run]) -> str:
    texts = []
    for is_trained, group in groupby(runs, key=lambda run: run.is_trained):
        text = "".join(f"⟨{run.text}⟩" if run.kind == "special" else run.text for run in group)
        texts.append(f"⟦{text}⟧" if is_trained else text)
    return "".join(texts)


def styled_text(lines: list[Line], *, is_masked: bool = True) -> list[tuple[str, str]]:
    """The lines as texts with their styles, as ``Output.styled`` takes them.

    :param is_masked: False to show trained text and context in the same way.
    """
    parts = []
    for role, runs in _with_margin(lines):
        parts.append((f"{role}│ ", "cyan"))
        for run in runs:
            style = _STYLES[run.kind, run.is_trained]
            parts.append((run.text, style if is_masked else style.replace("dim", "").strip()))
        parts.append(("\n", ""))
    return parts[:-1]


def _with_margin(lines: list[Line]) -> list[tuple[str, list[Run]]]:
    """Each line's role, or an empty text, all of one width; and its other runs."""
    roles = [line[0].text if line and line[0].kind == "role" else "" for line in lines]
    margin = max((len(role) + 1 for role in roles if role), default=0)
    return [(role.ljust(margin), line[1:] if role else line) for role, line in zip(roles, lines, strict=True)]


# For a page


def shown_row(
    row: InspectedRow, place: str, texts: list[MaskedText], facts: Mapping[str, object], max_context_tokens: int
) -> ShownSample:
    """An inspected row. One that yields no sample is shown as it stands in its file.

    :param place: its file and line.
    :param texts: of its sample; empty if it yields none.
    :param max_context_tokens: to show of a stretch of context; 0 for all.
    """
    raw = row.raw.decode("utf-8", "surrogateescape")
    is_labelled = any(text.is_labelled for text in texts)
    return ShownSample(
        position=str(row.position or ""),
        place=place,
        source=row.source_name,
        state="bad" if row.fault is not None else "kept" if texts else "dropped",
        reason=row.fault or row.dropped,
        reasons=[row.dropped] if row.dropped else [],
        num_tokens=sum(text.num_tokens for text in texts),
        num_trained=sum(text.num_trained for text in texts) if is_labelled else None,
        texts=[_text(text, max_context_tokens) for text in texts] or [ShownText("the row", [Run(raw)])],
        facts={name: str(value) for name, value in facts.items()},
        pictures=row.thumbnails,
    )


def shown_record(record: SampleRecord, texts: RowTexts) -> ShownSample:
    """A sample that a run has recorded. Its texts may be cut."""
    if pieces := texts.pieces(record):
        text = _text(MaskedText("", pieces, [], is_labelled=record.num_trained >= 0), 0)
    else:
        text = ShownText("", [Run(record.text)] if record.text else [])
    if record.is_cut and text.runs:
        text.runs.append(Run("⟨… the rest was not recorded …⟩", "sign"))
    return ShownSample(
        position=":".join(map(str, record.place)),
        place=place_of(record),
        source=record.source,
        state="noted" if record.notes else "kept",
        reason=", ".join(record.notes),
        reasons=record.notes,
        num_tokens=record.num_tokens,
        num_trained=record.num_trained if record.num_trained >= 0 else None,
        ids=record.ids,
        texts=[text] if text.runs else [],
        facts={name: value for name in ("label", "metadata") if (value := getattr(record, name))},
    )


def shown_row_without_sample(record: BadRowRecord | DroppedRow) -> ShownSample:
    """A bad or a dropped row that a run has recorded, with its start."""
    is_bad = isinstance(record, BadRowRecord)
    start = record.excerpt if isinstance(record, BadRowRecord) else _start_of(record)
    return ShownSample(
        position="" if record.place is msgspec.UNSET else ":".join(map(str, record.place)),
        place=place_of(record),
        source=record.source,
        state="bad" if is_bad else "dropped",
        reason=f"{record.code} {record.reason}".rstrip() if isinstance(record, BadRowRecord) else record.reason,
        reasons=[record.code if isinstance(record, BadRowRecord) else record.reason],
        texts=[ShownText("how the row begins", [Run(start)])] if start else [],
    )


def place_of(record: SampleRecord | BadRowRecord | DroppedRow) -> str:
    """Where a row is: its file and its line, number or byte."""
    if not record.path:
        return ""

    if line := record.line or _line_of(record):
        return f"{record.path}:{line}"

    if record.row_number >= 0:
        return f"{record.path}:{record.row_number} (row number)"

    return f"{record.path}, byte {record.byte_offset:,}" if record.byte_offset >= 0 else record.path


# What a run does not record, as the data has it: it is looked up when the page is written


class RowTexts:
    """Finds the texts of tokens.

    :param tokenizers: of each part of a mixture.
    """

    def __init__(self, tokenizers: Mapping[str, TokenizerName]) -> None:
        self._tokenizers = tokenizers
        self._opened: dict[TokenizerName, TokenTexts | None] = {}

    def pieces(self, record: SampleRecord) -> list[Piece]:
        """The texts of the tokens that were recorded; none without a tokenizer."""
        tokenizer = self._tokenizers.get(record.source)
        if tokenizer is None or not record.ids:
            return []

        if tokenizer not in self._opened:
            self._opened[tokenizer] = _texts_of(tokenizer)
        texts = self._opened[tokenizer]
        trained = [False] * len(record.ids)
        for start, stop in record.trained:
            trained[start:stop] = [True] * len(trained[start:stop])
        return [] if texts is None else texts(record.ids, trained)


def _texts_of(tokenizer: TokenizerName) -> TokenTexts | None:
    try:
        return TokenTexts(TokenizerFiles(resolve(tokenizer.name, tokenizer.revision).folder).load())
    except ConfigError:
        return None


def _line_of(record: SampleRecord | BadRowRecord | DroppedRow) -> int:
    """The line of a row, from 1; 0 if it has none, or its file cannot be read."""
    if record.row_number >= 0 or not 0 <= record.byte_offset <= _MAX_COUNTED_BYTES:
        return 0

    try:
        return line_number(record.path, record.byte_offset)
    except (OSError, ValueError):
        return 0


def _start_of(record: DroppedRow) -> str:
    """The first characters of a row in a file of lines, unless rows are not shown, or the file cannot be read."""
    if not record.path or record.row_number >= 0 or record.byte_offset < 0 or record.num_bytes <= 0:
        return ""

    try:
        with open(record.path, "rb") as file:
            start = os.pread(file.fileno(), min(record.num_bytes, 4 * MAX_VALUE), record.byte_offset)
    except (OSError, ValueError):
        return ""

    return start.decode("utf-8", "replace")[:MAX_VALUE]


def _text(masked: MaskedText, max_context_tokens: int) -> ShownText:
    lines = lines_of(masked, max_context_tokens)
    return ShownText(masked.name, [run for line in lines for run in (*line, Run("\n"))])
