"""What is proven of tokenizer backends and of chat templates: proven, shown, forgotten, and told by ``inspect``."""

import json
from functools import partial

import pytest

from asyncdata.cli import main as cli
from asyncdata.tokenization.encoders.equivalence_records import revoke
from asyncdata.tokenization.encoders.text_encoder import choose
from tests.support.parts import TokenizerFiles, change, subject_of
from tests.support.tokenizers import FEW, Fake, install
from tests.unit.tokenization.trained import assistant, user


@pytest.fixture
def files(small_tokenizer):
    return TokenizerFiles(str(small_tokenizer))


@pytest.fixture
def run(monkeypatch, capsys, files):
    """Runs a command where gigatoken is right and fastokens is wrong; gives its status, what it wrote, what it said."""
    found = {
        "gigatoken": partial(Fake, files.load(), lambda _: False),
        "fastokens": partial(Fake, files.load(), lambda _: True),
    }

    def run(*arguments, installed=("gigatoken", "fastokens")):
        encoders = {name: found[name] for name in installed}
        install(monkeypatch, encoders)
        change(monkeypatch, version_of_a_proven_backend=lambda name: "1.0" if name in encoders else None)
        status = cli.main(["tokenizer", *arguments, files.folder])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def states(text):
    return [line.partition("  ")[2].strip() for line in text.splitlines()][1:]


def test_what_is_known_is_shown_and_prove_is_status_1_if_no_backend_is_exact_or_none_is_installed(run):
    assert states(run("show")[1]) == ["1.0 not proven yet", "1.0 not proven yet"]
    assert states(run("show", installed=("fastokens",))[1]) == ["not installed", "1.0 not proven yet"]
    absent = {"version": None, "state": "not installed"}
    assert json.loads(run("show", "--json", installed=())[1])["backends"] == {"gigatoken": absent, "fastokens": absent}
    assert run("prove", "--backend", "fastokens")[0] == 1
    status, _, talk = run("prove", "--backend", "fastokens", installed=("gigatoken",))
    assert status == 1
    assert "AD435 no fast tokenizer backend is installed; pip install fastokens" in talk


def test_a_proof_is_remembered_is_there_for_programs_and_is_made_anew_after_an_audit_revoked_it(run, files):
    status, proved, talk = run("prove")
    exact, refused = states(proved)
    assert (status, refused) == (0, "1.0 refused: its ids differ on 'aa'")
    assert exact.startswith(f"1.0 exact for {len(FEW)} characters, on ")
    assert talk == ""
    assert run("show")[1] == proved
    found = json.loads(run("prove", "--json")[1])["backends"]
    assert (found["gigatoken"]["state"], found["fastokens"]["state"]) == ("exact", "refused")
    assert found["gigatoken"]["num_texts"] > 0
    revoke(subject_of(files, "gigatoken"), "an audit found it out")
    assert run("prove", "--backend", "gigatoken")[0] == 1
    assert run("prove", "--backend", "gigatoken", "--again")[0] == 0


def test_all_characters_are_tried_on_request(run, monkeypatch):
    change(monkeypatch, known_points=lambda: [*range(0x4E00, 0x4E10)])
    assert run("prove", "--backend", "gigatoken")[0] == 0
    status, _, talk = run("prove", "--all", "--backend", "gigatoken")
    assert (status, talk) == (0, "gigatoken: all characters of Unicode, about a minute\n")
    found = json.loads(run("show", "--json")[1])["backends"]["gigatoken"]
    assert (found["num_characters"], found["num_refused"]) == (len(FEW) + 16, 0)


CHAT = [user("Is it far?"), assistant("No.\nNot at all.")]


def test_it_says_which_shapes_of_chats_are_proven(tmp_path, demo_tokenizer, jsonl_file, run_json):
    """The template asks for the length of what a tool said, which is proven of no text."""
    (tmp_path / "template").write_text(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% if m.role == 'tool' %}{{ m.content | wordcount }}{% endif %}{% endfor %}"
    )
    used_tool = [user("x"), {"role": "tool", "content": "1", "name": "f"}, assistant("y")]
    two_turns = [user("x"), assistant("y"), user("z"), assistant("v")]
    path = jsonl_file([{"messages": chat} for chat in (CHAT, used_tool, two_turns, two_turns)])
    words = ("--chat-template", tmp_path / "template", "--no-shuffle", "--num", 0)

    *_, last = run_json("inspect", path, "--tokenizer", demo_tokenizer, *words)

    shapes = [(len(shape["messages"]), shape["is_proven"]) for shape in last["template"]]
    assert shapes == [(2, True), (3, False), (4, True)]
    assert last["template"][1]["messages"] == ["user", "tool (name)", "assistant"]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "same"), [("chat", "ids and offsets"), ("prompt", "ids")])
def test_a_proof_is_of_ids_and_of_offsets_where_they_are_needed(jsonl_file, files, run_json, monkeypatch, kind, same):
    install(monkeypatch, {"gigatoken": partial(Fake, files.load(), lambda _: False)}, points=range(0x20, 0x7F))
    choose(files, "gigatoken")
    *_, last = run_json("inspect", jsonl_file([{"messages": CHAT}]), "--tokenizer", files.folder, "--kind", kind)
    assert last["encoding"] == {"backend": "gigatoken", "version": "1.0", "reason": f"proven to give the same {same}"}
