"""slime's samples, fresh and as records of a snapshot; and rows: what the records of ``test_slime_source`` lack.

Prompts, tokens, and what is said of bad rows are in ``tests/transcripts``: ``slime-rows.md`` and ``slime-chats.md``.
"""

import copy
import dataclasses
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from asyncdata import PromptTokenizeFn, Sample
from asyncdata.errors import ConfigError
from asyncdata.integrations.slime import AsyncDataSource
from tests.support.examples import in_ci
from tests.support.parts import SlimeTokenizeFn, from_record, groups_of, resolve_sample_type, to_record
from tests.support.peers.records import cases_of, module_of, sglang, stand_ins, tool_model
from tests.support.peers.rollouts import fields_of
from tests.support.release import ROOT
from tests.support.slime_source import SlimeSample, args_for, runs_in_miles, source_of


@pytest.fixture(params=["ours", "slime's"])
def kind(request):
    return SlimeSample if request.param == "ours" else module_of("slime", "utils.types").Sample


def made(kind, size=2, **values):
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
    values = {"prompt": [{"role": "user", "content": "why"}], "metadata": {}, **values}
    for number, sample in enumerate(made(kind, **values)):
        theirs = kind(**values, group_index=7, index=9 + number)
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


SLOTS = ("group_index", "index", "prompt", "tokens", "label", "metadata", "note")
Slotted = dataclasses.make_dataclass("Slotted", [(name, Any, None) for name in SLOTS], slots=True)


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
    assert (back, vars(back).keys()) == (sample, vars(sample).keys())
    assert (back.source, back.spec_info.noted) == ("gsm8k", "on the counts too")
    assert (type(back.spec_info), back.status) == (kind.SpecInfo, kind.Status.ABORTED)
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
    for tensor, other in zip(found, tensors, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        plain = other.detach().resolve_conj().contiguous()
        assert tensor.reshape(-1).view(torch.uint8).tolist() == plain.reshape(-1).view(torch.uint8).tolist()
    assert isinstance(back.multimodal_train_inputs["tuple"], tuple)
    found[0][0] = 5  # a trainer writes into it


def test_what_no_snapshot_can_hold_is_named():
    torch = pytest.importorskip("torch")
    odd, elsewhere = {"images": ["a", object()]}, {"a": [torch.empty(2, device="meta")]}
    for values, message in (
        ({"multimodal_inputs": odd}, r"^\$\.multimodal_inputs\.images\[1\] is a .*object, which"),
        ({"metadata": {5: 1}}, r"^\$\.metadata has the key 5"),
        ({"metadata": elsewhere}, r"^\$\.metadata\.a\[0\] is a tensor without .* \(meta\)"),
        ({"rollout_routed_experts": torch.eye(2).to_sparse()}, r"\(torch.sparse_coo\)"),
    ):
        with pytest.raises(TypeError, match=message):
            to_record(SlimeSample(**values))


NOWHERE = "/there/is/no/such/tokenizer"
TOOL = {"type": "function", "function": {"name": "look"}}
MEDIA: dict[str, Any] = {
    "multimodal_keys": {"image": "pictures", "video": "clips", "audio": "sounds"},
    "asyncdata_processor": "tests.support.slime_source.as_they_are",
}
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text or ('[' ~ p.type ~ ']') }}{% endfor %}{% endfor %}"


@pytest.fixture
def read(jsonl_file):
    """A function that gives the samples of rows, or raises what is wrong with the first bad one."""

    def samples(*rows, **given):
        with source_of(jsonl_file(rows), **{"label_key": None, "asyncdata_bad_rows": "raise", **given}) as source:
            return list(source.dataset.samples)

    return samples


def with_template(folder, text=None, **given):
    kwargs = {} if text is None else {"chat_template": text}
    return {"hf_checkpoint": str(folder), "apply_chat_template": True, "apply_chat_template_kwargs": kwargs, **given}


@pytest.mark.parametrize(
    "settings", [{"rollout_max_prompt_len": 5}, {"asyncdata_pretokenize": True}, {"apply_chat_template": True}], ids=str
)
def test_where_it_is_needed_a_missing_tokenizer_is_refused_before_any_work(prompts, settings):
    with pytest.raises(ConfigError, match="AD413"):
        AsyncDataSource(args_for(prompts, hf_checkpoint=NOWHERE, **settings))


def test_tools_go_into_metadata_that_is_empty_or_an_object(read):
    empty = (b"{ }", b"0.0", b"-0", b"[ ]", b'""', b"null", b"0e5", b"false")
    found = read(*(b'{"input": "a", "tools": ["any", 5], "metadata": ' + value + b"}" for value in empty))
    assert [sample.metadata for sample in found] == [{"tools": ["any", 5]}] * len(empty)
    row = {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"tools": "old", "k": 1}}
    assert read(row)[0].metadata == {"tools": [TOOL], "k": 1}
    assert read({"input": "a", "tools": None})[0].metadata == {}
    assert read(row, tool_key=None)[0].metadata == {"tools": "old", "k": 1}


def test_media_of_placeholders_are_inputs_in_their_order_and_tokens_are_of_text_without_media(read, small_tokenizer):
    rich, frames = {"type": "image", "image": "b.png", "max_pixels": 9}, ["frame1", "frame2"]
    media = {"pictures": ["a.png", rich], "clips": [frames], "sounds": ["s.wav"]}
    (sample,) = read({"input": "<image>left <video><image>right <audio>", **media}, **MEDIA)
    assert sample.multimodal_inputs == {"images": ["a.png", rich], "videos": [frames], "audios": ["s.wav"]}
    encode = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json")).encode
    given = with_template(small_tokenizer, PARTS, asyncdata_pretokenize=True, **MEDIA)
    seen, text = read({"input": "<image>?", "pictures": ["a"]}, {"input": "what?"}, **given)
    assert (seen.prompt, seen.tokens) == ("[image]?", [])  # the rollout must count the images' own tokens
    assert (text.tokens, text.multimodal_inputs) == (encode(text.prompt).ids, None)
    assert all(type(token) is int for token in text.tokens)


@pytest.mark.parametrize("takes_images", [True, False])
def test_media_in_the_messages_are_inputs_of_a_model_that_takes_images(read, small_tokenizer, tmp_path, takes_images):
    shutil.copytree(small_tokenizer, tmp_path / "model")
    if takes_images:
        (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}, {"type": ["odd"]}, "<image>"]
    row = {"input": [{"role": "user", "content": parts}, {"role": "user", "content": []}]}
    given = {"hf_checkpoint": str(tmp_path / "model"), "asyncdata_processor": MEDIA["asyncdata_processor"]}
    seen = {"images": [parts[0]]}

    (plain,) = read(row, **given)
    (put_in,) = read(row, **given, multimodal_keys={"image": "pictures"})

    assert (plain.prompt, plain.multimodal_inputs) == (row["input"], seen if takes_images else None)
    assert (put_in.prompt, put_in.multimodal_inputs) == (row["input"], seen)
    (rendered,) = read(row, **given | with_template(tmp_path / "model", "{{ messages | length }}"))
    assert (rendered.prompt, rendered.multimodal_inputs) == ("2", seen if takes_images else None)


@pytest.mark.parametrize("defers", [False, True])
def test_in_miles_tools_have_the_form_of_the_sglang_that_is_installed(read, small_tokenizer, defers):
    model = tool_model(defers=defers)
    tools = [{"function": {"parameters": {"a": 1}, "name": "f"}}]
    tools.append({"type": "function", "function": {"name": "g"}, "x": 1})
    with runs_in_miles(), sglang(model):
        (sample,) = read({"input": "a", "tools": tools}, **with_template(small_tokenizer, "{{ tools | tojson }}"))
    assert sample.prompt == json.dumps([model.model_validate(tool).model_dump() for tool in tools])


def test_fingerprints_tell_what_differs_and_that_of_settings_is_pinned(small_tokenizer, tmp_path):
    shutil.copytree(small_tokenizer, tmp_path / "moved")
    moved, name = str(tmp_path / "moved"), str(small_tokenizer)

    def prints(tokenizer=name, **settings):
        return SlimeTokenizeFn(tokenizer, **settings).fingerprints()

    assert prints(moved, max_length=5) == prints(max_length=5)
    assert prints(max_length=5)["tokenizer"] == PromptTokenizeFn(name).fingerprints()["tokenizer"]
    chat = prints(apply_chat_template=True)
    assert chat["template"] == PromptTokenizeFn(name, apply_chat_template=True).fingerprints()["template"]
    assert chat["tokenizer"] == prints()["tokenizer"] == prints()["template"] == "none"
    other = prints(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": "{{ messages }}"})
    assert other["template"] != chat["template"]
    different = [
        prints(), prints(max_length=5), prints(pretokenize=True), chat, other, prints(prompt_key="q"),
        prints(multimodal_keys={}), prints(multimodal_keys={"image": "a"}), prints(tool_key=None), prints(tool_form={}),
        {"tokenize_fn": PromptTokenizeFn(name).fingerprints()["tokenize_fn"]},
    ]  # fmt: skip
    assert len({each["tokenize_fn"] for each in different}) == len(different)
    assert prints(tokenizer_backend="hf") == prints()
    fn = SlimeTokenizeFn(NOWHERE, label_key="label", multimodal_keys={"image": "images"})
    assert SlimeTokenizeFn(NOWHERE).fingerprints()["tokenize_fn"] == "142a78928adb6a00a659b3189f2d4093"
    assert fn.fingerprints()["tokenize_fn"] == "f7e769466007f93b038b97e2e27788d2"


def test_a_worker_and_a_driver_load_no_heavy_library(small_tokenizer):
    program = (
        "import sys; from asyncdata.integrations.slime.rows import SlimeTokenizeFn\n"
        f"SlimeTokenizeFn({str(small_tokenizer)!r}, max_length=5, apply_chat_template=True).open()\n"
        "print(*{'numpy', 'torch', 'transformers', 'huggingface_hub', 'anyio', 'ray', 'slime'} & {*sys.modules})\n"
        "from asyncdata.integrations.slime import AsyncDataSource\n"
        "print(*{'torch', 'transformers', 'ray', 'slime', 'miles'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT).split() == []
