"""Workers on a Ray cluster, without one: what may be asked for, what travels, and what a node must have."""

import os
import re
import socket
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import anyio
import anyio.to_thread
import msgspec
import pytest

from asyncdata import DataLoader, JsonlSource, LoaderConfig, PromptTokenizeFn, RayExecutor
from asyncdata.errors import ConfigError, WorkerError
from asyncdata.workers.ray import executor as cluster
from tests.support import parts
from tests.support.executors import Client
from tests.support.loading import row_id, write_rows
from tests.support.parts import change

JOB = parts.Job(files=[], tokenize=None, max_row_bytes=1, block_bytes=1, slack_bytes=0)
CONFIG = LoaderConfig.of({"executor": {"num_workers": 3}})
with_ = msgspec.structs.replace


# Settings, and what is refused before any actor starts


@pytest.mark.parametrize("executor", [RayExecutor(local_workers=2), {"local_workers": 2}])
def test_an_executor_may_be_a_dict_as_in_yaml_and_its_local_workers_are_known_before_it_is_checked(executor):
    assert LoaderConfig.of({"executor": executor}).executor == RayExecutor(local_workers=2)
    assert parts.local_workers_of(executor) == 2
    assert parts.local_workers_of({}) == parts.local_workers_of(RayExecutor()) == 0


SPOOLED = with_(JOB, reader=parts.ReaderSpec("asyncdata.sources.spool:SpoolReader"))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: RayExecutor(address="ray://head:10001"), r"^AD490 .*ray job submit"),
        (lambda: LoaderConfig.of({"executor": {}, "num_workers": 2}), r"^AD495 num_workers=2 .*local_workers"),
        (lambda: parts.shared_scans(CONFIG, []), "^AD487 .*workers of this machine read: leave executor out"),
        (lambda: parts.check_cluster(SPOOLED), "^AD496 single rows .*shuffle=True"),
        (lambda: parts.check_cluster(with_(JOB, parts=[SPOOLED])), "^AD496 single rows"),
    ],
    ids=["Ray Client", "num_workers beside it", "an exchange", "copies of rows on this disk", "also of a part"],
)
def test_what_does_not_work_on_a_cluster_is_refused(ask, message):
    parts.check_cluster(JOB)
    with pytest.raises(ConfigError, match=message):
        ask()


@pytest.mark.parametrize(
    ("is_client", "ray_address", "address", "message"),
    [
        (True, "", "auto", "^AD490 this process is connected by Ray Client"),
        (False, "", "auto", r"^AD491 .*running Ray instance.*ray start --head.*or set RAY_ADDRESS"),
        (False, "{}", "auto", r"^AD491 .*at RAY_ADDRESS={}: (?!.*set RAY_ADDRESS).* or name one that runs; or leave"),
        (False, "other:1", "{}", r"^AD491 .*at address='{}': (?!.*set RAY_ADDRESS).* or name one that runs; or leave"),
    ],
    ids=["connected by Ray Client", "no cluster", "none listens at RAY_ADDRESS", "none listens at the address"],
)
def test_what_cannot_be_connected_to_is_refused_by_its_name(monkeypatch, is_client, ray_address, address, message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    init = {} if ray_address else {"init": Mock(side_effect=ConnectionError("no running Ray instance"))}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, **init))
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: is_client))
    monkeypatch.setitem(sys.modules, "ray.util.client", client)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray_address:
        monkeypatch.setenv("RAY_ADDRESS", ray_address.format(closed))
    with pytest.raises(ConfigError, match=message.format(closed)):
        cluster.connect(RayExecutor(address=address.format(closed)))


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("ModuleNotFoundError: No module named 'asyncdata'", "asyncdata must be installed on every node"),
        ("RuntimeEnvSetupError: pip failed", r"look at what RayExecutor\(...\) asks for: runtime_env"),
    ],
)
def test_an_actor_that_cannot_start_says_what_helps(said, way_out):
    assert re.match(f"AD493 .* node: {said}. {way_out}", str(cluster._not_startable(RuntimeError(said))))  # noqa: SLF001


def test_without_ray_the_error_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="RayExecutor needs ray .*pip install ray"):
        DataLoader(write_rows(tmp_path / "rows.jsonl", 3), tokenize_fn=row_id, executor=RayExecutor())


@pytest.fixture
def terms(jsonl_file):
    return parts.terms_of(Client(None, jsonl_file([{"id": 1}, {"id": 2}]), row_id).job)


def test_what_travels_is_the_same_and_files_have_digests_if_the_source_has_none(small_tokenizer, jsonl_file, terms):
    """What is decoded is equal to what was encoded, but not the same objects, and a digest must not depend on that."""
    function = PromptTokenizeFn(str(small_tokenizer), prompt_key="input", max_length=100)
    sent = parts.terms_of(Client(None, jsonl_file([{"input": "x"}]), function).job)
    parts.check_function(msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=parts.Terms))
    files = JsonlSource(str(jsonl_file([{"id": 5}], "other.jsonl"))).open(64).files
    job = with_(terms.job, files=[with_(file, digest="") for file in files])
    assert all(file.digest for file in parts.terms_of(job).job.files)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: os.unlink(path), "cannot be read there (No such file or directory)"),
        (lambda path: os.truncate(path, 5), "has 5 bytes there, and 20 on trainer"),
        (lambda path: os.pwrite(os.open(path, os.O_WRONLY), b"7", 6), "has other content there than on trainer"),
    ],
)
def test_a_file_that_differs_is_named_with_the_node_and_the_way_out(terms, change, why):
    path = terms.job.files[0].path
    change(path)
    ((number, reason),) = parts.NodeFiles(terms.job.files, "trainer").prove(range(9))
    assert number == 0
    assert reason.startswith(f"AD492 node {parts.node_name()} does not see the same data: {path} {why}")
    assert "copy it to the same path on every node" in reason


def test_a_file_that_has_grown_is_the_same_and_another_version_or_module_is_named(terms):
    parts.check_function(terms)
    path = terms.job.files[0].path
    with open(path, "ab") as file:
        file.write(b'{"id": 3}\n')
    os.utime(path, (1, 1))
    files = parts.NodeFiles(terms.job.files, "trainer")

    assert files.prove(range(9)) == []
    assert (files.files[0].mtime_ns, files.files[0].num_bytes) == (10**9, 20)
    os.unlink(path)
    assert files.prove([0]) == []

    versions = {**terms.versions, "tokenizers": "0.1"}
    other = with_(terms, versions=versions, fingerprints=[{"tokenize_fn": "f version 3"}])
    with pytest.raises(ConfigError, match=r"^AD494 node .* tokenizers .* trainer has 0\.1, another tokenize_fn"):
        parts.check_function(other)
    job = with_(terms.job, tokenize=parts.TokenizeSpec("no_such_module:f"))
    with pytest.raises(ConfigError, match=r"^AD493 node .* cannot import .* 'no_such_module': No module.*runtime_env"):
        parts.check_function(with_(terms, job=job))


@pytest.mark.asyncio
async def test_a_closed_connection_is_opened_again_and_only_refused_ones_are_a_loss(monkeypatch):
    change(monkeypatch, again_to_ray_s=0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.RaisesGroup(pytest.RaisesExc(WorkerError, match="AD498 .* its head has ended")):
            async with anyio.create_task_group() as group:
                group.start_soon(cluster._run_until_refused, "its head", address, 3)  # noqa: SLF001 - without Ray
                for _ in range(3):
                    connection, _ = await anyio.to_thread.run_sync(server.accept)
                    connection.close()
                server.close()
