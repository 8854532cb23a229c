"""What a node must have: the same files, functions and versions."""

from __future__ import annotations

import os

import msgspec
import pytest

from asyncdata import ConfigError, JsonlSource, PromptTokenizeFn
from asyncdata.core.specs import TokenizeSpec
from asyncdata.tokenization.base import describe
from asyncdata.workers.ray.node_proof import NodeFiles, Terms, check_function, node_name, terms_of
from tests.support.executors import Client
from tests.support.tokenize_fns import row_id


@pytest.fixture
def terms(jsonl_file):
    return terms_of(Client(None, jsonl_file([{"id": 1}, {"id": 2}]), row_id).job)  # type: ignore[arg-type]


def test_settings_that_travel_are_the_same_settings(small_tokenizer, jsonl_file):
    """What is decoded is equal to what was encoded, but not the same objects, and a digest must not depend on that."""
    function = PromptTokenizeFn(str(small_tokenizer), prompt_key="input", max_length=100)
    sent = terms_of(Client(None, jsonl_file([{"input": "x"}]), function).job)  # type: ignore[arg-type]

    check_function(msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Terms))


def faults(terms) -> list[tuple[int, str]]:
    return [tuple(fault) for fault in NodeFiles(terms.job.files, "trainer").prove(range(9))]


def test_a_node_with_the_same_files_and_functions_is_accepted(terms):
    check_function(terms)
    assert faults(terms) == []


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
    ((number, reason),) = faults(terms)

    assert number == 0
    assert reason.startswith(f"AD492 node {node_name()} does not see the same data: {path} {why}")
    assert "copy it to the same path on every node" in reason


def test_a_file_is_compared_once(terms):
    files = NodeFiles(terms.job.files, "trainer")
    files.prove([0])
    os.unlink(terms.job.files[0].path)

    assert files.prove([0]) == []


def test_a_file_that_has_grown_or_was_copied_is_the_same(terms):
    path = terms.job.files[0].path
    with open(path, "ab") as file:
        file.write(b'{"id": 3}\n')
    os.utime(path, (1, 1))
    files = NodeFiles(terms.job.files, "trainer")

    assert files.prove([0]) == []
    assert (files.files[0].mtime_ns, files.files[0].num_bytes) == (10**9, 20)


def test_another_version_or_tokenizer_is_named(terms):
    other = msgspec.structs.replace(
        terms, versions={**terms.versions, "tokenizers": "0.1"}, fingerprints=[{"tokenize_fn": "f version 3"}]
    )
    with pytest.raises(
        ConfigError, match=r"^AD494 node .* tokenizers .* where the trainer has 0\.1, another tokenize_fn"
    ):
        check_function(other)


def test_a_module_that_is_not_there_is_named_with_the_way_out(terms):
    job = msgspec.structs.replace(terms.job, tokenize=TokenizeSpec("no_such_module:f"))
    with pytest.raises(ConfigError, match=r"^AD493 node .* cannot import .* 'no_such_module': No module.*runtime_env"):
        check_function(msgspec.structs.replace(terms, job=job))


def test_the_files_have_digests_even_if_the_source_has_none(jsonl_file, terms):
    files = JsonlSource(str(jsonl_file([{"id": 5}], "other.jsonl"))).open(64).files
    job = msgspec.structs.replace(
        terms.job, files=[msgspec.structs.replace(file, digest="") for file in files], tokenize=describe(row_id)
    )

    assert all(file.digest for file in terms_of(job).job.files)
