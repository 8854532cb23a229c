"""Each line of the table in ``public-data-sets.md`` is run on rows of its data set's shape: what it says is true."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn, PromptTokenizeFn
from asyncdata.errors import BadRowError
from tests.support.chat_templates import CHATML_WITH_TOOLS
from tests.support.pages import blocks_of, run_block
from tests.unit.tokenization.trained import variant

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    for name, call, trained, said in re.findall(
        r"^\| ([^|`]+) \| `([^|`]+\))` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M
    ):
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
        assert sample.metadata == (
            {"seed_dataset": "invented"} if "train_turns" in str(row) else row.get("metadata", {})
        )
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
