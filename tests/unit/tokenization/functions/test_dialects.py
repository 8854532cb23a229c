"""Chats in the forms of other trainers have the tokens and labels of the same chat as messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, DataLoader
from asyncdata.errors import BadRowError, ConfigError, SnapshotMismatchError
from tests.unit.tokenization import run, token_ids
from tests.unit.tokenization.functions.test_chat import WITH_CALLS
from tests.unit.tokenization.trained import mask_of

SYSTEM = {"role": "system", "content": "Be short."}
ASKS = {"role": "user", "content": "What is 1 + 1?"}
SAYS = {"role": "assistant", "content": "2"}
MORE = {"role": "user", "content": "And\n3?"}
LAST = {"role": "assistant", "content": "It is 3."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}],
}
FOUND = {"role": "tool", "content": "blue"}


def read(fn: ChatTokenizeFn, row: dict[str, Any]) -> Any:
    return run(fn.open(), [row])


def fault(fn: ChatTokenizeFn, row: dict[str, Any]) -> tuple[str, str]:
    (error,) = read(fn, row).errors
    return error.code, error.reason


def turn(said: str, value: str, **more: Any) -> dict[str, Any]:
    return {"from": said, "value": value, **more}


SAME: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                turn("human", "What is 1 + 1?"),
                turn("gpt", "2"),
                turn("user", "And\n3?"),
                turn("assistant", "It is 3."),
            ]
        },
        [ASKS, SAYS, MORE, LAST],
    ),
    "sharegpt with a system text": (
        "sharegpt",
        {"system": "Be short.", "conversations": [turn("human", "What is 1 + 1?"), turn("chatgpt", "2")]},
        [SYSTEM, ASKS, SAYS],
    ),
    "sharegpt with a system turn": (
        "sharegpt",
        {
            "system": "",
            "conversations": [turn("system", "Be short."), turn("human", "What is 1 + 1?"), turn("gpt", "2")],
        },
        [SYSTEM, ASKS, SAYS],
    ),
    "sharegpt with calls": (
        "sharegpt",
        {
            "conversations": [
                turn("human", "What is 1 + 1?"),
                turn("function_call", json.dumps({"name": "look", "arguments": {"at": "sky"}})),
                turn("observation", "blue"),
                turn("gpt", "2"),
            ]
        },
        [ASKS, CALL, FOUND, SAYS],
    ),
    "alpaca": ("alpaca", {"instruction": "What is 1 + 1?", "input": "", "output": "2"}, [ASKS, SAYS]),
    "alpaca with input": ("alpaca", {"instruction": "And", "input": "3?", "output": "It is 3."}, [MORE, LAST]),
    "alpaca with all": (
        "alpaca",
        {"instruction": "And\n3?", "output": "It is 3.", "system": "Be short.", "history": [["What is 1 + 1?", "2"]]},
        [SYSTEM, ASKS, SAYS, MORE, LAST],
    ),
    "completion": ("prompt_completion", {"prompt": [ASKS], "completion": [SAYS]}, [ASKS, SAYS]),
}


@pytest.mark.parametrize("dialect, row, messages", SAME.values(), ids=SAME)
def test_a_row_has_the_tokens_and_labels_of_its_messages(name, dialect, row, messages):
    expected = read(ChatTokenizeFn(name, chat_template=WITH_CALLS), {"messages": messages})

    found = read(ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect=dialect), row)

    assert token_ids(found) == token_ids(expected) != []
    assert mask_of(found) == mask_of(expected)
    assert sum(mask_of(found))


def test_of_a_prompt_nothing_is_trained(name):
    row = {"prompt": [ASKS, SAYS, MORE], "completion": [LAST]}
    settings = {"chat_template": WITH_CALLS}

    found = read(ChatTokenizeFn(name, dialect="prompt_completion", **settings), row)

    last = read(ChatTokenizeFn(name, train_on="last_assistant", **settings), {"messages": [ASKS, SAYS, MORE, LAST]})
    assert mask_of(found) == mask_of(last)


def test_a_loss_of_a_turn_counts(name):
    turns = [turn("human", "a"), turn("gpt", "b", loss=False), turn("human", "c"), turn("gpt", "d", loss=True)]
    as_messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "loss": False},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "loss": True},
    ]
    settings = {"chat_template": WITH_CALLS, "train_on": "loss"}

    found = read(ChatTokenizeFn(name, dialect="sharegpt", **settings), {"conversations": turns})

    assert mask_of(found) == mask_of(read(ChatTokenizeFn(name, **settings), {"messages": as_messages}))


BAD = {
    "an unknown role": ("sharegpt", {"conversations": [turn("robot", "a")]}, "AD112", "from 'robot', which is no role"),
    "a message": ("sharegpt", {"conversations": [ASKS]}, "AD112", "it has 'role', 'content'"),
    "no list": ("sharegpt", {"conversations": "a"}, "AD111", "a list of turns"),
    "no text": ("sharegpt", {"conversations": [turn("gpt", None)]}, "AD111", "'value' must be a string"),
    "no call": ("sharegpt", {"conversations": [turn("function_call", "[1]")]}, "AD111", "a call must be JSON"),
    "no JSON": ("sharegpt", {"conversations": [turn("function_call", "look(")]}, "AD101", "invalid JSON"),
    "a number": ("alpaca", {"instruction": 1, "output": "b"}, "AD111", "must be a string"),
    "no pairs": ("alpaca", {"instruction": "a", "output": "b", "history": [["c"]]}, "AD111", "a list of pairs"),
    "plain text": ("prompt_completion", {"prompt": "a", "completion": "b"}, "AD111", "plain text is not rendered"),
    "another form": ("alpaca", {"conversations": []}, "AD110", "dialect='sharegpt'"),
    "messages": ("alpaca", {"messages": []}, "AD110", "leave dialect out"),
}


@pytest.mark.parametrize("dialect, row, code, reason", BAD.values(), ids=BAD)
def test_a_row_that_is_not_of_the_form_is_bad(name, dialect, row, code, reason):
    found, why = fault(ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect=dialect), row)

    assert found == code
    assert reason in why


def test_without_a_dialect_the_error_names_the_one_that_is_seen(name, tmp_path):
    path = tmp_path / "chats.jsonl"
    for row, dialect in (
        ({"conversations": [turn("human", "a"), turn("gpt", "b")]}, "sharegpt"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"prompt": [ASKS], "completion": [SAYS]}, "prompt_completion"),
    ):
        path.write_text(json.dumps({"messages": [ASKS, SAYS]}) + "\n" + json.dumps(row) + "\n")
        fn = ChatTokenizeFn(name, chat_template=WITH_CALLS)
        with DataLoader(path, tokenize_fn=fn, num_workers=0, shuffle=False, timeout_s=60) as loader:
            with pytest.raises(BadRowError, match=f"AD110 .*:2 .*dialect='{dialect}'"):
                loader.get_next_batch(2)

    code, reason = fault(ChatTokenizeFn(name, chat_template=WITH_CALLS), {"messages": [turn("human", "a")]})
    assert (code, "dialect='sharegpt'" in reason) == ("AD112", True)


def test_what_a_dialect_does_not_go_with_is_refused(name):
    with pytest.raises(ConfigError, match="leave messages_key out"):
        ChatTokenizeFn(name, dialect="alpaca", messages_key="chat")
    with pytest.raises(ConfigError, match="leave processor out"):
        ChatTokenizeFn(name, dialect="sharegpt", processor=name)


def test_two_workers_read_it_and_the_setting_is_in_the_fingerprint(name, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"instruction": f"What is {n}?", "output": str(n)}) + "\n" for n in range(200)))
    fn = ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect="alpaca")
    with DataLoader(path, tokenize_fn=fn, num_workers=2, epochs=1, batch_size=10, timeout_s=100) as loader:
        samples = [sample for batch in loader for sample in batch]
        state = loader.state_dict()

    assert len(samples) == 200
    assert all((sample.labels >= 0).any() for sample in samples)
    other = ChatTokenizeFn(name, chat_template=WITH_CALLS)
    with DataLoader(path, tokenize_fn=other, num_workers=0, timeout_s=100) as loader:
        with pytest.raises(SnapshotMismatchError):
            loader.load_state_dict(state)
