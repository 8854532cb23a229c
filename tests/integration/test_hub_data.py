"""Data of the hub, and of what fsspec knows: the same D as of local files, of one commit, without a secret shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData, JsonlSource, SnapshotMismatchError, SourceChangedError
from tests.support.hub_server import HubServer
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("huggingface_hub")

TOKEN = "hf_verysecrettoken"
NUM_ROWS = 400


@pytest.fixture
def hub(monkeypatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for workers
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer(TOKEN) as server:
        yield server


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    return [
        write_rows(tmp_path / f"part-{part}.jsonl", NUM_ROWS, {i: {"id": 1000 * part + i} for i in range(NUM_ROWS)})
        for part in range(2)
    ]


def files(paths: list[Path]) -> dict[str, bytes]:
    return {f"data/{path.name}": path.read_bytes() for path in paths} | {"README.md": b"# rows\n"}


def source(server: HubServer, address: str = "hf://datasets/me/rows/data/*.jsonl") -> JsonlSource:
    return JsonlSource(address, storage_options={"endpoint": server.url, "token": TOKEN})


def make(data: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "epochs": 2, "num_workers": 0, "timeout_s": NEVER_S}
    return DataLoader(data, **settings | knobs)


def rest_of(loader: DataLoader) -> list[int]:
    found: list[int] = []
    while True:
        try:
            samples = loader.get_next_batch(50)
        except EndOfData as end:
            return found + [int(sample.tokens[0]) for sample in end.samples]

        found += [int(sample.tokens[0]) for sample in samples]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "address",
    ["hf://datasets/me/rows@main/data/*.jsonl", "hf://datasets/me/rows/data", "hf://buckets/me/files/data/*.jsonl"],
)
def test_d_is_that_of_the_local_files(hub, paths, address, num_workers):
    hub.commit("me/rows", files(paths))
    hub.put("me/files", files(paths))
    with make(source(hub, address), num_workers=num_workers) as loader:
        assert rest_of(loader) == order_of(paths, 2)


def test_a_run_stays_at_the_commit_that_main_was_at_its_start(hub, paths):
    sha = hub.commit("me/rows", files(paths))
    with make(source(hub)) as loader:
        first = [int(sample.tokens[0]) for sample in loader.get_next_batch(10)]
        hub.commit("me/rows", {path: data.replace(b"x", b"y") for path, data in files(paths).items()})
        found = first + rest_of(loader)
        state = loader.state_dict()

    assert found == order_of(paths, 2)
    assert sha in json.dumps(state)
    assert TOKEN not in json.dumps(state)


def test_a_resume_on_a_moved_main_is_refused_with_both_commits_and_the_way_back(hub, paths):
    old = hub.commit("me/rows", files(paths))
    with make(source(hub)) as loader:
        first = [int(sample.tokens[0]) for sample in loader.get_next_batch(10)]
        state = loader.state_dict()
    hub.commit("me/rows", {path: data.replace(b"x", b"y") for path, data in files(paths).items()})
    with make(source(hub)) as loader, pytest.raises(SnapshotMismatchError, match=f"hf://datasets/me/rows@{old}"):
        loader.load_state_dict(state)

    with make(source(hub, f"hf://datasets/me/rows@{old}/data/*.jsonl")) as loader:
        loader.load_state_dict(state)
        assert first + rest_of(loader) == order_of(paths, 2)


def test_a_resume_on_a_newer_commit_with_the_same_files_continues(hub, paths):
    hub.commit("me/rows", files(paths))
    with make(source(hub)) as loader:
        first = [int(sample.tokens[0]) for sample in loader.get_next_batch(10)]
        state = loader.state_dict()
    hub.commit("me/rows", files(paths) | {"README.md": b"# more words\n"})
    with make(source(hub)) as loader:
        loader.load_state_dict(state)
        assert first + rest_of(loader) == order_of(paths, 2)


def test_a_file_of_a_bucket_that_is_replaced_in_a_run_is_named_with_both_identities(hub, paths):
    hub.put("me/files", files(paths))
    with make(source(hub, "hf://buckets/me/files/data/*.jsonl"), buffer_size=10) as loader:
        loader.get_next_batch(10)
        hub.put("me/files", {path: data.replace(b"x", b"y") for path, data in files(paths).items()})
        hub.end_signatures()
        with pytest.raises(SourceChangedError, match=r"AD322 hf://buckets/me/files/data/part-\d.jsonl") as caught:
            rest_of(loader)

    assert TOKEN not in str(caught.value)
    assert "Signature" not in str(caught.value)


def test_what_fsspec_knows_is_read_as_well(paths):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/bucket/{name}": data for name, data in files(paths).items()})
    try:
        with make("memory://bucket/data/*.jsonl") as loader:
            assert rest_of(loader) == order_of(paths, 2)
    finally:
        memory.store.clear()
