"""A FIFO, a device, a socket or a folder in place of a file is an error at once: nothing waits for a writer."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    AsyncDataError,
    BadRows,
    Cache,
    ConfigError,
    Outcomes,
    PassRate,
    PromptTokenizeFn,
    SnapshotError,
    SnapshotMismatchError,
)
from asyncdata.integrations.slime import torch_checkpoint
from asyncdata.loader.mix_file import mix_of_file
from asyncdata.prefetch.token_cache.inventory import caches
from asyncdata.telemetry.reader import read
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, order_of, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ROWS = 60


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path must be short
        try:
            sock.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


KINDS = pytest.mark.parametrize("kind", [fifo, folder, device, a_socket])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def in_place_of(path: Path, kind: Callable[[Path], None]) -> None:
    if path.exists():
        path.unlink()
    kind(path)


def ended(call: Callable[[], Any]) -> Any:
    """What a call returns or raises; it must end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except AsyncDataError as error:
            found.append(error)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NEVER_S)
    assert found, "it still waits"
    return found[0]


@KINDS
@pytest.mark.parametrize("name", ["outcomes", "outcomes.1", "outcomes.2"])
def test_the_file_of_outcomes(rows: Path, tmp_path: Path, name: str, kind: Any) -> None:
    settings = Outcomes(path=str(tmp_path / "outcomes"), policy=PassRate(drop_above=0.9))
    with make(rows, outcomes=settings) as loader:
        loader.report(samples := loader.get_next_batch(4), [1.0] * len(samples))
        state = loader.state_dict()
    (tmp_path / "outcomes").unlink()
    in_place_of(tmp_path / name, kind)

    with make(rows, outcomes=settings) as loader:
        error = ended(lambda: loader.load_state_dict(state))
        assert isinstance(error, SnapshotError | SnapshotMismatchError)
        assert "AD606" in str(error)


@KINDS
def test_a_snapshot(rows: Path, tmp_path: Path, kind: Any) -> None:
    kind(tmp_path / "snapshot")

    with make(rows) as loader:
        assert isinstance(ended(lambda: loader.restore(tmp_path / "snapshot")), SnapshotError)
        assert isinstance(ended(lambda: loader.save(tmp_path / "snapshot")), SnapshotError)


@KINDS
def test_the_file_of_quarantine(rows: Path, tmp_path: Path, kind: Any) -> None:
    kind(tmp_path / "bad.jsonl")
    bad = BadRows(policy="quarantine", path=str(tmp_path / "bad.jsonl"))

    error = ended(lambda: make(rows, bad_rows=bad).close())
    assert isinstance(error, ConfigError)
    assert "AD605" in str(error)


@KINDS
@pytest.mark.parametrize("suffix", ["toml", "yaml", "json"])
def test_the_file_of_a_mixture(tmp_path: Path, suffix: str, kind: Any) -> None:
    kind(tmp_path / f"mix.{suffix}")

    error = ended(lambda: mix_of_file(tmp_path / f"mix.{suffix}"))
    assert isinstance(error, ConfigError)
    assert "AD470" in str(error)


@KINDS
def test_a_row_index(rows: Path, tmp_path: Path, kind: Any) -> None:
    knobs = {"shuffle": "full", "cache": Cache(folder=str(tmp_path / "cache"))}
    with make(rows, **knobs) as loader:
        before = ids(loader.get_next_batch(NUM_ROWS))
    (index,) = (tmp_path / "cache").rglob("*.index")
    in_place_of(index, kind)

    def again() -> Any:
        with make(rows, **knobs) as loader:
            return ids(loader.get_next_batch(NUM_ROWS))

    found = ended(again)
    assert found == before or "AD611" in str(found)


@KINDS
@pytest.mark.parametrize("name", ["*.arrow", "about.json"])
def test_a_file_of_the_token_cache(rows: Path, tmp_path: Path, name: str, kind: Any) -> None:
    pytest.importorskip("pyarrow")
    knobs: dict[str, Any] = {"tokenize_fn": versioned, "cache": Cache(tokens=str(tmp_path / "tokens"))}
    with make(rows, **knobs) as loader:
        loader.get_next_batch(NUM_ROWS)
    for found in list((tmp_path / "tokens").rglob(name)):
        in_place_of(found, kind)

    def again() -> Any:
        with make(rows, **knobs) as loader:
            return ids(loader.get_next_batch(NUM_ROWS))

    found = ended(again)
    assert found == order_of(rows) or isinstance(found, AsyncDataError), found
    ended(lambda: caches(str(tmp_path / "tokens")))


def versioned(row: dict[str, Any]) -> list[int]:
    return [row["id"]]


versioned.version = 1  # type: ignore[attr-defined]


@KINDS
def test_a_file_of_telemetry(rows: Path, tmp_path: Path, kind: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    kind(run / "rank-00000-0000.jsonl")

    def record() -> Any:
        with make(rows, telemetry=str(run)) as loader:
            return ids(loader.get_next_batch(NUM_ROWS))

    assert ended(record) == order_of(rows)
    assert isinstance(ended(lambda: read(run)), AsyncDataError | OSError)


@KINDS
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_tokenizer(tmp_path: Path, name: str, kind: Any) -> None:
    kind(tmp_path / name)

    error = ended(lambda: PromptTokenizeFn(str(tmp_path)).resolve())
    assert isinstance(error, ConfigError)


@KINDS
def test_a_checkpoint_of_slime(tmp_path: Path, kind: Any) -> None:
    pytest.importorskip("torch")
    kind(tmp_path / "state.pt")

    error = ended(lambda: torch_checkpoint.read(str(tmp_path / "state.pt")))
    assert isinstance(error, SnapshotError)
    assert "AD602" in str(error)
