"""What every test has at hand: real data where there is some, a small tokenizer, files of rows, and a leak guard."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import psutil
import pytest
import structlog
from hypothesis import Phase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncdata import __version__
from asyncdata.telemetry import recorder
from tests.support.faults import Figure, record, recorded, table
from tests.support.loading import NEVER_S, NUM_ROWS, write_rows

# Set here, as the libraries look once, when they are imported. No test touches the network; a tokenizer has one thread.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["ASYNCDATA_PROVE"] = "off"  # seconds of CPU beside every loader; its own tests turn it on

if importlib.util.find_spec("torchvision") and version("torch").endswith("+cpu"):
    sys.path.insert(0, str(Path(__file__).parent / "support" / "torchvision_ops"))  # workers have the same path
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

if "PYTEST_XDIST_WORKER" in os.environ:  # torch has a thread for each core in each of them, which spin as they wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# HYPOTHESIS_PROFILE=long looks harder; it needs --timeout=0 as well. A CI run tries the same examples every time.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=100, derandomize="CI" in os.environ)
hypothesis.settings.register_profile("long", deadline=None, max_examples=20_000, derandomize=False)
# A mutant is killed by any counterexample, not by the least one; and by the same one in every run.
hypothesis.settings.register_profile(
    "mutation", deadline=None, max_examples=30, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

GRACE_S = 20.0
"""How long what a test closed may take to be gone, where the CPUs are busy. Only a test that fails waits so long."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROSE = ("argparse", "asyncio", "collections", "datetime", "decimal", "email.message", "inspect", "json", "logging")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data sets and tokenizers: ASYNCDATA_TEST_DATA, or ../shared/data beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("ASYNCDATA_TEST_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is no folder, and ASYNCDATA_TEST_DATA names no other")

    return folder


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that AutoTokenizer can load: byte-level BPE of 2,000 tokens, ChatML, trained on the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"special_tokens": list(SPECIAL_TOKENS), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(_docstrings(), trainers.BpeTrainer(vocab_size=2000, **settings))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    folder = tmp_path_factory.mktemp("small_tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _docstrings() -> Iterator[str]:
    for name in PROSE:
        module = importlib.import_module(name)
        for value in (module, *vars(module).values()):
            yield inspect.getdoc(value) or ""


@pytest.fixture
def jsonl_file(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes rows to a file, one a line: dicts as JSON, bytes as they are."""

    def write(rows: Iterable[dict[str, Any] | bytes], name: str = "rows.jsonl", *, final_newline: bool = True) -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines) + (b"\n" if lines and final_newline else b""))
        return path

    return write


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of so many rows as the module of the test says."""
    return write_rows(tmp_path / "rows.jsonl", getattr(request.module, "NUM_ROWS", NUM_ROWS))


@pytest.fixture
def rows(path: Path) -> Path:
    """The same, where a test has several paths."""
    return path


@pytest.fixture(autouse=True)
def what_is_kept_is_the_tests_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the library keeps between runs goes where the test's files are, and structlog is as it was.

    A test that looked at events, or ran a command, leaves it configured: all events would go to stdout. A loader that
    is closed waits for its last records, however busy the CPUs are.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recorder, "_CLOSE_TIMEOUT_S", NEVER_S)
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def nothing_is_left_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process or a thread of the library behind, and ends what it can of it."""
    processes, threads = set(_processes()), set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    while (leaks := _leaks(processes, threads)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if leaks:
        for process in set(_processes()) - processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        pytest.fail(f"{request.node.nodeid} left alive:\n  " + "\n  ".join(leaks), pytrace=False)


def _processes() -> list[psutil.Process]:
    """All children. psutil looks at every process of the machine, which takes long for two looks a test."""
    return psutil.Process().children(recursive=True) if _may_have_children() else []


def _may_have_children() -> bool:
    """What Linux says of it, thread by thread, where it was built to."""
    threads = Path("/proc/self/task")
    try:
        return any((threads / name / "children").read_bytes() for name in os.listdir(threads))
    except OSError:
        return True


def _leaks(processes: set[psutil.Process], threads: set[threading.Thread]) -> list[str]:
    left = [_describe(process) for process in _processes() if process not in processes]
    new_threads = set(threading.enumerate()) - threads
    return left + [f"thread {thread.name!r}" for thread in new_threads if thread.name.startswith("asyncdata")]


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.ZombieProcess:
        return f"process {process.pid}: ended, but was not waited for"
    except psutil.NoSuchProcess:
        return f"process {process.pid}: gone this very moment"


# What the fault tests have reached. It stands here, as with xdist the process that reports collects no tests/faults.


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist gives its figures to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = msgspec.to_builtins(recorded())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that reports takes them; a worker that crashed has none, and is a failure of the run."""
    for figure in msgspec.convert(getattr(node, "workeroutput", {}).get("figures", []), list[Figure]):
        record(figure.name, figure.of, **figure.counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends a run of the fault tests with the table of what was reached; ASYNCDATA_FAULT_FIGURES names a file for it."""
    figures = recorded()
    if not figures:
        return

    terminalreporter.section("figures")
    terminalreporter.write_line(table(figures))
    path = os.environ.get("ASYNCDATA_FAULT_FIGURES")
    if path:
        run = {
            "asyncdata": __version__,
            "python": platform.python_version(),
            "rounds": os.environ.get("ASYNCDATA_FAULT_ROUNDS") or "quick",
            "figures": figures,
        }
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
        terminalreporter.write_line(f"written to {path}")
