"""Builds the documentation as a site: ``python docs/site/build.py FOLDER [VERSION]``; needs the extra ``docs``.

The pages are those of this folder, in which ``reference.py`` has put what is made from the code, the changelog, and the
examples. The search leaves the last two out, and prefers guides to the reference. The order of the pages is that of
``docs/index.md``. Nothing is loaded from the network. A link that leads nowhere, and a page that is not in the index,
are errors. With a ``Repository`` under ``[project.urls]`` in ``pyproject.toml``, pages link to the source there.

With a version, such as ``0.1``, the site is built into a folder of that name, beside those of other versions. Each page
has a menu of all versions, and the start page leads to the newest.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BOOSTS = {
    "how-to": 4,
    "troubleshooting.md": 4,
    "install.md": 4,
    "faq.md": 3,
    "explanation": 2,
    "tutorial": 2,
    "reference": 0.5,
}
"""How much more a hit counts on the pages of a folder, and on a page."""

_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SOURCE = re.compile(r"\[(`asyncdata/[^`]+`)\]\((?:\.\./)+([^)]+)\)")
_CELL_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")  # GitHub needs the backslash, and the site would show it


def main(site: Path, version: str = "") -> None:
    """Build the site into the folder ``site``, or into the folder of its version there."""
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging)
        gather(folder / "docs")
        settings = (ROOT / "docs/site/mkdocs.yml").read_text()
        settings += "\nextra:\n  version: {provider: mike}\n" if version else ""
        settings += f"\nrepo_url: {repository()}\nedit_uri: blob/main/docs/\n" if repository() else ""
        (folder / "mkdocs.yml").write_text(f"{settings}\ndocs_dir: docs\nnav:\n{navigation(folder / 'docs')}")
        target = str((site / version).resolve())
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target]
        subprocess.run(command, cwd=folder, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    if version:
        list_versions(site)


def list_versions(site: Path) -> None:
    """Write what the menu of versions reads, and the start page."""
    found = [folder.name for folder in site.iterdir() if (folder / "index.html").is_file()]
    found.sort(key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")], reverse=True)
    versions = [{"version": name, "title": name, "aliases": []} for name in found]
    (site / "versions.json").write_text(json.dumps(versions))
    newest = html.escape(found[0])
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}/">\n')


def gather(target: Path) -> None:
    """Put all pages into one folder."""
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("site", "ruff.toml"))
    shutil.copy(ROOT / "docs/site/tables.css", target)
    (target / "changelog.md").write_text(_NO_SEARCH + (ROOT / "CHANGELOG.md").read_text())
    for program in sorted((ROOT / "examples").rglob("*.py")):
        page = (target / program.relative_to(ROOT)).with_suffix(".md")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(page_of(program))
    for page in target.rglob("*.md"):
        text = _CELL_CODE.sub(lambda code: code[0].replace("\\|", "|"), page.read_text())
        if boost := _BOOSTS.get(page.relative_to(target).parts[0]):
            text = f"---\nsearch:\n  boost: {boost}\n---\n\n{text}"
        text = _SOURCE.sub(rf"[\1]({repository()}/blob/main/\2)" if repository() else r"\1", text)
        page.write_text(_LINK.sub(lambda link, at=page: relinked(link, at, target), text))


def repository() -> str:
    """The address of the code's host; empty until the owner names one."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return str(urls.get("Repository", ""))


def relinked(link: re.Match[str], page: Path, target: Path) -> str:
    """A link to a file outside of ``docs``, as one to its page."""
    path, anchor = link[1], link[2] or ""
    if "://" in path:
        return link[0]

    source = Path(os.path.normpath(ROOT / "docs" / page.relative_to(target).parent / path))
    if source == ROOT / "CHANGELOG.md":
        found = target / "changelog.md"
    elif source.is_relative_to(ROOT / "examples"):
        found = (target / source.relative_to(ROOT)).with_suffix(".md")
    elif page == target / "changelog.md" and source.is_relative_to(ROOT / "docs/docs"):
        found = target / source.relative_to(ROOT / "docs/docs")
    else:
        return link[0]

    return f"]({os.path.relpath(found, page.parent)}{anchor})"


def page_of(program: Path) -> str:
    """The page of an example: its docstring's first line as the title, and its text."""
    text = program.read_text()
    title = (ast.get_docstring(ast.parse(text)) or program.stem).splitlines()[0].rstrip(".")
    return f"{_NO_SEARCH}# {title}\n\n`{program.relative_to(ROOT)}`\n\n````python\n{text}````\n"


def navigation(docs: Path) -> str:
    """The sections of the index with the pages that each links to, as YAML; then the examples."""
    lines, seen = ["- index.md"], {"index.md"}
    for section in (docs / "index.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        pages = [page for page, _ in _LINK.findall(section) if page not in seen and not page.startswith("examples/")]
        pages = list(dict.fromkeys(pages))
        seen.update(pages)
        lines += [f"- {title}:", *(f"  - {page}" for page in pages)] if pages else []
    examples = sorted(page.relative_to(docs) for page in (docs / "examples").rglob("*.md"))
    named = [f"  - {page.stem.lstrip('_0123456789').replace('_', ' ')}: {page}" for page in examples]
    return "\n".join([*lines, "- Examples:", *named]) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
