"""Small copies of a row's pictures, for a page that shows the row."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.pictures.kinds import Planned
    from asyncdata.tokenization.pictures.transformers_processor import OpenProcessor

_MAX_SIDE, _MAX_PICTURES, _QUALITY = 160, 12, 70
"""Pixels of a side, and pictures of a row: about 5 KB each."""


def thumbnails_of(planned: Sequence[Planned], processor: OpenProcessor) -> list[tuple[str, str]]:
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
