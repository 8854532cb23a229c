"""The command line speaks of its own options, knows what rows are, and says what there is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.cli.main import main
from asyncdata.cli.option_names import as_options
from asyncdata.demo import tokenizer_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENIZER = ("--tokenizer", tokenizer_folder())
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
PROMPT = {"input": "How are you?"}
TEXT = {"text": "Once upon a time."}
PAIR = {"chosen": [*CHAT["messages"]], "rejected": [CHAT["messages"][0], {"role": "assistant", "content": "No"}]}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('pass allow_changed={"seed"}.', "pass --allow-changed seed."),
        ('pass allow_changed={"data", "seed"}.', "pass --allow-changed data --allow-changed seed."),
        (
            "set prompt_key='messages' and apply_chat_template=True?",
            "set --prompt-key messages and --apply-chat-template?",
        ),
        ("after BadRows(max=100) of them", "after --max-bad-rows 100 of them"),
        ("set prompt_key='the key'?", 'set --prompt-key "the key"?'),
        ("BadRows(path='/a/b.jsonl'): no space", "--quarantine-path /a/b.jsonl: no space"),
        ("max_length=None, or BadRows(excerpts=False)", "max_length=None, or BadRows(excerpts=False)"),
        ("another_setting=9 of a Struct(max_length=9)", "another_setting=9 of a Struct(--max-length 9)"),
    ],
)
def test_settings_in_a_message_are_rewritten_as_options(said, told):
    names = {"allow_changed", "prompt_key", "apply_chat_template", "max_bad_rows", "quarantine_path", "max_length"}

    assert as_options(said, names) == told


def test_a_refused_snapshot_names_the_option_that_takes_it(tmp_path, jsonl_file, capsys):
    run = ["run", str(jsonl_file([PROMPT] * 9)), *TOKENIZER, "--num-workers", "0", "--num-batches", "1", "--batch-size"]
    snapshot = ["--snapshot", str(tmp_path / "state")]
    assert main([*run, "1", *snapshot]) == 0
    assert main([*run, "1", *snapshot, "--resume", "--seed", "7"]) == 1

    err = capsys.readouterr().err
    assert "to continue anyway, pass --allow-changed seed." in err
    assert "allow_changed" not in err


def test_without_a_command_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])

    out, err = capsys.readouterr()
    assert out == ""
    assert {"demo", "run", "order", "inspect", "verify"} <= set(err.split())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("row", "options", "kind"),
    [
        (CHAT, [], "chat"),
        (TEXT, [], "text"),
        (PAIR, [], "preference"),
        (PROMPT, [], ""),
        (CHAT, ["--prompt-key", "messages", "--apply-chat-template"], ""),
        (TEXT, ["--prompt-key", "text"], ""),
        (TEXT, ["--kind", "prompt", "--prompt-key", "text"], ""),
    ],
)
def test_run_and_sample_find_the_kind_of_rows_by_their_keys(jsonl_file, capsys, row, options, kind):
    path = str(jsonl_file([row] * 8))
    for words in (["run", "--num-batches", "2", "--batch-size", "4"], ["sample", "--position", "0:0:0"]):
        assert main([words[0], path, *TOKENIZER, "--num-workers", "0", *words[1:], *options, "--json"]) == 0
        out, err = capsys.readouterr()
        assert ("rows are taken to be of the kind" in err) == bool(kind)
        assert kind in err
        report = json.loads(out)
        assert report.get("num_tokens", len(report.get("tokens") or "")) > 0


def test_a_run_asks_for_the_kind_if_none_of_the_first_rows_is_an_object(
    jsonl_file: Callable[..., Path], capsys: Any
) -> None:
    assert main(["run", str(jsonl_file([b"7"] * 30)), *TOKENIZER, "--num-workers", "0"]) == 1

    assert "none of the first 20 rows is a JSON object; say what rows are by --kind" in capsys.readouterr().err
