"""The first run with a tokenizer: nothing is proven yet. What is proven beside it is used by its own workers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from asyncdata import (
    ChatTokenizeFn,
    DataLoader,
    FixedLengthTokenizeFn,
    PreferenceTokenizeFn,
    PromptTokenizeFn,
    TextTokenizeFn,
)
from asyncdata.loader import background_proof
from asyncdata.loader.background_proof import SWITCH, Prover
from asyncdata.tokenization.encoders import equivalence_records, text_encoder
from asyncdata.tokenization.encoders.equivalence_records import Proof, keep, subject_of
from asyncdata.tokenization.encoders.token_lengths import lengths_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.combinations import each_value
from tests.support.slime_source import args_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_ROWS = 400
_SAYS = "import sys; sys.stdout.write(sys.argv[1]); sys.stdout.flush(); sys.stdin.read()"


def row(number: int) -> dict[str, Any]:
    """A row for every tokenize function."""
    text = f"Row {number}, it's caf\u00e9 number {number * number}\n\n  {chr(0x4E00 + number)}"
    answer = {"role": "assistant", "content": f"Yes, {text}"}
    return {
        "input": text,
        "text": text,
        "messages": [{"role": "user", "content": text}, answer],
        "prompt": f"{text} ",
        "chosen": f"good {number}",
        "rejected": f"bad {number}",
        "question": "How many?",
        "target": f"{number}",
        "label": number,
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "prompt": lambda folder, **more: PromptTokenizeFn(folder, **more),
    "chat prompt": lambda folder, **more: PromptTokenizeFn(
        folder, prompt_key="messages", apply_chat_template=True, **more
    ),
    "text": lambda folder, **more: TextTokenizeFn(folder, **more),
    "chat": lambda folder, **more: ChatTokenizeFn(folder, **more),
    "preference": lambda folder, **more: PreferenceTokenizeFn(folder, **more),
    "fixed length": lambda folder, **more: FixedLengthTokenizeFn.babilong(folder, 256, **more),
}


@pytest.fixture
def proof(backend: str, small_tokenizer: Path) -> Proof:
    files = TokenizerFiles(str(small_tokenizer))
    subject = subject_of(files, backend)
    assert subject is not None
    lengths = lengths_of(files, files.load())
    return Proof(subject=subject, exceptions=[(0x4E00, 0x110000)], around=([], []), token_lengths=lengths)


class Sweep:
    """Takes the place of the process that proves: it says what the test has it say, when the test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._proof: Proof | None = None
        self._may_end = threading.Event()
        self.num_started = 0
        monkeypatch.delenv(SWITCH)
        monkeypatch.setattr(background_proof, "_spawn", self._spawn)

    def ends_with(self, proof: Proof) -> None:
        self._proof = proof

    def ends(self) -> None:
        self._may_end.set()

    def _spawn(self, folder: str, backends: list[str], *_: Any) -> subprocess.Popen[bytes]:
        assert self._proof is not None
        self.num_started += 1
        self._may_end.wait()
        keep(self._proof)
        line = msgspec.json.encode(msgspec.structs.replace(self._proof, token_lengths=b"")) + b"\n"
        command = [sys.executable, "-c", _SAYS, line.decode()]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing is proven"))
    return Sweep(monkeypatch)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fast backends that this process loads from now on."""
    found: list[str] = []
    load = text_encoder.load_backend
    monkeypatch.setattr(text_encoder, "load_backend", lambda name, *a, **k: found.append(name) or load(name, *a, **k))
    return found


def samples_of(loader: DataLoader, number: int) -> list[Any]:
    return [
        (str(each.position), each.tokens.tolist(), np.asarray(each.labels).tolist(), each.extra, each.metadata)
        for each in loader.get_next_batch(number)
    ]


def names_of(events: list[Any]) -> list[str]:
    return [event["event"] for event in events]


def until_switched(loader: DataLoader, events: list[Any], sweep: Sweep) -> Iterator[Any]:
    """Samples, until the workers have taken over what was proven, and then of another epoch."""
    yield from samples_of(loader, 8)
    sweep.ends()
    while "workers.reopened" not in names_of(events):
        assert "workers.not_reopened" not in names_of(events), events
        yield from samples_of(loader, 8)
    yield from samples_of(loader, NUM_ROWS)


def uses(pid: int, backend: str) -> bool:
    return any(backend in each.path for each in psutil.Process(pid).memory_maps())


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "num_workers"), each_value(FUNCTIONS.keys(), [0, 2]))
def test_workers_take_over_what_is_proven_beside_their_run_and_d_is_the_same(
    backend: str,
    kind: str,
    num_workers: int,
    small_tokenizer: Path,
    jsonl_file: Any,
    proof: Proof,
    sweep: Sweep,
    loaded: list[str],
) -> None:
    path = jsonl_file([row(number) for number in range(NUM_ROWS)])
    sweep.ends_with(proof)
    function = FUNCTIONS[kind](str(small_tokenizer))
    settings = {"num_workers": num_workers, "buffer_size": 16, "timeout_s": 100}
    with capture_logs() as events, DataLoader(path, tokenize_fn=function, **settings) as loader:
        found = list(until_switched(loader, events, sweep))
        pids = [worker.pid for worker in loader.statistics().workers]
        assert all(uses(pid, backend) for pid in pids) if num_workers else loaded == [backend]
        assert loader.statistics().worker_restarts_total == 0

    of_hf = FUNCTIONS[kind](str(small_tokenizer), tokenizer_backend="hf")
    with DataLoader(path, tokenize_fn=of_hf, num_workers=0) as loader:
        assert samples_of(loader, len(found)) == found
    assert names_of(events).index("tokenizer.proved") < names_of(events).index("workers.reopened")


@pytest.mark.thorough
def test_workers_forked_after_the_switch_share_the_memory_of_one_fork_server(
    backend: str, small_tokenizer: Path, jsonl_file: Any, proof: Proof, sweep: Sweep
) -> None:
    path = jsonl_file([row(number) for number in range(NUM_ROWS)])
    sweep.ends_with(proof)
    before = {child.pid for child in psutil.Process().children()}
    function = PromptTokenizeFn(str(small_tokenizer))
    with (
        capture_logs() as events,
        DataLoader(path, tokenize_fn=function, num_workers=2, buffer_size=16) as loader,
    ):
        list(until_switched(loader, events, sweep))
        pids = [worker.pid for worker in loader.statistics().workers]
        psutil.Process(pids[0]).kill()
        while pids[0] in {worker.pid for worker in loader.statistics().workers}:
            loader.get_next_batch(8)
        while None in (pids := [worker.pid for worker in loader.statistics().workers]):
            loader.get_next_batch(8)
        servers = {psutil.Process(pid).ppid() for pid in pids}
        children = {child.pid for child in psutil.Process().children()} - before
        assert all(uses(pid, backend) for pid in pids)

    assert len(servers) == 1
    assert not [pid for pid in children - servers if psutil.pid_exists(pid) and _is_fork_server(pid)]


def _is_fork_server(pid: int) -> bool:
    return any("forkserver" in part for part in psutil.Process(pid).cmdline())


@pytest.mark.thorough
def test_slimes_data_source_takes_over_what_is_proven_beside_its_run(
    backend: str, small_tokenizer: Path, jsonl_file: Any, proof: Proof, sweep: Sweep
) -> None:
    from asyncdata.integrations.slime import AsyncDataSource

    path = jsonl_file([row(number) for number in range(NUM_ROWS)])
    given = {"hf_checkpoint": str(small_tokenizer), "rollout_max_prompt_len": 200, "asyncdata_num_workers": 1}
    sweep.ends_with(proof)
    with capture_logs() as events:
        source = AsyncDataSource(args_for(path, **given))
        assert len(source.get_samples(4)) == 4
        sweep.ends()
        while "workers.reopened" not in names_of(events):
            assert len(source.get_samples(4)) == 4
        source.close()

    assert sweep.num_started == 1


@pytest.mark.thorough
@pytest.mark.parametrize("reason", ["refused", "no offsets", "other files"])
def test_workers_are_left_alone_if_they_cannot_use_what_was_found(
    reason: str, backend: str, small_tokenizer: Path, jsonl_file: Any, proof: Proof, sweep: Sweep, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for each in small_tokenizer.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    changes: dict[str, Any] = {"refusal": "it is wrong"} if reason == "refused" else {"no_offsets": "it has none"}
    sweep.ends_with(proof if reason == "other files" else msgspec.structs.replace(proof, **changes))
    path = jsonl_file([row(number) for number in range(NUM_ROWS)])
    with capture_logs() as events, DataLoader(path, tokenize_fn=ChatTokenizeFn(str(folder)), num_workers=1) as loader:
        if reason == "other files":
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config["additional_special_tokens"] = ["<|im_start|>", "Row"]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        loader.get_next_batch(8)
        sweep.ends()
        (prover,) = loader._engine._provers  # noqa: SLF001 - its thread ends with the process that proves
        while prover._thread is None:  # noqa: SLF001
            pass
        prover._thread.join()  # noqa: SLF001
        loader.get_next_batch(NUM_ROWS)

    assert sweep.num_started == 1
    assert "workers.reopened" not in names_of(events)


def test_without_a_fast_backend_one_line_in_a_process_says_what_it_would_bring(
    small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_proof, "version_of", lambda name: None)
    background_proof._say_what_is_missing.cache_clear()  # noqa: SLF001 - as in a new process
    function = PromptTokenizeFn(str(small_tokenizer))
    with capture_logs() as events:
        Prover(msgspec.structs.replace(function, tokenizer_backend="hf"))
        Prover(len)
        assert events == []
        for _ in range(3):
            Prover(function)

    (event,) = events
    assert (event["event"], event["log_level"]) == ("tokenizer.no_fast_backend", "info")
    assert 'pip install ".[fast]" in a clone' in event["remedy"]


@pytest.mark.parametrize("is_known", [False, True])
def test_common_characters_are_proven_at_low_priority_and_the_others_on_idle_cpus_only(
    is_known: bool,
    small_tokenizer: Path,
    proof: Proof,
    sweep: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    steps: list[str] = []
    first, whole = (msgspec.structs.replace(proof, is_partial=is_first) for is_first in (True, False))

    def step(name: str, found: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: steps.append(name) or found

    monkeypatch.setattr(background_proof, "end_with_parent", step("ends with its parent"))
    monkeypatch.setattr("os.nice", step("low priority"))
    monkeypatch.setattr("os.sched_setscheduler", step("idle only"))
    monkeypatch.setattr(equivalence_records, "make_first", step("common", first))
    monkeypatch.setattr(equivalence_records, "make", step("all", whole))
    if is_known:
        keep(first)

    background_proof.main(str(small_tokenizer), [proof.subject.backend], parent=1, num_processes=1)

    common = [] if is_known else ["common"]
    assert steps == ["ends with its parent", "low priority", *common, "idle only", "all"]
    told = [msgspec.json.decode(line, type=Proof).is_partial for line in capfdbinary.readouterr().out.splitlines()]
    assert told == ([False] if is_known else [True, False])


def test_spare_cpus_are_those_that_workers_and_trainer_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def spare(num_cpus: int, num_workers: int) -> int:
        monkeypatch.setattr(background_proof, "num_usable_cpus", lambda: num_cpus)
        return background_proof._num_spare_cpus(num_workers)  # noqa: SLF001

    assert [spare(2, 2), spare(2, 0), spare(8, 4), spare(16, 4), spare(64, 8)] == [1, 1, 3, 8, 8]
