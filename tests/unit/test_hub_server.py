"""The hub of the tests answers huggingface_hub as the real one does."""

from __future__ import annotations

import pytest

from tests.support.hub_server import HubServer

hub = pytest.importorskip("huggingface_hub")

FILES = {f"data/part-{number}.jsonl": b'{"id": %d}\n' % number * 50 for number in range(5)} | {"README.md": b"# rows\n"}


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_data_set_is_listed_in_pages_and_read_by_ranges():
    with HubServer(token="hf_secret") as server:
        old = server.commit("me/rows", FILES)
        new = server.commit("me/rows", {"data/part-0.jsonl": b"another"})
        api = hub.HfApi(endpoint=server.url, token="hf_secret")

        assert api.dataset_info("me/rows").sha == new
        assert api.dataset_info("me/rows", revision=old).sha == old
        listed = api.list_repo_tree("me/rows", "data", recursive=True, revision=old, repo_type="dataset")
        assert {file.path: file.size for file in listed} == {
            path: len(data) for path, data in FILES.items() if path.startswith("data/")
        }
        assert len([asked for asked in server.asked if "/tree/" in asked]) > 1
        files = hub.HfFileSystem(endpoint=server.url, token="hf_secret", skip_instance_cache=True)
        path = f"datasets/me/rows@{old}/data/part-3.jsonl"
        assert files.cat_file(path, start=5, end=25) == FILES["data/part-3.jsonl"][5:25]
        assert files.cat_file("datasets/me/rows/data/part-0.jsonl") == b"another"


def test_what_is_not_there_or_not_allowed_is_the_hubs_error():
    with HubServer(token="hf_secret") as server:
        server.commit("me/rows", FILES)
        api = hub.HfApi(endpoint=server.url, token="hf_secret")
        with pytest.raises(hub.errors.RevisionNotFoundError):
            api.dataset_info("me/rows", revision="v9")
        with pytest.raises(hub.errors.RepositoryNotFoundError):
            api.dataset_info("me/others")
        with pytest.raises(hub.errors.RepositoryNotFoundError):
            hub.HfApi(endpoint=server.url, token="hf_wrong").dataset_info("me/rows")


def test_a_bucket_is_listed_with_the_hash_of_each_file_and_read_by_ranges():
    with HubServer() as server:
        server.put("me/files", FILES)
        api = hub.HfApi(endpoint=server.url, token=False)
        before = {
            file.path: file.xet_hash for file in api.list_bucket_tree("me/files", recursive=True) if file.type == "file"
        }
        assert set(before) == set(FILES)
        server.put("me/files", {"README.md": b"changed"})
        after = {
            file.path: file.xet_hash for file in api.list_bucket_tree("me/files", recursive=True) if file.type == "file"
        }
        assert {path for path in FILES if after[path] != before[path]} == {"README.md"}
