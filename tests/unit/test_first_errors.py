"""What goes wrong first for someone new is an error that says what to do; and what no message may show."""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

import asyncdata as ad
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import BadRowError, ConfigError, InvalidGroupError, SnapshotError, SourceError
from asyncdata.xtuner import XTunerCollator
from tests.integration.bad_inputs.test_places import ELSEWHERE, FAULTS
from tests.support.loaders import deliver, prompts, with_bad
from tests.support.parts import _REASONS, get_logger, redacted, safe_cause, without_text

PACKING, NO_PACKING = ad.SoftPacking(max_length=8), r"packing is SoftPacking\(max_length=...\) or another packing"
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


@pytest.fixture
def open_loader(tmp_path: Path) -> Callable[..., ad.DataLoader]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "a row"}\n' * 20)
    defaults: dict[str, Any] = {"tokenize_fn": lambda row: [1, 2], "num_workers": 0, "timeout_s": 240}
    return lambda source=rows, **knobs: ad.DataLoader(source, **defaults | knobs)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"batchsize": 2}, r"there is no setting 'batchsize'; did you mean 'batch_size'\? There are bad_rows, "),
        ({"num_epochs": 2}, "no setting 'num_epochs'; did you mean 'epochs'"),
        ({"packing": {"max_length": 8}}, rf"{NO_PACKING}; got {{"),
        ({"packing": ad.SoftPacking}, f"{NO_PACKING}; got <class"),
        ({"packing": ad.PackedCollator()}, f"{NO_PACKING}; got Packed"),
        ({"packing": 5}, f"{NO_PACKING}; got 5"),
        ({"length_grouping": True}, r"length_grouping is LengthGrouping\(\.\.\.\); got True"),
        ({"length_grouping": ad.LengthGrouping}, r"length_grouping is LengthGrouping\(\.\.\.\); got <class"),
        ({"collate_fn": "pad"}, "collate_fn is a function of a list of samples or packs; got 'pad'"),
        ({"tokenize_fn": 5}, "tokenize_fn is a function of a row, a description .* got int"),
        ({"tokenize_fn": [len]}, "tokenize_fn is a function of a row, a description .* got list"),
        ({"commit": "ack"}, "commit='ack': it must be 'on_delivery' or 'on_ack'"),
        ({"outcomes": {}, "ranks": ad.Ranks(world_size=2)}, r"^AD480 outcomes cannot be remembered with Ranks\("),
        ({"outcomes": ad.Outcomes(), "packing": PACKING}, "^AD480 outcomes cannot be remembered with packs"),
        ({"collate_fn": ad.PackedCollator()}, "^AD405 PackedCollator .*packing=SoftPacking"),
        ({"collate_fn": XTunerCollator(max_length=8)}, "^AD405 XTunerCollator .*packing=SoftPacking"),
        ({"collate_fn": ad.PackedCollator(), "length_grouping": ad.LengthGrouping()}, "^AD405 Packed.*packing=Soft"),
        ({"collate_fn": ad.PaddedCollator(pad_id=0), "packing": PACKING}, "^AD405 Padded.*take PackedCollator"),
        ({"collate_fn": ad.FixedCollator(length=8, pad_id=0), "packing": PACKING}, "^AD405 Fixed.*take PackedCollator"),
        ({"collate_fn": ad.PreferenceCollator(pad_id=0), "packing": PACKING}, "^AD405 Preference.*take PackedCollator"),
        ({"seed": None}, "seed=None: Expected `int`, got None$"),
        ({"batch_size": "8"}, r"batch_size='8': Expected `int \| None`, got `str`$"),
        ({"telemetry": True}, r"`telemetry` is a folder, Telemetry\(\.\.\.\), or a dict"),
        ({"bad_rows": True}, r"`bad_rows` is 'skip' or another policy, BadRows\(\.\.\.\), or a dict"),
        ({"source": []}, "the list of a source's paths is empty"),
        ({"source": ad.JsonlSource([])}, "the list of a source's paths is empty"),
        ({"source": ad.JsonlSource(5)}, "a path or a list of paths; got 5"),  # type: ignore[arg-type]
        ({"source": ad.ParquetSource(None)}, "a path or a list of paths; got None"),  # type: ignore[arg-type]
        ({"source": ad.JsonlSource}, r"the source is the class JsonlSource; pass an instance"),
        ({"source": Path("s3://bucket/a.jsonl")}, "AD320 's3:/bucket/a.jsonl' lacks a slash"),
        ({"source": {"rows.jsonl": 0.5}}, r"mix data sets by Mix\("),
    ],
)
def test_a_wrong_argument_is_refused_with_the_right_one(open_loader, knobs, said):
    with pytest.raises(ConfigError, match=said):
        open_loader(**{"batch_size": 2, **knobs})


@pytest.mark.parametrize("parts", [["a"], [ad.Part("a")], "a", ad.JsonlSource("a"), None])
def test_a_mix_of_parts_without_names_is_refused(parts):
    with pytest.raises(ConfigError, match=r"^AD470 a Mix takes its parts by name, as in Mix\(\{'math'"):
        ad.Mix(parts)


def test_what_is_no_list_of_groups_or_samples_is_refused(open_loader):
    with open_loader(outcomes=ad.Outcomes()) as loader:
        sample, *_ = loader.get_next_batch(2)
        with pytest.raises(InvalidGroupError, match=r"^AD432 group 0 .*got Sample; a group of one .* is \[sample\]"):
            loader.add_samples([sample])
        with pytest.raises(SnapshotError, match=r"^AD602 .*it is a str, .*; restore\(path\) loads a file"):
            loader.load_state_dict("run.snapshot")
        of_one = r"Sample; of one sample it is report\(\[sample\]\)"
        wrongs = {of_one: sample, "NoneType": None, "str": "text", "dict": {0: sample}}
        for what, wrong in {**wrongs, "one with int": [0, 1], "one with list": [[0.5]]}.items():
            with pytest.raises(InvalidGroupError, match=f"^AD409 report.* takes a list of groups .*got {what}"):
                loader.report(wrong, [1.0])
        with pytest.raises(InvalidGroupError, match=r"^AD482 report\(\) was given 1.0 as scores; it takes one"):
            loader.report([sample], 1.0)

        assert loader.report([sample], [1.0]) == 1
    with open_loader(commit="on_ack") as loader:
        sample, *_ = loader.get_next_batch(2)
        with pytest.raises(InvalidGroupError, match=r"^AD409 ack\(\) .*got Sample"):
            loader.ack(sample)
        loader.ack([sample])


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
        ad.PromptTokenizeFn(tokenizer)


@pytest.mark.parametrize(
    ("prompt_key", "message"),
    [
        ("input", r"no key 'input': .*set prompt_key='messages' and apply_chat_template=True\?"),
        ("messages", r"got an array; set apply_chat_template=True to render messages\."),
    ],
)
def test_chats_read_as_prompts_point_to_both_ways_of_reading_chats(jsonl_file, open_loader, prompt_key, message):
    fn = ad.PromptTokenizeFn(tokenizer_folder(), prompt_key=prompt_key)
    message += r" To train on chats, ChatTokenizeFn reads them \(--kind chat\)"
    with open_loader(jsonl_file([CHAT], "chats.jsonl"), tokenize_fn=fn) as loader:
        with pytest.raises(BadRowError, match=message):
            loader.get_next_batch(1)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_packs_of_prompts_are_refused_as_all_their_tokens_would_be_trained(open_loader, tmp_path, is_mixed):
    path, prompts = str(tmp_path / "rows.jsonl"), ad.PromptTokenizeFn(tokenizer_folder())
    text = ad.TextTokenizeFn(tokenizer_folder(), text_key="input")
    mix = ad.Mix({"a": ad.Part(path, tokenize_fn=text), "b": ad.Part(path, tokenize_fn=prompts)})
    source: Any = mix if is_mixed else path
    knobs: dict[str, Any] = {"batch_size": 1, "tokenize_fn": None if is_mixed else prompts}
    with pytest.raises(ConfigError, match=r"AD416 .*PromptTokenizeFn makes prompts .*ChatTokenizeFn for chats"):
        open_loader(source, packing=ad.SoftPacking(max_length=64), collate_fn=ad.PackedCollator(), **knobs)
    open_loader(source, **knobs).close()


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [ad.RowShuffle(method="slime", only_kept=True), ad.RowShuffle(only_kept=True)])
def test_rows_of_which_none_has_a_number_are_counted_by_what_dropped_them(jsonl_file, open_loader, shuffle):
    rows: list[dict[str, str] | bytes] = [{"input": "far too long a prompt " * 9}] * 3 + [b"{"] * 2
    fn = ad.PromptTokenizeFn(tokenizer_folder(), max_length=4)
    with (
        open_loader(jsonl_file(rows, "bad.jsonl"), tokenize_fn=fn, shuffle=shuffle, bad_rows="skip") as loader,
        pytest.raises(
            ad.errors.NoSamplesError, match=r"AD401 5 rows read, 0 kept: 2 by bad row AD101, 3 by max_length"
        ),
    ):
        loader.get_next_batch(1)


def test_bad_rows_beyond_the_first_of_a_code_are_logged_ever_more_rarely(jsonl_file, open_loader):
    path = jsonl_file([*[b'{"cut'] * 100, b'{"a": "\x01"}', {"input": "good"}], "bad.jsonl")
    bad_rows = {"policy": "skip", "max": None}
    with capture_logs() as events, open_loader(path, shuffle=False, epochs=1, bad_rows=bad_rows) as loader:
        loader.get_next_batch(1)
    of_code = [event for event in events if event.get("code") == "AD101"]
    assert [event["line"] for event in of_code if event["event"] == "row.bad"] == list(range(1, 11))
    assert [event["num_rows"] for event in of_code if event["event"] == "row.bad_again"] == [20, 40, 80]
    assert [event["line"] for event in events if event.get("code") == "AD104"] == [101]


@pytest.mark.parametrize(("knobs", "is_said"), [({}, True), ({"plan_packs": True, "shuffle": "full"}, False)])
def test_ranks_that_each_tokenize_everything_are_warned_with_the_ways_out(open_loader, tmp_path, knobs, is_said):
    cache = {"folder": str(tmp_path / "kept")}
    packing, ranks = ad.SoftPacking(max_length=64, across_epochs=False), ad.Ranks(world_size=2)
    fn = ad.TextTokenizeFn(tokenizer_folder(), text_key="input")
    with capture_logs() as events:
        open_loader(tokenize_fn=fn, packing=packing, batch_size=1, ranks=ranks, cache=cache, **knobs).close()
    found = [event for event in events if event["event"] == "loader.every_rank_tokenizes"]
    assert [event["log_level"] for event in found] == ["warning"] * is_said
    assert all("exchange=" in event["remedy"] and "fast tokenizer" in event["remedy"] for event in found)


def test_another_system_than_linux_and_a_name_of_the_hub_for_a_file_are_named(open_loader, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(ConfigError, match="workers need Linux, and this is darwin: .* num_workers=0"):
            open_loader(num_workers=1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"AD304 .*openai/gsm8k.*HuggingFaceSource\('openai/gsm8k', split='train'\)"):
        open_loader("openai/gsm8k")
    with pytest.raises(SourceError, match=r"AD304 .*rows\.jsonl: No such file or directory$"):
        open_loader("data/some/rows.jsonl")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [
        ("torch", "torch.AsyncDataset", r"AsyncDataset needs torch \(.*\): pip install torch"),
        ("torch", "to_torch([])", r"a batch as tensors needs torch \(.*\): pip install torch"),
        ("pyarrow", "DataLoader('a.parquet', tokenize_fn='os:stat')", "Parquet needs pyarrow .*: pip install pyarrow"),
        ("nothing", "DataLoader('rows.jsonl')", "a loader needs tokenize_fn=.*"),
    ],
)
def test_a_package_or_a_function_that_is_missing_is_named_and_nothing_else_is_said(tmp_path, missing, code, message):
    (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 4)
    code = f"""
        import importlib.util, sys

        sys.modules[{missing!r}] = None  # what Python has of a package that cannot be imported
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find_spec(name, *rest)
        from asyncdata import DataLoader
        from asyncdata.errors import ConfigError
        from asyncdata.batching.torch_tensors import to_torch
        from asyncdata.integrations import torch
        try:
            {code}
        except ConfigError as error:
            print("ConfigError:", error)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    said = done.stdout + done.stderr
    assert "Traceback" not in said and "Exception ignored" not in said, said
    assert re.search(f"ConfigError: {message}$", said, re.MULTILINE), said


SECRET = "0123456789abcdefSECRET"
SHOWING = [
    f"GET https://s3.example/b/a.jsonl?X-Amz-Date=1&X-Amz-Signature={SECRET}&x=1 gave 403",
    f"https://s3.example/a?X-Amz-Credential={SECRET}%2Fus-east-1&X-Amz-Security-Token={SECRET}",
    f"https://storage.example/a?X-Goog-Signature={SECRET}&GoogleAccessId=x",
    f"https://blob.example/a?sv=2024&sig={SECRET}&se=1", f"https://host/a?token={SECRET}",
    f"https://host/a?access_token={SECRET}#x", f"AWSAccessKeyId={SECRET}&Signature={SECRET}",
    f"{{'Authorization': 'Bearer {SECRET}'}}", f'{{"authorization": "Basic {SECRET}"}}', f"Authorization: {SECRET}",
    f"authorization: AWS4-HMAC-SHA256 Credential={SECRET}/us, SignedHeaders=host, Signature={SECRET}",
    f"curl -H 'bearer {SECRET}'", f"https://me:{SECRET}@host/path", f"https://{SECRET}@host/path",
    f"api_key={SECRET} api-key={SECRET} password={SECRET}", f"the token is hf_{SECRET}0123456789",
]  # fmt: skip


@pytest.mark.parametrize("text", SHOWING)
def test_what_gives_access_is_not_shown(text):
    assert SECRET not in redacted(text)
    assert "[redacted]" in redacted(text)
    assert redacted(SHOWING[0]) == SHOWING[0].replace(SECRET, "[redacted]"), "the rest of an address is"


@pytest.mark.thorough
@given(st.text())
def test_it_is_found_once_and_for_all(text):
    assert redacted(redacted(text)) == redacted(text)


def test_no_error_no_event_and_no_cause_shows_it():
    url = SHOWING[0]
    errors: list[Any] = [kind(url) for kind in (SourceError, ad.errors.AsyncDataError, ad.errors.PrefetchTimeoutError)]
    errors.append(BadRowError("AD421", url, path="a", line=1, excerpt=url, traceback=url))

    assert not [error for error in errors if SECRET in repr(error) + str(error) + repr(vars(error))]

    with capture_logs() as events:
        get_logger("x").info("a", path=SHOWING[0], paths=[SHOWING[4]], deep={"a": [SHOWING[5]]}, number=1)
        get_logger("x").warning("b", reason=SHOWING[7])

    assert SECRET not in repr(events)
    assert events[0]["number"] == 1

    plain, outer, secret = KeyError("x"), RuntimeError("y"), ValueError(url)
    outer.__cause__ = secret
    assert [safe_cause(error) for error in (plain, outer, secret)] == [plain, None, None]


PRIVATE = "PRIVATE"
ROWS = [
    b'{"input": "PRIVATE", "label"', b'{"PRIVATE": 1, "label": 1}', b'{"input": ["PRIVATE"], "label": 1}', b'"PRIVATE"',
    b'{"input": "PRIVATE \\ud800", "label": 1}', b'{"input": "PRIVATE"}{"PRIVATE": 1}', b'{"input": "PRIVATE\xff"}',
    b'{"input": "PRIVATE", "label": ' + b"9" * 5000 + b"}",
]  # fmt: skip


def repeats_the_row(row: dict[str, Any]) -> list[int]:
    if "PRIVATE" in str(row):
        raise ValueError(f"no:\n  {row}\n{row}")

    return [1]


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("policy", ["raise", "skip", "quarantine"])
def test_nothing_that_a_row_says_is_shown_where_that_is_not_wanted(tmp_path, row, policy):
    path, file = tmp_path / "rows.jsonl", tmp_path / "quarantine.jsonl"
    path.write_bytes(with_bad(row))
    bad_rows = {"policy": policy, "path": str(file)}

    shown = deliver(str(path), prompts(), bad_rows=bad_rows)
    said = [str(shown.error), repr(shown.events), file.read_text() if file.exists() else ""]
    file.unlink(missing_ok=True)
    hidden = deliver(str(path), prompts(), bad_rows={**bad_rows, "excerpts": False})
    told = [str(hidden.error), repr(hidden.events), file.read_text() if file.exists() else ""]

    assert (PRIVATE in "".join(said)) >= (policy == "raise")
    assert PRIVATE not in "".join(told) + repr(vars(hidden.error) if hidden.error else "")
    assert shown.labels == hidden.labels
    assert hidden.statistics.dropped_total == shown.statistics.dropped_total
    if policy == "raise":
        assert str(hidden.error).startswith(str(shown.error).split(": ")[0])
        assert "(BadRows(excerpts=False) shows no more)" in str(hidden.error)
    if policy == "quarantine":
        record = json.loads(told[2])
        assert (record["line"], record["excerpt"]) == (3, "")


@pytest.mark.parametrize("order", [True, "full", ad.RowShuffle(only_kept=True)], ids=str)
def test_of_an_error_of_the_users_function_places_and_type_are_left(tmp_path, order):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "PRIVATE"}\n')
    error: Any = deliver(str(path), repeats_the_row, bad_rows=ad.BadRows(excerpts=False), shuffle=order).error
    assert isinstance(error, BadRowError)
    assert "the tokenize function raised ValueError (BadRows(excerpts=False)" in error.reason
    assert re.search(r"test_first_errors\.py.* in repeats_the_row", error.traceback)
    assert PRIVATE not in repr(vars(error)) + str(error)


@pytest.mark.thorough
@given(st.text(), st.booleans())
def test_of_a_message_no_more_than_a_type_is_shown(text, is_trace):
    frames = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f'
    trace = f"{frames}\n    code\nKeyError: {text}" if is_trace else text
    error = without_text(BadRowError("AD421", text, path="/a", line=1, byte_offset=0, excerpt=text, traceback=trace))
    said = f"the tokenize function raised{' KeyError' * is_trace} (BadRows(excerpts=False) shows no more)"
    assert (error.excerpt, error.traceback, error.reason) == ("", frames if is_trace else "", said)


def test_every_code_of_a_bad_row_has_its_words():
    assert set(_REASONS) == {fault.code for fault in FAULTS} | set(ELSEWHERE)
