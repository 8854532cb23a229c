"""Addresses are taken apart exactly, put together again, and never shown with what gives access."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ConfigError, HuggingFaceSource, JsonArraySource, JsonlSource, ParquetSource
from asyncdata.core.object_address import HTTP, Address
from asyncdata.sources.remote.address import GivenAddress, is_address, without_secrets
from asyncdata.sources.remote.store import store_spec

HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}(:[0-9]{1,4})?", fullmatch=True)
KEYS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"), min_size=1, max_size=40)
SECRETS = st.from_regex(r"[A-Z]{4}[a-zA-Z0-9]{12}", fullmatch=True)


@given(st.sampled_from(["s3", "gs", "az", "http", "https"]), HOSTS, KEYS)
def test_an_address_is_parsed_to_what_it_was_made_of(scheme, host, key):
    address = Address(scheme, host, key)

    assert GivenAddress.parse(str(address)).address == address


@given(st.sampled_from(sorted(HTTP)), HOSTS, KEYS, SECRETS, SECRETS)
def test_user_password_and_query_are_for_the_store_only(scheme, host, key, password, signature):
    path = str(Address(scheme, host, key)).partition("://")[2]
    given_address = GivenAddress.parse(f"{scheme}://user:{password}@{path}?sig={signature}")

    assert given_address.address == Address(scheme, host, key)
    assert given_address.url == f"{scheme}://user:{password}@{host}?sig={signature}"
    shown = f"{given_address!r} {given_address.address} {store_spec(given_address, {'token': signature})!r}"
    shown += without_secrets(f"{scheme}://user:{password}@{path}?{signature}")
    assert password not in shown
    assert signature not in shown


@pytest.mark.parametrize("key", ["a?b#c", "a b", "ä/ö", "a%20b", "a+b&c=d", "part-?.jsonl"])
def test_only_http_has_queries_and_percent_codes(key):
    assert GivenAddress.parse(f"s3://bucket/{key}").address.key == key


@pytest.mark.parametrize(
    ("text", "bucket"),
    [
        ("hdfs://name:8020/a", "name:8020"),
        ("http://[::1]:80/a", "[::1]:80"),
        ("abfss://container@account.dfs.core.windows.net/a", "container@account.dfs.core.windows.net"),
    ],
    ids=["a port", "IPv6", "an Azure container"],
)
def test_a_bucket_may_have_a_port_or_an_account(text, bucket):
    address = GivenAddress.parse(text).address

    assert (str(address), address.bucket) == (text, bucket)


@pytest.mark.parametrize("text", ["s3:///key", "http://", "https://?x=1", "gs://"])
def test_an_address_without_a_bucket_is_refused(text):
    with pytest.raises(ConfigError, match="^AD320 .*names no bucket or host"):
        GivenAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "az://container/a.jsonl?sv=2024-01-01&se=2027&sig=verysecret",
        "abfs://container@account.dfs.core.windows.net/a?sig=verysecret",
        "s3://bucket/a?X-Amz-Signature=verysecret",
        "gs://bucket/a?X-Goog-Signature=verysecret",
        "oss://bucket/a?Signature=verysecret",
        "s3://AKIAX:verysecret@bucket/key",
        "s3://AKIAX:very/secret@bucket/key",
        "https://me:verysecret/x@host/a",
    ],
)
def test_credentials_that_their_store_does_not_read_are_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match="^AD320 .*storage_options") as caught:
        GivenAddress.parse(text)

    assert "secret" not in f"{caught.value}{JsonlSource(text)}{ParquetSource(text)}"


@pytest.mark.parametrize("kind", [JsonlSource, JsonArraySource])
@pytest.mark.parametrize("many", [False, True])
def test_a_source_shows_the_names_of_its_storage_options_only(kind, many):
    address = "https://me:pass1@host/a.jsonl?X-Amz-Signature=sig2"
    source = kind([address] if many else address, storage_options={"client_options": {"x": "secret3"}})

    assert all(secret not in f"{source} {source!r}" for secret in ("pass1", "sig2", "secret3"))
    assert "https://host/a.jsonl" in repr(source)
    assert "client_options" in repr(source)


def test_a_dataset_does_not_show_the_signatures_of_its_files():
    source = HuggingFaceSource("json", data_files={"train": ["https://host/a.jsonl?sig=verysecret"]})

    assert "verysecret" not in f"{source} {source!r}"
    assert "https://host/a.jsonl" in repr(source)


@pytest.mark.parametrize("path", ["/a/b.jsonl", "a.jsonl", "C:/a", "a:b", "://x"])
def test_a_path_is_no_address(path):
    assert not is_address(path)


@pytest.mark.parametrize(
    "options", [{"max_reads": 0}, {"max_reads": "many"}, {"retry_timeout_s": -1}, {"max_bytes": 0}], ids=str
)
def test_a_limit_out_of_range_is_refused(options):
    with pytest.raises(ConfigError, match=f"storage_options: .*{next(iter(options))}"):
        store_spec(GivenAddress.parse("s3://bucket/key"), options)
