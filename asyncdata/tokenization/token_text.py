"""The exact text of each token, for inspection."""

from __future__ import annotations

import codecs
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


_NO_BYTE = 0xFFFF


def _byte_of_char() -> dict[int, int]:
    """The characters for bytes in byte-level vocabularies, as in GPT-2: printable bytes are themselves.

    For ``str.translate`` to a text in Latin-1, which does not have the character that stands for no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    of_others = {256 + at: byte for at, byte in enumerate(others)}
    return {**dict.fromkeys(others, _NO_BYTE), **{byte: byte for byte in printable}, **of_others}


_BYTE_OF_CHAR = _byte_of_char()


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a sample: one token, or those over which a character is split.

    :ivar text: a byte that is not part of a complete character is U+DC00 plus the byte, as in ``surrogateescape``.
    :ivar name: the name of a special token, or the number of an unknown one; empty for all others.
    :ivar is_trained: whether all of them are trained.
    """

    start: int
    stop: int
    text: str
    name: str
    is_trained: bool


class TokenTexts:
    """Splits a sample's tokens into pieces. Their joined texts are the text that the tokenizer decodes.

    Byte-level tokens are converted to their bytes, so that a character that is split over tokens is complete. Any other
    token is decoded together with the one before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._whole: dict[int, str] = {}  # texts of byte-level tokens that are complete characters, by their ids
        self._steps = {step.get("type") for step in state.get("decoders", [state])}

    def __call__(self, ids: Sequence[int], is_trained: Sequence[bool]) -> list[Piece]:
        """The pieces of a sample.

        :param ids: its tokens.
        :param is_trained: whether each token is trained; a piece has no mixture of both.
        """
        return list(self._pieces(ids, is_trained))

    def _pieces(self, ids: Sequence[int], is_trained: Sequence[bool]) -> Iterator[Piece]:
        run = _Run()
        before: int | None = None  # the last token other than a byte
        for at, id in enumerate(ids):
            whole = self._whole.get(id)
            if whole is not None and run.start == at:
                yield Piece(at, at + 1, whole, "", is_trained[at])
                run.start = at + 1
                continue

            token = self._tokenizer.id_to_token(id)
            name = str(id) if token is None else self._names.get(id, "")
            if name or (at and is_trained[at] != is_trained[at - 1]):
                yield from run.end(at, is_trained[run.start])
            if name:
                yield Piece(at, at + 1, name, name, is_trained[at])
                run.start, before = at + 1, id
                continue

            byte = self._bytes(token or "")
            if byte is None:
                run.add(self._decoded(id, before))
                before = id
            else:
                run.add(byte)
                with suppress(UnicodeDecodeError):
                    self._whole[id] = byte.decode()
            if run.is_whole:
                yield from run.end(at + 1, is_trained[at])
        yield from run.end(len(ids), run.start < len(ids) and is_trained[run.start])

    def _bytes(self, token: str) -> bytes | None:
        """The bytes of a byte-level token; None for any other token."""
        if self._steps <= {"ByteLevel", "Fuse"} and self._steps:
            try:
                return token.translate(_BYTE_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()

        found = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in self._steps else None
        return bytes.fromhex(found[1]) if found else None

    def _decoded(self, id: int, before: int | None) -> bytes:
        """A token's text after the token before it: some tokenizers remove a space at the start of a text."""
        ids = [id] if before is None else [before, id]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        alone = self._tokenizer.decode(ids[:-1], skip_special_tokens=False)
        return (text.removeprefix(alone) if text.startswith(alone) else self._tokenizer.decode([id])).encode()


class _Run:
    """Tokens whose bytes are not complete characters yet.

    :ivar start: the first of them.
    :ivar is_whole: whether the bytes so far are complete characters.
    """

    def __init__(self) -> None:
        self.start = 0
        self.is_whole = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""

    def add(self, data: bytes) -> None:
        """Add the next token's bytes."""
        self._text += self._decoder.decode(data)
        self.is_whole = not self._decoder.getstate()[0]

    def end(self, stop: int, is_trained: bool) -> Iterator[Piece]:
        """The piece of the tokens up to ``stop``; none if there are none."""
        text = self._text + self._decoder.decode(b"", final=True)
        if self.start < stop:
            yield Piece(self.start, stop, text, "", is_trained)
        self.start, self._text, self.is_whole = stop, "", True


def without_texts(ids: Sequence[int], is_trained: Sequence[bool]) -> list[Piece]:
    """The pieces of tokens without a tokenizer: each is shown as its number."""
    return [Piece(at, at + 1, str(id), str(id), is_trained[at]) for at, id in enumerate(ids)]
