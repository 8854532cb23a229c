"""What fingerprints and cache keys call a description, a reader and a function: a fixed tag, wherever its file lies."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import asyncdata
from asyncdata import JsonArraySource, JsonlSource, ParquetSource
from asyncdata.errors import ConfigError
from tests.support.parts import Job, OfTokenizer, SlimeTokenizeFn, fingerprints_of, index_identity, resolve_path, tag_of

DESCRIPTIONS: dict[str, Callable[..., Any]] = {
    "asyncdata.integrations.slime_rows:SlimeTokenizeFn": SlimeTokenizeFn,
    "asyncdata.tokenization.chat:ChatTokenizeFn": asyncdata.ChatTokenizeFn,
    "asyncdata.tokenization.fixed_length:FixedLengthTokenizeFn": asyncdata.FixedLengthTokenizeFn,
    "asyncdata.tokenization.preference:PreferenceTokenizeFn": asyncdata.PreferenceTokenizeFn,
    "asyncdata.tokenization.prompt:PromptTokenizeFn": asyncdata.PromptTokenizeFn,
    "asyncdata.tokenization.rendered:RendererTokenizeFn": asyncdata.RendererTokenizeFn,
    "asyncdata.tokenization.text:TextTokenizeFn": asyncdata.TextTokenizeFn,
}
"""The tag of each tokenize function. A changed tag would refuse every snapshot there is."""

BABILONG = asyncdata.FixedLengthTokenizeFn.babilong
NEEDED = {asyncdata.FixedLengthTokenizeFn: {"max_length": 8, "prompt": "{q}", "answer": "{a}"}}
READERS = ("lines", "python-lines", "json-array", "parquet-2", "huggingface-2")
"""The tag of each reader. A changed tag would have every row index made anew."""


def subclasses_of(kind: type) -> list[type]:
    return [found for each in kind.__subclasses__() for found in [each, *subclasses_of(each)]]


def test_what_is_known_by_tag_is_pinned_and_kinds_of_one_base_are_told_apart():
    public = [kind for kind in subclasses_of(OfTokenizer) if kind.__name__.endswith("TokenizeFn")]
    assert {tag_of(kind): kind for kind in public if kind.__module__.startswith("asyncdata.")} == DESCRIPTIONS

    class Mine(asyncdata.PromptTokenizeFn, frozen=True, kw_only=True):
        pass

    assert tag_of(Mine) == f"{__name__}:{Mine.__qualname__}"
    assert Mine("nowhere").settings_digest() != asyncdata.PromptTokenizeFn("nowhere").settings_digest()


@pytest.mark.parametrize("kind", DESCRIPTIONS.values())
def test_a_moved_file_and_a_default_that_is_written_out_leave_the_fingerprint_as_it_was(monkeypatch, kind):
    plain = kind("folder", **NEEDED.get(kind, {}))
    # Texts of a file are other objects than the equal ones in the code.
    written = json.loads(json.dumps({field.name: getattr(plain, field.name) for field in msgspec.structs.fields(kind)}))
    spec: Any = importlib.util.spec_from_file_location("scratch_module", sys.modules[kind.__module__].__file__)
    elsewhere = importlib.util.module_from_spec(spec)  # as if the file had been moved there
    monkeypatch.setitem(sys.modules, "scratch_module", elsewhere)
    spec.loader.exec_module(elsewhere)
    moved = getattr(elsewhere, kind.__name__)
    assert kind(**written).settings_digest() == plain.settings_digest()
    assert moved.__module__ == "scratch_module"
    assert moved("nowhere", **NEEDED.get(kind, {})).settings_digest() == plain.settings_digest()


@pytest.mark.parametrize(
    ("kind", "settings", "digest"),
    [
        (asyncdata.PromptTokenizeFn, {"tool_key": "functions"}, "da4b68907f93f5e251b44a9efd29e406"),
        (asyncdata.ChatTokenizeFn, {"tool_key": "functions"}, "eb54f71233572f28d1d2d781ae138fa3"),
        (asyncdata.PreferenceTokenizeFn, {"tool_key": None}, "03f8e97c4ee0c56ba71f18bbd31aef05"),
        (BABILONG, {"max_length": 100, "legacy_recipe": True}, "1969f7c207ab7029c12b38d53a1a693b"),
        (BABILONG, {"max_length": 100, "overlong": "truncate_context_left"}, "0d4f3faabde58e7422f913ae6fe592a2"),
    ],
)
def test_a_setting_that_was_renamed_leaves_the_fingerprint_as_it_was(kind, settings, digest):
    assert kind("t", **settings).settings_digest() == digest


def test_a_function_or_the_class_of_a_callable_is_known_by_its_tag_or_else_its_import_path():
    def mine(row: dict[str, Any]) -> list[int]:
        return [len(row)]

    class Mine:
        def __call__(self, row: dict[str, Any]) -> list[int]:
            return [len(row)]

    path = f"{__name__}:{mine.__qualname__}"
    assert fingerprints_of(mine) == {"tokenize_fn": f"{path} version None"}
    assert tag_of(Mine()) == f"{__name__}:{Mine.__qualname__}"
    assert all(tag_of(value).endswith(f":{value.__qualname__}") for value in (len, "".join, print))
    mine.tag = 3
    assert tag_of(mine) == path, "a tag that is no text counts as none"

    mine.tag = Mine.tag = "length of a row"
    mine.version = 3
    assert fingerprints_of(mine) == {"tokenize_fn": "length of a row version 3"}
    assert tag_of(Mine()) == "length of a row"
    with pytest.raises(ConfigError, match="AD420"):
        resolve_path("asyncdata.core.settings:nothing")


def open_source(kind: str, folder: Path) -> Any:
    """Two rows, open, as blocks that a worker reads with the reader of that kind."""
    path = folder / f"rows.{kind}"
    if kind == "huggingface":
        datasets = pytest.importorskip("datasets")
        return asyncdata.HuggingFaceSource(datasets.Dataset.from_dict({"id": [1, 2]})).open(1 << 20)

    if kind == "parquet":
        pytest.importorskip("tests.support.parquet_files").write(path, 2)
        return ParquetSource(str(path)).open(1 << 20)

    if kind == "json-array":
        path.write_text('[{"id": 1}, {"id": 2}]')
        return JsonArraySource(str(path)).open(1 << 20).as_blocks(1 << 20)

    path.write_text('{"id": 1}\n{"id": 2}\n')
    return JsonlSource(str(path), python_lines=kind == "python-lines").open(1 << 20)


def key_of(files: Any, reader: Any) -> str:
    limits = {"max_row_bytes": files.max_row_bytes, "block_bytes": 1 << 20, "slack_bytes": 1 << 16}
    job = Job(files=files.files, tokenize=None, reader=reader, **limits)
    return index_identity(files, job, "rows", asyncdata.PromptTokenizeFn)


@pytest.mark.parametrize("tag", READERS)
def test_a_reader_has_its_tag_and_its_class_may_lie_anywhere(tmp_path, tag):
    files = open_source(tag.removesuffix("-2"), tmp_path)
    reader = files.reader
    assert reader.tag == tag
    assert isinstance(resolve_path(reader.path), type), "the path is where it lies now"
    assert key_of(files, msgspec.structs.replace(reader, path="scratch_module:Reader")) == key_of(files, reader)
    assert key_of(files, msgspec.structs.replace(reader, tag="another")) != key_of(files, reader)
    mine = msgspec.structs.replace(reader, tag="", path="mine:Reader")
    assert mine.identity == "mine:Reader", "without a tag it is known by its path"
    assert key_of(files, mine) != key_of(files, msgspec.structs.replace(mine, path="theirs:Reader"))
