"""slime's arguments, read as slime reads them, and the keys of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncdata import BadRows, ConfigError, JsonlSource, LoaderConfig, RowShuffle
from asyncdata.integrations.slime.config import Options, import_by_path, settings_of
from tests.support.slime_source import SLIMES_DEFAULTS, slimes_args


def settings(**given: Any) -> Any:
    return settings_of(SimpleNamespace(**given))


def shuffle(**given: Any) -> Any:
    return settings(**{"prompt_data": "p.jsonl", **given}).knobs["shuffle"]


def test_arguments_that_are_not_there_have_slimes_defaults():
    assert settings_of(slimes_args()) == settings()
    assert settings_of(slimes_args(prompt_data="p.jsonl")) == settings(prompt_data="p.jsonl")
    assert SLIMES_DEFAULTS["rollout_global_dataset"] is True


def test_every_argument_of_slimes_own_data_source_has_its_part():
    found = settings(
        prompt_data="p.jsonl",
        hf_checkpoint="model",
        rollout_max_prompt_len=77,
        input_key="question",
        label_key="answer",
        metadata_key="about",
        tool_key="functions",
        multimodal_keys={"image": "pictures"},
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": False},
        rollout_seed=7,
        rollout_shuffle=True,
        n_samples_per_prompt=8,
        buffer_filter_path="a.b",
        save="out",
        load="in",
    )

    fn = found.tokenize_fn
    assert (fn.tokenizer, fn.max_length, fn.prompt_key, fn.label_key) == ("model", 77, "question", "answer")
    assert (fn.metadata_key, fn.tool_key, fn.multimodal_keys) == ("about", "functions", {"image": "pictures"})
    assert (fn.apply_chat_template, fn.apply_chat_template_kwargs) == (True, {"enable_thinking": False})
    assert (found.source, found.samples_per_group, found.knobs["seed"]) == (
        JsonlSource("p.jsonl", python_lines=True),
        8,
        7,
    )
    assert (found.buffer_filter_path, found.save_folder, found.load_folder) == ("a.b", "out", "in")


def test_the_order_is_slimes_own_unless_somebody_asks_for_another():
    assert shuffle(rollout_shuffle=True) == RowShuffle(method="slime", first=0)
    assert shuffle() == RowShuffle(method="none", first=0)
    assert shuffle(rollout_shuffle=True, asyncdata_order="stream") is True
    assert shuffle(asyncdata_order="stream") is False
    assert shuffle(rollout_shuffle=True, use_hf_datasets=True) is True
    assert shuffle(rollout_shuffle=True, use_hf_datasets=True, asyncdata_order="legacy").method == "slime"


def test_rows_that_are_too_long_leave_the_permutation_only_where_there_is_a_longest_prompt():
    assert not shuffle(rollout_shuffle=True).only_kept
    assert shuffle(rollout_shuffle=True, rollout_max_prompt_len=9, hf_checkpoint="m").only_kept


def test_one_token_of_the_context_is_left_for_the_answer():
    assert settings(prompt_data="p", hf_checkpoint="m", rollout_max_context_len=100).tokenize_fn.max_length == 99
    longest = {"rollout_max_context_len": 100, "rollout_max_prompt_len": 50}
    assert settings(prompt_data="p", hf_checkpoint="m", **longest).tokenize_fn.max_length == 50


@pytest.mark.parametrize(
    ("data", "source", "first", "stop"),
    [
        ("p.jsonl@[0:3]", "p.jsonl", 0, 3),
        ("p.jsonl@[3:]", "p.jsonl", 3, None),
        ("p.jsonl@[:4]", "p.jsonl", 0, 4),
        ("p.jsonl@[-3:]", "p.jsonl", -3, None),
        ("p.jsonl@[1:-1]", "p.jsonl", 1, -1),
        ("p.jsonl@[:]", "p.jsonl", 0, None),
        ("p.jsonl@[0:3:2]", "p.jsonl@[0:3:2]", 0, None),
        ("p.jsonl@[1]", "p.jsonl@[1]", 0, None),
        ("a@[1:2]/p.jsonl", "a@[1:2]/p.jsonl", 0, None),
    ],
)
def test_rows_are_chosen_by_slimes_brackets(data, source, first, stop):
    found = settings(prompt_data=data)

    assert found.source == JsonlSource(source, python_lines=True)
    assert found.knobs["shuffle"] == RowShuffle(method="none", first=first, stop=stop)


def test_a_slice_in_the_stream_order_needs_an_order_of_rows():
    assert shuffle(prompt_data="p@[1:]", rollout_shuffle=True, asyncdata_order="stream") == RowShuffle(first=1)


def test_there_is_no_dataset_without_data_and_without_the_flag():
    assert settings().source is None
    assert settings(prompt_data="p.jsonl", rollout_global_dataset=False).source is None


def test_a_key_that_is_not_known_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="no key asyncdata_num_worker; did you mean asyncdata_num_workers"):
        settings(asyncdata_num_worker=3)
    with pytest.raises(ConfigError, match="did you mean asyncdata_"):
        settings(asyncdata_qqq=3)


def test_a_key_may_be_an_attribute_of_the_class():
    class Args:
        asyncdata_order = "stream"

    assert settings_of(Args()).order == "stream"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("order", "random"),
        ("num_workers", -1),
        ("tokenizer_backend", "rust"),
        ("timeout_s", 0),
        ("strict_load", "yes"),
        ("allow_changed", [1]),
    ],
)
def test_a_value_that_cannot_work_is_an_error_that_names_the_key(key, value):
    with pytest.raises(ConfigError, match=f"asyncdata_{key}"):
        settings(**{f"asyncdata_{key}": value})


def test_knobs_of_the_loader_are_checked_at_the_start():
    with pytest.raises(ConfigError, match="event_loop"):
        settings(asyncdata_event_loop="twisted")
    with pytest.raises(ConfigError, match="^Limits: max_workers=0"):
        settings(asyncdata_limits={"max_workers": 0})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("on_bad_row", "bad_rows: {policy: ...}"),
        ("quarantine_path", "bad_rows: {path: ...}"),
        ("row_timeout_s", "limits: {row_timeout_s: ...}"),
        ("cache_dir", "cache: {folder: ...}"),
        ("backend", "event_loop"),
    ],
)
def test_a_key_that_is_in_a_struct_is_refused_with_its_place(name, place):
    with pytest.raises(ConfigError) as caught:
        settings(**{f"asyncdata_{name}": 1})

    assert str(caught.value) == f"there is no key asyncdata_{name}; it is `asyncdata_{place}`"


def test_what_may_change_is_a_list_or_names_with_commas():
    assert settings(asyncdata_allow_changed=["data", "seed"]).options.allow_changed == ["data", "seed"]
    assert settings(asyncdata_allow_changed="data, seed").options.allow_changed == ["data", "seed"]


def test_every_knob_among_the_keys_reaches_the_loader():
    given = {
        "num_workers": 3,
        "limits": {
            "max_workers": 5,
            "max_memory_bytes": 1 << 33,
            "max_bytes_per_worker": 1 << 30,
            "max_ready_bytes": 1000,
            "row_timeout_s": 6.0,
        },
        "buffer_size": 50,
        "timeout_s": 5.0,
        "bad_rows": {"policy": "quarantine", "max": 7, "path": "bad.jsonl", "excerpts": False},
        "event_loop": "asyncio",
        "cache": {"folder": "somewhere"},
        "outcomes": {"path": "outcomes", "policy": {"drop_above": 0.9}},
    }
    knobs = settings(**{f"asyncdata_{name}": value for name, value in given.items()}).knobs

    assert {name: knobs[name] for name in given} == given
    assert LoaderConfig.of(knobs).bad_rows == BadRows(**given["bad_rows"])
    assert set(knobs) == {*given, "seed", "shuffle"}
    others = {"order", "pretokenize", "today", "revision", "strict_load", "allow_changed", "processor", "dataset"}
    others |= {"tokenizer_backend", "trust_remote_code", "unpersistable", "same_rows", "mix"}
    assert set(Options.__struct_fields__) == {*given, *others}


@pytest.mark.parametrize(("given", "found"), [({}, "auto"), ({"asyncdata_tokenizer_backend": "hf"}, "hf")])
def test_the_tokenizers_backend_can_be_named_and_is_no_part_of_what_a_checkpoint_depends_on(given, found):
    data: dict[str, Any] = {"prompt_data": "p.jsonl", "hf_checkpoint": "folder", "rollout_max_prompt_len": 9}
    fn = settings(**data, **given).tokenize_fn

    assert fn is not None
    assert fn.tokenizer_backend == found
    assert fn.settings_digest() == settings(**data).tokenize_fn.settings_digest()


def test_bad_rows_are_skipped_without_limit_as_slime_skips_them():
    assert LoaderConfig.of(settings().knobs).bad_rows == BadRows(policy="skip", max=None)
    for given in ("quarantine", {"policy": "quarantine"}):
        found = settings(asyncdata_bad_rows=given).knobs
        assert LoaderConfig.of(found).bad_rows == BadRows(policy="quarantine", max=None)


def test_the_flags_of_slimes_streaming_datasets_count_where_those_are_asked_for():
    flags = {"hf_dataset_buffer_size": 77, "hf_dataset_num_proc": 3, "hf_dataset_shuffle_buffer": 10_000}
    streaming = settings(use_hf_datasets=True, **flags).knobs

    assert (streaming["buffer_size"], streaming["num_workers"]) == (77, 3)
    assert "buffer_size" not in settings(**flags).knobs
    assert settings(use_hf_datasets=True, asyncdata_buffer_size=5, **flags).knobs["buffer_size"] == 5
    with pytest.raises(ConfigError, match="hf_dataset_shuffle_buffer"):
        settings(use_hf_datasets=True, hf_dataset_shuffle_buffer=0)


def test_a_tokenizer_is_needed_only_for_what_needs_one():
    assert settings(prompt_data="p").tokenize_fn.tokenizer == "none"
    for given in ({"apply_chat_template": True}, {"rollout_max_prompt_len": 5}, {"asyncdata_pretokenize": True}):
        with pytest.raises(ConfigError, match="--hf-checkpoint"):
            settings(prompt_data="p", **given)


@pytest.mark.parametrize("number", [0, -1, 1.5, None])
def test_a_group_has_one_sample_or_more(number):
    with pytest.raises(ConfigError, match="n_samples_per_prompt"):
        settings(n_samples_per_prompt=number)


def test_import_paths_are_written_slimes_way_or_ours():
    assert import_by_path("os.path.join") is import_by_path("os.path:join")
    for path in ("nothing.at_all", "os.path.nothing", "join", "os.path:nothing"):
        with pytest.raises(ConfigError, match="AD420"):
            import_by_path(path)
