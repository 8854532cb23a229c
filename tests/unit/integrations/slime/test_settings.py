"""slime's arguments and miles', read as these read them, the keys of ours, and what is refused; the pages say so."""

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncdata import BadRows, JsonlSource, LoaderConfig, RowShuffle
from asyncdata.errors import ConfigError
from asyncdata.integrations.slime import AsyncDataSource
from tests.support.parts import PREFIX, Options, change, import_by_path, settings_of
from tests.support.peers.records import sglang
from tests.support.slime_source import SLIMES_DEFAULTS, args_for, runs_in_miles, slimes_args, source_of
from tests.unit import test_docs as docs


def settings(**given):
    return settings_of(SimpleNamespace(**given))


def shuffle(**given):
    return settings(**{"prompt_data": "p.jsonl", **given}).knobs["shuffle"]


def test_arguments_that_are_not_there_have_slimes_defaults_and_a_key_may_be_an_attribute_of_the_class():
    assert settings_of(slimes_args()) == settings()
    assert settings_of(slimes_args(prompt_data="p.jsonl")) == settings(prompt_data="p.jsonl")
    assert SLIMES_DEFAULTS["rollout_global_dataset"] is True
    assert settings_of(type("Args", (), {"asyncdata_order": "stream"})()).order == "stream"


OF_THE_FUNCTION = {
    "hf_checkpoint": "model", "rollout_max_prompt_len": 77, "input_key": "question", "label_key": "answer",
    "metadata_key": "about", "tool_key": "functions", "multimodal_keys": {"image": "pictures"},
    "apply_chat_template": True, "apply_chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
OTHER_NAMES = {"hf_checkpoint": "tokenizer", "rollout_max_prompt_len": "max_length", "input_key": "prompt_key"}


def test_every_argument_of_slimes_own_data_source_has_its_part():
    others = {"rollout_seed": 7, "n_samples_per_prompt": 8, "buffer_filter_path": "a.b", "save": "out", "load": "in"}
    found = settings(prompt_data="p.jsonl", **OF_THE_FUNCTION, **others)
    of_fn = {name: getattr(found.tokenize_fn, OTHER_NAMES.get(name, name)) for name in OF_THE_FUNCTION}
    assert of_fn == OF_THE_FUNCTION
    assert found.source == JsonlSource("p.jsonl", python_lines=True)
    assert (found.samples_per_group, found.knobs["seed"]) == (8, 7)
    assert (found.buffer_filter_path, found.save_folder, found.load_folder) == ("a.b", "out", "in")


def test_the_order_is_slimes_own_unless_asked_and_import_paths_are_written_slimes_way_or_ours():
    assert shuffle(rollout_shuffle=True) == RowShuffle(method="slime", first=0)
    assert shuffle() == RowShuffle(method="none", first=0)
    assert shuffle(rollout_shuffle=True, asyncdata_order="stream") is True
    assert shuffle(asyncdata_order="stream") is False
    assert shuffle(rollout_shuffle=True, use_hf_datasets=True) is True
    assert shuffle(rollout_shuffle=True, use_hf_datasets=True, asyncdata_order="legacy").method == "slime"
    assert shuffle(rollout_shuffle=True, rollout_max_prompt_len=9, hf_checkpoint="m").only_kept
    assert shuffle(prompt_data="p@[1:]", rollout_shuffle=True, asyncdata_order="stream") == RowShuffle(first=1)
    assert import_by_path("os.path.join") is import_by_path("os.path:join")
    for path in ("nothing.at_all", "os.path.nothing", "join", "os.path:nothing"):
        with pytest.raises(ConfigError, match="AD420"):
            import_by_path(path)


@pytest.mark.parametrize(
    ("data", "source", "first", "stop"),
    [
        ("p.jsonl@[1:-1]", "p.jsonl", 1, -1), ("p.jsonl@[:]", "p.jsonl", 0, None),
        *((data, data, 0, None) for data in ("p.jsonl@[0:3:2]", "p.jsonl@[1]", "a@[1:2]/p.jsonl")),
    ],
)  # fmt: skip
def test_rows_are_chosen_by_slimes_brackets_and_other_brackets_are_part_of_the_name(data, source, first, stop):
    found = settings(prompt_data=data)
    assert found.source == JsonlSource(source, python_lines=True)
    assert found.knobs["shuffle"] == RowShuffle(method="none", first=first, stop=stop)


FLAGS = {"hf_dataset_buffer_size": 77, "hf_dataset_num_proc": 3, "hf_dataset_shuffle_buffer": 10_000}
LONG = {"hf_checkpoint": "m", "rollout_max_context_len": 100}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({**LONG}, {"max_length": 99}),  # one token of the context is left for the answer
        ({**LONG, "rollout_max_prompt_len": 50}, {"max_length": 50, "tokenizer_backend": "auto"}),
        ({**LONG, "asyncdata_tokenizer_backend": "hf"}, {"tokenizer_backend": "hf"}),
        ({}, {"tokenizer": "none"}),
        # The flags of slime's streaming datasets count where those are asked for.
        ({"use_hf_datasets": True, **FLAGS}, {"buffer_size": 77, "num_workers": 3}),
        (FLAGS, {"buffer_size": None}),
        ({"use_hf_datasets": True, "asyncdata_buffer_size": 5, **FLAGS}, {"buffer_size": 5}),
        # Bad rows are skipped without limit, as slime skips them.
        ({}, {"bad_rows": BadRows(policy="skip", max=None)}),
        ({"asyncdata_bad_rows": "quarantine"}, {"bad_rows": BadRows(policy="quarantine", max=None)}),
        ({"asyncdata_bad_rows": {"policy": "quarantine"}}, {"bad_rows": BadRows(policy="quarantine", max=None)}),
        ({"asyncdata_allow_changed": "data, seed"}, {"allow_changed": ["data", "seed"]}),
        ({"asyncdata_allow_changed": ["data", "seed"]}, {"allow_changed": ["data", "seed"]}),
    ],
    ids=str,
)
def test_a_setting_of_the_loader_or_of_the_function_follows(given, expected):
    found = settings(prompt_data="p", **given)

    def value_of(name):
        if name == "bad_rows":
            return LoaderConfig.of(found.knobs).bad_rows
        return found.knobs.get(name, getattr(found.tokenize_fn, name, getattr(found.options, name, None)))

    assert {name: value_of(name) for name in expected} == expected


@pytest.mark.parametrize(
    "given", [{"apply_chat_template": True}, {"rollout_max_prompt_len": 5}, {"asyncdata_pretokenize": True}], ids=str
)
def test_a_tokenizer_is_needed_for_what_needs_one(given):
    with pytest.raises(ConfigError, match="--hf-checkpoint"):
        settings(prompt_data="p", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"asyncdata_num_worker": 3}, "no key asyncdata_num_worker; did you mean asyncdata_num_workers"),
        ({"asyncdata_order": "random"}, "asyncdata_order"),
        ({"asyncdata_num_workers": -1}, "asyncdata_num_workers"),
        ({"asyncdata_tokenizer_backend": "rust"}, "asyncdata_tokenizer_backend"),
        ({"asyncdata_allow_changed": [1]}, "asyncdata_allow_changed"),
        ({"asyncdata_event_loop": "twisted"}, "event_loop"),
        ({"asyncdata_limits": {"max_workers": 0}}, "^Limits: max_workers=0"),
        ({"asyncdata_policy": 1}, "^there is no key asyncdata_policy; it is `asyncdata_bad_rows: {policy: ...}`$"),
        ({"asyncdata_workers": 1}, "^there is no key asyncdata_workers; it is `asyncdata_num_workers`$"),
        ({"use_hf_datasets": True, "hf_dataset_shuffle_buffer": 0}, "hf_dataset_shuffle_buffer"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt"),
        ({"rollout_max_prompt_len": -1}, "max_length=-1"),
        ({"input_key": None}, "prompt_key=None"),
        ({"multimodal_keys": {"images": "a"}}, "multimodal_keys has images; slime's kinds are image, video, audio"),
        ({"multimodal_keys": {"image": ["a"]}}, "multimodal_keys="),
        ({"apply_chat_template_kwargs": {"a": (1,)}}, "apply_chat_template_kwargs must be JSON values"),
        ({"apply_chat_template_kwargs": {"tools": 1, "add_generation_prompt": 0}}, "add_generation_prompt, tools"),
        ({"apply_chat_template_kwargs": {"chat_template": 5}}, "chat_template is a template's text or name, got 5"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_an_error_that_names_it(given, message):
    with pytest.raises(ConfigError, match=message):
        settings(prompt_data="p.jsonl", hf_checkpoint="model", **given)


LIMITS = {"max_workers": 5, "max_memory_bytes": 1 << 33, "max_bytes_per_worker": 1 << 30}
KNOBS = {
    "num_workers": 3, "limits": {**LIMITS, "max_ready_bytes": 1000, "row_timeout_s": 6.0}, "buffer_size": 50,
    "timeout_s": 5.0, "bad_rows": {"policy": "quarantine", "max": 7, "path": "bad.jsonl", "excerpts": False},
    "event_loop": "asyncio", "cache": {"folder": "somewhere"}, "outcomes": {"policy": {"drop_above": 0.9}},
}  # fmt: skip


def test_every_knob_among_the_keys_reaches_the_loader():
    knobs = settings(**{f"asyncdata_{name}": value for name, value in KNOBS.items()}).knobs
    assert {name: knobs[name] for name in KNOBS} == KNOBS
    assert LoaderConfig.of(knobs).bad_rows == BadRows(**KNOBS["bad_rows"])
    assert set(knobs) == {*KNOBS, "seed", "shuffle"}
    others = {"order", "pretokenize", "today", "revision", "strict_load", "allow_changed", "processor", "dataset"}
    others |= {"tokenizer_backend", "trust_remote_code", "unpersistable", "same_rows", "mix"}
    assert set(Options.__struct_fields__) == {*KNOBS, *others}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "prompt 0\né"), ({"apply_chat_template_kwargs": {"mood": "?"}}, "prompt 0\n?"),
        ({"apply_chat_template_kwargs": {"chat_template": "{{ 'own' }}"}}, "own"),
        ({"apply_chat_template": False}, "prompt 0"),
    ],
    ids=["with a default", "with a variable", "after one among the kwargs", "not applied"],
)  # fmt: skip
def test_the_template_of_a_path_goes_before_the_tokenizers_own(prompts, small_tokenizer, tmp_path, given, expected):
    path = tmp_path / "chat.jinja"
    path.write_bytes("{{ messages[0].content }}\r\n{{ mood or 'é' }}".encode())
    applied = {"apply_chat_template": True, "chat_template_path": str(path), "hf_checkpoint": str(small_tokenizer)}
    with source_of(prompts, **{**applied, **given}) as source:
        assert source.dataset[0].prompt == expected


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_template_that_cannot_be_read_is_an_error_that_names_it_where_it_is_applied(tmp_path, content):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    given = {"prompt_data": "p", "hf_checkpoint": "model", "chat_template_path": str(path)}
    settings(**given)
    with pytest.raises(ConfigError, match=r"--chat-template-path .*chat\.jinja cannot be read"):
        settings(**given, apply_chat_template=True)


def test_models_that_miles_renders_by_itself_are_refused_by_name_and_plain_prompts_are_not(prompts):
    with runs_in_miles() as kinds:
        for kind in ("deepseek_v32", "inkling"):
            kinds["model"] = kind
            with pytest.raises(ConfigError, match=f"chats of {kind} models .*plain prompts"):
                settings(prompt_data="p", hf_checkpoint="model", apply_chat_template=True)
            settings(prompt_data="p", hf_checkpoint="model")
        del sys.modules["miles.utils.chat_template_utils.deepseek"].model_type
        with pytest.raises(ConfigError, match="cannot be found out .*plain prompts"):
            settings(prompt_data="p", hf_checkpoint="model", apply_chat_template=True)


class Echo:
    """A ``Tool`` that keeps what it does not know."""

    model_fields: dict[str, Any] = {"function": SimpleNamespace(annotation=SimpleNamespace(model_fields={}))}

    @staticmethod
    def model_validate(tool):
        return SimpleNamespace(model_dump=lambda: dict(tool))


@pytest.mark.parametrize(
    ("tool", "message"),
    [(Echo, "version of sglang makes of tools is not known"), (object(), "cannot be imported: AttributeError")],
)
def test_tools_of_another_kind_of_sglang_are_refused(tool, message):
    with runs_in_miles(), sglang(tool), pytest.raises(ConfigError, match=message):
        settings(prompt_data="p", hf_checkpoint="model", apply_chat_template=True)


ODD_TOKENIZER = '''
from transformers import PreTrainedTokenizer


class OddTokenizer(PreTrainedTokenizer):
    """A character is a token: its number in Unicode."""

    vocab_size = 0x110000
    get_vocab = lambda self: {}
    _tokenize = lambda self, text: list(text)
    _convert_token_to_id = lambda self, token: ord(token)
    _convert_id_to_token = lambda self, index: chr(index)
    save_vocabulary = lambda self, *_: ()
'''
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ ending }}"


@pytest.fixture
def coded(tmp_path, monkeypatch):
    """The arguments for a tokenizer that is code, and has no tokenizer.json; proofs of tokenizers may run."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.delenv("ASYNCDATA_PROVE", raising=False)
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "tokenization_odd.py").write_text(ODD_TOKENIZER)
    config = {"auto_map": {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "OddTokenizer"}))
    (tmp_path / "rows.jsonl").write_text('{"input": "\u00e9!"}\n{"input": "too long"}\n{"input": "ok"}\n')
    path = tmp_path / "rows.jsonl"
    return {"path": path, "hf_checkpoint": str(folder), "label_key": None, "asyncdata_num_workers": 1}


def test_a_tokenizer_that_is_code_is_refused_with_the_key_that_trusts_it(coded):
    with pytest.raises(ConfigError, match=r"AD413 .*has no tokenizer\.json.*asyncdata_trust_remote_code"):
        AsyncDataSource(args_for(**coded, apply_chat_template=True))


@pytest.mark.thorough
def test_a_trusted_tokenizer_that_is_code_renders_and_counts_as_its_own_code_does(coded):
    coded |= {"apply_chat_template": True, "apply_chat_template_kwargs": {"ending": "."}, "asyncdata_pretokenize": True}
    with source_of(**coded, rollout_max_prompt_len=len("<user>ok."), asyncdata_trust_remote_code=True) as source:
        samples = [group[0] for group in source.get_samples(2)]
    assert [sample.prompt for sample in samples] == ["<user>é!.", "<user>ok."]
    assert [list(sample.tokens) for sample in samples] == [list(map(ord, sample.prompt)) for sample in samples]


def test_an_installed_fast_tokenizer_has_no_part_in_a_run_whose_tokenizer_is_code(coded, tmp_path, monkeypatch):
    change(monkeypatch, version_of_a_backend=lambda _backend: "1")
    coded |= {"rollout_max_prompt_len": 5, "asyncdata_trust_remote_code": True}
    with source_of(**coded, dump_details=str(tmp_path / "details")):
        pass
    assert (tmp_path / "details" / "tokenizer" / "tokenization_odd.py").read_text() == ODD_TOKENIZER
    with pytest.raises(ConfigError, match="asyncdata_tokenizer_backend: gigatoken has no effect with asyncdata_trust"):
        AsyncDataSource(args_for(**coded, asyncdata_tokenizer_backend="gigatoken"))


def table(heading, title):
    """The rows of the one table of a section whose first column has this title."""
    text = docs.section(docs.read("slime.md"), heading)
    found = re.search(rf"^\| {re.escape(title)} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"no table of {title!r} under {heading!r}"
    return docs.table_rows(found[1])


def test_every_key_argument_number_and_code_is_documented_and_no_other():
    defaults = {f"{PREFIX}{name}": f"`{value}`" for name, value in msgspec.structs.asdict(Options()).items()}
    assert {name: cells[0] for name, cells in table("Keys", "key").items()} == defaults
    asked = set()

    class Recorder(SimpleNamespace):
        def __getattribute__(self, name):
            asked.add(name)
            return super().__getattribute__(name)

    settings_of(Recorder(prompt_data="p.jsonl", use_hf_datasets=True))
    assert set(table("slime's arguments", "argument")) == {name for name in asked if not name.startswith("__")}
    with source_of(None) as source:
        numbers = {*source.statistics(), "asyncdata_dropped_groups_<reason>_total"}
    assert set(docs.first_cells(docs.section(docs.read("slime.md"), "Numbers"))) == numbers
    texts = [path.read_text("utf-8") for path in (docs.PACKAGE / "integrations" / "slime").glob("*.py")]
    used = {code for text in texts for code in re.findall(r"\bAD\d{3}\b", text)}
    assert used <= set(re.findall(r"\bAD\d{3}\b", docs.read("slime.md")))


def settings_blocks():
    pages = [page for page in docs.PAGES if "asyncdata.integrations.slime" in page.read_text("utf-8")]
    blocks = [(page, block) for page in pages for block in docs.blocks_of(page) if block.language == "yaml"]
    return [pytest.param(block.text, id=f"{page.stem}:{block.line}") for page, block in blocks]


@pytest.mark.parametrize("text", settings_blocks())
def test_the_settings_files_of_the_pages_are_taken(text):
    values = dict(re.findall(r"^(\w+): +(.*?) *(?:#.*)?$", text, re.MULTILINE))
    assert len(values) == text.count("\n")
    values |= {name: json.loads(value) for name, value in values.items() if re.match(r"[\d\[{]|true|false", value)}
    settings_of(SimpleNamespace(prompt_data="p.jsonl", **values))
