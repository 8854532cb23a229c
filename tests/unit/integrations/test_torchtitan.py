"""The dataloader for torchtitan, over stand-ins of the two interfaces that torchtitan has had."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata.integrations.torchtitan as adapter
from asyncdata import ChatTokenizeFn, ConfigError, HardPacking, Mix, Part, SoftPacking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("torch", reason="torch is not installed")

OTHER_TOKENIZER = str(Path(adapter.__file__).parents[1] / "assets/demo_tokenizer")
SHORT, LONG = "2.", "It is " + "two, " * 40
RUNTIME = {"dp_world_size": 1, "dp_rank": 0}
TOKENS = 256


@pytest.fixture(params=["torchtitan.components.data.loader", "torchtitan.components.dataloader"])
def loader_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our class over a stand-in for one of torchtitan's."""

    class BaseDataLoader:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.data", "tyro", "tyro.conf"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["tyro"], "conf", SimpleNamespace(Suppress=object()), raising=False)
    module: Any = ModuleType(request.param)
    module.BaseDataLoader = BaseDataLoader
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.delitem(vars(adapter), "AsyncDataLoader", raising=False)
    yield adapter.AsyncDataLoader
    monkeypatch.delitem(vars(adapter), "AsyncDataLoader", raising=False)


@pytest.fixture
def chats(tmp_path: Path) -> str:
    question = {"role": "user", "content": "1 + 1?"}
    rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in (SHORT, LONG) * 4]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def build(loader_class: Any, small_tokenizer: Path) -> Callable[..., Any]:
    """The loader as torchtitan builds it: with its own tokenizer, and contexts of 64 tokens."""

    def built(**settings: Any) -> Any:
        config = loader_class.Config(num_workers=0, knobs={"shuffle": False, "timeout_s": 240}, **settings)
        tokenizer = SimpleNamespace(tokenizer_path=str(small_tokenizer))
        lengths = {"max_context_length": 64, "num_tokens_per_batch": TOKENS}
        return loader_class(config, **RUNTIME, tokenizer=tokenizer, **lengths)

    return built


def test_a_function_that_is_made_late_has_torchtitans_tokenizer_and_length(
    build: Callable[..., Any], chats: str, small_tokenizer: Path
) -> None:
    got = []

    def make(tokenizer: str, length: int) -> ChatTokenizeFn:
        got.append((tokenizer, length))
        return ChatTokenizeFn(tokenizer, max_length=length)

    loader = build(dataset=chats, make_tokenize_fn=make)
    inputs, labels = next(iter(loader))
    loader.close()

    assert got == [(str(small_tokenizer), 64)]
    assert inputs["input"].shape == labels.shape == (TOKENS,)
    assert int((inputs["positions"] == 0).sum()) >= 4, "the four short rows; the long ones are dropped"


def test_a_function_of_torchtitans_tokenizer_and_length_is_taken(
    build: Callable[..., Any], chats: str, small_tokenizer: Path
) -> None:
    loader = build(dataset=chats, tokenize_fn=ChatTokenizeFn(small_tokenizer, max_length=64))
    next(iter(loader))
    loader.close()


def test_a_function_of_another_tokenizer_is_refused(build: Callable[..., Any], chats: str) -> None:
    with pytest.raises(ConfigError, match=r"AD640 tokenize_fn has the tokenizer in .*demo_tokenizer, and torchtitan"):
        build(dataset=chats, tokenize_fn=ChatTokenizeFn(OTHER_TOKENIZER, max_length=64))


@pytest.mark.parametrize("length", [32, 2048])
def test_a_function_of_another_length_is_refused(
    build: Callable[..., Any], chats: str, small_tokenizer: Path, length: int
) -> None:
    with pytest.raises(ConfigError, match=rf"AD640 tokenize_fn has max_length={length}, and torchtitan's .* 64 tokens"):
        build(dataset=chats, tokenize_fn=ChatTokenizeFn(small_tokenizer, max_length=length))


def test_the_functions_of_a_mixtures_parts_are_compared(build: Callable[..., Any], chats: str) -> None:
    mix = Mix({"math": Part(chats, tokenize_fn=ChatTokenizeFn(OTHER_TOKENIZER))})

    with pytest.raises(ConfigError, match="AD640 tokenize_fn has the tokenizer in"):
        build(dataset=mix)


def test_two_tokenize_functions_are_refused(build: Callable[..., Any], chats: str, small_tokenizer: Path) -> None:
    function = ChatTokenizeFn(small_tokenizer)

    with pytest.raises(ConfigError, match="AD640 tokenize_fn and make_tokenize_fn are both set"):
        build(dataset=chats, tokenize_fn=function, make_tokenize_fn=lambda tokenizer, length: function)


@pytest.mark.parametrize("packing", [SoftPacking(max_length=128), HardPacking(max_length=512)])
def test_a_packing_of_another_length_is_refused(build: Callable[..., Any], chats: str, packing: Any) -> None:
    with pytest.raises(ConfigError, match=rf"AD640 packing has max_length={packing.max_length}, and a batch .* 256"):
        build(dataset=chats, packing=packing)


def test_a_batch_of_torchtitan_0_3_has_rows(loader_class: Any, chats: str, small_tokenizer: Path) -> None:
    config = loader_class.Config(
        dataset=chats, num_workers=0, make_tokenize_fn=lambda tokenizer, length: ChatTokenizeFn(tokenizer)
    )
    tokenizer = SimpleNamespace(tokenizer_path=str(small_tokenizer))
    loader = loader_class(
        config, **RUNTIME, tokenizer=tokenizer, seq_len=128, local_batch_size=2, snapshot_every_n_steps=None
    )
    inputs, labels = next(iter(loader))
    loader.close()

    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 128)
