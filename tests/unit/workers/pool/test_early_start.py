"""The fork server that a loader's constructor starts: it loads while the trainer imports, and ends when unused."""

import gc
import subprocess
import sys
import threading
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from asyncdata import DataLoader
from asyncdata.errors import ConfigError, SourceError, WorkerError
from asyncdata.workers import popen
from tests.support.executors import NEVER_S
from tests.support.faults import until
from tests.support.loading import ids, row_id
from tests.support.parts import EarlyForkServer, change
from tests.support.worker_fns import Opening

ROW_ID = "tests.support.loading:row_id"
NUM_ROWS = 50  # of the fixture ``path``


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncdata")]


def assert_nothing_is_left() -> None:
    assert psutil.Process().children() == []
    until(lambda: own_threads() == [])


@pytest.mark.thorough
def test_the_tokenize_function_is_loaded_before_the_first_call_and_only_once(path, tmp_path):
    starts = tmp_path / "starts"
    starts.mkdir()
    loader = DataLoader(path, tokenize_fn=Opening("is counted", str(starts)), num_workers=2, shuffle=False)
    until(lambda: list(starts.iterdir()))
    (server,) = psutil.Process().children()
    with loader:
        assert ids(loader.get_next_batch(20)) == list(range(20))
        assert psutil.Process().children() == [server]
    assert len(list(starts.iterdir())) == 1
    assert not server.is_running()


@pytest.mark.parametrize(("progress", "num_threads", "is_closed"), [("none", 1, True), ("log", 2, False)])
def test_a_loader_that_never_starts_leaves_no_process_and_no_thread(path, progress, num_threads, is_closed):
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=2, progress=progress)
    assert len(own_threads()) == num_threads
    if is_closed:
        loader.close()
        loader.close()
    del loader
    gc.collect()
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("source", "function", "knobs", "error"),
    [
        ("rows.jsonl", row_id, {"batch_size": -1}, ConfigError), ("nowhere.jsonl", row_id, {}, SourceError),
        ("rows.jsonl", lambda row: [row["id"]], {}, ConfigError),
        ("rows.jsonl", "tests.support.nowhere:fn", {}, ConfigError),
    ],
)  # fmt: skip
def test_a_constructor_that_fails_leaves_no_process_and_no_thread(path, source, function, knobs, error):
    with pytest.raises(error):
        DataLoader(path.parent / source, tokenize_fn=function, num_workers=2, **knobs)
    assert_nothing_is_left()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_loader_survives_its_thread_and_a_fork_server_that_dies_before_the_first_call(path, is_killed):
    made: list[DataLoader] = []
    knobs: dict[str, Any] = {"tokenize_fn": ROW_ID, "num_workers": 2, "shuffle": False}
    maker = threading.Thread(target=lambda: made.append(DataLoader(path, **knobs)))
    maker.start()
    maker.join()
    if is_killed:
        (server,) = psutil.Process().children()
        server.kill()
        server.wait()
    with made[0] as loader:
        assert ids(loader.get_next_batch(50)) == list(range(50))
        assert loader.statistics().worker_restarts_total == is_killed


PROGRAM = """
import os, signal, sys
{meddle}
from asyncdata import DataLoader
from asyncdata.errors import WorkerError
with DataLoader({path!r}, tokenize_fn={fn!r}, num_workers=2, shuffle=False) as loader, open({out!r}, "w") as out:
    try:
        print([int(sample.tokens[0]) for sample in loader.get_next_batch(20)], file=out)
        for worker in loader.statistics().workers:  # there are some that are forked later, as well
            if {kills} and worker.pid is not None:
                os.kill(worker.pid, signal.SIGKILL)
        print([int(sample.tokens[0]) for sample in loader.get_next_batch(40)], file=out)
    except WorkerError as error:
        print(error, file=out)
"""
THERE_IS_NONE = "AD426 workers cannot be started: sys.executable is {}; set it to the path of a "
WELL = f"{list(range(20))}\n{[*range(20, 50), *range(10)]}\n"
NO_FOLDER = """import tempfile; from asyncdata import DataLoader
sys.path.append(os.getcwd())  # the tokenize function is found there
os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd()); sys.path.insert(0, '')"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("meddle", "closed", "told"),
    [
        *((f"sys.executable = {wrong}", "", THERE_IS_NONE.format(wrong)) for wrong in ("None", "''")),
        ("sys.executable = '/nowhere/python'", "", "AD426 workers cannot be started: [Errno 2] No such file or"),
        ("sys.path.append(b'/bytes')", "", WELL),
        ("import pathlib; sys.path.append(pathlib.Path('/path'))", "", WELL),
        (NO_FOLDER, "", WELL),
        *(("", closed, WELL) for closed in ("<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-")),
    ],
)
def test_what_a_program_did_before_or_the_lack_of_a_standard_descriptor_does_not_disturb_workers_or_is_told(
    path, tmp_path, meddle, closed, told
):
    out = tmp_path / "out"
    code = PROGRAM.format(meddle=meddle, path=str(path), fn=ROW_ID, out=str(out), kills=bool(closed))
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, timeout=NEVER_S, check=True)
    assert out.read_text().startswith(told)
    assert "ulimit" not in out.read_text()
    assert closed or not done.stderr


def test_a_start_that_hangs_is_not_waited_for_and_leaves_no_process(monkeypatch):
    go_on, execute = threading.Event(), popen.execute

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(NEVER_S)
        return execute(*arguments)

    change(monkeypatch, patience_with_an_early_start_s=0.01, execute=slow)
    server = EarlyForkServer()
    server.tell(ROW_ID)
    server.close()
    go_on.set()
    until(lambda: own_threads() == [])
    assert psutil.Process().children() == []


def test_a_fork_server_that_does_not_read_its_message_is_killed(monkeypatch):
    server = EarlyForkServer()
    assert server._is_tried.wait(NEVER_S)  # noqa: SLF001 - that there is a process is not enough: the object must know it
    change(monkeypatch, patience_with_an_early_start_s=0.05)
    (child,) = psutil.Process().children()
    child.suspend()
    server.tell(Opening("x" * 4_000_000))
    assert server.take() is None
    assert not child.is_running()
    server.close()
    until(lambda: own_threads() == [])


def test_without_room_for_a_thread_the_constructor_says_so(path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    told = r"^AD426 the loader cannot start a thread \(can't start new thread\): "
    with pytest.raises(WorkerError, match=told):
        DataLoader(path, tokenize_fn=row_id, num_workers=1)
    loader = DataLoader(path, tokenize_fn=row_id, num_workers=0)
    for _ in range(2):
        with pytest.raises(WorkerError, match=told):
            loader.get_next_batch(1)
    monkeypatch.undo()
    with loader:
        assert len(loader.get_next_batch(1)) == 1
