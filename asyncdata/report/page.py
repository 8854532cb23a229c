"""One HTML file of sections, with its style and its program in it. It loads nothing, and its own rule forbids it to.

The rule is a Content-Security-Policy: no address may be loaded, and no program may run but the page's own, by its hash.
"""

from __future__ import annotations

import base64
import functools
import os
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.atomic_file import replace_file
from asyncdata.report.charts import Chart
from asyncdata.report.samples import script_json, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jinja2

    from asyncdata.report.samples import Samples


class Note(NamedTuple):
    """A paragraph: why there is nothing to show, or what a figure means."""

    text: str
    form: str = "note"


class Verdict(NamedTuple):
    """The figure to look at first, and what to do.

    :ivar level: ``good``, ``fair`` or ``poor``.
    :ivar id: of the figure's element, unique on the page.
    """

    figure: str
    text: str
    advice: list[str]
    level: str
    id: str = "verdict"
    form: str = "verdict"


class Tile(NamedTuple):
    """A figure with its unit, and what it is."""

    name: str
    figure: str
    about: str = ""


class Tiles(NamedTuple):
    """Some figures, beside each other."""

    tiles: list[Tile]
    form: str = "tiles"


class Table(NamedTuple):
    """A table. Cells that are numbers have a bar behind them where ``bars`` has their share of the largest one.

    :ivar bars: for each row, the column of the bar and its width in percent; empty for none.
    """

    id: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] = ()
    bar_column: int = 1
    form: str = "table"


class Rows(NamedTuple):
    """Names and values."""

    rows: Sequence[tuple[str, str]]
    form: str = "rows"


class SampleList(NamedTuple):
    """The samples, which the page's program shows."""

    samples: Samples
    form: str = "samples"


Block = Chart | Note | Rows | SampleList | Table | Tiles | Verdict


class Section(NamedTuple):
    """A part of the page, with a link in its navigation."""

    id: str
    title: str
    blocks: Sequence[Block]


def render(title: str, about: Sequence[str], sections: Sequence[Section]) -> bytes:
    """The page, as UTF-8.

    :param about: a few facts for the head of the page.
    """
    lists = [block for section in sections for block in section.blocks if isinstance(block, SampleList)]
    program = _asset("page.js")
    text = (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            about=about,
            sections=sections,
            style=_asset("page.css"),
            program=program,
            program_hash=base64.b64encode(sha256(program.encode()).digest()).decode(),
            data=script_json([sample for block in lists for sample in block.samples.shown]),
        )
    )
    return text.encode("utf-8", "backslashreplace")


def write_page(path: str, page: bytes) -> None:
    """Write the page: a reader of the file sees the old page, or all of the new one.

    :raises OSError: if it cannot be written.
    """
    replace_file(os.path.abspath(path), [page], keep=1)


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates; what they show is escaped, and made visible, unless it is part of the page itself."""
    import jinja2

    loader = jinja2.PackageLoader("asyncdata.report", "assets")
    return jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    return visible(value) if type(value) is str else value


def _asset(name: str) -> str:
    return files("asyncdata.report").joinpath("assets", name).read_text(encoding="utf-8")
