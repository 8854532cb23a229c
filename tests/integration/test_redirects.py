"""Redirections of a web server are followed, but not into a nearer network than the server's own."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import JsonlSource, SourceError
from asyncdata.sources.remote.redirects import Redirects
from asyncdata.sources.remote.store import StoreError
from tests.support.reading_rows import rows_of
from tests.support.stores import FAST, Answer, HttpHost

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("obstore")

ROWS = b'{"id": 1}\n{"id": 2}\n'
METADATA = "169.254.169.254"


@pytest.fixture
def host() -> Iterator[HttpHost]:
    with HttpHost() as server:
        yield server


@pytest.fixture
def other() -> Iterator[HttpHost]:
    with HttpHost() as server:
        yield server


@pytest.fixture
def place(other) -> str:
    """An address of the other host, by a name that is not that of the first one."""
    return other.put("/b", ROWS).replace("127.0.0.1", "localhost")


@pytest.fixture
def addresses(monkeypatch) -> dict[str, str]:
    """The addresses that names have for asyncdata, and not for obstore."""
    found: dict[str, str] = {}
    ask = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        return ask(found.get(host, host), *args, **kwargs)

    monkeypatch.setattr("asyncdata.sources.remote.redirects.socket.getaddrinfo", getaddrinfo)
    return found


def redirect(host: HttpHost, to: str) -> str:
    """An address of the host that it redirects."""
    host.answer = lambda _: Answer(302, b"", {"location": to})
    return host.put("/a.jsonl", ROWS)


def num_rows(address: str, **options: Any) -> int:
    return len(rows_of(JsonlSource(address, storage_options={**FAST, **options})))


@pytest.mark.parametrize(
    "target", [f"http://{METADATA}/data?sig=s3cret", "http://2852039166/latest", f"http://[::ffff:{METADATA}]/"]
)
def test_a_redirection_to_a_link_local_address_is_refused_before_a_request_is_sent(host, target):
    with pytest.raises(SourceError, match="^AD346 .*/a.jsonl is redirected .*allow_private_redirects") as caught:
        num_rows(redirect(host, target))

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("origin", "target", "is_refused"),
    [
        ("1.1.1.1", "8.8.8.8", False),
        ("1.1.1.1", "127.0.0.1", True),
        ("1.1.1.1", "10.0.0.7", True),
        ("1.1.1.1", "::1", True),
        ("1.1.1.1", "fd00:ec2::254", True),
        ("1.1.1.1", "100.100.100.200", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", METADATA, True),
        ("10.0.0.1", "fe80::1", True),
        ("169.254.1.1", METADATA, False),
    ],
)
def test_a_server_may_not_redirect_into_a_nearer_network_than_its_own(addresses, origin, target, is_refused):
    addresses |= {"origin.example": origin, "target.example": target}
    redirects = Redirects("http://origin.example/a")

    try:
        redirects.take_in("http://target.example/b")
    except StoreError as error:
        assert error.kind == "elsewhere"
        assert is_refused
    else:
        assert not is_refused
        assert "target.example" in redirects.client_options()["proxy_excludes"]


def test_a_name_is_looked_up_and_a_setting_allows_what_is_refused(host, other, place, addresses):
    addresses["localhost"] = METADATA
    address = redirect(host, place)

    with pytest.raises(SourceError, match="^AD346 .*http://localhost is in a nearer network"):
        num_rows(address)
    assert other.requests == []
    assert num_rows(address, allow_private_redirects=True) == 2


def test_other_redirections_are_followed_without_credentials_and_lead_no_further_than_they_may(host, other, place):
    assert num_rows(redirect(host, place).replace("//", "//me:pass@")) == 2
    assert all("authorization" in request.headers for request in host.requests)
    assert not any("authorization" in request.headers for request in other.requests)
    host.answer = lambda request: Answer(302, b"", {"location": "/c"}) if request.path == "/a.jsonl" else None
    host.put("/c", ROWS)
    assert num_rows(f"{host.url}/a.jsonl") == 2

    redirect(other, f"http://{METADATA}/")
    with pytest.raises(SourceError, match="^AD346 "):
        num_rows(redirect(host, place))


def test_a_redirection_that_cannot_be_looked_at_is_not_followed(host, other, place, monkeypatch):
    monkeypatch.setattr(Redirects, "look", lambda *_: None)

    with pytest.raises(SourceError, match="^AD326 .*a host that cannot be looked at; allow_private_redirects"):
        num_rows(redirect(host, place), retry_timeout_s=0)
    assert other.requests == []


def test_behind_a_proxy_every_request_goes_to_the_proxy(other, monkeypatch):
    monkeypatch.setenv("http_proxy", other.url)
    monkeypatch.setenv("no_proxy", METADATA)
    target = f"http://{METADATA}/b"
    other.put(target, ROWS)
    other.answer = lambda request: Answer(302, b"", {"location": target}) if "a.jsonl" in request.path else None
    other.put("http://data.example/a.jsonl", ROWS)

    assert num_rows("http://data.example/a.jsonl") == 2
    assert {request.path for request in other.requests} == {"http://data.example/a.jsonl", target}
