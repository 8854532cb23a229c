"""Rows of Parquet under slime: the values that pyarrow's ``to_pylist`` gives, as slime's own reader has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.peers.rollouts import theirs
from tests.support.slime_source import no_rollout, source_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.usefixtures("no_rollout")

MAP = pa.map_(pa.string(), pa.int64())
COLUMNS = {
    "binary": pa.array([b"\x00\xff", b"", None]),
    "large binary": pa.array([b"\x00\xff", b"", None], pa.large_binary()),
    "fixed binary": pa.array([b"ab", b"cd", None], pa.binary(2)),
    "image": pa.array([{"bytes": b"\x01", "path": "p"}, {"bytes": b"", "path": None}, None]),
    "list of binary": pa.array([[b"a", b""], [], None]),
    "map": pa.array([[("a", 1), ("a", 2)], [], None], MAP),
    "map of numbers": pa.array([[(1, "x")], [], None], pa.map_(pa.int32(), pa.string())),
    "map of binary": pa.array([[("a", b"x"), ("b", b"")], [], None], pa.map_(pa.string(), pa.binary())),
    "list of maps": pa.array([[[("a", 1)], None], [[]], None], pa.list_(MAP)),
    "map in a struct": pa.array([{"m": [("a", 1)]}, {"m": []}, {"m": None}], pa.struct([("m", MAP)])),
    "list": pa.array([[[1, None], None], [], None]),
    "struct": pa.array([{"a": 1.5, "b": "x"}, {"a": None, "b": None}, None]),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "large string": pa.array(["a", "", None], pa.large_string()),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "null": pa.nulls(3),
}


def told(groups: list[list[Any]]) -> list[Any]:
    """The values and their types."""
    return [repr((group[0].prompt, group[0].label, group[0].metadata)) for group in groups]


def served(tmp_path: Path, **columns: Any) -> tuple[list[str], list[str]]:
    """What is served of a file with these columns, and pyarrow's values of it."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(columns), path)
    rows = pq.ParquetFile(path).read().to_pylist()
    with source_of(path) as ours:
        return told(ours.get_samples(3)), [repr((r["input"], r["label"], r["metadata"] or {})) for r in rows]


@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_those_of_pyarrow(tmp_path, name):
    column = COLUMNS[name]
    inner = pa.array([{"x": value} for value in column.to_pylist()], pa.struct([("x", column.type)]))

    found, expected = served(tmp_path, input=column, label=column, metadata=inner)

    assert found == expected


@pytest.mark.parametrize("name", ["binary", "map", "map in a struct", "list of maps"])
def test_metadata_may_be_any_value_and_empty_ones_are_none(tmp_path, name):
    found, expected = served(tmp_path, input=["p", "q", "r"], label=["l"] * 3, metadata=COLUMNS[name])

    assert found == expected


def test_a_map_with_tools_is_a_bad_row_unless_it_is_empty(tmp_path):
    path = tmp_path / "p.parquet"
    columns = {"input": ["p", "q"], "label": ["l", "l"], "tools": ["[]", "[]"]}
    pq.write_table(pa.table({**columns, "metadata": pa.array([[("a", 1)], []], MAP)}), path)

    with source_of(path) as ours:
        assert told(ours.get_samples(2)) == [repr(("q", "l", {"tools": []}))] * 2


@pytest.mark.thorough
def test_chats_with_maps_and_images_of_bytes_are_slimes(tmp_path, small_tokenizer):
    """A template writes a map as the list of tuples that it is in Python, and a picture stays its bytes."""
    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("call", MAP)]))
    messages = [[{"role": "user", "content": "see <image>", "call": [("a", n)]}] for n in range(3)]
    path = tmp_path / "p.parquet"
    columns = {"label": ["l"] * 3, "images": [[b"\x00"], [b""], [b"x"]]}
    pq.write_table(pa.table({**columns, "input": pa.array(messages, chat)}), path)
    template = {"chat_template": "{{ messages[0].call }}"}
    for settings in (
        {"apply_chat_template": True, "apply_chat_template_kwargs": template},
        {"multimodal_keys": {"image": "images"}},
        {"multimodal_keys": {"image": "images"}, "apply_chat_template": True, "apply_chat_template_kwargs": template},
    ):
        given = {"hf_checkpoint": str(small_tokenizer), **settings}
        live = told(theirs("slime", str(path), label_key="label", **given).get_samples(3))
        with source_of(path, **given, asyncdata_processor="tests.support.slime_source.as_they_are") as ours:
            groups = ours.get_samples(3)
            assert told(groups) == live
        if "multimodal_keys" in settings:
            assert [group[0].multimodal_inputs["images"] for group in groups] == [[b"\x00"], [b""], [b"x"]]
