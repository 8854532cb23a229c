from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Sample
from asyncdata.integrations.slime.sample import (
    SampleFactory,
    SlimeSample,
    from_record,
    resolve_sample_type,
    to_record,
)
from tests.support.peers.checkouts import importable, module_of
from tests.support.peers.records import Case, cases_of
from tests.support.peers.rollouts import described

ROOT = Path(__file__).parents[4]
METADATA: list[dict[str, Any]] = [
    {},
    {"id": 1, "source": "gsm8k"},
    {"tags": ["a", "b"], "deep": {"er": [{"x": None}, 1.5]}},
    {"nan": [math.nan], "big": [2**70], "lone": ["\ud800"], "inf": [math.inf]},
]


@pytest.fixture(params=["ours", "slime's"])
def kind(request: pytest.FixtureRequest) -> Any:
    return SlimeSample if request.param == "ours" else module_of("slime", "utils.types").Sample


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down; NaN is NaN."""
    return json.dumps(left) == json.dumps(right)


def make(**values: Any) -> Sample:
    return Sample(**{"prompt": "why", "metadata": {}, "extra": {}, **values})


def test_groups_are_numbered_on(kind: Any) -> None:
    groups = SampleFactory(kind, 3).groups([make(prompt="a"), make(prompt="b")], 7, 100)

    assert [[(s.group_index, s.index, s.prompt) for s in group] for group in groups] == [
        [(7, 100, "a"), (7, 101, "a"), (7, 102, "a")],
        [(8, 103, "b"), (8, 104, "b"), (8, 105, "b")],
    ]
    assert SampleFactory(kind, 3).groups([], 7, 100) == []


@pytest.mark.thorough
@pytest.mark.parametrize("metadata", METADATA, ids=str)
@pytest.mark.parametrize("label", [None, "72", {"a": [1]}], ids=str)
def test_a_sample_is_what_the_constructor_and_a_deep_copy_give(kind: Any, metadata: Any, label: Any) -> None:
    prompt = [{"role": "user", "content": "why"}]
    theirs = kind(prompt=prompt, label=label, metadata=metadata, group_index=0, index=0)

    ((first, second),) = SampleFactory(kind, 2).groups([make(prompt=prompt, label=label, metadata=metadata)], 0, 0)

    assert type(first) is kind
    assert list(vars(first)) == list(vars(theirs))
    assert same(first.metadata, theirs.metadata)
    rest = {name: value for name, value in vars(theirs).items() if name != "metadata"}
    assert {name: vars(first)[name] for name in rest} == rest
    assert {**vars(second), "metadata": 0} == {**rest, "index": 1, "metadata": 0}
    assert first.status is kind.Status.PENDING
    assert (first.tokens, first.multimodal_inputs) == ([], None)


def test_samples_share_nothing_that_can_be_changed(kind: Any) -> None:
    ours = make(
        prompt=[{"role": "user", "content": [{"type": "text", "text": "why"}]}],
        label={"a": [1]},
        metadata={"a": {"b": []}},
        tokens=np.array([1, 2], np.int32),
        extra={"multimodal_inputs": {"images": [[1, 2]], "videos": None}},
    )
    kept = copy.deepcopy(ours)
    ((first, second),) = SampleFactory(kind, 2).groups([ours], 0, 0)
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
    assert second.tokens == [1, 2]
    assert [type(token) for token in second.tokens] == [int, int]
    assert (ours.prompt, ours.label, ours.metadata) == (kept.prompt, kept.label, kept.metadata)
    assert ours.extra == kept.extra
    fresh = SampleFactory(kind, 1).groups([make()], 0, 0)[0][0]
    assert (fresh.weight_versions, fresh.apply_chat_template_kwargs, fresh.spec_info) == ([], {}, kind.SpecInfo())


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

    ((first, second),) = SampleFactory(odd, 2).groups([make(label="72", metadata={"a": [1]})], 4, 8)

    assert [(s.group_index, s.index, s.prompt, s.label) for s in (first, second)] == [
        (4, 8, "why", "72"),
        (4, 9, "why", "72"),
    ]
    assert first.metadata == second.metadata == {"a": [1]}
    assert first.metadata["a"] is not second.metadata["a"]
    assert odd is not Counted or Counted.made >= 2
    assert odd is not OwnConstructor or first.note == "set by the constructor"
    assert odd is not Watched or "index" in first.seen


@pytest.mark.parametrize("case", cases_of("slime_sample"), ids=str)
def test_our_class_has_slimes_fields_defaults_and_dicts(tmp_path: Path, case: Case) -> None:
    expected = case.delivered(tmp_path)

    assert described(SlimeSample) == expected
    assert list(SlimeSample().to_dict()) == list(expected["default"]), "in this order"
    assert len(expected["default"]) == 30


def test_a_reward_is_looked_up_by_its_key() -> None:
    sample = SlimeSample(reward={"score": 2.0, "length": 3})

    assert sample.get_reward_value(SimpleNamespace(reward_key="score")) == 2.0
    assert sample.get_reward_value(SimpleNamespace(reward_key=None)) == {"score": 2.0, "length": 3}


def test_what_is_learned_from_is_the_response_or_what_the_mask_leaves_of_it() -> None:
    assert SlimeSample(response_length=3).effective_response_length == 3
    assert SlimeSample(response_length=3, loss_mask=[0, 1, 1]).effective_response_length == 2


@pytest.mark.parametrize("inputs", [{"sizes": [[(2, 3)]]}, ([[1]],)], ids=str)
def test_what_is_no_json_value_is_copied_for_each_sample_as_it_is(kind: Any, inputs: Any) -> None:
    ((first, second),) = SampleFactory(kind, 2).groups([make(extra={"multimodal_inputs": inputs})], 0, 0)

    assert repr(first.multimodal_inputs) == repr(second.multimodal_inputs) == repr(inputs)
    for left, right in ((first, second), (first, make(extra={"multimodal_inputs": inputs}))):
        other = right.extra["multimodal_inputs"] if isinstance(right, Sample) else right.multimodal_inputs
        assert left.multimodal_inputs is not other


def test_dicts_do_not_touch_what_they_came_from() -> None:
    values = SlimeSample(metadata={"a": 1}).to_dict()
    kept = copy.deepcopy(values)

    SlimeSample.from_dict(values).status = SlimeSample.Status.FAILED

    assert values == kept
    assert values["status"] == "pending"


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, kind: type) -> None:
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:length]))
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.Sample = kind  # type: ignore[attr-defined]


class TheirSample(SlimeSample):
    pass


@pytest.fixture
def nothing_installed() -> None:
    for name in ("slime", "miles"):
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed here")


@pytest.mark.usefixtures("nothing_installed")
def test_without_slime_our_own_class_serves() -> None:
    assert resolve_sample_type() is SlimeSample


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", ["slime", "miles"])
def test_slimes_or_miles_class_is_used_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    put_module(monkeypatch, f"{name}.utils.types", TheirSample)

    assert resolve_sample_type() is TheirSample


def test_of_two_frameworks_the_one_that_is_loaded_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "types.py").write_text("class Sample: pass")
    monkeypatch.syspath_prepend(tmp_path)
    put_module(monkeypatch, "miles.utils.types", TheirSample)

    try:
        assert resolve_sample_type() is TheirSample
        monkeypatch.delitem(sys.modules, "miles.utils.types")
        monkeypatch.delitem(sys.modules, "miles.utils")
        monkeypatch.delitem(sys.modules, "miles")
        assert resolve_sample_type().__module__ == "slime.utils.types"
    finally:
        for module in ("slime", "slime.utils", "slime.utils.types"):
            sys.modules.pop(module, None)


def test_a_slime_that_cannot_be_imported_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "types.py").write_text("import a_library_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)

    try:
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
            resolve_sample_type()
    finally:
        for module in ("slime", "slime.utils"):
            sys.modules.pop(module, None)


def test_slimes_own_class_is_found() -> None:
    theirs = module_of("slime", "utils.types").Sample

    with importable("slime"):
        assert resolve_sample_type() is theirs


@pytest.mark.thorough
def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from asyncdata.integrations.slime.sample import SampleFactory, SlimeSample, to_record\n"
        "SampleFactory(SlimeSample, 2); to_record(SlimeSample())\n"
        "print(*{'torch', 'ray', 'slime', 'transformers'} & {*sys.modules})"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout.split() == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.sampled_from(["__tensor__", "__kept__", "__dict__"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.thorough
@given(
    values=st.dictionaries(
        st.sampled_from(["prompt", "label", "metadata", "reward", "response", "train_metadata", "unknown", "tokens"]),
        PLAIN,
    )
)
def test_a_record_of_any_plain_values_comes_back_as_it_was(values: dict[str, Any]) -> None:
    sample = SlimeSample()
    vars(sample).update(values)

    record = to_record(sample)
    back = from_record(json.loads(json.dumps(record)), SlimeSample)

    assert vars(back) == vars(sample)
    assert repr(vars(back)) == repr(vars(sample))  # equal is not enough: 1 == True, and (1,) != [1]


def test_a_record_keeps_status_counts_and_unknown_attributes(kind: Any) -> None:
    sample = kind(prompt=[{"role": "user", "content": "a"}], index=5, status=kind.Status.ABORTED, tokens=[1, 2])
    sample.rollout_log_probs = [-0.5, -math.inf]
    sample.spec_info.spec_verify_ct = 3
    sample.spec_info.noted = "on the counts too"
    sample.prefix_cache_info.cached_tokens = 9
    sample.source = "gsm8k"
    sample.session_id = "abc"

    record = to_record(sample)
    back = from_record(json.loads(json.dumps(record)), kind)

    assert (record["status"], record["spec_info"]["spec_verify_ct"]) == ("aborted", 3)
    assert back == sample
    assert vars(back).keys() == vars(sample).keys()
    assert (back.source, back.spec_info.noted) == ("gsm8k", "on the counts too")
    assert type(back.spec_info) is kind.SpecInfo
    assert back.status is kind.Status.ABORTED


def test_a_record_shares_nothing_with_its_sample() -> None:
    sample = SlimeSample(tokens=[1], metadata={"a": [1]}, loss_mask=[1])
    record = to_record(sample)
    kept = copy.deepcopy(record)

    sample.tokens.append(2)
    sample.metadata["a"].append(2)
    sample.spec_info.spec_verify_ct = 7

    assert record == kept


def test_a_record_of_a_class_with_slots_comes_back() -> None:
    sample = Slotted(index=3, tokens=[1], metadata={"a": 1}, note="n")

    assert from_record(to_record(sample), Slotted) == sample


@pytest.mark.usefixtures("nothing_installed")
def test_a_record_is_read_as_the_sample_that_there_is() -> None:
    assert type(from_record(to_record(SlimeSample()))) is SlimeSample


def test_arrays_come_back_as_they_were() -> None:
    sample = SlimeSample(
        tokens=np.arange(5, dtype=np.int64),  # type: ignore[arg-type]
        multimodal_train_inputs={"pixels": np.zeros((0, 3), np.float16), "nested": [{"a": np.array(2.5)}]},
    )

    back = from_record(json.loads(json.dumps(to_record(sample))), SlimeSample)

    assert back.tokens.dtype == np.int64
    assert back.tokens.tolist() == [0, 1, 2, 3, 4]
    assert (back.multimodal_train_inputs["pixels"].shape, back.multimodal_train_inputs["pixels"].dtype) == ((0, 3), "e")
    assert back.multimodal_train_inputs["nested"][0]["a"] == 2.5


def test_tensors_of_every_kind_come_back_bit_by_bit() -> None:
    torch = pytest.importorskip("torch")
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32]
    kinds += [torch.int64, torch.uint8, torch.bool, torch.complex64]
    tensors = [torch.arange(6).reshape(2, 3).to(kind) for kind in kinds]
    tensors += [torch.tensor(1.5), torch.empty(0, 4), torch.arange(6.0).reshape(2, 3).T, torch.tensor([1j]).conj()]
    tensors += [torch.nn.Parameter(torch.ones(2)), torch.tensor([math.nan, -0.0, math.inf])]
    sample = SlimeSample(
        rollout_routed_experts=tensors[0], multimodal_train_inputs={"list": tensors, "tuple": (tensors[1],)}
    )

    back = from_record(json.loads(json.dumps(to_record(sample))), SlimeSample)

    assert type(back.rollout_routed_experts) is torch.Tensor
    found = back.multimodal_train_inputs["list"]
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in tensors]
    for tensor, other in zip(found, tensors, strict=True):
        plain = other.detach().resolve_conj().contiguous()
        assert tensor.reshape(-1).view(torch.uint8).tolist() == plain.reshape(-1).view(torch.uint8).tolist()
    assert isinstance(back.multimodal_train_inputs["tuple"], tuple)
    found[0][0] = 5  # a trainer writes into it


def test_what_no_snapshot_can_hold_is_named() -> None:
    class Image:
        pass

    with pytest.raises(TypeError, match=r"^\$\.multimodal_inputs\.images\[1\] is a .*Image, which a snapshot cannot"):
        to_record(SlimeSample(multimodal_inputs={"images": ["a", Image()]}))
    with pytest.raises(TypeError, match=r"^\$\.metadata has the key 5"):
        to_record(SlimeSample(metadata={5: 1}))


def test_a_tensor_without_numbers_is_named() -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(TypeError, match=r"^\$\.multimodal_train_inputs\.a\[0\] is a tensor without .* \(meta\)"):
        to_record(SlimeSample(multimodal_train_inputs={"a": [torch.empty(2, device="meta")]}))
    with pytest.raises(TypeError, match=r"\(torch.sparse_coo\)"):
        to_record(SlimeSample(rollout_routed_experts=torch.eye(2).to_sparse()))
