"""What the catalogue of bad inputs asks of every case: an outcome that is ours, and where the bad row lies."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from structlog.testing import capture_logs

import asyncdata
from asyncdata import DataLoader, PromptTokenizeFn
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import AsyncDataError
from tests.support.loading import NEVER_S

PACKAGE = str(Path(asyncdata.__file__).parent)
GOOD = [json.dumps({"input": f"question {number}", "label": number}).encode() for number in range(4)]
BAD_AT = 2
"""The bad row has two good ones before it and two behind it."""


def prompts(**settings: Any) -> PromptTokenizeFn:
    """Prompts by a small tokenizer; each sample's label says which row it was."""
    return PromptTokenizeFn(tokenizer_folder(), **{"label_key": "label", **settings})


class Outcome(NamedTuple):
    """What one epoch gave.

    :ivar labels: of the samples that were delivered.
    :ivar error: what ended it before its end.
    """

    labels: list[Any]
    samples: list[Any]
    error: Exception | None
    statistics: Any
    events: list[Any]

    def of(self, event: str) -> list[Any]:
        return [each for each in self.events if each["event"] == event]


def deliver(source: Any, tokenize_fn: Any = None, *, epochs: int | None = 1, size: int = 1, **knobs: Any) -> Outcome:
    """Everything that a loader gives, one by one; errors at its making count as well."""
    settings = {"shuffle": False, "num_workers": 0, "timeout_s": NEVER_S, "epochs": epochs} | knobs
    samples: list[Any] = []
    error: Exception | None = None
    statistics = None
    with capture_logs() as events:
        try:
            with DataLoader(source, tokenize_fn=tokenize_fn or prompts(), **settings) as loader:
                try:
                    while True:
                        samples += loader.get_next_batch(size)
                except asyncdata.errors.EndOfData as end:
                    samples += end.samples
                finally:
                    statistics = loader.statistics()
        except AsyncDataError as raised:
            error = raised
    if error is not None:
        assert_is_ours(error)
    about_data = [each for each in events if each["event"] != "autotune.changed"]  # that one tells of the machine
    return Outcome([sample.label for sample in samples], samples, error, statistics, about_data)


def assert_is_ours(error: BaseException, code: str = "") -> None:
    """One error of the tree, with its code and in words; no frame of the library in them, and no group of errors."""
    text = str(error)
    assert isinstance(error, AsyncDataError), repr(error)
    assert re.match(rf"{code or r'AD[0-9]{3}'} ", text) or not code, text
    assert PACKAGE not in text, text
    assert "ExceptionGroup" not in text, text
    assert "please report" not in text, text


def with_bad(bad: bytes, good: Sequence[bytes] = GOOD) -> bytes:
    """A file's content: good lines, and the bad one between them."""
    return b"\n".join([*good[:BAD_AT], bad, *good[BAD_AT:]]) + b"\n"


def place_of_bad(path: Path, good: Sequence[bytes] = GOOD) -> str:
    """What every error of the bad row begins with, behind its code."""
    offset = sum(len(line) + 1 for line in good[:BAD_AT])
    return f"{path}:{BAD_AT + 1} (byte {offset}): "
