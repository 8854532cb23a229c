"""The catalogue of bad inputs, rows 42 to 58: what a tokenize function may do; and where a bad row lies."""

import gzip
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

import asyncdata as ad
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import BadRowError, ConfigError, EndOfData, NoSamplesError, WorkerError
from tests.integration.bad_inputs.test_rows import FUNCTIONS, LINES
from tests.support import loading, worker_fns
from tests.support.examples import each_value
from tests.support.loaders import GOOD, PACKAGE, assert_is_ours, deliver, prompts
from tests.support.loading import ids, line_of, write, write_rows
from tests.support.parts import SlimeTokenizeFn, change
from tests.support.sources import frames, jsonl
from tests.support.tokenizers import GENERATION

NUM_BEFORE = 3
MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
CHAT = [{"role": "user", "content": "question"}, {"role": "assistant", "content": " answer"}]


class Fault(NamedTuple):
    """A row that is bad.

    :ivar good: what stands in the rows before it.
    :ivar row: as JSON text.
    :ivar needs_workers: whether it takes one down.
    """

    code: str
    good: bytes
    row: bytes
    tokenize_fn: Any
    needs_workers: bool = False


def json_text(value: Any) -> bytes:
    return json.dumps(value).encode()


GOOD_ROW = json_text({"input": "x", "label": 0})
ID = json_text({"id": 0})
MARKED = json_text({"messages": [{"role": "user", "content": MARKS}, CHAT[1]]})
BOTH = json_text({"messages": CHAT, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})
SYSTEM = json_text({"messages": CHAT, "system": "s"})
CHATS = json_text({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[:1]})
OF_ROWS = {
    case.code: Fault(case.code, function.good, case.line, function.fn)
    for function in reversed(FUNCTIONS.values())
    for case in reversed([*LINES, *function.cases])
}
"""The first row of each code."""
OF_CHATS = ad.ChatTokenizeFn(tokenizer_folder(), chat_template=GENERATION)
FAULTS = [
    *OF_ROWS.values(),
    Fault("AD108", GOOD_ROW, json_text({"input": "x" * 5000, "label": 0}), prompts()),
    Fault("AD114", GOOD_ROW, json_text({"input": "<image>", "pictures": []}), "slime"),
    Fault("AD115", json_text({"messages": CHAT}), BOTH, OF_CHATS),
    Fault("AD133", json_text({"messages": CHAT}), SYSTEM, OF_CHATS),
    Fault("AD411", json_text({"prompt": "a", "chosen": " b", "rejected": " c"}), CHATS, "no template"),
    Fault("AD414", json_text({"messages": CHAT}), MARKED, OF_CHATS),
    Fault("AD422", ID, json_text({"id": 13}), loading.hangs_on_13, needs_workers=True),
    Fault("AD423", ID, json_text({"id": 13}), loading.kills_on_13, needs_workers=True),
    Fault("AD425", ID, json_text({"id": 1, "do": "negative"}), worker_fns.as_told),
]
NO_ELEMENTS = {"AD101", "AD104", "AD105", "AD119"}
"""An array that has such a row in it is no array."""
ELSEWHERE = {"AD424": "tests/integration/test_planned_packs.py", "AD457": "tests/integration/test_pictured_chats.py"}


def test_every_code_of_a_bad_row_is_provoked():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(PACKAGE).rglob("*.py"))
    raised = set(re.findall(r'(?:RowFault|RowError|Lost|_fault|__init__)\((?:\w+, )?\s*"(AD\d{3})"', sources))
    assert {fault.code for fault in FAULTS} | set(ELSEWHERE) == raised
    for code, name in ELSEWHERE.items():
        assert code in (Path(PACKAGE).parent / name).read_text(encoding="utf-8")


def function_of(fault: Fault, folder: Path) -> Any:
    if fault.tokenize_fn == "slime":
        return SlimeTokenizeFn(tokenizer_folder(), multimodal_keys={"image": "pictures"})

    if fault.tokenize_fn == "no template":
        shutil.copy(Path(tokenizer_folder(), "tokenizer.json"), folder)
        return ad.PreferenceTokenizeFn(str(folder), eos=False)

    return fault.tokenize_fn


TEXTS: dict[str, tuple[str, Callable[[Sequence[bytes]], bytes], Any]] = {
    "plain": ("rows.jsonl", lambda lines: b"\n".join(lines) + b"\n", ad.JsonlSource),
    "gzip": ("rows.jsonl.gz", lambda lines: gzip.compress(b"\n".join(lines)), ad.JsonlSource),
    "zstd": ("rows.jsonl.zst", lambda lines: frames([b"\n".join(lines)]), ad.JsonlSource),
    "array": ("rows.json", lambda lines: b"[" + b"\n,".join(lines) + b"]", ad.JsonArraySource),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "kind"), each_value({fault.code: fault for fault in FAULTS}, TEXTS.keys()))
def test_a_bad_row_of_a_text_has_line_and_byte(fault, kind, tmp_path):
    if kind == "array" and fault.code in NO_ELEMENTS:
        pytest.skip("an array that has this in it is no array")
    if fault.needs_workers and kind in {"zstd", "array"}:
        pytest.skip("as gzip: what the workers are sent is the same")
    name, write, source_of = TEXTS[kind]
    (tmp_path / name).write_bytes(write([*[fault.good] * NUM_BEFORE, fault.row, fault.good]))
    source = source_of(str(tmp_path / name), max_row_bytes=1000 if fault.code == "AD108" else 1 << 20)

    knobs = {"num_workers": int(fault.needs_workers), "limits": {"row_timeout_s": 0.3}}
    found = deliver(source, function_of(fault, tmp_path), **knobs)

    begin = 1 if kind == "array" else 0
    offset = begin + NUM_BEFORE * (len(fault.good) + 1 + begin)
    line = None if kind == "array" else NUM_BEFORE + 1
    error = found.error
    assert isinstance(error, BadRowError), found
    assert (error.code, error.path, error.line, error.byte_offset) == (fault.code, source.paths, line, offset)
    assert error.row_number == (None if kind == "plain" else NUM_BEFORE)
    shown = f"{source.paths}:{line} (byte {offset})" if line else f"{source.paths} (row {NUM_BEFORE}, byte {offset})"
    assert str(error).startswith(f"{fault.code} {shown}: ")
    assert len(found.samples) == NUM_BEFORE


def in_parquet(folder: Path, rows: list[dict[str, Any]]) -> Any:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = str(folder / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return ad.ParquetSource(path, max_row_bytes=1000), path


def in_dataset(folder: Path, rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = str(folder / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return ad.HuggingFaceSource(path, max_row_bytes=1000), path


def streamed(folder: Path, rows: list[dict[str, Any]]) -> Any:
    dataset = pytest.importorskip("datasets").IterableDataset.from_generator(lambda: iter(rows))
    return ad.HuggingFaceSource(dataset, max_row_bytes=1000), "generator"


@pytest.mark.parametrize("write", [in_parquet, in_dataset, streamed])
def test_a_row_of_a_table_that_is_too_long_has_its_number(write, tmp_path):
    good = {"input": "x", "label": 0}
    source, name = write(tmp_path, [*[good] * NUM_BEFORE, {"input": "y" * 5000, "label": 0}, good])
    found = deliver(source, prompts())
    error = found.error
    assert isinstance(error, BadRowError), found
    assert (error.code, error.line, error.row_number, error.byte_offset) == ("AD108", None, NUM_BEFORE, -1)
    assert str(error).startswith(f"AD108 {error.path} (row {NUM_BEFORE}): ")
    assert error.path.startswith(name)
    assert len(found.samples) == NUM_BEFORE


NUM_ROWS = 30


def good(tmp_path: Path) -> str:
    return write(tmp_path / "good.jsonl", b"\n".join(GOOD))


@pytest.mark.thorough
def test_42_an_epoch_of_which_nothing_is_left_is_no_endless_loop(tmp_path):
    found = deliver(good(tmp_path), prompts(max_length=1), epochs=None, num_workers=1)
    assert isinstance(found.error, NoSamplesError)
    assert str(found.error) == "AD401 epoch 0: 4 rows read, 0 kept: 4 by max_length"


@pytest.mark.thorough
def test_43_44_45_a_batch_is_filled_across_epochs_and_the_last_is_in_the_error_of_the_end_or_dropped(path):
    with ad.DataLoader(path, tokenize_fn=loading.row_id, num_workers=0, shuffle=False, epochs=2) as loader:
        batch = loader.get_next_batch(2 * NUM_ROWS - 3)
        with pytest.raises(EndOfData) as caught:
            loader.get_next_batch(8)
    assert ids(batch) == [*range(NUM_ROWS), *range(NUM_ROWS - 3)]
    assert [sample.position.epoch for sample in batch] == [number // NUM_ROWS for number in range(len(batch))]
    assert str(caught.value) == "AD402 end of data after 2 epochs; 3 of 8 groups were left"
    assert ids(caught.value.samples) == [NUM_ROWS - 3, NUM_ROWS - 2, NUM_ROWS - 1]
    settings = {"batch_size": 8, "epochs": 1, "drop_last": True}
    with ad.DataLoader(path, tokenize_fn=loading.row_id, num_workers=0, shuffle=False, **settings) as loader:
        assert [len(batch) for batch in loader] == [8, 8, 8]
        assert loader.statistics().dropped_total == {"drop_last": 6}


@pytest.mark.thorough
def test_48_49_a_token_or_template_that_the_tokenizer_lacks_is_an_error_at_the_start_where_it_is_asked_for(tmp_path):
    shutil.copy(Path(tokenizer_folder(), "tokenizer.json"), tmp_path)
    bare = str(tmp_path)  # it says nothing of special tokens, and has no chat template
    padded = deliver(good(tmp_path), ad.FixedLengthTokenizeFn.babilong(bare, max_length=9, add_eos=False))
    ended = deliver(good(tmp_path), ad.TextTokenizeFn(bare, text_key="input"))
    neither = deliver(good(tmp_path), ad.TextTokenizeFn(bare, text_key="input", eos=False))
    assert str(padded.error) == "AD410 the tokenizer has neither pad_token nor eos_token; pass pad_id="
    assert str(ended.error).startswith("AD410 eos=True, but the tokenizer has no eos_token; pass eos='the token', or")
    assert (neither.error, len(neither.samples)) == (None, 4)
    chats = deliver(good(tmp_path), ad.PromptTokenizeFn(bare, apply_chat_template=True))
    assert isinstance(chats.error, ConfigError)
    assert str(chats.error).startswith("AD411 the tokenizer has no chat template")
    assert "Pass the text of a chat_template" in str(chats.error)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_50_a_chat_that_the_template_refuses_is_bad_and_the_templates_line_is_named(tmp_path, num_workers):
    template = (
        "{% for message in messages %}\n"
        "{% if message['role'] == 'oracle' %}\n"
        "{{ raise_exception('roles must alternate') }}\n"
        "{% endif %}{{ message['content'] }}{% endfor %}"
    )
    rows = [{"input": [{"role": role, "content": "text"}], "label": role} for role in ("user", "oracle", "system")]
    path = write(tmp_path / "rows.jsonl", jsonl(rows))
    fn = prompts(apply_chat_template=True, chat_template=template)

    raised = deliver(str(path), fn, num_workers=num_workers)
    skipped = deliver(str(path), fn, num_workers=num_workers, bad_rows="skip")

    offset = len(json.dumps(rows[0])) + 1
    assert str(raised.error).startswith(f"AD412 {path}:2 (byte {offset}): chat template line 3: roles must alternate")
    assert skipped.labels == ["user", "system"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda row: [1],
            "Move it to a module and pass it from there (or as 'package.module:name'), or use num_workers=0",
        ),
        ("tests.support.loading:nothing", "tests.support.loading:nothing"),
        ("no_such_module:fn", "no_such_module"),
        ("no path", "no path"),
    ],
)
def test_51_a_function_that_cannot_be_imported_is_refused_before_a_worker_starts(path, function, text):
    found = deliver(str(path), function, num_workers=1)
    assert isinstance(found.error, ConfigError)
    assert_is_ours(found.error, "AD420")
    assert text in str(found.error)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_52_what_the_function_raises_is_a_bad_row_with_the_users_own_frames(path, num_workers):
    raised = deliver(str(path), loading.fails_on_13, num_workers=num_workers)
    skipped = deliver(str(path), loading.fails_on_13, num_workers=num_workers, bad_rows="skip")
    line, offset = line_of(path, 13)
    assert isinstance(raised.error, BadRowError)
    assert str(raised.error).startswith(
        f"AD421 {path}:{line} (byte {offset}): the tokenize function raised KeyError('thirteen')"
    )
    assert "loading.py" in raised.error.traceback
    assert "in fails_on_13" in raised.error.traceback
    assert ids(raised.samples) == list(range(13))
    assert ids(skipped.samples) == [row for row in range(NUM_ROWS) if row != 13]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        (loading.hangs_on_13, "AD422", "no result in 0.3 s; its worker was killed"),
        (loading.kills_on_13, "AD423", "its worker died"),
        (loading.kills_on_13_in_batches, "AD423", "its worker died"),
    ],
)
def test_53_54_a_row_that_hangs_or_kills_its_worker_is_named_at_its_turn_or_skipped_alone(path, function, code, text):
    found = deliver(str(path), function, num_workers=2, limits={"row_timeout_s": 0.3}, bad_rows="skip")
    raised = deliver(str(path), function, num_workers=1, limits={"row_timeout_s": 0.3})

    line, offset = line_of(path, 13)
    assert ids(found.samples) == [row for row in range(NUM_ROWS) if row != 13]
    assert found.statistics.dropped_total == {f"bad row {code}": 1}
    assert str(raised.error).startswith(f"{code} {path}:{line} (byte {offset}): ")
    assert text in str(raised.error)
    assert '"id": 13' in raised.error.excerpt
    assert ids(raised.samples) == list(range(13))


@pytest.mark.thorough
def test_55_a_worker_that_has_grown_too_large_is_replaced_and_no_row_is_lost(path, monkeypatch):
    change(monkeypatch, look_at_workers_s=0)
    most = 96 << 20
    found = deliver(str(path), worker_fns.leaks, num_workers=1, buffer_size=4, limits={"max_bytes_per_worker": most})
    events = found.of("worker.outgrown")
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert found.statistics.worker_restarts_total in (len(events), len(events) - 1)  # the last one may just be going
    assert len(events) > 1
    assert all(event["num_bytes"] > event["max_bytes"] == most for event in events)
    assert len({event["pid"] for event in events}) == len(events)
    assert found.of("worker.lost") == []


@pytest.mark.thorough
def test_55_a_limit_that_no_worker_can_keep_is_said_at_once(path):
    found = deliver(str(path), worker_fns.leaks, num_workers=1, limits={"max_bytes_per_worker": 1 << 20})
    assert found.samples == []
    told = r"AD426 a worker uses \d+ bytes before it has tokenized a row, but Limits\(max_by"
    assert re.match(told, str(found.error))


@pytest.mark.thorough
def test_55_a_worker_that_the_system_kills_for_its_memory_is_replaced_and_no_row_is_lost(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS, {13: {"mark": str(tmp_path / "mark")}})
    found = deliver(str(path), worker_fns.killed_once, num_workers=1)
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert [event["how"] for event in found.of("worker.lost")] == ["SIGKILL"]


@pytest.mark.thorough
def test_56_what_is_no_sample_is_a_bad_row_and_nothing_or_a_reason_a_drop_each_of_which_is_counted(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 5, {1: {"do": "words"}, 2: {"do": "nothing"}, 3: {"do": "a reason"}})
    found = deliver(str(path), worker_fns.as_told, num_workers=1, bad_rows="skip")
    assert ids(found.samples) == [0, 4]
    assert found.statistics.dropped_total == {"bad row AD425": 1, "tokenize_fn": 1, "too dull": 1}


@pytest.mark.thorough
def test_56_a_tensor_is_a_list_of_token_ids(tmp_path):
    torch = pytest.importorskip("torch")
    path = write_rows(tmp_path / "rows.jsonl", 3)
    assert ids(deliver(str(path), lambda row: torch.tensor([row["id"]])).samples) == [0, 1, 2]


@pytest.mark.thorough
def test_57_a_function_that_changes_its_process_harms_no_other_row(path):
    before = os.getcwd(), os.environ.get("MEDDLED"), signal.getsignal(signal.SIGTERM)
    found = deliver(str(path), worker_fns.meddles, num_workers=2)
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert (os.getcwd(), os.environ.get("MEDDLED"), signal.getsignal(signal.SIGTERM)) == before
    assert os.getpid() not in {sample.extra["pid"] for sample in found.samples}


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "text"), [("raises", "tokenizer.json to be seen"), ("dies", "what I wanted to say")])
def test_58_workers_that_cannot_start_say_why_and_are_not_started_for_ever(path, tmp_path, what, text):
    with capture_logs():
        found = deliver(str(path), worker_fns.Opening(what, str(tmp_path), 1000), num_workers=2)
    assert isinstance(found.error, WorkerError)
    assert_is_ours(found.error, "AD426")
    assert text in str(found.error)
    assert len(list(tmp_path.glob("start *"))) <= 20


@pytest.mark.thorough
def test_58_a_module_that_only_the_workers_lack_is_named(path, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "import os\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    raise ImportError('No module named x')\n"
        "def fn(row: dict) -> list[int]:\n"
        "    return [row['id']]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    found = deliver(str(path), "only_here:fn", num_workers=2)
    sys.modules.pop("only_here", None)

    assert_is_ours(found.error, "AD426")
    assert "No module named x" in str(found.error)
