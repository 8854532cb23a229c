"""The fast backends themselves, against the ``tokenizers`` that is installed; and a run beside which one is proven."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import msgspec
import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from asyncdata import ChatTokenizeFn, DataLoader, FixedLengthTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn
from asyncdata.loader import background_proof, proving
from asyncdata.tokenization.encoders import equivalence_sweep, fast_backends
from asyncdata.tokenization.encoders.equivalence_records import find, keep
from asyncdata.tokenization.encoders.text_encoder import choose
from tests.support import parts
from tests.support.examples import each_value
from tests.support.faults import until
from tests.support.function_kinds import KINDS, Kind
from tests.support.tokenizers import FEW, Fake, install, shorten
from tests.unit.tokenization import outcomes, run

ROWS_PER_REQUEST = 256
POINTS = [*range(0x20, 0x7F), *range(0xA0, 0x180), 0x301, 0x323, *range(0x400, 0x450), *range(0x4E00, 0x4E80)]
NUM_ROWS = 400
_SAYS = "import sys; sys.stdout.write(sys.argv[1]); sys.stdout.flush(); sys.stdin.read()"


ALONE = """
import os, sys
sys.path[:] = sys.argv[3:]
from asyncdata.tokenization.encoders.fast_backends import load_backend
encode = load_backend(sys.argv[1], open(sys.argv[2], "rb").read())
print(len(os.listdir("/proc/self/task")), "awkward" in sys.modules)
if os.fork() == 0:
    assert encode(["a forked child encodes"]).ids
    assert "awkward" not in sys.modules
    os._exit(0)
_, status = os.wait()
print(os.waitstatus_to_exitcode(status), encode(["and so does its parent"]).ends[0] > 0)
sys.modules["awkward"] = stranger = object()
print(encode(["a"] * 50 + ["a long one " * 500]).ends[0], sys.modules["awkward"] is stranger)
"""


@pytest.fixture
def files(small_tokenizer) -> parts.TokenizerFiles:
    return parts.TokenizerFiles(str(small_tokenizer))


@pytest.fixture
def proof(backend, files) -> parts.Proof:
    """As if a sweep had been made."""
    subject = parts.subject_of(files, backend)
    assert subject is not None
    lengths = parts.lengths_of(files, files.load())
    return parts.Proof(subject=subject, proven=[(0, 0x4E00)], around=([], []), token_lengths=lengths)


@pytest.mark.thorough
def test_a_backend_starts_no_thread_before_a_fork_and_leaves_awkward_alone(backend, small_tokenizer):
    path = str(small_tokenizer / "tokenizer.json")
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALONE, backend, path, *sys.path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 False", "0 True", "1 True"]


BATCHES = [
    *([], [""], ["", "", ""], ["a"], ["one", "", "two words", "\u4e2d\u6587", "<|im_end|>"]),
    ["a"] * 50 + ["a long one " * 500, ""],
]


@pytest.mark.thorough
def test_a_batch_has_the_ids_of_its_texts_however_their_lengths_differ_in_any_thread(backend, files):
    encode = parts.load_backend(backend, files.plain_json())
    for texts in BATCHES:
        found = encode(texts).of_each()
        assert found == [b"".join(encode([text]).of_each()) for text in texts]
        assert found == parts.HfEncoder(files.load())(texts).of_each()
        with ThreadPoolExecutor(1) as thread:
            others = thread.submit(lambda texts=texts: parts.load_backend(backend, files.plain_json())(texts)).result()
        assert others.of_each() == found


def child_of(process: psutil.Process) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        children = [(child, child.cmdline()) for child in process.children()]
        found[:] = [child for child, words in children if any("asyncdata.loader.proving" in one for one in words)]
        return bool(found)

    until(is_there, math.inf)
    return found[0]


@pytest.mark.thorough
def test_a_loader_proves_beside_a_run_at_low_priority_until_it_ends(backend, small_tokenizer, jsonl_file, monkeypatch):
    monkeypatch.delenv(parts.SWITCH)
    path = jsonl_file([{"input": "one"}] * 10)

    with DataLoader(path, tokenize_fn=PromptTokenizeFn(str(small_tokenizer)), num_workers=0) as loader:
        loader.get_next_batch(2)
        child = child_of(psutil.Process())
        until(lambda: child.nice() > psutil.Process().nice(), math.inf)
        # In a session of its own, the scheduler's autogroups would give it as much CPU time as the trainer.
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid  # Ctrl-C is for the trainer

    assert not child.is_running()


OWNER = """
import os, sys
sys.path[:] = sys.argv[2:]
from asyncdata import PromptTokenizeFn
from asyncdata.loader.background_proof import Prover
from tests.support.parts import change, real
prover = Prover(PromptTokenizeFn(sys.argv[1]).resolve())
prover.start()
while prover._process is None:
    pass
if {forks} and os.fork() == 0:  # it keeps the other end of the proof's stdin
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("forks", [False, True])
def test_a_proof_ends_with_the_process_that_wanted_it_also_if_killed(backend, small_tokenizer, monkeypatch, forks):
    monkeypatch.delenv(parts.SWITCH)
    command = [sys.executable, "-c", OWNER.format(forks=forks), str(small_tokenizer), *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        child = child_of(psutil.Process(owner.pid))
        heir = psutil.Process(int(owner.stdout.readline())) if forks else None
        owner.send_signal(signal.SIGKILL)
        psutil.wait_procs([child], timeout=240)
        left = child.is_running()
        for process in filter(None, (heir, child)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    assert not left


def test_nothing_is_proven_where_that_is_forbidden_or_needless(backend, small_tokenizer, monkeypatch):
    def watches(fn: Any) -> bool:
        prover = parts.Prover(fn)
        prover.start()
        prover.close()
        return prover._thread is not None  # noqa: SLF001

    assert (parts.version_of(backend), parts.version_of("surely_no_such_library")) == (version(backend), None)
    assert not watches(PromptTokenizeFn(str(small_tokenizer)))
    monkeypatch.delenv(parts.SWITCH)
    assert watches(PromptTokenizeFn(str(small_tokenizer)))
    assert not watches(PromptTokenizeFn(str(small_tokenizer), tokenizer_backend="hf"))
    assert not watches(len)


SCRIPTS = [
    "plain {}",
    "caf\u00e9 {} \u201cquoted\u201d",
    "\u042f \u0437\u043d\u0430\u044e {}",
    "{} \u4f60\u597d",
    "\uac00\ub098 {} \u0646",
]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_proof_grows_with_the_scripts_of_the_data_while_d_is_that_of_tokenizers_and_the_next_run_has_it(
    backend, small_tokenizer, jsonl_file, monkeypatch
):
    monkeypatch.delenv(parts.SWITCH)
    parts.change(monkeypatch, look_at_a_proof_s=0.01)
    texts = [text.format(chr(0x4E00 + number)) for number in range(100) for text in SCRIPTS]
    path, folder = jsonl_file([{"input": text} for text in texts]), str(small_tokenizer)
    subject = parts.subject_of(parts.TokenizerFiles(folder), backend)
    assert subject is not None
    points = {ord(char) for text in texts for char in text}

    def is_proven() -> bool:
        return points <= parts.points_of(getattr(find(subject), "proven", []))

    found = []
    with DataLoader(path, tokenize_fn=PromptTokenizeFn(folder, tokenizer_backend=backend), num_workers=1) as loader:
        while not is_proven():
            found += samples_of(loader, 100)
        found += samples_of(loader, len(texts))
    with DataLoader(path, tokenize_fn=PromptTokenizeFn(folder, tokenizer_backend="hf"), num_workers=0) as loader:
        assert samples_of(loader, len(found)) == found

    loads = Mock(wraps=parts.real("load_a_tokenizer"))
    parts.change(monkeypatch, load_a_tokenizer=loads)
    with DataLoader(path, tokenize_fn=PromptTokenizeFn(folder), num_workers=0) as loader:
        assert samples_of(loader, len(texts)) == found[: len(texts)]
    loads.assert_not_called()


# The first run with a tokenizer: nothing is proven yet. What is proven beside it is used by its own workers.


def row_of(kind: Kind, number: int) -> dict[str, Any]:
    """A row with its number, and a character that is not proven, in its text."""
    text = f"Row {number}, it's caf\u00e9 number {number * number}\n\n  {chr(0x4E00 + number)} What"
    return json.loads(json.dumps(kind.row).replace("What", json.dumps(text)[1:-1], 1)) | {"label": number}


class Sweep:
    """Takes the place of the process that proves: it says ``proof``, when the test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, proof: parts.Proof) -> None:
        self.proof = proof
        self.may_end = threading.Event()
        self.num_started = 0
        monkeypatch.delenv(parts.SWITCH)
        parts.change(monkeypatch, spawn_a_proof=self._spawn)

    def _spawn(self, folder: str, backends: list[str], **_: Any) -> subprocess.Popen[bytes]:
        self.num_started += 1
        self.may_end.wait()
        keep(self.proof)
        line = msgspec.json.encode(msgspec.structs.replace(self.proof, token_lengths=b"")) + b"\n"
        command = [sys.executable, "-c", _SAYS, line.decode()]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


@pytest.fixture
def beside(monkeypatch, tmp_path, proof) -> Sweep:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing is proven"))
    return Sweep(monkeypatch, proof)


def samples_of(loader: DataLoader, number: int) -> list[Any]:
    return [
        (str(each.position), each.tokens.tolist(), np.asarray(each.labels).tolist(), each.extra, each.metadata)
        for each in loader.get_next_batch(number)
    ]


def names_of(events: list[Any]) -> list[str]:
    return [event["event"] for event in events]


def until_switched(loader: DataLoader, events: list[Any], beside: Sweep) -> Iterator[Any]:
    """Samples, until the workers have taken over what was proven, and then of another epoch."""
    yield from samples_of(loader, 8)
    beside.may_end.set()
    while "workers.reopened" not in names_of(events):
        assert "workers.not_reopened" not in names_of(events), events
        yield from samples_of(loader, 8)
    yield from samples_of(loader, NUM_ROWS)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "num_workers"), each_value(KINDS, [0, 2]))
def test_workers_take_over_what_is_proven_beside_their_run_and_d_is_the_same(
    backend, kind, num_workers, small_tokenizer, jsonl_file, beside, monkeypatch
):
    loads = Mock(wraps=parts.real("load_a_backend"))
    parts.change(monkeypatch, load_a_backend=loads)
    path = jsonl_file([row_of(kind, number) for number in range(NUM_ROWS)])
    function = kind.make(str(small_tokenizer))
    settings = {"num_workers": num_workers, "buffer_size": 16, "timeout_s": 100}
    with capture_logs() as events, DataLoader(path, tokenize_fn=function, **settings) as loader:
        found = list(until_switched(loader, events, beside))
        assert [call.args[0] for call in loads.call_args_list] == ([] if num_workers else [backend])
        for worker in loader.statistics().workers:
            assert any(backend in each.path for each in psutil.Process(worker.pid).memory_maps())
        assert loader.statistics().worker_restarts_total == 0

    of_hf = kind.make(str(small_tokenizer), tokenizer_backend="hf")
    with DataLoader(path, tokenize_fn=of_hf, num_workers=0) as loader:
        assert samples_of(loader, len(found)) == found
    assert names_of(events).index("tokenizer.proved") < names_of(events).index("workers.reopened")


@pytest.mark.thorough
def test_workers_forked_after_the_switch_share_memory_of_one_fork_server(backend, small_tokenizer, jsonl_file, beside):
    before = {child.pid for child in psutil.Process().children()}
    path = jsonl_file([row_of(KINDS["prompt"], number) for number in range(NUM_ROWS)])
    knobs = {"tokenize_fn": PromptTokenizeFn(str(small_tokenizer)), "buffer_size": 16, "num_workers": 2}
    with capture_logs() as events, DataLoader(path, **knobs) as loader:
        list(until_switched(loader, events, beside))
        pids = [worker.pid for worker in loader.statistics().workers]
        psutil.Process(pids[0]).kill()
        while pids[0] in {worker.pid for worker in loader.statistics().workers}:
            loader.get_next_batch(8)
        while None in (pids := [worker.pid for worker in loader.statistics().workers]):
            loader.get_next_batch(8)
        servers = {psutil.Process(pid).ppid() for pid in pids}
        children = {child.pid for child in psutil.Process().children()} - before

    assert len(servers) == 1
    for pid in filter(psutil.pid_exists, children - servers):
        assert not any("forkserver" in part for part in psutil.Process(pid).cmdline())


@pytest.mark.thorough
@pytest.mark.parametrize("reason", ["refused", "no offsets", "other files"])
def test_workers_that_cannot_use_it_are_left_alone(
    reason, backend, small_tokenizer, jsonl_file, proof, beside, tmp_path
):
    folder = shutil.copytree(small_tokenizer, tmp_path / "tokenizer")
    changes: dict[str, dict[str, Any]] = {
        "refused": {"refusal": "it is wrong"},
        "no offsets": {"no_offsets": "none", "token_lengths": b""},
    }
    beside.proof = msgspec.structs.replace(proof, **changes.get(reason, {}))
    path = jsonl_file([row_of(KINDS["chat"], number) for number in range(NUM_ROWS)])
    with capture_logs() as events, DataLoader(path, tokenize_fn=ChatTokenizeFn(str(folder)), num_workers=1) as loader:
        if reason == "other files":
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config["additional_special_tokens"] = ["<|im_start|>", "Row"]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        loader.get_next_batch(8)
        beside.may_end.set()
        (prover,) = loader._engine._provers  # noqa: SLF001 - its thread ends with the process that proves
        while prover._thread is None:  # noqa: SLF001
            pass
        prover._thread.join()  # noqa: SLF001
        loader.get_next_batch(NUM_ROWS)

    assert beside.num_started == 1
    assert "workers.reopened" not in names_of(events)


def test_a_process_whose_proof_fails_is_said_once_the_run_goes_on(backend, small_tokenizer, jsonl_file, monkeypatch):
    monkeypatch.delenv(parts.SWITCH)
    fails = [sys.executable, "-c", "import sys; sys.exit(3)"]
    spawn = Mock(side_effect=lambda *_, **__: subprocess.Popen(fails, stdout=subprocess.PIPE))
    parts.change(monkeypatch, spawn_a_proof=spawn)
    path = jsonl_file([{"input": "one"}] * 10)
    with capture_logs() as events, DataLoader(path, tokenize_fn=PromptTokenizeFn(str(small_tokenizer))) as loader:
        (prover,) = loader._engine._provers  # noqa: SLF001 - its thread ends then
        loader.get_next_batch(2)
        until(lambda: prover._thread is not None and not prover._thread.is_alive(), math.inf)  # noqa: SLF001

    (event,) = [event for event in events if event["event"] == "tokenizer.not_proven"]
    assert event["reason"] == "the process that proves has ended with status 3"
    assert spawn.call_count == 1


def test_what_is_asked_of_a_second_backend_is_proven_if_the_first_is_not(small_tokenizer, files, monkeypatch, tmp_path):
    monkeypatch.delenv(parts.SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing is proven"))
    parts.change(monkeypatch, look_at_a_proof_s=0.01)
    first, second = (
        parts.subject_of(files, pytest.importorskip(name).__name__) for name in fast_backends.FAST_BACKENDS
    )
    assert first is not None
    assert second is not None

    def prove(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        keep(parts.Proof(subject=first, refusal="it is wrong"))
        keep(parts.Proof(subject=second, proven=[(0, 0x100)]))
        return subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)

    spawn = Mock(side_effect=prove)
    parts.change(monkeypatch, spawn_a_proof=spawn)
    prover = parts.Prover(PromptTokenizeFn(str(small_tokenizer)))
    prover.start()
    until(lambda: find(second) is not None, math.inf)
    parts.ask_for(second, [0x4E00])
    until(lambda: spawn.call_count > 1, math.inf)
    prover.close()


def test_without_a_fast_backend_one_line_in_a_process_says_what_it_would_bring(small_tokenizer, monkeypatch):
    parts.change(monkeypatch, version_of_a_backend=lambda name: None)
    background_proof._say_what_is_missing.cache_clear()  # noqa: SLF001 - as in a new process
    function = PromptTokenizeFn(str(small_tokenizer))
    with capture_logs() as events:
        parts.Prover(msgspec.structs.replace(function, tokenizer_backend="hf"))
        parts.Prover(len)
        assert events == []
        for _ in range(3):
            parts.Prover(function)

    (event,) = events
    assert (event["event"], event["log_level"]) == ("tokenizer.no_fast_backend", "info")
    assert 'pip install ".[fast]" in a clone' in event["remedy"]


def test_a_process_that_proves_begins_with_what_every_text_has_then_what_is_asked_for(files, monkeypatch, capfdbinary):
    steps: list[str] = []
    monkeypatch.setattr(proving, "end_with_parent", lambda _: steps.append("ends with its parent"))
    monkeypatch.setattr("os.nice", lambda _: steps.append(f"low priority, {'' if proven() is None else 'proven'}"))
    parts.change(monkeypatch, most_quiet_proofs=1)
    wrong, right = Fake(files.load(), lambda text: "<|im_end|>" in text), Fake(files.load(), lambda text: False)
    install(monkeypatch, {"gigatoken": lambda: wrong, "fastokens": lambda: right})
    prove = partial(proving.main, files.folder, ["gigatoken", "fastokens"], needs_offsets=True, parent=1)

    proven = partial(choose, files, "auto", needs_offsets=True)
    num_ascii = sum(point < 0x80 for point in FEW)

    def told() -> list[tuple[str, int]]:
        lines = capfdbinary.readouterr().out.splitlines()
        proofs = [msgspec.json.decode(line, type=parts.Proof) for line in lines]
        return [(proof.refusal, parts.num_points(proof.proven)) for proof in proofs]

    prove()
    assert steps == ["ends with its parent", "low priority, proven"]
    assert told() == [(ANY, 0), ("", num_ascii)], "the rest of Latin text is stored when it is proven"
    proof = proven()
    assert proof is not None
    not_proven = parts.ProvenTexts(proof, needs_offsets=True)
    assert not_proven(["plain", "\u4e00\u4e01"]) == [1]
    prove()
    assert told() == [("", len(FEW) + 2)]
    assert not_proven(["plain", "\u4e00\u4e01"]) == []
    prove()
    assert told() == []


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings_in(each)


def functions_and_rows(data: Path) -> dict[str, tuple[Any, list[Any]]]:
    """Functions of prompts and of parts of a text, and the rows of the real data for them."""
    files = [path for name in ("chat_sft", "gsm8k") for path in data.glob(f"{name}/*.jsonl")]
    lines = [line for path in files for line in path.read_bytes().splitlines()]
    whole = [path.read_bytes() for path in data.glob("babilong/*.json")]
    texts = {text for part in (*lines, *whole) for text in strings_in(json.loads(part))}
    questions = [json.loads(line) for line in (data / "gsm8k" / "test.jsonl").read_bytes().splitlines()]
    pairs = [
        {"prompt": one["question"] + " ", "chosen": one["answer"], "rejected": other["answer"]}
        for one, other in pairwise(questions)
    ]
    cut = partial(FixedLengthTokenizeFn.babilong, max_length=2048, overlong="truncate_context_middle")
    return {
        "prompt": (PromptTokenizeFn, [{"input": text} for text in sorted(texts)]),
        "chat": (ChatTokenizeFn, (data / "chat_sft" / "chat_sft.jsonl").read_bytes().splitlines()),
        "pair": (PreferenceTokenizeFn, pairs),
        "fixed": (cut, json.loads((data / "babilong" / "qa1_4k.json").read_bytes())),
    }


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nth", [pytest.param(27, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k"])
def test_the_rows_of_the_data_have_the_ids_and_labels_that_tokenizers_gives_while_the_proof_grows(
    test_data, backend, tokenizer, nth, monkeypatch
):
    if nth > 1:
        shorten(monkeypatch, [10, *POINTS], longest_text=2000)
    folder = str(test_data / "tokenizers" / tokenizer)
    files = parts.TokenizerFiles(folder)
    subject = parts.subject_of(files, backend)
    assert subject is not None
    growing = parts.GrowingProof(files, subject)
    growing.grow(equivalence_sweep.FIRST)

    for kind, (make, whole) in functions_and_rows(test_data).items():
        rows = whole[::nth]
        fast, slow = (make(folder, tokenizer_backend=name).open() for name in (backend, "hf"))
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            part = rows[start : start + ROWS_PER_REQUEST]
            expected = outcomes(run(slow, part))
            assert outcomes(run(fast, part)) == expected, (kind, start)
            growing.grow(parts.asked_for(subject))
            parts.answered(subject, len(parts.asked_for(subject)))
            assert outcomes(run(fast, part)) == expected, (kind, start, "grown")
    assert parts.num_points(growing.proof.proven) > len(equivalence_sweep.FIRST)
