"""Chats and prompts with pictures: the plan reads headers, the load makes pixels."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
from asyncdata.tokenization.encoders.hf_encoder import Located
from asyncdata.tokenization.functions.of_chat import Chats
from asyncdata.tokenization.functions.prompt_reader import PromptTokenizer
from asyncdata.tokenization.functions.text import Drafting, RowTokenizer, accepted
from asyncdata.tokenization.pictures.chats import Places, expanded, with_places
from asyncdata.tokenization.pictures.files import NOUNS, held
from asyncdata.tokenization.pictures.settings import Processor, ProcessorConfig
from asyncdata.tokenization.pictures.transformers_processor import OpenProcessor, Planned
from asyncdata.tokenization.rows import MediaFault, RowFault, decode_value, is_empty

_MAX_SIDE, _MAX_PICTURES, _QUALITY = 160, 12, 70
"""Pixels of a side, and pictures of a row: about 5 KB each."""


class _Pictured(RowTokenizer):
    """What both have in common. A row's drafting has its planned pictures in ``of``."""

    _is_loading = False
    _settings: Processor
    _processor: OpenProcessor

    def open_processor(self, settings: Processor, config: ProcessorConfig) -> None:
        """Load the processor."""
        self._settings, self._processor = settings, OpenProcessor(settings, config)

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        out.declare(self._processor.light_keys)
        super().__call__(rows, out)

    def places_of(self, messages: list[dict[str, Any]], fields: dict[str, Any], raw: Buffer) -> Places:
        """The messages with places for media, and the media.

        :raises RowFault: if they do not go together.
        """
        places = with_places(
            messages, {kind: _given(kind, fields, raw) for kind in self._processor.kinds}, self._settings
        )
        if not self._is_loading:
            return places

        return places._replace(media=[held(medium, self._settings) for medium in places.media])

    def _read(self, raw: Buffer, fields: dict[str, Any] | None) -> Drafting | str:
        try:
            return super()._read(raw, fields)
        except MediaFault as fault:
            keys = ", ".join(f"{kind}s_key={self._settings.key_of(kind)!r}" for kind in self._processor.kinds)
            way_out = f"Processor({keys}) names the key of what is read; a function of two phases loads other media"
            reason = f"{fault.what}, which is not read: {way_out}; ignore_keys= leaves a key out"
            raise RowFault("AD130", reason, raw) from None

    def planned(self, found: Drafting, places: Places) -> Drafting:
        """The drafting with the media's own texts.

        :raises RowFault: if a medium cannot be read, or the template has not written its mark.
        """
        planned = self._processor.plan(places.media)
        (draft,) = found.drafts
        kinds, texts = [each.medium.kind for each in planned], [each.text for each in planned]
        text, blocks = expanded(draft.text, draft.blocks, self._processor.marks, kinds, texts)
        drafts = [draft._replace(text=text, blocks=blocks)]
        return found._replace(
            drafts=drafts,
            of=planned,
            notes=found.notes + places.notes + tuple(chain.from_iterable(each.notes for each in planned)),
        )

    def thumbnails(self, raw: Buffer) -> list[tuple[str, str]]:
        """Small copies of the pictures of a row that yields a sample."""
        return _thumbnails_of(self._read_again(raw).of, self._processor)

    def _read_again(self, raw: Buffer) -> Drafting:
        """The drafting of a row that was planned, with the bytes of its remote pictures, each fetched once.

        :raises RowFault: also for a row that is dropped now.
        """
        self._is_loading = True
        try:
            drafting = self._read(raw, None)
        finally:
            self._is_loading = False
        if isinstance(drafting, str):
            raise RowFault("AD424", f"the row is dropped now, and was not when it was planned: {drafting}")

        return drafting

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write the pixels of each row, with the tokens of its plan."""
        for row, raw in enumerate(rows):
            out.progress(row)
            try:
                drafting = self._read_again(raw)
                assert self._encoder is not None, "chats have text"
                (found,) = self._encoder.encode([drafting.drafts[0].text])
                out.keep(row, accepted(found).ids, **self._processor.load(drafting.of))
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, raw))


def _given(kind: str, fields: dict[str, Any], raw: Buffer) -> Any:
    """What the row has of a kind beside its chat; None: nothing; []: it says that it has none.

    :raises RowFault: AD115, if that is under two keys.
    """
    found = [decode_value(fields[name], raw) for name in (f"{kind}s", kind) if fields.get(name) is not None]
    given = [value for value in found if not is_empty(value)]
    if len(given) > 1:
        way_out = f"ignore_keys=({kind!r},) leaves the second out"
        reason = f"the row has {NOUNS[kind]}s under {kind + 's'!r} and under {kind!r}; {way_out}"
        raise RowFault("AD115", reason, raw)

    return given[0] if given else [] if [] in found else None


class PicturedChats(_Pictured, Chats):
    """Chats for training. Tokens of pictures are never trained, and no sample with pictures is cut."""

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        messages, first = self._chat(self._row, fields, raw)
        places = self.places_of(messages, fields, raw)
        found = self.read_chat(places.messages, first, fields, raw)
        return found if isinstance(found, str) else self.planned(found, places)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        encoded = self._fn.fit(drafting.drafts[0].encoded(found[0]))
        if encoded is None or (encoded.is_cut and drafting.of):
            out.drop(row, "max_length")
        else:
            columns = {**drafting.columns, **self._processor.light(encoded.tokens, drafting.of)}
            self.write_sample(row, encoded, columns, out)


class PicturedPrompts(_Pictured, PromptTokenizer):
    """Prompts for rollouts: ``prompt`` has the marks of pictures, and ``extra["images"]`` what the row says of them."""

    may_have_pictures = True

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        places = self.places_of(self._row.messages("prompt", fields["prompt"], raw), fields, raw)
        found = super().read({**fields, "prompt": places.messages}, raw)
        if isinstance(found, str):
            return found

        if places.media:
            kinds = dict.fromkeys(medium.kind for medium in places.media)
            said = {f"{kind}s": [medium.value for medium in places.media if medium.kind == kind] for kind in kinds}
            found = found._replace(columns={**found.columns, "extra": msgspec.json.encode(said)})
        return self.planned(found, places)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        columns = {**drafting.columns, **self._processor.light(found[0].ids, drafting.of)}
        super().write(row, found, drafting._replace(columns=columns), out)


def _thumbnails_of(planned: Sequence[Planned], processor: OpenProcessor) -> list[tuple[str, str]]:
    """A caption and a ``data:`` address of a JPEG for each picture; the address is empty where it cannot be decoded.

    The JPEG is written anew from the pixels, so nothing else of a file comes into the page.
    """
    found = []
    for each in planned[:_MAX_PICTURES]:
        medium = each.medium
        facts = [medium.path or medium.name]
        address = ""
        try:
            image, words = processor.kinds[medium.kind].shown(each)
            if image is not None:
                facts.append(words)
                image.thumbnail((_MAX_SIDE, _MAX_SIDE))
                image.save(written := io.BytesIO(), "JPEG", quality=_QUALITY)
                address = f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
        except RowFault as fault:
            facts.append(f"{fault.code} {fault.reason}")
        if each.grid is not None:
            facts.append(f"grid {' x '.join(map(str, each.grid))}")
        found.append((", ".join([*facts, f"{processor.num_tokens(each):,} tokens"]), address))
    if num_left := len(planned) - len(found):
        found.append((f"{num_left:,} more pictures", ""))
    return found
