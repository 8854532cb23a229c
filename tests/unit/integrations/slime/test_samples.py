"""slime's samples: fresh ones made of rows, and records of them that a snapshot can hold."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Sample
from tests.support.examples import in_ci
from tests.support.parts import from_record, groups_of, resolve_sample_type, to_record
from tests.support.peers.checkouts import module_of, stand_ins
from tests.support.peers.records import cases_of
from tests.support.peers.rollouts import fields_of
from tests.support.slime_source import SlimeSample


@pytest.fixture(params=["ours", "slime's"])
def kind(request):
    return SlimeSample if request.param == "ours" else module_of("slime", "utils.types").Sample


def made(kind, size=2, **values):
    """The group of one prompt."""
    sample = Sample(**{"prompt": "why", "metadata": {}, "extra": {}, **values})
    (group,) = groups_of([sample], kind, size, 7, 9)
    return group


NESTED = {"tags": ["a", "b"], "deep": {"er": [{"x": None}, 1.5]}}
ODD = {"nan": [math.nan], "big": [2**70], "lone": ["\ud800"], "inf": [math.inf]}


@pytest.mark.parametrize(
    "values",
    [{}, {"label": "72", "metadata": {"id": 1}}, {"label": {"a": [1]}, "metadata": NESTED}, {"metadata": ODD}],
    ids=["bare", "labelled", "nested", "odd"],
)
def test_a_sample_is_what_the_constructor_gives(kind, values):
    prompt = [{"role": "user", "content": "why"}]
    for number, sample in enumerate(made(kind, prompt=prompt, **values)):
        theirs = kind(**{"metadata": {}, **values}, prompt=prompt, group_index=7, index=9 + number)
        assert type(sample) is kind
        assert list(vars(sample)) == list(vars(theirs))
        assert repr(sample) == repr(theirs)  # NaN is NaN, and equal is not enough: 1 == True


def test_samples_share_nothing_that_can_be_changed(kind):
    values = {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "why"}]}],
        "label": {"a": [1]},
        "metadata": {"a": {"b": []}},
        "extra": {"multimodal_inputs": {"images": [[1, 2]], "videos": None}},
    }
    kept = copy.deepcopy(values)
    first, second = made(kind, tokens=np.array([1, 2], np.int32), **values)
    before = copy.deepcopy(second)

    first.prompt[0]["content"][0]["text"] = "changed"
    for each in (first.label["a"], first.metadata["a"]["b"], first.tokens, first.multimodal_inputs["images"][0]):
        each.append(9)
    first.weight_versions.append("v1")
    first.apply_chat_template_kwargs["x"] = 1
    first.spec_info.spec_verify_ct += 1
    first.prefix_cache_info.cached_tokens += 1

    assert second == before
    assert [(type(token), token) for token in second.tokens] == [(int, 1), (int, 2)]
    assert values == kept
    (fresh,) = made(kind, 1)
    assert (fresh.weight_versions, fresh.apply_chat_template_kwargs, fresh.spec_info) == ([], {}, kind.SpecInfo())


@pytest.mark.parametrize("inputs", [{"sizes": [[(2, 3)]]}, ([[1]],)], ids=str)
def test_what_is_no_json_value_is_copied_for_each_sample_as_it_is(kind, inputs):
    first, second = made(kind, extra={"multimodal_inputs": inputs})
    assert repr(first.multimodal_inputs) == repr(second.multimodal_inputs) == repr(inputs)
    assert len({id(each) for each in (first.multimodal_inputs, second.multimodal_inputs, inputs)}) == 3


Slotted = dataclasses.make_dataclass(
    "Slotted",
    [*((name, Any, None) for name in ("group_index", "index", "prompt", "tokens", "label", "metadata", "note"))],
    slots=True,
)


def test_a_class_may_have_slots_and_no_fields_but_these():
    first, second = made(Slotted, label="72", metadata={"a": [1]})
    numbered = [(sample.group_index, sample.index, sample.prompt, sample.label) for sample in (first, second)]
    assert numbered == [(7, 9, "why", "72"), (7, 10, "why", "72")]
    assert first.metadata == second.metadata == {"a": [1]}


@pytest.mark.parametrize("case", cases_of("slime_sample"), ids=str)
def test_our_class_has_slimes_fields_and_defaults(tmp_path, case):
    expected = case.delivered(tmp_path)
    assert fields_of(SlimeSample()) == expected["default"]
    assert list(fields_of(SlimeSample())) == list(expected["default"]), "in this order"
    assert {status.name: status.value for status in SlimeSample.Status} == expected["statuses"]
    assert len(expected["default"]) == 30


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_class_of_the_framework_is_used_where_it_can_be_imported_and_else_our_own(name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    assert resolve_sample_type() is SlimeSample
    with stand_ins({name: {}, f"{name}.utils": {}, f"{name}.utils.types": {"Sample": Slotted}}):
        assert resolve_sample_type() is Slotted


def test_of_two_frameworks_the_one_that_is_loaded_counts_and_a_broken_one_is_not_passed_over(monkeypatch, tmp_path):
    file = tmp_path / "slime" / "utils" / "types.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Sample: pass")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with stand_ins({"miles": {}, "miles.utils": {}, "miles.utils.types": {"Sample": Slotted}}):
            assert resolve_sample_type() is Slotted
        assert resolve_sample_type().__module__ == "slime.utils.types"
        del sys.modules["slime.utils.types"]
        file.write_text("import a_library_that_is_not_there")
        importlib.invalidate_caches()
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
            resolve_sample_type()
    finally:
        for module in ("slime", "slime.utils", "slime.utils.types"):
            sys.modules.pop(module, None)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.sampled_from(["__tensor__", "__kept__", "__dict__"]), inner)
    ),
    max_leaves=8,
)
FIELDS = ("prompt", "label", "metadata", "reward", "response", "train_metadata", "unknown", "tokens")


def restored(sample, kind=SlimeSample):
    """The sample that a snapshot gives back."""
    return from_record(json.loads(json.dumps(to_record(sample))), kind)


@in_ci(max_examples=40)
@given(values=st.dictionaries(st.sampled_from(FIELDS), PLAIN))
def test_a_record_of_any_plain_values_comes_back_as_it_was(values):
    sample = SlimeSample()
    vars(sample).update(values)
    back = restored(sample)
    assert vars(back) == vars(sample)
    assert repr(vars(back)) == repr(vars(sample))  # equal is not enough: 1 == True, and (1,) != [1]


def test_a_record_keeps_status_counts_and_unknown_attributes_and_shares_nothing(kind):
    sample = kind(prompt=[{"role": "user", "content": "a"}], index=5, status=kind.Status.ABORTED, tokens=[1, 2])
    sample.rollout_log_probs = [-0.5, -math.inf]
    sample.metadata = {"a": [1]}
    sample.spec_info.spec_verify_ct = 3
    sample.spec_info.noted = "on the counts too"
    sample.prefix_cache_info.cached_tokens = 9
    sample.source = "gsm8k"

    record = to_record(sample)
    back = restored(sample, kind)

    assert (record["status"], record["spec_info"]["spec_verify_ct"]) == ("aborted", 3)
    assert back == sample
    assert vars(back).keys() == vars(sample).keys()
    assert (back.source, back.spec_info.noted) == ("gsm8k", "on the counts too")
    assert type(back.spec_info) is kind.SpecInfo
    assert back.status is kind.Status.ABORTED
    sample.tokens.append(2)
    sample.metadata["a"].append(2)
    sample.spec_info.spec_verify_ct = 7
    assert record == to_record(back)


def test_tensors_of_every_kind_come_back_bit_by_bit():
    torch = pytest.importorskip("torch")
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32]
    kinds += [torch.int64, torch.uint8, torch.bool, torch.complex64]
    tensors = [torch.arange(6).reshape(2, 3).to(kind) for kind in kinds]
    tensors += [torch.tensor(1.5), torch.empty(0, 4), torch.arange(6.0).reshape(2, 3).T, torch.tensor([1j]).conj()]
    tensors += [torch.nn.Parameter(torch.ones(2)), torch.tensor([math.nan, -0.0, math.inf])]
    inputs = {"list": tensors, "tuple": (tensors[1],)}

    back = restored(SlimeSample(rollout_routed_experts=tensors[0], multimodal_train_inputs=inputs))

    assert type(back.rollout_routed_experts) is torch.Tensor
    found = back.multimodal_train_inputs["list"]
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in tensors]
    for tensor, other in zip(found, tensors, strict=True):
        plain = other.detach().resolve_conj().contiguous()
        assert tensor.reshape(-1).view(torch.uint8).tolist() == plain.reshape(-1).view(torch.uint8).tolist()
    assert isinstance(back.multimodal_train_inputs["tuple"], tuple)
    found[0][0] = 5  # a trainer writes into it


def test_what_no_snapshot_can_hold_is_named():
    torch = pytest.importorskip("torch")
    cases = [
        (
            {"multimodal_inputs": {"images": ["a", object()]}},
            r"^\$\.multimodal_inputs\.images\[1\] is a .*object, which",
        ),
        ({"metadata": {5: 1}}, r"^\$\.metadata has the key 5"),
        (
            {"metadata": {"a": [torch.empty(2, device="meta")]}},
            r"^\$\.metadata\.a\[0\] is a tensor without .* \(meta\)",
        ),
        ({"rollout_routed_experts": torch.eye(2).to_sparse()}, r"\(torch.sparse_coo\)"),
    ]
    for values, message in cases:
        with pytest.raises(TypeError, match=message):
            to_record(SlimeSample(**values))
