"""Rows of Parquet under slime: the values that pyarrow's ``to_pylist`` gives, as slime's own reader has them."""

import pytest

from tests.support.slime_source import no_rollout, source_of

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


def told(groups):
    """The values and their types."""
    return [repr((group[0].prompt, group[0].label, group[0].metadata)) for group in groups]


def in_file(tmp_path, **columns):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_those_of_pyarrow_and_empty_metadata_are_none(tmp_path, name):
    column = COLUMNS[name]
    inner = pa.array([{"x": value} for value in column.to_pylist()], pa.struct([("x", column.type)]))
    for metadata in (inner, column):
        path = in_file(tmp_path, input=column, label=column, metadata=metadata)
        rows = pq.ParquetFile(path).read().to_pylist()
        with source_of(path) as source:
            found = told(source.get_samples(3))
        assert found == [repr((row["input"], row["label"], row["metadata"] or {})) for row in rows]


def test_a_map_with_tools_is_a_bad_row_unless_it_is_empty(tmp_path):
    columns = {"input": ["p", "q"], "label": ["l", "l"], "tools": ["[]", "[]"]}
    path = in_file(tmp_path, **columns, metadata=pa.array([[("a", 1)], []], MAP))
    with source_of(path) as source:
        assert told(source.get_samples(2)) == [repr(("q", "l", {"tools": []}))] * 2


def test_a_template_writes_a_map_as_its_list_of_tuples_and_a_picture_stays_its_bytes(tmp_path, small_tokenizer):
    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("call", MAP)]))
    messages = [[{"role": "user", "content": "see <image>", "call": [("a", n)]}] for n in range(3)]
    images = [[b"\x00"], [b""], [b"x"]]
    path = in_file(tmp_path, label=["l"] * 3, images=images, input=pa.array(messages, chat))
    template = {"apply_chat_template": True, "apply_chat_template_kwargs": {"chat_template": "{{ messages[0].call }}"}}
    shown = {"multimodal_keys": {"image": "images"}, "asyncdata_processor": "tests.support.slime_source.as_they_are"}
    for settings in (template, shown, template | shown):
        with source_of(path, hf_checkpoint=str(small_tokenizer), **settings) as source:
            samples = [sample for (sample,) in source.get_samples(3)]
        if settings != shown:
            assert [sample.prompt for sample in samples] == [f"[('a', {n})]" for n in range(3)]
        if settings != template:
            assert [sample.multimodal_inputs for sample in samples] == [{"images": image} for image in images]
