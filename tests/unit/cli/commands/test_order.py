"""``asyncdata order`` prints the order of the loader."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from asyncdata import DataLoader, LengthGrouping, PromptTokenizeFn, RowShuffle, SoftPacking, TextTokenizeFn
from asyncdata.cli.main import main
from asyncdata.cli.output import shown_path
from asyncdata.demo import tokenizer_folder
from tests.support.commands import INLINE, NUM_ROWS

SLIME = """shuffle={"method": "slime", "stop": 150}"""
KEPT = """shuffle={"method": "keyed", "only_kept": true}"""


@pytest.mark.parametrize(
    ("words", "knobs"),
    [
        ([], {}),
        (["--no-shuffle"], {"shuffle": False}),
        (["--shuffle"], {"shuffle": True}),
        (["--shuffle", "full"], {"shuffle": "full"}),
        (["--loader", SLIME], {"shuffle": RowShuffle(method="slime", stop=150)}),
        (["--loader", KEPT, *INLINE[:2], "--max-length", "20"], {"shuffle": RowShuffle(only_kept=True)}),
    ],
    ids=["windows", "as they lie", "shuffle", "full", "slime", "only kept"],
)
def test_the_order_is_that_of_the_loader(data, capsys, tmp_path, words, knobs):
    cache = str(tmp_path / "cache")
    assert (
        main(
            [
                "order",
                data,
                "--seed",
                "5",
                "--num",
                "0",
                "--lines",
                *words,
                "--loader",
                f'cache={{"folder": "{cache}"}}',
            ]
        )
        == 0
    )

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["position", "path", "byte_offset", "num_bytes", "line"]
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), max_length=20 if "--max-length" in words else None)
    knobs = {"seed": 5, "num_workers": 0, "cache": {"folder": cache}, **knobs}
    with DataLoader(data, tokenize_fn=tokenize_fn, **knobs) as loader:
        samples = loader.get_next_batch(len(lines), timeout_s=240)
    assert len(lines) > NUM_ROWS // 5
    assert samples[-1].position.epoch == 0
    assert [line.split("\t") for line in lines] == [
        [
            str(sample.position),
            shown_path(data),
            str(sample.source.byte_offset),
            str(sample.source.num_bytes),
            str(sample.source.line_number()),
        ]
        for sample in samples
    ]


def test_the_order_is_json_lines_for_programs(data, capsys):
    assert main(["order", data, "--num", "3", "--json"]) == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["position"] for line in lines] == ["0:0:0", "0:0:1", "0:0:2"]
    assert all(set(line) == {"position", "path", "byte_offset", "num_bytes"} for line in lines)


def test_the_order_of_planned_packs_is_that_of_the_loader(data, capsys):
    words = ["--loader", 'packing={"SoftPacking": {"max_length": 64}}', "--loader", "plan_packs=true"]
    words += ["--loader", "batch_size=2", "--loader", 'length_grouping={"window": 4}', "--shuffle", "full"]
    words += ["--kind", "text", "--set", "text_key=input"]
    assert main(["order", data, *INLINE[:2], *words, "--num", "0", "--json"]) == 0

    printed = [json.loads(line)["position"] for line in capsys.readouterr().out.splitlines()]
    tokenize_fn = TextTokenizeFn(tokenizer_folder(), text_key="input")
    knobs = {"packing": SoftPacking(max_length=64), "plan_packs": True, "batch_size": 2, "shuffle": "full"}
    grouping = LengthGrouping(window=4)
    with DataLoader(data, tokenize_fn=tokenize_fn, collate_fn=list, length_grouping=grouping, **knobs) as loader:
        delivered = [piece.sample for packs in loader for pack in packs for piece in pack]
    assert len(printed) == NUM_ROWS
    assert printed == [str(sample.position) for sample in delivered]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (['packing={"Trunk": {}}'], "packing"),
        (['packing={"SoftPacking": {"size": 4}}'], "SoftPacking cannot be made of the settings"),
        (["plan_packs=true"], "plan_packs=True plans packs: it needs a packing"),
        (["speed=9"], "there is no knob 'speed'"),
        (['shuffle={"method": "keyed", "only_kept": true}'], "say how rows are tokenized"),
    ],
)
def test_an_argument_of_the_loader_that_cannot_work_is_named(data, capsys, words, reason):
    assert main(["order", data, *(each for word in words for each in ("--loader", word))]) == 1

    assert reason in capsys.readouterr().err


def test_a_compressed_file_can_be_run_ordered_and_sampled(data, tmp_path, run_json, capsys):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(Path(data).read_bytes()))

    assert run_json("run", path, *INLINE)["num_samples"] == NUM_ROWS
    assert main(["order", str(path), "--num", "2"]) == 0
    head, first, _ = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["position", "path", "row_number", "num_bytes"]
    assert run_json("sample", path, "--position", "0:0:0")["row_number"] == int(first.split("\t")[2])


def positions(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["order", *words]) == 0
    return [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_the_order_crosses_windows_and_stops_at_the_end_of_the_epoch(data, capsys):
    small = ("--block-bytes", "1024", "--window-blocks", "4")
    everything = positions(capsys, data, *small, "--num", "0", "--epoch", "1")
    windows = [int(position.split(":")[1]) for position in everything]

    assert len(everything) == NUM_ROWS
    assert windows == sorted(windows) and len(set(windows)) > 3
    assert positions(capsys, data, *small, "--num", "90", "--from", "70", "--epoch", "1") == everything[70:160]
    in_second = [position for position in everything if position.startswith("1:1:")]
    assert positions(capsys, data, *small, "--epoch", "1", "--window", "1", "--num", "0") == in_second
    assert (
        positions(capsys, data, *small, "--epoch", "1", "--window", "1", "--from", "3", "--num", "2") == in_second[3:5]
    )


def test_an_order_beyond_the_end_is_refused(data, capsys):
    assert main(["order", data, "--from", "1000"]) == 1

    assert "--from 1000 is beyond the end" in capsys.readouterr().err
