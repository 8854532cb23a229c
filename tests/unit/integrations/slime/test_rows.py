from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models

from asyncdata import ConfigError, PromptTokenizeFn, TokenizeFn
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.unit.tokenization import drops, faults, run, token_ids, values

NOWHERE = "/there/is/no/such/tokenizer"
TOOL = {"type": "function", "function": {"name": "look"}}
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text or ('[' ~ p.type ~ ']') }}{% endfor %}{% endfor %}"
CHAT = [{"role": "user", "content": "why"}]


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    return Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))


def read(row: dict[str, Any] | bytes, **settings: Any) -> dict[str, Any]:
    """The one sample of a row."""
    chunk = run(SlimeTokenizeFn(settings.pop("tokenizer", NOWHERE), **settings).open(), [row])
    assert (chunk.num_samples, chunk.errors, chunk.drops) == (1, [], []), chunk.errors
    found = {column: chunk.value(column, 0) for column in ("prompt", "label", "metadata", "extra")}
    return {**found, "tokens": chunk.tokens_of(0).tolist()}


def test_a_row_becomes_prompt_label_and_metadata_and_no_tokens() -> None:
    row = {"input": "why", "label": "72", "metadata": {"a": [1, 2.5]}, "other": 1}

    assert read(row, label_key="label") == {
        "prompt": "why",
        "label": "72",
        "metadata": {"a": [1, 2.5]},
        "extra": None,
        "tokens": [],
    }
    assert read(row)["label"] is None


@pytest.mark.parametrize("prompt", ["", "why", CHAT, [], {"a": 1}, 5, None], ids=str)
def test_without_a_template_a_prompt_stays_what_it_is(name: str, prompt: Any) -> None:
    row = {"input": prompt}

    assert read(row)["prompt"] == prompt
    assert read(row, tokenizer=name, max_length=9, pretokenize=True)["prompt"] == prompt
    assert read(row, multimodal_keys={})["prompt"] == ([{"role": "user", "content": prompt}] if isinstance(prompt, str)
                                                       else prompt)  # fmt: skip


def test_without_need_no_tokenizer_is_looked_at() -> None:
    fn = SlimeTokenizeFn(NOWHERE, multimodal_keys={"image": "images"})

    assert fn.resolve() is fn
    assert fn.fingerprints()["tokenizer"] == fn.fingerprints()["template"] == "none"
    fn.open()


@pytest.mark.parametrize("settings", [{"max_length": 5}, {"pretokenize": True}, {"apply_chat_template": True}], ids=str)
def test_where_it_is_needed_a_missing_tokenizer_is_refused_before_any_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="AD413"):
        SlimeTokenizeFn(NOWHERE, **settings).resolve()


def test_a_template_alone_needs_no_vocabulary(small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text("{}")

    assert read({"input": "why"}, tokenizer=str(tmp_path / "t"), apply_chat_template=True)["prompt"] == (
        "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_text_is_that_of_the_prompt_function(name: str) -> None:
    rows = [{"input": "why"}, {"input": CHAT, "tools": [TOOL]}, {"input": "café", "tools": json.dumps([TOOL])}]
    template = "{{ eos_token }}{{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"

    ours = run(
        SlimeTokenizeFn(
            name, apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template, "thinking": True}
        ).open(),
        rows,
    )
    other = run(
        PromptTokenizeFn(
            name, apply_chat_template=True, chat_template=template, chat_template_kwargs={"thinking": True}
        ).open(),
        rows,
    )

    assert values(ours, "prompt") == values(other, "prompt")
    assert values(ours, "metadata") == values(other, "metadata") == [None, {"tools": [TOOL]}, {"tools": [TOOL]}]
    assert token_ids(ours) == [[], [], []]


def test_template_arguments_without_a_template_do_nothing() -> None:
    assert read({"input": "why"}, apply_chat_template_kwargs={"enable_thinking": False})["prompt"] == "why"


def test_a_template_that_asks_for_today_is_told_the_given_date(name: str) -> None:
    kwargs = {"chat_template": "{{ strftime_now('%Y') }}"}

    assert read({"input": "a"}, tokenizer=name, apply_chat_template=True, apply_chat_template_kwargs=kwargs,
                today="1999-01-31")["prompt"] == "1999"  # fmt: skip
    with pytest.raises(ConfigError, match="AD411"):
        SlimeTokenizeFn(name, apply_chat_template=True, apply_chat_template_kwargs=kwargs).resolve()
    with pytest.raises(ConfigError, match="today"):
        SlimeTokenizeFn(name, today="tomorrow")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"a": 1}, {"a": 1}), ({}, {}), (None, None), (0.0, None), ("", None), ([], None), (False, None),
        ("text", "text"), ([1], [1]), (3, 3),
    ],
    ids=str,
)  # fmt: skip
def test_metadata_is_any_value_that_counts(metadata: Any, expected: Any) -> None:
    assert read({"input": "a", "metadata": metadata})["metadata"] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("empty", [b"{ }", b"0.0", b"-0", b"[ ]", b'""', b"null", b"0e5", b"false"])
def test_tools_go_into_metadata_that_is_empty(empty: bytes) -> None:
    row = b'{"input": "a", "tools": ["any", 5], "metadata": ' + empty + b"}"

    assert read(row)["metadata"] == {"tools": ["any", 5]}


def test_tools_take_the_place_of_others_in_the_metadata() -> None:
    row = {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"tools": "old", "k": 1}}

    assert read(row)["metadata"] == {"tools": [TOOL], "k": 1}
    assert read({"input": "a", "tools": None})["metadata"] is None
    assert read(row, tool_key=None)["metadata"] == {"tools": "old", "k": 1}


def test_what_json_cannot_say_is_kept() -> None:
    row = b'{"input": "a \\ud83d", "label": NaN, "metadata": {"n": [1e999, "\\udc00"]}, "tools": [NaN]}'

    found = read(row, label_key="label")

    assert found["prompt"] == "a \ud83d"
    assert math.isnan(found["label"])
    assert found["metadata"]["n"] == [math.inf, "\udc00"]
    assert math.isnan(found["metadata"]["tools"][0])


def test_half_a_surrogate_pair_is_bad_only_where_tokens_are_made(name: str) -> None:
    row = b'{"input": "a \\ud83d"}'
    text = "<|im_start|>user\na \ud83d<|im_end|>\n<|im_start|>assistant\n"

    assert read(row, tokenizer=name, apply_chat_template=True)["prompt"] == text
    for settings in ({"max_length": 50}, {"pretokenize": True}, {"max_length": 50, "apply_chat_template": True}):
        assert faults(run(SlimeTokenizeFn(name, **settings).open(), [row])) == [(0, "AD107")]


def test_a_prompt_of_exactly_max_length_is_kept_and_an_empty_one_too(name: str, tokenizer: Tokenizer) -> None:
    texts = ["a", "a b", "a b c", "", "a b"]
    length = len(tokenizer.encode("a b").ids)

    chunk = run(SlimeTokenizeFn(name, max_length=length).open(), [{"input": text} for text in texts])

    assert values(chunk, "prompt") == ["a", "a b", "", "a b"]
    assert [chunk.row_of(sample) for sample in range(4)] == [0, 1, 3, 4]
    assert drops(chunk) == {"max_length": [2]}
    assert token_ids(chunk) == [[]] * 4


def test_the_length_is_that_of_the_rendered_text(name: str, tokenizer: Tokenizer) -> None:
    length = len(tokenizer.encode("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n").ids)

    for limit, kept in ((length, 1), (length - 1, 0)):
        fn = SlimeTokenizeFn(name, max_length=limit, apply_chat_template=True)
        assert run(fn.open(), [{"input": "why"}]).num_samples == kept


def test_prompts_that_are_no_text_have_no_length(name: str) -> None:
    rows = [{"input": [{"role": "user", "content": "why " * 99}]}, {"input": None}, {"input": 5}]

    assert run(SlimeTokenizeFn(name, max_length=1).open(), rows).num_samples == 3
    assert run(SlimeTokenizeFn(name, max_length=1, multimodal_keys={}).open(), rows).num_samples == 3


def test_tokens_are_kept_only_if_asked_for(name: str, tokenizer: Tokenizer) -> None:
    rows = [{"input": "why not"}, {"input": CHAT}, {"input": ""}]

    plain = run(SlimeTokenizeFn(name, pretokenize=True, max_length=99).open(), rows)

    assert token_ids(plain) == [tokenizer.encode("why not").ids, [], []]
    assert read({"input": "why"}, tokenizer=name, max_length=99)["tokens"] == []
    text = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    found = read({"input": "why"}, tokenizer=name, pretokenize=True, apply_chat_template=True)
    assert (found["prompt"], found["tokens"]) == (text, tokenizer.encode(text).ids)


IMAGES = {"image": "pictures", "video": "clips", "audio": "sounds"}


def test_placeholders_become_parts_in_the_order_of_the_chat() -> None:
    rich = {"type": "image", "image": "b.png", "max_pixels": 9}
    row = {
        "input": [
            {"role": "system", "content": "look"},
            {"role": "user", "content": "<image>left <video><image>right <audio>"},
        ],
        "pictures": ["a.png", rich],
        "clips": [["frame1", "frame2"]],
        "sounds": ["s.wav"],
    }

    found = read(row, multimodal_keys=IMAGES)

    assert found["prompt"] == [
        {"role": "system", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "left "},
                {"type": "video", "video": ["frame1", "frame2"]},
                rich,
                {"type": "text", "text": "right "},
                {"type": "audio", "audio": "s.wav"},
            ],
        },
    ]
    assert found["extra"] == {
        "multimodal": {"images": ["a.png", rich], "videos": [["frame1", "frame2"]], "audios": ["s.wav"]}
    }


def test_a_template_sees_the_parts_and_the_images_stay_with_the_sample(name: str) -> None:
    row = {"input": "<image>what?<image>", "pictures": ["a", "b"]}
    settings: dict[str, Any] = {
        "tokenizer": name, "apply_chat_template": True, "apply_chat_template_kwargs": {"chat_template": PARTS},
        "multimodal_keys": {"image": "pictures"},
    }  # fmt: skip

    found = read(row, **settings)
    with_tokens = read(row, **settings, pretokenize=True, max_length=99)
    of_text = read({"input": "what?"}, **settings, pretokenize=True)

    assert (found["prompt"], found["extra"]) == ("[image]what?[image]", {"multimodal": {"images": ["a", "b"]}})
    assert with_tokens["tokens"] == []  # the rollout must count the images' own tokens
    assert (of_text["extra"], len(of_text["tokens"]) > 0) == (None, True)


def test_media_that_stand_in_the_messages_are_noted_too(name: str) -> None:
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}, {"type": ["odd"]}, "<image>"]
    rows: list[dict[str, Any]] = [{"input": [{"role": "user", "content": parts}, {"role": "user", "content": []}]}]
    template = {"chat_template": "{{ messages | length }}"}

    put_in = read(rows[0], multimodal_keys={"image": "pictures"})
    rendered = read(rows[0], tokenizer=name, apply_chat_template=True, apply_chat_template_kwargs=template)

    assert put_in["prompt"] == rows[0]["input"]
    assert put_in["extra"] == rendered["extra"] == {"multimodal": {"images": [parts[0]]}}


def test_without_media_of_its_kind_a_placeholder_is_text() -> None:
    for row in ({"input": "<image>a"}, {"input": "<image>a", "pictures": None}, {"input": "<image>a", "sounds": []}):
        found = read(row, multimodal_keys=IMAGES)
        assert "".join(part["text"] for part in found["prompt"][0]["content"]) == "<image>a"
        assert found["extra"] is None


def test_an_empty_text_has_no_parts() -> None:
    assert read({"input": ""}, multimodal_keys=IMAGES)["prompt"] == [{"role": "user", "content": []}]
    assert read({"input": []}, multimodal_keys=IMAGES)["prompt"] == []


BAD: list[tuple[dict[str, Any], dict[str, Any] | bytes, str, str]] = [
    ({}, {"prompt": "a"}, "AD110", "no key 'input': the row has 'prompt': set prompt_key='prompt'?"),
    ({"label_key": "label"}, {"input": "a", "lable": 1}, "AD110", "set label_key='lable'?"),
    ({}, b'{"input": "a', "AD101", "cut off"),
    ({}, b"[]", "AD113", "got an array"),
    ({}, {"input": "a", "tools": {}}, "AD111", "'tools' must be a list of JSON schemas, got an object"),
    ({}, {"input": "a", "tools": "[{"}, "AD101", "'tools' is a string, and its text is not JSON"),
    ({}, {"input": "a", "tools": [], "metadata": "m"}, "AD111", "'metadata' must be an object, as the row has tools"),
    ({}, {"input": "a", "tools": [], "metadata": [1]}, "AD111", "got an array"),
    (
        {"multimodal_keys": IMAGES}, {"input": "<image><image>", "pictures": ["a"]},
        "AD114", "'input' has 2 <image>, and 'pictures' has 1; there must be one item for each placeholder",
    ),
    ({"multimodal_keys": IMAGES}, {"input": "<image>", "pictures": []}, "AD114", "has 1 <image>, and 'pictures' has 0"),
    ({"multimodal_keys": IMAGES}, {"input": "a", "clips": ["a", "b"]}, "AD114", "has 0 <video>, and 'clips' has 2"),
    ({"multimodal_keys": IMAGES}, {"input": "a", "pictures": "a.png"}, "AD111", "'pictures' must be a list of images"),
    ({"multimodal_keys": IMAGES}, {"input": None}, "AD111", "'input' must be a string or a list of messages, got null"),
    ({"multimodal_keys": IMAGES}, {"input": ["a"]}, "AD111", "'input'[0] must be an object with 'content'"),
    (
        {"multimodal_keys": IMAGES}, {"input": [{"role": "user"}]},
        "AD111", "'input'[0]['content'] must be a string or a list of parts, got null",
    ),
    ({"multimodal_keys": IMAGES}, {"input": [{"content": {"a": 1}}]}, "AD111", "got an object"),
]  # fmt: skip
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "AD111", "'input' must be a string or a list of messages, got null"),
    ({"input": []}, "AD111", "'input' must be a string or a list of messages that is not empty, got an array"),
    ({"input": [{"content": "a"}]}, "AD112", "'input'[0] has no 'role'"),
    ({"input": "a", "tools": ["x"]}, "AD111", "'tools'[0] must be a JSON schema, got a string"),
    ({"input": [{"role": "user", "content": 5}]}, "AD412", "chat template line 2"),
]


@pytest.mark.parametrize(("settings", "row", "code", "reason"), BAD, ids=[str(row)[:50] for _, row, _, _ in BAD])
def test_a_bad_row_is_named_and_the_others_are_kept(
    settings: dict[str, Any], row: dict[str, Any] | bytes, code: str, reason: str
) -> None:
    good = {"input": "a", "label": 0}

    chunk = run(SlimeTokenizeFn(NOWHERE, **settings).open(), [good, row, good])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, code)])
    assert reason in chunk.errors[0].reason


@pytest.mark.parametrize(("row", "code", "reason"), BAD_CHATS, ids=[str(row) for row, _, _ in BAD_CHATS])
def test_a_bad_chat_is_named_and_the_others_are_kept(name: str, row: dict[str, Any], code: str, reason: str) -> None:
    chunk = run(SlimeTokenizeFn(name, apply_chat_template=True).open(), [{"input": "a"}, row, {"input": "b"}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, code)])
    assert reason in chunk.errors[0].reason


def test_a_text_that_the_tokenizer_refuses_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="no such token")).save(str(tmp_path / "tokenizer.json"))

    chunk = run(
        SlimeTokenizeFn(str(tmp_path), pretokenize=True).open(), [{"input": "a"}, {"input": "x"}, {"input": []}]
    )

    assert (values(chunk, "prompt"), token_ids(chunk)) == (["a", []], [[0], []])
    assert faults(chunk) == [(1, "AD421")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer": None}, "tokenizer=None"),
    ({"max_length": -1}, "max_length=-1"),
    ({"prompt_key": None}, "prompt_key=None"),
    ({"multimodal_keys": {"images": "images"}}, "multimodal_keys has images; slime's kinds are image, video, audio"),
    ({"multimodal_keys": {"image": ["a"]}}, "multimodal_keys="),
    ({"multimodal_keys": {"image": ""}}, "multimodal_keys="),
    ({"apply_chat_template_kwargs": {"a": (1,)}}, "apply_chat_template_kwargs must be JSON values"),
    ({"apply_chat_template_kwargs": {"tools": 1, "add_generation_prompt": 0}}, "given add_generation_prompt, tools"),
    ({"apply_chat_template_kwargs": {"chat_template": 5}}, "chat_template is a template's text or name, got 5"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlimeTokenizeFn(**{"tokenizer": "org/name", **settings})

    assert reason in str(caught.value)


def test_a_worker_makes_the_same_function_from_its_settings(name: str) -> None:
    fn = SlimeTokenizeFn(name, multimodal_keys={"image": "i"}, max_length=0, apply_chat_template_kwargs={"a": [None]})

    spec = describe(fn)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))

    assert isinstance(fn, TokenizeFn)
    assert spec.path == "asyncdata.integrations.slime.rows:SlimeTokenizeFn"
    assert SlimeTokenizeFn(**(sent.settings or {})) == fn
    assert run(open_spec(sent), [{"input": "why"}]).num_samples == 1


def test_a_description_cannot_be_changed_through_its_arguments() -> None:
    keys, kwargs = {"image": "a"}, {"x": {"y": 1}}
    fn = SlimeTokenizeFn(NOWHERE, multimodal_keys=keys, apply_chat_template_kwargs=kwargs)

    keys["video"], kwargs["x"]["y"] = "b", 2

    assert (fn.multimodal_keys, fn.apply_chat_template_kwargs) == ({"image": "a"}, {"x": {"y": 1}})


def test_resolving_gives_a_local_folder(small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_tokenizer.parent)

    resolved = SlimeTokenizeFn(small_tokenizer.name, max_length=3).resolve()

    assert resolved == SlimeTokenizeFn(str(small_tokenizer), max_length=3)
    assert SlimeTokenizeFn(Path(small_tokenizer.name), max_length=3).resolve() == resolved  # type: ignore[arg-type]


def test_fingerprints_tell_what_differs(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer, tmp_path / "moved")
    moved = str(tmp_path / "moved")

    def prints(tokenizer: str = name, **settings: Any) -> dict[str, str]:
        return SlimeTokenizeFn(tokenizer, **settings).fingerprints()

    assert prints(moved, max_length=5) == prints(max_length=5)
    assert prints(max_length=5)["tokenizer"] == PromptTokenizeFn(name).fingerprints()["tokenizer"]
    chat = prints(apply_chat_template=True)
    assert chat["template"] == PromptTokenizeFn(name, apply_chat_template=True).fingerprints()["template"]
    assert chat["tokenizer"] == "none"
    other = prints(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": "{{ messages }}"})
    assert other["template"] != chat["template"]
    different = [
        prints(), prints(max_length=5), prints(pretokenize=True), chat, other, prints(prompt_key="q"),
        prints(multimodal_keys={}), prints(multimodal_keys={"image": "a"}), prints(tool_key=None),
        {"tokenize_fn": PromptTokenizeFn(name).fingerprints()["tokenize_fn"]},
    ]  # fmt: skip
    assert len({each["tokenize_fn"] for each in different}) == len(different)


def test_the_fingerprint_of_settings_is_pinned() -> None:
    """Another one would refuse every snapshot there is; a change of meaning asks for a new ``version``."""
    fn = SlimeTokenizeFn(NOWHERE, label_key="label", multimodal_keys={"image": "images"})

    assert SlimeTokenizeFn(NOWHERE).fingerprints()["tokenize_fn"] == "142a78928adb6a00a659b3189f2d4093"
    assert fn.fingerprints()["tokenize_fn"] == "f7e769466007f93b038b97e2e27788d2"


def test_every_row_is_announced_before_it_is_read_and_then_all_together() -> None:
    announced: list[int] = []

    SlimeTokenizeFn(NOWHERE).open()([b'{"input": "a"}', b"{", b'{"input": "b"}'], ColumnWriter(announced.append))

    assert announced == [0, 1, 2, -1]


def test_a_worker_loads_no_heavy_library(name: str) -> None:
    program = (
        "import sys; from asyncdata.integrations.slime.rows import SlimeTokenizeFn\n"
        f"SlimeTokenizeFn({name!r}, max_length=5, apply_chat_template=True).open()\n"
        "print(*{'numpy', 'torch', 'transformers', 'huggingface_hub', 'anyio', 'ray', 'slime'} & {*sys.modules})"
    )
    root = str(Path(__file__).parents[4])

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)

    assert done.stdout.split() == [], done.stdout
