from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, processors

from asyncdata import ConfigError, PromptTokenizeFn, TokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.unit.tokenization import drops, faults, run, token_ids, values

TOOL = {"type": "function", "function": {"name": "look"}}
TOOLS_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ tools | tojson }}"


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    return Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


def test_a_row_becomes_tokens_prompt_label_and_metadata(name: str, tokenizer: Tokenizer) -> None:
    rows = [
        b'{"input": "caf\\u00e9 ol\xc3\xa9", "label": 1.50, "metadata": {"a":  [1, 2.0]}, "other": 1}',
        {"input": "two", "label": {"x": None}, "metadata": {}},
    ]

    chunk = run(PromptTokenizeFn(name, label_key="label").open(), rows)

    assert token_ids(chunk) == [tokenizer.encode(text).ids for text in ("café olé", "two")]
    assert values(chunk, "prompt") == ["café olé", "two"]
    assert values(chunk, "label") == [1.5, {"x": None}]
    assert values(chunk, "metadata") == [{"a": [1, 2.0]}, {}]
    assert (faults(chunk), drops(chunk)) == ([], {})


def test_columns_hold_the_rows_own_bytes(name: str) -> None:
    out = ColumnWriter()
    row = b'{"input": "caf\\u00e9", "label":  [1.50, 1e2] , "metadata": {"n": NaN, "s": "\\ud800" } }'

    PromptTokenizeFn(name, label_key="label").open()([row, row.replace(b"NaN", b"1E9").replace(b"\\ud800", b"")], out)

    columns = out.finish(2, 0.0).columns
    assert columns["prompt_text"].data == "café".encode() * 2  # the only one that is decoded
    assert columns["label"].data == b"[1.5,100.0][1.50, 1e2]"  # json's words where msgspec refuses the row
    assert columns["metadata"].data == b'{"n":NaN,"s":"\\ud800"}{"n": 1E9, "s": "" }'


def test_metadata_may_be_absent_and_a_label_may_not(name: str) -> None:
    rows = [{"input": "a"}, {"input": "a", "label": None}, {"input": "a", "labels": 1, "metadata": None}]

    plain = run(PromptTokenizeFn(name).open(), rows)
    labelled = run(PromptTokenizeFn(name, label_key="label").open(), rows)

    assert values(plain, "metadata") == values(plain, "label") == [None, None, None]
    assert values(labelled, "label") == [None]
    assert faults(labelled) == [(0, "AD110"), (2, "AD110")]
    assert labelled.errors[1].reason == (
        "no key 'label': the row has 'input', 'labels', 'metadata': set label_key='labels'?"
    )


def test_keys_can_be_renamed_and_left_out(name: str) -> None:
    row = {"q": "why", "tools": "no JSON", "metadata": 5, "m": {"a": 1}}

    fn = PromptTokenizeFn(name, prompt_key="q", label_key="q", metadata_key="m", tool_key=None)
    chunk = run(fn.open(), [row])

    assert (values(chunk, "prompt"), values(chunk, "label"), values(chunk, "metadata")) == (
        ["why"],
        ["why"],
        [{"a": 1}],
    )
    chunk = run(PromptTokenizeFn(name, prompt_key="q", metadata_key=None, tool_key=None).open(), [row])
    assert values(chunk, "metadata") == [None]


BAD_ROWS: list[tuple[bytes, str, str]] = [
    (b'{"input": 5}', "AD111", "'input' must be a string, got a number"),
    (b'{"input": null}', "AD111", "got null"),
    (b'{"input": [{"role": "user"}]}', "AD111", "got an array; set apply_chat_template=True to render messages"),
    (b'{"prompt": "a"}', "AD110", "no key 'input': the row has 'prompt': set prompt_key='prompt'?"),
    (b'{"input": "a \\ud83d b"}', "AD107", "unpaired surrogate \\ud83d in 'input'"),
    (b'{"input": "a', "AD101", "invalid JSON at column 11"),
    (b'["input"]', "AD113", "got an array"),
    (b'{"input": "a", "tools": 5}', "AD111", "'tools' must be a list of JSON schemas, got a number"),
    (b'{"input": "a", "tools": [5]}', "AD111", "'tools'[0] must be a JSON schema, got a number"),
    (
        b'{"input": "a", "tools": "[{"}',
        "AD101",
        "'tools' is a string, and its text is not JSON: invalid JSON at column",
    ),
    (b'{"input": "a", "tools": "{}"}', "AD111", "'tools' must be a list of JSON schemas, got an object"),
    (b'{"input": "a", "tools": "\\ud800"}', "AD107", "unpaired surrogate \\ud800 in 'tools'"),
    (b'{"input": "a", "tools": [], "metadata": "text"}', "AD111", "'metadata' must be an object, as the row has tools"),
]
BAD_CHATS: list[tuple[bytes, str, str]] = [
    (b'{"input": 5}', "AD111", "'input' must be a string or a list of messages, got a number"),
    (b'{"input": {"role": "user"}}', "AD111", "got an object"),
    (b'{"input": [{"role": "user", "content": "a"}, "b"]}', "AD111", "'input'[1] must be an object with 'role' and"),
    (b'{"input": [{"content": "a"}]}', "AD112", "'input'[0] has no 'role'; it has 'content'"),
    (b'{"input": [{"role": null}]}', "AD112", "'input'[0] has no 'role'; it has 'role'"),
    (b'{"input": [{}]}', "AD112", "'input'[0] has no 'role'; it has nothing"),
    (b'{"input": [{"role": "user", "content": "\\udc00"}]}', "AD107", "unpaired surrogate \\udc00 in 'input'"),
    (
        b'{"input": [{"role": "user", "content": [1]}]}',
        "AD412",
        "chat template line 2: TypeError: can only concatenate",
    ),
]


@pytest.mark.parametrize(("row", "code", "reason"), BAD_ROWS, ids=[row.decode()[:60] for row, _, _ in BAD_ROWS])
def test_a_bad_row_is_named_and_the_others_are_kept(name: str, row: bytes, code: str, reason: str) -> None:
    chunk = run(PromptTokenizeFn(name).open(), [{"input": "a"}, row, {"input": "b"}])

    assert values(chunk, "prompt") == ["a", "b"]
    assert faults(chunk) == [(1, code)]
    assert reason in chunk.errors[0].reason
    assert chunk.errors[0].excerpt.startswith(row[:8].decode())


@pytest.mark.thorough
@pytest.mark.parametrize(("row", "code", "reason"), BAD_CHATS, ids=[row.decode()[:60] for row, _, _ in BAD_CHATS])
def test_a_bad_chat_is_named_and_the_others_are_kept(name: str, row: bytes, code: str, reason: str) -> None:
    chunk = run(PromptTokenizeFn(name, apply_chat_template=True).open(), [{"input": "a"}, row, {"input": "b"}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, code)])
    assert reason in chunk.errors[0].reason


def test_a_string_is_one_user_turn_of_a_chat(name: str, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"input": "why"}, {"input": [{"role": "user", "content": "why"}]}]

    chunk = run(PromptTokenizeFn(name, apply_chat_template=True).open(), rows)

    assert values(chunk, "prompt") == [text, text]
    assert token_ids(chunk) == [tokenizer.encode(text, add_special_tokens=False).ids] * 2
    assert token_ids(chunk)[0][0] == 1  # the special token, not its letters


def test_an_empty_prompt_is_dropped(name: str) -> None:
    rows = [{"input": ""}, {"input": "a"}, {"input": []}]

    plain = run(PromptTokenizeFn(name, add_special_tokens=True).open(), rows[:2])
    chat = run(PromptTokenizeFn(name, apply_chat_template=True).open(), rows)
    blank = run(PromptTokenizeFn(name, apply_chat_template=True, chat_template="{{ '' }}").open(), rows)

    assert (drops(plain), values(plain, "prompt")) == ({"empty_prompt": [0]}, ["a"])
    assert (drops(chat), chat.num_samples) == ({"empty_prompt": [2]}, 2)
    assert drops(blank) == {"empty_prompt": [0, 1, 2]}


def test_a_prompt_of_exactly_max_length_is_kept(name: str, tokenizer: Tokenizer) -> None:
    texts = ["a", "a b", "a b c", "a b"]
    length = len(tokenizer.encode("a b").ids)
    assert length == 2

    chunk = run(PromptTokenizeFn(name, max_length=length).open(), [{"input": text} for text in texts])

    assert values(chunk, "prompt") == ["a", "a b", "a b"]
    assert [chunk.row_of(sample) for sample in range(3)] == [0, 1, 3]
    assert drops(chunk) == {"max_length": [2]}


def test_tools_go_to_the_template_and_into_the_metadata(name: str) -> None:
    rows: list[Any] = [
        {"input": "a", "tools": [TOOL]},
        {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"k": 1}},
        {"input": "a", "tools": [], "metadata": {}},
        {"input": "a", "tools": None, "metadata": {"k": 1}},
        {"input": "a", "tools": [TOOL], "metadata": {"tools": "old"}},
        b'{"input": "a", "tools": [{"x": 1e999}], "metadata": { }}',
        {"input": "a"},
    ]
    metadata = [
        {"tools": [TOOL]}, {"k": 1, "tools": [TOOL]}, {"tools": []}, {"k": 1}, {"tools": [TOOL]},
        {"tools": [{"x": float("inf")}]}, None,
    ]  # fmt: skip
    tools = ["[{...}]", "[{...}]", "[]", "null", "[{...}]", '[{"x": Infinity}]', "null"]

    chat = run(PromptTokenizeFn(name, apply_chat_template=True, chat_template=TOOLS_TEMPLATE).open(), rows)
    plain = run(PromptTokenizeFn(name).open(), rows)

    assert values(chat, "metadata") == values(plain, "metadata") == metadata
    assert values(chat, "prompt") == ["a|" + text.replace("{...}", json.dumps(TOOL)) for text in tools]
    assert values(plain, "prompt") == ["a"] * 7


def test_null_metadata_are_none(name: str) -> None:
    rows = [
        b'{"input": "a", "metadata": ' + value + b"}" for value in (b"null", b"false", b"0", b'""', b"[]", b'"text"')
    ]

    assert values(run(PromptTokenizeFn(name).open(), rows), "metadata") == [None] * 5 + ["text"]


def test_the_template_for_tools_serves_rows_with_tools(small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    (tmp_path / "t" / "additional_chat_templates").mkdir()
    (tmp_path / "t" / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    (tmp_path / "t" / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    rows = [{"input": "a"}, {"input": "a", "tools": []}, {"input": "a", "tools": [TOOL]}]

    def prompts(**settings: Any) -> list[Any]:
        return values(
            run(PromptTokenizeFn(str(tmp_path / "t"), apply_chat_template=True, **settings).open(), rows), "prompt"
        )

    assert prompts() == ["plain a", "tools 0", "tools 1"]
    assert prompts(chat_template="default") == ["plain a"] * 3
    assert prompts(chat_template="{{ messages[0].role }}") == ["user"] * 3


def test_template_variables_are_given_to_every_chat(name: str) -> None:
    template = "{{ thinking }}{{ eos_token }}{{ pad_token }}{{ add_generation_prompt }}"
    kwargs = {"thinking": {"b": [1], "a": None}, "pad_token": "P", "add_generation_prompt": False}

    fn = PromptTokenizeFn(name, apply_chat_template=True, chat_template=template, chat_template_kwargs=kwargs)

    assert values(run(fn.open(), [{"input": "a"}]), "prompt") == ["{'b': [1], 'a': None}<|im_end|>PFalse"]


def test_special_tokens_are_added_to_plain_text_only_if_asked_for(small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))

    def first(**settings: Any) -> int:
        return token_ids(run(PromptTokenizeFn(tmp_path / "t", **settings).open(), [{"input": "a"}]))[0][0]

    assert first() != 0
    assert first(add_special_tokens=True) == 0
    assert first(apply_chat_template=True) == 1


def test_a_text_that_the_tokenizer_refuses_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="no such token")).save(str(tmp_path / "tokenizer.json"))

    chunk = run(PromptTokenizeFn(str(tmp_path)).open(), [{"input": "a"}, {"input": "bad"}, {"input": "b"}])

    assert (values(chunk, "prompt"), faults(chunk)) == (["a", "b"], [(1, "AD421")])
    assert chunk.errors[0].reason.startswith("the tokenizer raised Exception: WordLevel error: Missing [UNK] token")


def test_every_row_is_announced_before_it_is_read_and_then_all_together(name: str) -> None:
    announced: list[int] = []

    PromptTokenizeFn(name).open()([b'{"input": "a"}', b"{", b'{"input": "b"}'], ColumnWriter(announced.append))

    assert announced == [0, 1, 2, -1]


def test_no_rows_are_no_samples(name: str) -> None:
    assert run(PromptTokenizeFn(name).open(), []).num_samples == 0


def test_a_worker_makes_the_same_function_from_its_settings(name: str) -> None:
    fn = PromptTokenizeFn(
        name, prompt_key="q", apply_chat_template=True, chat_template_kwargs={"a": [1, {"b": None}]}, max_length=5
    )

    spec = describe(fn)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))

    assert isinstance(fn, TokenizeFn)
    assert spec.path == "asyncdata.tokenization.functions.prompt:PromptTokenizeFn"
    assert PromptTokenizeFn(**(sent.settings or {})) == fn
    assert drops(run(open_spec(sent), [{"q": "a"}])) == {"max_length": [0]}


def test_a_description_cannot_be_changed(name: str) -> None:
    kwargs = {"a": {"b": 1}}
    fn = PromptTokenizeFn(name, apply_chat_template=True, chat_template_kwargs=kwargs)

    kwargs["a"]["b"] = 2

    assert fn.chat_template_kwargs == {"a": {"b": 1}}
    with pytest.raises(AttributeError):
        fn.max_length = 3  # type: ignore[misc]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer": 5}, "PromptTokenizeFn: tokenizer=5: Expected `str`, got `int`"),
    ({"tokenizer": ""}, "tokenizer='': Expected `str` of length >= 1"),
    ({"max_length": "12"}, "max_length='12': Expected `int | null`, got `str`"),
    ({"max_length": 0}, "max_length=0: Expected `int` >= 1"),
    ({"max_length": True}, "max_length=True"),
    ({"prompt_key": None}, "prompt_key=None"),
    ({"label_key": ""}, "label_key=''"),
    ({"label_key": ["label"]}, "label_key="),
    ({"apply_chat_template": "yes"}, "apply_chat_template='yes': Expected `bool`"),
    ({"add_special_tokens": 1}, "add_special_tokens=1: Expected `bool`"),
    ({"chat_template_kwargs": None, "apply_chat_template": True}, "chat_template_kwargs=None"),
    ({"chat_template_kwargs": {1: 2}, "apply_chat_template": True}, "chat_template_kwargs={1: 2}"),
    ({"chat_template_kwargs": {"a": (1,)}, "apply_chat_template": True}, "chat_template_kwargs must be JSON values"),
    (
        {"chat_template_kwargs": {"a": len}, "apply_chat_template": True},
        "chat_template_kwargs must be JSON values",
    ),
    (
        {"chat_template_kwargs": {"a": "\ud800"}, "apply_chat_template": True},
        "chat_template_kwargs must be JSON values",
    ),
    (
        {"chat_template_kwargs": {"tools": [], "tokenize": 1}, "apply_chat_template": True},
        "these names are reserved: tokenize, tools",
    ),
    ({"chat_template_kwargs": {"a": 1}}, "do nothing without apply_chat_template=True"),
    ({"chat_template": "x"}, "do nothing without apply_chat_template=True"),
    ({"add_special_tokens": True, "apply_chat_template": True}, "add_special_tokens=True is for plain text"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("settings", "reason"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptTokenizeFn(**{"tokenizer": "org/name", **settings})

    assert reason in str(caught.value)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_len"):
        PromptTokenizeFn("org/name", max_len=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"at most 1 without a name \(tokenizer\)"):
        PromptTokenizeFn("org/name", "input")  # type: ignore[misc]


def test_resolving_gives_a_local_folder(small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_tokenizer.parent)
    fn = PromptTokenizeFn(small_tokenizer.name, max_length=3, revision="main")

    resolved = fn.resolve()

    assert resolved == PromptTokenizeFn(str(small_tokenizer), max_length=3, revision="main")
    assert resolved.resolve() == resolved
    assert PromptTokenizeFn(Path(small_tokenizer.name)).resolve().tokenizer == str(small_tokenizer)  # type: ignore[arg-type]


def test_resolving_a_hub_name_gives_its_commit(
    small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "abc123")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(tmp_path / "abc123"))

    resolved = PromptTokenizeFn("org/name", revision="main").resolve()

    assert (resolved.tokenizer, resolved.revision) == (str(tmp_path / "abc123"), "abc123")
    assert resolved.fingerprints() == PromptTokenizeFn(str(small_tokenizer)).fingerprints()


def test_a_tokenizer_that_cannot_render_is_refused_before_any_work(small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))

    PromptTokenizeFn(str(tmp_path / "t")).resolve()
    PromptTokenizeFn(str(tmp_path / "t"), apply_chat_template=True, chat_template="{{ messages }}").resolve()
    with pytest.raises(ConfigError, match="AD411 the tokenizer has no chat template 'default': it has none"):
        PromptTokenizeFn(str(tmp_path / "t"), apply_chat_template=True).resolve()
    with pytest.raises(ConfigError, match="AD411 the chat template's line 1 is not valid Jinja"):
        PromptTokenizeFn(str(tmp_path / "t"), apply_chat_template=True, chat_template="{% if %}").resolve()
    with pytest.raises(ConfigError, match="AD413"):
        PromptTokenizeFn(str(tmp_path / "nothing")).resolve()


class Other(PromptTokenizeFn, frozen=True):
    pass


class Newer(PromptTokenizeFn, frozen=True):
    version = 2


def test_fingerprints_tell_what_differs(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "moved")
    base = PromptTokenizeFn(name).fingerprints()
    chat = PromptTokenizeFn(name, apply_chat_template=True).fingerprints()
    other_text = PromptTokenizeFn(name, apply_chat_template=True, chat_template="{{ messages }}").fingerprints()
    other_kwargs = PromptTokenizeFn(name, apply_chat_template=True, chat_template_kwargs={"a": 1}).fingerprints()

    assert PromptTokenizeFn(str(tmp_path / "moved"), revision="x").fingerprints() == base
    assert sorted(base) == ["template", "tokenize_fn", "tokenizer"]
    assert base["template"] == "none"
    assert len({base["template"], chat["template"], other_text["template"]}) == 3
    assert chat["template"] == other_kwargs["template"]
    different = [
        base, chat, other_text, other_kwargs, Other(name).fingerprints(), Newer(name).fingerprints(),
        PromptTokenizeFn(name, max_length=9).fingerprints(), PromptTokenizeFn(name, prompt_key="q").fingerprints(),
    ]  # fmt: skip
    assert len({each["tokenize_fn"] for each in different}) == 8
    assert len({each["tokenizer"] for each in different}) == 1


def test_a_templates_fingerprint_has_the_special_tokens_in_it(small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))

    before, after = (
        PromptTokenizeFn(str(folder), apply_chat_template=True).fingerprints()
        for folder in (small_tokenizer, tmp_path / "t")
    )

    assert before["template"] != after["template"]
    assert (before["tokenizer"], before["tokenize_fn"]) == (after["tokenizer"], after["tokenize_fn"])


def test_the_fingerprint_of_settings_is_pinned(name: str) -> None:
    """Another one would refuse every snapshot there is; a change of meaning asks for a new ``version``."""
    fn = PromptTokenizeFn(
        name, label_key="label", apply_chat_template=True, chat_template_kwargs={"a": 1}, max_length=8
    )

    assert PromptTokenizeFn(name).fingerprints()["tokenize_fn"] == "10e50bdb4f3d19cc513ebece346c1985"
    assert fn.fingerprints()["tokenize_fn"] == "171e14b38084ec576fad7164304e019f"


@pytest.mark.thorough
def test_a_worker_loads_no_heavy_library(name: str) -> None:
    program = (
        "import sys; from asyncdata.tokenization.functions.prompt import PromptTokenizeFn\n"
        "heavy = {'numpy', 'torch', 'transformers', 'huggingface_hub', 'anyio'}\n"
        f"PromptTokenizeFn({name!r}).open()\n"
        "print(*heavy & {*sys.modules}, *{'jinja2'} & {*sys.modules})\n"
        f"PromptTokenizeFn({name!r}, apply_chat_template=True).open()\n"
        "print(*heavy & {*sys.modules})"
    )
    root = str(Path(__file__).parents[4])

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)

    assert done.stdout.split() == [], done.stdout


SETS = [
    "gsm8k/test.slime",
    "gsm8k/test.chat",
    "chat_sft/chat_sft",
    pytest.param("gsm8k/train.slime", marks=pytest.mark.slow),
    pytest.param("gsm8k/train.chat", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=["qwen2-bpe-151k", "gpt2-bpe-50k", "gpt2-bpe-50k-generation"])
def theirs(request: pytest.FixtureRequest, test_data: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder = test_data / "tokenizers" / request.param
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return transformers.AutoTokenizer.from_pretrained(folder, model_max_length=10**9)


@pytest.mark.thorough
@pytest.mark.parametrize("file", SETS)
def test_text_and_ids_of_every_row_are_those_of_transformers(theirs: Any, test_data: Path, file: str) -> None:
    raws = (test_data / f"{file}.jsonl").read_bytes().splitlines()
    rows = [json.loads(raw) for raw in raws]
    key = "messages" if "sft" in file else "input"
    chats = [[{"role": "user", "content": row[key]}] if "slime" in file else row[key] for row in rows]
    rendered = [
        theirs.apply_chat_template(chat, tools=row.get("tools"), tokenize=False, add_generation_prompt=True)
        for chat, row in zip(chats, rows, strict=True)
    ]
    plain = [[row[key] for row in rows]] if "slime" in file else []

    for texts, templated in [*((texts, False) for texts in plain), (rendered, True)]:
        fn = PromptTokenizeFn(theirs.name_or_path, prompt_key=key, apply_chat_template=templated)
        chunk = run(fn.open(), raws)

        assert (chunk.num_samples, chunk.errors, chunk.drops) == (len(rows), [], [])
        assert values(chunk, "prompt") == texts
        assert token_ids(chunk) == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.thorough
def test_a_template_with_generation_blocks_renders_the_same_text(theirs: Any, test_data: Path) -> None:
    raws = (test_data / "chat_sft" / "chat_sft.jsonl").read_bytes().splitlines()
    template = (test_data / "tokenizers" / "qwen2-bpe-151k" / "chat_template_generation.jinja").read_text(
        encoding="utf-8"
    )
    rows = [json.loads(raw) for raw in raws]
    fn = PromptTokenizeFn(theirs.name_or_path, prompt_key="messages", apply_chat_template=True, chat_template=template)

    chunk = run(fn.open(), raws)

    assert values(chunk, "prompt") == [
        theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), chat_template=template, tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
