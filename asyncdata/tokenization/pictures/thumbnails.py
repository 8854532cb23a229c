"""Small copies of a row's pictures, for a page that shows the row."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from asyncdata.tokenization.pictures.files import turned
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.pictures.settings import Processor
    from asyncdata.tokenization.pictures.transformers_processor import Planned

_MAX_SIDE, _MAX_PICTURES, _QUALITY = 160, 12, 70
"""Pixels of a side, and pictures of a row: about 5 KB each."""


def thumbnails_of(planned: Sequence[Planned], num_tokens: Sequence[int], settings: Processor) -> list[tuple[str, str]]:
    """A caption and a ``data:`` address of a JPEG for each picture; the address is empty where it cannot be decoded.

    The JPEG is written anew from the pixels, so nothing else of a file comes into the page.

    :param num_tokens: tokens that stand for each picture.
    """
    found = []
    for number, each in enumerate(planned[:_MAX_PICTURES]):
        picture = each.medium
        facts = [picture.path or picture.name]
        address = ""
        try:
            if picture.kind == "image":
                image = turned(picture, settings)
                facts.append(f"{image.width} x {image.height} pixels")
                image.thumbnail((_MAX_SIDE, _MAX_SIDE))
                image.save(written := io.BytesIO(), "JPEG", quality=_QUALITY)
                address = f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
        except RowFault as fault:
            facts.append(f"{fault.code} {fault.reason}")
        if each.grid is not None:
            facts.append(f"grid {' x '.join(map(str, each.grid))}")
        found.append((", ".join([*facts, f"{num_tokens[number]:,} tokens"]), address))
    if num_left := len(planned) - len(found):
        found.append((f"{num_left:,} more pictures", ""))
    return found
