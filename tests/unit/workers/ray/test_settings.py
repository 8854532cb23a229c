"""What users say of the workers on a cluster, and what is refused before any actor starts."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import types

import msgspec
import pytest

from asyncdata import ConfigError, DataLoader, LoaderConfig, RayExecutor
from asyncdata.core.cache_messages import CacheJob
from asyncdata.core.messages import Job
from asyncdata.core.specs import ReaderSpec
from asyncdata.loader.cluster import check_cluster
from asyncdata.workers.ray import cluster, starting
from asyncdata.workers.ray.settings import local_workers_of
from tests.support.loading import write_rows
from tests.support.tokenize_fns import row_id

JOB = Job(files=[], tokenize=None, max_row_bytes=1, block_bytes=1, slack_bytes=0)
CONFIG = LoaderConfig.of({"executor": {"num_workers": 3}})


def test_import_asyncdata_does_not_import_ray():
    code = "import sys, asyncdata; asyncdata.RayExecutor(), asyncdata.DataLoader; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_an_executor_may_be_a_dict_as_in_yaml():
    assert CONFIG.executor == RayExecutor(num_workers=3)


@pytest.mark.parametrize("executor", [RayExecutor(local_workers=2), {"local_workers": 2}])
def test_local_workers_are_known_before_the_settings_are_checked(executor):
    assert local_workers_of(executor) == 2
    assert local_workers_of({}) == local_workers_of(RayExecutor()) == 0


def test_ray_client_is_refused():
    with pytest.raises(ConfigError, match=r"^AD490 .*ray job submit"):
        RayExecutor(address="ray://head:10001")


def test_a_process_that_is_connected_by_ray_client_is_refused(monkeypatch):
    client = types.SimpleNamespace(ray=types.SimpleNamespace(is_connected=lambda: True))
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.client", client)
    with pytest.raises(ConfigError, match=r"^AD490 this process is connected by Ray Client"):
        cluster.connect(RayExecutor())


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.delitem(sys.modules, "ray.util.client", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"^AD491 .*running Ray instance.*ray start --head.*or set RAY_ADDRESS"):
        cluster.connect(RayExecutor())


@pytest.mark.parametrize("is_set", [True, False])
def test_an_address_at_which_none_listens_is_refused_at_once_by_its_name(monkeypatch, is_set):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False))  # has no init
    monkeypatch.delitem(sys.modules, "ray.util.client", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address if is_set else "other:1")
    with pytest.raises(ConfigError, match=r"^AD491 .* or name one that runs; or leave") as caught:
        cluster.connect(RayExecutor() if is_set else RayExecutor(address=address))

    assert (f"at RAY_ADDRESS={address}: " if is_set else f"at address='{address}': ") in str(caught.value)
    assert "set RAY_ADDRESS" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("ModuleNotFoundError: No module named 'asyncdata'", "asyncdata must be installed on every node"),
        ("RuntimeEnvSetupError: pip failed", r"look at what RayExecutor\(...\) asks for: runtime_env"),
    ],
)
def test_an_actor_that_cannot_start_says_what_helps(said, way_out):
    assert re.match(f"AD493 .* node: {said}. {way_out}", str(starting._not_startable(RuntimeError(said))))  # noqa: SLF001


def test_without_ray_the_error_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="RayExecutor needs ray .*pip install ray"):
        DataLoader(write_rows(tmp_path / "rows.jsonl", 3), tokenize_fn=row_id, executor=RayExecutor())


def test_num_workers_beside_an_executor_is_refused():
    with pytest.raises(ConfigError, match=r"^AD495 num_workers=2 .*local_workers"):
        LoaderConfig.of({"executor": RayExecutor(), "num_workers": 2})


def test_a_token_cache_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^AD496 the token cache"):
        check_cluster(CONFIG, msgspec.structs.replace(JOB, cache=CacheJob(str(tmp_path), [], 0)))


def test_copies_of_rows_on_this_disk_are_refused():
    spooled = ReaderSpec("asyncdata.sources.spool:SpoolReader")
    with pytest.raises(ConfigError, match=r"^AD496 single rows .*shuffle=True"):
        check_cluster(CONFIG, msgspec.structs.replace(JOB, reader=spooled))
    with pytest.raises(ConfigError, match=r"^AD496"):
        check_cluster(CONFIG, msgspec.structs.replace(JOB, parts=[msgspec.structs.replace(JOB, reader=spooled)]))
    check_cluster(CONFIG, JOB)
