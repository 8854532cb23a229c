"""Which tokens are trained: those of TRL's own trainers, where TRL is installed."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn
from tests.support.pages import blocks_of

for package in ("torch", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # TRL's own

IGNORED = -100
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-it-with-trl.md"
GENERATION = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHATS = [
    [user("What is 1 + 1?"), assistant("It is 2.")],
    [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("\n\nHello"), user("And?"), assistant("Bye  ")],
    [user("a"), assistant("é 中文 😀"), user("b"), assistant("")],
]
PAIRS = [
    {"prompt": [user("Sky?")], "chosen": [assistant("Blue.")], "rejected": [assistant("A fish.")]},
    {
        "prompt": [user("a"), assistant("b"), user("c")],
        "chosen": [assistant("\n\ngood")],
        "rejected": [assistant("bad"), user("no"), assistant("worse")],
    },
]
IMPLICIT = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in PAIRS]
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."},
    {"prompt": "under", "chosen": "standing", "rejected": "stand"},
    {"prompt": "It ends", "chosen": " here<|im_end|>", "rejected": " there"},
]
IMPLICIT_TEXTS = [
    {"chosen": "The sky is grey today", "rejected": "The sky is green"},
    {"chosen": "ab", "rejected": "abc"},
    {"chosen": "One two three", "rejected": "One two  four"},
]


COMPLETIONS = [
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "under", "completion": "standing"},
    {"prompt": "It ends", "completion": " here<|im_end|>"},
    {"prompt": "", "completion": "é 中文 😀"},
    {"prompt": "One line\n", "completion": "\n  two  "},
    {"prompt": "Nothing: ", "completion": ""},
]
ENDINGS = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
TURNS = [{"conversations": [{"from": each["role"], "value": each["content"]} for each in chat]} for chat in CHATS]
"""With the roles of messages: TRL has no words of its own for ShareGPT's."""
WITHOUT_BREAKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def samples_of(folder, rows, tokenize_fn):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with DataLoader(path, tokenize_fn=tokenize_fn, shuffle=False, num_workers=0, timeout_s=240, epochs=1) as loader:
        return list(loader.get_next_batch(len(rows)))


def given_to(tokenizer, rows):
    """What a trainer is made of, besides its arguments."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    return {"model": model, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}


@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_chats_are_trained_as_sft_trainer_does_it(tmp_path, small_tokenizer, train_on):
    """The first token is never trained, as nothing predicts it."""
    import trl
    from transformers import AutoTokenizer

    tokenizer, template = AutoTokenizer.from_pretrained(small_tokenizer), {}
    if train_on == "assistant":
        tokenizer.chat_template, template = GENERATION, {"chat_template": GENERATION}
    rows = [{"messages": chat} for chat in CHATS]
    settings = {"use_cpu": True, "report_to": [], "max_length": None, "assistant_only_loss": train_on == "assistant"}
    trainer = trl.SFTTrainer(args=trl.SFTConfig(output_dir=str(tmp_path), **settings), **given_to(tokenizer, rows))
    theirs = [[row["input_ids"], [IGNORED, *row["labels"][1:]]] for row in trainer.train_dataset]

    found = samples_of(tmp_path, rows, ChatTokenizeFn(small_tokenizer, train_on=train_on, **template))

    assert [[sample.tokens.tolist(), sample.labels.tolist()] for sample in found] == theirs


def begins_text(folder, tokenizer):
    """The tokenizer, which then puts a token before plain text."""
    shutil.copytree(tokenizer, folder)
    path, token = folder / "tokenizer.json", "<|endoftext|>"
    values = json.loads(path.read_text())
    number = next(each["id"] for each in values["added_tokens"] if each["content"] == token)
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    values["post_processor"] = {"type": "TemplateProcessing", "single": single}
    values["post_processor"]["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    values["post_processor"]["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}
    path.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "rows, begins, train_on",
    [
        pytest.param(COMPLETIONS, False, "assistant", id="texts"),
        pytest.param(COMPLETIONS, False, "all", id="texts, all of them"),
        pytest.param(COMPLETIONS, True, "assistant", id="texts after a token"),
        pytest.param(ENDINGS, False, "assistant", id="messages"),
        pytest.param(ENDINGS, False, "all", id="messages, all of them"),
        pytest.param(TURNS, False, "all", id="turns of ShareGPT"),
    ],
)
def test_dialects_are_trained_as_sft_trainer_does_it(tmp_path, small_tokenizer, rows, begins, train_on):
    """The dialect is not named. The template ends a message with its stop token: TRL also trains what would follow."""
    import trl
    from transformers import AutoTokenizer

    name = begins_text(tmp_path / "begins", small_tokenizer) if begins else small_tokenizer
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = WITHOUT_BREAKS
    assert (len(tokenizer("a")["input_ids"]) == 2) == begins
    only = {} if rows is TURNS else {"completion_only_loss": train_on != "all"}
    settings = {"use_cpu": True, "report_to": [], "max_length": None, **only}
    trainer = trl.SFTTrainer(args=trl.SFTConfig(output_dir=str(tmp_path), **settings), **given_to(tokenizer, rows))
    theirs = [[row["input_ids"], [IGNORED, *row["labels"][1:]]] for row in trainer.train_dataset]

    found = samples_of(tmp_path, rows, ChatTokenizeFn(name, train_on=train_on, chat_template=WITHOUT_BREAKS))

    assert [[sample.tokens.tolist(), sample.labels.tolist()] for sample in found] == theirs


@pytest.mark.parametrize(
    "rows",
    [PAIRS, IMPLICIT, TEXTS, IMPLICIT_TEXTS],
    ids=["chats", "chats without a prompt", "texts", "texts without one"],
)
def test_pairs_are_trained_as_dpo_trainer_does_it(tmp_path, small_tokenizer, rows):
    """Of each answer: its tokens, and where the trained ones begin. The first token is never one of them."""
    import trl
    from transformers import AutoTokenizer

    given = given_to(AutoTokenizer.from_pretrained(small_tokenizer), rows)
    arguments = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_length=None)
    trainer = trl.DPOTrainer(ref_model=copy.deepcopy(given["model"]), args=arguments, **given)
    theirs = [
        [[row["prompt_ids"] + row[f"{answer}_ids"], len(row["prompt_ids"]) or 1] for answer in ("chosen", "rejected")]
        for row in trainer.train_dataset
    ]

    ours = []
    for sample in samples_of(tmp_path, rows, PreferenceTokenizeFn(small_tokenizer, train_on="completion")):
        rejected, ((start, stop),) = sample.extra["rejected_input_ids"], sample.extra["rejected_spans"]
        first = int((sample.labels == IGNORED).sum())
        assert stop == len(rejected)
        assert (sample.labels[first:] == sample.tokens[first:]).all()
        ours.append([[sample.tokens.tolist(), first], [rejected, start]])
    assert ours == theirs


KTO = [{**row, "label": number % 2 == 0} for number, row in enumerate(COMPLETIONS[:3])]
KTO_CHATS = [{**row, "label": number % 2 == 1} for number, row in enumerate(ENDINGS)]


@pytest.mark.parametrize("rows", [KTO, KTO_CHATS], ids=["texts", "chats"])
def test_the_batches_of_the_page_are_those_of_kto_trainer_which_trains_on_them(tmp_path, small_tokenizer, rows):
    import trl
    from transformers import AutoTokenizer

    from asyncdata.integrations.torch import ranks
    from asyncdata.integrations.transformers import attach, placeholder

    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer)

    def made(**given):
        settings = {"use_cpu": True, "report_to": [], "max_length": None, "max_steps": 2, "save_strategy": "no"}
        settings |= {"output_dir": str(tmp_path), "per_device_train_batch_size": len(rows)}
        given = given_to(tokenizer, rows) | given
        return trl.KTOTrainer(args=trl.KTOConfig(**settings), ref_model=copy.deepcopy(given["model"]), **given)

    (code,) = (block.text for block in blocks_of(PAGE) if "def kto_batch" in block.text)
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = f"batch_size={len(rows)}, shuffle=False, num_workers=0, timeout_s=240"
    for old, new in {"kto.jsonl": tmp_path / "kto.jsonl", "tokenizer": small_tokenizer}.items():
        code = code.replace(f'"{old}"', repr(str(new)))
    theirs, trainer = made(), made(train_dataset=placeholder())
    names = {"tokenizer": tokenizer, "trainer": trainer, "attach": attach, "ranks": ranks}
    names |= {"DataLoader": DataLoader, "ChatTokenizeFn": ChatTokenizeFn}

    exec(code.replace("batch_size=8", knobs), names)  # noqa: S102 - the project's own page

    expected = theirs.data_collator(list(theirs.train_dataset))
    with names["loader"] as loader:
        batch = next(iter(loader))
        assert {name: batch[name].tolist() for name in batch} == {name: expected[name].tolist() for name in expected}
        trainer.train()
    assert trainer.state.global_step == 2
