"""Addresses are taken apart exactly, and show no secret; requests cover what is wanted, and little more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core.object_address import HTTP, Address
from asyncdata.sources.remote.address import GivenAddress, without_secrets
from asyncdata.sources.remote.reads import coalesced

pytestmark = pytest.mark.thorough

SCHEMES = st.sampled_from(["s3", "gs", "az", "http", "https"])
HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}(:[0-9]{1,4})?", fullmatch=True)
KEYS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"), min_size=1, max_size=40)
SECRETS = st.from_regex(r"[A-Z]{4}[a-zA-Z0-9]{12}", fullmatch=True)
RANGES = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.integers(1, 1 << 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=40
)


@given(SCHEMES, HOSTS, KEYS)
def test_an_address_is_parsed_to_what_it_was_made_of(scheme, host, key):
    address = Address(scheme, host, key)

    assert GivenAddress.parse(str(address)).address == address


@given(st.sampled_from(sorted(HTTP)), HOSTS, KEYS, SECRETS, SECRETS)
def test_user_password_and_query_are_for_the_store_only(scheme, host, key, password, signature):
    path = str(Address(scheme, host, key)).partition("://")[2]
    given_address = GivenAddress.parse(f"{scheme}://user:{password}@{path}?sig={signature}")

    assert given_address.address == Address(scheme, host, key)
    assert given_address.url == f"{scheme}://user:{password}@{host}?sig={signature}"
    shown = (
        f"{given_address!r} {given_address.address} {without_secrets(f'{scheme}://user:{password}@{path}?{signature}')}"
    )
    assert password not in shown
    assert signature not in shown


@given(RANGES)
def test_requests_cover_each_range_once_and_read_little_more(ranges):
    pieces = coalesced(ranges)

    assert sorted(number for piece in pieces for number in piece.ranges) == list(range(len(ranges)))
    for piece in pieces:
        inside = sorted(ranges[number] for number in piece.ranges)
        assert all(piece.start <= start and stop <= piece.stop for start, stop in inside)
        assert (piece.start, piece.stop) == (inside[0][0], max(stop for _, stop in inside))
        assert piece.stop - piece.start <= 4 << 20
        ends = [max(stop for _, stop in inside[: n + 1]) for n in range(len(inside))]
        assert all(start - end <= 16 << 10 for end, (start, _) in zip(ends, inside[1:], strict=False))
