"""One order D, wherever the rows are (files, S3, Google, http, a hub) and whatever reads them (processes here, Ray)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdata import JsonlSource, ParquetSource, RayExecutor
from tests.integration.test_object_stores import DATA, DIGEST, NUM_ROWS, by_http, digest_of, on_file, on_google, on_s3
from tests.support.examples import each_pair
from tests.support.parquet_files import write
from tests.support.ray_cluster import RayNodes
from tests.support.servers import HubServer
from tests.support.stores import SECRET

Place = Callable[[Path, str, bytes], JsonlSource]

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

TOKEN = "hf_secretofthetests"
# A change of one of these changes the order of every run that exists.
GOLDEN = {"rows.jsonl": DIGEST, "rows.parquet": "257bcaa1da17d574"}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with pytest.MonkeyPatch.context() as patch, HubServer(TOKEN) as server:
        patch.setenv("HF_HUB_OFFLINE", "0")  # for workers
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture(scope="module")
def nodes(hub) -> Iterator[RayNodes]:
    """They have the environment of the hub."""
    pytest.importorskip("ray")
    from tests.support.ray_cluster import two_nodes

    with two_nodes() as found:
        yield found


PLACES = ["file", "s3", "gs", "http", "hf"]
WORKERS = ["inline", "processes", "ray"]


@pytest.fixture
def place(request, hub) -> Place:
    def on_hub(folder: Path, name: str, data: bytes) -> JsonlSource:
        hub.commit(f"me/{folder.name}", {name: data})
        options = {"endpoint": hub.url, "token": TOKEN}
        return JsonlSource(f"hf://datasets/me/{folder.name}/{name}", storage_options=options)

    return {"file": on_file, "s3": on_s3, "gs": on_google, "http": by_http, "hf": on_hub}[request.param]


@pytest.fixture
def workers(request) -> dict[str, Any]:
    """The knobs; Ray's actors are two, of which each node has room for one."""
    if request.param == "ray":
        request.getfixturevalue("nodes")
        return {"num_workers": None, "executor": RayExecutor(num_workers=2, num_cpus=2)}
    return {"num_workers": 2 if request.param == "processes" else 0}


@pytest.mark.parametrize(
    ("place", "workers", "name"), each_pair(PLACES, WORKERS, GOLDEN.keys()), indirect=["place", "workers"]
)
def test_the_order_is_the_same_everywhere(place, workers, name, tmp_path):
    if name.endswith(".jsonl"):
        source = place(tmp_path, name, DATA)
    else:
        pytest.importorskip("pyarrow")
        found = place(tmp_path, name, write(tmp_path / "written", NUM_ROWS).read_bytes())
        source = ParquetSource(found.paths, storage_options=found.storage_options)
    assert digest_of(source, **workers) == GOLDEN[name]


def test_no_secret_of_a_store_is_in_a_log_of_ray(nodes, tmp_path):
    """Actors get the options of a store as an argument; that is not written to a disk."""
    import ray

    digest_of(on_s3(tmp_path, "rows.jsonl", DATA), num_workers=None, executor=RayExecutor(num_workers=1))
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
    texts = [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    assert len(texts) > 5
    assert not any(SECRET.encode() in text for text in texts)
