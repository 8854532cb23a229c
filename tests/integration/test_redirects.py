"""Redirections of a web server are followed, but not into a nearer network than the server's own."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, JsonlSource, SourceError
from asyncdata.sources.remote.obstore_store import ObstoreStore
from asyncdata.sources.remote.redirects import Redirects
from asyncdata.sources.remote.store import StoreError
from tests.support.stores import FAST, Answer, HttpHost
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = b'{"id": 1}\n{"id": 2}\n'


@pytest.fixture
def host() -> Iterator[HttpHost]:
    found = HttpHost()
    yield found
    found.close()


@pytest.fixture
def other() -> Iterator[HttpHost]:
    found = HttpHost()
    yield found
    found.close()


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


def rows(address: str, **options: Any) -> int:
    """How many rows are read."""
    source = JsonlSource(address, storage_options={**FAST, **options})
    with DataLoader(source, tokenize_fn=row_id, num_workers=0, timeout_s=240, epochs=1, batch_size=2) as loader:
        return sum(map(len, loader))


@pytest.mark.parametrize(
    "place",
    [
        "http://169.254.169.254/latest/meta-data?sig=s3cret",
        pytest.param("https://169.254.169.254/latest", marks=pytest.mark.thorough),
        pytest.param("http://2852039166/latest", marks=pytest.mark.thorough),
        pytest.param("http://[::ffff:169.254.169.254]/", marks=pytest.mark.thorough),
        pytest.param("http://[fe80::1]:8080/", marks=pytest.mark.thorough),
    ],
)
def test_a_redirection_to_a_link_local_address_is_refused_before_a_request_is_sent(host, place):
    with pytest.raises(SourceError, match="^AD346 .*/a.jsonl is redirected .*allow_private_redirects") as caught:
        rows(redirect(host, place))

    assert "s3cret" not in str(caught.value)


def test_a_name_of_a_host_is_looked_up(host, other, addresses):
    addresses["localhost"] = "169.254.169.254"

    with pytest.raises(SourceError, match="^AD346 .*http://localhost is in a nearer network"):
        rows(redirect(host, other.put("/b", ROWS).replace("127.0.0.1", "localhost")))
    assert other.requests == []


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
        ("10.0.0.1", "169.254.169.254", True),
        ("169.254.1.1", "169.254.169.254", False),
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


@pytest.mark.thorough
def test_other_redirections_are_followed_and_lead_no_further_than_they_may(host, other):
    place = other.put("/b", ROWS).replace("127.0.0.1", "localhost")

    assert rows(redirect(host, place)) == 2
    host.answer = lambda _: Answer(302, b"", {"location": "/c"}) if _.path == "/a.jsonl" else None
    host.put("/c", ROWS)
    assert rows(host.url + "/a.jsonl") == 2

    redirect(other, "http://169.254.169.254/")
    with pytest.raises(SourceError, match="^AD346 "):
        rows(redirect(host, place))


@pytest.mark.thorough
def test_a_redirection_that_cannot_be_looked_at_is_not_followed(host, other, monkeypatch):
    address = redirect(host, other.put("/b", ROWS).replace("127.0.0.1", "localhost"))
    monkeypatch.setattr(Redirects, "look", lambda *_: None)

    with pytest.raises(SourceError, match="^AD326 .*a host that cannot be looked at; allow_private_redirects"):
        rows(address, retry_timeout_s=0)
    assert other.requests == []


@pytest.mark.thorough
def test_credentials_do_not_go_to_another_host(host, other):
    address = redirect(host, other.put("/b", ROWS).replace("127.0.0.1", "localhost"))

    assert rows(address.replace("//", "//me:pass@")) == 2
    assert all("authorization" in request.headers for request in host.requests)
    assert not any("authorization" in request.headers for request in other.requests)


@pytest.mark.thorough
def test_a_setting_allows_them(host, other, addresses):
    addresses["localhost"] = "169.254.169.254"
    address = redirect(host, other.put("/b", ROWS).replace("127.0.0.1", "localhost"))

    assert rows(address, allow_private_redirects=True) == 2


@pytest.mark.thorough
def test_behind_a_proxy_every_request_goes_to_the_proxy(host, other, monkeypatch):
    monkeypatch.setenv("http_proxy", other.url)
    monkeypatch.setenv("no_proxy", "169.254.169.254")
    place = "http://169.254.169.254/b"
    other.put(place, ROWS)
    other.answer = lambda request: Answer(302, b"", {"location": place}) if "a.jsonl" in request.path else None
    other.put("http://data.example/a.jsonl", ROWS)

    assert rows("http://data.example/a.jsonl") == 2
    assert {request.path for request in other.requests} == {"http://data.example/a.jsonl", place}


@pytest.mark.parametrize("options", [{"client_options": "timeout=1"}, {"client_options": 1}, {"retry_config": "none"}])
def test_options_of_another_type_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=r"^AD321 .*storage_options \((client_options|retry_config)\)"):
        ObstoreStore("https://host.example", options)
