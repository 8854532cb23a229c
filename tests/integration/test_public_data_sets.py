"""Each line of the table in ``public-data-sets.md`` is true; and the first row decides the dialect of chats."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from asyncdata import BadRows, ChatTokenizeFn, DataLoader, Mix, Part, PreferenceTokenizeFn, PromptTokenizeFn
from asyncdata.errors import BadRowError, ConfigError
from tests.support.chat_templates import CHATML_WITH_TOOLS
from tests.support.examples import each_value
from tests.support.loaders import make
from tests.support.pages import blocks_of, run_block
from tests.support.parts import main
from tests.support.sources import KINDS
from tests.unit.tokenization.trained import variant

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "public-data-sets.md"
INVENTED = Path(__file__).parents[1] / "support" / "public_rows.jsonl"
PUBLIC_ROWS: dict[str, list[dict[str, Any]]] = {}
"""Rows in the shape of each data set, with invented texts, by its name on the page."""
for each in map(json.loads, INVENTED.read_text("utf-8").splitlines()):
    PUBLIC_ROWS.setdefault(each["set"], []).append(each["row"])
CALLS: dict[str, Any] = {each.__name__: each for each in (ChatTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn)}
END = "<|im_end|>"
NAMES = ("assistant", "gpt")
SAYS = r"SYSTEM: |\n*USER: |\n*ASSISTANT: |\n*FUNCTION RESPONSE: |<\|endoftext\|>"
"""What glaive's texts have beside what is said."""


class Line(NamedTuple):
    """A line of the table.

    :ivar paths: the row's keys of what is trained, or is the prompt.
    :ivar label: the key of the row's label, if it has one.
    :ivar code: of the error without the settings, if there is one.
    :ivar unread: the row's keys that are not read.
    """

    name: str
    call: str
    paths: list[str]
    label: str | None
    code: str | None
    unread: set[str]


def lines_of_the_page() -> Iterator[Line]:
    cells = r"^\| ([^|`]+) \| `([^|`]+\))` \| (.*?) \| (.*?) \|$"
    for name, call, trained, said in re.findall(cells, PAGE.read_text(), re.M):
        label, code = (re.search(pattern, cell) for pattern, cell in ((r"label `(.*?)`", trained), (r"AD\d+", said)))
        paths = re.findall("`(.*?)`", re.split(", | that ", trained)[0])
        unread = set(re.findall("`(.*?)`", said))
        yield Line(name, call, paths, label and label[1], code and code[0], unread)


LINES = {line.name: line for line in lines_of_the_page()}
every_line = pytest.mark.parametrize("line", LINES.values(), ids=LINES)


@pytest.fixture
def names(tmp_path, monkeypatch, small_tokenizer) -> dict[str, Any]:
    """What the page's calls may name, in a folder that has its files, and a tokenizer with a template for tools."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    template = "{{- custom_instructions or '' }}" + CHATML_WITH_TOOLS
    variant(small_tokenizer, tmp_path / "tokenizer", config={"chat_template": template})
    names, imported = dict(CALLS), list[str]()
    for block in blocks_of(PAGE):
        if found := re.match(r"# (\w+)\.py\n", block.text):
            run_block(block, {}, PAGE.name)
            imported.append(found[1])
    for name in imported:
        sys.modules.pop(name, None)
        names[name] = importlib.import_module(name)
    return names


def served(fn: Any, rows: list[dict[str, Any]]) -> tuple[list[Any], set[str]]:
    """The samples of the rows, and the keys that the loader says are not read."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"num_workers": 0, "shuffle": False, "epochs": 1, "batch_size": 1}
    with capture_logs() as events, DataLoader("rows.jsonl", tokenize_fn=fn, **settings) as loader:
        samples = [sample for batch in loader for sample in batch]
    (told,) = [event["keys"] for event in events if event["event"] == "rows.unread_keys"] or [[]]
    assert {*told} == {*loader.statistics().unread_keys}
    return samples, {*told}


def inside(row: Any, path: str) -> Any:
    for key in path.split("."):
        row = row[key]
    return row


def decoded(value: Any) -> Any:
    """The value of JSON text, as some sets have their chats and tools."""
    return json.loads(value) if isinstance(value, str) and value.startswith(("[{", "{")) else value


def texts(value: Any) -> Iterator[str]:
    """The texts of a value, and of JSON text in it; of a turn that has one, its content alone."""
    value = decoded(value)
    if isinstance(value, str):
        yield from map(str.strip, re.split(SAYS, value))
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, dict):
        said = [value[key] for key in ("content", "value") if key in value]
        yield from texts(said or [*value.values()])


def said_in(row: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """What is to be trained of the value: of each answer its text, and its calls."""
    value = decoded(row[path])
    if isinstance(value, str):
        texts_of_chat = re.findall(r"ASSISTANT: (.*?) <\|endoftext\|>", value)
        return [(text, None) for text in texts_of_chat or [value]]

    if "name" in value[0]:
        return [("", value)]

    chosen = row.get("metadata", {}).get("train_turns") if isinstance(row.get("metadata"), dict) else None
    return [
        (turn.get("content", turn.get("value")), turn.get("tool_calls"))
        for number, turn in enumerate(value)
        if turn.get("role", turn.get("from")) in NAMES and (chosen is None or chosen[number])
    ]


def runs(tokens: list[int], is_trained: list[bool]) -> list[str]:
    """The text of each run of tokens that are trained."""
    decode, found = Tokenizer.from_file("tokenizer/tokenizer.json").decode, list[list[int]]()
    for number, (token, trained) in enumerate(zip(tokens, is_trained, strict=True)):
        if trained:
            found += [[]] if not number or not is_trained[number - 1] else []
            found[-1].append(token)
    return [decode(each, skip_special_tokens=False) for each in found]


def answers_of(sample: Any) -> list[list[str]]:
    """What is trained of a sample; of a pair, of both."""
    found = [runs(sample.tokens.tolist(), (sample.labels != -100).tolist())]
    if "rejected_spans" in (sample.extra or {}):
        spans, tokens = sample.extra["rejected_spans"], sample.extra["rejected_input_ids"]
        found.append(runs(tokens, [any(a <= at < b for a, b in spans) for at in range(len(tokens))]))
    return found


def test_the_page_has_a_line_for_each_of_36_data_sets():
    assert list(LINES) == list(PUBLIC_ROWS)
    assert len(LINES) == 36


@every_line
def test_what_the_page_says_is_trained_is_trained_and_nothing_that_is_read_is_lost(names, line):
    rows, decode = PUBLIC_ROWS[line.name], Tokenizer.from_file("tokenizer/tokenizer.json").decode
    fn = eval(line.call, names)  # noqa: S307 - the project's own page

    samples, told = served(fn, rows)

    assert len(samples) == len(rows)
    assert told == (line.unread if type(fn).__module__.startswith("asyncdata") else set())
    for row, sample in zip(rows, samples, strict=True):
        ids = [*sample.tokens.tolist(), *(sample.extra or {}).get("rejected_input_ids", [])]
        text = decode(ids, skip_special_tokens=False)
        if fn.makes_prompts:
            assert (sample.prompt, sample.labels) == (text, None)
        else:
            check_answers(row, line.paths, answers_of(sample))
        assert sample.label == (inside(row, line.label) if line.label else None)
        is_chosen = "train_turns" in str(row)
        assert sample.metadata == ({"seed_dataset": "invented"} if is_chosen else row.get("metadata", {}))
        served_otherwise = {"metadata", "image", (line.label or "").partition(".")[0]}
        for key in row.keys() - line.unread - served_otherwise:
            assert [each for each in texts(row[key]) if each not in text] == []


def check_answers(row: dict[str, Any], paths: list[str], found: list[list[str]]) -> None:
    assert len(found) == len(paths)
    for path, answers in zip(paths, found, strict=True):
        expected = said_in(row, path)
        assert len(answers) == len(expected)
        for answer, (content, calls) in zip(answers, expected, strict=True):
            assert answer.endswith(END)
            for call in calls or []:
                function = call.get("function", call)
                assert all(each in answer for each in texts([function["name"], function["arguments"]]))
            if calls:
                assert content in answer
            elif content.startswith("\n\nHuman: "):
                assert content.rpartition("Assistant: The")[2] == answer.removesuffix(END)
            else:
                assert answer == content + END


@pytest.mark.parametrize("line", [line for line in LINES.values() if line.code], ids=lambda line: line.name)
def test_what_needs_a_setting_is_refused_without_it(names, line):
    kind = PreferenceTokenizeFn if "chosen" in PUBLIC_ROWS[line.name][0] else ChatTokenizeFn
    with pytest.raises(BadRowError, match=line.code) as caught:
        served(kind("tokenizer"), PUBLIC_ROWS[line.name])
    for setting in re.findall(r"(\w+)=", line.call):
        assert f"{setting}=" in str(caught.value), "the error names it"


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


NULLS = dict.fromkeys(["conversations", "messages", "question", "answer"])
"""As in Parquet, whose rows have all columns; what is null decides nothing."""
OF_A_PAIR = ROWS["messages"] | ROWS["question_answer"] | ROWS["prompt_response"]
"""Columns of a pair beside a chat are no other dialect."""
OTHERS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "another": (
        [ROWS["sharegpt"], ROWS["question_answer"]],
        "AD110 {0}:2 .*of the dialect 'question_answer', not 'sharegpt'.*{0}:1 is of 'sharegpt'",
    ),
    "nulls": ([NULLS | ROWS["sharegpt"]] * 2 + [NULLS | ROWS["messages"]], "AD110 {0}:3 .*'messages', not 'sharegpt'"),
    "either of two": (
        [ROWS["question_answer"], ROWS["question_answer"] | {"response": "b"}],
        "AD115 .*'question_answer' and 'question_response' can both be read",
    ),
    "a pair": ([OF_A_PAIR, OF_A_PAIR, ROWS["question_answer"]], "AD110 .*'question_answer', not 'messages'"),
    "a chat": ([ROWS["question_answer"], OF_A_PAIR], "AD110 .*'messages', not 'question_answer'"),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("rows", "message"), OTHERS.values(), ids=OTHERS)
def test_a_row_of_another_dialect_than_those_before_it_is_bad(tmp_path, fn, rows, message, num_workers):
    path = written(tmp_path / "rows.jsonl", *rows)
    with in_order(path, fn, num_workers=num_workers) as loader:
        assert len(loader.get_next_batch(len(rows) - 1)) == len(rows) - 1
        with pytest.raises(BadRowError, match=message.format(path)) as caught:
            loader.get_next_batch(1)
    assert (caught.value.path, caught.value.line) == (path, len(rows))


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


@pytest.mark.parametrize("settings", [{"messages_key": "conversations"}, {"dialect": "alpaca"}], ids=str)
def test_what_is_named_is_not_looked_for(tmp_path, fn, settings):
    rows = [{"conversations": MESSAGES}] if "messages_key" in settings else [ROWS["alpaca"] | ROWS["messages"]]
    function = ChatTokenizeFn(fn.tokenizer, **settings)
    with capture_logs() as events, in_order(written(tmp_path / "rows.jsonl", *rows), function) as loader:
        assert len(loader.get_next_batch(1)) == 1
    assert told(events) == []


def test_each_part_of_a_mixture_has_its_own(tmp_path, fn):
    """A part of another kind of rows is left alone, and an error names the part."""
    files = {name: written(tmp_path / f"{name}.jsonl", *[row] * 5) for name, row in ROWS.items()}
    files["again"] = written(tmp_path / "again.jsonl", ROWS["alpaca"], ROWS["sharegpt"])
    parts = {name: Part(path) for name, path in files.items()}
    prompts = written(tmp_path / "prompts.jsonl", {"input": "x"})
    parts["prompts"] = Part(prompts, tokenize_fn=PromptTokenizeFn(fn.tokenizer))

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
