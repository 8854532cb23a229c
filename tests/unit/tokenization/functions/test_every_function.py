"""What every tokenize function promises, whatever it makes of a row."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, FixedLengthTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn, TextTokenizeFn
from asyncdata.delivery.chunk import Chunk
from asyncdata.errors import ConfigError
from asyncdata.tokenization.functions.prompt import PromptRowFn
from tests.support.function_kinds import KINDS, Kind, chat_prompt, fixed_length
from tests.support.loading import NEVER_S
from tests.support.tokenizers import GENERATION
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import mask_of, tokenizer_of, trained_texts, variant

OF_ANY_LENGTH = {name: kind for name, kind in KINDS.items() if name in {"text", "chat", "pair"}}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
any_length = pytest.mark.parametrize("kind", OF_ANY_LENGTH.values(), ids=OF_ANY_LENGTH)


@every_kind
def test_a_sample_has_the_tokens_of_its_whole_text_and_trains_its_part_of_it(name, kind: Kind):
    fn = kind.make(name)

    chunk = run(fn.open(), [{**kind.row, "metadata": {"id": 7}}])

    (ids,), whole = token_ids(chunk), tokenizer_of(fn).encode(kind.text, add_special_tokens=False).ids
    assert ids[: len(whole)] == whole
    assert set(ids[len(whole) :]) <= {tokenizer_of(fn).token_to_id("<|endoftext|>")}, "padding"
    assert (values(chunk, "metadata"), faults(chunk), drops(chunk)) == ([{"id": 7}], [], {})
    if kind.trained is None:
        assert values(chunk, "spans") == [None]
    else:
        assert trained_texts(chunk, tokenizer_of(fn)) == [[kind.trained]]


@pytest.mark.parametrize(("function", "key"), [(PromptTokenizeFn, "input"), (TextTokenizeFn, "text")])
def test_a_text_that_the_tokenizer_refuses_is_named_and_the_others_are_kept(small_tokenizer, tmp_path, function, key):
    words = {"type": "WordLevel", "vocab": {"aa": 0}, "unk_token": "no such token"}
    folder = variant(small_tokenizer, tmp_path / "words", model=words)

    chunk = run(function(folder).open(), [{key: "aa"}, {key: "c"}, {key: "aa"}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, "AD421")])
    assert chunk.errors[0].reason.startswith("the tokenizer raised Exception: WordLevel error: Missing [UNK] token")


@every_kind
def test_a_sample_of_exactly_max_length_is_kept_and_a_longer_one_is_dropped_or_an_error(name, kind: Kind):
    def made(*beside: bytes, **settings: Any) -> Chunk:
        return run(kind.make(name, **settings).open(), [kind.row, *beside])

    (ids,), extra = token_ids(made()), values(made(), "extra")[0] or {}
    length = max(len(ids) - extra.get("num_padding", 0), len(extra.get("rejected_input_ids", [])))

    for beside in ([], [b"{"]):  # at once, and one by one
        assert token_ids(made(*beside, max_length=length)) == [ids[:length]]
        assert drops(made(*beside, max_length=length - 1)) == {"max_length": [0]}
    if kind.trained is None:
        return

    assert token_ids(made(max_length=length, overlong="error")) == [ids[:length]]
    (error,) = made(max_length=length - 1, overlong="error").errors
    assert error.code == "AD415"
    assert error.reason == f"{length} tokens are more than max_length={length - 1}; raise it, or set overlong="
    assert error.excerpt.startswith('{"')


@any_length
@pytest.mark.parametrize("how", ["truncate_left", "truncate_right"])
def test_a_sample_that_is_cut_keeps_the_labels_of_the_tokens_that_are_left(name, kind: Kind, how):
    whole = run(kind.make(name).open(), [kind.row])
    (ids,), flags = token_ids(whole), mask_of(whole)
    for length in range(1, len(ids)):
        window = slice(0, length) if how == "truncate_right" else slice(-length, None)
        kept = flags[window]
        kept[0] = False  # nothing stands before it that it could be predicted from
        chunk = run(kind.make(name, max_length=length, overlong=how).open(), [kind.row])
        if any(kept):
            assert (token_ids(chunk), mask_of(chunk)) == ([ids[window]], kept)
        else:
            assert drops(chunk) == {"no_trained_tokens": [0]}


CHANGES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "prompt": (PromptTokenizeFn,
        [{"prompt_key": "q"}, {"label_key": "a"}, {"metadata_key": None}, {"tool_key": None}, {"max_length": 9},
         {"add_special_tokens": True}, {"media": "leave_out"}, {"apply_chat_template": True}]),
    "chat prompt": (chat_prompt,
        [{"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"a": 1}}, {"today": "2026-01-31"}]),
    "rows": (PromptRowFn, [{"tools": [{}]}, {"max_length": 9}]),
    "text": (
        TextTokenizeFn, [{"text_key": "t"}, {"bos": "<|im_start|>"}, {"eos": False}, {"max_length": 9},
                         {"overlong": "error"}]),
    "chat": (ChatTokenizeFn,
        [{"messages_key": "chat"}, {"label_key": "a"}, {"tool_key": None}, {"train_on": "last_assistant"},
         {"max_length": 5}, {"overlong": "error"}, {"metadata_key": None}, {"today": "2026-01-31"},
         {"chat_template_kwargs": {"a": 1}}, {"chat_template": GENERATION}, {"turn_flags": ["loss"]}]),
    "pair": (PreferenceTokenizeFn,
        [{"prompt_key": None}, {"chosen_key": "c"}, {"rejected_key": "r"}, {"eos": False}, {"max_length": 5},
         {"tool_key": None}, {"train_on": "completion"}, {"turn_flags": []}]),
    "fixed length": (
        lambda name, **more: FixedLengthTokenizeFn.babilong(name, **{"max_length": 99, **more}),
        [{"max_length": 9}, {"prompt": "{input}{question}"}, {"answer": "{target}"}, {"context_key": "question"},
         {"overlong": "error"}, {"min_context_tokens": 2}, {"keep_answer": True}, {"add_special_tokens": False},
         {"add_eos": False}, {"pad_id": 3}, {"legacy_recipe": True}, {"reserve": 5}]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "changes"), CHANGES.values(), ids=CHANGES)
def test_every_setting_that_changes_samples_is_in_the_fingerprint_alone(small_tokenizer, tmp_path, make, changes):
    def prints(folder: Any = small_tokenizer, **settings: Any) -> str:
        return json.dumps(make(str(folder), **settings).fingerprints())

    moved = shutil.copytree(small_tokenizer, tmp_path / "moved")
    others = [{"revision": "x"}, *({"tokenizer_backend": name} for name in ("hf", "gigatoken", "fastokens"))]

    assert len({prints(**settings) for settings in [{}, *changes]}) == len(changes) + 1
    assert {prints(moved), *(prints(**settings) for settings in others)} == {prints()}


def test_a_fingerprint_tells_which_part_differs(name, small_tokenizer, tmp_path):
    base, chat = PromptTokenizeFn(name).fingerprints(), chat_prompt(name).fingerprints()
    ended = variant(small_tokenizer, tmp_path / "ended", config={"eos_token": "<|endoftext|>"})
    other = chat_prompt(ended).fingerprints()

    assert (sorted(base), base["template"]) == (["template", "tokenize_fn", "tokenizer"], "none")
    assert chat["template"] == chat_prompt(name, chat_template_kwargs={"a": 1}).fingerprints()["template"]
    assert chat["template"] != other["template"], "the template sees the special tokens"
    assert (chat["tokenizer"], chat["tokenize_fn"]) == (other["tokenizer"], other["tokenize_fn"])


class Other(PromptTokenizeFn, frozen=True):
    pass


class Newer(PromptTokenizeFn, frozen=True):
    version = 9


def test_fingerprints_are_pinned_and_a_change_of_meaning_asks_for_a_new_version(name):
    """Another one would refuse every snapshot there is."""
    chat = chat_prompt(name, label_key="label", chat_template_kwargs={"a": 1}, max_length=8)
    rows = PromptRowFn("t", prompt_key="prompt", apply_chat_template=True, max_length=512)
    prints = [fn.settings_digest() for fn in (PromptTokenizeFn(name), chat, rows, Other(name), Newer(name))]
    versions = [getattr(kind.make, "version", None) for kind in KINDS.values()]

    assert prints[:3] == [
        "10e50bdb4f3d19cc513ebece346c1985", "171e14b38084ec576fad7164304e019f", "98cc485b85e31a5111fe77fae13ba37f",
    ]  # fmt: skip
    assert (len(set(prints)), versions) == (5, [1, None, 1, 3, 3, None])


def test_a_description_cannot_be_changed(name):
    kwargs = {"a": {"b": 1}}
    fn = chat_prompt(name, chat_template_kwargs=kwargs)

    kwargs["a"]["b"] = 2

    assert fn.chat_template_kwargs == {"a": {"b": 1}}
    with pytest.raises(AttributeError):
        fn.max_length = 3  # type: ignore[misc]


TEXT_ONLY = "do nothing without apply_chat_template=True"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (PromptTokenizeFn, {"tokenizer": 5}, "PromptTokenizeFn: tokenizer=5: Expected `str`, got `int`"),
    (PromptTokenizeFn, {"tokenizer": ""}, "tokenizer='': Expected `str` of length >= 1"),
    (PromptTokenizeFn, {"tokenizer_backend": "rust"}, "tokenizer_backend='rust'"),
    (PromptTokenizeFn, {"max_length": "12"}, "max_length='12': Expected `int | None`, got `str`"),
    (PromptTokenizeFn, {"max_length": 0}, "max_length=0: Expected `int` >= 1"),
    (PromptTokenizeFn, {"max_len": 3}, "max_len"), (PromptTokenizeFn, {"prompt_key": None}, "prompt_key=None"),
    (PromptTokenizeFn, {"label_key": ""}, "label_key=''"),
    (PromptTokenizeFn, {"apply_chat_template": "yes"}, "apply_chat_template='yes': Expected `bool`"),
    (PromptTokenizeFn, {"chat_template_kwargs": {"a": 1}}, TEXT_ONLY),
    (PromptTokenizeFn, {"chat_template": "x"}, TEXT_ONLY),
    (chat_prompt, {"chat_template_kwargs": {"a": (1,)}}, "chat_template_kwargs must be JSON values"),
    (chat_prompt, {"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs must be JSON values"),
    (chat_prompt, {"chat_template_kwargs": {"tools": [], "tokenize": 1}}, "names are reserved: tokenize, tools"),
    (chat_prompt, {"add_special_tokens": True}, "add_special_tokens=True is for plain text"),
    (ChatTokenizeFn, {"train_on": "user"}, "train_on='user'"),
    (ChatTokenizeFn, {"turn_flags": ["weigth"]}, "turn_flags=['weigth']"),
    (ChatTokenizeFn, {"overlong": "cut"}, "overlong='cut'"), (ChatTokenizeFn, {"today": "tomorrow"}, "today is a date"),
    (ChatTokenizeFn, {"chat_template_kwargs": {"messages": []}}, "these names are reserved: messages"),
    (ChatTokenizeFn, {"chat_template_kwargs": {"add_generation_prompt": True}}, "reserved: add_generation_prompt"),
    (fixed_length, {"max_length": 0}, "max_length=0"),
    (fixed_length, {"prompt": "{q}", "context_key": "input"}, "context_key='input' must be one field of prompt"),
    (fixed_length, {"prompt": "{q}{q}", "context_key": "q"}, "must be one field of prompt"),
    (fixed_length, {"prompt": "{q}{"}, "write two braces for a literal one"),
    (fixed_length, {"prompt": "{q}{a.b}"}, "a field is a key of the row in braces, as {question}; got 'a.b'"),
    (fixed_length, {"answer": "yes"}, "has no field, such as '{target}'"),
    (fixed_length, {"overlong": "truncate_context_left"}, "needs a context_key"),
    (fixed_length, {"legacy_recipe": True, "add_eos": True}, "legacy_recipe cuts at the right and has no end token"),
    (fixed_length, {"legacy_recipe": True, "add_eos": False, "max_length": 64}, "reserve=64 leaves nothing of max_"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_setting_that_cannot_work_is_refused_by_name(make, settings, reason):
    arguments = {"tokenizer": "org/name", **settings}

    with pytest.raises(ConfigError) as caught:
        make(arguments.pop("tokenizer"), **arguments)

    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (TextTokenizeFn, {"bos": True}, "AD410 bos=True, but the tokenizer has no bos_token; pass bos='the token', or"),
        (TextTokenizeFn, {"eos": "no token of it"}, "eos='no token of it' is 4 tokens of the tokenizer"),
        (TextTokenizeFn, {"eos": True}, "AD410 eos=True, but the tokenizer has no eos_token"),
        (fixed_length, {}, "AD410 add_eos=True, but the tokenizer has no eos_token; pass add_eos='the token', or"),
        (fixed_length, {"add_eos": False}, "AD410 the tokenizer has neither pad_token nor eos_token; pass pad_id="),
        (chat_prompt, {}, "AD411 the tokenizer has no chat template 'default': it has none"),
        (chat_prompt, {"chat_template": "{% if %}"}, "AD411 the chat template's line 1 is not valid Jinja"),
        (ChatTokenizeFn, {"chat_template": "nothing"}, "AD411"),
        (ChatTokenizeFn, {"chat_template": "{{ strftime_now('%Y') }}"}, "fix it: today='2026-01-31'"),
    ],
)  # fmt: skip
def test_what_the_files_lack_is_refused_before_workers_start(small_tokenizer, tmp_path, make, settings, reason):
    nothing = {"eos_token": None, "pad_token": None, "chat_template": None}
    folder = variant(small_tokenizer, tmp_path / "bare", config=nothing)

    with pytest.raises(ConfigError) as caught:
        make(folder, **settings).resolve().open()

    assert reason in str(caught.value)
    PromptTokenizeFn(folder).resolve()
    chat_prompt(folder, chat_template="{{ messages }}").resolve()


def test_resolving_gives_a_local_folder_or_the_commit_of_a_hub_name(small_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(small_tokenizer.parent)
    commit = str(shutil.copytree(small_tokenizer, tmp_path / "abc123"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: commit)

    here = PromptTokenizeFn(small_tokenizer.name, max_length=3, revision="main").resolve()
    there = PromptTokenizeFn("org/name", revision="main").resolve()

    assert here == PromptTokenizeFn(str(small_tokenizer), max_length=3, revision="main")
    assert there == PromptTokenizeFn(commit, revision="abc123")


HEAVY = """
import sys
sys.path[:] = sys.argv[2:]
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.support.function_kinds import KINDS
for kind in KINDS.values():
    kind.make(sys.argv[1]).open()([str(kind.row).replace("'", '"').encode()], ColumnWriter())
print(*{"numpy", "torch", "transformers", "huggingface_hub", "anyio"} & {*sys.modules})
"""


@pytest.mark.thorough
def test_no_function_needs_a_heavy_library(name):
    command = [sys.executable, "-c", HEAVY, name, *sys.path]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


LOADS = """
import os, sys, time
sys.path[:] = sys.argv[4:]
os.environ.pop("TOKENIZERS_PARALLELISM", None)
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's have nothing to do with it
from asyncdata import DataLoader
from tests.support.function_kinds import KINDS
fn = KINDS[sys.argv[3]].make(sys.argv[2], tokenizer_backend="hf")
with DataLoader(sys.argv[1], tokenize_fn=fn, num_workers=0) as loader:
    loader.get_next_batch(20)
    loader.get_next_batch(20)
deadline = time.monotonic() + 10  # Python's threads are on their way out
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
    time.sleep(0.005)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["prompt", "text", "chat"])
def test_a_loader_without_workers_leaves_no_thread_of_the_library(name, jsonl_file, kind):
    """Each would keep 4 to 5 MB for every tokenizer that it has ever worked for, as long as the trainer lives."""
    path = jsonl_file([KINDS[kind].row] * 30)
    command = [sys.executable, "-c", LOADS, str(path), name, kind, *sys.path]

    done = subprocess.run(command, capture_output=True, text=True, timeout=NEVER_S, check=True)

    assert done.stdout == "1\n"
