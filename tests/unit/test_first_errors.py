"""What goes wrong first for someone new, and what the message tells him to do."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import (
    BadRowError,
    ConfigError,
    DataLoader,
    Mix,
    NoSamplesError,
    PackedCollator,
    Part,
    PromptTokenizeFn,
    Ranks,
    RowShuffle,
    SoftPacking,
    SourceError,
    TextTokenizeFn,
)
from asyncdata.delivery.quarantine import Quarantine
from asyncdata.demo import tokenizer_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, with warnings of any kind on stderr."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.thorough
def test_a_forgotten_tokenize_fn_is_the_only_thing_said(tmp_path):
    done = python("from asyncdata import DataLoader\nDataLoader('rows.jsonl')\n", tmp_path)

    assert "ConfigError: a loader needs tokenize_fn=" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("knob", "meant"),
    [("batchsize", "batch_size"), ("num_epochs", "epochs"), ("prefetch_factor", "buffer_size"), ("sead", "seed")],
)
def test_an_unknown_knob_is_answered_with_the_one_that_is_meant(jsonl_file, knob, meant):
    with pytest.raises(ConfigError, match=rf"there is no knob '{knob}'; did you mean '{meant}'\? There are bad_rows, "):
        DataLoader(str(jsonl_file([{"input": "a"}])), tokenize_fn=len, num_workers=0, **{knob: 2})


def test_an_unknown_knob_like_no_other_is_answered_with_all_of_them(jsonl_file):
    with pytest.raises(ConfigError, match=r"there is no knob 'zzz'; there are bad_rows, batch_size, "):
        DataLoader(str(jsonl_file([{"input": "a"}])), tokenize_fn=len, num_workers=0, zzz=2)


@pytest.mark.parametrize(
    ("tokenizer", "way_out"),
    [
        (SimpleNamespace(name_or_path="org/model"), "pass tokenizer.name_or_path, which is 'org/model'"),
        (SimpleNamespace(name_or_path="", save_pretrained=print), r"write it by tokenizer.save_pretrained\(folder\)"),
        (SimpleNamespace(save=print), r"write it by tokenizer.save\('folder/tokenizer.json'\)"),
    ],
)
def test_a_tokenizer_object_in_place_of_its_folder_is_refused_with_what_to_pass(tokenizer, way_out):
    with pytest.raises(ConfigError, match=rf"PromptTokenizeFn: tokenizer must be a folder .*{way_out}"):
        PromptTokenizeFn(tokenizer)


def test_a_name_of_the_hub_in_place_of_a_file_points_to_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match=r"AD304 .*openai/gsm8k.*HuggingFaceSource\('openai/gsm8k', split='train'\)"):
        DataLoader("openai/gsm8k", tokenize_fn=len, num_workers=0)
    with pytest.raises(SourceError, match=r"AD304 .*rows\.jsonl: No such file or directory$"):
        DataLoader("data/some/rows.jsonl", tokenize_fn=len, num_workers=0)


@pytest.mark.parametrize(
    ("prompt_key", "message"),
    [
        ("input", r"no key 'input': .*set prompt_key='messages' and apply_chat_template=True\?"),
        ("messages", r"got an array; set apply_chat_template=True to render messages\."),
    ],
)
def test_chats_that_are_read_as_prompts_point_to_both_ways_of_reading_chats(jsonl_file, prompt_key, message):
    fn = PromptTokenizeFn(tokenizer_folder(), prompt_key=prompt_key)
    with (
        DataLoader(str(jsonl_file([CHAT])), tokenize_fn=fn, num_workers=0) as loader,
        pytest.raises(BadRowError, match=rf"{message} To train on chats, ChatTokenizeFn reads them \(--kind chat\)"),
    ):
        loader.get_next_batch(1)


def test_a_dict_of_weights_points_to_what_mixes_data_sets(jsonl_file):
    with pytest.raises(ConfigError, match=r"mix data sets by Mix\("):
        DataLoader({str(jsonl_file([{"input": "a"}])): 0.5}, tokenize_fn=len, num_workers=0)


def test_another_system_than_linux_is_named_at_once(jsonl_file, monkeypatch):
    path = str(jsonl_file([{"input": "a"}]))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(ConfigError, match="asyncdata needs Linux, and this is darwin: .*WSL 2"):
            DataLoader(path, tokenize_fn=len, num_workers=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [
        (
            "xxhash",
            "DataLoader('rows.jsonl', tokenize_fn='os:stat', cache={'tokens': True})",
            r"Cache\(tokens=\.\.\.\) needs xxhash: ",
        ),
        ("xxhash", "main(['cache', 'ls'])", r"the token cache needs xxhash \(.*\): "),
        ("torch", "torch.AsyncDataset", r"AsyncDataset needs torch \(.*\): "),
        ("torch", "to_torch([])", r"a batch as tensors needs torch \(.*\): "),
        ("pyarrow", "DataLoader('rows.parquet', tokenize_fn='os:stat')", r"Parquet needs pyarrow \(.*\): "),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_needs_it(tmp_path, missing, code, message):
    (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" * 4)
    done = python(
        f"""
        import importlib.util, sys

        sys.modules[{missing!r}] = None  # what Python has of a package that cannot be imported
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find_spec(name, *rest)
        from asyncdata import ConfigError, DataLoader
        from asyncdata.cli.main import main
        from asyncdata.batching.collators.torch_tensors import to_torch
        from asyncdata.integrations import torch
        try:
            {code}
        except ConfigError as error:
            print("ConfigError:", error)
        """,
        tmp_path,
    )

    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert re.search(f"ConfigError: {message}pip install {missing}$", said, re.MULTILINE), said


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [RowShuffle(method="slime", only_kept=True), RowShuffle(only_kept=True)])
def test_rows_of_which_none_has_a_number_are_counted_by_what_dropped_them(jsonl_file, shuffle):
    rows: list[dict[str, str] | bytes] = [{"input": "far too long a prompt " * 9}] * 3 + [b"{"] * 2
    fn = PromptTokenizeFn(tokenizer_folder(), max_length=4)
    with (
        DataLoader(
            str(jsonl_file(rows)), tokenize_fn=fn, num_workers=0, shuffle=shuffle, bad_rows="skip", timeout_s=240
        ) as loader,
        pytest.raises(NoSamplesError, match=r"AD401 5 rows read, 0 kept: 2 by bad row AD101, 3 by max_length"),
    ):
        loader.get_next_batch(1)


def test_bad_rows_beyond_the_first_of_a_code_are_logged_ever_more_rarely():
    quarantine = Quarantine(None)
    with capture_logs() as events:
        for number in range(1, 101):
            quarantine.add(BadRowError("AD101", "cut off", path="/rows", line=number, byte_offset=number))
        quarantine.add(BadRowError("AD104", "a raw control byte", path="/rows", line=101, byte_offset=101))

    of_code = [event for event in events if event["code"] == "AD101"]
    assert [event["line"] for event in of_code if event["event"] == "row.bad"] == list(range(1, 11))
    assert [event["num_rows"] for event in of_code if event["event"] == "row.bad_again"] == [20, 40, 80]
    assert [event["line"] for event in events if event["code"] == "AD104"] == [101]


@pytest.mark.parametrize(
    ("knobs", "is_said"), [({}, True), ({"cache": {"tokens": True}}, False), ({"plan_packs": True}, False)]
)
def test_ranks_that_each_tokenize_everything_are_warned_with_the_ways_out(
    jsonl_file: Callable[..., Path], tmp_path: Path, knobs: dict[str, Any], is_said: bool
) -> None:
    path, fn = (
        str(jsonl_file([{"input": f"row {n}"} for n in range(64)])),
        TextTokenizeFn(tokenizer_folder(), text_key="input"),
    )
    cache = {"folder": str(tmp_path), **knobs.get("cache", {})}
    settings = {"shuffle": "full" if "plan_packs" in knobs else True, **knobs, "cache": cache}
    with capture_logs() as events:
        DataLoader(
            path,
            tokenize_fn=fn,
            num_workers=0,
            packing=SoftPacking(max_length=64, across_epochs=False),
            batch_size=1,
            ranks=Ranks(world_size=2),
            **settings,
        ).close()

    found = [event for event in events if event["event"] == "loader.every_rank_tokenizes"]
    assert [event["log_level"] for event in found] == ["warning"] * is_said
    assert all("plan_packs=True" in event["remedy"] and "Cache(tokens=...)" in event["remedy"] for event in found)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_packs_of_prompts_are_refused_as_all_their_tokens_would_be_trained(
    jsonl_file: Callable[..., Path], is_mixed: bool
) -> None:
    path, prompts = str(jsonl_file([{"input": "a row"}])), PromptTokenizeFn(tokenizer_folder())
    text = TextTokenizeFn(tokenizer_folder(), text_key="input")
    source: Any = Mix({"a": Part(path, tokenize_fn=text), "b": Part(path, tokenize_fn=prompts)}) if is_mixed else path
    knobs: dict[str, Any] = {"num_workers": 0, "batch_size": 1, "tokenize_fn": None if is_mixed else prompts}

    with pytest.raises(ConfigError, match=r"AD416 .*PromptTokenizeFn makes prompts .*ChatTokenizeFn for chats"):
        DataLoader(source, packing=SoftPacking(max_length=64), collate_fn=PackedCollator(), **knobs)
    DataLoader(source, **knobs).close()
