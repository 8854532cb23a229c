"""The documentation builds as a site: every link leads somewhere, and no page loads anything from another server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import asyncdata

pytest.importorskip("mkdocs", reason="needs the extra `docs`")
pytest.importorskip("material", reason="needs the extra `docs`")

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\brel="?stylesheet"?[^>]*\bhref="([^"]+)"'
)


def build(*arguments):
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "docs/site/build.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    found = build(str(folder))
    assert found.returncode == 0, found.stdout + found.stderr
    return folder


def test_every_page_of_the_docs_and_every_example_is_in_the_site(site):
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md"]
    pages += [program.relative_to(ROOT) for program in (ROOT / "examples").rglob("*.py")]
    assert len(pages) > 50
    assert [page for page in pages if not (site / page.with_suffix("") / "index.html").is_file()] == []


def test_each_public_name_has_its_docstring_and_is_found_by_the_search(site):
    page = "".join(page.read_text() for page in site.glob("reference/*/index.html"))
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"]}
    modules = (asyncdata, asyncdata.errors, asyncdata.filters, asyncdata.xtuner)
    for name in (name for module in modules for name in module.__all__):
        if not name.startswith("_"):
            assert re.search(rf'<h[34] id="{name.lower()}(?:_\d)?"', page), name
    assert {"how-to/use-it-with-trl/", "explanation/measurements/", "faq/#where-is-the-quick-start"} <= found
    assert not [place for place in found if place.startswith("examples/")]
    assert ":class:`" not in page


FIRST_HITS = {
    "install": "install/",
    "resume": "how-to/resume-after-a-crash/",
    "packing": "explanation/packing/",
    "sharegpt": "how-to/train-on-the-right-tokens/#rows-of-other-trainers",
    "multi node": "faq/#how-do-i-train-on-multiple-gpus-or-nodes",
    "S3 credentials": "how-to/read-from-object-stores/#pass-credentials-and-settings",
    "loss mask": "how-to/train-on-the-right-tokens/",
    "curriculum": "explanation/mixtures/#a-curriculum-weights-planned-before-the-run",
    "out of memory": "troubleshooting/#out-of-memory",
    "slow first batch": "troubleshooting/#the-first-batch-is-slow",
    "wandb": "how-to/look-at-a-run/#wandb",
    "num_workers": "how-to/autotune-the-workers/#leave-out-num_workers",
    "ParquetSource": "reference/sources/#parquetsource",
    "AsyncDataLoader": "reference/loaders/#asyncdataloader",
}
"""What new users look for, and where they find it."""


def test_the_search_of_the_site_finds_the_right_place_first(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    command = [node, "tests/support/search.js", str(site), *FIRST_HITS]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)[0] for line in done.stdout.splitlines()]
    assert dict(zip(FIRST_HITS, found, strict=True)) == FIRST_HITS


def test_no_page_loads_anything_from_another_server(site):
    pages = list(site.rglob("*.html"))
    for page in pages:
        loaded = [one or other for one, other in LOADED.findall(page.read_text())]
        assert loaded, page
        assert not [path for path in loaded if "//" in path], page


def test_versions_stand_beside_each_other_and_the_start_page_leads_to_the_newest(site, tmp_path):
    (tmp_path / "0.9").mkdir()
    (tmp_path / "0.9/index.html").write_text("an older version")
    assert build(str(tmp_path), "0.10").returncode == 0
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert [version["version"] for version in versions] == ["0.10", "0.9"]
    assert 'url=0.10/"' in (tmp_path / "index.html").read_text()
    assert "mike" in (tmp_path / "0.10/index.html").read_text()
    assert "mike" not in (site / "index.html").read_text()
