"""Chats, every tokenize function with a tokenizer, and fast backends that are wrong where a test says so."""

import json
from array import array

import pytest
from tokenizers import Tokenizer

from asyncdata import PromptTokenizeFn
from asyncdata.loader import proving
from asyncdata.tokenization.encoders import equivalence_records, equivalence_sweep, fast_backends, text_encoder
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder
from tests.support.function_kinds import END
from tests.unit.tokenization.trained import assistant, user

CHAT = [{"role": "system", "content": "Be brief."}, user("Why?"), assistant("Because.")]
CHAT += [user("And then?"), assistant("Nothing.")]

GENERATION = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"""


def said(message):
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text + END


FEW = (9, 10, 13, *range(0x20, 0x7F), *range(0xDE, 0x102), 0x301, 0x323, *range(0x410, 0x418), 0x4E2D, 0xAC01, 0x1F600)
"""The characters of a short sweep."""


class Fake:
    """Gives the ids of ``tokenizers``, but for texts that are ``wrong``: those lose their last id, or raise."""

    def __init__(self, tokenizer, wrong, *, raises=False):
        self._right = HfEncoder(tokenizer)
        self._wrong = wrong
        self._raises = raises
        self.num_texts = 0

    def __call__(self, texts):
        self.num_texts += len(texts)
        is_wrong = [self._wrong(text) for text in texts]
        if self._raises and any(is_wrong):
            raise ValueError("no such text")

        found = self._right(texts)
        if not any(is_wrong):
            return found

        pieces = [ids[:-4] if wrong else ids for ids, wrong in zip(found.of_each(), is_wrong, strict=True)]
        ends, end = array("I"), 0
        for piece in pieces:
            end += len(piece) // 4
            ends.append(end)
        return fast_backends.FlatIds(b"".join(pieces), ends)


def install(monkeypatch, encoders, points=FEW):
    """Make ``encoders`` the fast backends that are installed, and sweeps short ones that begin with ``points``; and
    count how often each is loaded."""
    loads = dict.fromkeys(encoders, 0)

    def load(name, _json, *, splits_special=False):
        loads[name] += 1
        return encoders[name]()

    for module in (fast_backends, equivalence_records):
        monkeypatch.setattr(module, "version_of", lambda name: "1.0" if name in encoders else None)
    for module in (fast_backends, equivalence_sweep):
        monkeypatch.setattr(module, "load_backend", load)
    shorten(monkeypatch, points)
    return loads


def shorten(monkeypatch, points, longest_text=500):
    """Make sweeps short, which begin with these characters."""
    for module in (equivalence_sweep, proving):
        monkeypatch.setattr(module, "FIRST", list(points))
    monkeypatch.setattr(equivalence_sweep, "NUM_RANDOM_TEXTS", 100)
    monkeypatch.setattr(equivalence_sweep, "LONGEST_TEXT", longest_text)


RARE = "a rare text"


class FoundOut(PromptTokenizeFn, frozen=True, kw_only=True):
    """Prompts by a backend that was proven, and is wrong on one text."""

    def open(self):
        patch = pytest.MonkeyPatch()  # for as long as the process is there
        audit_often(patch)
        right = Tokenizer.from_file(f"{self.tokenizer}/tokenizer.json")
        install(patch, {"gigatoken": lambda: Fake(right, lambda text: text == RARE)}, points=range(0x20, 0x7F))
        return super().open()


def audit_often(patch):
    """Every second text is audited, from the first on."""
    patch.setattr(text_encoder, "FIRST_AUDIT_TOKENS", 1)
    patch.setattr(text_encoder, "AUDIT_EVERY", 2)
    patch.setattr(text_encoder, "WORK_BEFORE_AUDIT_S", 0.0)
