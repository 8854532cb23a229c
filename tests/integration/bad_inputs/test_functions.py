"""The catalogue of bad inputs, rows 42 to 58: epochs, tokenizers, and what a tokenize function may do."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader, FixedLengthTokenizeFn, Limits, PromptTokenizeFn, TextTokenizeFn
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import BadRowError, ConfigError, EndOfData, NoSamplesError, WorkerError
from tests.support import tokenize_fns, worker_fns
from tests.support.bad_inputs import GOOD, assert_is_ours, deliver, prompts
from tests.support.inner import change
from tests.support.loading import ids, line_of, write_rows

pytestmark = pytest.mark.thorough

NUM_ROWS = 30


def good(tmp_path: Path) -> str:
    path = tmp_path / "good.jsonl"
    path.write_bytes(b"\n".join(GOOD))
    return str(path)


def bare_tokenizer(tmp_path: Path) -> str:
    """A tokenizer that says nothing of special tokens, and has no chat template."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(Path(tokenizer_folder(), "tokenizer.json"), folder)
    return str(folder)


def test_42_an_epoch_of_which_nothing_is_left_is_no_endless_loop(tmp_path):
    found = deliver(good(tmp_path), prompts(max_length=1), epochs=None, num_workers=1)
    assert isinstance(found.error, NoSamplesError)
    assert str(found.error) == "AD401 epoch 0: 4 rows read, 0 kept: 4 by max_length"


def test_43_44_a_batch_larger_than_the_data_is_filled_across_epochs_to_exactly_its_number(path):
    with DataLoader(path, tokenize_fn=tokenize_fns.row_id, num_workers=0, shuffle=False) as loader:
        batch = loader.get_next_batch(5 * NUM_ROWS + 3)
    assert ids(batch) == [*list(range(NUM_ROWS)) * 5, *range(3)]
    assert [sample.position.epoch for sample in batch] == [number // NUM_ROWS for number in range(len(batch))]


def test_45_the_last_batch_is_in_the_error_of_the_end_or_dropped_as_asked(path):
    with DataLoader(path, tokenize_fn=tokenize_fns.row_id, num_workers=0, shuffle=False, epochs=2) as loader:
        loader.get_next_batch(2 * NUM_ROWS - 3)
        with pytest.raises(EndOfData) as caught:
            loader.get_next_batch(8)
    assert str(caught.value) == "AD402 end of data after 2 epochs; 3 of 8 groups were left"
    assert ids(caught.value.samples) == [NUM_ROWS - 3, NUM_ROWS - 2, NUM_ROWS - 1]
    settings = {"batch_size": 8, "epochs": 1, "drop_last": True}
    with DataLoader(path, tokenize_fn=tokenize_fns.row_id, num_workers=0, shuffle=False, **settings) as loader:
        assert [len(batch) for batch in loader] == [8, 8, 8]
        assert loader.statistics().dropped_total == {"drop_last": 6}


def test_48_a_token_that_the_tokenizer_lacks_is_an_error_at_the_start_where_it_is_asked_for(tmp_path):
    bare = bare_tokenizer(tmp_path)
    padded = deliver(good(tmp_path), FixedLengthTokenizeFn.babilong(bare, max_length=9, add_eos=False))
    ended = deliver(good(tmp_path), TextTokenizeFn(bare, text_key="input"))
    neither = deliver(good(tmp_path), TextTokenizeFn(bare, text_key="input", eos=False))
    assert str(padded.error) == "AD410 the tokenizer has neither pad_token nor eos_token; pass pad_id="
    assert str(ended.error).startswith("AD410 eos=True, but the tokenizer has no eos_token; pass eos='the token', or")
    assert (neither.error, len(neither.samples)) == (None, 4)


def test_49_a_tokenizer_without_a_chat_template_is_an_error_at_the_start(tmp_path):
    found = deliver(good(tmp_path), PromptTokenizeFn(bare_tokenizer(tmp_path), apply_chat_template=True))
    assert isinstance(found.error, ConfigError)
    assert str(found.error).startswith("AD411 the tokenizer has no chat template")
    assert "Pass the text of a chat_template" in str(found.error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_50_a_chat_that_the_template_refuses_is_bad_and_the_templates_line_is_named(tmp_path, num_workers):
    template = (
        "{% for message in messages %}\n"
        "{% if message['role'] == 'oracle' %}\n"
        "{{ raise_exception('roles must alternate') }}\n"
        "{% endif %}{{ message['content'] }}{% endfor %}"
    )
    rows = [{"input": [{"role": role, "content": "text"}], "label": role} for role in ("user", "oracle", "system")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fn = prompts(apply_chat_template=True, chat_template=template)

    raised = deliver(str(path), fn, num_workers=num_workers)
    skipped = deliver(str(path), fn, num_workers=num_workers, bad_rows="skip")

    offset = len(json.dumps(rows[0])) + 1
    assert str(raised.error).startswith(f"AD412 {path}:2 (byte {offset}): chat template line 3: roles must alternate")
    assert skipped.labels == ["user", "system"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda row: [1], "cannot be imported by a worker process. Move it to a module"),
        ("tests.support.tokenize_fns:nothing", "tests.support.tokenize_fns:nothing"),
        ("no_such_module:fn", "no_such_module"),
        ("no path", "no path"),
    ],
)
def test_51_a_function_that_cannot_be_imported_is_refused_before_a_worker_starts(path, function, text):
    found = deliver(str(path), function, num_workers=1)
    assert isinstance(found.error, ConfigError)
    assert_is_ours(found.error, "AD420")
    assert text in str(found.error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_52_what_the_function_raises_is_a_bad_row_with_the_users_own_frames(path, num_workers):
    raised = deliver(str(path), tokenize_fns.fails_on_13, num_workers=num_workers)
    skipped = deliver(str(path), tokenize_fns.fails_on_13, num_workers=num_workers, bad_rows="skip")
    line, offset = line_of(path, 13)
    assert isinstance(raised.error, BadRowError)
    assert str(raised.error).startswith(
        f"AD421 {path}:{line} (byte {offset}): the tokenize function raised KeyError('thirteen')"
    )
    assert "tokenize_fns.py" in raised.error.traceback
    assert "in fails_on_13" in raised.error.traceback
    assert ids(raised.samples) == list(range(13))
    assert ids(skipped.samples) == [row for row in range(NUM_ROWS) if row != 13]


def check_that_it_is_found(path: Path, function: Any, code: str, text: str) -> None:
    """The row with id 13 brings down its worker: it is named at its turn, or passed over alone."""
    found = deliver(str(path), function, num_workers=2, limits=Limits(row_timeout_s=0.3), bad_rows="skip")
    raised = deliver(str(path), function, num_workers=1, limits=Limits(row_timeout_s=0.3))

    line, offset = line_of(path, 13)
    assert ids(found.samples) == [row for row in range(NUM_ROWS) if row != 13]
    assert found.statistics.dropped_total == {f"bad row {code}": 1}
    assert str(raised.error).startswith(f"{code} {path}:{line} (byte {offset}): ")
    assert text in str(raised.error)
    assert '"id": 13' in raised.error.excerpt
    assert ids(raised.samples) == list(range(13))


def test_53_a_row_that_hangs_its_worker_is_found_and_its_neighbours_are_not_lost(path):
    check_that_it_is_found(path, tokenize_fns.hangs_on_13, "AD422", "no result in 0.3 s; its worker was killed")


@pytest.mark.parametrize("function", [tokenize_fns.kills_on_13, tokenize_fns.kills_on_13_in_batches])
def test_54_so_is_one_that_kills_its_worker(path, function):
    check_that_it_is_found(path, function, "AD423", "its worker died")


def test_55_a_worker_that_has_grown_too_large_is_replaced_and_no_row_is_lost(path, monkeypatch):
    change(monkeypatch, look_at_workers_s=0)
    most = 96 << 20
    found = deliver(str(path), worker_fns.leaks, num_workers=1, buffer_size=4, limits=Limits(max_bytes_per_worker=most))
    events = found.of("worker.outgrown")
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert found.statistics.worker_restarts_total in (len(events), len(events) - 1)  # the last one may just be going
    assert len(events) > 1
    assert all(event["num_bytes"] > event["max_bytes"] == most for event in events)
    assert len({event["pid"] for event in events}) == len(events)
    assert found.of("worker.lost") == []


def test_55_a_limit_that_no_worker_can_keep_is_said_at_once(path):
    found = deliver(str(path), worker_fns.leaks, num_workers=1, limits=Limits(max_bytes_per_worker=1 << 20))
    assert found.samples == []
    assert re.match(
        r"AD426 a worker uses \d+ bytes before it has tokenized a row, but Limits\(max_by", str(found.error)
    )


def test_55_a_worker_that_the_system_kills_for_its_memory_is_replaced_and_no_row_is_lost(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS, {13: {"mark": str(tmp_path / "mark")}})
    found = deliver(str(path), worker_fns.killed_once, num_workers=1)
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert [event["how"] for event in found.of("worker.lost")] == ["SIGKILL"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a number", "int; need a list of token ids, or a dict with 'input_ids'"),
        ("words", "it is a flat list of whole numbers, the token ids"),
        ("no input_ids", "a dict without 'input_ids': it has ['ids']"),
        ("text as input_ids", "str; need a list of token ids"),
        ("negative", "token id -1 is negative"),
        ("too large", "int"),
        ("fractions", "it is a flat list of whole numbers, the token ids"),
        ("nested", "list"),
        ("not JSON", "object"),
    ],
)
def test_56_what_is_no_sample_is_a_bad_row_that_says_what_is_needed(tmp_path, what, text):
    path = write_rows(tmp_path / "rows.jsonl", 4, {2: {"do": what}})
    raised = deliver(str(path), worker_fns.as_told)
    skipped = deliver(str(path), worker_fns.as_told, num_workers=1, bad_rows="skip")
    line, offset = line_of(path, 2)
    assert str(raised.error).startswith(
        f"AD425 {path}:{line} (byte {offset}): the tokenize function returned something that is not a sample: "
    )
    assert text in str(raised.error)
    assert ids(skipped.samples) == [0, 1, 3]


@pytest.mark.parametrize(("what", "reason"), [("nothing", "tokenize_fn"), ("a reason", "too dull")])
def test_56_nothing_or_a_reason_is_a_drop_that_is_counted(tmp_path, what, reason):
    found = deliver(str(write_rows(tmp_path / "rows.jsonl", 4, {2: {"do": what}})), worker_fns.as_told)
    assert (ids(found.samples), found.error) == ([0, 1, 3], None)
    assert found.statistics.dropped_total == {reason: 1}


def test_56_a_tensor_is_a_list_of_token_ids(tmp_path):
    torch = pytest.importorskip("torch")
    path = write_rows(tmp_path / "rows.jsonl", 3)
    assert ids(deliver(str(path), lambda row: torch.tensor([row["id"]])).samples) == [0, 1, 2]


def test_57_a_function_that_prints_goes_to_the_log(tmp_path):
    found = deliver(str(write_rows(tmp_path / "rows.jsonl", 3)), worker_fns.talks, num_workers=1)
    said = "".join(event["text"] for event in found.of("worker.output"))
    assert ids(found.samples) == [0, 1, 2]
    assert "hello from row 2" in said
    assert "a warning" in said


def test_57_a_function_that_changes_its_process_harms_no_other_row(path):
    before = os.getcwd(), os.environ.get("MEDDLED"), signal.getsignal(signal.SIGTERM)
    found = deliver(str(path), worker_fns.meddles, num_workers=2)
    assert (ids(found.samples), found.error) == (list(range(NUM_ROWS)), None)
    assert (os.getcwd(), os.environ.get("MEDDLED"), signal.getsignal(signal.SIGTERM)) == before
    assert os.getpid() not in {sample.extra["pid"] for sample in found.samples}


@pytest.mark.parametrize(
    ("what", "text"), [("raises", "no tokenizer.json to be seen"), ("dies", "what I wanted to say")]
)
def test_58_workers_that_cannot_start_say_why_and_are_not_started_for_ever(path, tmp_path, what, text):
    with capture_logs():
        found = deliver(str(path), worker_fns.Opening(what, str(tmp_path), 1000), num_workers=2)
    assert isinstance(found.error, WorkerError)
    assert_is_ours(found.error, "AD426")
    assert text in str(found.error)
    assert len(list(tmp_path.glob("start *"))) <= 20


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
