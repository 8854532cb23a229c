"""The fast backends themselves, against the ``tokenizers`` that is installed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from asyncdata import (
    ChatTokenizeFn,
    DataLoader,
    FixedLengthTokenizeFn,
    PreferenceTokenizeFn,
    PromptTokenizeFn,
    TextTokenizeFn,
)
from asyncdata.loader.background_proof import SWITCH, Prover
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.encoders import equivalence_records
from asyncdata.tokenization.encoders.equivalence_records import Proof, choose, find, keep, subject_of
from asyncdata.tokenization.encoders.equivalence_sweep import random_texts, sweep
from asyncdata.tokenization.encoders.fast_backends import load_backend, version_of
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder, separator_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.faults import until

if TYPE_CHECKING:
    from pathlib import Path

ROWS_PER_REQUEST = 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
POINTS = [*range(0x20, 0x7F), *range(0xA0, 0x180), 0x301, 0x323, *range(0x400, 0x450), *range(0x4E00, 0x4E80)]


@pytest.fixture
def files(small_tokenizer: Path) -> TokenizerFiles:
    return TokenizerFiles(str(small_tokenizer))


@pytest.mark.thorough
def test_a_short_sweep_proves_every_backend_for_a_small_tokenizer(backend: str, files: TokenizerFiles) -> None:
    tokenizer = files.load()

    found = sweep(
        HfEncoder(tokenizer),
        load_backend(backend, files.plain_json()),
        SPECIAL,
        separator=separator_of(tokenizer),
        code_points=POINTS,
        num_random_texts=1000,
        longest_text=5000,
    )

    assert (found.refusal, found.num_differences) == ("", 0)


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
"""


@pytest.mark.thorough
def test_a_backend_is_loaded_without_a_thread_so_that_forked_processes_can_use_it(
    backend: str, small_tokenizer: Path
) -> None:
    path = str(small_tokenizer / "tokenizer.json")
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, "-c", ALONE, backend, path, *sys.path],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines() == ["1 False", "0 True"]


@pytest.mark.thorough
def test_a_thread_of_the_trainer_has_the_same_ids(backend: str, files: TokenizerFiles) -> None:
    texts = ["one", "", "two words", "\u4e2d\u6587"]
    expected = load_backend(backend, files.plain_json())(texts)

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: load_backend(backend, files.plain_json())(texts)).result()

    assert (found.of_each(), found.ends) == (expected.of_each(), expected.ends)


@pytest.mark.thorough
def test_a_batch_has_the_ids_of_its_texts_however_their_lengths_differ(backend: str, files: TokenizerFiles) -> None:
    encode = load_backend(backend, files.plain_json())
    for texts in (
        [],
        [""],
        ["", "", ""],
        ["a"],
        ["one", "", "two words", "\u4e2d\u6587", "<|im_end|>"],
        ["a"] * 50 + ["a long one " * 500, ""],
    ):
        found = encode(texts)
        assert found.of_each() == [b"".join(encode([text]).of_each()) for text in texts]
        assert found.of_each() == HfEncoder(files.load())(texts).of_each()


class Stranger(ModuleType):
    """A module under the name of another library, which says who asks for what."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"awkward.{name} was asked for")


@pytest.mark.thorough
def test_encoding_neither_imports_nor_replaces_awkward(
    backend: str, files: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that gigatoken imports for its arrays: slow to load, and not ours to take the place of."""
    seen: list[Any] = []
    awkward = Stranger("awkward")
    monkeypatch.setitem(sys.modules, "awkward", awkward)
    encode = load_backend(backend, files.plain_json())

    for texts in (["one", "two words"], ["a"] * 50 + ["a long one " * 500]):
        encode(texts)
        seen.append(sys.modules["awkward"])

    assert seen == [awkward, awkward]


def test_the_version_that_a_proof_names_is_the_installed_one(backend: str) -> None:
    from importlib.metadata import version

    assert version_of(backend) == version(backend)
    assert version_of("surely_no_such_library") is None


def proven(monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles, backend: str) -> None:
    """As if a sweep had been made."""
    subject = subject_of(files, backend)
    assert subject is not None
    keep(Proof(subject=subject, exceptions=[(0x80, 0x110000)], around=([], [])))


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_d_is_the_same_by_every_backend(
    backend: str,
    num_workers: int,
    files: TokenizerFiles,
    small_tokenizer: Path,
    jsonl_file: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proven(monkeypatch, files, backend)
    path = jsonl_file([{"input": text} for text in random_texts(POINTS, SPECIAL, 400, seed=5)])

    def delivered(name: Any) -> list[list[int]]:
        fn = PromptTokenizeFn(str(small_tokenizer), tokenizer_backend=name)
        with DataLoader(path, tokenize_fn=fn, num_workers=num_workers, epochs=1) as loader:
            return [sample.tokens.tolist() for sample in loader.get_next_batch(300)]

    assert delivered("auto") == delivered(backend) == delivered("hf")


@pytest.mark.thorough
def test_text_that_is_trained_whole_is_the_same_by_every_backend(
    backend: str, files: TokenizerFiles, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven(monkeypatch, files, backend)
    rows = [json.dumps({"text": text}).encode() for text in random_texts(POINTS, SPECIAL, 200, seed=6)]

    def written(name: Any) -> Any:
        out = ColumnWriter()
        TextTokenizeFn(str(small_tokenizer), bos="<|im_start|>", tokenizer_backend=name).open()(rows, out)
        return out.finish(len(rows), 0.0)

    assert written(backend) == written("hf")


# Proofs beside a run.


@pytest.fixture
def may_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)


def child_of(process: psutil.Process) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        parts = [(child, child.cmdline()) for child in process.children()]
        found[:] = [child for child, words in parts if any("asyncdata.loader.background_proof" in one for one in words)]
        return bool(found)

    until(is_there, math.inf)
    return found[0]


@pytest.mark.thorough
def test_a_loader_proves_beside_the_run_on_idle_cpus_only_and_ends_that_with_itself(
    backend: str, small_tokenizer: Path, jsonl_file: Any, may_prove: None
) -> None:
    path = jsonl_file([{"input": "one"}] * 10)

    with DataLoader(path, tokenize_fn=PromptTokenizeFn(str(small_tokenizer)), num_workers=0) as loader:
        loader.get_next_batch(2)
        child = child_of(psutil.Process())
        until(lambda: os.sched_getscheduler(child.pid) == os.SCHED_IDLE, math.inf)
        # In a session of its own, the scheduler's autogroups would give it as much CPU time as the trainer.
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid  # Ctrl-C is for the trainer

    assert not child.is_running()


OWNER = """
import os, sys
sys.path[:] = sys.argv[2:]
from asyncdata import PromptTokenizeFn
from asyncdata.loader.background_proof import Prover
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
def test_a_proof_ends_with_the_process_that_wanted_it_even_if_that_is_killed(
    backend: str, small_tokenizer: Path, may_prove: None, forks: bool
) -> None:
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


def test_nothing_is_proven_where_that_is_forbidden_known_or_needless(
    backend: str, files: TokenizerFiles, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(fn: Any) -> bool:
        prover = Prover(fn)
        prover.start()
        if prover._thread is not None:  # noqa: SLF001 - it ends where there is nothing to prove
            prover._thread.join()  # noqa: SLF001
        prover.close()
        return prover._process is not None  # noqa: SLF001

    assert not starts(PromptTokenizeFn(str(small_tokenizer)))
    monkeypatch.delenv(SWITCH)
    assert not starts(PromptTokenizeFn(str(small_tokenizer), tokenizer_backend="hf"))
    assert not starts(len)
    proven(monkeypatch, files, backend)
    assert not starts(PromptTokenizeFn(str(small_tokenizer)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_proven_beside_a_run_is_used_by_the_next(backend: str, small_tokenizer: Path, may_prove: None) -> None:
    fn = PromptTokenizeFn(str(small_tokenizer))
    prover = Prover(fn)
    prover.start()
    assert prover._thread is not None  # noqa: SLF001 - it ends with the proof
    prover._thread.join()  # noqa: SLF001
    prover.close()

    proof = choose(TokenizerFiles(str(small_tokenizer)), "auto")
    assert proof is not None
    assert (proof.refusal, find(proof.subject)) == ("", proof)


def texts_of(test_data: Path) -> list[str]:
    """Every text of the real data: prompts, answers, messages, books."""
    texts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                collect(each)

    for path in sorted(test_data.glob("*/*.jsonl")):
        for line in path.read_bytes().splitlines():
            collect(json.loads(line))
    for path in sorted(test_data.glob("babilong/*.json")):
        collect(json.loads(path.read_bytes()))
    return sorted(set(texts))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k"])
def test_every_text_of_the_data_has_the_ids_of_tokenizers(test_data: Path, backend: str, tokenizer: str) -> None:
    texts = texts_of(test_data)
    rows = [json.dumps({"input": text}).encode() for text in texts]
    folder = str(test_data / "tokenizers" / tokenizer)
    fast = PromptTokenizeFn(folder, tokenizer_backend=backend).open()  # type: ignore[arg-type]
    slow = PromptTokenizeFn(folder, tokenizer_backend="hf").open()

    for start in range(0, len(rows), ROWS_PER_REQUEST):
        part = rows[start : start + ROWS_PER_REQUEST]
        found, expected = ColumnWriter(), ColumnWriter()
        fast(part, found)
        slow(part, expected)
        assert found.finish(len(part), 0.0) == expected.finish(len(part), 0.0), start


def labelled_rows(test_data: Path) -> dict[str, list[bytes]]:
    """Rows for functions that train on parts of a text."""
    questions = [json.loads(line) for line in (test_data / "gsm8k" / "test.jsonl").read_bytes().splitlines()]
    contexts = json.loads((test_data / "babilong" / "qa1_4k.json").read_bytes())
    pairs = [
        {"prompt": one["question"] + " ", "chosen": one["answer"], "rejected": other["answer"]}
        for one, other in pairwise(questions)
    ]
    return {
        "chat": (test_data / "chat_sft" / "chat_sft.jsonl").read_bytes().splitlines(),
        "pair": [json.dumps(pair, ensure_ascii=False).encode() for pair in pairs],
        "fixed": [json.dumps(row).encode() for row in contexts],
    }


def labelled(kind: str, folder: str, backend: str) -> Any:
    if kind == "chat":
        return ChatTokenizeFn(folder, tokenizer_backend=backend)  # type: ignore[arg-type]

    if kind == "pair":
        return PreferenceTokenizeFn(folder, tokenizer_backend=backend)  # type: ignore[arg-type]

    cut = {"overlong": "truncate_context_middle", "tokenizer_backend": backend}
    return FixedLengthTokenizeFn.babilong(folder, 2048, **cut)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "every", [pytest.param(27, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k"])
def test_the_rows_of_the_data_have_the_labels_that_tokenizers_gives(
    test_data: Path, backend: str, tokenizer: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(sweep, code_points=[10, *POINTS], num_random_texts=100, longest_text=2000)
    monkeypatch.setattr(equivalence_records, "sweep", short)
    folder = str(test_data / "tokenizers" / tokenizer)

    for kind, whole in labelled_rows(test_data).items():
        rows = whole[::every]
        fast, slow = (labelled(kind, folder, name).open() for name in (backend, "hf"))
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            part = rows[start : start + ROWS_PER_REQUEST]
            found, expected = ColumnWriter(), ColumnWriter()
            fast(part, found)
            slow(part, expected)
            assert found.finish(len(part), 0.0) == expected.finish(len(part), 0.0), (kind, start)
