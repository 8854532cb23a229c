"""A FIFO, a device, a socket or a folder in place of a file is an error at once: nothing waits for a writer."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import BadRows, Cache, PromptTokenizeFn
from asyncdata.errors import AsyncDataError, ConfigError, SnapshotError
from asyncdata.integrations.slime import torch_data
from asyncdata.telemetry.reader import read
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, order_of, write_rows
from tests.support.parts import mix_of_file

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = 60


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path must be short
        try:
            sock.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def use(rows: Path, call: Callable[[Any, Path], Any], **knobs: Any) -> Any:
    with make(rows, **knobs) as loader:
        return call(loader, rows.parent)


def delivered(rows: Path, **knobs: Any) -> list[int]:
    return use(rows, lambda loader, _: ids(loader.get_next_batch(NUM_ROWS)), **knobs)


def quarantined(rows: Path) -> None:
    make(rows, bad_rows=BadRows(policy="quarantine", path=str(rows.parent / "bad.jsonl"))).close()


def tokenizer(rows: Path) -> None:
    PromptTokenizeFn(str(rows.parent)).resolve()


def by_index(rows: Path) -> list[int]:
    return sorted(delivered(rows, shuffle="full", cache=Cache(folder=str(rows.parent / "cache"))))


def slimes_state(rows: Path) -> None:
    torch_data.read(str(rows.parent / "state.pt"))


class Case(NamedTuple):
    """A file that something else is in place of.

    :ivar name: of the file; a pattern, where it is made by ``before``.
    :ivar call: what reads or writes it, given the rows.
    :ivar error: what that is; None: it may be done without.
    """

    name: str
    call: Callable[[Path], Any]
    error: type[Exception] | None = None
    code: str = ""
    before: Callable[[Path], Any] = lambda rows: None


def mixture(name: str) -> Case:
    return Case(name, lambda rows: mix_of_file(rows.parent / name), ConfigError, "AD470")


CASES = {
    "a snapshot to read": Case(
        "snapshot", lambda rows: use(rows, lambda loader, folder: loader.restore(folder / "snapshot")), SnapshotError
    ),
    "a snapshot to write": Case(
        "snapshot", lambda rows: use(rows, lambda loader, folder: loader.save(folder / "snapshot")), SnapshotError
    ),
    "quarantine": Case("bad.jsonl", quarantined, ConfigError, "AD605"),
    **{f"a mixture in {suffix}": mixture(f"mix.{suffix}") for suffix in ("toml", "yaml", "json")},
    "a row index": Case("cache/**/*.index", by_index, before=by_index),
    "its rows": Case("cache/**/*.places", by_index, before=by_index),
    "telemetry to write": Case(
        "run/rank-00000-0000.jsonl",
        lambda rows: delivered(rows, telemetry=str(rows.parent / "run")),
        before=lambda rows: (rows.parent / "run").mkdir(),
    ),
    "a tokenizer": Case("tokenizer.json", tokenizer, ConfigError),
    "a tokenizer's settings": Case("tokenizer_config.json", tokenizer, ConfigError),
    "slime's state": Case("state.pt", slimes_state, SnapshotError, "AD602", lambda rows: pytest.importorskip("torch")),
}


def ended(call: Callable[[Path], Any], rows: Path) -> Any:
    """What a call returns or raises; it must end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call(rows))
        except (AsyncDataError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NEVER_S)
    assert found, "it still waits"
    return found[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(CASES)
        for kind in (os.mkfifo, (Path.mkdir, device, a_socket)[number % 3])
    ],
)
def test_what_is_no_file_is_an_error_at_once_or_done_without(tmp_path, name, kind):
    case, rows = CASES[name], write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    case.before(rows)
    paths = list(tmp_path.glob(case.name)) or [tmp_path / case.name]
    for path in paths:
        path.unlink(missing_ok=True)
        kind(path)

    found = ended(case.call, rows)

    if case.error is not None:
        assert isinstance(found, case.error), found
        assert case.code in str(found)
    else:
        assert isinstance(found, AsyncDataError) or sorted(found) == list(range(NUM_ROWS))
    if name == "telemetry to write":
        assert found == order_of(rows)
        assert isinstance(ended(lambda _: read(tmp_path / "run"), rows), AsyncDataError | OSError)
