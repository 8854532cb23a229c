"""A user's own function of rows, and one written for XTuner: how what it returns is read, pictures too."""

import collections
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncdata
from asyncdata import ChatTokenizeFn, Column, DataLoader
from asyncdata.errors import BadRowError, ConfigError
from asyncdata.tokenization import base
from asyncdata.tokenization.base import describe, fingerprints_of, open_spec, resolve_path, resolved
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.xtuner import XTunerTokenizeFn
from tests.support.xtuner_fns import Characters, Returns, counting
from tests.unit.tokenization import drops, faults, run, token_ids, values

HERE = __name__
XTUNER_FNS = "tests.support.xtuner_fns"
CHARACTERS = f"{XTUNER_FNS}:Characters"
INLINE: dict[str, Any] = {"num_workers": 0, "epochs": 1}


def plain(result: Any) -> Any:
    """What a plain function's result becomes."""
    return run(FunctionTokenizer(lambda row: result), [{}])


def xtuner(result: Any) -> Any:
    """The same of a function for XTuner."""
    return run(XTunerTokenizeFn(Returns(result)).open(), [{}])


either = pytest.mark.parametrize("made", [plain, xtuner], ids=["plain", "xtuner"])


SAMPLES: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "a list": ([1, 2], [1, 2], {}),
    "an array": (np.array([1, 2]), [1, 2], {}),
    "nothing in a list": ([], [], {}),
    "a mapping that is no dict": (collections.UserDict(input_ids=[1, 2]), [1, 2], {}),
    "tokens": ({"tokens": [5]}, [5], {}),
    "input_ids go before tokens": ({"input_ids": [1], "tokens": ["a"]}, [1], {"extra": {"tokens": ["a"]}}),
    "columns, and the rest is extra": (
        {"input_ids": np.array([1, 2]), "prompt": "é", "label": None, "metadata": {"a": 1}, "n": [1.5]}, [1, 2],
        {"prompt": "é", "metadata": {"a": 1}, "extra": {"n": [1.5]}}),
    "infinity and lone surrogates": ({"input_ids": [1], "prompt": "\ud800", "metadata": {"score": float("inf")}}, [1],
        {"prompt": "\ud800", "metadata": {"score": float("inf")}}),
    "no labels": ({"input_ids": [5, 6], "labels": None}, [5, 6], {}),
}  # fmt: skip


@pytest.mark.parametrize(("result", "tokens", "columns"), SAMPLES.values(), ids=SAMPLES)
def test_what_a_function_may_return_is_a_sample(result, tokens, columns):
    chunk = plain(result)

    names = ("prompt", "label", "metadata", "extra", "spans")
    assert token_ids(chunk) == [tokens]
    assert {name: value for name in names if (value := chunk.value(name, 0)) is not None} == columns


def test_none_or_a_text_or_no_tokens_for_xtuner_drop_a_row():
    chunk = run(FunctionTokenizer(lambda row: row["drop"]), [{"drop": None}, {"drop": "too odd"}, {"drop": [1]}])
    filtered = xtuner({"input_ids": [], "labels": [], "num_tokens": 0})

    assert (drops(chunk), chunk.row_of(0)) == ({"tokenize_fn": [0], "too odd": [1]}, 2)
    assert (filtered.num_samples, drops(filtered)) == (0, {"num_tokens_0": [0]})


REFUSED: list[tuple[Any, str]] = [
    (5, "int; need a list of token ids"), (b"12345678", "bytes; need a list of token ids"),
    ({"ids": [1]}, "a dict without 'input_ids': it has ['ids']"),
    ({"input_ids": "text"}, "str; need a list of token ids"),
    ({"tokens": "text"}, "str; need a list of token ids, or a dict with 'input_ids'"),
    ([1, -2], "token id -2 is negative"),
    *(([wrong], f"input_ids has {wrong!r}; it is a flat list of whole numbers") for wrong in ([1], 1.0, "a")),
    ([2**31], ""), (np.array([[1]]), "input_ids has [1]; it is a flat list"),
    ({"input_ids": [1], "metadata": {"a": len}}, "a value of type builtin_function_or_method;"),
    ({"input_ids": [1, 2], "label": [-100, 2]}, "return labels of tokens as 'labels'"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "reason"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_result_that_is_no_sample_is_refused_by_row(result, reason):
    chunk = run(FunctionTokenizer(lambda row: result if row["bad"] else [1]), [{"bad": False}, {"bad": True}])
    of_xtuner = xtuner(result)

    assert (token_ids(chunk), faults(chunk), faults(of_xtuner)) == ([[1]], [(1, "AD425")], [(0, "AD425")])
    assert chunk.errors[0].reason.startswith("the tokenize function returned something that is not a sample: ")
    assert reason in chunk.errors[0].reason
    assert (reason if isinstance(result, dict) else "need a dict with 'input_ids'") in of_xtuner.errors[0].reason


HUGE = "word " * 100_000


def raises(row: dict[str, Any]) -> None:
    raise KeyError(HUGE) from ValueError(HUGE)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda row: HUGE, "AD425 .* a text of 500,000 characters; a text is the reason to drop the row, .* ids"),
        (lambda row: {HUGE: 1}, "AD425 .* a dict without 'input_ids': it has"),
        (lambda row: {"input_ids": [1], "labels": [HUGE]}, r"AD425 .* labels\[0\] is word .* -100 elsewhere"),
        (raises, r"AD421 .* raised KeyError\('word word [^\n]* characters left out\)"),
    ],
    ids=["text", "key", "label", "errors"],
)
def test_an_error_about_a_huge_value_is_short(jsonl_file, function, text):
    with DataLoader(jsonl_file([{"id": 1}]), tokenize_fn=function, num_workers=0) as loader:
        with pytest.raises(BadRowError, match=text) as caught:
            loader.get_next_batch(1)

    assert len(str(caught.value)) < 11_000
    assert len(caught.value.reason) < 2_100


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
GIVEN: list[tuple[dict[str, Any], list[list[int]]]] = [
    *(({name: mask}, [[1, 3]]) for name in MASKS for mask in ([0, 1, 1], [False, True, True], [0.0, 1.0, 1.0])),
    *(({name: np.array([0, 1, 1])}, [[1, 3]]) for name in MASKS),
    ({"labels": [-100, 6, -100], "loss_mask": [0, 1, 0], "completion_mask": [0, 1, 0]}, [[1, 2]]),
    ({"loss_mask": [0, 0, 0], "assistant_masks": None}, []),
]


@either
def test_masks_by_their_usual_names_make_the_labels_and_those_that_agree_are_one(made):
    for fields, spans in GIVEN:
        chunk = made({"input_ids": [5, 6, 7], **fields, "kind": "x"})
        assert (values(chunk, "spans"), values(chunk, "extra")) == ([spans], [{"kind": "x"}]), fields
    assert values(xtuner({"input_ids": np.array([5, 6])}), "spans") == [[[0, 2]]], "all, as nothing else is said"


SHIFTED = "the labels are shifted: each is the next token; return them unshifted, collators shift them"
NOT_LABELS: list[tuple[dict[str, Any], str]] = [
    ({"labels": [5, 6]}, "2 labels for 3 tokens"),
    ({"labels": [-100, 6, 9]}, "labels[2] is 9, and the token 7; a label must be the token itself where it is trained"),
    ({"labels": [6, 7, -100]}, SHIFTED),
    ({"labels": "abc"}, "str; need a list of labels"),
    ({"labels": 5}, "int; need a list of labels"),
    ({"loss_mask": [0, 1]}, "loss_mask has 2 values for 3 tokens; it needs one for each token, also of the prompt"),
    ({"loss_mask": [0, 1, 2]}, "loss_mask has 2, and must be 0 or 1 for each token"),
    ({"loss_weights": [0, 0.5, 1]}, "loss_weights has 0.5, and must be 0 or 1 for each token; for weights declare "),
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

    path = str(jsonl_file([{"a": 1}]))
    packs = {"packing": asyncdata.SoftPacking(max_length=3), "collate_fn": asyncdata.PackedCollator(), "batch_size": 1}
    with DataLoader(path, tokenize_fn=answer_only, **INLINE) as loader:
        (sample,) = loader.get_next_batch(1)
    with DataLoader(path, tokenize_fn=answer_only, **packs, **INLINE) as loader:
        (batch,) = loader

    assert (sample.tokens.tolist(), sample.labels.tolist(), sample.extra) == ([5, 6, 7], [-100, 6, 7], {"kind": "x"})
    assert batch["labels"].tolist() == [[-100, 6, 7]]


def lengths(row: dict[str, Any]) -> list[int]:
    return list(range(len(row["input"])))


def test_a_row_that_the_function_raises_on_is_named_with_the_users_own_traceback():
    chunk = run(FunctionTokenizer(lengths), [{"input": "a"}, {"output": "b"}, b"{", {"input": "c"}])

    assert (token_ids(chunk), faults(chunk)) == ([[0], [0]], [(1, "AD421"), (2, "AD101")])
    assert chunk.errors[0].reason == "the tokenize function raised KeyError('input')"
    assert "in lengths" in chunk.errors[0].traceback
    assert base.__file__ not in chunk.errors[0].traceback
    assert faults(run(XTunerTokenizeFn(CHARACTERS).open(), [{"text": "a"}, {"txt": "a"}])) == [(1, "AD421")]


def test_a_batched_function_is_called_once_for_all_rows_and_again_for_each_if_it_raises():
    calls = []

    def divides(rows: list[dict[str, Any]]) -> Any:
        calls.append(len(rows))
        return [list(range(10 // row.pop("n"))) for row in rows if "left out" not in row]

    divides.batched = True  # type: ignore[attr-defined]
    function = FunctionTokenizer(divides)
    good, bad = (run(function, [{"n": 5}, b"[]", {"n": number}]) for number in (10, 0))
    few = run(function, [{"n": 1}, {"left out": True}])

    assert (token_ids(good), faults(good)) == ([[0, 1], [0]], [(1, "AD113")])
    assert (token_ids(bad), faults(bad)) == ([[0, 1]], [(1, "AD113"), (2, "AD421")])
    assert "ZeroDivisionError" in bad.errors[-1].reason
    assert faults(few) == [(0, "AD425"), (1, "AD425")]
    assert "returned 1 results for 2 rows" in few.errors[0].reason
    assert (run(function, []).num_rows, calls) == (0, [2, 2, 1, 1, 2])


# Its way to a worker, and its fingerprint


class Description:
    """A tokenize function of a user's own, with settings."""

    def __init__(self, step: int = 1) -> None:
        self.step = step

    def resolve(self) -> "Description":
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
    ("fn", "path", "settings", "tokens"),
    [
        (lengths, f"{HERE}:lengths", None, [0, 1]),
        (Description.Inner.function, f"{HERE}:Description.Inner.function", None, [9]),
        (Description(step=7), f"{HERE}:Description", {"step": 7}, [7, 7]),
    ],
    ids=["function", "nested", "description"],
)
def test_a_worker_makes_a_function_again_from_its_path_and_settings(fn, path, settings, tokens):
    spec = describe(fn)

    assert (spec.path, spec.settings) == (path, settings)
    assert token_ids(run(open_spec(spec), [{"input": "ab"}])) == [tokens]


@pytest.mark.parametrize("build", [CHARACTERS, Characters, f"{XTUNER_FNS}:ready", f"{XTUNER_FNS}:counting", counting])
def test_one_for_xtuner_is_made_by_a_path_a_class_or_a_function_and_runs_in_its_runtime_state(build):
    chunk = run(open_spec(describe(XTunerTokenizeFn(build))), [{"text": "abc"}])

    assert (token_ids(chunk), values(chunk, "spans")) == ([[97, 98, 99]], [[[1, 3]]])
    assert values(chunk, "extra") == [{"char_start": 0}]
    cut = describe(XTunerTokenizeFn(CHARACTERS, {"max_length": 2}))
    assert token_ids(run(open_spec(cut), [{"text": "abc"}])) == [[97, 98]]


def test_a_function_is_known_by_its_path_and_its_version_or_its_hash_and_arguments_that_the_hash_forgets():
    def versioned(row: dict[str, Any]) -> None:
        return None

    versioned.version = 3  # type: ignore[attr-defined]
    arguments: list[dict[str, Any]] = [{}, {"max_length": 4}, {"max_length": 5}, {"name": "other"}]
    made = [XTunerTokenizeFn(CHARACTERS, each) for each in arguments]
    of_objects = [resolved(Characters(2)), XTunerTokenizeFn(Characters(4)), XTunerTokenizeFn(Characters(5))]

    assert fingerprints_of(Description(step=7)) == {"tokenize_fn": "step 7"}
    assert fingerprints_of(lengths) == {"tokenize_fn": f"{HERE}:lengths version None"}
    assert fingerprints_of(versioned)["tokenize_fn"].endswith("versioned version 3")
    assert len({fn.fingerprints()["tokenize_fn"] for fn in made}) == 4
    assert made[1].fingerprints() == XTunerTokenizeFn(Characters, {"max_length": 4}).fingerprints()
    assert len({str(fn.fingerprints()) for fn in of_objects}) == 1
    assert resolved(Characters(2, name="other")).fingerprints() != of_objects[0].fingerprints()


def in_main(row: dict[str, Any]) -> None:
    return None


in_main.__module__ = "__main__"
NEEDS_AN_ARGUMENT = r"AD420 .* missing a required argument: 'result'; pass tokenize_fn="
AN_INSTANCE = r"tokenize_fn is the class ChatTokenizeFn; pass an instance: ChatTokenizeFn"
NOT_IMPORTABLE = "AD420 .*num_workers=0 to run it in this process"
NO_PATH = "is no import path"
REFUSED_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: describe(lambda row: None), NOT_IMPORTABLE),
    "partial": (lambda: describe(functools.partial(lengths)), NOT_IMPORTABLE),
    "of the main module": (lambda: describe(in_main), NOT_IMPORTABLE),
    "a method": (lambda: describe([].append), NOT_IMPORTABLE),
    "one that hides another": (lambda: describe(functools.wraps(lengths)(lambda row: [1])),
        f"AD420 '{HERE}:lengths' cannot be imported"),
    "a module": (lambda: resolve_path("json"), f"AD420 .*{NO_PATH}; write 'package.module:name'"),
    "no name": (lambda: resolve_path("json:"), f"AD420 .*{NO_PATH}"),
    "dots": (lambda: resolve_path("json.loads"), f"AD420 .*{NO_PATH}"),
    "a call": (lambda: resolve_path("os:system('x')"), f"AD420 .*{NO_PATH}"),
    "no module": (lambda: resolve_path("no.such.module:f"), "AD420 .*No module named 'no'"),
    "not in its module": (lambda: resolve_path("json:nothing"), "AD420 .*has no attribute 'nothing'"),
    "missing for xtuner": (lambda: XTunerTokenizeFn(f"{XTUNER_FNS}:missing").resolve(), "AD420 cannot import"),
    "a dict for xtuner": (lambda: XTunerTokenizeFn(dict).resolve(),
        "AD420 'builtins:dict' makes a dict, which lacks __call__ or hash"),
    "a lambda for xtuner": (lambda: XTunerTokenizeFn(lambda: None).resolve(), "AD420 .* has no import path"),
    "arguments": (lambda: XTunerTokenizeFn(CHARACTERS, {"name": {1}}).resolve(), "arguments must be JSON values"),
    "a class that needs an argument": (lambda: resolved(Returns), NEEDS_AN_ARGUMENT),
    "its path": (lambda: resolved(f"{XTUNER_FNS}:Returns"), NEEDS_AN_ARGUMENT),
    "a class of ours": (lambda: resolved(ChatTokenizeFn), AN_INSTANCE),
    "the path of one": (lambda: resolved("asyncdata:ChatTokenizeFn"), AN_INSTANCE),
    "a class of the user's": (lambda: describe(Description), "pass an instance"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), REFUSED_FUNCTIONS.values(), ids=REFUSED_FUNCTIONS)
def test_what_a_worker_cannot_make_is_refused_before_there_is_any(make, reason):
    with pytest.raises(ConfigError, match=reason):
        make()


@pytest.fixture
def path(jsonl_file):
    return str(jsonl_file([{"text": "abcdef"}] * 8))


def tokens_of(path: str, fn: Any) -> list[int]:
    with DataLoader(path, tokenize_fn=fn, num_workers=0) as loader:
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


PROCESSOR = SimpleNamespace(patch_size=2, temporal_patch_size=2)
VL = {
    "input_ids": [1, 2], "labels": [-100, 2], "num_tokens": 2, "num_imgs": [1],
    "pixel_values": np.ones((4, 24), np.float32), "image_grid_thw": np.array([[1, 2, 2]]), "num_img_tokens": [4],
    "position_ids": np.arange(6).reshape(3, 1, 2),
}  # fmt: skip


class Pictures:
    """With the attributes of XTuner's function for Qwen3-VL."""

    img_context_token_id = 9

    def __init__(self, result: dict[str, Any], processor: Any = PROCESSOR, **attributes: Any) -> None:
        self.result = result
        self.image_processor = processor
        vars(self).update(attributes)

    def hash(self) -> str:
        return "pictures"

    def __call__(self, item: dict[str, Any], media_root: str = "") -> dict[str, Any]:
        return self.result | ({"root": media_root} if media_root else {})


def sample_of(rows: Any, made: Any, **settings: Any) -> Any:
    with DataLoader(rows, tokenize_fn=XTunerTokenizeFn(made, **settings), num_workers=0) as loader:
        return loader.get_next_batch(1)[0]


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"text": "a"}])


TEXT = {name: VL[name] for name in ("input_ids", "labels", "position_ids", "num_tokens", "num_imgs")}
TILES = {name: VL[name] for name in ("input_ids", "num_tokens", "num_img_tokens")}
GRIDS = {"image_grid_thw": ((1, 3), np.int64), "num_img_tokens": ((1,), np.int64)}
MROPE = {"mrope": ((2, 3), np.int64)}
SHAPES: dict[str, tuple[Pictures, dict[str, Any]]] = {
    "pictures of Qwen": (Pictures(VL), {"pixel_values": ((4, 24), np.float32), **GRIDS, **MROPE}),
    "a text among them": (Pictures(TEXT | {"num_img_tokens": [0]}), MROPE),
    "pictures without positions": (Pictures(VL | {"position_ids": None}, enable_3d_rope=False),
        {"pixel_values": ((4, 24), np.float32), **GRIDS}),
    "tiles of InternVL": (Pictures(TILES | {"pixel_values": np.ones((2, 3, 4, 4))}, None, image_size=4),
        {"pixel_values": ((2, 3, 4, 4), np.float32), "num_img_tokens": ((1,), np.int64)}),
}  # fmt: skip


@pytest.mark.parametrize(("made", "shapes"), SHAPES.values(), ids=SHAPES)
def test_pictures_and_the_positions_of_tokens_are_columns(rows, made, shapes):
    sample = sample_of(rows, made, media_root="media")

    columns = {name: array for name, array in sample.columns.items() if len(array)}
    assert {name: (array.shape, array.dtype) for name, array in columns.items()} == shapes
    assert ("mrope" in sample.columns.declared) is ("mrope" in shapes)
    assert "mrope" not in shapes or columns["mrope"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert sample.extra == {**({"num_imgs": [1]} if "num_imgs" in made.result else {}), "root": "media"}


def test_columns_that_the_function_declares_go_first(rows):
    own = (Column("weights", "float32"),)
    made = Pictures({"input_ids": [1, 2], "weights": [0.5, 1]}, columns=own)

    assert sample_of(rows, made, media_root="media").columns.declared == {"weights": own[0]}


def test_what_the_pictures_depend_on_is_in_the_fingerprint():
    larger = SimpleNamespace(patch_size=4, temporal_patch_size=2)
    made = [
        XTunerTokenizeFn(Pictures(VL)), XTunerTokenizeFn(Pictures(VL), media_root="a"),
        XTunerTokenizeFn(Pictures(VL, larger)), XTunerTokenizeFn(Pictures(VL, enable_3d_rope=False)),
    ]  # fmt: skip
    assert len({fn.fingerprints()["tokenize_fn"] for fn in made}) == len(made)


def test_pictures_of_another_size_are_bad_rows_and_a_root_is_a_path():
    opened = XTunerTokenizeFn(Pictures(VL | {"pixel_values": np.ones((4, 25))})).open()
    assert isinstance(opened, FunctionTokenizer)
    assert faults(run(opened, [{}])) == [(0, "AD425")]
    with pytest.raises(ConfigError, match="media_root is the path of a folder"):
        XTunerTokenizeFn(Pictures(VL), media_root=1)
