"""slime's samples: fresh ones made of rows, and records of them that a snapshot can hold."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Sample
from asyncdata.integrations.slime.sample import SampleFactory, from_record, resolve_sample_type, to_record
from tests.support.peers.checkouts import importable, module_of, stand_ins
from tests.support.peers.records import Case, cases_of
from tests.support.peers.rollouts import described
from tests.support.slime_source import SlimeSample

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["ours", "slime's"])
def kind(request: pytest.FixtureRequest) -> Any:
    return SlimeSample if request.param == "ours" else module_of("slime", "utils.types").Sample


def made(kind: Any, size: int = 2, **values: Any) -> list[Any]:
    """The group of one prompt."""
    sample = Sample(**{"prompt": "why", "metadata": {}, "extra": {}, **values})
    (group,) = SampleFactory(kind, size).groups([sample], 7, 9)
    return group


# Fresh ones


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"label": "72", "metadata": {"id": 1, "source": "gsm8k"}},
        {"label": {"a": [1]}, "metadata": {"tags": ["a", "b"], "deep": {"er": [{"x": None}, 1.5]}}},
        {"label": [1], "metadata": {"nan": [math.nan], "big": [2**70], "lone": ["\ud800"], "inf": [math.inf]}},
    ],
    ids=["bare", "labelled", "nested", "odd"],
)
def test_a_sample_is_what_the_constructor_gives(kind: Any, values: dict[str, Any]) -> None:
    prompt = [{"role": "user", "content": "why"}]
    for number, sample in enumerate(made(kind, prompt=prompt, **values)):
        theirs = kind(**{"metadata": {}, **values}, prompt=prompt, group_index=7, index=9 + number)

        assert type(sample) is kind
        assert list(vars(sample)) == list(vars(theirs))
        assert repr(sample) == repr(theirs)  # NaN is NaN, and equal is not enough: 1 == True
    assert SampleFactory(kind, 3).groups([], 7, 100) == []


def test_samples_share_nothing_that_can_be_changed(kind: Any) -> None:
    values: dict[str, Any] = {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "why"}]}],
        "label": {"a": [1]},
        "metadata": {"a": {"b": []}},
        "extra": {"multimodal_inputs": {"images": [[1, 2]], "videos": None}},
    }
    kept = copy.deepcopy(values)
    first, second = made(kind, tokens=np.array([1, 2], np.int32), **values)
    before = copy.deepcopy(second)

    first.prompt[0]["content"][0]["text"] = "changed"
    first.label["a"].append(2)
    first.metadata["a"]["b"].append(1)
    first.tokens.append(3)
    first.multimodal_inputs["images"][0].append(9)
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
def test_what_is_no_json_value_is_copied_for_each_sample_as_it_is(kind: Any, inputs: Any) -> None:
    first, second = made(kind, extra={"multimodal_inputs": inputs})

    assert repr(first.multimodal_inputs) == repr(second.multimodal_inputs) == repr(inputs)
    assert len({id(each) for each in (first.multimodal_inputs, second.multimodal_inputs, inputs)}) == 3


@dataclasses.dataclass(slots=True)
class Slotted:
    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    label: Any = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass
class Counted(SlimeSample):
    made = 0

    def __post_init__(self) -> None:
        type(self).made += 1


@dataclasses.dataclass
class OwnConstructor(SlimeSample):
    def __init__(self) -> None:
        super().__init__()
        self.note = "set by the constructor"


class Watched(SlimeSample):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.setdefault("seen", []).append(name)


@pytest.mark.parametrize("odd", [Slotted, Counted, OwnConstructor, Watched])
def test_a_class_that_a_prototype_does_not_fit_is_constructed(odd: Any) -> None:
    Counted.made = 0

    first, second = made(odd, label="72", metadata={"a": [1]})

    assert [(s.group_index, s.index, s.prompt, s.label) for s in (first, second)] == [
        (7, 9, "why", "72"),
        (7, 10, "why", "72"),
    ]
    assert first.metadata == second.metadata == {"a": [1]}
    assert first.metadata["a"] is not second.metadata["a"]
    assert odd is not Counted or Counted.made >= 2
    assert odd is not OwnConstructor or first.note == "set by the constructor"
    assert odd is not Watched or "index" in first.seen


# The class


@pytest.mark.parametrize("case", cases_of("slime_sample"), ids=str)
def test_our_class_has_slimes_fields_defaults_and_dicts(tmp_path: Path, case: Case) -> None:
    expected = case.delivered(tmp_path)

    assert described(SlimeSample) == expected
    assert list(SlimeSample().to_dict()) == list(expected["default"]), "in this order"
    assert len(expected["default"]) == 30
    assert SlimeSample(response_length=3).effective_response_length == 3
    both = {"score": 2.0, "length": 3}
    assert SlimeSample(reward=both).get_reward_value(SimpleNamespace(reward_key=None)) == both


def test_dicts_do_not_touch_what_they_came_from() -> None:
    values = SlimeSample(metadata={"a": 1}).to_dict()
    kept = copy.deepcopy(values)

    SlimeSample.from_dict(values).status = SlimeSample.Status.FAILED

    assert values == kept
    assert values["status"] == "pending"


@pytest.fixture
def nothing_installed() -> None:
    for name in ("slime", "miles"):
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed here")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_class_of_the_framework_is_used_where_it_can_be_imported_and_else_our_own(name: str) -> None:
    assert resolve_sample_type() is SlimeSample
    assert type(from_record(to_record(SlimeSample()))) is SlimeSample
    with stand_ins({name: {}, f"{name}.utils": {}, f"{name}.utils.types": {"Sample": Watched}}):
        assert resolve_sample_type() is Watched


def test_of_two_frameworks_the_one_that_is_loaded_counts_and_a_broken_one_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "slime" / "utils" / "types.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Sample: pass")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with stand_ins({"miles": {}, "miles.utils": {}, "miles.utils.types": {"Sample": Watched}}):
            assert resolve_sample_type() is Watched
        assert resolve_sample_type().__module__ == "slime.utils.types"
        del sys.modules["slime.utils.types"]
        file.write_text("import a_library_that_is_not_there")
        importlib.invalidate_caches()
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
            resolve_sample_type()
    finally:
        for module in ("slime", "slime.utils", "slime.utils.types"):
            sys.modules.pop(module, None)


def test_slimes_own_class_is_found() -> None:
    theirs = module_of("slime", "utils.types").Sample

    with importable("slime"):
        assert resolve_sample_type() is theirs


# Records

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


def restored(sample: Any, kind: Any = SlimeSample) -> Any:
    """The sample that a snapshot gives back."""
    return from_record(json.loads(json.dumps(to_record(sample))), kind)


@given(values=st.dictionaries(st.sampled_from(FIELDS), PLAIN))
def test_a_record_of_any_plain_values_comes_back_as_it_was(values: dict[str, Any]) -> None:
    sample = SlimeSample()
    vars(sample).update(values)

    back = restored(sample)

    assert vars(back) == vars(sample)
    assert repr(vars(back)) == repr(vars(sample))  # equal is not enough: 1 == True, and (1,) != [1]


def test_a_record_keeps_status_counts_and_unknown_attributes_and_shares_nothing(kind: Any) -> None:
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


def test_a_record_of_a_class_with_slots_comes_back() -> None:
    sample = Slotted(index=3, tokens=[1], metadata={"a": 1}, note="n")

    assert restored(sample, Slotted) == sample


def test_arrays_come_back_as_they_were() -> None:
    sample = SlimeSample(
        tokens=np.arange(5, dtype=np.int64),  # type: ignore[arg-type]
        multimodal_train_inputs={"pixels": np.zeros((0, 3), np.float16), "nested": [{"a": np.array(2.5)}]},
    )

    back = restored(sample)

    assert (back.tokens.dtype, back.tokens.tolist()) == (np.int64, [0, 1, 2, 3, 4])
    assert (back.multimodal_train_inputs["pixels"].shape, back.multimodal_train_inputs["pixels"].dtype) == ((0, 3), "e")
    assert back.multimodal_train_inputs["nested"][0]["a"] == 2.5


def test_tensors_of_every_kind_come_back_bit_by_bit() -> None:
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


def test_what_no_snapshot_can_hold_is_named() -> None:
    torch = pytest.importorskip("torch")
    cases: list[tuple[dict[str, Any], str]] = [
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
