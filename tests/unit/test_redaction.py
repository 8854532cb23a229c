"""What no message may show: what gives access to a store, and, where that is asked, what stands in a row."""

import json
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asyncdata import BadRows, DataLoader, IterableSource, RowShuffle
from asyncdata.errors import AsyncDataError, BadRowError, PrefetchTimeoutError, SourceError
from tests.integration.bad_inputs.test_places import ELSEWHERE, FAULTS
from tests.support.bad_inputs import deliver, prompts, with_bad
from tests.support.parts import _REASONS, get_logger, redacted, safe_cause, without_text

SECRET = "0123456789abcdefSECRET"
SHOWING = [
    f"GET https://s3.example/b/a.jsonl?X-Amz-Date=1&X-Amz-Signature={SECRET}&x=1 gave 403",
    f"https://s3.example/a?X-Amz-Credential={SECRET}%2Fus-east-1&X-Amz-Security-Token={SECRET}",
    f"https://storage.example/a?X-Goog-Signature={SECRET}&GoogleAccessId=x",
    f"https://blob.example/a?sv=2024&sig={SECRET}&se=1", f"https://host/a?token={SECRET}",
    f"https://host/a?access_token={SECRET}#x", f"AWSAccessKeyId={SECRET}&Signature={SECRET}",
    f"{{'Authorization': 'Bearer {SECRET}'}}", f'{{"authorization": "Basic {SECRET}"}}', f"Authorization: {SECRET}",
    f"authorization: AWS4-HMAC-SHA256 Credential={SECRET}/us, SignedHeaders=host, Signature={SECRET}",
    f"curl -H 'bearer {SECRET}'", f"https://me:{SECRET}@host/path", f"https://{SECRET}@host/path",
    f"api_key={SECRET} api-key={SECRET} password={SECRET}", f"the token is hf_{SECRET}0123456789",
]  # fmt: skip


@pytest.mark.parametrize("text", SHOWING)
def test_what_gives_access_is_not_shown(text):
    assert SECRET not in redacted(text)
    assert "[redacted]" in redacted(text)
    assert redacted(SHOWING[0]) == SHOWING[0].replace(SECRET, "[redacted]"), "the rest of an address is"


@pytest.mark.thorough
@given(st.text())
def test_it_is_found_once_and_for_all(text):
    assert redacted(redacted(text)) == redacted(text)


def test_no_error_shows_it():
    url = SHOWING[0]
    errors: list[Any] = [kind(url) for kind in (SourceError, AsyncDataError, PrefetchTimeoutError)]
    errors.append(BadRowError("AD421", url, path="a", line=1, excerpt=url, traceback=url))

    for error in errors:
        assert SECRET not in repr(error) + str(error) + repr(vars(error))


def test_no_event_shows_it():
    with capture_logs() as events:
        get_logger("x").info("a", path=SHOWING[0], paths=[SHOWING[4]], deep={"a": [SHOWING[5]]}, number=1)
        get_logger("x").warning("b", reason=SHOWING[7])

    assert SECRET not in repr(events)
    assert events[0]["number"] == 1


def test_a_cause_that_shows_it_is_left_out_and_any_other_is_not():
    plain = KeyError("x")
    outer = RuntimeError("y")
    outer.__cause__ = ValueError(SHOWING[0])

    assert safe_cause(plain) is plain
    assert safe_cause(ValueError(SHOWING[0])) is None
    assert safe_cause(outer) is None


def test_a_traceback_of_a_source_that_raised_does_not_show_it():
    def rows(epoch: int) -> Any:
        raise ConnectionError(SHOWING[0])
        yield

    with DataLoader(IterableSource(rows), tokenize_fn=lambda row: [1], num_workers=0, timeout_s=240) as loader:
        with pytest.raises(SourceError, match="gave 403") as caught:
            loader.get_next_batch(1)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


PRIVATE = "PRIVATE"
ROWS = [
    b'{"input": "PRIVATE", "label"', b'{"PRIVATE": 1, "label": 1}', b'{"input": ["PRIVATE"], "label": 1}', b'"PRIVATE"',
    b'{"input": "PRIVATE \\ud800", "label": 1}', b'{"input": "PRIVATE"}{"PRIVATE": 1}', b'{"input": "PRIVATE\xff"}',
    b'{"input": "PRIVATE", "label": ' + b"9" * 5000 + b"}",
]  # fmt: skip


def repeats_the_row(row: dict[str, Any]) -> list[int]:
    if "PRIVATE" in str(row):
        raise ValueError(f"no:\n  {row}\n{row}")

    return [1]


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("policy", ["raise", "skip", "quarantine"])
def test_nothing_that_a_row_says_is_shown_where_that_is_not_wanted(tmp_path, row, policy):
    path, file = tmp_path / "rows.jsonl", tmp_path / "quarantine.jsonl"
    path.write_bytes(with_bad(row))
    bad_rows = {"policy": policy, "path": str(file)}

    shown = deliver(str(path), prompts(), bad_rows=bad_rows)
    said = [str(shown.error), repr(shown.events), file.read_text() if file.exists() else ""]
    file.unlink(missing_ok=True)
    hidden = deliver(str(path), prompts(), bad_rows={**bad_rows, "excerpts": False})
    told = [str(hidden.error), repr(hidden.events), file.read_text() if file.exists() else ""]

    assert (PRIVATE in "".join(said)) >= (policy == "raise")
    assert PRIVATE not in "".join(told) + repr(vars(hidden.error) if hidden.error else "")
    assert shown.labels == hidden.labels
    assert hidden.statistics.dropped_total == shown.statistics.dropped_total
    if policy == "raise":
        assert str(hidden.error).startswith(str(shown.error).split(": ")[0])
        assert "(BadRows(excerpts=False) shows no more)" in str(hidden.error)
    if policy == "quarantine":
        record = json.loads(told[2])
        assert (record["line"], record["excerpt"]) == (3, "")


@pytest.mark.parametrize("order", [True, "full", RowShuffle(only_kept=True)], ids=str)
def test_of_an_error_of_the_users_function_places_and_type_are_left(tmp_path, order):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "PRIVATE"}\n')

    found = deliver(str(path), repeats_the_row, bad_rows=BadRows(excerpts=False), shuffle=order)

    assert isinstance(found.error, BadRowError)
    assert "the tokenize function raised ValueError (BadRows(excerpts=False)" in found.error.reason
    assert "test_redaction.py" in found.error.traceback
    assert "in repeats_the_row" in found.error.traceback
    assert PRIVATE not in repr(vars(found.error)) + str(found.error)


@pytest.mark.thorough
@given(st.text(), st.booleans())
def test_of_a_message_no_more_than_a_type_is_shown(text, is_trace):
    frames = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f'
    trace = f"{frames}\n    code\nKeyError: {text}" if is_trace else text
    error = without_text(BadRowError("AD421", text, path="/a", line=1, byte_offset=0, excerpt=text, traceback=trace))

    said = f"the tokenize function raised{' KeyError' * is_trace} (BadRows(excerpts=False) shows no more)"
    assert (error.excerpt, error.traceback, error.reason) == ("", frames if is_trace else "", said)


def test_every_code_of_a_bad_row_has_its_words():
    assert set(_REASONS) == {fault.code for fault in FAULTS} | set(ELSEWHERE)
