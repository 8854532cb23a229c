"""What a page has: its sections and tables as text, and its program's data, as a browser's parser finds them."""

import json
import re
from html.parser import HTMLParser
from typing import Any

__all__ = ("ReadPage", "read_page")

INLINE = {"a", "abbr", "b", "code", "em", "small", "span", "strong", "td", "th"}


class ReadPage(HTMLParser):
    """A page that was read.

    :ivar tables: the cells of each table with an id, row by row, with its head.
    :ivar tags: every element, with its attributes.
    :ivar data: the samples.
    :ivar text: all text outside of scripts and styles.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[dict[str, Any]] = []
        self.text = ""
        self._shown: dict[str, list[str]] = {}
        self._section: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._rows: list[list[str]] = []

    def shown(self, section: str) -> str:
        """A section as lines of text, in which tables have a bar between their cells; ``data``: the samples."""
        if section == "data":
            return "\n".join(json.dumps(sample, ensure_ascii=False) for sample in self.data)

        lines = re.sub(r"[ \t\n]*\n[ \t\n]*", "\n", "".join(self._shown[section])).strip()
        return re.sub(r"(?m)^\| ", "", re.sub(r" {2,}", " ", lines))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._open.append((tag, found))
        if tag == "section":
            self._section = self._shown[found.get("id") or ""] = []
        if tag == "table":
            self._rows = self.tables.setdefault(found.get("id") or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"td", "th"}:
            self._rows[-1].append("")
            self._section.append(" | ")
        self._section.append(" " if tag in INLINE else "\n")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass
        self._section.append(" " if tag in INLINE else "\n")

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script" and attributes.get("type") == "application/json":
            self.data = json.loads(data)
        if tag in {"script", "style"}:
            return

        self.text += data
        self._section.append(" ".join(f".{data}.".split())[1:-1])
        if any(name in {"td", "th"} for name, _ in self._open):
            self._rows[-1][-1] += data


def read_page(page: bytes) -> ReadPage:
    """Read a page, of which no two elements may have the same id."""
    reader = ReadPage()
    reader.feed(page.decode("utf-8"))
    reader.close()
    ids = [found["id"] for _, found in reader.tags if "id" in found]
    assert len(ids) == len(set(ids)), sorted(ids)
    return reader
