"""Pictures on web servers: only of allowed hosts, within limits, and as they were planned."""

from pathlib import Path

import pytest

from asyncdata import BadRows, Processor
from asyncdata.errors import BadRowError, ConfigError
from tests.support.media import asks, draw, loader_of, save_processor
from tests.support.servers import HttpServer, Response

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_processor(tmp_path_factory.mktemp("processor"), "qwen3_vl")


@pytest.fixture
def site(tmp_path):
    """A server; its answers by path, each a response or a list of them, of which the last stays."""
    picture = Path(draw(tmp_path / "a.png", 90, 60)).read_bytes()
    answers = {"/a.png": Response(200, {}, picture)}

    def answer(request):
        found = answers[request.path]
        if callable(found):
            return found(server)

        return (found.pop(0) if len(found) > 1 else found[0]) if isinstance(found, list) else found

    with HttpServer(answer) as server:
        server.answers, server.picture = answers, picture
        yield server


def opened(tmp_path, folder, *urls, hosts, knobs=None, **settings):
    rows = [asks({"type": "image_url", "image_url": {"url": url}}) for url in urls]
    return loader_of(tmp_path, folder, *rows, knobs=knobs, allowed_hosts=hosts, **settings)


def host_of(site):
    return site.url.removeprefix("http://")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_of_an_allowed_host_is_that_of_the_file(tmp_path, folder, site, workers):
    urls = [str(tmp_path / "a.png"), f"{site.url}/a.png?size=1", f"{site.url}/moved"]
    site.answers["/moved"] = Response(302, {"location": "/a.png"})
    with opened(tmp_path, folder, *urls, hosts=[host_of(site)], knobs={"num_workers": workers}) as loader:
        samples = loader.get_next_batch(3)
    for sample in samples:
        assert sample.tokens.tolist() == samples[0].tokens.tolist()
        assert (sample.columns["pixel_values"] == samples[0].columns["pixel_values"]).all()


def slow(server):
    server.is_closing.wait()
    return Response(200, {})


BAD = {
    "not allowed": ("/a.png", None, "is not in allowed_hosts.*127.0.0.1", {"hosts": ("127.0.0.1",)}),
    "missing": ("/b", Response(404, {}), "status 404; try 1"),
    "elsewhere": ("/b", Response(302, {"location": "http://localhost:1/x"}), "redirected.*'localhost:1' is not in"),
    "to a store": (
        "/b",
        Response(302, {"location": "ftp://localhost/x"}),
        "redirected.*ftp://localhost/x.: neither http",
    ),
    "too big": ("/a.png", None, "bytes or more; max_bytes=50", {"max_bytes": 50}),
    "slow": ("/b", slow, "within timeout_s=0.3", {"timeout_s": 0.3}),
    "overloaded": ("/b", Response(503, {}), "status 503; try 3"),
    "cut": ("/b", Response(200, {}, b"12345", cut_at=2), "2 of 5 bytes came; try 3"),
    "no picture": ("/b", Response(200, {}, b"<html>"), "no picture that Pillow knows"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_fetched_is_a_bad_row(tmp_path, folder, site, name):
    path, answer, message, *settings = BAD[name]
    if answer is not None:
        site.answers[path] = answer
    settings = {"hosts": [host_of(site)]} | dict(*settings)
    with opened(tmp_path, folder, site.url + path, **settings) as loader:
        with pytest.raises(BadRowError, match=f"AD457.*{message}"):
            loader.get_next_batch(1)


def test_a_failure_that_passes_is_tried_again(tmp_path, folder, site):
    site.answers["/b"] = [Response(503, {}), Response(200, {}, site.picture)]
    with opened(tmp_path, folder, f"{site.url}/b", hosts=[host_of(site)]) as loader:
        assert len(loader.get_next_batch(1)) == 1


@pytest.mark.parametrize("kind", ["other", "gone"])
def test_a_picture_that_changed_after_its_plan_is_noticed_and_the_order_stays(tmp_path, folder, site, kind):
    other = Path(draw(tmp_path / "b.png", 300, 200)).read_bytes()
    later = Response(200, {}, other) if kind == "other" else Response(404, {})
    site.answers["/b"] = [Response(200, {}, site.picture), later]
    urls = [f"{site.url}/a.png", f"{site.url}/b", f"{site.url}/a.png"]
    knobs = {"batch_size": 1, "bad_rows": BadRows(policy="skip", max=None)}
    with opened(tmp_path, folder, *urls, hosts=[host_of(site)], knobs=knobs) as loader:
        delivered = [sample.index for batch in loader for sample in batch]
        now = loader.statistics()
    assert now.bad_rows_total == 1
    assert len(delivered) == 2


@pytest.mark.parametrize("host", ["*.host", "https://host", "host/path", "user@host", "Host", ""])
def test_a_host_is_a_plain_name(host):
    with pytest.raises(ConfigError, match="AD457 allowed_hosts"):
        Processor(allowed_hosts=[host])


def test_a_user_in_an_address_is_refused_and_not_shown(tmp_path, folder, site):
    url = f"http://me:secret@{host_of(site)}/a.png"
    with opened(tmp_path, folder, url, hosts=[host_of(site)]) as loader:
        with pytest.raises(BadRowError, match="a user or a password") as caught:
            loader.get_next_batch(1)
    assert "secret" not in str(caught.value)
