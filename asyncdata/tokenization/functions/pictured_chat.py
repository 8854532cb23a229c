"""Chats with pictures for training: the plan reads headers, the load makes pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.functions.labelled import accepted
from asyncdata.tokenization.functions.of_chat import Chats
from asyncdata.tokenization.pictures.chats import expanded, with_places
from asyncdata.tokenization.pictures.transformers_processor import OpenProcessor
from asyncdata.tokenization.rows import RowFault, decode_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter
    from asyncdata.tokenization.encoders.hf_encoder import Located
    from asyncdata.tokenization.functions.labelled import Drafting
    from asyncdata.tokenization.functions.of_chat import OfChat
    from asyncdata.tokenization.pictures.settings import Processor, ProcessorConfig

__all__ = ("PicturedChats",)


class PicturedChats(Chats):
    """The opened function. Tokens of pictures are never trained, and no sample with pictures is cut."""

    def __init__(
        self, fn: OfChat, messages_key: str, train_on: str, settings: Processor, config: ProcessorConfig
    ) -> None:
        super().__init__(fn, messages_key, train_on, settings.images_key)
        self._settings = settings
        self._processor = OpenProcessor(settings, config)

    def __call__(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        out.declare(self._processor.light_keys)
        super().__call__(rows, out)

    def read(self, fields: dict[str, Any], raw: Buffer) -> Drafting | str:
        images = fields.get("images")
        messages, pictures = with_places(
            self._row.chat("messages", fields["messages"], raw),
            None if images is None else decode_value(images, raw),
            self._settings,
        )
        found = super().read({**fields, "messages": messages}, raw)
        if isinstance(found, str):
            return found

        planned = self._processor.plan(pictures)
        (draft,) = found.drafts
        text, blocks = expanded(draft.text, draft.blocks, self._processor.mark, planned.texts)
        return found._replace(drafts=[draft._replace(text=text, blocks=blocks)], of=planned)

    def write(self, row: int, found: list[Located], drafting: Drafting, out: ColumnWriter) -> None:
        encoded = self._fn.fit(drafting.drafts[0].encoded(found[0]))
        if encoded is None or (encoded.is_cut and drafting.of.pictures):
            out.drop(row, "max_length")
        else:
            columns = {**drafting.columns, **self._processor.light(encoded.tokens, drafting.of)}
            self.write_sample(row, encoded, columns, out)

    def load(self, rows: Sequence[Buffer], out: ColumnWriter) -> None:
        """Write the pixels of each row, with the tokens of its plan."""
        for row, raw in enumerate(rows):
            out.progress(row)
            try:
                drafting = self._read(raw, None)
                if isinstance(drafting, str):
                    raise RowFault("AD424", f"the row is dropped now, and was not when it was planned: {drafting}")

                assert self._encoder is not None, "chats have text"
                (found,) = self._encoder.encode([drafting.drafts[0].text])
                out.keep(row, accepted(found).ids, **self._processor.pixels(drafting.of))
            except RowFault as fault:
                out.fail(row, RowFault(fault.code, fault.reason, raw))
