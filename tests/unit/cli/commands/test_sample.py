"""``asyncdata sample`` finds the row of a sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import DataLoader, PromptTokenizeFn, RowShuffle, SoftPacking, TextTokenizeFn
from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder
from tests.support.commands import INLINE, NUM_ROWS


def test_a_sample_is_found_by_its_position(data, run_json, tmp_path):
    record = tmp_path / "record.jsonl"
    run_json("run", data, *INLINE, "--epochs", 2, "--record", record, "--apply-chat-template")
    wanted = json.loads(record.read_text().splitlines()[NUM_ROWS + 17])

    found = run_json(
        *("sample", data, "--position", wanted["position"], "--tokenizer", tokenizer_folder(), "--apply-chat-template")
    )

    assert found["position"] == wanted["position"] == "1:0:17"
    assert (found["path"], found["byte_offset"], found["num_bytes"]) == (
        wanted["path"],
        wanted["byte_offset"],
        wanted["num_bytes"],
    )
    assert len(found["tokens"]) == wanted["num_tokens"]
    row = json.loads(found["row"])
    assert found["line"] == row["label"] + 1
    assert found["prompt"] == f"<|user|>\n{row['input']}<|end|>\n<|assistant|>\n"
    assert (found["dropped"], found["error"], found["ordinal"]) == (None, None, None)


def test_a_sample_is_found_by_its_ordinal(data, run_json, tmp_path):
    record = tmp_path / "record.jsonl"
    run_json("run", data, *INLINE, "--epochs", 2, "--record", record)
    wanted = json.loads(record.read_text().splitlines()[NUM_ROWS + 17])

    without = run_json("sample", data, "--ordinal", NUM_ROWS + 17)
    with_tokenizer = run_json("sample", data, "--ordinal", NUM_ROWS + 17, *INLINE)

    assert without["position"] == with_tokenizer["position"] == wanted["position"]
    assert (without["tokens"], without["prompt"]) == (None, None)
    assert len(with_tokenizer["tokens"]) == wanted["num_tokens"]


def test_rows_that_the_run_dropped_do_not_count(data, run_json, tmp_path):
    record, snapshot = tmp_path / "record.jsonl", tmp_path / "s"
    words = (data, *INLINE, "--max-length", 20)
    report = run_json("run", *words, "--record", record)
    run_json("run", *words, "--num-batches", 2, "--snapshot", snapshot)
    wanted = json.loads(record.read_text().splitlines()[80])
    assert report["dropped"]["max_length"] > 50

    assert run_json("sample", *words, "--ordinal", 80)["position"] == wanted["position"]
    assert run_json("sample", *words, "--ordinal", 80, "--snapshot", snapshot)["position"] == wanted["position"]
    refused = run_json("sample", *words, "--ordinal", 10, "--snapshot", snapshot, status=1)
    assert "--ordinal 10 lies before" in refused["error"]["message"]


def test_a_row_that_became_no_sample_says_why(jsonl_file, capsys):
    path = jsonl_file([{"input": "far too long " * 50}, b'{"input": \x1b[31m'])
    words = ["sample", str(path), "--no-shuffle", "--tokenizer", tokenizer_folder(), "--max-length", "9", "--position"]

    assert main([*words, "0:0:0"]) == 0
    assert "dropped   max_length" in capsys.readouterr().out
    assert main([*words, "0:0:1"]) == 0
    out = capsys.readouterr().out
    assert "bad row   AD101" in out or "bad row   AD104" in out
    assert "\x1b" not in out


def test_without_json_a_sample_is_text(data, capsys):
    assert main(["sample", data, "--ordinal", "3", "--no-shuffle", *INLINE]) == 0

    out = capsys.readouterr().out
    assert "position  0:0:3\nordinal   3\n" in out
    assert "line      4\n" in out
    assert 'row       {"input": "question 3 question 3 question 3 question 3 ", "label": 3}\n' in out
    assert "prompt    question 3 question 3" in out
    assert "tokens    " in out


@pytest.mark.parametrize(("position", "reason"), [("0:0:999", "no row 999 in window 0"), ("0:5:0", "no window 5")])
def test_a_position_that_is_not_there_is_named(data, run_json, position, reason):
    assert reason in run_json("sample", data, "--position", position, status=1)["error"]["message"]


PLAN = (
    *("--kind", "text", "--set", "text_key=input"),
    "--loader",
    "plan_packs=true",
    "--loader",
    "batch_size=2",
    "--loader",
    'packing={"SoftPacking": {"max_length": 64}}',
)
ORDERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "full": (("--shuffle", "full"), {"shuffle": "full"}),
    "slime's rows": (
        ("--loader", 'shuffle={"method": "slime", "stop": 150}'),
        {"shuffle": RowShuffle(method="slime", stop=150)},
    ),
    "planned packs": (
        ("--shuffle", "full", *PLAN),
        {"shuffle": "full", "plan_packs": True, "batch_size": 2, "packing": SoftPacking(max_length=64)},
    ),
}


@pytest.mark.parametrize(("options", "knobs"), ORDERS.values(), ids=ORDERS)
def test_sample_and_inspect_show_the_rows_that_a_loader_of_any_order_delivers(data, run_json, capsys, options, knobs):
    tokenize_fn = PromptTokenizeFn(tokenizer_folder())
    if "packing" in knobs:
        tokenize_fn = TextTokenizeFn(tokenizer_folder(), text_key="input")
    with DataLoader(data, tokenize_fn=tokenize_fn, num_workers=0, seed=3, collate_fn=list, **knobs) as loader:
        if "packing" in knobs:
            samples = [piece.sample for pack in next(iter(loader)) for piece in pack]
        else:
            samples = loader.get_next_batch(4)

    words = [data, *INLINE[:2], "--seed", "3", *options]
    shown = [run_json("sample", *words, "--position", sample.position) for sample in samples]
    assert main(["inspect", *words, "--num", str(len(samples)), "--json"]) == 0
    inspected = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [each["tokens"] for each in shown] == [sample.tokens.tolist() for sample in samples]
    assert [each["byte_offset"] for each in shown] == [sample.source.byte_offset for sample in samples]
    assert [each["position"] for each in inspected] == [str(sample.position) for sample in samples]
    assert [each["num_tokens"] for each in inspected] == [len(sample.tokens) for sample in samples]
