"""Addresses: taken apart, put together again, and never shown with what gives access."""

from __future__ import annotations

import pytest

from asyncdata import ConfigError, HuggingFaceSource, JsonArraySource, JsonlSource, ParquetSource
from asyncdata.sources.remote.address import GivenAddress, is_address
from asyncdata.sources.remote.store import store_spec


@pytest.mark.parametrize("key", ["a?b#c", "a b", "ä/ö", "a%20b", "a+b&c=d"])
def test_only_http_has_queries_and_percent_codes(key):
    assert GivenAddress.parse(f"s3://bucket/{key}").address.key == key


def test_an_azure_container_before_the_account_is_no_user():
    text = "abfss://container@account.dfs.core.windows.net/a.jsonl"

    assert str(GivenAddress.parse(text).address) == text


@pytest.mark.parametrize("text", ["s3:///key", "http://", "https://?x=1", "gs://"])
def test_an_address_without_a_bucket_is_refused(text):
    with pytest.raises(ConfigError, match="^AD320 .*names no bucket or host"):
        GivenAddress.parse(text)


def test_credentials_in_an_address_of_a_bucket_are_refused_and_not_shown():
    with pytest.raises(ConfigError, match="^AD320 .*storage_options") as caught:
        GivenAddress.parse("s3://AKIAX:verysecret@bucket/key")

    assert "verysecret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "az://container/a.jsonl?sv=2024-01-01&se=2027&sig=verysecret",
        "abfs://container@account.dfs.core.windows.net/a?sig=verysecret",
        "s3://bucket/a?X-Amz-Signature=verysecret",
        "gs://bucket/a?X-Goog-Signature=verysecret",
        "oss://bucket/a?Signature=verysecret",
        "s3://AKIAX:very/secret@bucket/key",
        "https://me:verysecret/x@host/a",
    ],
)
def test_credentials_that_their_store_does_not_read_are_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match="^AD320 .*storage_options") as caught:
        GivenAddress.parse(text)

    assert "secret" not in f"{caught.value}{JsonlSource(text)}{ParquetSource(text)}"


def test_an_address_with_a_port_or_a_question_mark_is_read():
    assert GivenAddress.parse("hdfs://name:8020/a").address.bucket == "name:8020"
    assert GivenAddress.parse("http://[::1]:80/a").address.bucket == "[::1]:80"
    assert GivenAddress.parse("s3://bucket/part-?.jsonl").address.key == "part-?.jsonl"


def test_a_dataset_does_not_show_the_signatures_of_its_files():
    source = HuggingFaceSource("json", data_files={"train": ["https://host/a.jsonl?sig=verysecret"]})

    assert "verysecret" not in f"{source} {source!r}"
    assert "https://host/a.jsonl" in repr(source)


@pytest.mark.parametrize("path", ["/a/b.jsonl", "a.jsonl", "C:\\a", "a:b", "://x"])
def test_a_path_is_no_address(path):
    assert not is_address(path)


@pytest.mark.parametrize("kind", [JsonlSource, JsonArraySource])
@pytest.mark.parametrize("many", [False, True])
def test_a_source_shows_the_names_of_its_storage_options_only(kind, many):
    address = "https://me:pass1@host/a.jsonl?X-Amz-Signature=sig2"
    source = kind([address] if many else address, storage_options={"client_options": {"x": "secret3"}})

    assert all(secret not in f"{source} {source!r}" for secret in ("pass1", "sig2", "secret3"))
    assert "https://host/a.jsonl" in repr(source)
    assert "client_options" in repr(source)


def test_a_spec_is_not_shown():
    spec = store_spec(GivenAddress.parse("https://me:pass1@host/a?sig2"), {"token": "secret3"})

    assert all(secret not in repr(spec) for secret in ("pass1", "sig2", "secret3"))


@pytest.mark.parametrize(
    "options", [{"max_reads": 0}, {"max_reads": "many"}, {"retry_timeout_s": -1}, {"max_bytes": 0}]
)
def test_a_limit_out_of_range_is_refused(options):
    with pytest.raises(ConfigError, match=f"storage_options: .*{next(iter(options))}"):
        store_spec(GivenAddress.parse("s3://bucket/key"), options)
