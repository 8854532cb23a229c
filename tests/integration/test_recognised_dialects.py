"""The first row of a source decides the dialect of its chats, for all workers and ranks; other rows are bad rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import BadRows, ChatTokenizeFn, Mix, Part, PromptTokenizeFn
from asyncdata.errors import BadRowError, ConfigError
from tests.support.combinations import each_value
from tests.support.loaders import make
from tests.support.parts import main
from tests.support.sources import KINDS

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ("JSONL files", "a gzip file", "a JSON array", "an iterable", "an object by http")
CHATS = [name for name, kind in KINDS.items() if {"pyarrow", "datasets"}.isdisjoint(kind.needs)]
"""The others are written with columns of their own."""
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "sharegpt": {"conversations": TURNS},
    "alpaca": {"instruction": "q", "output": "a"},
    "prompt_completion": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "prompt_response": {"prompt": "q", "response": "a"},
    "query_response": {"query": "q", "response": "a"},
    "question_answer": {"question": "q", "answer": "a"},
    "query_answer": {"query": "q", "answer": "a"},
    "question_response": {"question": "q", "response": "a"},
    "instruction_response": {"instruction": "q", "response": "a"},
}


@pytest.fixture
def fn(small_tokenizer):
    return ChatTokenizeFn(str(small_tokenizer))


def written(path: Path, *rows: Any) -> str:
    """Lines of JSON; text is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def in_order(source: Any, function: Any, **knobs: Any) -> Any:
    return make(source, function, shuffle=False, epochs=1, **knobs)


def told(events: Any) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "chat.dialect"]


@pytest.mark.parametrize(("dialect", "num_workers"), each_value(list(ROWS), [0, 2]))
def test_rows_of_each_dialect_are_read_without_naming_it(tmp_path, fn, dialect, num_workers):
    path = written(tmp_path / "rows.jsonl", *[ROWS[dialect]] * 40)

    with capture_logs() as events, in_order(path, fn, num_workers=num_workers) as loader:
        samples = loader.get_next_batch(40)

    with in_order(written(tmp_path / "same.jsonl", ROWS["messages"]), fn) as loader:
        (same,) = loader.get_next_batch(1)
    assert all(sample.tokens.tolist() == same.tokens.tolist() for sample in samples)
    assert all(sample.labels.tolist() == same.labels.tolist() for sample in samples)
    (event,) = told(events)
    assert (event["dialect"], event["path"], event["line"]) == (dialect, path, 1)
    assert all(repr(key) in event["reason"] for key in ROWS[dialect])


@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k in QUICK else pytest.mark.thorough) for k in CHATS])
def test_each_kind_of_source_says_its_first_row(tmp_path, fn, name):
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)
    source = kind.write(tmp_path, [ROWS["sharegpt"]] * 30)

    with capture_logs() as events, in_order(source, fn) as loader:
        assert len(loader.get_next_batch(30)) == 30

    (event,), place = told(events), kind.place(source, 0, 30)
    assert event["path"].startswith(place.path)
    assert event.get("line") == place.line
    if place.line is None:
        assert event.get("row_number") == place.row_number
        assert (event.get("byte_offset") == 0) == (place.row_number is None)


def test_a_row_of_a_table_decides(tmp_path, fn):
    datasets = pytest.importorskip("datasets")
    rows, path = datasets.Dataset.from_list([ROWS["sharegpt"]] * 30), str(tmp_path / "rows.parquet")
    rows.to_parquet(path)

    for source, name in ((path, path), (rows, "Dataset"), (rows.to_iterable_dataset(), "IterableDataset")):
        with capture_logs() as events, in_order(source, fn) as loader:
            assert len(loader.get_next_batch(30)) == 30
        assert [(event["path"], event["row_number"]) for event in told(events)] == [(name, 0)]


def test_the_state_is_that_of_the_dialect_by_name(tmp_path, fn):
    """Also of messages, which had no name before."""
    for dialect, row in ROWS.items():
        path = written(tmp_path / f"{dialect}.jsonl", *[row] * 10)
        named = ChatTokenizeFn(fn.tokenizer, dialect=dialect)
        states = []
        for function, other in ((fn, named), (named, fn)):
            with in_order(path, function) as loader:
                loader.get_next_batch(4)
                states.append(loader.state_dict())
            with in_order(path, other, num_workers=int(row is ROWS["messages"])) as loader:
                loader.load_state_dict(states[-1])
                assert len(loader.get_next_batch(6)) == 6
        assert states[0]["fingerprints"] == states[1]["fingerprints"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_of_another_dialect_is_bad_and_both_rows_are_named(tmp_path, fn, num_workers):
    path = written(tmp_path / "rows.jsonl", ROWS["sharegpt"], ROWS["question_answer"])

    with in_order(path, fn, num_workers=num_workers) as loader:
        loader.get_next_batch(1)
        with pytest.raises(BadRowError) as caught:
            loader.get_next_batch(1)

    error = caught.value
    assert (error.code, error.path, error.line) == ("AD110", path, 2)
    assert "of the dialect 'question_answer', not 'sharegpt'" in error.reason
    assert f"{path}:1 is of 'sharegpt'" in error.reason


def test_what_is_null_decides_nothing(tmp_path, fn):
    """As in Parquet, whose rows have all columns."""
    nothing = dict.fromkeys(["conversations", "messages", "question", "answer"])
    sharegpt, messages = nothing | ROWS["sharegpt"], nothing | ROWS["messages"]
    path = written(tmp_path / "rows.jsonl", sharegpt, sharegpt, messages)

    with in_order(path, fn) as loader:
        loader.get_next_batch(2)
        with pytest.raises(BadRowError, match=r"AD110 .*rows.jsonl:3 .*'messages', not 'sharegpt'"):
            loader.get_next_batch(1)


def test_a_row_of_two_dialects_is_bad(tmp_path, fn):
    both = ROWS["messages"] | ROWS["sharegpt"]
    half = ROWS["messages"] | {"question": "q", "prompt": "p"}
    path = written(tmp_path / "rows.jsonl", ROWS["messages"], half, both, ROWS["messages"])
    bad_rows = BadRows(policy="quarantine", path=str(tmp_path / "bad.jsonl"))

    with in_order(path, fn, bad_rows=bad_rows) as loader:
        assert [sample.index for sample in loader.get_next_batch(3)] == [0, 1, 2]

    record = json.loads((tmp_path / "bad.jsonl").read_text())
    assert (record["code"], record["line"]) == ("AD115", 3)
    assert "'messages' and 'sharegpt' can both be read" in record["reason"]
    with pytest.raises(ConfigError, match=r"AD115 .*rows.jsonl:1 .*'messages' and 'sharegpt'"):
        in_order(written(tmp_path / "rows.jsonl", both), fn)
    with in_order(path, ChatTokenizeFn(fn.tokenizer, dialect="messages")) as loader:
        assert len(loader.get_next_batch(1)) == 1


def test_the_first_row_that_has_a_dialect_decides(tmp_path, fn):
    path = written(tmp_path / "rows.jsonl", "{", "[1]", {"id": 1}, ROWS["alpaca"])

    with capture_logs() as events, in_order(path, fn, bad_rows="skip") as loader:
        assert len(loader.get_next_batch(1)) == 1

    assert [(event["dialect"], event["line"]) for event in told(events)] == [("alpaca", 4)]


def test_keys_that_are_something_else_decide_nothing(tmp_path, fn):
    row = ROWS["messages"] | ROWS["question_answer"]
    function = ChatTokenizeFn(fn.tokenizer, metadata_key="answer", dialect="messages")
    with in_order(written(tmp_path / "rows.jsonl", row), function) as loader:
        (sample,) = loader.get_next_batch(1)

    assert sample.metadata == "a"


@pytest.mark.parametrize(
    "settings", [{"messages_key": "conversations"}, {"dialect": "alpaca"}], ids=["messages_key", "dialect"]
)
def test_what_is_named_is_not_looked_for(tmp_path, fn, settings):
    rows = [{"conversations": MESSAGES}] if "messages_key" in settings else [ROWS["alpaca"] | ROWS["messages"]]
    function = ChatTokenizeFn(fn.tokenizer, **settings)

    with capture_logs() as events, in_order(written(tmp_path / "rows.jsonl", *rows), function) as loader:
        assert len(loader.get_next_batch(1)) == 1

    assert told(events) == []


def test_a_row_whose_answer_may_be_either_of_two_is_of_two_dialects(tmp_path, fn):
    row = ROWS["question_answer"] | {"response": "b"}
    path = written(tmp_path / "rows.jsonl", ROWS["question_answer"], row)

    with in_order(path, fn) as loader:
        loader.get_next_batch(1)
        with pytest.raises(BadRowError, match=r"AD115 .*'question_answer' and 'question_response' can both be read"):
            loader.get_next_batch(1)


def test_each_part_of_a_mixture_has_its_own(tmp_path, fn):
    """A part of another kind of rows is left alone, and an error names the part."""
    files = {name: written(tmp_path / f"{name}.jsonl", *[row] * 5) for name, row in ROWS.items()}
    files["again"] = written(tmp_path / "again.jsonl", ROWS["alpaca"], ROWS["sharegpt"])
    parts = {name: Part(path) for name, path in files.items()}
    parts["prompts"] = Part(
        written(tmp_path / "prompts.jsonl", {"input": "x"}), tokenize_fn=PromptTokenizeFn(fn.tokenizer)
    )

    with capture_logs() as events, make(Mix(parts), fn, num_workers=1, bad_rows="skip") as loader:
        loader.get_next_batch(200)

    assert {event["part"]: event["dialect"] for event in told(events)} == {**{n: n for n in ROWS}, "again": "alpaca"}
    (bad,) = {event["reason"] for event in events if event["event"] == "row.bad"}
    assert f"{files['again']}:1" in bad
    missing = Mix({"here": Part(files["alpaca"]), "gone": Part(str(tmp_path / "gone.jsonl"))})
    with pytest.raises(ConfigError, match=r"AD115 part 'two' of the mixture: .*two.jsonl:1"):
        make(Mix({"two": Part(written(tmp_path / "two.jsonl", ROWS["alpaca"] | ROWS["messages"]))}), fn)
    with pytest.raises(Exception, match="part 'gone' of the mixture"):
        make(missing, fn)


def test_inspect_shows_which_and_why(tmp_path, fn, capsys):
    path = written(tmp_path / "rows.jsonl", *[ROWS["query_response"]] * 3)

    assert main(["inspect", path, "--tokenizer", fn.tokenizer, "--loss-mask"]) == 0

    shown = capsys.readouterr()
    assert "kind 'chat'" in shown.err
    assert f"dialect   query_response: {path}:1 has 'query' and 'response'" in shown.out.replace("\n", " ")
    assert "of which 3 became samples" in shown.out
    assert main(["inspect", path, "--tokenizer", fn.tokenizer, "--set", "dialect=query_response", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dialects"] == ["query_response: as requested"]


def test_columns_of_a_pair_beside_a_chat_are_no_other_dialect(tmp_path, fn):
    row = ROWS["messages"] | ROWS["question_answer"] | ROWS["prompt_response"]
    path = written(tmp_path / "rows.jsonl", row, row, ROWS["question_answer"])

    with in_order(path, fn) as loader:
        assert len(loader.get_next_batch(2)) == 2
        with pytest.raises(BadRowError, match=r"AD110 .*'question_answer', not 'messages'"):
            loader.get_next_batch(1)
    with pytest.raises(BadRowError, match=r"AD110 .*'messages', not 'question_answer'"):
        with in_order(written(tmp_path / "rows.jsonl", ROWS["question_answer"], row), fn) as loader:
            loader.get_next_batch(2)
