"""What every class of settings says of names and values that it does not take; and messages are bounded."""

from __future__ import annotations

import copy
import inspect
import pickle

import msgspec
import pytest

import asyncdata as ad
from asyncdata import Shuffle
from asyncdata.errors import ConfigError
from tests.support.faults import Program
from tests.support.parts import Settings, by_reason, shortened

OF_SAMPLES = {"Document", "OutcomeTable", "Position", "Sample", "SourceLocation", "SourceStatistics", "Statistics"}
"""What the library makes, many times, and no user does."""


def kinds() -> list[type]:
    """The classes that users make, but for loaders and errors."""
    found = [getattr(ad, name) for name in ad.__all__]
    classes = [one for one in found if isinstance(one, type) and inspect.signature(one).parameters]
    others = (BaseException, str, ad.DataLoader, ad.AsyncDataLoader, ad.TokenizeFn)
    return [one for one in classes if not issubclass(one, others) and one.__name__ not in OF_SAMPLES]


def test_a_name_that_there_is_not_is_refused_with_the_class_and_all_that_it_takes():
    for kind in kinds():
        known = ", ".join(sorted(inspect.signature(kind).parameters))

        with pytest.raises(ConfigError) as refused:
            kind(zzz=1)

        assert str(refused.value) == f"there is no setting 'zzz' of {kind.__name__}; there are {known}"
    assert not any(issubclass(getattr(ad, name), Settings) for name in OF_SAMPLES), "a call more for each"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ad.Shuffle(window_block=3), "did you mean 'window_blocks'"),
        (lambda: ad.PassRate(drop_over=0.9), "did you mean 'drop_above'"),
        (lambda: ad.PackedCollator(max_len=8), "did you mean 'max_length'"),
        (lambda: ad.ChatTokenizeFn("a", max_len=8), "did you mean 'max_length'"),
        (lambda: ad.ChatTokenizeFn("a", truncation=True), "did you mean 'overlong'"),
        (lambda: ad.PackedCollator(overlong="drop"), "did you mean 'truncate_packs'"),
        (lambda: ad.RayExecutor(num_worker=2), "did you mean 'num_workers'"),
        (lambda: ad.Mix({"a": "a"}, temprature=2), "did you mean 'temperature'"),
        (lambda: ad.Shuffle(64), "Shuffle takes its settings each by its name, as in name=value; they are enabled, "),
        (lambda: ad.ChatTokenizeFn("a", "b"), r"at most 1 without a name \(tokenizer\)"),
        (lambda: ad.ChatTokenizeFn("a", tokenizer="b"), "ChatTokenizeFn was given tokenizer twice"),
        (lambda: ad.Mix({"a": "a"}, 3), r"Mix takes its settings at most 1 without a name \(parts\)"),
        (lambda: ad.BadRows(policy="drop"), r"^BadRows: policy='drop': it must be 'raise', 'skip' or 'quarantine'$"),
        (lambda: ad.RowShuffle(part="test"), r"^RowShuffle: part='test': it must be 'train', 'eval' or None$"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_one(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_settings_that_are_missing_are_a_type_error_that_names_them():
    with pytest.raises(TypeError, match=r"^SoftPacking needs max_length; its settings are max_length, window_samples"):
        ad.SoftPacking()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Part needs source; "):
        ad.Part()  # type: ignore[call-arg]


def test_it_is_copied_pickled_replaced_shown_and_decoded_as_any_struct():
    shuffle = Shuffle(window_blocks=3)

    assert copy.copy(shuffle) == copy.deepcopy(shuffle) == shuffle
    assert pickle.loads(pickle.dumps(shuffle)) == shuffle  # noqa: S301 - our own
    assert msgspec.structs.replace(shuffle, window_blocks=4) == Shuffle(window_blocks=4)
    assert msgspec.json.decode(msgspec.json.encode(shuffle), type=Shuffle) == shuffle
    assert repr(shuffle) == "Shuffle(enabled=True, block_bytes=32768, window_blocks=3)"
    assert list(inspect.signature(Shuffle).parameters) == ["enabled", "block_bytes", "window_blocks"]


# What a user's row or function gives may be of any size


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = str(ConfigError(f"AD481 the policy raised {'x' * 9_000_000}; repair it"))

    assert len(text) < 21_000
    assert text.startswith("AD481 the policy raised xxx")
    assert text.endswith("; repair it")
    assert shortened("a" * 30, 30) == "a" * 30
    assert shortened("a" * 20 + "b" * 20, 30) == "a" * 20 + " ... (10 characters left out) ... " + "b" * 10
    assert shortened("a\n" * 20, 30) == "a\n" * 10 + "\n... (10 characters left out) ...\n" + "a\n" * 5


@pytest.mark.parametrize(
    ("drops", "text"),
    [
        ({}, "there was no row"),
        ({"b": 1, "a": 2}, "2 by a, 1 by b"),
        ({f"reason {n}": n for n in range(1, 1012)}, "1002 by reason 1002"),
    ],
)
def test_the_most_frequent_reasons_of_drops_are_named(drops, text):
    assert by_reason(drops).startswith(text)
    assert len(by_reason(drops)) < 300
    assert by_reason(drops).endswith("1,001 other reasons" if len(drops) > 10 else text)


AT_THE_SAME_TIME = """
import sys, threading
import msgspec
from tests.support.parts import prepared

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int, 0), ("b", "dict[str, list[int]] | None", None)])
    kind = msgspec.defstruct(f"Outer{number}", [("inner", inner), ("others", list[inner])])
    start = threading.Barrier(4)

    def convert():
        start.wait()
        msgspec.convert({"inner": {"a": 1}, "others": [{"b": {"c": [2]}}]}, prepared(kind))

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_meet_a_struct_for_the_first_time_do_not_end_the_process():
    """As loaders that are made, or restored, in threads: without ``prepared`` it is a segmentation fault."""
    with Program("-c", AT_THE_SAME_TIME) as program:
        assert program.end() == (0, "")
