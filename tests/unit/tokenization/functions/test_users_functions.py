"""A user's own function of rows, and one written for XTuner: how what it returns is read, and how a worker gets it."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import (
    BadRowError,
    ChatTokenizeFn,
    ConfigError,
    DataLoader,
    PackedCollator,
    SnapshotMismatchError,
    SoftPacking,
    TextTokenizeFn,
    TokenizeFn,
    XTunerTokenizeFn,
)
from asyncdata.tokenization import base
from asyncdata.tokenization.base import describe, fingerprints_of, open_spec, resolve_path
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.resolve import resolved
from asyncdata.tokenization.user_function import FunctionTokenizer
from tests.support.faults import until
from tests.support.tokenize_fns import row_id
from tests.support.xtuner_fns import Characters, Returns, counting, ready
from tests.unit.tokenization import drops, faults, run, token_ids, values

HERE = __name__
CHARACTERS = "tests.support.xtuner_fns:Characters"


def plain(result: Any, rows: Any = ({},)) -> Any:
    """What a plain function's result becomes."""
    return run(FunctionTokenizer(lambda row: result), rows)


def xtuner(result: Any, rows: Any = ({},)) -> Any:
    """The same of a function for XTuner."""
    return run(XTunerTokenizeFn(Returns(result)).open(), rows)


either = pytest.mark.parametrize("made", [plain, xtuner], ids=["plain", "xtuner"])


# What it returns


SAMPLES: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "a list": ([1, 2], [1, 2], {}),
    "an array": (np.array([1, 2]), [1, 2], {}),
    "nothing in a list": ([], [], {}),
    "a mapping that is no dict": (collections.UserDict(input_ids=[1, 2]), [1, 2], {}),
    "tokens": ({"tokens": [5]}, [5], {}),
    "input_ids go before tokens": ({"input_ids": [1], "tokens": ["a"]}, [1], {"extra": {"tokens": ["a"]}}),
    "columns, and the rest is extra": (
        {"input_ids": np.array([1, 2]), "prompt": "é", "label": None, "metadata": {"a": 1}, "n": [1.5]}, [1, 2],
        {"prompt": "é", "metadata": {"a": 1}, "extra": {"n": [1.5]}},
    ),
    "infinity and lone surrogates": (
        {"input_ids": [1], "prompt": "\ud800", "metadata": {"score": float("inf")}}, [1],
        {"prompt": "\ud800", "metadata": {"score": float("inf")}},
    ),
    "no labels": ({"input_ids": [5, 6], "labels": None}, [5, 6], {}),
}  # fmt: skip


@pytest.mark.parametrize(("result", "tokens", "columns"), SAMPLES.values(), ids=SAMPLES)
def test_what_a_function_may_return_is_a_sample(result, tokens, columns):
    chunk = plain(result)

    names = ("prompt", "label", "metadata", "extra", "spans")
    assert token_ids(chunk) == [tokens]
    assert {name: value for name in names if (value := chunk.value(name, 0)) is not None} == columns


def test_without_labels_all_of_a_sample_of_xtuners_is_trained():
    assert values(xtuner({"input_ids": np.array([5, 6])}), "spans") == [[[0, 2]]]


def test_none_or_a_text_or_no_tokens_for_xtuner_drop_a_row():
    chunk = run(FunctionTokenizer(lambda row: row["drop"]), [{"drop": None}, {"drop": "too odd"}, {"drop": [1]}])
    filtered = xtuner({"input_ids": [], "labels": [], "num_tokens": 0})

    assert (drops(chunk), chunk.row_of(0)) == ({"tokenize_fn": [0], "too odd": [1]}, 2)
    assert (filtered.num_samples, drops(filtered)) == (0, {"num_tokens_0": [0]})


REFUSED: list[tuple[Any, str]] = [
    (5, "int; need a list of token ids"),
    (b"12345678", "bytes; need a list of token ids"),
    ({"ids": [1]}, "a dict without 'input_ids': it has ['ids']"),
    ({"input_ids": "text"}, "str; need a list of token ids"),
    ({"tokens": "text"}, "str; need a list of token ids, or a dict with 'input_ids'"),
    ([1, -2], "token id -2 is negative"),
    ([[1]], ""),
    ([1.0], ""),
    (["a"], ""),
    ([2**31], ""),
    (np.array([[1]]), ""),
    ({"input_ids": [1], "metadata": {"a": len}}, "not JSON serializable"),
]


@pytest.mark.parametrize(("result", "reason"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_result_that_is_no_sample_is_refused_by_row(result, reason):
    chunk = run(FunctionTokenizer(lambda row: result if row["bad"] else [1]), [{"bad": False}, {"bad": True}])

    assert (token_ids(chunk), faults(chunk)) == ([[1]], [(1, "AD425")])
    assert chunk.errors[0].reason.startswith("the tokenize function returned something that is not a sample: ")
    assert reason in chunk.errors[0].reason
    if isinstance(result, dict) and "metadata" not in result:
        assert faults(xtuner(result)) == [(0, "AD425")]
        assert reason in xtuner(result).errors[0].reason


def test_a_result_for_xtuner_is_a_dict():
    assert "need a dict with 'input_ids'" in xtuner(None).errors[0].reason


HUGE = "word " * 100_000


def raises_chained(row: dict[str, Any]) -> None:
    try:
        raise ValueError(HUGE)
    except ValueError as error:
        raise KeyError(HUGE) from error


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda row: HUGE, "AD425 .* a text of 500,000 characters; a text is the reason to drop the row, .* ids"),
        (lambda row: {HUGE: 1}, "AD425 .* a dict without 'input_ids': it has"),
        (lambda row: {"input_ids": [1], "labels": [HUGE]}, r"AD425 .* labels\[0\] is word .* -100 elsewhere"),
        (raises_chained, r"AD421 .* raised KeyError\('word word [^\n]* characters left out\)"),
    ],
    ids=["text", "key", "label", "errors"],
)
def test_an_error_about_a_huge_value_is_short(jsonl_file, function, text):
    with (
        DataLoader(jsonl_file([{"id": 1}]), tokenize_fn=function, num_workers=0) as loader,
        pytest.raises(BadRowError, match=text) as caught,
    ):
        loader.get_next_batch(1)

    assert len(str(caught.value)) < 11_000
    assert len(caught.value.reason) < 2_100


# Its labels and masks


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens, and labels that are the token or -100."""
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=12))
    return tokens, [token if draw(st.booleans()) else -100 for token in tokens]


@either
@given(sample=samples(), as_array=st.booleans(), name=st.sampled_from(["input_ids", "tokens"]))
def test_labels_are_kept_exactly(made, sample, as_array, name):
    tokens, labels = (np.array(each, np.int64) if as_array else each for each in sample)

    chunk = made({name: tokens, "labels": labels})

    found = [-100] * len(sample[0])
    for start, stop in values(chunk, "spans")[0]:
        found[start:stop] = sample[0][start:stop]
    assert (token_ids(chunk), found, values(chunk, "extra")) == ([sample[0]], sample[1], [None])


MASKS = ["loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask", "loss_weights"]


@either
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_by_a_usual_name_makes_the_labels(made, name):
    for mask in ([0, 1, 1], np.array([0, 1, 1]), [False, True, True], [0.0, 1.0, 1.0]):
        chunk = made({"input_ids": [5, 6, 7], name: mask, "kind": "x"})

        assert (values(chunk, "spans"), values(chunk, "extra")) == ([[[1, 3]]], [{"kind": "x"}])


@either
def test_masks_and_labels_that_agree_are_one(made):
    some = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "loss_mask": [0, 1, 0], "completion_mask": [0, 1, 0]}
    none = {"input_ids": [5, 6], "loss_mask": [0, 0], "assistant_masks": None}

    assert (values(made(some), "spans"), values(made(some), "extra")) == ([[[1, 2]]], [None])
    assert (values(made(none), "spans"), values(made(none), "extra")) == ([[]], [None])


SHIFTED = "the labels are shifted: each is the next token; return them unshifted, collators shift them"
NOT_LABELS: list[tuple[dict[str, Any], str]] = [
    ({"labels": [5, 6]}, "2 labels for 3 tokens"),
    ({"labels": [-100, 6, 9]}, "labels[2] is 9, and the token 7; a label must be the token itself where it is trained"),
    ({"labels": [1, 0, 0]}, "labels[0] is 1, and the token 5"),
    ({"labels": [6, 7, -100]}, SHIFTED),
    ({"labels": [-100, 7, -100]}, "the labels are shifted"),
    ({"labels": "abc"}, "str; need a list of labels"),
    ({"labels": 5}, "int; need a list of labels"),
    ({"labels": [[5], [6], [7]]}, "labels[0] is [5], and the token 5"),
    ({"input_ids": [5], "labels": [4]}, "labels[0] is 4, and the token 5"),
    ({"loss_mask": [0, 1]}, "loss_mask has 2 values for 3 tokens; it needs one for each token, also of the prompt"),
    ({"loss_mask": []}, "loss_mask has 0 values for 3 tokens"),
    ({"loss_mask": [0, 1, 2]}, "loss_mask has 2, and must be 0 or 1 for each token"),
    ({"loss_mask": [[0, 1, 1]]}, "loss_mask has [0, 1, 1], and must be 0 or 1 for each token"),
    ({"loss_weights": [0, 0.5, 1]}, "loss_weights has 0.5, and must be 0 or 1 for each token; weights are not"),
    ({"assistant_masks": "abc"}, "str; need a list of assistant_masks"),
    ({"loss_mask": [0, 1, 1], "completion_mask": [0, 0, 1]}, "loss_mask and completion_mask differ at token 1"),
    ({"labels": [-100, 6, 7], "loss_mask": [1, 1, 1]}, "labels and loss_mask differ at token 0"),
]


@either
@pytest.mark.parametrize(("fields", "reason"), NOT_LABELS, ids=lambda value: str(value)[:50])
def test_labels_that_are_none_make_a_bad_row_that_says_how_they_should_be(made, fields, reason):
    chunk = made({"input_ids": [5, 6, 7], **fields})

    assert faults(chunk) == [(0, "AD425")]
    assert reason in chunk.errors[0].reason


def test_a_loaders_samples_have_these_labels_and_its_packs_train_them(jsonl_file):
    def answer_only(row: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1], "kind": "x"}

    path, inline = str(jsonl_file([{"a": 1}])), {"tokenize_fn": answer_only, "num_workers": 0, "epochs": 1}
    with DataLoader(path, **inline) as loader:
        (sample,) = loader.get_next_batch(1)
    with DataLoader(
        path, packing=SoftPacking(max_length=4), collate_fn=PackedCollator(), batch_size=1, **inline
    ) as loader:
        (batch,) = loader

    assert (sample.tokens.tolist(), sample.labels.tolist(), sample.extra) == ([5, 6, 7], [-100, 6, 7], {"kind": "x"})
    assert batch["labels"].tolist() == [[-100, 6, 7]]


# What it raises, and batches


def lengths(row: dict[str, Any]) -> list[int]:
    return list(range(len(row["input"])))


def test_a_row_that_the_function_raises_on_is_named_with_the_users_own_traceback():
    chunk = run(FunctionTokenizer(lengths), [{"input": "a"}, {"output": "b"}, b"{", {"input": "c"}])

    assert token_ids(chunk) == [[0], [0]]
    assert faults(chunk) == [(1, "AD421"), (2, "AD101")]
    assert chunk.errors[0].reason == "the tokenize function raised KeyError('input')"
    assert "in lengths" in chunk.errors[0].traceback
    assert base.__file__ not in chunk.errors[0].traceback
    assert faults(run(XTunerTokenizeFn(CHARACTERS).open(), [{"text": "a"}, {"txt": "a"}])) == [(1, "AD421")]


def test_each_row_is_announced_before_the_function_sees_it():
    seen: list[int] = []
    function = FunctionTokenizer(lambda row: seen.append(-row["n"]) or [1])

    function([b'{"n": 10}', b"{", b'{"n": 30}'], ColumnWriter(seen.append))

    assert seen == [0, -10, 2, -30]


def batched(function: Any) -> FunctionTokenizer:
    function.batched = True
    return FunctionTokenizer(function)


def test_a_batched_function_is_called_once_for_all_rows_and_again_for_each_if_it_raises():
    calls = []

    def divides(rows: list[dict[str, Any]]) -> Any:
        calls.append(len(rows))
        return [list(range(10 // row.pop("n"))) for row in rows]

    good, bad = (run(batched(divides), [{"n": 5}, b"[]", {"n": number}]) for number in (10, 0))

    assert (token_ids(good), faults(good)) == ([[0, 1], [0]], [(1, "AD113")])
    assert (token_ids(bad), faults(bad)) == ([[0, 1]], [(1, "AD113"), (2, "AD421")])
    assert "ZeroDivisionError" in bad.errors[-1].reason
    assert calls == [2, 2, 1, 1]


def test_a_batched_function_must_give_a_result_for_each_row():
    chunk = run(batched(lambda rows: [[1]]), [{"n": 1}, {"n": 2}])

    assert faults(chunk) == [(0, "AD425"), (1, "AD425")]
    assert "returned 1 results for 2 rows" in chunk.errors[0].reason
    assert run(batched(lambda rows: [[1]]), []).num_rows == 0


# Its way to a worker, and its fingerprint


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
        def function(row: dict[str, Any]) -> list[int]:
            return [9]


@pytest.mark.parametrize(
    ("fn", "path", "tokens"),
    [
        (lengths, f"{HERE}:lengths", [0, 1]),
        (Description.Inner.function, f"{HERE}:Description.Inner.function", [9]),
        (Description(step=7), f"{HERE}:Description", [7, 7]),
    ],
    ids=["function", "nested", "description"],
)
def test_a_worker_makes_a_function_again_from_its_path_and_settings(fn, path, tokens):
    spec = describe(fn)

    assert (spec.path, spec.settings) == (path, {"step": 7} if isinstance(fn, TokenizeFn) else None)
    assert token_ids(run(open_spec(spec), [{"input": "ab"}])) == [tokens]


@pytest.mark.parametrize(
    "build", [CHARACTERS, Characters, "tests.support.xtuner_fns:ready", "tests.support.xtuner_fns:counting", counting]
)
def test_one_for_xtuner_is_made_by_a_path_a_class_or_a_function_and_runs_in_its_runtime_state(build):
    chunk = run(open_spec(describe(XTunerTokenizeFn(build))), [{"text": "abc"}])

    assert (token_ids(chunk), values(chunk, "spans")) == ([[97, 98, 99]], [[[1, 3]]])
    assert values(chunk, "extra") == [{"char_start": 0}]


def test_a_function_is_known_by_its_path_and_its_version():
    def versioned(row: dict[str, Any]) -> None:
        return None

    versioned.version = 3  # type: ignore[attr-defined]

    assert fingerprints_of(Description(step=7)) == {"tokenize_fn": "step 7"}
    assert fingerprints_of(lengths) == {"tokenize_fn": f"{HERE}:lengths version None"}
    assert fingerprints_of(versioned)["tokenize_fn"].endswith("versioned version 3")


def test_one_for_xtuner_is_known_by_its_hash_and_the_arguments_that_the_hash_forgets():
    arguments: list[dict[str, Any]] = [{}, {"max_length": 4}, {"max_length": 5}, {"name": "other"}]
    made = [XTunerTokenizeFn(CHARACTERS, each) for each in arguments]
    of_objects = [resolved(Characters(2)), XTunerTokenizeFn(Characters(4)), XTunerTokenizeFn(Characters(5))]

    assert len({fn.fingerprints()["tokenize_fn"] for fn in made}) == 4
    assert made[1].fingerprints() == XTunerTokenizeFn(Characters, {"max_length": 4}).fingerprints()
    assert len({str(fn.fingerprints()) for fn in of_objects}) == 1
    assert resolved(Characters(2, name="other")).fingerprints() != of_objects[0].fingerprints()


def in_main(row: dict[str, Any]) -> None:
    return None


in_main.__module__ = "__main__"


@pytest.mark.parametrize(
    "function",
    [lambda row: None, functools.partial(lengths), in_main, [].append],
    ids=["lambda", "partial", "main", "method"],
)
def test_a_function_that_a_worker_cannot_import_is_refused_with_the_way_out(function):
    with pytest.raises(ConfigError, match=r"AD420 .*num_workers=0 to run it in this process"):
        describe(function)


def test_a_function_that_hides_another_is_refused():
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
def test_a_path_that_leads_nowhere_is_named(path, reason):
    with pytest.raises(ConfigError) as caught:
        resolve_path(path)

    assert str(caught.value).startswith("AD420 ")
    assert reason in str(caught.value)
    assert resolve_path("json.decoder:JSONDecoder.decode").__name__ == "decode"


# What may be passed as tokenize_fn


def test_functions_and_descriptions_are_returned_unchanged_and_objects_by_their_path_are_described(small_tokenizer):
    fn = TextTokenizeFn(str(small_tokenizer))
    named: Any = resolved("tests.support.xtuner_fns:ready")

    assert (resolved(row_id), resolved("tests.support.tokenize_fns:row_id")) == (row_id, row_id)
    assert resolved(fn) == fn
    assert named == XTunerTokenizeFn("tests.support.xtuner_fns:ready")
    assert describe(named).settings == {"build": "tests.support.xtuner_fns:ready", "arguments": {}}
    assert XTunerTokenizeFn(ready).build is ready


NEEDS_AN_ARGUMENT = r"AD420 .* missing a required argument: 'result'; pass tokenize_fn="
AN_INSTANCE = r"tokenize_fn is the class ChatTokenizeFn; pass an instance: ChatTokenizeFn"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: XTunerTokenizeFn("tests.support.xtuner_fns:missing").resolve(), "AD420 cannot import"),
        (lambda: XTunerTokenizeFn(dict).resolve(), "AD420 'builtins:dict' makes a dict, which lacks __call__ or hash"),
        (lambda: XTunerTokenizeFn(lambda: None).resolve(), "AD420 .* has no import path"),
        (lambda: XTunerTokenizeFn(CHARACTERS, {"name": {1}}).resolve(), "arguments must be JSON values"),
        (lambda: resolved(Returns), NEEDS_AN_ARGUMENT),
        (lambda: resolved("tests.support.xtuner_fns:Returns"), NEEDS_AN_ARGUMENT),
        (lambda: resolved(ChatTokenizeFn), AN_INSTANCE),
        (lambda: resolved("asyncdata:ChatTokenizeFn"), AN_INSTANCE),
        (lambda: describe(Description), "pass an instance"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused_before_any_worker(make, reason):
    with pytest.raises(ConfigError, match=reason):
        make()


@pytest.fixture
def path(jsonl_file):
    return str(jsonl_file([{"text": "abcdef"}] * 8))


def tokens_of(path: str, fn: Any, num_workers: int = 0) -> list[int]:
    with DataLoader(path, tokenize_fn=fn, num_workers=num_workers) as loader:
        (sample,) = loader.get_next_batch(1)
    assert sample.labels is not None
    assert sample.labels.tolist() == [-100, *sample.tokens.tolist()[1:]]
    return sample.tokens.tolist()


def test_an_object_for_xtuner_runs_in_this_process_and_is_refused_for_a_worker_with_the_ways_out(path):
    fn = Characters(2)
    fn.set_state("cache")

    assert tokens_of(path, fn) == tokens_of(path, XTunerTokenizeFn(Characters(2))) == [97, 98]
    with pytest.raises(ConfigError, match="AD420 a worker process cannot be sent a Characters; ") as refused:
        DataLoader(path, tokenize_fn=fn, num_workers=1)
    for way_out in ("XTunerTokenizeFn('package.module:name'", "tokenize_fn='package.module:name'", "num_workers=0"):
        assert way_out in str(refused.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        pytest.param("tests.support.xtuner_fns:ready", 3, id="the variable of a module"),
        pytest.param(CHARACTERS, 6, id="the path of a class"),
        pytest.param(Characters, 6, id="a class"),
        pytest.param(XTunerTokenizeFn(CHARACTERS, {"max_length": 4}), 4, id="a description"),
    ],
)
def test_one_that_has_an_import_path_runs_in_a_worker(path, fn, wanted):
    assert len(tokens_of(path, fn, num_workers=1)) == wanted


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (Characters(2), Characters(2, name="other"), "tokenize_fn"),
        (XTunerTokenizeFn(Characters(4)), XTunerTokenizeFn(Characters(5)), "AD603"),
    ],
    ids=["its hash", "canaries, where the hash does not show it"],
)
def test_a_snapshot_of_a_function_that_gives_other_samples_is_refused(path, before, after, error):
    with DataLoader(path, tokenize_fn=before, num_workers=0) as loader:
        loader.get_next_batch(2)
        until(lambda: loader.state_dict()["canaries"])
        state = loader.state_dict()

    with (
        DataLoader(path, tokenize_fn=after, num_workers=0) as loader,
        pytest.raises(SnapshotMismatchError, match=error),
    ):
        loader.load_state_dict(state)
        loader.get_next_batch(1)
