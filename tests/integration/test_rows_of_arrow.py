"""Rows of Parquet files and of datasets give the samples of their JSONL; long texts are read in pieces."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import ChatTokenizeFn, DataLoader, ParquetSource, PromptTokenizeFn, RowFn
from asyncdata.errors import SourceError
from tests.support.chat_templates import CHATML_WITH_TOOLS

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


# All that a turn has is written, so that no null of another row can hide.
WRITES_ALL = """\
{%- if tools %}{{- '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def called(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": f"Please {name}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Done.", "name": name},
            {"role": "assistant", "content": "It is done."},
        ],
        "tools": [{"type": "function", "function": function}],
    }


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
ROWS = [
    called("tide", {"port": "Brest"}, {"port": {**TEXT, "enum": ["Brest", "Dover"]}}),
    called("add", {"left": 2, "right": 3}, {"left": NUMBER, "right": NUMBER}),
    called("plan", {"legs": [{"to": "Dover", "by": {"boat": {"knots": 9}}}]}, {"legs": {"type": "array"}}),
    called("plan", {"legs": [{"by": {"car": {"seats": 4}}}, {"to": "Bath"}]}, {"legs": {"type": "array"}}),
    called("wait", {}, {}),
    {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}], "tools": None},
]


def jsonl(folder: Path, rows: list[Any]) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "rows.jsonl")


def parquet(folder: Path, rows: list[Any]) -> Any:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def in_memory(folder: Path, rows: list[Any]) -> Any:
    return datasets.Dataset(pa.Table.from_pylist(rows))


def saved(folder: Path, rows: list[Any]) -> Any:
    in_memory(folder, rows).save_to_disk(folder / "saved")
    return folder / "saved"


def picked(folder: Path, rows: list[Any]) -> Any:
    twice = in_memory(folder, rows + rows)
    return twice.select([number + len(rows) * (number % 2) for number in range(len(rows))])


def streamed(folder: Path, rows: list[Any]) -> Any:
    return in_memory(folder, rows).to_iterable_dataset()


def streamed_parquet(folder: Path, rows: list[Any]) -> Any:
    settings = {"data_files": parquet(folder, rows), "cache_dir": str(folder / "cache")}
    return datasets.load_dataset("parquet", split="train", streaming=True, **settings)


def streamed_json(folder: Path, rows: list[Any]) -> Any:
    settings = {"data_files": jsonl(folder, rows), "cache_dir": str(folder / "cache")}
    return datasets.load_dataset("json", split="train", streaming=True, **settings)


def json_column(folder: Path, rows: list[Any]) -> Any:
    lists = datasets.List(datasets.Json())
    return datasets.Dataset.from_list(rows, features=datasets.Features(dict.fromkeys(rows[0], lists)))


def json_column_streamed(folder: Path, rows: list[Any]) -> Any:
    return json_column(folder, rows).to_iterable_dataset()


def json_column_parquet(folder: Path, rows: list[Any]) -> Any:
    json_column(folder, rows).to_parquet(folder / "json.parquet")
    return str(folder / "json.parquet")


PADDED = (parquet, in_memory, saved, picked, streamed, streamed_parquet)
STORED_AS_TEXT = (json_column, json_column_streamed, json_column_parquet, streamed_json)


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> Any:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def delivered(source: Any, fn: Any, **knobs: Any) -> tuple[list[Any], list[Any]]:
    """The samples, and the events that tell of nulls."""
    settings: dict[str, Any] = {"num_workers": 0, "shuffle": False, "epochs": 1, "batch_size": 1, **knobs}
    with capture_logs() as logs, DataLoader(source, tokenize_fn=fn, **settings) as loader:
        samples = [sample for batch in loader for sample in batch]
    return samples, [log for log in logs if log["event"] == "rows.nulls_left_out"]


def ids_and_labels(samples: list[Any]) -> list[Any]:
    return [(sample.tokens.tolist(), sample.labels.tolist()) for sample in samples]


@pytest.mark.parametrize(
    "template",
    [pytest.param(CHATML_WITH_TOOLS, id="well known", marks=pytest.mark.thorough), pytest.param(WRITES_ALL, id="all")],
)
@pytest.mark.parametrize("make", [*PADDED, *STORED_AS_TEXT], ids=lambda make: make.__name__)
def test_rows_whose_tools_and_arguments_differ_give_ids_and_labels_of_jsonl(tmp_path, small_tokenizer, template, make):
    fn = ChatTokenizeFn(small_tokenizer, chat_template=template)
    expected, none = delivered(jsonl(tmp_path, ROWS), fn)
    samples, events = delivered(make(tmp_path, ROWS), fn)
    assert ids_and_labels(samples) == ids_and_labels(expected)
    assert none == []
    assert len(events) == (make in PADDED)


@pytest.mark.parametrize("knobs", [{"num_workers": 1}, {"num_workers": 1, "shuffle": "full"}], ids=["blocks", "index"])
def test_it_is_said_once_a_source_where_workers_read_and_not_without_nulls(tmp_path, knobs):
    rows = [dict(ROWS[number % 2], id=number) for number in range(40)]
    path, own = parquet(tmp_path, rows), tmp_path / "own.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": None, "messages": [{"role": "user", "content": "Hi."}]}] * 4), own)
    samples, events = delivered(path, RowFn(), **knobs)
    assert sorted((sample.extra for sample in samples), key=lambda row: row["id"]) == rows
    assert len(events) == 1
    assert delivered(str(own), RowFn(), **knobs)[1] == []


OWN = {"messages": [{"role": "user", "name": None, "ids": [1, None]}, None], "meta": {"a": None, "b": [{"c": None}]}}
WITHOUT = {"messages": [{"role": "user", "ids": [1, None]}, None], "meta": {"a": None, "b": [{}]}}


@pytest.mark.parametrize(
    ("make", "read"),
    [(jsonl, OWN), *((make, WITHOUT) for make in PADDED), (json_column_streamed, OWN), (json_column, OWN)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_authors_null_stays_in_jsonl_and_json_and_as_an_item_a_column_and_a_field_of_a_column(tmp_path, make, read):
    """A function of the user's gets the row so, too."""
    rows = [{**OWN, "note": None}, {**OWN, "note": "x"}]
    rows = [{**row, "meta": [row["meta"]]} for row in rows] if read is OWN and make is not jsonl else rows
    if make in STORED_AS_TEXT:
        rows = [{name: [None] if name == "note" else value for name, value in row.items()} for row in rows]
    samples, _ = delivered(make(tmp_path, rows), RowFn())
    expected = [{**row, **read} if row["meta"] == OWN["meta"] else row for row in rows]
    assert [sample.extra for sample in samples] == expected


def test_labels_and_metadata_of_json_are_objects(tmp_path, small_tokenizer):
    values = [{"answer": 4, "null": None}, [1, {"b": "\u00e9\n"}], "text", 5, None]
    rows = [{"input": "2 + 2?", "label": value, "metadata": {"from": value}} for value in values]
    features = {"input": datasets.Value("string"), "label": datasets.Json(), "metadata": datasets.Json()}
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    fn = PromptTokenizeFn(small_tokenizer, label_key="label", metadata_key="metadata")
    dataset.to_parquet(tmp_path / "rows.parquet")
    for source in (dataset, dataset.to_iterable_dataset(), ParquetSource(str(tmp_path / "rows.parquet"))):
        samples, _ = delivered(source, fn)
        assert [sample.label for sample in samples] == values
        assert [sample.metadata for sample in samples] == [row["metadata"] for row in rows]


def test_text_of_a_json_column_that_is_no_json_stays_text_and_harms_no_other_key(tmp_path):
    """And one that is JSON on several lines, or has what only Python's reader takes, is what it stands for."""
    texts = ['1, "id": 7', "{", "", '{"a":\n1}', '{"a": NaN}']
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))
    table = pa.table({"id": range(5), "v": column, "f": [0.5, float("nan"), 1.0, float("inf"), 2.0]})
    pq.write_table(table, tmp_path / "rows.parquet")
    samples, _ = delivered(str(tmp_path / "rows.parquet"), RowFn())
    rows = [sample.extra for sample in samples]
    assert [row["id"] for row in rows] == list(range(5))
    assert [row["v"] for row in rows[:4]] == [*texts[:3], {"a": 1}]
    assert rows[4]["v"]["a"] != rows[4]["v"]["a"]


def test_files_with_json_and_with_text_are_not_read_as_one(tmp_path):
    texts = pa.array(["{}"])
    for name, column in (("a", texts), ("b", pa.ExtensionArray.from_storage(pa.json_(), texts))):
        pq.write_table(pa.table({"v": column}), tmp_path / f"{name}.parquet")
    with pytest.raises(SourceError, match="column 'v' is extension<arrow.json>, and string in "):
        DataLoader(ParquetSource(str(tmp_path)), tokenize_fn=RowFn(), num_workers=0)


NUM_ROWS, TEXT_BYTES = 2000, 200_000
LIMITS_MB = {"blocks": 300, "samples": 300, "copies": 300, "dataset": 100, "stream": 100}
"""The rows decode to 400 MB. Of Parquet, the first batch of Arrow turns out too large, and takes 102 MB of it."""

# What a run has taken beyond the peak of one that reads the first row alone, which imports what is needed.
RUN = """
import sys
from unittest.mock import patch

import datasets
from asyncdata import DataLoader, IterableSource, ParquetSource
from asyncdata.workers.inline import InlineExecutor

kind, path, num_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
text = open(path + ".txt").read()
picked = datasets.load_from_disk(path + ".folder")


def short(row):
    return [row["id"]]


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def run(source, **knobs):
    with DataLoader(source, tokenize_fn=short, num_workers=0, batch_size=8, **knobs) as loader:
        return sum(len(loader.get_next_batch(8)) for _ in range(4))


with patch.object(InlineExecutor, "answers_with_samples", new=kind == "samples"):
    sources = {
        "dataset": lambda: picked.select([0] * num_rows),
        "stream": lambda: IterableSource(lambda epoch: ({"id": n, "text": text} for n in range(num_rows))),
    }
    run(ParquetSource(path + ".short"))
    run(picked.select(range(1, 40)))
    before = peak()
    found = run(sources.get(kind, lambda: ParquetSource(path))(), shuffle="full" if kind == "copies" else True)
print(found, peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LIMITS_MB)
def test_a_block_of_any_size_is_decoded_and_answered_in_pieces(tmp_path, kind):
    datasets.disable_progress_bars()
    path = tmp_path / "rows.parquet"
    text = "".join(f"{number}, " for number in range(TEXT_BYTES))[:TEXT_BYTES]
    pq.write_table(pa.table({"id": range(NUM_ROWS), "text": [text] * NUM_ROWS}), path, compression="zstd")
    pq.write_table(pa.table({"id": range(40), "text": ["-"] * 40}), f"{path}.short")
    rows = {"id": range(NUM_ROWS), "text": [text] + ["-"] * (NUM_ROWS - 1)}
    datasets.Dataset.from_dict(rows).save_to_disk(f"{path}.folder")
    (tmp_path / "rows.parquet.txt").write_text(text)
    assert path.stat().st_size < TEXT_BYTES

    command = [sys.executable, "-c", RUN, kind, str(path), str(NUM_ROWS)]
    place = {"PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=place)

    num_samples, grown = map(int, done.stdout.split())
    assert num_samples == 32
    assert grown >> 20 < LIMITS_MB[kind]
