"""A fault in any callback of the service ends every call that waits, and every later one, with an error."""

from __future__ import annotations

import ast
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import asyncdata
from asyncdata import (
    AsyncDataError,
    Cache,
    DataLoader,
    IterableSource,
    Mix,
    Part,
    Ranks,
    RowShuffle,
    SoftPacking,
)
from asyncdata.core.import_path import resolve_path
from asyncdata.prefetch.node_share import folder as folders
from asyncdata.prefetch.node_share.folder import NodeFolder
from asyncdata.prefetch.row_index.builder import Indexer
from asyncdata.prefetch.token_cache import cache as token_cache
from tests.support.loading import NEVER_S, SHUFFLE, write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.thorough, pytest.mark.faults]

NUM_ROWS = 300
MANY = 400
"""Batches of eight in which any callback has been called."""

PREFETCH = "asyncdata.prefetch"
FULL = {"shuffle": "full", "cache": Cache(folder="")}


def numbers() -> Iterator[dict[str, Any]]:
    yield from ({"id": number} for number in range(NUM_ROWS))


class Way(NamedTuple):
    """How a loader is made that has the callback called, and at which of its calls it fails."""

    knobs: dict[str, Any] = {}
    source: str = "rows"
    is_cached: bool = False
    num_ranks: int = 1
    has_run_before: bool = False
    at: tuple[int, ...] = (1,)


STORED: dict[str, Any] = {"is_cached": True}
CALLBACKS: dict[str, Way] = {
    "asyncdata.loader.autotune.tuner:Tuner._on_change": Way({"buffer_size": None}, at=(1, 9)),
    "asyncdata.loader.service:Service._begin": Way(),
    f"{PREFETCH}.canaries:Canaries._on_scanned": Way(),
    f"{PREFETCH}.canaries:Canaries._on_tokenized": Way(),
    f"{PREFETCH}.mixture_producer:MixtureProducer.pump": Way(source="mix", at=(1, 9)),
    f"{PREFETCH}.node_share.links:Links._listen": Way(num_ranks=2),
    f"{PREFETCH}.node_share.sharing:Sharing._on_word": Way(num_ranks=2, at=(1, 3)),
    f"{PREFETCH}.producer:Producer._on_shared": Way(num_ranks=2),
    f"{PREFETCH}.producer:Producer._on_tokenized": Way(at=(1, 4)),
    f"{PREFETCH}.producer:Producer._submit_claimed": Way(num_ranks=2),
    f"{PREFETCH}.producer:Producer.pump": Way(at=(1, 4, 9)),
    f"{PREFETCH}.row_index.builder:Indexer._on_reply": Way(FULL),
    f"{PREFETCH}.token_cache.cache:TokenCache._on_listed": Way(**STORED, has_run_before=True),
    f"{PREFETCH}.token_cache.cache:TokenCache._on_names": Way(**STORED),
    f"{PREFETCH}.token_cache.writer:Recorder._on_committed": Way(**STORED),
    f"{PREFETCH}.token_cache.writer:Recorder._on_evicted": Way(**STORED),
    f"{PREFETCH}.token_cache.writer:Recorder._on_stored": Way(**STORED),
    f"{PREFETCH}.windows.block_windows:BlockWindows._on_scanned": Way(at=(1, 3)),
    f"{PREFETCH}.windows.indexed_windows:IndexedWindows._fill_waiting": Way(FULL),
    f"{PREFETCH}.windows.indexed_windows:IndexedWindows._on_permuted": Way(
        FULL | {"shuffle": RowShuffle(method="slime")}
    ),
    f"{PREFETCH}.windows.planned_epochs:PlannedRows._on_reply": Way(
        FULL | {"packing": SoftPacking(max_length=16), "plan_packs": True}, at=(1, 2)
    ),
    f"{PREFETCH}.windows.stream_windows:StreamWindows._read": Way(source="stream"),
}
OTHERS = {
    "asyncdata.loader.service:Service._guarded": "it passes on the faults of others, as the next three do",
    "asyncdata.loader.service:Service._main": "",
    "asyncdata.loader.service:Service._run": "",
    "asyncdata.loader.service:Service._run_part": "",
    f"{PREFETCH}.node_share.links:Links._close": "called when the loader is closed",
    f"{PREFETCH}.producer:Producer._fail": "it passes on a fault",
    f"{PREFETCH}.row_index.builder:Indexer._files": "called in _on_reply, as the next one is",
    f"{PREFETCH}.row_index.builder:Indexer._location": "",
    f"{PREFETCH}.token_cache.worker:CacheWorker._digest": "called by workers",
    f"{PREFETCH}.windows.stream_windows:StreamWindows._check": "called by the thread that reads",
}


def callbacks() -> set[str]:
    """The methods that classes of the service hand over without calling them."""
    root = Path(asyncdata.__file__).parent
    files = [*root.glob("prefetch/**/*.py"), *root.glob("loader/autotune/*.py"), root / "loader/service.py"]
    found = set()
    for file in files:
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for cls in [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]:
            functions = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            methods = {node.name for node in functions if not node.decorator_list}
            called = {id(node.func) for node in ast.walk(cls) if isinstance(node, ast.Call)}
            for node in ast.walk(cls):
                is_own = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in methods
                if isinstance(node, ast.Attribute) and is_own and id(node) not in called:
                    found.add(f"{module}:{cls.name}.{node.attr}")
    return found


def test_every_callback_of_the_service_is_tried() -> None:
    assert callbacks() == CALLBACKS.keys() | OTHERS.keys()


class Fault:
    """Raises at call ``number`` of a method, once.

    :ivar has_come: whether it did.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str, number: int) -> None:
        self.has_come = False
        self._lock, self._left = threading.Lock(), number
        owner, _, name = path.rpartition(".")
        method = getattr(resolve_path(owner), name)

        def fail(*args: Any, **others: Any) -> Any:
            with self._lock:
                self._left -= 1
                is_now = self._left == 0
            if is_now:
                self.has_come = True
                raise RuntimeError("injected")

            return method(*args, **others)

        monkeypatch.setattr(resolve_path(owner), name, fail)


def outcome(call: Callable[[], object]) -> str:
    """How a call ends."""
    try:
        call()
    except AsyncDataError as error:
        return str(error)

    return ""


def in_threads(calls: list[Callable[[], object]]) -> list[str]:
    """How calls end that are made at the same time; a call that never ends fails the test."""
    found = [""] * len(calls)

    def run(number: int) -> None:
        found[number] = outcome(calls[number])

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER_S)
    assert not any(thread.is_alive() for thread in threads), "a call still waits"
    return found


def source_of(way: Way, folder: Path) -> Any:
    rows = write_rows(folder / "rows.jsonl", NUM_ROWS)
    if way.source == "mix":
        return Mix({"one": Part(rows), "two": Part(rows, weight=2)})

    return IterableSource(numbers) if way.source == "stream" else rows


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Way], list[DataLoader]]]:
    """Opens the loaders of a way, in this process, one for each rank."""
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ad-"))  # a socket's path must be short
        monkeypatch.setattr(folders, "SHARED_MEMORY", memory)
        source: Any = None

        def open_loaders(way: Way) -> list[DataLoader]:
            nonlocal source
            source = source if source is not None else source_of(way, tmp_path)
            cache = Cache(folder=str(tmp_path / "cache"), tokens=True, max_tokens_bytes=1 << 30)
            knobs = {"shuffle": SHUFFLE, "num_workers": 0, "buffer_size": 50, "timeout_s": NEVER_S, "batch_size": 8}
            knobs["limits"] = {"row_timeout_s": 2}  # so long a rank waits for another one that has failed
            knobs |= way.knobs | ({"cache": cache} if way.is_cached else {})
            if way.source == "mix":
                knobs["shuffle"] = SHUFFLE
            if way.num_ranks > 1:
                ranks = [Ranks(rank=rank, world_size=way.num_ranks, share_node=True) for rank in range(way.num_ranks)]
                return [stack.enter_context(DataLoader(source, tokenize_fn=versioned, ranks=r, **knobs)) for r in ranks]

            return [stack.enter_context(DataLoader(source, tokenize_fn=versioned, **knobs))]

        yield open_loaders


def versioned(row: dict[str, Any]) -> dict[str, Any]:
    return row_id(row)


versioned.version = 1  # type: ignore[attr-defined]


def drain(loader: DataLoader) -> Callable[[], None]:
    """Take batches until there is an error."""

    def take() -> None:
        left = MANY
        while left:
            for _ in loader:
                left -= 1
                if not left:
                    break

    return take


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "at"), [(path, at) for path, way in CALLBACKS.items() for at in way.at])
def test_a_fault_in_a_callback_ends_every_call(
    path: str, at: int, num_workers: int, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = CALLBACKS[path]
    way = way._replace(knobs={**way.knobs, "num_workers": num_workers})
    if way.has_run_before:
        monkeypatch.setattr(token_cache, "NAMES_PER_REQUEST", 1)  # the others are asked for later
        (first,) = opened(way)
        drain(first)()
        first.close()
    fault = Fault(monkeypatch, path, at)
    loaders = opened(way)
    before = loaders[0].state_dict()

    found = in_threads([drain(loader) for loader in loaders] * (2 if len(loaders) == 1 else 1))
    assert fault.has_come
    assert any("injected" in text for text in found), found
    if len(loaders) == 1:
        (loader,) = loaders
        assert all("injected" in text for text in found), found
        assert "injected" in outcome(lambda: next(iter(loader)))
        loader.load_state_dict(before)
        assert "injected" in outcome(lambda: next(iter(loader))), "also after a restart"


def test_a_call_that_waits_for_the_number_of_rows_ends_too(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, f"{PREFETCH}.row_index.builder:Indexer._on_reply", 1)
    (loader,) = opened(Way(FULL))

    found = in_threads([loader.num_rows, loader.num_rows, lambda: loader.seek(0, 3)])
    assert fault.has_come
    assert all("injected" in text for text in found), found


def test_a_call_that_waits_for_the_number_of_rows_ends_with_the_loader(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come = threading.Event()
    monkeypatch.setattr(Indexer, "_on_reply", lambda *_: has_come.set())  # the index is never complete
    (loader,) = opened(Way(FULL))

    def close() -> None:
        has_come.wait(NEVER_S)
        loader.close()

    number, _ = in_threads([loader.num_rows, close])
    assert "closed" in number


@pytest.mark.parametrize("num_bytes", [0, 1, 40])
def test_a_reply_of_another_rank_that_is_cut_off_is_made_again(
    num_bytes: int, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_cut = NodeFolder.read, [0]

    def cut(folder: NodeFolder, claim: str) -> memoryview | None:
        body = read(folder, claim)
        if body is None or len(body) <= num_bytes:
            return body

        num_cut[0] += 1
        return body[:num_bytes]

    monkeypatch.setattr(NodeFolder, "read", cut)
    loaders = opened(Way(num_ranks=2))

    assert in_threads([lambda loader=loader: [None for _ in loader] for loader in loaders]) == ["", ""]
    assert num_cut[0]
