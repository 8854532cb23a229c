"""ChatTokenizeFn: rows that are dropped, cut or bad, and what its description says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn, ConfigError, DataLoader, TokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import (
    assistant,
    tokenizer_of,
    user,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
from tests.support.chats import CHAT, END, GENERATION

# What is not kept


def test_a_row_with_nothing_to_train_on_is_dropped_and_counted(name: str) -> None:
    rows = [
        {"messages": CHAT},
        {"messages": [user("a")]},
        {"messages": []},
        {"messages": [assistant("a", loss=False)]},
    ]

    chunk = run(ChatTokenizeFn(name, train_on="loss").open(), rows)

    assert (chunk.num_samples, drops(chunk), faults(chunk)) == (1, {"no_trained_tokens": [1, 2, 3]}, [])


def overlong(name: str, how: Any, max_length: int) -> Any:
    return run(ChatTokenizeFn(name, max_length=max_length, overlong=how).open(), [{"messages": CHAT}])


def test_a_chat_of_exactly_max_length_is_kept_and_a_longer_one_dropped(name: str) -> None:
    whole = run(ChatTokenizeFn(name).open(), [{"messages": CHAT}])
    length = len(token_ids(whole)[0])

    assert token_ids(overlong(name, "drop", length)) == token_ids(whole)
    assert drops(overlong(name, "drop", length - 1)) == {"max_length": [0]}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["truncate_left", "truncate_right"])
def test_a_chat_that_is_cut_keeps_the_labels_of_the_tokens_that_are_left(name: str, how: str) -> None:
    whole = run(ChatTokenizeFn(name).open(), [{"messages": CHAT}])
    ids = token_ids(whole)[0]
    flags = [any(start <= at < stop for start, stop in values(whole, "spans")[0]) for at in range(len(ids))]

    for length in range(1, len(ids)):
        window = slice(0, length) if how == "truncate_right" else slice(-length, None)
        kept = flags[window]
        kept[0] = False  # nothing stands before it that it could be predicted from
        chunk = overlong(name, how, length)
        if not any(kept):
            assert drops(chunk) == {"no_trained_tokens": [0]}
        else:
            assert token_ids(chunk) == [ids[window]]
            found = [any(start <= at < stop for start, stop in values(chunk, "spans")[0]) for at in range(length)]
            assert found == kept


def test_a_chat_that_is_too_long_can_be_an_error(name: str) -> None:
    chunk = overlong(name, "error", 5)

    assert faults(chunk) == [(0, "AD415")]
    assert "tokens are more than max_length=5; raise it, or set overlong=" in chunk.errors[0].reason
    assert chunk.errors[0].excerpt.startswith('{"messages"')


BAD_ROWS: list[tuple[bytes, str, str]] = [
    (b'{"message": []}', "AD110", "no key 'messages': the row has 'message': set messages_key='message'?"),
    (b'{"messages": 5}', "AD111", "'messages' must be a string or a list of messages, got a number"),
    (b'{"messages": [{"content": "a"}]}', "AD112", "'messages'[0] has no 'role'; it has 'content'"),
    (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "AD107", "unpaired surrogate"),
    (b'{"messages": [{"role": "assistant", "content": [1]}]}', "AD412", "chat template line 2: TypeError"),
    (b'{"messages": [], "tools": 5}', "AD111", "'tools' must be a list of JSON schemas, got a number"),
    (b"[]", "AD113", "got an array"),
]


@pytest.mark.parametrize(("row", "code", "reason"), BAD_ROWS, ids=[row.decode()[:60] for row, _, _ in BAD_ROWS])
def test_a_bad_row_is_named_and_the_others_are_kept(name: str, row: bytes, code: str, reason: str) -> None:
    chunk = run(ChatTokenizeFn(name).open(), [{"messages": CHAT}, row, {"messages": CHAT}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, code)])
    assert reason in chunk.errors[0].reason


# The description


def test_it_is_a_description_that_a_worker_makes_again(name: str) -> None:
    fn = ChatTokenizeFn(name, train_on="loss", chat_template=GENERATION, max_length=100)
    row = json.dumps({"messages": CHAT}).encode()

    assert isinstance(fn, TokenizeFn)
    again = run(open_spec(describe(fn.resolve())), [row])
    assert token_ids(again) == token_ids(run(fn.open(), [row]))
    assert fn.resolve().fingerprints() == fn.fingerprints()


@pytest.mark.parametrize(
    "settings",
    [
        {"messages_key": "chat"},
        {"tool_key": None},
        {"train_on": "last_assistant"},
        {"max_length": 5},
        {"overlong": "error"},
        {"metadata_key": None},
        {"today": "2026-01-31"},
        {"chat_template_kwargs": {"a": 1}},
        {"chat_template": GENERATION},
    ],
)
def test_every_setting_is_in_the_fingerprint(name: str, settings: dict[str, Any]) -> None:
    assert ChatTokenizeFn(name, **settings).fingerprints() != ChatTokenizeFn(name).fingerprints()


def test_where_the_tokenizer_lies_is_not_in_the_fingerprint(small_tokenizer: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(small_tokenizer, tmp_path / "elsewhere")

    assert ChatTokenizeFn(str(elsewhere)).fingerprints() == ChatTokenizeFn(str(small_tokenizer)).fingerprints()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"train_on": "user"}, "train_on='user'"),
        ({"overlong": "cut"}, "overlong='cut'"),
        ({"max_length": 0}, "max_length=0"),
        ({"messages_key": ""}, "messages_key=''"),
        ({"today": "tomorrow"}, "today is a date"),
        ({"chat_template_kwargs": {"messages": []}}, "these names are reserved: messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "these names are reserved: add_generation_prompt"),
        ({"chat_template_kwargs": {"a": {1}}}, "must be JSON values"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("[", r"\[")):
        ChatTokenizeFn(name, **settings)


def test_an_invalid_template_is_refused_before_workers_start(name: str) -> None:
    for template in ("{% if %}", "nothing"):
        with pytest.raises(ConfigError, match="AD411"):
            ChatTokenizeFn(name, chat_template=template).resolve()


def test_a_date_is_asked_for_in_words_that_fit_every_function(name: str) -> None:
    with pytest.raises(ConfigError, match=r"fix it: today='2026-01-31'"):
        ChatTokenizeFn(name, chat_template="{{ strftime_now('%Y') }}").resolve()


@pytest.mark.thorough
def test_a_worker_imports_no_framework_for_it(name: str) -> None:
    code = (
        "import json, sys\n"
        "from asyncdata.tokenization.column_writer import ColumnWriter\n"
        "from asyncdata.tokenization.functions.chat import ChatTokenizeFn\n"
        f"ChatTokenizeFn({name!r}).open()([{json.dumps({'messages': CHAT}).encode()!r}], ColumnWriter())\n"
        "print(*sys.modules)"
    )

    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()

    assert {"numpy", "torch", "transformers", "anyio"} & set(found) == set()


@pytest.mark.thorough
def test_a_loader_gives_samples_with_labels(name: str, jsonl_file: Callable[..., Path]) -> None:
    path = jsonl_file([{"messages": CHAT}, {"messages": [user("a")]}, {"messages": CHAT[:3]}])

    with DataLoader(str(path), tokenize_fn=ChatTokenizeFn(name), shuffle=False, num_workers=1, epochs=1) as loader:
        first, second = loader.get_next_batch(2)
        dropped = loader.statistics().dropped_total

    tokenizer = tokenizer_of(ChatTokenizeFn(name))
    for sample, said in ((first, f"Because.{END}Nothing.{END}"), (second, f"Because.{END}")):
        is_trained = sample.labels != -100
        assert tokenizer.decode(sample.tokens[is_trained].tolist(), skip_special_tokens=False) == said
        assert (sample.labels[is_trained] == sample.tokens[is_trained]).all()
    assert dropped == {"no_trained_tokens": 1}
