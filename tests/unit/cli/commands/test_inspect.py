"""``asyncdata inspect``, and how a command is told what to tokenize with."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

import asyncdata
from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder
from asyncdata.tokenization.encoders.equivalence_records import choose
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import Fake, install
from tests.unit.tokenization.trained import assistant, user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.thorough

ROOT = Path(asyncdata.__file__).parents[1]
TOKENIZER = ("--tokenizer", tokenizer_folder())
CHATS = [
    [user("Is it far?"), assistant("No.\nNot at all.")],
    [user("Nobody answers.")],
    [{"role": "user"}, assistant("x")],
]


@pytest.fixture
def chats(jsonl_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> str:
    path = jsonl_file([*({"messages": chat} for chat in CHATS), b'{"messages": '], "chats.jsonl")
    monkeypatch.chdir(path.parent)
    return "chats.jsonl"


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command and returns what it printed."""

    def run(*words: object, status: int = 0) -> str:
        assert main([*map(str, words)]) == status
        found = capsys.readouterr()
        return found.err if status else found.out

    return run


@pytest.fixture
def records(printed: Callable[..., str]) -> Callable[..., list[Any]]:
    """A function that runs a command with --json and returns the objects that it printed."""

    def run(*words: object) -> list[Any]:
        return [json.loads(line) for line in printed(*words, "--json").splitlines()]

    return run


def trained(record: dict[str, Any]) -> str:
    return "".join(piece["text"] for text in record["texts"] for piece in text["pieces"] if piece["is_trained"])


# The loss mask


def test_what_is_trained_stands_in_brackets_with_turns_and_counts(chats, printed):
    out = printed("inspect", chats, *TOKENIZER, "--loss-mask", "--no-shuffle", "--num", 4)

    heading, rest = out.split("\n", 1)
    assert heading.startswith("0:0:0  chats.jsonl:1  ")
    assert heading.endswith("%)")
    assert rest.startswith(
        "user      │ ⟨<|user|>⟩↵\n"
        "          │ Is it far?⟨<|end|>⟩↵\n"
        "assistant │ ⟨<|assistant|>⟩↵\n"
        "          │ ⟦No.↵⟧\n"
        "          │ ⟦Not at all.⟨<|end|>⟩⟧↵\n"
        "\n"
        "0:0:1  chats.jsonl:2  dropped: no_trained_tokens\n"
        "\n"
        "0:0:2  chats.jsonl:3  bad row: AD412 "
    )
    assert "0:0:3  chats.jsonl:4  bad row: AD101 invalid JSON" in rest
    assert "rows      4, of which 1 became samples\ndropped   1 no_trained_tokens\nbad rows  2\ntokens    " in rest


@pytest.fixture
def half_proven(tmp_path: Path) -> str:
    """A tokenizer whose template asks for the length of what a tool said, which is proven of no text."""
    folder = tmp_path / "half"
    shutil.copytree(tokenizer_folder(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% if m.role == 'tool' %}{{ m.content | wordcount }}{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_it_says_which_shapes_of_chats_are_proven_and_which_library_encodes(
    chats, half_proven, jsonl_file, printed, records
):
    used_tool = [user("x"), {"role": "tool", "content": "1", "name": "f"}, assistant("y")]
    two_turns = [user("x"), assistant("y"), user("z"), assistant("v")]
    path = jsonl_file([{"messages": chat} for chat in (CHATS[0], used_tool, two_turns, two_turns)], "more.jsonl")

    *_, last = records("inspect", path, "--tokenizer", half_proven, "--no-shuffle", "--num", 0)
    assert [(len(shape["messages"]), shape["is_proven"]) for shape in last["template"]] == [
        (2, True),
        (3, False),
        (4, True),
    ]
    assert last["template"][1]["messages"] == ["user", "tool (name)", "assistant"]
    assert last["encoding"]["backend"] == "tokenizers"
    out = printed("inspect", path, "--tokenizer", half_proven, "--no-shuffle", "--num", 0)
    assert (
        "template  proven for 2 of 3 shapes of chats\n"
        "          rendered: user / tool (name) / assistant\n"
        "encoder   tokenizers: " in out
    )


@pytest.mark.parametrize("kind", ["chat", "prompt"])
def test_it_says_that_a_proof_covers_ids_and_where_the_function_needs_them_offsets(
    chats, small_tokenizer, records, monkeypatch, kind
):
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    install(monkeypatch, {"gigatoken": lambda: Fake(tokenizer, lambda _: False)}, points=range(0x20, 0x7F))
    choose(TokenizerFiles(str(small_tokenizer)), "gigatoken")

    *_, last = records("inspect", chats, "--tokenizer", small_tokenizer, "--kind", kind, "--num", 0)

    same = {"chat": "ids and offsets", "prompt": "ids"}[kind]
    assert last["encoding"] == {"backend": "gigatoken", "version": "1.0", "reason": f"proven to give the same {same}"}


def test_rows_without_chats_have_no_shapes_and_a_backend_is_chosen(jsonl_file, records, monkeypatch):
    path = jsonl_file([{"text": "a"}], "texts.jsonl")

    *_, last = records("inspect", path, *TOKENIZER, "--kind", "text", "--num", 1)
    assert last["template"] == []
    assert last["encoding"]["reason"]
    *_, last = records("inspect", path, *TOKENIZER, "--kind", "text", "--set", "tokenizer_backend=hf", "--num", 1)
    assert last["encoding"]["reason"] == "as requested"


def test_the_counts_are_those_of_all_samples(chats, records):
    *rows, total = records("inspect", chats, *TOKENIZER, "--loss-mask", "--no-shuffle", "--num", 0)

    assert [(row["position"], row["line"]) for row in rows] == [(f"0:0:{row}", row + 1) for row in range(4)]
    assert trained(rows[0]) == "No.\nNot at all.<|end|>"
    assert [row["dropped"] for row in rows] == [None, "no_trained_tokens", None, None]
    assert [row["error"] is not None for row in rows] == [False, False, True, True]
    assert total["total"] == {
        "num_rows": 4,
        "num_samples": 1,
        "dropped": {"no_trained_tokens": 1},
        "bad_rows": 2,
        "num_tokens": rows[0]["num_tokens"],
        "num_trained": rows[0]["num_trained"],
    }


def test_without_a_mask_only_the_text_is_shown(chats, printed):
    out = printed("inspect", chats, *TOKENIZER, "--no-shuffle", "--num", 1)

    assert "Not at all." in out
    assert "⟦" not in out
    assert "trained" not in out


def test_rows_are_chosen_by_position_or_by_line(chats, records):
    *by_line, _ = records("inspect", chats, *TOKENIZER, "--row", "chats.jsonl:3", "--row", 1)
    positions = [word for row in by_line for word in ("--position", row["position"])]
    *by_position, _ = records("inspect", chats, *TOKENIZER, *positions)

    assert [row["line"] for row in by_line] == [3, 1]
    assert by_position == by_line


def test_a_row_that_is_not_there_is_named(chats, printed):
    assert "there is no row at chats.jsonl:9" in printed("inspect", chats, *TOKENIZER, "--row", 9, status=1).replace(
        os.getcwd() + "/", ""
    )


def test_a_prompt_says_that_it_has_no_labels(jsonl_file, printed):
    out = printed("inspect", jsonl_file([{"input": "Hi"}]), *TOKENIZER, "--loss-mask")

    assert " tokens, no labels\n" in out
    assert ", 0 trained (0.0%)" in out


# Colour


@pytest.mark.parametrize(
    ("words", "no_color", "is_coloured"),
    [((), "", False), (("--color", "always"), "", True), (("--color", "always"), "1", True)],
)
def test_without_a_terminal_there_is_colour_only_if_it_is_asked_for(
    chats, printed, monkeypatch, words, no_color, is_coloured
):
    monkeypatch.setenv("NO_COLOR", no_color)

    out = printed("inspect", chats, *TOKENIZER, "--loss-mask", "--row", 1, *words)

    assert ("\x1b[" in out) is is_coloured
    assert ("⟦" in out) is not is_coloured


@pytest.mark.parametrize(
    ("words", "no_color", "is_coloured"), [((), "", True), ((), "1", False), (("--color", "never"), "", False)]
)
def test_on_a_terminal_there_is_colour_unless_it_is_not_wanted(chats, words, no_color, is_coloured):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "asyncdata", "inspect", chats, *TOKENIZER, "--loss-mask", "--row", "1", *words]
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, env=env, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)

    text = shown.decode().replace("\r\n", "\n")
    assert process.returncode == 0
    assert ("\x1b[1;32mNo." in text) is is_coloured
    assert ("⟦No.↵⟧\n" in text) is not is_coloured


# What rows are


@pytest.mark.parametrize(
    ("row", "words", "wanted"),
    [
        ({"messages": CHATS[0]}, (), "No.\nNot at all.<|end|>"),
        ({"text": "A story."}, ("--set", "eos=false"), " story."),
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " red."}, (), " blue.<|end|> red.<|end|>"),
        ({"input": "x", "question": "Where?", "target": "here"}, ("--max-length", 60), " here<|end|>"),
        ({"input": "Hi"}, (), ""),
    ],
)
def test_the_kind_of_rows_follows_from_their_keys(jsonl_file, records, row, words, wanted):
    shown, _ = records("inspect", jsonl_file([b"{", row]), *TOKENIZER, "--row", 2, *words)

    assert shown["error"] is None
    assert trained(shown) == wanted


def test_the_option_kind_chooses_the_tokenize_function(jsonl_file, records, printed, tmp_path):
    path = jsonl_file([{"messages": CHATS[0], "text": "A story."}])
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")

    assert trained(records("inspect", path, *TOKENIZER, "--kind", "text", "--max-length", 99)[0]) == " story.<|end|>"
    shown, _ = records("inspect", path, *TOKENIZER, "--chat-template", tmp_path / "template", "--train-on", "loss")
    assert trained(shown) == "No.\nNot at all.<|end|>"
    refused = printed("inspect", path, *TOKENIZER, "--label-key", "x", status=1)
    assert "there is no setting 'label_key' of ChatTokenizeFn; there are" in refused
    refused = printed("inspect", path, *TOKENIZER, "--kind", "babilong", status=1)
    assert "need --max-length" in refused


def test_the_kind_of_rows_is_asked_for_if_none_of_the_first_rows_is_an_object(jsonl_file, printed):
    assert "say what rows are by --kind" in printed("inspect", jsonl_file([b"{", b"["]), *TOKENIZER, status=1)


def test_questions_over_a_context_say_what_the_cut_took(tmp_path, printed):
    rows = [{"input": "Mary went home. " * 40, "question": "Where is Mary? ", "target": "home"}]
    (tmp_path / "qa1.json").write_text(json.dumps(rows), encoding="utf-8")

    words = ("--loss-mask", "--max-length", 80, "--set", "legacy_recipe=true", "--set", "reserve=16")
    out = printed("inspect", tmp_path / "qa1.json", *TOKENIZER, *words)

    assert "qa1.json:0 (row number)  80 tokens, " in out
    assert "question_lost True" in out
    assert "⟦ home⟧" in out


# Other functions


MODULE = """
from asyncdata import TextTokenizeFn


def letters(row):
    ids = [ord(char) for char in row["text"]]
    return {"input_ids": ids, "labels": [-100, *ids[1:]]}


class Letters:
    def __init__(self, max_length=9):
        self.max_length = max_length

    def hash(self):
        return "letters"

    def __call__(self, item):
        return {name: value[: self.max_length] for name, value in letters(item).items()}


ready = Letters(2)


def described(tokenizer):
    return TextTokenizeFn(tokenizer)
"""


@pytest.fixture
def texts(jsonl_file, monkeypatch) -> Iterator[str]:
    path = jsonl_file([{"text": "abcd"}] * 3, "texts.jsonl")
    (path.parent / "my_letters.py").write_text(MODULE)
    monkeypatch.chdir(path.parent)
    before = list(sys.path)
    yield "texts.jsonl"
    sys.path[:] = before
    sys.modules.pop("my_letters", None)


@pytest.mark.parametrize(
    ("name", "words", "wanted"),
    [
        ("my_letters:letters", (), "9899100"),
        ("my_letters:Letters", ("--set", "max_length=3"), "9899"),
        ("my_letters:Letters", ("--max-length", "3"), "9899"),
        ("my_letters:ready", (), "98"),
        ("asyncdata:TextTokenizeFn", (*TOKENIZER, "--set", "text_key=text"), "<|end|>"),
    ],
)
def test_any_tokenize_function_can_be_named(texts, records, name, words, wanted):
    shown, *_ = records("inspect", texts, "--tokenize-fn", name, *words, "--num", 1)

    assert shown["texts"][0]["is_labelled"]
    assert trained(shown).endswith(wanted)


def test_a_run_and_a_sample_take_it_too(texts, records):
    (report,) = records("run", texts, "--tokenize-fn", "my_letters:Letters", "--num-workers", 1, "--max-length", 2)
    (shown,) = records("sample", texts, "--tokenize-fn", "my_letters:letters", "--ordinal", 1, "--num-workers", 0)

    assert (report["num_samples"], report["num_tokens"]) == (3, 6)
    assert shown["tokens"] == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tokenize-fn", "my_letters:missing"), "AD420 cannot import 'my_letters:missing'"),
        (("--tokenize-fn", "my_letters:letters", "--max-length", "3"), "is not a class and takes no settings"),
        (("--tokenize-fn", "my_letters:Letters", "--set", "width=3"), "cannot be called with the arguments"),
        (("--tokenize-fn", "asyncdata:TextTokenizeFn"), "TextTokenizeFn cannot be made of the settings {}"),
        (
            ("--tokenize-fn", "asyncdata:TextTokenizeFn", *TOKENIZER, "--set", "length=3"),
            "no setting 'length' of TextTokenizeFn",
        ),
        ((*TOKENIZER, "--kind", "text", "--set", "length=3"), "no setting 'length' of TextTokenizeFn"),
    ],
)
def test_a_tokenize_function_that_cannot_be_made_is_refused_with_the_reason(texts, printed, words, reason):
    assert reason in printed("inspect", texts, *words, status=1)
