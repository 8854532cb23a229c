from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import PreferenceTokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import assistant, tokenizer_of, user, variant

if TYPE_CHECKING:
    from pathlib import Path

END = "<|im_end|>"
HEADER = "<|im_start|>assistant\n"


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


def both(fn: PreferenceTokenizeFn, row: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The whole text of the chosen and the rejected one, with brackets around what is trained."""
    chunk = run(fn.open(), [row])
    assert chunk.errors == []
    ((ids,), (spans,), (extra,)) = token_ids(chunk), values(chunk, "spans"), values(chunk, "extra")
    return shown(fn, ids, spans), shown(fn, extra["rejected_input_ids"], extra["rejected_spans"])


def shown(fn: PreferenceTokenizeFn, ids: list[int], spans: list[list[int]]) -> list[str]:
    tokenizer = tokenizer_of(fn)
    borders = [0, *(border for span in spans for border in span), len(ids)]
    return [
        tokenizer.decode(ids[start:stop], skip_special_tokens=False)
        for start, stop in zip(borders, borders[1:], strict=False)
    ]


def test_a_pair_of_texts_is_trained_on_its_answers_and_their_end(name: str) -> None:
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}

    assert both(PreferenceTokenizeFn(name), row) == (
        ["The sky is", f" blue.{END}", ""],
        ["The sky is", f" a fish.{END}", ""],
    )
    assert both(PreferenceTokenizeFn(name, eos=False), row)[0] == ["The sky is", " blue.", ""]


def test_texts_without_a_prompt_share_their_common_prefix_of_whole_words(name: str) -> None:
    row = {"chosen": "The sky is grey today", "rejected": "The sky is green"}

    assert both(PreferenceTokenizeFn(name), row) == (
        ["The sky is", f" grey today{END}", ""],
        ["The sky is", f" green{END}", ""],
    )


def test_a_null_prompt_is_no_prompt(name: str) -> None:
    row = {"prompt": None, "chosen": "The sky is grey", "rejected": "The sky is green"}

    assert both(PreferenceTokenizeFn(name), row)[0][0] == "The sky is"


@pytest.mark.thorough
@pytest.mark.parametrize("explicit", [True, False])
def test_a_pair_of_chats_is_trained_on_the_messages_after_the_prompt(name: str, explicit: bool) -> None:
    prompt = [user("a"), assistant("said before"), user("c")]
    chosen, rejected = [assistant("good")], [assistant("bad"), user("no"), assistant("worse")]
    row: dict[str, Any] = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    if explicit:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    good, bad = both(PreferenceTokenizeFn(name), row)

    assert (good[0].count("said before"), good[1:]) == (1, [f"good{END}", "\n"])
    assert bad[1:] == [f"bad{END}", f"\n<|im_start|>user\nno{END}\n{HEADER}", f"worse{END}", "\n"]


@pytest.mark.parametrize("explicit", [True, False])
def test_the_completion_of_a_chat_is_all_after_the_prompt(name: str, explicit: bool) -> None:
    """As DPOTrainer of TRL trains it: also the line break after the stop token, and the user's turns."""
    prompt, chosen, rejected = [user("c")], [assistant("good")], [assistant("bad"), user("no"), assistant("worse")]
    row: dict[str, Any] = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    if explicit:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    good, bad = both(PreferenceTokenizeFn(name, train_on="completion"), row)

    assert good[1:] == [f"good{END}\n", ""]
    assert bad[1:] == [f"bad{END}\n<|im_start|>user\nno{END}\n{HEADER}worse{END}\n", ""]


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}, [f" blue.{END}", f" a fish.{END}"]),
        ({"prompt": "So", "chosen": f" it ends{END}", "rejected": " it is"}, [f" it ends{END}", f" it is{END}"]),
        ({"chosen": "It is grey", "rejected": "It is green"}, [f"y{END}", f"en{END}"]),
    ],
    ids=["text", "an end token of its own", "no prompt"],
)
def test_the_completion_of_a_text_begins_where_its_tokens_differ_from_the_prompts(
    name: str, row: dict[str, str], trained: list[str]
) -> None:
    good, bad = both(PreferenceTokenizeFn(name, train_on="completion"), row)

    assert [good[1], bad[1]] == trained


def test_a_completion_is_cut_with_its_tokens(name: str) -> None:
    row = {"prompt": "a", "chosen": " b c d e", "rejected": " e d c"}
    fn = PreferenceTokenizeFn(name, train_on="completion", max_length=3, overlong="truncate_right")

    assert both(fn, row) == (["a", " b c", ""], ["a", " e d", ""])


def test_tools_go_to_the_template(name: str) -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    row = {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")], "tools": [{"x": 1}]}

    assert both(PreferenceTokenizeFn(name, chat_template=template), row)[1] == [
        '[{"x": 1}]a<|im_end|>',
        f"c{END}",
        "",
    ]


def test_pairs_that_cannot_be_learned_from_are_dropped_by_their_reason(name: str) -> None:
    rows = [
        {"prompt": "a", "chosen": " b", "rejected": " b"},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a")]},
        {"prompt": [user("a")], "chosen": [user("b")], "rejected": [assistant("c")]},
        {"prompt": "a", "chosen": " b c d e f g h i", "rejected": " b"},
        {"prompt": "a", "chosen": " b", "rejected": " b c d e f g h i"},
        {"prompt": "a", "chosen": " b", "rejected": " c", "metadata": {"n": 1}},
    ]

    chunk = run(PreferenceTokenizeFn(name, max_length=6).open(), rows)

    assert drops(chunk) == {"no_preference": [0], "no_trained_tokens": [1, 2], "max_length": [3, 4]}
    assert values(chunk, "metadata") == [{"n": 1}]


def test_both_are_cut_to_max_length(name: str) -> None:
    fn = PreferenceTokenizeFn(name, max_length=3, overlong="truncate_right", eos=False)

    chunk = run(fn.open(), [{"prompt": "a", "chosen": " b c d e", "rejected": " e d c"}])

    (extra,) = values(chunk, "extra")
    assert [len(token_ids(chunk)[0]), len(extra["rejected_input_ids"])] == [3, 3]
    assert (values(chunk, "spans"), extra["rejected_spans"]) == ([[[1, 3]]], [[1, 3]])
    nothing = run(fn.open(), [{"prompt": "a b c d", "chosen": " b", "rejected": " c"}])
    assert drops(nothing) == {"no_trained_tokens": [0]}


@pytest.mark.parametrize("answers", [(" b", ""), ("", " b")])
def test_a_pair_of_which_one_has_nothing_to_train_is_dropped(name: str, answers: tuple[str, str]) -> None:
    row = {"prompt": "a", "chosen": answers[0], "rejected": answers[1]}

    assert drops(run(PreferenceTokenizeFn(name, eos=False).open(), [row])) == {"no_trained_tokens": [0]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        (b'{"chosen": "a"}', "AD110", "no key 'rejected'"),
        (b'{"chosen": null, "rejected": null}', "AD111", "'chosen' must be a string or a list of messages, got null"),
        (b'{"chosen": "a", "rejected": []}', "AD111", "'rejected' is an array, and 'chosen' is not: a pair must be"),
        (b'{"prompt": [], "chosen": "a", "rejected": "b"}', "AD111", "'prompt' is an array, and 'chosen' is not"),
        (b'{"chosen": ["a"], "rejected": []}', "AD111", "'chosen'[0] must be an object"),
        (b'{"chosen": "\\ud800", "rejected": "a"}', "AD107", "in 'chosen'"),
    ],
)
def test_a_bad_row_is_named(name: str, row: bytes, code: str, reason: str) -> None:
    chunk = run(PreferenceTokenizeFn(name).open(), [row])

    assert faults(chunk) == [(0, code)]
    assert reason in chunk.errors[0].reason


def test_a_tokenizer_without_a_template_will_do_for_texts_alone(small_tokenizer: Path, tmp_path: Path) -> None:
    folder = variant(small_tokenizer, tmp_path / "plain", config={"chat_template": None})
    rows = [
        {"prompt": "a", "chosen": " b", "rejected": " c"},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
    ]

    chunk = run(open_spec(describe(PreferenceTokenizeFn(folder).resolve())), rows)

    assert (chunk.num_samples, faults(chunk)) == (1, [(1, "AD411")])


def test_every_setting_is_in_the_fingerprint(name: str) -> None:
    changes: list[dict[str, Any]] = [
        {"prompt_key": None},
        {"chosen_key": "c"},
        {"rejected_key": "r"},
        {"eos": False},
        {"max_length": 5},
        {"tool_key": None},
    ]
    prints = [PreferenceTokenizeFn(name, **settings).fingerprints()["tokenize_fn"] for settings in [{}, *changes]]

    assert len(set(prints)) == 7
