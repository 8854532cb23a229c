from __future__ import annotations

import collections
import functools
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ConfigError, TokenizeFn
from asyncdata.core.messages import decode_reply, encode
from asyncdata.core.specs import TokenizeSpec
from asyncdata.tokenization import base
from asyncdata.tokenization.base import describe, fingerprints_of, open_spec, open_tokenize_fn, resolve_path
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.user_function import FunctionTokenizer
from tests.unit.tokenization import drops, faults, read_back, run, token_ids, values

HERE = __name__


def lengths(row: dict[str, Any]) -> list[int]:
    return list(range(len(row["input"])))


def batched_lengths(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [lengths(row) for row in rows]


batched_lengths.batched = True  # type: ignore[attr-defined]


class Description:
    """A tokenize function of a user's own, with settings."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    def resolve(self) -> Description:
        return self

    def fingerprints(self) -> dict[str, str]:
        return {"tokenize_fn": f"step {self.step}"}

    def settings(self) -> dict[str, Any]:
        return {"step": self.step}

    def open(self) -> FunctionTokenizer:
        return FunctionTokenizer(lambda row: [self.step] * len(row["input"]))

    class Inner:
        @staticmethod
        def function(row: dict[str, Any]) -> None:
            return None


columns = st.dictionaries(
    st.sampled_from(["prompt", "label", "metadata"]), st.integers(-9, 9).map(lambda n: f"{n}".encode())
)
samples = st.one_of(
    st.tuples(st.just("keep"), st.lists(st.integers(0, 2**31 - 1), max_size=4), columns),
    st.tuples(st.just("drop"), st.sampled_from(["short", "long"]), st.none()),
    st.tuples(st.just("fail"), st.just("AD421"), st.none()),
)


def write(rows: list[Any], out: ColumnWriter) -> ColumnWriter:
    for row, (kind, value, cells) in enumerate(rows):
        if kind == "keep":
            out.keep(row, value, **cells)
        elif kind == "drop":
            out.drop(row, value)
        else:
            out.fail(row, RowFault(value, "why", b"row", "trace"))
    return out


@pytest.mark.thorough
@given(st.lists(samples, max_size=12))
def test_what_is_written_is_read_back(rows: list[Any]) -> None:
    reply = decode_reply(encode(write(rows, ColumnWriter()).finish(len(rows), 1.5)))

    chunk = read_back(reply, len(rows))  # type: ignore[arg-type]

    kept = [(row, value, cells) for row, (kind, value, cells) in enumerate(rows) if kind == "keep"]
    assert token_ids(chunk) == [value for _, value, _ in kept]
    assert [chunk.row_of(sample) for sample in range(chunk.num_samples)] == [row for row, _, _ in kept]
    for name in ("prompt", "label", "metadata"):
        assert values(chunk, name) == [int(cells[name]) if name in cells else None for _, _, cells in kept]
    for reason, dropped in drops(chunk).items():
        assert dropped == [row for row, (kind, value, _) in enumerate(rows) if (kind, value) == ("drop", reason)]
    assert faults(chunk) == [(row, "AD421") for row, (kind, _, _) in enumerate(rows) if kind == "fail"]


@pytest.mark.thorough
@given(st.lists(samples, max_size=12), st.integers(0, 12))
def test_a_request_written_in_pieces_reads_as_if_written_at_once(rows: list[Any], cut: int) -> None:
    cut = min(cut, len(rows))
    whole = write(rows, ColumnWriter()).finish(len(rows), 0.0)

    pieces = ColumnWriter()
    pieces.extend(write(rows[:cut], ColumnWriter()))
    pieces.extend(write(rows[cut:], ColumnWriter(numbers=range(cut, len(rows)))))

    assert pieces.finish(len(rows), 0.0) == whole


def test_kept_rows_are_listed_only_where_some_are_missing() -> None:
    out = ColumnWriter()
    out.keep(0, [1])
    out.keep(1, array("i", [2, 3]))

    assert out.finish(2, 0.0).kept == b""
    assert out.finish(3, 0.0).kept == array("i", [0, 1]).tobytes()


@pytest.mark.parametrize(("tokens", "error"), [([2**31], OverflowError), ([1.5], TypeError), (["a"], TypeError)])
def test_a_token_id_that_is_not_an_int32_is_refused(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ColumnWriter().keep(0, tokens)


def test_a_function_of_a_row_gives_its_tokens() -> None:
    chunk = run(FunctionTokenizer(lengths), [{"input": "abc"}, {"input": ""}])

    assert token_ids(chunk) == [[0, 1, 2], []]
    assert values(chunk, "prompt") == [None, None]


def test_a_functions_dict_fills_the_columns_and_the_rest_is_extra() -> None:
    def function(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.array([1, 2]), "prompt": row["input"], "label": None, "metadata": {"a": 1}, "n": [1.5]}

    chunk = run(FunctionTokenizer(function), [{"input": "é"}])

    assert (token_ids(chunk), values(chunk, "prompt"), values(chunk, "label")) == ([[1, 2]], ["é"], [None])
    assert (values(chunk, "metadata"), values(chunk, "extra")) == ([{"a": 1}], [{"n": [1.5]}])


def test_a_functions_value_keeps_infinity_and_lone_surrogates() -> None:
    result = {"input_ids": [1], "prompt": "\ud800", "metadata": {"score": float("inf")}}

    chunk = run(FunctionTokenizer(lambda row: result), [{}])

    assert values(chunk, "prompt") == ["\ud800"]
    assert values(chunk, "metadata") == [{"score": float("inf")}]


def test_a_mapping_that_is_no_dict_is_a_result() -> None:
    chunk = run(FunctionTokenizer(lambda row: collections.UserDict(input_ids=[1, 2])), [{}])

    assert token_ids(chunk) == [[1, 2]]


def test_a_class_in_place_of_its_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass an instance"):
        describe(Description)  # type: ignore[arg-type]


def test_none_drops_a_row_and_text_says_why() -> None:
    chunk = run(FunctionTokenizer(lambda row: row["drop"]), [{"drop": None}, {"drop": "too odd"}, {"drop": [1]}])

    assert drops(chunk) == {"tokenize_fn": [0], "too odd": [1]}
    assert chunk.row_of(0) == 2


def test_a_row_that_the_function_raises_on_is_named_with_the_users_own_traceback() -> None:
    chunk = run(FunctionTokenizer(lengths), [{"input": "a"}, {"output": "b"}, b"{", {"input": "c"}])

    assert token_ids(chunk) == [[0], [0]]
    assert faults(chunk) == [(1, "AD421"), (2, "AD101")]
    assert chunk.errors[0].reason == "the tokenize function raised KeyError('input')"
    assert "in lengths" in chunk.errors[0].traceback
    assert base.__file__ not in chunk.errors[0].traceback


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (5, "int; need a list of token ids"),
        ({"ids": [1]}, "a dict without 'input_ids': it has ['ids']"),
        ({"input_ids": "text"}, "str; need a list of token ids"),
        ([1, -2], "token id -2 is negative"),
        ([[1]], ""),
        ([1.0], ""),
        ([2**31], ""),
        (np.array([[1]]), ""),
        ({"input_ids": [1], "metadata": {"a": len}}, "not JSON serializable"),
        (b"12345678", "bytes; need a list of token ids"),
    ],
    ids=repr,
)
def test_a_result_that_is_no_sample_is_refused_by_row(result: Any, reason: str) -> None:
    chunk = run(FunctionTokenizer(lambda row: result if row["bad"] else [1]), [{"bad": False}, {"bad": True}])

    assert (token_ids(chunk), faults(chunk)) == ([[1]], [(1, "AD425")])
    assert chunk.errors[0].reason.startswith("the tokenize function returned something that is not a sample: ")
    assert reason in chunk.errors[0].reason


def test_each_row_is_announced_before_the_function_sees_it() -> None:
    seen: list[int] = []
    function = FunctionTokenizer(lambda row: seen.append(-row["n"]) or [1])

    function([b'{"n": 10}', b"{", b'{"n": 30}'], ColumnWriter(seen.append))

    assert seen == [0, -10, 2, -30]


def test_a_batched_function_is_called_once_for_all_rows() -> None:
    chunk = run(FunctionTokenizer(batched_lengths), [{"input": "ab"}, b"[]", {"input": "c"}])

    assert (token_ids(chunk), faults(chunk)) == ([[0, 1], [0]], [(1, "AD113")])


def test_a_batched_functions_failure_is_the_failing_rows_alone() -> None:
    def function(rows: list[dict[str, Any]]) -> Any:
        return [list(range(10 // row.pop("n"))) for row in rows]

    function.batched = True  # type: ignore[attr-defined]

    chunk = run(FunctionTokenizer(function), [{"n": 5}, {"n": 0}, {"n": 10}])

    assert (token_ids(chunk), faults(chunk)) == ([[0, 1], [0]], [(1, "AD421")])
    assert "ZeroDivisionError" in chunk.errors[0].reason


def test_a_batched_function_must_give_a_result_for_each_row() -> None:
    def function(rows: list[dict[str, Any]]) -> Any:
        return [[1]]

    function.batched = True  # type: ignore[attr-defined]

    chunk = run(FunctionTokenizer(function), [{"n": 1}, {"n": 2}])

    assert faults(chunk) == [(0, "AD425"), (1, "AD425")]
    assert "returned 1 results for 2 rows" in chunk.errors[0].reason
    assert run(FunctionTokenizer(function), []).num_rows == 0


def test_a_worker_makes_a_function_again_from_its_path() -> None:
    assert describe(lengths) == TokenizeSpec(f"{HERE}:lengths")
    assert describe(Description.Inner.function) == TokenizeSpec(f"{HERE}:Description.Inner.function")

    assert token_ids(run(open_spec(describe(lengths)), [{"input": "ab"}])) == [[0, 1]]


def test_a_worker_makes_a_description_again_from_its_settings() -> None:
    description = Description(step=7)

    spec = describe(description)

    assert isinstance(description, TokenizeFn)
    assert spec == TokenizeSpec(f"{HERE}:Description", {"step": 7})
    assert token_ids(run(open_spec(spec), [{"input": "ab"}])) == [[7, 7]]
    assert token_ids(run(open_tokenize_fn(description), [{"input": "ab"}])) == [[7, 7]]


def test_a_function_is_known_by_its_path_and_its_version() -> None:
    def versioned(row: dict[str, Any]) -> None:
        return None

    versioned.version = 3  # type: ignore[attr-defined]

    assert fingerprints_of(Description(step=7)) == {"tokenize_fn": "step 7"}
    assert fingerprints_of(lengths) == {"tokenize_fn": f"{HERE}:lengths version None"}
    assert fingerprints_of(versioned)["tokenize_fn"].endswith("versioned version 3")


def in_main(row: dict[str, Any]) -> None:
    return None


in_main.__module__ = "__main__"


@pytest.mark.parametrize(
    "function",
    [lambda row: None, functools.partial(lengths), in_main, [].append],
    ids=["lambda", "partial", "main", "method"],
)
def test_a_function_that_a_worker_cannot_import_is_refused_with_the_way_out(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"AD420 .*num_workers=0 to run it in this process"):
        describe(function)


def test_a_function_that_hides_another_is_refused() -> None:
    wrapped = functools.wraps(lengths)(lambda row: [1])

    with pytest.raises(ConfigError, match=f"AD420 '{HERE}:lengths' cannot be imported"):
        describe(wrapped)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("json", "is no import path; write 'package.module:name'"),
        ("json:", "is no import path"),
        ("json.loads", "is no import path"),
        ("os:system('x')", "is no import path"),
        ("no.such.module:f", "No module named 'no'"),
        ("json:nothing", "has no attribute 'nothing'"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_path(path)

    assert str(caught.value).startswith("AD420 ")
    assert reason in str(caught.value)


def test_an_import_path_resolves_to_its_object() -> None:
    assert resolve_path("json.decoder:JSONDecoder.decode").__name__ == "decode"
