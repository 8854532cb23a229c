"""One HTML file of sections, with its style and its program in it. It loads nothing, and its own rule forbids it to.

The rule is a Content-Security-Policy: no address may be loaded, and no program may run but the page's own, by its hash.
"""

from __future__ import annotations

import base64
import functools
import json
import os
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from asyncdata.core.files import replace_file
from asyncdata.report.figures import Chart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import jinja2

MAX_SAMPLES = 1000
"""Samples of a page, unless the user asks for another number."""

MAX_SAMPLE_CHARS = 20_000
"""Characters of a sample; the middle of a longer one is left out."""

MAX_BYTES = 24 * 1024 * 1024
"""Of the text of all samples of a page."""

_IN_SCRIPTS = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_KINDS = ("text", "special", "sign", "role")


class Run(NamedTuple):
    """A part of a text that is shown in one way.

    :ivar kind: ``text``; ``special`` for a special token; ``sign`` for a replacement of what cannot be shown; ``role``
        for the name of the turn that begins here, which is no part of the text.
    """

    text: str
    kind: str = "text"
    is_trained: bool = False


class ShownText(msgspec.Struct, frozen=True):
    """One text of a sample.

    :ivar name: ``chosen`` or ``rejected`` in a pair, else empty.
    """

    name: str
    runs: list[Run]


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """A row, and the sample that it became.

    :ivar position: in the order, as ``epoch:window:row``.
    :ivar place: its file and line, or row number.
    :ivar source: the part of a mixture, or the file.
    :ivar state: ``kept``; ``noted``, which is kept as well; ``dropped`` or ``bad``.
    :ivar reason: why it is not just ``kept``, in words; ``reasons``: in short, to filter by.
    :ivar ids: its tokens' ids, if they are shown.
    :ivar num_trained: trained tokens; None for a sample without labels.
    :ivar facts: further values, such as its step and its score.
    :ivar pictures: captions, and the addresses of JPEGs as ``data:``, or nothing.
    """

    position: str
    place: str
    source: str = ""
    state: Literal["kept", "noted", "dropped", "bad"] = "kept"
    reason: str = ""
    reasons: list[str] = []
    num_tokens: int = 0
    num_trained: int | None = None
    ids: list[int] = []
    texts: list[ShownText] = []
    facts: dict[str, str] = {}
    pictures: list[tuple[str, str]] = []


class Samples:
    """Collects samples for a page, up to its limits.

    :param max_samples: the most samples.
    :param max_bytes: the most bytes of their text.
    :ivar shown: those that fit, as the page's program reads them.
    :ivar num_left_out: those that did not.
    """

    def __init__(self, max_samples: int = MAX_SAMPLES, max_bytes: int = MAX_BYTES) -> None:
        self.shown: list[dict[str, object]] = []
        self.num_left_out = 0
        self._max_samples = max_samples
        self._bytes_left = max_bytes

    @property
    def is_full(self) -> bool:
        """Whether no further sample fits."""
        return len(self.shown) >= self._max_samples or self._bytes_left <= 0

    def add(self, sample: ShownSample) -> None:
        """Add a sample, shortened to ``MAX_SAMPLE_CHARS``; count it if it does not fit."""
        if self.is_full:
            self.num_left_out += 1
            return

        record = _record(sample)
        self._bytes_left -= len(script_json(record).encode())
        self.shown.append(record)


def _record(sample: ShownSample) -> dict[str, object]:
    """A sample as the page's program reads it: every text of it can be shown as it is."""
    max_chars = MAX_SAMPLE_CHARS // max(len(sample.texts), 1)
    return {
        "position": sample.position,
        "place": visible(sample.place),
        "source": visible(sample.source),
        "state": sample.state,
        "states": [sample.state, *(visible(f"{sample.state}: {reason}") for reason in sample.reasons)],
        "reason": visible(sample.reason),
        "tokens": sample.num_tokens,
        "trained": sample.num_trained,
        "texts": [[visible(text.name), _coded(_shortened(text.runs, max_chars))] for text in sample.texts],
        "facts": [[visible(name), visible(value)] for name, value in sample.facts.items()],
        **({"ids": sample.ids} if sample.ids else {}),
        **({"pictures": [[visible(name), url] for name, url in sample.pictures]} if sample.pictures else {}),
    }


def _coded(runs: list[Run]) -> list[list[object]]:
    """Each run as its text and the number of its kind, of which the last bit says whether it is trained."""
    return [[visible(text), 2 * _KINDS.index(kind) + is_trained] for text, kind, is_trained in runs]


def _shortened(runs: list[Run], max_chars: int) -> list[Run]:
    """At most ``max_chars`` characters: the first half, and the last."""
    num_left_out = sum(len(run.text) for run in runs) - max_chars
    if num_left_out <= 0:
        return runs

    note = Run(f"\n⟨… {num_left_out:,} characters are not shown …⟩\n", "sign")
    return [*_first(runs, max_chars // 2), note, *_last(runs, max_chars - max_chars // 2)]


def _first(runs: list[Run], num_chars: int) -> Iterator[Run]:
    for run in runs:
        if num_chars <= 0:
            return
        yield run._replace(text=run.text[:num_chars])
        num_chars -= len(run.text)


def _last(runs: list[Run], num_chars: int) -> Iterator[Run]:
    backwards = [run._replace(text=run.text[::-1]) for run in reversed(runs)]
    for run in reversed(list(_first(backwards, num_chars))):
        yield run._replace(text=run.text[::-1])


# Text of users on a page: nothing of it is markup, a program, or a character that changes how other text is shown


def visible(text: str) -> str:
    """The text, with its code point in place of each character that cannot be seen: control characters, marks of the
    direction of writing, lone surrogates. Line breaks and tabs stay.
    """
    if text.isprintable():
        return text

    return "".join(char if char.isprintable() or char in "\n\t" else f"⟨U+{ord(char):04X}⟩" for char in text)


def script_json(value: Any) -> str:
    """JSON that can stand in a ``<script>``: no text in it ends the script or begins a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPTS)


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

    :ivar bars: for each row, the width of the bar in its second column, in percent; empty for none.
    """

    id: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[float] = ()
    form: str = "table"


class Rows(NamedTuple):
    """Names and values."""

    rows: Sequence[tuple[str, str]]
    form: str = "rows"


class SampleList(NamedTuple):
    """The samples, which the page's program shows."""

    samples: Samples
    is_folded: bool = False
    form: str = "samples"


Block = Chart | Note | Rows | SampleList | Table | Tiles | Verdict


class Section(NamedTuple):
    """A part of the page, with a link in its navigation."""

    id: str
    title: str
    blocks: Sequence[Block]


def render(title: str, about: Sequence[str], sections: Sequence[Section], renewed_s: int = 0) -> bytes:
    """The page, as UTF-8.

    :param about: a few facts for the head of the page.
    :param renewed_s: seconds after which it loads itself again, if it is served; 0: never.
    """
    lists = [block for section in sections for block in section.blocks if isinstance(block, SampleList)]
    program = _asset("page.js")
    text = (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            about=about,
            renewed_s=renewed_s,
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
