"""The fork server that a loader's constructor starts: it loads while the trainer imports, and ends when unused."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from asyncdata import ConfigError, DataLoader, SourceError, WorkerError
from asyncdata.workers.pool import early_start
from asyncdata.workers.pool.early_start import EarlyForkServer
from tests.support import worker_fns
from tests.support.executors import NEVER_S
from tests.support.loading import ids, write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 50)


def until(condition: Callable[[], object]) -> None:
    """Wait for a state of another process."""
    deadline = time.monotonic() + NEVER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdata")]


@pytest.mark.thorough
def test_the_tokenize_function_is_loaded_before_the_first_call_and_only_once(path, tmp_path):
    starts = tmp_path / "starts"
    starts.mkdir()
    function = worker_fns.Opening("is counted", str(starts))
    with_loader = DataLoader(path, tokenize_fn=function, num_workers=2, shuffle=False)
    until(lambda: list(starts.iterdir()))
    (server,) = psutil.Process().children()
    with with_loader as loader:
        assert ids(loader.get_next_batch(20)) == list(range(20))
        assert psutil.Process().children() == [server]

    assert len(list(starts.iterdir())) == 1
    assert not server.is_running()


@pytest.mark.parametrize(("progress", "num_threads"), [("none", 1), ("log", 2)])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_loader_that_never_starts_leaves_no_process_and_no_thread(path, progress, num_threads, is_closed):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2, progress=progress)
    assert len(own_threads()) == num_threads

    if is_closed:
        loader.close()
        loader.close()
    del loader
    gc.collect()
    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


@pytest.mark.parametrize(
    ("source", "function", "knobs", "error"),
    [
        ("rows.jsonl", row_id, {"batch_size": -1}, ConfigError),
        ("nowhere.jsonl", row_id, {}, SourceError),
        ("rows.jsonl", lambda row: [row["id"]], {}, ConfigError),
        ("rows.jsonl", "tests.support.nowhere:fn", {}, ConfigError),
    ],
)
def test_a_constructor_that_fails_leaves_no_process_and_no_thread(path, source, function, knobs, error):
    with pytest.raises(error):
        DataLoader(path.parent / source, tokenize_fn=function, num_workers=2, **knobs)

    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


@pytest.mark.parametrize("num_workers", [0, -1, "two", 1.5])
def test_without_workers_and_for_an_invalid_number_of_them_no_process_is_started(num_workers):
    assert EarlyForkServer.for_workers(num_workers) is None


def test_a_fork_server_that_dies_before_the_first_call_is_replaced(path):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2, shuffle=False)
    (server,) = psutil.Process().children()
    server.kill()
    server.wait()
    with loader:
        assert ids(loader.get_next_batch(50)) == list(range(50))
        assert loader.statistics().worker_restarts_total == 1


def test_a_loader_created_in_a_thread_that_ends_keeps_its_workers(path):
    made: list[DataLoader] = []
    function = "tests.support.tokenize_fns:row_id"
    maker = threading.Thread(
        target=lambda: made.append(DataLoader(path, tokenize_fn=function, num_workers=2, shuffle=False))
    )
    maker.start()
    maker.join()
    with made[0] as loader:
        assert ids(loader.get_next_batch(50)) == list(range(50))
        assert loader.statistics().worker_restarts_total == 0


def test_slow_modules_are_imported_after_the_fork_server_has_started():
    heavy = "{'numpy', 'structlog', 'tokenizers', 'asyncio', 'jinja2'}"
    code = f"import sys; from asyncdata import DataLoader, PromptTokenizeFn; assert not {heavy} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_that_fails_to_open_is_an_error_at_every_call(path, tmp_path):
    function = worker_fns.Opening("waits and raises", str(tmp_path))
    with DataLoader(path, tokenize_fn=function, num_workers=2, timeout_s=NEVER_S) as loader:
        (tmp_path / "open").touch()
        for _ in range(2):
            with pytest.raises(WorkerError, match="^AD426 the tokenize function cannot be opened: FileNotFoundError"):
                loader.get_next_batch(1)


MAKES_ONE = """
import sys
{meddle}
from asyncdata import DataLoader, WorkerError
with DataLoader({path!r}, tokenize_fn="tests.support.tokenize_fns:row_id", num_workers=1, shuffle=False) as loader:
    try:
        print([sample.tokens.tolist() for sample in loader.get_next_batch(2)])
    except WorkerError as error:
        print(error)
"""


def printed_by_one_made_after(meddle: str, path: Path) -> str:
    """What a program prints that creates a loader after ``meddle``, and asks it for two samples."""
    code = MAKES_ONE.format(meddle=meddle, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=NEVER_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


THERE_IS_NONE = "AD426 workers cannot be started: sys.executable is {}; set it to the path of a "
NO_FOLDER = """import os, tempfile; from asyncdata import DataLoader
sys.path.append(os.getcwd())  # the tokenize function is found there
os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd()); sys.path.insert(0, '')"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("meddle", "told"),
    [
        ("sys.executable = None", THERE_IS_NONE.format(None)),
        ("sys.executable = ''", THERE_IS_NONE.format("''")),
        ("sys.executable = '/nowhere/python'", "AD426 workers cannot be started: [Errno 2] No such file or directory"),
        ("sys.path.append(b'/bytes')", "[[0], [1]]\n"),
        ("import pathlib; sys.path.append(pathlib.Path('/path'))", "[[0], [1]]\n"),
        (NO_FOLDER, "[[0], [1]]\n"),
    ],
)
def test_what_the_program_did_before_does_not_disturb_workers_or_the_first_call_says_what_it_was(path, meddle, told):
    found = printed_by_one_made_after(meddle, path)

    assert found.startswith(told)
    assert "ulimit" not in found


def test_a_start_that_fails_with_any_error_is_not_waited_for(monkeypatch):
    def never(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(early_start, "execute", never)
    server = EarlyForkServer()
    server.tell("tests.support.tokenize_fns:row_id")

    assert server.take() is None
    server.close()
    until(lambda: own_threads() == [])


def test_a_start_that_hangs_is_not_waited_for_and_leaves_no_process(monkeypatch):
    go_on, execute = threading.Event(), early_start.execute

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(NEVER_S)
        return execute(*arguments)

    monkeypatch.setattr(early_start, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(early_start, "execute", slow)
    server = EarlyForkServer()
    server.tell("tests.support.tokenize_fns:row_id")
    server.close()
    go_on.set()
    until(lambda: own_threads() == [])
    assert psutil.Process().children() == []


def test_a_fork_server_that_does_not_read_its_message_is_killed(monkeypatch):
    server = EarlyForkServer()
    assert server._is_tried.wait(NEVER_S)  # noqa: SLF001 - that there is a process is not enough: the object must know it
    monkeypatch.setattr(early_start, "_PATIENCE_S", 0.05)
    (child,) = psutil.Process().children()
    child.suspend()
    server.tell(worker_fns.Opening("x" * 4_000_000))

    assert server.take() is None
    assert not child.is_running()
    server.close()
    until(lambda: own_threads() == [])


def test_without_room_for_a_thread_the_constructor_says_so(path, monkeypatch):
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(WorkerError, match=r"^AD426 the loader cannot start a thread \(can't start new thread\): "):
        DataLoader(path, tokenize_fn=row_id, num_workers=1)
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=0)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"^AD426 the loader cannot start a thread \(can't start new thread\): "):
            loader.get_next_batch(1)
    monkeypatch.undo()
    with loader:
        assert len(loader.get_next_batch(1)) == 1


WRITES_DOWN = """
import os, signal
from asyncdata import DataLoader
with DataLoader({path!r}, tokenize_fn="tests.support.tokenize_fns:row_id", num_workers=2, shuffle=False) as loader:
    found = [sample.tokens.tolist() for sample in loader.get_next_batch(20)]
    for worker in loader.statistics().workers:  # there are some that are forked later, as well
        if worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
    found += [sample.tokens.tolist() for sample in loader.get_next_batch(40)]
open({out!r}, "w").write(str(found))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_program_that_was_started_without_its_standard_descriptors_has_workers(path, tmp_path, closed):
    out = tmp_path / "out"
    code = WRITES_DOWN.format(path=str(path), out=str(out))
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], timeout=NEVER_S, check=True)

    assert out.read_text() == str([[number % 50] for number in range(60)])
